"""A delayed batch keeps its keys, headers, tokens, times and priorities until it is due (T7, T13, Q1)."""

from __future__ import annotations

from penstock.engines.embedded.schedules import SCHEDULED, Scheduler
from penstock.model.batch import EventBatch
from penstock.model.event import Identity
from penstock.model.settings import Limits
from penstock.server.validation import to_draft
from penstock.wire.message import DraftMeta

TOKENS = [bytes([number]) * 16 for number in range(3)]


def test_a_delayed_batch_is_kept_with_all_its_columns() -> None:
    """T7, T13: it lies under another topic until its time; what is not a column there is a header."""
    keys = [b"a", None, b""]
    batch = EventBatch.build(
        "orders", [b"one", b"", b"three"], keys=keys, headers=[{"x": "y"}, {}, {"z": ""}],
        tokens=TOKENS, times_us=[1, 2, 3], expires_us=[4, 5, 6], priority=[7, 8, 9],
    )  # fmt: skip
    meta = DraftMeta("orders", codec="raw", part=0, partition=0, deliver_at_us=10)
    draft = to_draft(meta, [batch.encode()], Identity(), Limits())
    stored, due_us = Scheduler.__new__(Scheduler).as_delayed(draft)
    assert (stored.topic, stored.codec, stored.count, due_us) == (SCHEDULED, "raw", 3, 10)
    assert list(stored.payloads) == [b"one", b"", b"three"]
    assert [stored.keys, stored.times_us] == [keys, [1, 2, 3]]
    assert stored.tokens is not None
    assert len({*stored.tokens, *TOKENS}) == 6, "an event of another topic may have the same token"
    first, _, third = (dict(each or {}) for each in stored.headers or ())
    assert first.pop("x") == "y"
    assert third.pop("z") == ""
    assert sorted(first.values()) == sorted(["orders", "0", "4", "7", TOKENS[0].hex()])
    assert sorted(third.values()) == sorted(["orders", "0", "6", "9", TOKENS[2].hex()])

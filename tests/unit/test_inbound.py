"""Drafts from a wire: what a batch says must not get lost on the way to the engine (T13, Q1)."""

from __future__ import annotations

from penstock.model.batch import EventBatch
from penstock.model.event import Identity
from penstock.model.settings import Limits
from penstock.server.inbound import inbound
from penstock.wire.message import DraftMeta

TOKENS = [bytes([number]) * 16 for number in range(3)]


def test_a_delayed_batch_becomes_lists_with_all_its_columns() -> None:
    """T13: it is kept under another topic until its time, so its batch is of no use."""
    keys, headers = [b"a", None, b""], [{"x": "y"}, {}, {"z": ""}]
    batch = EventBatch.build(
        "orders", [b"one", b"", b"three"], keys=keys, headers=headers, tokens=TOKENS,
        times_us=[1, 2, 3], expires_us=[4, 5, 6], priority=[7, 8, 9],
    )  # fmt: skip
    meta = DraftMeta("orders", codec="raw", part=0, partition=0, deliver_at_us=10)
    draft = inbound(meta, [batch.encode()], Identity(), Limits())
    assert draft.batch is None
    assert (draft.topic, draft.codec, draft.count) == ("orders", "raw", 3)
    assert (draft.partition, draft.deliver_at_us) == (0, 10)
    assert list(draft.payloads) == [b"one", b"", b"three"]
    assert [draft.keys, draft.tokens] == [keys, TOKENS]
    assert [dict(each or {}) for each in draft.headers or ()] == headers
    assert [draft.times_us, draft.expires_us, draft.priority] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]

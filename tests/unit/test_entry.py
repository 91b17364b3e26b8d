"""Entries: every kind is written and read back as it was."""

from __future__ import annotations

import typing

import msgspec
import pytest

from penstock.core import entry as module
from penstock.core.entry import (
    AnyEntry,
    Entry,
    GroupSpec,
    TopicSpec,
    decode_entries,
    encode_entries,
)
from penstock.core.retry import Retry
from penstock.core.state import State

SAMPLES = [
    module.TopicPut("t", TopicSpec(3, 1.5, 10, True, True, (4, 5))),
    module.TopicGone("t", (1, 2)),
    module.GroupPut(
        "g", GroupSpec(("a.*", "#"), "log", "key", Retry((1,), 2), 3.0, {"h": "v"}, "latest", True)
    ),
    module.GroupGone("g"),
    module.LaneSet("g", "t", 1, 2**62),
    module.Leased("g", "t", 1, 2, 3, 4, 5, "m"),
    module.Acked("g", "t", 1, [1, 2, 5, 1]),
    module.Retried("g", "t", 1, 2, 3, 4, 60_000),
    module.Dead("i", "g", "t", 1, 2, "acme", 5, "why", 9, 0),
    module.DeadReplayed("i"),
    module.DeadPurged("i"),
    module.Committed("g", "t", 1, 7, 3),
    module.Delayed([1, 2]),
    module.Fired([1]),
    module.RecurringPut("r", b"def"),
    module.RecurringGone("r"),
    module.Audited(1, "ann", "op", ["a"], "why", {"x": None, "y": 1}, {"z": "s"}),
    module.SessionPut("s", "c", "acme", "ann", ("admin",), ("a.*",), 5, False),
    module.SessionGone("s"),
    module.Produced("s", 7, [0, 1, 2, 3]),
]


def test_every_kind_comes_back() -> None:
    assert decode_entries(encode_entries(SAMPLES)) == SAMPLES


def test_there_is_a_sample_of_every_kind_and_state_knows_them_all() -> None:
    kinds = set(typing.get_args(AnyEntry))
    assert {type(each) for each in SAMPLES} == kinds == set(Entry.__subclasses__())
    assert set(State()._appliers) == kinds


def test_tags_are_written_down_for_good() -> None:
    tags = {msgspec.msgpack.decode(msgspec.msgpack.encode(each))[0] for each in SAMPLES}
    assert tags == {
        "topic", "topic-gone", "group", "group-gone", "lane", "leased", "acked", "retried", "dead",
        "dead-replayed", "dead-purged", "committed", "delayed", "fired", "recurring",
        "recurring-gone", "audited", "session", "session-gone", "produced",
    }  # fmt: skip


@pytest.mark.parametrize("bad", [b"", b"\xc1", b"\x91\x91\xa4what", b"\x91\x92\xa5acked\x01"])
def test_what_is_no_entry_is_refused(bad: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_entries(bad)

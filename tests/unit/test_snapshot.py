"""Snapshots: the same state as the journal they stand for, or a refusal."""

from __future__ import annotations

import pytest

from penstock.core.entry import (
    Acked,
    Dead,
    DeadReplayed,
    Delayed,
    GroupPut,
    GroupSpec,
    LaneSet,
    Leased,
    Retried,
    TopicGone,
    TopicPut,
    TopicSpec,
    encode_entries,
)
from penstock.core.state import pieces_of
from penstock.log.disk import read_file
from penstock.log.journal import BATCH, CONTROL, GROUP, JournalFrame, encode_group
from penstock.log.memory_disk import MemoryDisk
from penstock.log.snapshot import FOLDER, KEPT, PARTITION_SHIFT, Fold, snapshot_path
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted
from penstock.model.settings import Dedup

ENTRIES = [
    TopicPut("orders", TopicSpec(partitions=2, retention_bytes=7, floors=(3,))),
    TopicPut("old", TopicSpec()),
    TopicGone("old", (9,)),
    GroupPut("billing", GroupSpec(patterns=("orders",), filter={"a": "b"})),
    GroupPut("spark", GroupSpec(patterns=("#",), mode="log")),
    LaneSet("billing", "orders", 1, 0),
    LaneSet("spark", "orders", 1, 5),
    Leased("billing", "orders", 1, 0, 10, 1, 1, "worker"),
    Acked("billing", "orders", 1, [2, 3]),
    Retried("billing", "orders", 1, 7, 1, 1, 1_000),
    Dead("id@billing", "billing", "orders", 1, 8, "acme", 5, "why", 77, 0),
    DeadReplayed("id@billing"),
    Delayed([4, 99, 5, 98]),
]


def frame(kind: int, body: bytes, position: int = 0) -> JournalFrame:
    return JournalFrame(position, kind, memoryview(body), 0, 1)


def tokens(count: int, start: int = 0) -> list[bytes]:
    return [bytes([number + start]) * 16 for number in range(count)]


def batch(offset: int, *, partition: int = 1, count: int = 3) -> EventBatch:
    made = EventBatch.build("orders", [b"x"] * count, tokens=tokens(count, offset))
    made.base_offset, made.partition, made.append_time_us = offset, partition, 1_000 + offset
    return made


def folded() -> Fold:
    fold = Fold(Dedup())
    fold.take(frame(CONTROL, encode_entries(ENTRIES)))
    fold.take(frame(BATCH, batch(10).encode(), 1_000))
    group = b"".join(
        encode_group(
            [(BATCH, [batch(13).encode()]), (CONTROL, [encode_entries([Delayed([6, 97])])])]
        )
    )
    fold.take(frame(GROUP, group, 2_000))
    return fold


def disk() -> MemoryDisk:
    made = MemoryDisk()
    made.make_dir(FOLDER)
    return made


def test_a_snapshot_is_the_state_tokens_and_ends_it_was_made_of() -> None:
    fold, home = folded(), disk()
    fold.save(home)
    again = Fold.load(home, Dedup())
    assert again.position == fold.position
    assert pieces_of(again.state, 0) == pieces_of(fold.state, 0)
    assert again.ends == fold.ends == {"orders": [(0, 0), (16, 1_013)]}
    table = again.table("orders")
    for number, token in enumerate(tokens(6, 10)):
        assert table.find(token) == (1 << PARTITION_SHIFT | 10 + number)
    assert table.find(b"?" * 16) is None


def test_folding_on_after_a_snapshot_is_folding_it_all() -> None:
    once, home = folded(), disk()
    once.save(home)
    again = Fold.load(home, Dedup())
    for fold in (once, again):
        fold.take(frame(BATCH, batch(16).encode(), 3_000))
        fold.take(frame(CONTROL, encode_entries([TopicGone("orders", (0, 19))]), 4_000))
    assert pieces_of(again.state, 0) == pieces_of(once.state, 0)
    assert again.ends == once.ends == {}
    assert again.dedup == once.dedup == {}


def test_an_empty_folder_is_the_beginning_of_time() -> None:
    fold = Fold.load(disk(), Dedup())
    assert fold.position == 0
    assert fold.state.topics == {}


def test_the_newest_two_are_kept() -> None:
    fold, home = folded(), disk()
    for position in (100, 200, 300, 400):
        fold.position = position
        fold.save(home)
    assert [f"{FOLDER}/{name}" for name in home.list(FOLDER)] == [
        snapshot_path(300),
        snapshot_path(400),
    ]
    assert KEPT == 2
    assert Fold.load(home, Dedup()).position == 400


def damaged(data: bytes) -> MemoryDisk:
    home = disk()
    file = home.open(snapshot_path(5), create=True)
    file.append([data])
    file.close()
    return home


def test_every_flipped_byte_and_every_cut_is_refused_by_name() -> None:
    fold, home = folded(), disk()
    fold.save(home)
    data = read_file(home, snapshot_path(fold.position))
    for at in range(len(data)):
        broken = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        for bad in (broken, data[:at]):
            with pytest.raises(Corrupted) as caught:
                Fold.load(damaged(bad), Dedup())
            assert caught.value.path == snapshot_path(5)


def test_with_a_damaged_newest_moved_away_the_one_before_serves() -> None:
    fold, home = folded(), disk()
    fold.position = 100
    fold.save(home)
    file = home.open(snapshot_path(200), create=True)
    file.append([b"rubbish"])
    file.close()
    with pytest.raises(Corrupted):
        Fold.load(home, Dedup())
    home.remove(snapshot_path(200))
    assert Fold.load(home, Dedup()).position == 100

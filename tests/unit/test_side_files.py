"""Side files hold large payloads beside the journal; they are checked when they are read back."""

from __future__ import annotations

import random

import pytest

from penstock.log.disk import UNFINISHED, read_file, write_file
from penstock.log.memory_disk import MemoryDisk
from penstock.log.side_files import FOLDER, PIECE_BYTES, attach, put_aside, side_path
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted


@pytest.fixture
def disk() -> MemoryDisk:
    made = MemoryDisk()
    made.make_dir(FOLDER)
    return made


def aside(disk: MemoryDisk, payload: bytes) -> EventBatch:
    batch = EventBatch.build(
        "orders", [payload], keys=[b"k"], headers=[{"a": "b"}], token_base=b"t" * 16
    )
    assert put_aside(disk, batch) == len(payload)
    batch.base_offset = 7
    return batch


@pytest.mark.parametrize("size", [6_000, PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_a_payload_goes_aside_and_comes_back(disk: MemoryDisk, size: int) -> None:
    payload = random.Random(size).randbytes(size)
    batch = aside(disk, payload)
    assert len(batch.encode()) < 400
    assert batch.side_bytes == len(payload)
    assert read_file(disk, side_path(b"t" * 16)) == payload
    stored = EventBatch.decode(batch.encode())
    whole = attach(disk, stored)
    (event,) = list(whole)
    assert (event.payload, event.key, dict(event.headers), event.offset) == (
        payload, b"k", {"a": "b"}, 7
    )  # fmt: skip
    assert EventBatch.decode(whole.encode()).payloads() == [payload]
    assert whole.side_bytes == 0


def test_others_may_come_before_each_piece(disk: MemoryDisk) -> None:
    seen: list[int] = []
    batch = EventBatch.build("orders", [bytes(3 * PIECE_BYTES + 1)], token_base=b"t" * 16)
    temporary = side_path(b"t" * 16) + UNFINISHED
    put_aside(disk, batch, lambda: seen.append(disk.open(temporary).size()))
    assert seen == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]


def test_a_batch_without_one_is_left_alone(disk: MemoryDisk) -> None:
    batch = EventBatch.build("orders", [b"small"])
    assert attach(disk, batch) is batch


@pytest.mark.parametrize("damage", ["missing", "flipped", "short", "long"])
def test_a_damaged_side_file_is_not_served(disk: MemoryDisk, damage: str) -> None:
    batch = aside(disk, b"payload")
    path = side_path(b"t" * 16)
    disk.remove(path)
    changed = {"flipped": b"paYload", "short": b"payloa", "long": b"payload!"}.get(damage)
    if changed is not None:
        write_file(disk, path, [changed])
    with pytest.raises(Corrupted) as caught:
        attach(disk, EventBatch.decode(batch.encode()))
    assert (caught.value.path, caught.value.offset) == (path, 7)
    assert "Restore" in caught.value.message

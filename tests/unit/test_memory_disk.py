"""What the memory disk adds to the contract of test_disk.py: laziness, a bound, and threads (Y4)."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from penstock.log.memory_disk import LAZY_FROM_BYTES, MemoryDisk, Pages

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reserved_room_is_not_memory() -> None:
    disk = MemoryDisk(capacity_bytes=2048 * MIB)
    before = resident_bytes()
    for name in "abcd":
        file = disk.open(name, create=True)
        file.allocate(256 * MIB)
        file.append([b"x" * 1000])
    assert resident_bytes() - before < 64 * MIB
    assert disk.free_bytes() == 1024 * MIB


def test_a_full_disk_refuses_before_it_changes_anything() -> None:
    disk = MemoryDisk(capacity_bytes=100)
    file = disk.open("a", create=True)
    file.allocate(60)
    other = disk.open("b", create=True)
    for attempt in (
        lambda: other.allocate(41),
        lambda: other.append([b"x" * 41]),
        lambda: other.write_at(40, b"x"),
        lambda: other.truncate(41),
    ):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.ENOSPC
    assert other.size() == 0
    file.append([b"x" * 60])  # reserved room is kept for its owner
    other.append([b"x" * 40])
    assert disk.free_bytes() == 0


def test_room_returns_with_remove_truncate_and_rename() -> None:
    disk = MemoryDisk(capacity_bytes=100)
    for name in "abc":
        disk.open(name, create=True).append([b"x" * 30])
    assert disk.free_bytes() == 10
    handle = disk.open("a", write=True)
    disk.remove("a")
    assert disk.free_bytes() == 40
    handle.append([b"x" * 1000])  # nobody can find it any more, so it no longer counts
    assert disk.free_bytes() == 40
    disk.rename("b", "c")
    assert disk.free_bytes() == 70
    disk.open("c", write=True).truncate(5)
    assert disk.free_bytes() == 95


def test_views_keep_what_a_truncate_cuts() -> None:
    file = MemoryDisk().open("a", create=True)
    file.append([b"hello"])
    view = file.read(0, 5)
    file.truncate(1)
    file.append([b"xxxx"])
    assert bytes(view) == b"hello"
    assert bytes(file.read(0, 5)) == b"hxxxx"


@pytest.mark.parametrize("size", [10, LAZY_FROM_BYTES - 1, LAZY_FROM_BYTES, 9 * MIB])
def test_copies_are_independent(size: int) -> None:
    pages = Pages()
    pages.write(0, b"x" * size)
    twin = pages.copy()
    pages.write(0, b"y")
    assert bytes(twin.read(0, 1)) == b"x"
    assert twin.length == twin.written == size


def test_a_reader_thread_sees_only_whole_appends() -> None:
    """One thread writes and grows the file, another reads: length never runs ahead of bytes."""
    disk = MemoryDisk()
    writer = disk.open("a", create=True)
    reader = disk.open("a")
    done = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        seen = 0
        while not done.is_set():
            size = reader.size()
            tail = reader.read(seen, size - seen)
            if len(tail) != size - seen or bytes(tail).count(b"\0"):
                wrong.append(seen)
            seen = max(0, size - 100)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20_000):
        writer.append([b"x" * 40, b"y" * 30])
    done.set()
    thread.join()
    assert wrong == []
    assert writer.size() == 20_000 * 70

"""What survives a simulated crash, and every fault the simulated disk knows (Y2)."""

from __future__ import annotations

import errno
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log.disk import read_file, write_file
from penstock.testing.simulation.disk import SECTOR_BYTES, Faults, SimCrash, SimDisk
from penstock.testing.simulation.loop import SimClock, SimLoop

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(60)
NOTHING_LOST = Faults(lost=0.0, torn=0.0)
ALL_LOST = Faults(lost=1.0)


def durable_file(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.open(path, create=True)
    file.append([content])
    file.sync()
    disk.sync_dir(path.rpartition("/")[0])
    file.close()


def test_synced_bytes_under_synced_names_always_survive() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.make_dir("x")
        durable_file(disk, "x/a", b"a" * 3000)
        disk.open("x/a", write=True).append([b"b" * 3000])
        content = read_file(disk.crash(), "x/a")
        assert content[:3000] == b"a" * 3000
        assert set(content[3000:]) <= set(b"\0b")


def test_unsynced_bytes_and_names_can_all_be_lost_or_all_be_kept() -> None:
    for faults, bytes_left in ((ALL_LOST, b"one"), (NOTHING_LOST, b"onetwo" + bytes(94))):
        disk = SimDisk(1, faults=faults)
        durable_file(disk, "a", b"one")
        file = disk.open("a", write=True)
        file.append([b"two"])
        file.allocate(100)
        assert read_file(disk.fork(1).crash(), "a") == bytes_left
        disk.rename("a", "b")
        durable = disk.crash()
        assert durable.list("") == (["a"] if faults is ALL_LOST else ["b"])


def test_a_synced_file_without_a_synced_folder_may_vanish() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        file = disk.open("a", create=True)
        file.append([b"x"])
        file.sync()
        outcomes.add(tuple(disk.crash().snapshot().items()))
    assert outcomes == {(), (("a", b"x"),)}


def test_syncing_one_folder_says_nothing_about_another() -> None:
    disk = SimDisk(1, faults=ALL_LOST)
    for folder in ("x", "y"):
        disk.make_dir(folder)
        disk.open(f"{folder}/a", create=True)
    disk.sync_dir("x")
    assert list(disk.crash().snapshot()) == ["x/a"]


def test_a_removed_file_comes_back_until_its_folder_is_synced() -> None:
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        durable_file(disk, "a", b"x")
        disk.remove("a")
        outcomes.add(disk.fork(seed).crash().exists("a"))
        disk.sync_dir("")
        assert not disk.crash().exists("a")
    assert outcomes == {True, False}


def test_a_rename_is_never_half_done() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.make_dir("x")
        disk.make_dir("y")
        durable_file(disk, "x/a", b"moved")
        disk.rename("x/a", "y/a")
        disk.open("x/a", create=True).append([b"new"])
        disk.sync_dir("x")
        after = disk.crash()
        assert after.exists("x/a")
        assert not after.exists("y/a") or read_file(after, "y/a") == b"moved"


def test_every_kind_of_sector_fate_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        disk = SimDisk(seed)
        durable_file(disk, "a", bytes(8 * SECTOR_BYTES))
        file = disk.open("a", write=True)
        for number in range(8):
            file.write_at(number * SECTOR_BYTES, bytes([number + 1]) * SECTOR_BYTES)
        disk.crash()
        counts += disk.counts
    assert counts["crash"] == len(SEEDS)
    for kind in ("lost_sectors", "kept_sectors", "torn_sectors", "reordered_sectors"):
        assert counts[kind] > 10, kind


def test_reordering_means_a_later_write_without_an_earlier_one() -> None:
    outcomes = set()
    for seed in range(200):
        disk = SimDisk(seed, faults=Faults(lost=0.5, torn=0.0))
        durable_file(disk, "a", bytes(2 * SECTOR_BYTES))
        file = disk.open("a", write=True)
        file.write_at(0, b"1")
        file.write_at(SECTOR_BYTES, b"2")
        content = read_file(disk.crash(), "a")
        outcomes.add((content[:1], content[SECTOR_BYTES : SECTOR_BYTES + 1]))
    assert outcomes == {(b"\0", b"\0"), (b"1", b"\0"), (b"\0", b"2"), (b"1", b"2")}


STEP = st.one_of(
    st.tuples(st.just("append"), st.binary(min_size=1, max_size=1500)),
    st.tuples(st.just("write_at"), st.integers(0, 4000), st.binary(min_size=1, max_size=1500)),
    st.tuples(st.just("truncate"), st.integers(0, 4000)),
    st.tuples(st.just("allocate"), st.integers(1, 4000)),
    st.tuples(st.just("sync")),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEP, max_size=20), seed=st.integers(0, 1 << 32))
def test_each_byte_after_a_crash_is_one_that_was_there_since_the_sync(
    steps: list[tuple[str, ...]], seed: int
) -> None:
    """A byte is its durable value, one written since, or zero; none is invented."""
    disk = SimDisk(seed)
    durable_file(disk, "a", b"")
    file = disk.open("a", write=True)
    history: list[bytes] = [b""]
    for name, *arguments in steps:
        if name == "append":
            file.append(arguments)
        else:
            getattr(file, name)(*arguments)
        content = bytes(file.read(0, file.size()))
        history = [content] if name == "sync" else [*history, content]
    after = read_file(disk.crash(), "a")
    sizes = [len(content) for content in history]
    assert min(sizes) <= len(after) <= max(sizes)
    for place, byte in enumerate(after):
        assert byte in {0, *(content[place] for content in history if place < len(content))}
    if len(history) == 1:
        assert after == history[0]


def test_the_same_seed_and_calls_give_the_same_bytes() -> None:
    def run(seed: int) -> tuple[list[dict[str, bytes]], Counter[str]]:
        rng = Random(99)
        disk = SimDisk(seed, faults=Faults(failed_sync=0.1, crash=0.02))
        lives = []
        for _ in range(10):
            try:
                for _ in range(50):
                    path = f"{rng.randrange(5)}"
                    file = disk.open(path, create=not disk.exists(path), write=True)
                    file.append([rng.randbytes(rng.randrange(900))])
                    if rng.random() < 0.5:
                        try:
                            file.sync()
                            disk.sync_dir("")
                        except OSError:
                            pass
            except SimCrash:
                pass
            disk = disk.crash()
            disk.flip_random()
            lives.append(disk.snapshot())
        return lives, disk.counts

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(5)[1]["crash_in_operation"] > 0


def replace(disk: SimDisk, sync: bool) -> None:
    """write_file, or the same with its sync forgotten."""
    if sync:
        write_file(disk, "a", [b"new" * 1000])
        return
    disk.open("a.tmp", create=True).append([b"new" * 1000])
    disk.rename("a.tmp", "a")
    disk.sync_dir("")


@pytest.mark.parametrize("sync", [True, False])
def test_crash_at_every_operation_of_an_atomic_replacement(sync: bool) -> None:
    """The whole point: correct code is never caught out, code without its sync is."""
    found = set()
    for operation in range(1, 7):
        for seed in SEEDS:
            disk = SimDisk(seed)
            durable_file(disk, "a", b"old")
            start = disk.operations
            disk.crash_at(start + operation)
            try:
                replace(disk, sync)
                assert operation > disk.operations - start
            except SimCrash:
                assert disk.counts["crash_in_operation"] == 1
            found.add(read_file(disk.crash(), "a"))
    whole = {b"old", b"new" * 1000}
    assert found == whole if sync else found > whole


def test_a_write_that_dies_is_partly_there() -> None:
    sizes = set()
    for seed in SEEDS:
        disk = SimDisk(seed, faults=NOTHING_LOST)
        durable_file(disk, "a", b"")
        disk.crash_at(disk.operations + 1)
        with pytest.raises(SimCrash):
            disk.open("a", write=True).append([b"x" * 100])
        sizes.add(len(read_file(disk.crash(), "a")))
    assert len(sizes) > 10


def test_everything_from_before_the_crash_is_dead() -> None:
    disk = SimDisk()
    durable_file(disk, "a", b"x")
    file, lock = disk.open("a", write=True), disk.lock()
    told: list[int] = []
    disk.on_power_off = lambda: told.append(1)
    after = disk.crash()
    calls: list[Callable[[], object]] = [
        lambda: file.append([b"y"]),
        lambda: file.write_at(0, b"y"),
        lambda: file.read(0, 1),
        file.sync,
        lambda: file.allocate(10),
        lambda: file.truncate(0),
        file.size,
        file.close,
        lock.release,
        lambda: disk.open("a"),
        lambda: disk.open("b", create=True),
        lambda: disk.list(""),
        lambda: disk.exists("a"),
        lambda: disk.rename("a", "b"),
        lambda: disk.remove("a"),
        lambda: disk.make_dir("x"),
        lambda: disk.sync_dir(""),
        disk.free_bytes,
        disk.lock,
    ]
    for call in calls:
        with pytest.raises(SimCrash):
            call()
    assert not issubclass(SimCrash, Exception)
    assert told == [1]
    assert after.snapshot() == {"a": b"x"}
    after.lock()


def test_data_of_a_failed_sync_may_be_lost_though_the_next_one_works() -> None:
    """fsyncgate: after EIO the pages are clean, and a second fsync has nothing to report."""
    outcomes = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        durable_file(disk, "a", b"")
        file = disk.open("a", write=True)
        file.append([b"1" * SECTOR_BYTES])
        disk.faults = Faults(failed_sync=1.0, torn=0.0)
        with pytest.raises(OSError) as caught:
            file.sync()
        assert caught.value.errno == errno.EIO
        disk.faults = Faults(torn=0.0)
        file.append([b"2" * SECTOR_BYTES])
        file.sync()
        assert file.size() == 2 * SECTOR_BYTES
        content = read_file(disk.crash(), "a")
        assert content[SECTOR_BYTES:] == b"2" * SECTOR_BYTES
        outcomes.add(content[:1])
        assert disk.counts["failed_sync"] == 1
    assert outcomes == {b"\0", b"1"}


def test_a_failed_folder_sync_leaves_its_names_in_doubt() -> None:
    disk = SimDisk(1, faults=Faults(failed_sync=1.0, lost=1.0))
    disk.open("a", create=True)
    with pytest.raises(OSError):
        disk.sync_dir("")
    assert not disk.crash().exists("a")


def test_a_full_disk_takes_what_fits_and_recovers() -> None:
    disk = SimDisk(1, faults=ALL_LOST, capacity_bytes=1000)
    durable_file(disk, "a", b"x" * 900)
    file = disk.open("b", create=True)
    with pytest.raises(OSError) as caught:
        file.append([b"y" * 150])
    assert caught.value.errno == errno.ENOSPC
    assert (file.size(), disk.free_bytes()) == (100, 0)
    with pytest.raises(OSError):
        file.allocate(101)
    disk.capacity_bytes = 1100
    file.append([b"y" * 50])
    file.allocate(200)
    disk.remove("a")
    assert disk.free_bytes() == 900
    assert disk.counts["full_disk"] == 2
    after = disk.crash()
    assert after.free_bytes() == 200  # "a" is back, "b" never was
    after.open("a", write=True).append([b"x"])
    assert after.free_bytes() == 199


def test_bits_flip_at_rest_and_views_taken_before_stay_good() -> None:
    disk = SimDisk(1)
    disk.make_dir("x")
    durable_file(disk, "a", b"abc")
    durable_file(disk, "x/b", b"abc")
    view = disk.open("a").read(0, 3)
    disk.flip("a", 1, 0)
    assert (read_file(disk, "a"), bytes(view)) == (b"acc", b"abc")
    path, offset, bit = disk.flip_random("x/") or ("", 0, 0)
    assert path == "x/b"
    assert read_file(disk.crash(), "x/b")[offset] == b"abc"[offset] ^ (1 << bit)
    assert disk.flip_random("y/") is None
    assert disk.counts["bit_flip"] == 2


def test_a_lost_file_does_not_come_back() -> None:
    disk = SimDisk(1, faults=NOTHING_LOST)
    durable_file(disk, "a", b"x")
    disk.open("b", create=True)
    disk.lose("a")
    disk.lose("b")
    assert disk.list("") == []
    assert disk.crash().list("") == []
    assert disk.counts["lost_file"] == 2


def test_forks_try_other_outcomes_and_leave_the_original_alone() -> None:
    disk = SimDisk(1)
    durable_file(disk, "a", b"old" * 1000)
    disk.open("a", write=True).write_at(0, b"new" * 1000)
    disk.open("b", create=True)
    outcomes = {tuple(disk.fork(seed).crash().snapshot().items()) for seed in range(30)}
    assert len(outcomes) > 10
    assert disk.snapshot() == {"a": b"new" * 1000, "b": b""}
    assert disk.fork(3).crash().snapshot() == disk.fork(3).crash().snapshot()


def test_slow_operations_take_simulated_time() -> None:
    clock = SimClock(SimLoop())
    disk = SimDisk(1, clock, Faults(slow=1.0, slow_s=2.0))
    durable_file(disk, "a", b"x")
    assert clock.monotonic() == 2.0 * disk.operations
    assert disk.counts["slow"] == disk.operations


def test_a_seed_of_operations_and_crashes_does_not_depend_on_reserved_size() -> None:
    """A reserved journal of 256 MiB costs what is written, crash after crash."""
    disk = SimDisk(1)
    durable_file(disk, "a", b"")
    for _ in range(20):
        file = disk.open("a", write=True)
        file.truncate(disk.operations)
        file.allocate(256 << 20)
        file.sync()
        for _ in range(100):
            file.append([b"x" * 300])
        disk = disk.crash()
    assert disk.counts["crash"] == 20

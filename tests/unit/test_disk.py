"""The contract of `Disk` and `File`, the same for the real, the memory and the simulated one (Y2)."""

from __future__ import annotations

import errno
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.log.disk import IOV_MAX, Disk, RealDisk, read_file, write_file
from penstock.log.memory_disk import MemoryDisk
from penstock.model.errors import FolderLocked
from penstock.testing.simulation.disk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(params=["real", "memory", "simulated"])
def make_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Disk]:
    roots = iter(range(10_000))

    def real() -> Disk:
        root = tmp_path / str(next(roots))
        root.mkdir()
        return RealDisk(root)

    kinds: dict[str, Callable[[], Disk]] = {
        "real": real,
        "memory": MemoryDisk,
        "simulated": lambda: SimDisk(seed=1),
    }
    return kinds[request.param]


@pytest.fixture
def disk(make_disk: Callable[[], Disk]) -> Disk:
    return make_disk()


def test_appends_follow_each_other_and_reads_see_them(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"one", bytearray(b"two"), memoryview(b"three")])
    file.append([])
    file.append([b""])
    file.append([b"!"])
    assert bytes(file.read(0, 100)) == b"onetwothree!"
    assert file.size() == 12
    file.sync()
    file.close()
    assert read_file(disk, "a") == b"onetwothree!"


def test_more_parts_than_one_system_call_takes(disk: Disk) -> None:
    parts = [str(n).encode() for n in range(3 * IOV_MAX + 7)]
    file = disk.open("a", create=True)
    file.append(parts)
    assert bytes(file.read(0, file.size())) == b"".join(parts)


def test_reopened_file_appends_at_its_end(disk: Disk) -> None:
    write_file(disk, "a", [b"one"])
    file = disk.open("a", write=True)
    file.append([b"two"])
    assert read_file(disk, "a") == b"onetwo"


def test_allocate_adds_zeros_and_leaves_the_append_position(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"ab"])
    file.allocate(10)
    file.allocate(5)
    assert file.size() == 10
    file.append([b"cd"])
    assert bytes(file.read(0, 100)) == b"abcd" + bytes(6)
    file.append([b"e" * 20])
    assert file.size() == 24


def test_write_at_overwrites_and_may_leave_a_gap(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"hello"])
    file.write_at(1, b"EL")
    file.write_at(8, b"x")
    file.append([b"!"])
    assert bytes(file.read(0, 100)) == b"hELlo!" + bytes(2) + b"x"


def test_truncate_cuts_extends_and_moves_the_append_position(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"hello"])
    file.truncate(2)
    file.append([b"y"])
    assert read_file(disk, "a") == b"hey"
    file.truncate(5)
    file.append([b"!"])
    assert read_file(disk, "a") == b"hey" + bytes(2) + b"!"
    file.truncate(0)
    assert file.size() == 0


def test_cut_bytes_do_not_come_back(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"secret"])
    file.truncate(1)
    file.allocate(6)
    assert read_file(disk, "a") == b"s" + bytes(5)


def test_reads_end_at_the_end_of_the_file(disk: Disk) -> None:
    file = disk.open("a", create=True)
    assert bytes(file.read(0, 10)) == b""
    file.append([b"hello"])
    assert bytes(file.read(3, 10)) == b"lo"
    assert bytes(file.read(5, 10)) == b""
    assert bytes(file.read(50, 10)) == b""
    assert bytes(file.read(1, 0)) == b""


def test_views_live_through_later_appends(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.append([b"hello"])
    view = file.read(0, 5)
    for _ in range(50):
        file.append([b"x" * 10_000])
    assert bytes(view) == b"hello"
    assert view.readonly


def test_a_second_handle_sees_what_the_first_writes(disk: Disk) -> None:
    writer = disk.open("a", create=True)
    reader = disk.open("a")
    assert bytes(reader.read(0, 10)) == b""
    writer.append([b"one"])
    assert bytes(reader.read(0, 10)) == b"one"
    writer.append([b"two"])
    assert bytes(reader.read(0, 10)) == b"onetwo"


def test_a_reading_handle_cannot_write(disk: Disk) -> None:
    write_file(disk, "a", [b"one"])
    file = disk.open("a")
    with pytest.raises(OSError) as caught:
        file.append([b"x"])
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError):
        file.write_at(0, b"x")
    assert read_file(disk, "a") == b"one"


def test_a_closed_file_takes_nothing_and_closes_twice(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.close()
    file.close()
    with pytest.raises(OSError) as caught:
        file.append([b"x"])
    assert caught.value.errno == errno.EBADF


def test_open_says_what_is_missing_or_in_the_way(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("a")
    with pytest.raises(FileNotFoundError):
        disk.open("a", write=True)
    with pytest.raises(FileNotFoundError):
        disk.open("missing/a", create=True)
    disk.open("a", create=True).close()
    with pytest.raises(FileExistsError):
        disk.open("a", create=True)


def test_folders_are_made_with_parents_and_listed_sorted(disk: Disk) -> None:
    disk.make_dir("x/y")
    disk.make_dir("x/y")
    assert disk.list("missing") == []
    assert disk.list("x") == ["y"]
    for name in ("c", "a", "b"):
        disk.open(f"x/y/{name}", create=True).close()
    assert disk.list("x/y") == ["a", "b", "c"]
    disk.sync_dir("x/y")
    disk.sync_dir("")
    with pytest.raises(FileNotFoundError):
        disk.sync_dir("z")
    with pytest.raises(FileExistsError):
        disk.make_dir("x/y/a")


def test_rename_moves_over_the_target(disk: Disk) -> None:
    disk.make_dir("x")
    write_file(disk, "a", [b"new"])
    write_file(disk, "x/b", [b"old"])
    reader = disk.open("x/b")
    disk.rename("a", "x/b")
    assert not disk.exists("a")
    assert disk.exists("x/b")
    assert read_file(disk, "x/b") == b"new"
    assert bytes(reader.read(0, 10)) == b"old"
    disk.rename("x/b", "x/b")
    assert read_file(disk, "x/b") == b"new"
    with pytest.raises(FileNotFoundError):
        disk.rename("a", "c")


def test_a_failed_rename_keeps_the_source(disk: Disk) -> None:
    write_file(disk, "a", [b"kept"])
    with pytest.raises(FileNotFoundError):
        disk.rename("a", "missing/a")
    assert read_file(disk, "a") == b"kept"


def test_remove_hides_the_name_and_keeps_open_handles(disk: Disk) -> None:
    write_file(disk, "a", [b"one"])
    file = disk.open("a", write=True)
    disk.remove("a")
    assert not disk.exists("a")
    file.append([b"two"])
    assert bytes(file.read(0, 10)) == b"onetwo"
    with pytest.raises(FileNotFoundError):
        disk.remove("a")
    disk.open("a", create=True).close()
    assert read_file(disk, "a") == b""


def test_write_file_replaces_whole_files(disk: Disk) -> None:
    disk.make_dir("x")
    disk.open("x/a.tmp", create=True).append([b"left over"])
    write_file(disk, "x/a", [b"one"])
    write_file(disk, "x/a", [b"two", b"three"])
    assert read_file(disk, "x/a") == b"twothree"
    assert disk.list("x") == ["a"]


def test_one_writer_holds_the_lock(disk: Disk) -> None:
    lock = disk.lock()
    with pytest.raises(FolderLocked) as caught:
        disk.lock()
    assert caught.value.holder
    lock.release()
    lock.release()
    disk.lock().release()


def test_there_is_room(disk: Disk) -> None:
    assert disk.free_bytes() > 1 << 20


STEP = st.one_of(
    st.tuples(st.just("append"), st.lists(st.binary(max_size=700), max_size=4)),
    st.tuples(st.just("write_at"), st.integers(0, 3000), st.binary(max_size=700)),
    st.tuples(st.just("truncate"), st.integers(0, 3000)),
    st.tuples(st.just("allocate"), st.integers(1, 3000)),
    st.tuples(st.just("sync")),
)


class Model:
    """The contract of a `File` in its plainest form."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.end = 0

    def append(self, parts: list[bytes]) -> None:
        for part in parts:
            self.write_at(self.end, part)
            self.end += len(part)

    def write_at(self, offset: int, data: bytes) -> None:
        if data:
            self.allocate(offset + len(data))
            self.data[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        self.allocate(size)
        del self.data[size:]
        self.end = size

    def allocate(self, size: int) -> None:
        self.data.extend(bytes(max(0, size - len(self.data))))

    def sync(self) -> None:
        pass


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEP, max_size=25))
def test_any_sequence_of_writes_gives_the_same_bytes(
    make_disk: Callable[[], Disk], steps: list[tuple[str, ...]]
) -> None:
    file, model = make_disk().open("a", create=True), Model()
    for name, *arguments in steps:
        getattr(file, name)(*arguments)
        getattr(model, name)(*arguments)
        assert file.size() == len(model.data)
    assert bytes(file.read(0, len(model.data) + 1)) == model.data
    file.close()


def test_a_part_that_rests_is_read_again_as_it_was(make_disk: Callable[[], Disk]) -> None:
    disk = make_disk()
    file = disk.open("f", create=True)
    data = bytes(range(256)) * 256
    file.append([data])
    view = file.read(0, len(data))
    assert bytes(view) == data
    for offset, size in ((0, len(data)), (1, 5_000), (100, 10), (60_000, 10_000)):
        file.rest(offset, size)
    assert bytes(view) == data
    assert bytes(file.read(4_000, 300)) == data[4_000:4_300]
    file.close()


def test_memory_of_a_resting_part_is_given_back(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("f", create=True)
    size = 32 << 20
    file.append([bytes(size)])

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(each.split()[1]) for each in lines if each.startswith("RssFile")) << 10

    zlib.crc32(file.read(0, size))
    before = mapped()
    file.rest(0, size)
    assert mapped() < before - size // 2
    file.close()


def test_written_leaves_out_allocated_room(make_disk: Callable[[], Disk]) -> None:
    file = make_disk().open("a", create=True)
    file.allocate(1 << 20)
    file.append([b"x" * 10])
    file.write_at(1 << 19, b"y")
    parts = list(file.written(0))
    assert all(start < end <= 1 << 20 for start, end in parts)
    for at in (0, 9, 1 << 19):
        assert any(start <= at < end for start, end in parts)
    assert list(file.written(1 << 20)) in ([], [(1 << 20, 1 << 20)])


def test_the_real_disk_knows_holes_from_data(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).open("a", create=True)
    file.allocate(8 << 20)
    file.append([b"x" * 10])
    covered = sum(end - start for start, end in file.written(0))
    assert 10 <= covered < 4 << 20

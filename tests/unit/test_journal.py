"""The journal: rolling, room, the watermark, and a failed sync that is never forgiven."""

from __future__ import annotations

import errno
import itertools
import struct

import msgspec
import pytest

from penstock.log.journal import (
    BATCH,
    CONTROL,
    FILE_HEADER,
    FORMAT,
    GROUP,
    SLACK_BYTES,
    SPARE,
    WATERMARK,
    FileHeader,
    Journal,
    JournalReader,
    Watermark,
    batches_in,
    encode_group,
    file_bases,
    file_name,
    frames,
    sealed_batches,
)
from penstock.log.memory_disk import MemoryDisk
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, DiskFull, WriterFailed
from penstock.model.settings import Journal as JournalSettings
from penstock.testing.simulation.disk import Faults, SimDisk

MIB = 1 << 20


def batch(payload: bytes = b"x", offset: int = 0) -> EventBatch:
    made = EventBatch.build("orders", [payload])
    made.base_offset = offset
    return made


def read_all(disk, base: int, end: int):
    file = disk.open(file_name(base))
    try:
        return [
            (frame.position, frame.kind, bytes(frame.body), frame.durable, frame.epoch)
            for frame in frames(file.read(0, file.size()), base, base, end)
        ]
    finally:
        file.close()


# -- writing --------------------------------------------------------------------------------------


def test_the_first_commit_begins_a_file_with_its_header(folder) -> None:
    home = folder()
    commit = home.commit([(BATCH, batch().encode_parts())], now_us=77)
    assert file_bases(home.disk) == [0]
    found = read_all(home.disk, 0, commit.end)
    assert [kind for _, kind, *_ in found] == [FILE_HEADER, BATCH]
    header = msgspec.msgpack.decode(found[0][2], type=FileHeader)
    assert header == FileHeader(FORMAT, 1, 0, 77)
    assert home.journal.durable == home.journal.position == commit.end


def test_every_frame_says_how_far_the_journal_was_durable_before_it(folder) -> None:
    home = folder()
    first = home.commit([(CONTROL, [b"a"])])
    second = home.commit([(CONTROL, [b"b"])], sync=False)
    third = home.commit([(CONTROL, [b"c"])])
    durable = {position: at for position, _, _, at, _ in read_all(home.disk, 0, third.end)}
    assert durable[second.start] == durable[third.start] == first.end
    assert durable[0] == 0


def test_positions_are_contiguous_across_files(folder) -> None:
    home = folder()
    ends = [home.commit([(BATCH, batch(b"x" * 300_000).encode_parts())]).end for _ in range(12)]
    bases = file_bases(home.disk)
    assert len(bases) >= 3
    position = 0
    for base, following in zip(bases, [*bases[1:], ends[-1]], strict=True):
        assert base == position
        for start, *_ in (found := read_all(home.disk, base, following)):
            assert start >= position
        position = following
        assert found[0][1] == FILE_HEADER
    assert position == home.journal.position


def test_closed_files_give_their_unused_room_back(folder) -> None:
    home = folder()
    for _ in range(8):
        home.commit([(BATCH, batch(b"x" * 300_000).encode_parts())])
    bases = file_bases(home.disk)
    for base, following in itertools.pairwise(bases):
        file = home.disk.open(file_name(base))
        assert file.size() == following - base
        file.close()


def test_a_file_rolls_when_it_is_old(folder, small) -> None:
    home = folder(settings=small(journal__roll_after_s=10.0))
    home.commit([(BATCH, batch(b"x" * SLACK_BYTES).encode_parts())], now_us=1_000_000)
    home.commit([(CONTROL, [b"a"])], now_us=10_000_000)
    assert len(file_bases(home.disk)) == 1
    home.commit([(CONTROL, [b"b"])], now_us=11_000_001)
    assert len(file_bases(home.disk)) == 2


def test_an_old_but_nearly_empty_file_does_not_roll(folder, small) -> None:
    home = folder(settings=small(journal__roll_after_s=1.0))
    for second in range(10):
        home.commit([(CONTROL, [b"a"])], now_us=second * 5_000_000)
    assert len(file_bases(home.disk)) == 1


def test_there_is_always_a_spare_file_before_the_active_one_is_full(folder) -> None:
    home = folder()
    home.commit([(CONTROL, [b"a"])])
    wanted = home.journal.spare_wanted(100)
    assert wanted == MIB + SLACK_BYTES
    home.journal.prepare(wanted)
    assert home.disk.exists(SPARE)
    assert home.journal.spare_wanted(100) == 0
    kept = MIB // 4
    assert home.journal.spare_wanted(3 * MIB) == 3 * MIB + kept + SLACK_BYTES


@pytest.mark.parametrize("reserve", [True, False])
def test_a_file_made_for_a_commit_has_room_for_it(folder, reserve: bool) -> None:
    """Beside what is kept back: else a commit that large would wait for ever, on an empty disk."""
    journal = folder().journal
    journal.prepare(journal.spare_wanted(3 * MIB))
    commit = journal.begin(0, 3 * MIB)
    assert commit.roll is not None
    assert journal.fits(commit, 3 * MIB, reserve=reserve)


def test_a_commit_larger_than_a_file_gets_a_file_of_its_size(folder) -> None:
    home = folder()
    commit = home.commit([(BATCH, batch(b"x" * 3 * MIB).encode_parts())])
    assert len(commit) > 3 * MIB
    assert [kind for _, kind, *_ in read_all(home.disk, 0, commit.end)] == [FILE_HEADER, BATCH]


def test_publishes_leave_the_reserve_to_acks_and_these_some_to_operators() -> None:
    disk = MemoryDisk()
    disk.make_dir("journal")
    journal = Journal(disk, JournalSettings(file_bytes=MIB), position=0, epoch=1)
    journal.prepare(MIB + SLACK_BYTES)
    commit = journal.begin(1, 100)
    room = MIB + SLACK_BYTES - commit.end
    reserve = MIB // 4  # the smaller of reserve_bytes and a quarter of a file
    assert journal.fits(commit, room - reserve)
    assert not journal.fits(commit, room - reserve + 1)
    assert journal.fits(commit, room - reserve // 4, reserve=True)
    assert not journal.fits(commit, room - reserve // 4 + 1, reserve=True)
    assert journal.fits(commit, room, last=True)
    assert not journal.fits(commit, room + 1, last=True)
    journal.prepare(MIB + SLACK_BYTES)  # with a spare file there is no need to hold back
    assert journal.fits(commit, room)


def test_a_full_disk_shows_before_anything_is_accepted() -> None:
    disk = SimDisk(capacity_bytes=MIB)
    disk.make_dir("journal")
    journal = Journal(disk, JournalSettings(file_bytes=MIB), position=0, epoch=1)
    with pytest.raises(DiskFull) as caught:
        journal.prepare(MIB + SLACK_BYTES)
    assert caught.value.needed_bytes == MIB + SLACK_BYTES
    assert not disk.exists(SPARE)
    assert journal.failed is None
    disk.capacity_bytes = 4 * MIB
    journal.prepare(MIB + SLACK_BYTES)
    assert disk.exists(SPARE)


def test_closing_removes_the_spare_file_and_cuts_the_active_one(folder) -> None:
    home = folder()
    end = home.commit([(CONTROL, [b"a"])]).end
    home.journal.prepare(home.journal.spare_wanted(100))
    home.journal.close()
    assert not home.disk.exists(SPARE)
    file = home.disk.open(file_name(0))
    assert file.size() == end
    file.close()


# -- failure --------------------------------------------------------------------------------------


def test_a_failed_fsync_is_fatal_and_nothing_is_retried(folder) -> None:
    disk = SimDisk()
    home = folder(disk)
    home.commit([(CONTROL, [b"kept"])])
    watermark = Watermark(disk, write=False)
    durable, seen = home.journal.durable, watermark.read()
    disk.faults = Faults(failed_sync=1.0)
    with pytest.raises(WriterFailed) as caught:
        home.commit([(CONTROL, [b"lost"])])
    assert caught.value.errno == errno.EIO
    disk.faults = Faults()  # the disk works again, and that must not matter
    operations = disk.operations
    commit = home.journal.begin(1, 100)
    commit.add(CONTROL, [b"later"])
    for _ in range(3):
        with pytest.raises(WriterFailed):
            home.journal.write(commit, sync=True)
        with pytest.raises(WriterFailed):
            home.journal.sync()
    assert disk.operations == operations, "the disk was touched after the failure"
    assert home.journal.durable == durable
    assert watermark.read() == seen
    home.journal.close()


def test_a_failed_sync_of_interval_mode_is_fatal_too(folder) -> None:
    disk = SimDisk()
    home = folder(disk)
    home.commit([(CONTROL, [b"a"])], sync=False)
    disk.faults = Faults(failed_sync=1.0)
    with pytest.raises(WriterFailed):
        home.journal.sync()
    disk.faults = Faults()
    with pytest.raises(WriterFailed):
        home.journal.sync()
    assert home.journal.durable == 0


def test_a_failure_while_rolling_is_fatal(folder) -> None:
    disk = SimDisk()
    home = folder(disk)
    home.commit([(BATCH, batch(b"x" * MIB).encode_parts())])
    home.journal.prepare(home.journal.spare_wanted(100))
    disk.faults = Faults(failed_sync=1.0)
    commit = home.journal.begin(1, 100)
    assert commit.roll is not None
    with pytest.raises(WriterFailed):
        home.journal.write(commit, sync=True)


# -- watermark ------------------------------------------------------------------------------------


def fresh_watermark() -> tuple[MemoryDisk, Watermark]:
    disk = MemoryDisk()
    disk.make_dir("journal")
    return disk, Watermark(disk, write=True)


def test_the_watermark_begins_at_zero_and_moves() -> None:
    disk, mark = fresh_watermark()
    assert mark.read() == 0
    for position in (10, 20, 30):
        mark.publish(position, 1)
        assert Watermark(disk, write=False).read() == position


@pytest.mark.parametrize("torn", range(1, 20))
def test_a_torn_watermark_leaves_the_older_one(torn: int) -> None:
    disk, mark = fresh_watermark()
    mark.publish(0x0102030405060708, 1)
    mark.publish(0x1112131415161718, 2)
    slot = struct.pack("<QQ", 0x2122232425262728, 3)
    file = disk.open(WATERMARK, write=True)
    file.write_at(0, slot[:torn])  # the next in turn is the first slot again
    assert mark.read() == 0x1112131415161718
    file.write_at(512, b"\xff" * torn)
    assert mark.read() == 0
    file.truncate(5)
    assert Watermark(disk, write=False).read() == 0


# -- reading --------------------------------------------------------------------------------------


def test_a_reader_finds_batches_alone_and_in_groups(folder) -> None:
    home = folder()
    alone = batch(b"alone", 5)
    grouped = [batch(b"one", 6), batch(b"two", 7)]
    body = encode_group([(BATCH, each.encode_parts()) for each in grouped] + [(CONTROL, [b"\x90"])])
    commit = home.commit([(BATCH, alone.encode_parts()), (GROUP, body)])
    reader = JournalReader(home.disk)
    found = {}
    file = home.disk.open(file_name(0))
    for frame in frames(file.read(0, file.size()), 0, 0, commit.end):
        for inner, _ in batches_in(frame):
            read = reader.batch(0, frame.position, inner)
            found[read.base_offset] = read.payloads()
    assert found == {5: [b"alone"], 6: [b"one"], 7: [b"two"]}
    assert [each.base_offset for each in sealed_batches(home.disk, 0, commit.end)] == [5, 6, 7]


def test_a_damaged_entry_is_not_served(folder, files_of, disk_with) -> None:
    home = folder()
    commit = home.commit([(BATCH, batch(b"precious").encode_parts())])
    files = files_of(home.disk)
    path = file_name(0)
    files[path] = files[path].replace(b"precious", b"PRECIOUS")
    disk = disk_with(files)
    position = commit.entries[-1][0]
    with pytest.raises(Corrupted) as caught:
        JournalReader(disk).batch(0, position, 0)
    assert (caught.value.path, caught.value.position) == (path, position)
    with pytest.raises(Corrupted) as caught:
        list(sealed_batches(disk, 0, commit.end))
    assert (caught.value.path, caught.value.position) == (path, position)


def test_a_missing_file_is_named(folder) -> None:
    home = folder()
    with pytest.raises(Corrupted) as caught:
        JournalReader(home.disk).view(4_096)
    assert caught.value.path == file_name(4_096)

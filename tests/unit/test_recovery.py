"""Recovery: an interrupted write is cut off, everything else that does not fit is refused (Y1, T6)."""

from __future__ import annotations

import random

import msgspec
import pytest

from penstock.core.entry import (
    Acked,
    Audited,
    GroupPut,
    GroupSpec,
    LaneSet,
    Leased,
    TopicPut,
    TopicSpec,
    encode_entries,
)
from penstock.log.journal import (
    BATCH,
    CONTROL,
    FILE_HEADER,
    GROUP,
    SPARE,
    WATERMARK,
    FileHeader,
    encode_frame,
    encode_group,
    file_bases,
    file_name,
    frames,
)
from penstock.log.memory_disk import MemoryDisk
from penstock.log.recovery import Recovery, check_folder, open_for_writing
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, FormatTooNew, NotADataFolder

SETUP = encode_entries(
    [
        TopicPut("orders", TopicSpec()),
        GroupPut("billing", GroupSpec(patterns=("orders",))),
        LaneSet("billing", "orders", 0, 0),
    ]
)


def batch(offset: int, payload: bytes | None = None) -> EventBatch:
    made = EventBatch.build("orders", [payload or b"event %d" % offset])
    made.base_offset, made.append_time_us = offset, 1_000 + offset
    return made


def written(folder, count: int = 4, **options):
    """A folder with one event in each commit; the last commit is on disk and unacknowledged."""
    home = folder(**options)
    home.commit([(CONTROL, [SETUP])])
    for offset in range(count):
        last = offset == count - 1
        leased = Leased("billing", "orders", 0, offset, 1, 1, offset + 1, "worker")
        entries = [
            (BATCH, batch(offset).encode_parts()),
            (CONTROL, [encode_entries([leased])]),
        ]
        commit = home.commit(entries, sync=not last)
    return home, commit


def events(recovered) -> list[bytes]:
    _, end = recovered.log.bounds("orders", 0)
    offset, found = 0, []
    while offset < end:
        for each in recovered.log.read("orders", 0, offset, 100):
            found += each.payloads()
            offset = each.end_offset
    return found


def reopened(disk, home):
    return open_for_writing(disk, home.settings)


def test_a_folder_comes_back_with_events_state_and_the_next_epoch(folder) -> None:
    home, commit = written(folder)
    home.journal.close()
    found = reopened(home.disk, home)
    assert events(found) == [b"event 0", b"event 1", b"event 2", b"event 3"]
    assert found.position == commit.end
    assert found.epoch == 1
    assert found.torn_bytes == 0
    assert found.fold.state.groups["billing"].ledgers["orders", 0].outstanding() == 4
    again = folder(home.disk, home.settings)
    again.commit([(BATCH, batch(4).encode_parts())])
    assert again.journal.epoch == 2
    assert file_bases(home.disk) == [0, commit.end]
    again.journal.close()
    assert len(events(reopened(home.disk, home))) == 5


FILLS = {
    "cut": lambda data, at: data[:at],
    "zeros": lambda data, at: data[:at] + bytes(len(data) - at),
    "garbage": lambda data, at: data[:at] + random.Random(at).randbytes(len(data) - at),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_tail_torn_at_every_byte_gives_exactly_the_acknowledged_prefix(
    folder, files_of, disk_with, fill: str
) -> None:
    home, commit = written(folder)
    files, path = files_of(home.disk), file_name(0)
    whole = files[path][: commit.end + 64]
    frame_ends = [commit.start, *(position for position, _, _ in commit.entries[1:]), commit.end]
    for at in range(commit.start, commit.end):
        disk = disk_with({**files, path: FILLS[fill](whole, at)})
        found = reopened(disk, home)
        expected = max(end for end in frame_ends if end <= at)
        if found.position != expected:
            # Only the zeros that fill a frame up may be what was lost.
            assert set(whole[at : found.position]) <= {0}
        assert events(found)[:3] == [b"event 0", b"event 1", b"event 2"]
        assert len(events(found)) == 3 + (found.position > commit.start)
        file = disk.open(path)
        assert file.size() == found.position, "the torn tail is still there"
        file.close()
        # What was found is found again: recovery is stable.
        assert reopened(disk, home).position == found.position


def test_torn_bytes_are_counted(folder, files_of, disk_with) -> None:
    home, commit = written(folder)
    files, path = files_of(home.disk), file_name(0)
    disk = disk_with({**files, path: files[path][: commit.start + 20]})
    assert 0 < reopened(disk, home).torn_bytes <= 20


def refused(disk, home, files_of) -> Corrupted:
    """Open a damaged folder: it must be refused, and left exactly as it was."""
    before = files_of(disk)
    with pytest.raises(Corrupted) as caught:
        reopened(disk, home)
    assert files_of(disk) == before, "a refused folder was changed"
    return caught.value


def frame_around(data: bytes, at: int):
    """The whole frame that holds a byte, or None when there is none any more."""
    whole = frames(memoryview(bytes(data)), 0, 0, len(data))
    return next((frame for frame in whole if frame.end > at), None)


def test_every_flipped_bit_below_the_watermark_is_refused_with_its_place(
    folder, files_of, disk_with
) -> None:
    home, last = written(folder)
    files, path = files_of(home.disk), file_name(0)
    data = files[path]
    harmless = 0
    for at in range(0, last.start, 7):
        bit = at % 8
        broken = bytearray(data)
        broken[at] ^= 1 << bit
        disk = disk_with({**files, path: bytes(broken)})
        if frame_around(broken, at) is not None:
            # Zeros that fill a frame up carry nothing, so nothing is lost with them.
            assert data[at] == 0
            assert events(reopened(disk, home))[:3] == [b"event 0", b"event 1", b"event 2"]
            harmless += 1
            continue
        error = refused(disk, home, files_of)
        assert error.path == path
        assert error.position <= at
    assert harmless < last.start // 7 // 10


def test_without_the_watermark_a_hole_is_known_by_the_frames_behind_it(
    folder, files_of, disk_with
) -> None:
    home, last = written(folder)
    files, path = files_of(home.disk), file_name(0)
    del files[WATERMARK]
    broken = bytearray(files[path])
    at = files[path].index(b"event 1")
    broken[at] ^= 1
    error = refused(disk_with({**files, path: bytes(broken)}), home, files_of)
    assert error.path == path
    assert error.position <= at < last.start


def test_the_stated_limit_a_flip_in_the_last_commit_after_a_power_failure_looks_torn(
    folder, files_of, disk_with
) -> None:
    """docs/guide/durability.md: nothing behind the last commit can tell that it was whole."""
    home, last = written(folder)
    files, path = files_of(home.disk), file_name(0)
    del files[WATERMARK]
    files[path] = files[path].replace(b"event 3", b"EVENT 3")
    found = reopened(disk_with(files), home)
    assert events(found) == [b"event 0", b"event 1", b"event 2"]
    assert found.position == last.start


# -- missing files --------------------------------------------------------------------------------


@pytest.fixture
def three_files(folder):
    home = folder()
    home.commit([(CONTROL, [SETUP])])
    for offset in range(9):
        home.commit([(BATCH, batch(offset, b"x" * 300_000).encode_parts())])
    home.journal.close()
    assert len(file_bases(home.disk)) == 3
    return home


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_journal_file_is_refused_by_name(three_files, files_of, disk_with, which) -> None:
    files = files_of(three_files.disk)
    bases = file_bases(three_files.disk)
    del files[file_name(bases[which])]
    error = refused(disk_with(files), three_files, files_of)
    if which == 0:
        assert error.path == file_name(0)
    else:
        assert error.position == bases[which]
        assert error.path == file_name(bases[which - 1])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("keep", [0, 100, 200_000])
def test_a_truncated_closed_file_is_refused(three_files, files_of, disk_with, which, keep) -> None:
    files = files_of(three_files.disk)
    path = file_name(file_bases(three_files.disk)[which])
    files[path] = files[path][:keep]
    assert refused(disk_with(files), three_files, files_of).path == path


def test_a_truncated_last_file_is_refused_when_the_watermark_is_there(
    three_files, files_of, disk_with
) -> None:
    files = files_of(three_files.disk)
    path = file_name(file_bases(three_files.disk)[-1])
    files[path] = files[path][:-100]
    assert refused(disk_with(files), three_files, files_of).path == path


def test_a_file_whose_header_was_never_written_is_removed(folder, files_of, disk_with) -> None:
    home, commit = written(folder)
    home.journal.close()
    files = files_of(home.disk)
    files[file_name(commit.end)] = bytes(1_000)
    disk = disk_with(files)
    found = reopened(disk, home)
    assert found.position == commit.end
    assert file_bases(disk) == [0]


def test_a_spare_file_left_by_a_crash_goes(folder, disk_with, files_of) -> None:
    home, _ = written(folder)
    disk = disk_with({**files_of(home.disk), SPARE: bytes(100)})
    reopened(disk, home)
    assert not disk.exists(SPARE)


# -- formats and folders --------------------------------------------------------------------------


def test_a_folder_of_a_newer_format_is_refused(folder, small) -> None:
    disk = MemoryDisk()
    file = disk.open("penstock.json", create=True)
    file.append([b'{"format": 2}'])
    with pytest.raises(FormatTooNew) as caught:
        check_folder(disk, write=True)
    assert caught.value.version == 2
    assert disk.list("") == ["penstock.json"]


def test_a_journal_file_of_a_newer_format_is_refused(folder, disk_with, files_of) -> None:
    home, commit = written(folder)
    home.journal.close()
    header = msgspec.msgpack.encode(FileHeader(2, 5, commit.end, 1))
    frame = encode_frame(FILE_HEADER, [header], position=commit.end, durable=0, epoch=5)
    files = {**files_of(home.disk), file_name(commit.end): b"".join(frame)}
    with pytest.raises(FormatTooNew) as caught:
        reopened(disk_with(files), home)
    assert caught.value.version == 2


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'"x"', b'{"format": "one"}', b"\xff"])
def test_a_damaged_penstock_json_is_refused(text: bytes, disk_with) -> None:
    with pytest.raises(Corrupted) as caught:
        check_folder(disk_with({"penstock.json": text}), write=True)
    assert caught.value.path == "penstock.json"


def test_a_folder_of_somebody_else_is_not_touched(disk_with) -> None:
    disk = MemoryDisk()
    file = disk.open("thesis.tex", create=True)
    file.append([b"years of work"])
    with pytest.raises(NotADataFolder) as caught:
        check_folder(disk, write=True)
    assert caught.value.found == ["thesis.tex"]
    assert disk.list("") == ["thesis.tex"]


def test_an_empty_folder_is_made_into_one_for_writers_only() -> None:
    disk = MemoryDisk()
    with pytest.raises(NotADataFolder):
        check_folder(disk, write=False)
    assert disk.list("") == []
    check_folder(disk, write=True)
    check_folder(disk, write=False)


def test_a_process_that_died_while_it_made_the_folder_is_no_obstacle() -> None:
    disk = MemoryDisk()
    file = disk.open("penstock.json.tmp", create=True)
    file.append([b'{"for'])
    file.close()
    check_folder(disk, write=True)
    check_folder(disk, write=False)


def test_a_folder_whose_penstock_json_is_gone_is_refused_and_kept(
    three_files, files_of, disk_with
) -> None:
    files = files_of(three_files.disk)
    del files["penstock.json"]
    disk = disk_with(files)
    before = files_of(disk)
    with pytest.raises((Corrupted, NotADataFolder)):
        reopened(disk, three_files)
    assert files_of(disk) == before


# -- readers --------------------------------------------------------------------------------------


def test_a_reader_sees_what_the_watermark_covers_and_changes_nothing(folder, files_of) -> None:
    home, last = written(folder)
    before = files_of(home.disk)
    recovery = Recovery(home.disk, home.settings, write=False)
    found = recovery.run()
    assert events(found) == [b"event 0", b"event 1", b"event 2"]
    assert found.position == last.start
    assert not recovery.advance()
    home.journal.sync()
    assert recovery.advance()
    assert len(events(found)) == 4
    after = files_of(home.disk)
    del before[WATERMARK], after[WATERMARK]
    assert after == before


def test_a_reader_follows_across_files(folder) -> None:
    home, _ = written(folder)
    home.journal.sync()
    recovery = Recovery(home.disk, home.settings, write=False)
    found = recovery.run()
    for offset in range(4, 12):
        home.commit([(BATCH, batch(offset, b"y" * 300_000).encode_parts())])
    assert len(file_bases(home.disk)) > 2
    assert recovery.advance()
    assert [len(each) for each in events(found)][4:] == [300_000] * 8


def test_a_reader_stops_at_the_watermark_when_files_lie_behind_it(folder) -> None:
    """A writer was killed between its first file and its first commit, or syncs now and then."""
    home, last = written(folder)
    for offset in range(4, 12):
        home.commit([(BATCH, batch(offset, b"y" * 300_000).encode_parts())], sync=False)
    assert len([base for base in file_bases(home.disk) if base > last.end]) > 1
    recovery = Recovery(home.disk, home.settings, write=False)
    found = recovery.run()
    assert events(found) == [b"event 0", b"event 1", b"event 2"]
    home.journal.sync()
    assert recovery.advance()
    assert [len(each) for each in events(found)][4:] == [300_000] * 8


def test_audited_actions_are_collected_with_a_reference_each(folder) -> None:
    home = folder()
    first, second = (
        Audited(at, "ann", "topic.delete", ["orders"], "", {}, {"status": "deleted"})
        for at in (1, 2)
    )
    group = encode_group(
        [(CONTROL, [encode_entries([first, second])]), (BATCH, batch(0).encode_parts())]
    )
    commit = home.commit([(CONTROL, [SETUP]), (GROUP, group)])
    home.journal.close()
    found = reopened(home.disk, home)
    position = commit.entries[-1][0]
    assert found.audited == [(position, first), (position + 1, second)]


def test_acks_and_leases_are_in_the_state_after_recovery(folder) -> None:
    home, _ = written(folder)
    home.commit([(CONTROL, [encode_entries([Acked("billing", "orders", 0, [1, 2])])])])
    home.journal.close()
    group = reopened(home.disk, home).fold.state.groups["billing"]
    assert [(run.start, run.stop, run.made) for run in group.ledgers["orders", 0]] == [
        (0, 1, 1),
        (3, 4, 1),
    ]
    assert group.fence == 5

"""The manifest: changes are all or nothing, damage is loud, orphans are told from losses (Q3)."""

from __future__ import annotations

import errno

import pytest

from penstock.log import manifest as module
from penstock.log.disk import read_file, write_file
from penstock.log.manifest import Change, Manifest, commit_frame, encode_change
from penstock.log.memory_disk import MemoryDisk, MemoryFile
from penstock.log.segment import Range, SegmentInfo, Span, segment_path
from penstock.model.errors import Corrupted, FormatTooNew, StorageError, WriterFailed

LOG = "segments/manifest-00000001.log"


def segment(disk, number, first, last, topic="orders", size=10) -> SegmentInfo:
    """A segment as far as the manifest looks: a file of the right length."""
    path = segment_path(number, shared=False)
    disk.make_dir("segments")
    write_file(disk, path, [bytes(size)])
    part = Range(topic, 0, first, last, first, last, 0, ["default"], 1, 65, b"h" * 32)
    return SegmentInfo(
        number, path, False, "00", size, last - first + 1, [part], [Span(1, size, 0)]
    )


@pytest.fixture
def disk():
    return MemoryDisk()


@pytest.fixture
def manifest(disk):
    made = Manifest.load(disk, write=True)
    made.apply([segment(disk, 1, 0, 9)], [], sealed_to=100, at_us=1)
    made.apply([segment(disk, 2, 10, 19)], [], sealed_to=200, at_us=2)
    return made


def state(manifest):
    return (
        [info.id for info in manifest.segments()],
        manifest.sealed_to,
        manifest.at_us,
        manifest.next_id,
        manifest.total_bytes,
    )


def damage(disk, at, byte=None):
    file = disk.open(LOG, write=True)
    file.write_at(at, bytes([file.read(at, 1)[0] ^ 0x20]) if byte is None else byte)
    file.close()


def test_changes_come_back_after_a_restart(disk, manifest):
    manifest.apply([segment(disk, 3, 0, 19)], [1, 2], at_us=3)
    assert state(manifest) == ([3], 200, 3, 4, 10)
    assert state(Manifest.load(disk, write=True)) == state(manifest)
    assert state(Manifest.load(disk)) == state(manifest)


def test_lookups(disk, manifest):
    manifest.apply([segment(disk, 5, 30, 39), segment(disk, 6, 0, 5, topic="b")], [], at_us=3)
    assert manifest.topics() == [("b", 0), ("orders", 0)]
    assert [(info.id, part.first_offset) for info, part in manifest.ranges("orders", 0)] == [
        (1, 0),
        (2, 10),
        (5, 30),
    ]

    def found(offset):
        place = manifest.find("orders", 0, offset)
        return place and place[0].id

    assert [found(offset) for offset in (0, 9, 10, 19, 20, 29, 30, 39, 40)] == [
        1,
        1,
        2,
        2,
        5,
        5,
        5,
        5,
        None,
    ]
    assert manifest.find("none", 0, 0) is None
    assert manifest.ranges("orders", 1) == []


def test_a_torn_last_record_is_cut_at_every_length(disk, manifest):
    """A record without its commit was never acknowledged; cutting it loses nothing."""
    before = read_file(disk, LOG)
    manifest.apply([segment(disk, 3, 20, 29)], [], at_us=3)
    after = read_file(disk, LOG)
    record_end = len(after) - len(commit_frame())
    for length in range(len(before), len(after)):
        disk.remove(LOG)
        write_file(disk, LOG, [after[:length]])
        reader = Manifest.load(disk)
        assert [info.id for info in reader.segments()] == [1, 2]
        writer = Manifest.load(disk, write=True)
        whole = length >= record_end
        assert [info.id for info in writer.segments()] == ([1, 2, 3] if whole else [1, 2])
        assert writer.report.orphans == ([] if whole else [segment_path(3, shared=False)])
        writer.close()
        assert Manifest.load(disk, write=True).report.cut_bytes == 0
        assert state(Manifest.load(disk)) == state(writer)


def test_garbage_after_the_last_commit_is_cut(disk, manifest):
    size = len(read_file(disk, LOG))
    for tail in (bytes(40), b"\xff" * 7, encode_change(Change(9, 9, 9, 1))[:-1] + b"x"):
        damage(disk, size, tail)
        loaded = Manifest.load(disk, write=True)
        assert loaded.report.cut_bytes == len(tail)
        assert state(loaded) == state(manifest)
        loaded.apply([], [], at_us=2)
        disk.open(LOG, write=True).truncate(size)


def test_any_flipped_byte_of_what_was_acknowledged_is_found(disk, manifest):
    """Only the very last commit frame may be damaged harmlessly: its record is still whole."""
    content = read_file(disk, LOG)
    names = disk.list("segments")
    for at in range(len(content) - len(commit_frame())):
        damage(disk, at)
        for write in (True, False):
            with pytest.raises(Corrupted, match=r"manifest-00000001\.log"):
                Manifest.load(disk, write=write)
        damage(disk, at)
    assert disk.list("segments") == names
    assert read_file(disk, LOG) == content
    for at in range(len(content) - len(commit_frame()), len(content)):
        damage(disk, at)
        assert state(Manifest.load(disk, write=True)) == state(manifest)
        assert read_file(disk, LOG) == content


def test_a_missing_manifest_beside_segments_is_corruption(disk, manifest):
    disk.remove(LOG)
    with pytest.raises(Corrupted, match="no manifest"):
        Manifest.load(disk, write=True)
    assert len(disk.list("segments")) == 2


def test_missing_and_short_segment_files_are_corruption(disk, manifest):
    disk.open(segment_path(2, shared=False), write=True).truncate(9)
    with pytest.raises(Corrupted, match="9 bytes instead of 10"):
        Manifest.load(disk, write=True)
    disk.remove(segment_path(2, shared=False))
    with pytest.raises(Corrupted, match=r"000000000002.*missing.*offsets 10 to 19"):
        Manifest.load(disk, write=True)


def test_orphans_are_listed_then_removed_by_the_writer(disk, manifest):
    segment(disk, 3, 20, 29)
    write_file(disk, "segments/x.tmp.keep", [b"not ours"])
    loaded = Manifest.load(disk, write=True)
    assert loaded.report.orphans == [segment_path(3, shared=False)]
    assert disk.exists(segment_path(3, shared=False))
    assert Manifest.load(disk).remove_orphans() == []
    assert loaded.remove_orphans() == [segment_path(3, shared=False)]
    assert "x.tmp.keep" in disk.list("segments")
    assert not disk.exists(segment_path(3, shared=False))


def test_history_is_dropped_in_a_new_generation(disk, manifest, monkeypatch):
    monkeypatch.setattr(module, "MIN_REWRITE_BYTES", 0)
    reader = Manifest.load(disk)
    sizes = []
    for number in range(3, 60):
        manifest.apply(
            [segment(disk, number, 0, 19)], [info.id for info in manifest.segments()], at_us=number
        )
        sizes.append(len(read_file(disk, f"segments/manifest-{manifest.generation:08d}.log")))
    assert manifest.generation > 5
    assert max(sizes) < 2_000
    assert len([name for name in disk.list("segments") if name.endswith(".log")]) == 1
    assert state(Manifest.load(disk)) == state(manifest)
    assert reader.refresh()
    assert state(reader) == state(manifest)
    assert not reader.refresh()


def test_a_reader_follows_the_writer(disk, manifest):
    reader = Manifest.load(disk)
    assert not reader.refresh()
    manifest.apply([segment(disk, 3, 20, 29)], [1], sealed_to=300, at_us=3)
    assert reader.refresh()
    assert state(reader) == state(manifest)
    with pytest.raises(StorageError, match="read-only"):
        reader.apply([], [], at_us=4)


def test_a_reader_may_come_before_the_writer(disk):
    reader = Manifest.load(disk)
    assert not reader.refresh()
    Manifest.load(disk, write=True).apply([], [], sealed_to=5, at_us=1)
    assert reader.refresh()
    assert reader.sealed_to == 5


def test_two_segments_never_claim_one_offset(disk, manifest):
    before = read_file(disk, LOG)
    with pytest.raises(Corrupted, match="offset 19"):
        manifest.apply([segment(disk, 3, 19, 29)], [], at_us=3)
    with pytest.raises(StorageError, match=r"\[77\]"):
        manifest.apply([], [77], at_us=3)
    assert read_file(disk, LOG) == before


def test_a_full_disk_leaves_no_half_record(disk, manifest, monkeypatch):
    before = state(manifest)
    real = MemoryFile.append

    def full(self, parts):
        real(self, [bytes(parts[0])[:5]])
        raise OSError(errno.ENOSPC, "full")

    extra = segment(disk, 3, 20, 29)
    monkeypatch.setattr(MemoryFile, "append", full)
    with pytest.raises(OSError, match="full"):
        manifest.apply([extra], [], at_us=3)
    monkeypatch.undo()
    assert state(manifest) == before
    manifest.apply([extra], [], at_us=4)
    assert state(Manifest.load(disk, write=True)) == state(manifest)


def test_a_failed_sync_ends_the_writer(disk, manifest, monkeypatch):
    def fail(self):
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(MemoryFile, "sync", fail)
    with pytest.raises(WriterFailed):
        manifest.apply([], [], at_us=3)
    monkeypatch.undo()
    with pytest.raises(WriterFailed):
        manifest.apply([], [], at_us=3)


def test_a_newer_format_is_refused_by_name(disk, manifest):
    frames = encode_change(Change(1, 1, 1, 99)) + commit_frame()
    write_file(disk, "segments/manifest-00000002.log", [frames])
    with pytest.raises(FormatTooNew, match="99"):
        Manifest.load(disk, write=True)

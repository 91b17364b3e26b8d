"""The manifest: which segments are live, which offsets each holds, and how far sealing got.

It is an append-only file, `segments/manifest-<generation>.log`. A change (segments added, segments
removed) is one record and happens completely or not at all. When most of the file is history, the
next generation is written beside it and takes over. docs/reference/files.md has the format.

A frame is a marker of four bytes, length and CRC-32 as 32-bit numbers, and its content. A record
frame is written and synced, then a commit frame behind it, synced too. So a last record that is
bad and has no commit was never acknowledged and may be cut, while a bad record with a valid frame
behind it is damage to a record that was acknowledged.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.log.disk import Disk, File, write_file
from penstock.log.segment import FOLDER, Range, SegmentInfo
from penstock.log.segment_reader import corrupted
from penstock.model.checksum import crc32
from penstock.model.errors import Corrupted, FormatTooNew, StorageError, WriterFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# History may take twice the size of the live segments' records before it is dropped: each byte of
# the manifest is then written one and a half times on average.
DEAD_WEIGHT = 2
# Below this a new generation would save nothing worth two syncs.
MIN_REWRITE_BYTES = 256 * 1024
# A generation lasts for many changes: losing the race against its removal twice does not happen.
GENERATION_TRIES = 3

FORMAT = 1
HEAD = struct.Struct("<4sII")
RECORD = b"PSmr"
COMMIT = b"PSmc"
# A record names every range of the segments it adds: a fold of the largest shared files with a
# million ranges stays below this.
MAX_RECORD_BYTES = 512 * 1024 * 1024


class AuditMark(msgspec.Struct, frozen=True):
    """How far the audit chain of that key reached, and the hash of its record there."""

    sequence: int
    hash: str
    public_key: str


class Report(msgspec.Struct, frozen=True):
    """Bytes cut and files without a record, found when a writer opened the manifest."""

    cut_bytes: int = 0
    orphans: list[str] = []


class LiveSegment(NamedTuple):
    """One range and the segment it is in, sorted by its first offset."""

    first_offset: int
    segment: SegmentInfo
    range: Range


class Manifest:
    """The list of live segments. One writer; any number of readers that `refresh`.

    >>> from penstock.log.memory_disk import MemoryDisk
    >>> manifest = Manifest.load(MemoryDisk(), write=True)
    >>> manifest.apply([], [], sealed_to=4096, at_us=1)
    >>> manifest.sealed_to
    4096
    """

    def __init__(self, disk: Disk, *, write: bool) -> None:
        self.sealed_to = 0
        """The journal position below which every event is in segments."""
        self.at_us = 0
        self.next_id = 1
        self.audit: AuditMark | None = None
        """How far the audit chain must reach: it lies in another folder, which may be lost."""
        self.total_bytes = 0
        """The size of all live segments."""
        self.generation = 0
        self.report = Report()
        self._segments: dict[int, SegmentInfo] = {}
        self._lanes: dict[tuple[str, int], list[LiveSegment]] = {}
        """The live ranges of each topic and partition, by offset."""
        self._live_bytes = 0
        """The size of the live segments' records."""
        self._disk = disk
        self._write = write
        self._broken = False
        self._file: File | None = None
        self._end = 0

    @classmethod
    def load(cls, disk: Disk, *, write: bool = False) -> Manifest:
        """Open the newest generation; a writer makes the first one in an empty folder.

        A last record that was never acknowledged is cut (by a writer) or ignored (by a reader).
        Anything else that does not add up raises Corrupted, and nothing is deleted.
        """
        manifest = cls(disk, write=write)
        names = disk.list(FOLDER)
        generations = [number for number in map(_generation, names) if number]
        if generations and not write:
            manifest.refresh()
        elif generations:
            manifest._open(max(generations))
        elif any(name.endswith(".parquet") for name in names):
            raise Corrupted(
                f"{FOLDER}/ has segment files but no manifest, so it is not known which are "
                "live. Nothing was deleted: restore the newest manifest-*.log from a backup",
                path=f"{FOLDER}/manifest-*.log",
            )
        elif write:
            disk.make_dir(FOLDER)
            manifest._begin_generation()
        if write:
            manifest._check_files(disk.list(FOLDER))
        return manifest

    def refresh(self) -> bool:
        """Read what the writer, in another process, committed since; True when there was something."""
        before = (self.generation, self._end)
        for _ in range(GENERATION_TRIES):
            newest = self._newest()
            try:
                if newest > self.generation:
                    self._forget()
                    self._open(newest)
                elif self.generation:
                    self._read_on()
                break
            except FileNotFoundError:
                self.generation = 0
        return before != (self.generation, self._end)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def path(self) -> str:
        """The path of its file."""
        return _path(self.generation)

    # -- live segments -----------------------------------------------------------------------------

    def segments(self) -> Iterable[SegmentInfo]:
        """All live segments, in the order of their ids."""
        return [self._segments[number] for number in sorted(self._segments)]

    def ranges(self, topic: str, partition: int) -> list[tuple[SegmentInfo, Range]]:
        """The segments and ranges of a partition, by offset."""
        return [(each.segment, each.range) for each in self._lanes.get((topic, partition), ())]

    def find(self, topic: str, partition: int, offset: int) -> tuple[SegmentInfo, Range] | None:
        """The range with this offset, or the next one after it; None when all are before."""
        lane = self._lanes.get((topic, partition), [])
        index = bisect_right(lane, offset, key=_first) - 1
        if index >= 0 and lane[index].range.last_offset >= offset:
            return lane[index].segment, lane[index].range
        if index + 1 < len(lane):
            return lane[index + 1].segment, lane[index + 1].range
        return None

    def topics(self) -> list[tuple[str, int]]:
        """Every topic and partition with sealed events."""
        return sorted(self._lanes)

    # -- changes -----------------------------------------------------------------------------------

    def apply(
        self,
        add: Sequence[SegmentInfo],
        remove: Sequence[int],
        *,
        sealed_to: int | None = None,
        at_us: int,
        audit: AuditMark | None = None,
    ) -> None:
        """Add and remove segments as one change, durable on return.

        `sealed_to` is the journal position below which every event is in segments, `audit` how far
        the audit chain reaches; None leaves them.
        """
        if self._broken:
            raise self._failed()
        missing = [number for number in remove if number not in self._segments]
        if missing or not self._write:
            raise StorageError(
                f"segments {missing} are not in the manifest"
                if missing
                else "opened read-only; open it for writing"
            )
        change = Change(
            at_us=at_us,
            sealed_to=self.sealed_to if sealed_to is None else sealed_to,
            next_id=max([self.next_id, *(info.id + 1 for info in add)]),
            add=list(add),
            remove=list(remove),
            format=FORMAT,
            audit=audit,
        )
        if overlap := self._overlap(change):
            raise self._damaged(overlap)
        frame = encode_change(change)
        self._append(frame)
        self._append(commit_frame())
        self._end += len(frame) + len(commit_frame())
        self._take(change)
        if self._end > max(MIN_REWRITE_BYTES, (1 + DEAD_WEIGHT) * self._live_bytes):
            self._begin_generation()

    def unnamed(self) -> list[str]:
        """Segment files that are there and in no record."""
        live = {info.path for info in self._segments.values()}
        paths = [f"{FOLDER}/{name}" for name in self._disk.list(FOLDER)]
        return [path for path in paths if path.endswith(".parquet") and path not in live]

    def remove_orphans(self) -> list[str]:
        """Delete the files that `report` lists: left by a crash, in no record, not in use."""
        removed = []
        for path in self.report.orphans:
            if self._write and self._disk.exists(path):
                self._disk.remove(path)
                removed.append(path)
        if removed:
            self._disk.sync_dir(FOLDER)
        self.report = Report(cut_bytes=self.report.cut_bytes)
        return removed

    def _append(self, frame: bytes) -> None:
        file = self._handle()
        try:
            file.append([frame])
        except OSError:
            # Half a record must not lie before the next one: nothing of this change stays.
            self._broken = True
            file.truncate(self._end)
            file.sync()
            self._broken = False
            raise
        try:
            file.sync()
        except OSError as error:
            self._broken = True
            raise self._failed() from error

    def _failed(self) -> WriterFailed:
        return WriterFailed(
            f"{_path(self.generation)} could not be made durable, so the manifest takes no more "
            "changes. Check the disk and start again: recovery finds what was committed",
            path=_path(self.generation),
        )

    def _take(self, change: Change) -> None:
        gone = set(change.remove)
        lanes = {
            (each.topic, each.partition)
            for number in gone
            for each in self._segments[number].ranges
        }
        for key in lanes:
            self._lanes[key] = [each for each in self._lanes[key] if each.segment.id not in gone]
        for number in gone:
            info = self._segments.pop(number)
            self.total_bytes -= info.size_bytes
            self._live_bytes -= encoded_size(info)
        for info in change.add:
            self._segments[info.id] = info
            self.total_bytes += info.size_bytes
            self._live_bytes += encoded_size(info)
            for each in info.ranges:
                self._place(info, each)
        for key in lanes:
            if not self._lanes[key]:
                del self._lanes[key]
        self.sealed_to, self.at_us, self.next_id = change.sealed_to, change.at_us, change.next_id
        self.audit = change.audit or self.audit

    def _overlap(self, change: Change) -> str | None:
        """Names an offset that two live ranges would claim, if there is one: a reader could not choose."""
        gone = set(change.remove)
        added: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for info in change.add:
            for each in info.ranges:
                added.setdefault((each.topic, each.partition), []).append(
                    (each.first_offset, each.last_offset)
                )
        for key, spans in added.items():
            spans += [
                (each.first_offset, each.range.last_offset)
                for each in self._lanes.get(key, ())
                if each.segment.id not in gone
            ]
            spans.sort()
            for (_, last), (first, _) in pairwise(spans):
                if first <= last:
                    return f"two segments claim offset {first} of {key[0]!r} partition {key[1]}"
        return None

    def _place(self, info: SegmentInfo, each: Range) -> None:
        lane = self._lanes.setdefault((each.topic, each.partition), [])
        insort(lane, LiveSegment(each.first_offset, info, each), key=_first)

    # -- the file ----------------------------------------------------------------------------------

    def _open(self, generation: int) -> None:
        self.generation = generation
        if not self._write:
            self._read_on()
            return
        file = self._handle()
        size = file.size()
        found = scan(file.read(0, size), 0)
        self._check(found.damaged_at, bool(found.changes))
        for content in found.changes:
            self._decode(content)
        if found.pending is not None:
            # Whole, so it may count; synced before its commit, as if nothing had happened between.
            self._decode(found.pending)
        if size > found.whole_end:
            self.report = Report(cut_bytes=size - found.whole_end)
            file.truncate(found.whole_end)
        self._end = found.whole_end
        # After a failed fsync the page cache shows bytes that the disk does not have, and another
        # fsync would not write them: write the last record again.
        last = found.changes[-1] if found.pending is None else found.pending
        start = max(0, found.whole_end - len(commit_frame()) - HEAD.size - len(last))
        file.write_at(start, bytes(file.read(start, found.whole_end - start)))
        if found.pending is not None:
            file.sync()
            file.append([commit_frame()])
            self._end += len(commit_frame())
        file.sync()

    def _read_on(self) -> None:
        file = self._handle()
        view = file.read(self._end, max(0, file.size() - self._end))
        found = scan(view, 0)
        self._check(found.damaged_at, bool(found.changes) or self._end > 0)
        for content in found.changes:
            self._decode(content)
        self._end += found.committed_end

    def _newest(self) -> int:
        # Two looks at single names instead of a listing of all segments on each refresh.
        if self.generation and self._disk.exists(_path(self.generation)):
            return self.generation + self._disk.exists(_path(self.generation + 1))
        return max(filter(None, map(_generation, self._disk.list(FOLDER))), default=0)

    def _handle(self) -> File:
        if self._file is None:
            self._file = self._disk.open(_path(self.generation), write=self._write)
        return self._file

    def _check(self, damaged_at: int | None, begun: bool) -> None:
        # A generation appears under its name complete, so one without a first record is damaged.
        if damaged_at is not None or not begun:
            raise self._damaged(
                f"the record at byte {self._end + (damaged_at or 0)} fails its checksum"
            )

    def _decode(self, content: memoryview) -> None:
        try:
            change = decode_change(content)
        except UnknownFormat as error:
            raise FormatTooNew(
                f"{_path(self.generation)} has format {error.version}; this Penstock reads {FORMAT}. "
                "Upgrade Penstock",
                version=error.version,
            ) from None
        except ValueError as error:
            raise self._damaged(f"a record cannot be decoded: {error}") from error
        if any(number not in self._segments for number in change.remove):
            raise self._damaged("a record removes a segment that no record added")
        if overlap := self._overlap(change):
            raise self._damaged(overlap)
        self._take(change)

    def _begin_generation(self) -> None:
        """Write all live segments as a new file; the old one is removed when the new one is durable."""
        snapshot = Change(
            at_us=self.at_us,
            sealed_to=self.sealed_to,
            next_id=self.next_id,
            add=list(self.segments()),
            format=FORMAT,
            audit=self.audit,
        )
        frames = [encode_change(snapshot), commit_frame()]
        write_file(self._disk, _path(self.generation + 1), frames)
        self.close()
        self.generation += 1
        self._end = sum(map(len, frames))
        if self._disk.exists(_path(self.generation - 1)):
            self._disk.remove(_path(self.generation - 1))

    def _check_files(self, names: Sequence[str]) -> None:
        """Check that every live segment is there at its full length; other files are orphans."""
        here = set(names)
        for info in self._segments.values():
            if info.path.rpartition("/")[2] not in here:
                if unnamed := self.unnamed():
                    raise self._damaged(
                        f"it is cut, or an older copy: it names {info.path}, which is gone, and not "
                        f"{len(unnamed)} segment files that are there ({unnamed[0]})"
                    )
                raise corrupted(info, "the file is missing")
            file = self._disk.open(info.path)
            size = file.size()
            file.close()
            if size != info.size_bytes:
                raise corrupted(info, f"the file has {size} bytes instead of {info.size_bytes}")
        live = {info.path.rpartition("/")[2] for info in self._segments.values()}
        live.add(_path(self.generation).rpartition("/")[2])
        ours = (".parquet", ".tmp", ".log")
        orphans = [f"{FOLDER}/{name}" for name in sorted(here - live) if name.endswith(ours)]
        self.report = Report(cut_bytes=self.report.cut_bytes, orphans=orphans)

    def _forget(self) -> None:
        self.close()
        self._segments.clear()
        self._lanes.clear()
        self.total_bytes = self._live_bytes = 0
        self._end = 0

    def _damaged(self, what: str) -> Corrupted:
        path = _path(self.generation)
        return Corrupted(
            f"{path}: {what}. Nothing was deleted: restore this file from a backup, with every "
            "journal file and segment left as it is",
            path=path,
        )


def _first(each: LiveSegment) -> int:
    return each.first_offset


def _path(generation: int) -> str:
    return f"{FOLDER}/manifest-{generation:08d}.log"


def _generation(name: str) -> int | None:
    if name.startswith("manifest-") and name.endswith(".log"):
        number = name[len("manifest-") : -len(".log")]
        return int(number) if number.isdigit() else None
    return None


# -- records of the file ---------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record: segments added and removed, and up to where the journal is in segments."""

    at_us: int
    sealed_to: int
    next_id: int
    format: int  # of the record; no default, so that it is always written
    add: list[SegmentInfo] = []
    remove: list[int] = []
    audit: AuditMark | None = None  # None: as before


class UnknownFormat(ValueError):
    """A record of another format than this code reads; `version` says which."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class _Version(msgspec.Struct):
    format: int


class Scan(NamedTuple):
    """The content of the frames of a manifest file."""

    changes: list[memoryview]  # encoded changes, committed
    pending: memoryview | None  # a whole last record whose commit is not there
    committed_end: int  # all frames before this are committed
    whole_end: int  # all frames before this are whole
    damaged_at: int | None  # where a frame is bad although something valid follows


_decoder = msgspec.msgpack.Decoder(Change)
_encoder = msgspec.msgpack.Encoder()


def encode_change(change: Change) -> bytes:
    """A change as a record frame.

    >>> view = memoryview(encode_change(Change(1, 2, 3, FORMAT)) + commit_frame())
    >>> [decode_change(each).sealed_to for each in scan(view, 0).changes]
    [2]
    """
    return _frame(RECORD, _encoder.encode(change))


def encoded_size(info: SegmentInfo) -> int:
    """The size of one segment in a record."""
    return len(_encoder.encode(info))


def commit_frame() -> bytes:
    """The frame that commits the record before it."""
    return _frame(COMMIT, b"")


def decode_change(content: memoryview) -> Change:
    """Decode the content of a record frame; ValueError when it is no change."""
    version = msgspec.msgpack.decode(content, type=_Version).format
    if version != FORMAT:
        raise UnknownFormat(version)
    return _decoder.decode(content)


def _frame(marker: bytes, content: bytes) -> bytes:
    return HEAD.pack(marker, len(content), _crc(marker, content)) + content


def _crc(marker: bytes, content: bytes | memoryview) -> int:
    return crc32(content, crc32(marker + len(content).to_bytes(4, "little")))


def scan(view: memoryview, start: int) -> Scan:
    """Read frames from `start`, which must be the beginning of one."""
    changes: list[memoryview] = []
    pending: memoryview | None = None
    committed = at = start
    while frame := _read(view, at):
        marker, content = frame
        at += HEAD.size + len(content)
        if marker == RECORD:
            if pending is not None:
                return Scan(changes, None, committed, at, committed)
            pending = content
        else:
            if pending is not None:
                changes.append(pending)
                pending = None
            committed = at
    damaged = at if at < len(view) and _later(view, at) else None
    return Scan(changes, pending, committed, at, damaged)


def _read(view: memoryview, at: int) -> tuple[bytes, memoryview] | None:
    """The whole and valid frame at a position, or None."""
    if at + HEAD.size > len(view):
        return None
    marker, length, crc = HEAD.unpack_from(view, at)
    end = at + HEAD.size + length
    if marker not in (RECORD, COMMIT) or length > MAX_RECORD_BYTES or end > len(view):
        return None
    content = view[at + HEAD.size : end]
    return (marker, content) if _crc(marker, content) == crc else None


def _later(view: memoryview, after: int) -> bool:
    """Whether any valid frame follows a bad one: then the bad one had been acknowledged."""
    data = bytes(view[after:])
    for marker in (COMMIT, RECORD):
        at = data.find(marker)
        while at >= 0:
            if _read(view, after + at):
                return True
            at = data.find(marker, at + 1)
    return False

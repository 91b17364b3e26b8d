"""The manifest: which segments are the log, which offsets each holds, and how far sealing got.

It is an append-only file, `segments/manifest-<generation>.log`. A change (segments added, segments
removed) is one record and happens completely or not at all. When most of the file is history, the
next generation is written beside it and takes over. docs/reference/files.md has the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.log.disk import Disk, File, write_file
from penstock.log.manifest_log import (
    FORMAT,
    HEAD,
    AuditMark,
    Change,
    UnknownFormat,
    commit_frame,
    decode_change,
    encode_change,
    scan,
)
from penstock.log.segment import FOLDER, SegmentInfo
from penstock.log.segment_index import SegmentIndex
from penstock.log.segment_reader import corrupted
from penstock.model.errors import Corrupted, FormatTooNew, StorageError, WriterFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

# History may take twice what is live before it is dropped: each byte of the manifest is then
# written one and a half times on average.
DEAD_WEIGHT = 2
# Below this a new generation would save nothing worth two syncs.
MIN_REWRITE_BYTES = 256 * 1024
# A generation lasts for many changes: losing the race against its removal twice does not happen.
GENERATION_TRIES = 3


class Report(msgspec.Struct, frozen=True):
    """What opening a manifest for writing found."""

    cut_bytes: int = 0
    orphans: list[str] = []


class Manifest(SegmentIndex):
    """The list of live segments. One writer; any number of readers that `refresh`.

    >>> from penstock.log.memory_disk import MemoryDisk
    >>> manifest = Manifest.load(MemoryDisk(), write=True)
    >>> manifest.apply([], [], sealed_to=4096, at_us=1)
    >>> manifest.sealed_to
    4096
    """

    def __init__(self, disk: Disk, *, write: bool) -> None:
        super().__init__()
        self.generation = 0
        self.report = Report()
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
                f"{FOLDER}/ has segment files but no manifest, so nobody knows which of them are "
                "live. Nothing was deleted: restore the newest manifest-*.log from a backup",
                path=f"{FOLDER}/manifest-*.log",
            )
        elif write:
            disk.make_dir(FOLDER)
            manifest._begin_generation()
        if write:
            manifest._check_files(disk.list(FOLDER))
        return manifest

    # -- changes -------------------------------------------------------------------------------

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

    @property
    def path(self) -> str:
        """Its file."""
        return _path(self.generation)

    def unnamed(self) -> list[str]:
        """Segment files that are there and in no record."""
        live = {info.path for info in self._segments.values()}
        paths = [f"{FOLDER}/{name}" for name in self._disk.list(FOLDER)]
        return [path for path in paths if path.endswith(".parquet") and path not in live]

    def remove_orphans(self) -> list[str]:
        """Delete the files that `report` lists: left by a crash, in no record, in nobody's use."""
        removed = []
        for path in self.report.orphans:
            if self._write and self._disk.exists(path):
                self._disk.remove(path)
                removed.append(path)
        if removed:
            self._disk.sync_dir(FOLDER)
        self.report = Report(cut_bytes=self.report.cut_bytes)
        return removed

    def refresh(self) -> bool:
        """Take in what the writer, in another process, has committed since; True when it had."""
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

    def _newest(self) -> int:
        # Two looks at single names instead of a listing of all segments on each refresh.
        if self.generation and self._disk.exists(_path(self.generation)):
            return self.generation + self._disk.exists(_path(self.generation + 1))
        return max(filter(None, map(_generation, self._disk.list(FOLDER))), default=0)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- the file ------------------------------------------------------------------------------

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
        """Write all that is live as a new file; the old one goes when the new one is durable."""
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
        """Every live segment is there at its full length; what else lies about is an orphan."""
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
        self._clear()
        self._end = 0

    def _damaged(self, what: str) -> Corrupted:
        path = _path(self.generation)
        return Corrupted(
            f"{path}: {what}. Nothing was deleted: restore this file from a backup, with every "
            "journal file and segment left as it is",
            path=path,
        )


def _path(generation: int) -> str:
    return f"{FOLDER}/manifest-{generation:08d}.log"


def _generation(name: str) -> int | None:
    if name.startswith("manifest-") and name.endswith(".log"):
        number = name[len("manifest-") : -len(".log")]
        return int(number) if number.isdigit() else None
    return None

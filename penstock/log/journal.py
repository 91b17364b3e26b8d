"""The journal: one ordered log that everything is appended to, committed in groups.

The owner collects entries into a `Commit`. It is written and synced while the owner goes on, and
only then are the entries true. Files are allocated before they are written, so a full disk shows
before anything is accepted, never in the middle of a commit.

Entries lie in frames, each with its own checksum. A frame says at which `position` it stands, in
which `epoch` (the life of one writer) it was written and how far the journal was `durable` then.
The last number tells damage from an interrupted write: a broken frame followed by one that knows
it was durable is a hole. docs/reference/journal.md has the bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.log.disk import Bytes, Disk, File, advice_for, refused
from penstock.log.side_files import attach
from penstock.model.batch import BatchHead, EventBatch
from penstock.model.checksum import crc32
from penstock.model.errors import Corrupted, WriterFailed
from penstock.model.settings import Journal as JournalSettings

FOLDER = "journal"
SPARE = f"{FOLDER}/spare"
WATERMARK = f"{FOLDER}/watermark"
FORMAT = 1
# Room behind `file_bytes` for the commit that fills the file up.
SLACK_BYTES = 64 * 1024
# A file with less than this is not worth a new one, however old it is.
ROLL_LEAST_BYTES = 4 * 1024

# The head of a frame: length of the body, checksum, position, durable position, epoch, kind.
HEAD = struct.Struct("<IIQQIB3x")
_CHECKED = struct.Struct("<QQIB3x")
_CHECKED_AT = 8  # the checksum covers everything behind itself, and the length

FILE_HEADER = 1
BATCH = 2
CONTROL = 3
GROUP = 4  # several entries under one checksum: all of them or none
KINDS = (FILE_HEADER, BATCH, CONTROL, GROUP)

_PART = struct.Struct("<IB3x")  # the head of an entry in a GROUP: length, kind
MAX_BODY_BYTES = (1 << 32) - 1
# How much of a file's tail is looked at in one go: most of it is allocated and still zero.
BLOCK_BYTES = 1 << 20


# -- files -----------------------------------------------------------------------------------------


class FileHeader(msgspec.Struct, frozen=True):
    """The first entry of every journal file."""

    format: int
    epoch: int
    base: int
    created_us: int


def file_name(base: int) -> str:
    """The path of the journal file that begins at `base`."""
    return f"{FOLDER}/{base:020d}.jnl"


def file_bases(disk: Disk) -> list[int]:
    """The positions at which journal files begin, in order."""
    return [int(name[:-4]) for name in disk.list(FOLDER) if name.endswith(".jnl")]


# -- writing ---------------------------------------------------------------------------------------


class Commit:
    """Entries that become durable together: one write, one sync."""

    __slots__ = ("durable", "end", "entries", "roll", "start")

    def __init__(self, start: int, durable: int, roll: FileHeader | None) -> None:
        self.start = start
        self.end = start
        self.durable = durable
        self.roll = roll
        self.entries: list[tuple[int, int, Sequence[Bytes]]] = []

    def add(self, kind: int, parts: Sequence[Bytes]) -> int:
        """Append an entry; returns the position it will have."""
        position = self.end
        self.entries.append((position, kind, parts))
        self.end += frame_bytes(sum(map(len, parts)))
        return position

    def __len__(self) -> int:
        return self.end - self.start


class Journal:
    """The writer's side: the active file, the spare one behind it, and the watermark.

    `prepare`, `write`, `sync` and `harden` touch the disk; the owner calls them one at a time. The
    rest is arithmetic and belongs to the owner's loop.
    """

    def __init__(self, disk: Disk, settings: JournalSettings, *, position: int, epoch: int) -> None:
        self.epoch = epoch
        self.position = position
        """Where the next entry goes."""
        self.durable = position
        """Everything before this survives a power failure."""
        self.failed: WriterFailed | None = None
        self.written_bytes = 0
        self.base = position
        """Where the active file begins."""
        self._settings = settings
        self._disk = disk
        self._file: File | None = None
        self._file_base = 0
        self._file_bytes = 0
        self._allocated = 0
        self._spare: File | None = None
        self._spare_bytes = 0
        self._opened_us = 0
        self._wanted_new = False
        self._watermark = Watermark(disk, write=True)

    # -- on the owner's loop ------------------------------------------------------------------------

    def spare_wanted(self, size: int) -> int:
        """How much `prepare` should allocate now, or 0: there is always a file in reserve."""
        size += self._kept_bytes  # while a commit begins it, it is the last file
        if self._spare_bytes >= size + SLACK_BYTES:
            return 0
        return max(self._settings.file_bytes, size) + SLACK_BYTES

    def close_file(self) -> None:
        """Let the next commit go to the spare file."""
        self._wanted_new = True

    def rolls(self, now_us: int, first_bytes: int) -> bool:
        """Whether a commit that begins now goes to the spare file: the active one is full or old."""
        used = self.position - self.base
        full = self._file is None or used + first_bytes + SLACK_BYTES > self._allocated
        past = used >= self._settings.file_bytes
        old = (
            used > ROLL_LEAST_BYTES and now_us - self._opened_us > self._settings.roll_after_s * 1e6
        )
        return self._spare_bytes > 0 and (full or past or old or self._wanted_new)

    def begin(self, now_us: int, first_bytes: int) -> Commit:
        """Start a commit, in the spare file when `rolls`."""
        if not self.rolls(now_us, first_bytes):
            return Commit(self.position, self.durable, None)
        header = FileHeader(FORMAT, self.epoch, self.position, now_us)
        commit = Commit(self.position, self.durable, header)
        commit.add(FILE_HEADER, [msgspec.msgpack.encode(header)])
        self.base, self._opened_us, self._wanted_new = self.position, now_us, False
        self._allocated, self._spare_bytes = self._spare_bytes, 0
        return commit

    def fits(self, commit: Commit, size: int, *, reserve: bool = False, last: bool = False) -> bool:
        """Whether `size` more bytes can join the commit without asking the disk for room.

        Publishes leave `reserve_bytes` of the last file to leases and acks (`reserve`). These leave
        a quarter of it to operators and to clients that connect (`last`), who can make room.
        """
        keep = 0
        if not last and not self._spare_bytes:
            keep = self._kept_bytes // (4 if reserve else 1)
        return commit.end - self.base + size + keep <= self._allocated

    @property
    def _kept_bytes(self) -> int:
        return min(self._settings.reserve_bytes, self._settings.file_bytes // 4)

    def descriptors(self, count: int) -> Sequence[int]:
        """Descriptors of the active file, to sync it; none where the operating system has none."""
        return () if self._file is None else self._file.descriptors(count)

    def place(self, commit: Commit) -> None:
        """Give the commit its place in the journal; the next one begins behind it."""
        self.position = commit.end

    # -- on the disk --------------------------------------------------------------------------------

    def prepare(self, size: int) -> None:
        """Allocate the spare file; raises DiskRefused where there is no room or no way, and changes nothing."""
        if self._spare is not None:
            self._spare.close()
            self._spare, self._spare_bytes = None, 0
        file: File | None = None
        try:
            if self._disk.exists(SPARE):
                self._disk.remove(SPARE)
            file = self._disk.open(SPARE, create=True)
            file.allocate(size)
        except OSError as error:
            if file is not None:
                file.close()
                with suppress(OSError):  # it is removed before the next attempt
                    self._disk.remove(SPARE)
            raise refused(error, f"a journal file of {size} bytes", needed_bytes=size) from None
        self._spare, self._spare_bytes = file, size

    def write(self, commit: Commit, *, sync: bool) -> None:
        """Put the commit on disk; after a failure the journal takes no more."""
        if self.failed is not None:
            raise self.failed
        try:
            if commit.roll is not None:
                self._roll(commit.roll.base)
            assert self._file is not None
            parts: list[Bytes] = []
            for position, kind, body in commit.entries:
                parts += encode_frame(
                    kind, body, position=position, durable=commit.durable, epoch=self.epoch
                )
            (self._file.append_durably if sync else self._file.append)(parts)
            self._file_bytes += len(commit)
            self.written_bytes += len(commit)
            if sync:
                self.harden(commit.end)
        except OSError as error:
            raise self.fail(error) from error

    def sync(self) -> None:
        """Make everything written so far durable and visible to other processes."""
        if self.failed is not None:
            raise self.failed
        end = self._file_base + self._file_bytes if self._file is not None else self.durable
        try:
            if self._file is not None:
                self._file.sync()
            self.harden(end)
        except OSError as error:
            raise self.fail(error) from error

    def harden(self, end: int) -> None:
        """Everything before `end` is on stable storage: let other processes see it."""
        self.durable = end
        self._watermark.publish(end, self.epoch)

    def publish(self, end: int) -> None:
        """Let other processes see everything before `end`, durable or not (`fsync = never`)."""
        self._watermark.publish(end, self.epoch, durable=False)

    def _roll(self, base: int) -> None:
        if self._file is not None:
            # The unused rest goes back to the disk; the file before the last is always whole.
            self._file.truncate(self._file_bytes)
            self._file.sync()
            self._file.close()
        assert self._spare is not None
        self._disk.rename(SPARE, file_name(base))
        self._disk.sync_dir(FOLDER)
        self._file, self._spare = self._spare, None
        self._file_base, self._file_bytes = base, 0

    def fail(self, error: OSError) -> WriterFailed:
        """The disk refused: the journal takes no more; returns the error to raise."""
        self.failed = WriterFailed(
            f"the disk could not make events durable ({error.strerror}): {advice_for(error)}. What was "
            "acknowledged is kept, what was not may be lost; open the folder again when that is done",
            errno=error.errno,
        )
        return self.failed

    def close(self) -> None:
        """Give unused room back and release the files."""
        if self._spare is not None:
            self._spare.close()
            self._disk.remove(SPARE)
        if self._file is not None:
            if self.failed is None:
                self._file.truncate(self._file_bytes)
                self.sync()
            self._file.close()
        self._watermark.close()


class Watermark:
    """How far other processes may read the journal; written only after the data is durable.

    Two slots are written in turn, so a torn write leaves the older one. It is never synced: after
    a power failure it may be behind, which is safe; it is never ahead. With `fsync = never` it may
    be ahead: such a slot says so, and recovery then does not report events as lost.
    """

    _SLOT = struct.Struct("<QQI")
    _STRIDE = 512
    _VOLATILE = 1 << 63  # in the epoch: the position was readable, not durable

    def __init__(self, disk: Disk, *, write: bool) -> None:
        if write and not disk.exists(WATERMARK):
            self._file = disk.open(WATERMARK, create=True)
            self._file.append([bytes(2 * self._STRIDE)])
        else:
            self._file = disk.open(WATERMARK, write=write)
        self._turn = 0

    def publish(self, position: int, epoch: int, *, durable: bool = True) -> None:
        """Let readers see everything before `position`."""
        if not durable:
            epoch |= self._VOLATILE
        checksum = crc32(struct.pack("<QQ", position, epoch))
        slot = self._SLOT.pack(position, epoch, checksum)
        self._file.write_at(self._turn * self._STRIDE, slot)
        self._turn ^= 1

    def read(self) -> int:
        """The highest position published, or 0."""
        return self.positions()[0]

    def positions(self) -> tuple[int, int]:
        """The highest position published, and the highest that was durable then; 0 for none."""
        best = durable = 0
        for turn in (0, 1):
            slot = self._file.read(turn * self._STRIDE, self._SLOT.size)
            if len(slot) < self._SLOT.size:
                continue
            position, epoch, checksum = self._SLOT.unpack(slot)
            if crc32(struct.pack("<QQ", position, epoch)) == checksum:
                best = max(best, position)
                if not epoch & self._VOLATILE:
                    durable = max(durable, position)
        return best, durable

    def close(self) -> None:
        """Release the file."""
        self._file.close()


# -- reading back ----------------------------------------------------------------------------------


class JournalReader:
    """Reads entries back by position, checking each frame; keeps the files it needs mapped."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._bases: list[int] = []
        self._files: dict[int, File] = {}
        self._lock = threading.Lock()  # files are forgotten while threads read

    def body(self, base: int, position: int) -> memoryview:
        """The body of the frame at `position` in the file that begins at `base`."""
        frame = read_frame(self.view(base), base, position)
        if frame is None:
            raise Corrupted(
                f"{file_name(base)}: the entry at {position} fails its checksum; it was not "
                "served. Restore the file from a copy, nothing was deleted",
                path=file_name(base),
                position=position,
            )
        return frame.body

    def batch(self, base: int, position: int, inner: int) -> EventBatch:
        """The batch at `position`, or at offset `inner` of the group there."""
        body = self.body(base, position)
        return EventBatch.decode(body[inner:])

    def view(self, base: int) -> memoryview:
        """A whole journal file, memory-mapped."""
        with self._lock:
            file = self._files.get(base)
            if file is None:
                file = self._files[base] = self._open(base)
            return file.read(0, file.size())  # stays valid when the file is closed

    def _open(self, base: int) -> File:
        try:
            return self._disk.open(file_name(base))
        except FileNotFoundError:
            raise Corrupted(
                f"{file_name(base)} is missing; the events in it cannot be read. Restore it "
                "from a copy, nothing was deleted",
                path=file_name(base),
            ) from None

    def forget(self, base: int) -> None:
        """Close a file that is about to be removed."""
        with self._lock:
            file = self._files.pop(base, None)
            if file is not None:
                file.close()

    def close(self) -> None:
        """Release all files."""
        for base in list(self._files):
            self.forget(base)


class Packed(NamedTuple):
    """A batch that is not decoded yet: where it belongs, and how to get it."""

    topic: str
    partition: int
    base_offset: int
    events: int
    at: int
    decode: Callable[[int], EventBatch]

    @property
    def end_offset(self) -> int:
        """One past the last offset."""
        return self.base_offset + self.events

    def read(self) -> EventBatch:
        """The batch itself."""
        return self.decode(self.at)


def sealed_batches(disk: Disk, base: int, end: int) -> Iterator[Packed]:
    """Every batch of one closed journal file, for the sealer; a bad frame raises Corrupted."""
    file = disk.open(file_name(base))
    try:
        view = file.read(0, file.size())  # stays valid when the file is closed

        def decode(at: int) -> EventBatch:
            return attach(disk, EventBatch.decode(view[at:]))

        names: dict[str, str] = {}
        position = base
        for frame in frames(view, base, base, end):
            body_at = frame.position - base + HEAD.size
            position = frame.end
            for inner, body in batches_in(frame):
                head = BatchHead.parse(body)
                topic = names.setdefault(head.topic, head.topic)
                at = body_at + inner
                yield Packed(topic, head.partition, head.base_offset, head.count, at, decode)
        if position != end:
            raise Corrupted(
                f"{file_name(base)}: no whole entry at {position}, {end - position} bytes before "
                "its end; it was not sealed and nothing was deleted",
                path=file_name(base),
                position=position,
            )
    finally:
        file.close()


def batches_in(frame: JournalFrame) -> Iterator[tuple[int, memoryview]]:
    """(offset in the frame's body, encoded batch) for each batch of an entry."""
    if frame.kind == BATCH:
        yield 0, frame.body
    elif frame.kind == GROUP:
        for inner, kind, body in read_group(frame.body):
            if kind == BATCH:
                yield inner, body


# -- frames ----------------------------------------------------------------------------------------


class JournalFrame(NamedTuple):
    """One entry as read back."""

    position: int
    kind: int
    body: memoryview
    durable: int
    epoch: int

    @property
    def end(self) -> int:
        """Position behind this frame."""
        return self.position + frame_bytes(len(self.body))


def frame_bytes(body_bytes: int) -> int:
    """The size of a frame in the journal, head and padding included."""
    return HEAD.size + body_bytes + (-body_bytes & 7)


def encode_frame(
    kind: int, parts: Sequence[Bytes], *, position: int, durable: int, epoch: int
) -> list[Bytes]:
    """The frame as a list of buffers to write; the parts are not copied.

    >>> data = b"".join(encode_frame(CONTROL, [b"hi"], position=64, durable=0, epoch=1))
    >>> frame = read_frame(memoryview(data), 64, 64)
    >>> bytes(frame.body), frame.end
    (b'hi', 104)
    """
    length = sum(map(len, parts))
    checked = _CHECKED.pack(position, durable, epoch, kind)
    checksum = crc32(checked, length)
    for part in parts:
        checksum = crc32(part, checksum)
    head = struct.pack("<II", length, checksum) + checked
    return [head, *parts, b"\0" * (-length & 7)]


def read_frame(view: memoryview, base: int, position: int) -> JournalFrame | None:
    """The frame at `position` in a file that begins at `base`, or None when none is whole there."""
    at = position - base
    if at < 0 or at + HEAD.size > len(view):
        return None
    length, checksum, stated, durable, epoch, kind = HEAD.unpack_from(view, at)
    if stated != position or kind not in KINDS or at + HEAD.size + length > len(view):
        return None
    body = view[at + HEAD.size : at + HEAD.size + length]
    if crc32(body, crc32(view[at + _CHECKED_AT : at + HEAD.size], length)) != checksum:
        return None
    return JournalFrame(position, kind, body, durable, epoch)


def frames(view: memoryview, base: int, start: int, end: int) -> Iterator[JournalFrame]:
    """Whole frames from `start` until `end` or the first one that is not whole."""
    while start < end:
        frame = read_frame(view, base, start)
        if frame is None:
            return
        yield frame
        start = frame.end


def written_blocks(file: File, start: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, block) from `start` on for each block that is not all zeros."""
    for first, last in file.written(start):
        for at in range(first, last, BLOCK_BYTES):
            block = file.read(at, min(BLOCK_BYTES, last - at))
            words = np.frombuffer(block[: len(block) & ~7], dtype=np.uint64)
            if words.any() or any(block[len(block) & ~7 :]):
                yield at, block


def later_frames(file: File, base: int, after: int) -> Iterator[JournalFrame]:
    """Whole frames anywhere behind a broken one; found by the address each frame carries."""
    view = file.read(0, file.size())
    first = after - base + 8
    first += -first & 7
    for at, block in written_blocks(file, first):
        usable = len(block) & ~7
        words = np.frombuffer(block[:usable], dtype=np.uint64)
        # A frame at offset o of the file holds base + o in its second word.
        start = base + at - 8
        expected = np.arange(start, start + usable, 8, dtype=np.uint64)
        for index in np.flatnonzero(words == expected).tolist():
            frame = read_frame(view, base, start + index * 8)
            if frame is not None:
                yield frame


def encode_group(entries: Sequence[tuple[int, Sequence[Bytes]]]) -> list[Bytes]:
    """Several entries as the body of one GROUP frame."""
    parts: list[Bytes] = []
    for kind, body in entries:
        length = sum(map(len, body))
        parts += (_PART.pack(length, kind), *body, b"\0" * (-length & 7))
    return parts


def read_group(body: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(offset in the body, kind, entry) for each entry of a GROUP frame."""
    at = 0
    while at < len(body):
        length, kind = _PART.unpack_from(body, at)
        at += _PART.size
        yield at, kind, body[at : at + length]
        at += length + (-length & 7)

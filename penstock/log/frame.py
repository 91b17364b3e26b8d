"""Frames: how entries lie in a journal file, each with its own checksum and its own address.

A frame says where it stands (`position`), which writer's life it belongs to (`epoch`) and how far
the journal was durable when it was written (`durable`). The last one is what tells damage from an
interrupted write: a broken frame followed by one that knows it was durable is a hole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.log.disk import Bytes, File
from penstock.model.checksum import crc32

# length of the body, checksum, position, durable position, epoch, kind
HEAD = struct.Struct("<IIQQIB3x")
_CHECKED = struct.Struct("<QQIB3x")
_CHECKED_AT = 8  # the checksum covers everything behind itself, and the length

FILE_HEADER = 1
BATCH = 2
CONTROL = 3
GROUP = 4  # several entries under one checksum: all of them or none
KINDS = (FILE_HEADER, BATCH, CONTROL, GROUP)

_PART = struct.Struct("<IB3x")
MAX_BODY_BYTES = (1 << 32) - 1
# How much of a file's tail is looked at in one go: most of it is allocated and still zero.
BLOCK_BYTES = 1 << 20


class Frame(NamedTuple):
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
    """What a body takes in the journal, head and padding included."""
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


def read_frame(view: memoryview, base: int, position: int) -> Frame | None:
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
    return Frame(position, kind, body, durable, epoch)


def frames(view: memoryview, base: int, start: int, end: int) -> Iterator[Frame]:
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


def later_frames(file: File, base: int, after: int) -> Iterator[Frame]:
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

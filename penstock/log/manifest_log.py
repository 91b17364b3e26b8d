"""The manifest's file: records that are there completely, or not at all, and say which.

A frame is a marker of four bytes, length and CRC-32 as 32-bit numbers, and its content. A record
frame is written and synced, then a commit frame behind it, synced too. So a last record that is
bad and has no commit was never acknowledged and may be cut, while a bad record with anything valid
behind it is damage to what was promised.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from penstock.log.segment import SegmentInfo
from penstock.model.checksum import crc32

FORMAT = 1
HEAD = struct.Struct("<4sII")
RECORD = b"PSmr"
COMMIT = b"PSmc"
# A record names every range of the segments it adds: a fold of the largest shared files with a
# million ranges stays below this.
MAX_RECORD_BYTES = 512 * 1024 * 1024


class AuditMark(msgspec.Struct, frozen=True):
    """How far the audit chain with that key was known to reach, and the hash of its record there."""

    sequence: int
    hash: str
    public_key: str


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record: what came, what went, and up to where the journal is in segments."""

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
    """What the frames of a manifest file say."""

    changes: list[memoryview]  # encoded changes, committed
    pending: memoryview | None  # a whole last record whose commit is not there
    committed_end: int  # up to here everything is committed
    whole_end: int  # up to here everything is whole
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
    """What one segment takes in a record."""
    return len(_encoder.encode(info))


def commit_frame() -> bytes:
    """The frame that makes the record before it count."""
    return _frame(COMMIT, b"")


def decode_change(content: memoryview) -> Change:
    """A change out of the content of its frame; ValueError when it is none."""
    version = msgspec.msgpack.decode(content, type=_Version).format
    if version != FORMAT:
        raise UnknownFormat(version)
    return _decoder.decode(content)


def _frame(marker: bytes, content: bytes) -> bytes:
    return HEAD.pack(marker, len(content), _crc(marker, content)) + content


def _crc(marker: bytes, content: bytes | memoryview) -> int:
    return crc32(content, crc32(marker + len(content).to_bytes(4, "little")))


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

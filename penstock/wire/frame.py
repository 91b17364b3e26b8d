"""Frame: the unit of the wire protocol, the same over ZeroMQ and TCP.

A frame has a kind, the number of the request it belongs to, a small message (`meta`) and any
number of parts, which are encoded batches and are never copied into the message.

Over ZeroMQ a frame is a multipart message: envelope, meta, parts. Over TCP it is COMMAND (the
kind), BODY_SIZE and BODY; the body begins with its own small table of contents.
docs/reference/protocol.md has every byte.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock.model.errors import ProtocolViolation, WrongProtocolVersion

Bytes = bytes | bytearray | memoryview

VERSION = 1
MAGIC = b"PS"
# magic, version, kind, mark, request
ENVELOPE = struct.Struct("<2sBBBxxxQ")
# request, mark, compressor, number of parts, length of meta
BODY_HEAD = struct.Struct("<QBBHI")
PART_LENGTH = struct.Struct("<I")
# One publish or delivery carries a part for each batch; further batches belong into another frame.
MAX_PARTS = 4_096
# Messages are small: names, numbers and short lists. Large content goes into parts.
MAX_META_BYTES = 64 << 20


class Kind(enum.IntEnum):
    """The kind of a frame: below 0x40 from clients, above from brokers."""

    HELLO = 0x10
    HEARTBEAT = 0x11
    BYE = 0x12
    PUBLISH = 0x13
    TRANSACT = 0x14
    SUBSCRIBE = 0x15
    UNSUBSCRIBE = 0x16
    SETTLE = 0x17
    FETCH = 0x18
    COMMIT = 0x19
    READ = 0x1A
    ASK = 0x1B
    FLUSH = 0x1C

    WELCOME = 0x50
    BEAT = 0x51
    RESULT = 0x52
    FAULT = 0x53
    DELIVER = 0x54
    REFUSED = 0x55
    STOPPED = 0x56
    DRAIN = 0x57


class Mark(enum.IntEnum):
    """How the meta of a frame is encoded."""

    RAW = 0  # msgpack
    JSON = 1
    PROTOBUF = 2


_KINDS = frozenset(Kind)
_MARKS = frozenset(Mark)


class Frame(NamedTuple):
    """One frame.

    >>> frame = Frame(Kind.READ, 7, b"meta", (b"part",))
    >>> Frame.parse(Kind.READ, b"".join(frame.body())) == frame
    True
    """

    kind: int
    request: int
    meta: Bytes
    parts: Sequence[Bytes] = ()
    mark: int = Mark.RAW

    @property
    def size_bytes(self) -> int:
        """Bytes of meta and parts."""
        return len(self.meta) + sum(map(len, self.parts))

    def multipart(self) -> list[Bytes]:
        """The frame as a ZeroMQ message."""
        envelope = ENVELOPE.pack(MAGIC, VERSION, self.kind, self.mark, self.request)
        return [envelope, self.meta, *self.parts]

    @classmethod
    def of_multipart(cls, message: Sequence[Bytes]) -> Frame:
        """Read a ZeroMQ message; raises ProtocolViolation on anything else."""
        if len(message) < 2 or len(message) > MAX_PARTS + 2:
            raise ProtocolViolation(f"a message of {len(message)} parts is no frame")
        envelope = message[0]
        if len(envelope) != ENVELOPE.size:
            raise ProtocolViolation(f"an envelope has {ENVELOPE.size} bytes, not {len(envelope)}")
        magic, version, kind, mark, request = ENVELOPE.unpack(envelope)
        if magic != MAGIC:
            raise ProtocolViolation("the envelope does not begin with 'PS'")
        if version != VERSION:
            raise WrongProtocolVersion(
                f"version {version} of the protocol was met, this side speaks {VERSION}; upgrade "
                "the older side",
                version=version,
            )
        return cls(_kind(kind), request, _short(message[1]), tuple(message[2:]), _mark(mark))

    def body(self, compressor: int = 0) -> list[Bytes]:
        """The frame as the body of a TCP message."""
        parts = self.parts
        head = BODY_HEAD.pack(self.request, self.mark, compressor, len(parts), len(self.meta))
        lengths = b"".join(PART_LENGTH.pack(len(part)) for part in parts)
        return [head, lengths, self.meta, *parts]

    @classmethod
    def parse(cls, kind: int, body: Bytes) -> Frame:
        """Read the body of a TCP message; raises ProtocolViolation on anything else."""
        view = memoryview(body)
        if len(view) < BODY_HEAD.size:
            raise ProtocolViolation(f"a body of {len(view)} bytes is too short for a frame")
        return cls.of_content(kind, view[: BODY_HEAD.size], view[BODY_HEAD.size :])

    @classmethod
    def of_content(cls, kind: int, head: Bytes, content: Bytes) -> Frame:
        """Read a body whose head is in other memory, because its content was compressed."""
        view = memoryview(content)
        request, mark, _, count, meta_bytes = BODY_HEAD.unpack(head)
        at = count * PART_LENGTH.size
        if count > MAX_PARTS or at + meta_bytes > len(view):
            raise ProtocolViolation(f"a body of {len(view)} bytes claims to hold more")
        lengths = view[:at].cast("I") if count else ()
        meta = _short(view[at : at + meta_bytes])
        at += meta_bytes
        if at + sum(lengths) != len(view):
            raise ProtocolViolation("the parts of a frame do not fill its body")
        parts = []
        for length in lengths:
            parts.append(view[at : at + length])
            at += length
        return cls(_kind(kind), request, bytes(meta), tuple(parts), _mark(mark))


def _kind(kind: int) -> int:
    if kind not in _KINDS:
        raise ProtocolViolation(f"no frame has kind 0x{kind:02x}")
    return kind


def _mark(mark: int) -> int:
    if mark not in _MARKS:
        raise ProtocolViolation(f"no mark {mark}: 0 is raw, 1 JSON, 2 protobuf")
    return mark


def _short(meta: Bytes) -> Bytes:
    if len(meta) > MAX_META_BYTES:
        raise ProtocolViolation(f"a message of {len(meta)} bytes; what is large goes into parts")
    return meta

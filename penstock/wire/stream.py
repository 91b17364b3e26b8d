"""The TCP stream: bytes in any pieces become messages, messages become frames, and back.

Every message is COMMAND (one byte), BODY_SIZE (u32, little-endian) and BODY. A size over the limit
is refused from these five bytes alone. docs/reference/protocol.md has the rest.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable

from penstock.model.compressor import bounded_decompress, compressors
from penstock.model.errors import DecodeFailed, ProtocolViolation, UnknownCompressor
from penstock.wire.frame import (
    BODY_HEAD,
    MAX_META_BYTES,
    MAX_PARTS,
    PART_LENGTH,
    Bytes,
    Frame,
    Kind,
    Mark,
)

MESSAGE_HEAD = struct.Struct("<BI")  # command, body size
RAW_SIZE = struct.Struct("<I")  # in front of compressed bytes: what they expand to
# Message head and body head in one go, and the same with the length of the only part.
_NO_PARTS = struct.Struct("<BIQBBHI")
_ONE_PART = struct.Struct("<BIQBBHII")
_KINDS = frozenset(map(int, Kind))
_MARKS = frozenset(map(int, Mark))
COMPRESSOR_AT = 9  # position of the compressor's number in a body
MAX_BODY_BYTES = (1 << 32) - 1

COMPRESSORS = ("none", "lz4", "zstd", "snappy")
"""Compressors of the wire, by their number in a body."""
# Below this size a compressor saves less than the packet's own headers take.
COMPRESS_MIN_BYTES = 1_024

# Memory for reads, shared by all connections of a loop: each read is cut up before the next one.
SCRATCH_BYTES = 256 << 10
# An unfinished message up to this size is copied back into the scratch for the next read; a larger
# one gets memory of its own, and the socket fills it without a copy.
SMALL_BYTES = 16 << 10
# A message from this size on takes many reads, and gets its memory from `room`.
LARGE_BYTES = 1 << 20


Message = tuple[int, Bytes]
"""A command and its body."""


def own_memory(size: int) -> memoryview:
    """Memory for one message; the operating system provides each page when data arrives in it."""
    return memoryview(mmap.mmap(-1, size))


class StreamReader:
    """Cuts a stream of bytes into messages; memory grows with what arrived, not with claimed sizes.

    Put bytes into `space` and call `filled` with their number: it returns the messages they complete.

    >>> reader = StreamReader(limit_bytes=100)
    >>> reader.feed(bytes([0x10, 2, 0, 0, 0])), reader.feed(b"hi")
    ([], [(16, b'hi')])
    >>> reader.feed(bytes([0x10, 255, 255, 255, 255])), reader.broken.code
    ([], 'connection.protocol')
    """

    __slots__ = ("_command", "_filled", "_own", "_rest", "_room", "_scratch", "_size", "broken", "limit_bytes")  # fmt: skip

    def __init__(
        self,
        limit_bytes: int,
        scratch: bytearray | None = None,
        room: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._room = own_memory if room is None else room
        """Provides memory for large messages."""
        self.broken: ProtocolViolation | None = None
        """Set when the bytes are no message; nothing more is read from the stream then."""
        self._scratch = memoryview(bytearray(SCRATCH_BYTES) if scratch is None else scratch)
        self._rest = b""
        self._own: memoryview | None = None
        self._filled = 0
        self._size = 0
        self._command = 0

    @property
    def unfinished(self) -> bool:
        """Whether only a part of a message has arrived."""
        return self._own is not None or bool(self._rest)

    @property
    def large(self) -> bool:
        """Whether the unfinished message takes many reads."""
        return self._own is not None and self._size >= LARGE_BYTES

    @property
    def arrived_bytes(self) -> int:
        """Arrived bytes of a message that has memory of its own."""
        return 0 if self._own is None else self._filled

    def drop(self) -> None:
        """Release the memory of an unfinished message, whose rest will not arrive."""
        self._own, self._rest = None, b""
        self.broken = self.broken or ProtocolViolation("the connection has ended")

    def space(self) -> memoryview:
        """Memory for the next bytes; fill it before another reader of the same scratch is used."""
        if self._own is not None:
            return self._own[self._filled : self._filled + SCRATCH_BYTES]
        kept = len(self._rest)
        if kept:
            self._scratch[:kept] = self._rest
        return self._scratch[kept:]

    def filled(self, count: int) -> list[Message]:
        """Take `count` bytes that were put into `space`; returns the messages that are complete.

        On bytes that are no message it sets `broken` and returns the messages before them.
        """
        if self.broken is not None:
            return []
        if self._own is not None:
            return self._fill_own(count)
        return self._cut(len(self._rest) + count)

    def feed(self, data: Bytes) -> list[Message]:
        """Take bytes from other memory; returns the messages that are complete."""
        messages: list[Message] = []
        view = memoryview(data)
        while view and self.broken is None:
            space = self.space()
            count = min(len(space), len(view))
            space[:count] = view[:count]
            view = view[count:]
            messages += self.filled(count)
        return messages

    def _cut(self, end: int) -> list[Message]:
        view, limit, unpack = self._scratch, self.limit_bytes, MESSAGE_HEAD.unpack_from
        messages: list[Message] = []
        at = 0
        while end - at >= MESSAGE_HEAD.size:
            command, size = unpack(view, at)
            if size > limit:
                self._refuse(command, size)
                return messages
            start = at + MESSAGE_HEAD.size
            if start + size > end:
                if size > SMALL_BYTES:
                    self._begin_own(command, size, view[start:end])
                    return messages
                break
            at = start + size
            messages.append((command, bytes(view[start:at])))
        self._rest = bytes(view[at:end])
        return messages

    def _begin_own(self, command: int, size: int, arrived: memoryview) -> None:
        self._rest = b""
        self._command, self._size, self._filled = command, size, len(arrived)
        try:
            self._own = (self._room if size >= LARGE_BYTES else own_memory)(size)
        except OSError as error:
            self.broken = ProtocolViolation(f"no memory for a message of {size} bytes ({error})")
            return
        self._own[: len(arrived)] = arrived

    def _fill_own(self, count: int) -> list[Message]:
        own = self._own
        assert own is not None
        self._filled += count
        if self._filled == self._size:
            self._own = None
            return [(self._command, own)]
        return []

    def _refuse(self, command: int, size: int) -> None:
        self._rest = b""
        self.broken = ProtocolViolation(
            f"a message of {size} bytes (command 0x{command:02x}) is over the limit of "
            f"{self.limit_bytes}; nothing of it was read. Send less in one frame",
            size_bytes=size,
            limit_bytes=self.limit_bytes,
        )


def encode_message(command: int, body: Bytes) -> bytes:
    """A message that is no frame.

    >>> encode_message(0xFE, b"{}")
    b'\\xfe\\x02\\x00\\x00\\x00{}'
    """
    return MESSAGE_HEAD.pack(command, len(body)) + body


def encode_frame(frame: Frame, compressor: int = 0) -> list[Bytes]:
    """A frame as buffers to write one after another; parts are not copied.

    `compressor` is a number in COMPRESSORS. Frames that are small or do not shrink are not compressed.
    """
    kind, request, meta, parts, mark = frame
    meta_bytes, count = len(meta), len(parts)
    size = BODY_HEAD.size + meta_bytes + count * PART_LENGTH.size + sum(map(len, parts))
    if size > MAX_BODY_BYTES or count > MAX_PARTS:
        raise ProtocolViolation(
            f"a frame of {count} parts and {size} bytes does not fit the stream; send less in one"
        )
    if compressor and size >= COMPRESS_MIN_BYTES:
        return _compressed(frame, compressor, size)
    if count == 0:
        return [_NO_PARTS.pack(kind, size, request, mark, 0, 0, meta_bytes) + meta]
    if count == 1:
        part = parts[0]
        head = _ONE_PART.pack(kind, size, request, mark, 0, 1, meta_bytes, len(part))
        return [head + meta, part]
    head = _NO_PARTS.pack(kind, size, request, mark, 0, count, meta_bytes)
    return [head + struct.pack(f"<{count}I", *map(len, parts)) + meta, *parts]


def _compressed(frame: Frame, compressor: int, size: int) -> list[Bytes]:
    _, *content = frame.body()
    small = compressors.get(COMPRESSORS[compressor]).compress(b"".join(content))
    if len(small) + RAW_SIZE.size >= size - BODY_HEAD.size:
        return encode_frame(frame)
    kind, request, meta, parts, mark = frame
    stored = BODY_HEAD.size + RAW_SIZE.size + len(small)
    head = _NO_PARTS.pack(kind, stored, request, mark, compressor, len(parts), len(meta))
    return [head + RAW_SIZE.pack(size - BODY_HEAD.size), small]


def decode_frame(message: Message, limit_bytes: int) -> Frame:
    """The frame in a message; raises ProtocolViolation on anything else.

    >>> frame = Frame(0x13, 7, b"meta", (b"part",))
    >>> [message] = StreamReader(100).feed(b"".join(encode_frame(frame)))
    >>> decode_frame(message, 100) == frame
    True
    """
    command, body = message
    if len(body) < BODY_HEAD.size:
        return Frame.parse(command, body)  # raises the error that fits
    request, mark, compressor, count, meta_bytes = BODY_HEAD.unpack_from(body)
    if compressor:
        # The expanded content is not joined to the head, which would copy all of it.
        return Frame.of_content(command, body[: BODY_HEAD.size], _content(body, limit_bytes))
    if count < 2 and command in _KINDS and mark in _MARKS and meta_bytes <= MAX_META_BYTES:
        # Nearly every frame has one part or none, and needs no table of lengths.
        meta_at = BODY_HEAD.size + count * PART_LENGTH.size
        meta_end = meta_at + meta_bytes
        if count == 0 and meta_end == len(body):
            return _frame(Frame, (command, request, bytes(body[meta_at:]), (), mark))
        part_bytes = len(body) - meta_end
        if (
            count
            and part_bytes >= 0
            and body[BODY_HEAD.size : meta_at] == PART_LENGTH.pack(part_bytes)
        ):
            meta, part = bytes(body[meta_at:meta_end]), memoryview(body)[meta_end:]
            return _frame(Frame, (command, request, meta, (part,), mark))
    return Frame.parse(command, body)


_frame = tuple.__new__  # the frame's own constructor takes three times as long


def _content(body: Bytes, limit_bytes: int) -> Bytes:
    number, at = body[COMPRESSOR_AT], BODY_HEAD.size + RAW_SIZE.size
    if number >= len(COMPRESSORS) or len(body) < at:
        raise ProtocolViolation(
            f"no compressor {number}: 1 is lz4, 2 zstd, 3 snappy, and 4 bytes of size come first"
        )
    (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
    view = memoryview(body)
    try:
        return bounded_decompress(
            COMPRESSORS[number], view[at:], raw_bytes, limit_bytes - BODY_HEAD.size
        )
    except (DecodeFailed, UnknownCompressor) as error:
        raise ProtocolViolation(f"a frame does not expand: {error.message}") from error

"""Expanding: which frames of a client are expanded and translated by a thread (row T13)."""

from __future__ import annotations

from penstock.model.errors import PenstockError
from penstock.server.detour import Detour
from penstock.wire.bound import UNCOUNTED_BYTES, check_message
from penstock.wire.frame import BODY_HEAD, Frame
from penstock.wire.mark import from_mark
from penstock.wire.stream import COMPRESSOR_AT, RAW_SIZE, Message, decode_frame

Read = tuple[Frame, PenstockError | None]
"""A frame, and why its message cannot be read: that costs the client an answer, not its connection."""
Expansion = Detour[Message, Read]

MARK_AT = 8  # where in a body its mark stands


def expanded_bytes(message: Message, limit_bytes: int) -> int:
    """What a message takes when it is expanded; 0 for one that is not compressed, or is refused."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size or not body[COMPRESSOR_AT]:
        return 0
    (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
    return raw_bytes if raw_bytes <= limit_bytes else 0


def expands(expansion: Expansion, message: Message, limit_bytes: int) -> bool:
    """Expand and translate a message elsewhere; False when it is not worth it, or needs neither."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size:
        return False
    raw_bytes = expanded_bytes(message, limit_bytes)
    if not raw_bytes and (body[COMPRESSOR_AT] or not body[MARK_AT]):
        return False  # one that is too large is refused without any work
    size_bytes = max(raw_bytes, len(body))
    return expansion.begin(message, size_bytes, read_frame, message, limit_bytes)


def translated(frame: Frame) -> Read:
    """A frame as the broker knows it, whatever mark its client likes; too large a message is not read."""
    if not frame.mark and len(frame.meta) <= UNCOUNTED_BYTES:
        return frame, None
    try:
        check_message(frame)
        return from_mark(frame), None
    except PenstockError as error:
        return frame, error


def read_frame(message: Message, limit_bytes: int) -> Read:
    """The frame in a message, expanded and translated."""
    try:
        return translated(decode_frame(message, limit_bytes))
    except PenstockError as error:
        # A trace would hold what was expanded for as long as the error is talked about.
        raise error.with_traceback(None) from None

"""Expanding: which frames of a client are expanded by a thread (row T13)."""

from __future__ import annotations

from penstock.server.detour import Detour
from penstock.wire.frame import BODY_HEAD, Frame
from penstock.wire.stream import COMPRESSOR_AT, RAW_SIZE, Message, decode_frame

Expansion = Detour[Message, Frame]


def expands(expansion: Expansion, message: Message, limit_bytes: int) -> bool:
    """Expand a message elsewhere; False when it is not worth it, or not compressed."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size or not body[COMPRESSOR_AT]:
        return False
    (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
    if raw_bytes > limit_bytes:
        return False  # refused without any work
    size_bytes = max(raw_bytes, len(body))
    return expansion.begin(message, size_bytes, decode_frame, message, limit_bytes)

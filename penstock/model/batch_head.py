"""The head of an encoded batch: what it holds, how many events, and where its columns begin."""

from __future__ import annotations

import struct
from typing import NamedTuple

from penstock.model.errors import FormatTooNew, InvalidBatch

VERSION = 1
# version, flags, count, partition, schema id, base offset, append time, event time of the first,
# stored body bytes, raw body bytes, side file bytes, lengths of topic, tenant, codec and compressor
# names, token of the first
HEAD = struct.Struct("<BxHIIIQqqIIIHBBB3x16s")
CONSECUTIVE_TOKENS = 1
ONE_TIME = 2
KEYS = 4
KEY_NULLS = 8
HEADERS = 16
EXPIRES = 32
PRIORITY = 64
EXPLICIT_TOKENS = 128
APPEND_TIMES = 256


class BatchHead(NamedTuple):
    """The fixed part of an encoded batch: enough to index it without touching its columns."""

    flags: int
    count: int  # type: ignore[assignment]
    partition: int
    schema_id: int
    base_offset: int
    append_time_us: int
    time_us: int
    stored_bytes: int
    raw_bytes: int
    side_bytes: int
    token_base: bytes
    topic: str
    tenant: str
    codec: str
    compressor: str
    body_at: int

    @property
    def urgent(self) -> bool:
        """Whether some of its events may have a priority."""
        return bool(self.flags & PRIORITY)

    @classmethod
    def parse(cls, view: memoryview) -> BatchHead:
        """Read the head of an encoded batch."""
        if len(view) < HEAD.size:
            raise InvalidBatch(f"{len(view)} bytes are too short for a batch")
        version, *numbers, topic, tenant, codec, compressor, token = HEAD.unpack_from(view)
        if version != VERSION:
            raise FormatTooNew(
                f"a batch of version {version} was met; this Penstock reads version {VERSION}. "
                "Upgrade Penstock",
                version=version,
            )
        names_end = HEAD.size + topic + tenant + codec + compressor
        body_at = names_end + (-names_end & 7)
        try:
            names = str(view[HEAD.size : names_end], "ascii")
        except UnicodeDecodeError:
            raise InvalidBatch("the names in a batch head are not ASCII") from None
        a, b, c = topic, topic + tenant, topic + tenant + codec
        head = cls(*numbers, token, names[:a], names[a:b], names[b:c], names[c:], body_at)  # type: ignore[call-arg]
        if head.count == 0 or body_at + head.stored_bytes > len(view):
            raise InvalidBatch(
                f"a batch of {head.count} events claims more than its {len(view)} bytes"
            )
        return head

"""What events take: the one measure of segments, of storage quotas and of recorded traffic.

Each event counts 64 bytes for its fixed columns, and its payload, key and headers as they are,
uncompressed. So a number is the same for events in memory, in the journal and in a segment, however
they were packed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.model.batch import EVENT_OVERHEAD_BYTES
from penstock.model.batch_head import (
    CONSECUTIVE_TOKENS,
    HEADERS,
    KEY_NULLS,
    KEYS,
    ONE_TIME,
    BatchHead,
)
from penstock.model.compressor import bounded_decompress
from penstock.model.errors import PenstockError
from penstock.model.token import TOKEN_BYTES

if TYPE_CHECKING:
    from penstock.model.batch import EventBatch
    from penstock.model.column import Bytes, Strings

_INT = struct.Struct("<i")


class Measure(NamedTuple):
    """Bytes of some events."""

    payload: int
    """Of their payloads alone: what rates count."""
    events: int
    """Of all there is to them: what storage quotas count."""


def payload_bytes(batch: EventBatch) -> int:
    """The payloads of a batch, one in a side file included."""
    return batch.side_bytes or _span(batch.payload_column)


def event_bytes(batch: EventBatch) -> int:
    """What the events of a batch take uncompressed.

    >>> from penstock.model.batch import EventBatch
    >>> event_bytes(EventBatch.build("orders", [b"12345", b"678"], keys=[b"k", None]))
    137
    """
    size = batch.count * EVENT_OVERHEAD_BYTES + payload_bytes(batch)
    if batch.key_column is not None:
        size += _span(batch.key_column)
    headers = batch.header_column
    if headers is not None:
        ends = np.frombuffer(headers.offsets, dtype=np.int32, count=headers.count + 1)
        first, last = int(ends[0]), int(ends[-1])
        if last > first:
            size += _span(headers.keys.slice(first, last)) + _span(
                headers.values.slice(first, last)
            )
    return size


def measured(head: BatchHead, encoded: memoryview) -> Measure:
    """The measure of an encoded batch, from its head and the last offset of each column.

    >>> from penstock.model.batch import EventBatch
    >>> batch = EventBatch.build("orders", [b"12345", b"678"], keys=[b"k", None])
    >>> encoded = memoryview(batch.encode())
    >>> measured(BatchHead.parse(encoded), encoded)
    Measure(payload=8, events=137)
    """
    body: Bytes = encoded[head.body_at : head.body_at + head.stored_bytes]
    try:
        if head.compressor != "none":
            body = bounded_decompress(head.compressor, body, head.raw_bytes, head.raw_bytes)
        return _measured(head, body)
    except (PenstockError, struct.error):
        # Whoever reads the events says what is wrong; here a bound will do.
        size = head.raw_bytes + head.side_bytes
        return Measure(size, head.count * EVENT_OVERHEAD_BYTES + size)


def _measured(head: BatchHead, body: Bytes) -> Measure:
    flags, count = head.flags, head.count
    at = keys = headers = 0
    if not flags & CONSECUTIVE_TOKENS:
        at += count * TOKEN_BYTES
    if not flags & ONE_TIME:
        at += count * 8
    if flags & KEYS:
        if flags & KEY_NULLS:
            at += _padded((count + 7) // 8)
        keys, at = _strings(body, at, count)
    payload, at = _strings(body, at, count)
    if flags & HEADERS:
        entries: int = _INT.unpack_from(body, at + 4 * count)[0]
        names, at = _strings(body, at + _padded(4 * count + 4), entries)
        values, at = _strings(body, at, entries)
        headers = names + values
    payload = head.side_bytes or payload
    return Measure(payload, count * EVENT_OVERHEAD_BYTES + payload + keys + headers)


def _strings(body: Bytes, at: int, count: int) -> tuple[int, int]:
    """The bytes of the column that begins at `at`, and where the next one does."""
    size: int = _INT.unpack_from(body, at + 4 * count)[0]
    return size, at + _padded(4 * count + 4) + _padded(size)


def _padded(size: int) -> int:
    return size + (-size & 7)


def _span(column: Strings) -> int:
    ends = column.ends()
    return int(ends[column.count] - ends[0])

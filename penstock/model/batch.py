"""EventBatch: the unit of everything, laid out as Arrow columns.

A batch holds events of one topic and partition. Encoding joins buffers, decoding slices them, and
the same bytes lie in the journal, travel over wires and wrap as Arrow arrays without copying
(penstock.model.arrow). docs/reference/batch.md draws the layout.

Columns with the same value for every event are stored once: consecutive tokens as their first, one
event time as one number. A batch of one therefore costs little more than its payload.

`event_bytes` is the one measure of segments, of storage quotas and of recorded traffic. Each event
counts 64 bytes for its fixed columns, and its payload, key and headers as they are, uncompressed.
So a number is the same for events in memory, in the journal and in a segment, in batches of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.model.column import (
    MAX_COLUMN_BYTES,
    NO_HEADERS,
    Bytes,
    HeaderColumn,
    Headers,
    Strings,
    padding,
)
from penstock.model.compressor import bounded_decompress, compressors
from penstock.model.errors import FormatTooNew, InvalidBatch, PenstockError
from penstock.model.event import Event
from penstock.model.token import TOKEN_BYTES, expand, token_at

VERSION = 1
# version, flags, count, partition, schema id, base offset, append time, event time of the first,
# stored body bytes, raw body bytes, side file bytes, lengths of topic, tenant, codec and compressor
# names, token of the first
HEAD = struct.Struct("<BxHIIIQqqIIIHBBB3x16s")
_RAW_BYTES, _TOPIC_BYTES, _COMPRESSOR_BYTES = 9, 11, 14  # where in the head
CONSECUTIVE_TOKENS = 1
ONE_TIME = 2
KEYS = 4
KEY_NULLS = 8
HEADERS = 16
EXPIRES = 32
PRIORITY = 64
EXPLICIT_TOKENS = 128
APPEND_TIMES = 256

# Head and body of a batch with three full columns stay below this, whatever a head claims.
MAX_BODY_BYTES = 3 * MAX_COLUMN_BYTES
STRIDE_EVENTS = 512

# What an event takes beside key, payload and headers: the fixed columns, uncompressed.
EVENT_OVERHEAD_BYTES = 64

_INT = struct.Struct("<i")


# -- the batch ------------------------------------------------------------------------------------


class EventBatch:
    """Events of one topic and partition, as columns.

    >>> batch = EventBatch.build("orders.created", [b"a", b"bc"], keys=[b"k", None])
    >>> again = EventBatch.decode(batch.encode())
    >>> [(event.key, event.payload) for event in again]
    [(b'k', b'a'), (None, b'bc')]
    """

    __slots__ = (
        "_body", "_stored", "append_time_us", "append_times", "base_offset", "codec", "compressor",
        "count", "expires", "explicit_tokens", "header_column", "key_column", "key_validity",
        "partition", "payload_column", "priority", "schema_id", "side_bytes", "tenant", "time_us",
        "times", "token_base", "tokens", "topic",
    )  # fmt: skip

    def __init__(self, topic: str, count: int, payload_column: Strings) -> None:
        self.topic = topic
        self.count = count
        self.payload_column = payload_column
        self.tenant = "default"
        self.partition = 0
        self.base_offset = 0
        self.append_time_us = 0
        self.append_times: npt.NDArray[np.int64] | None = None
        self.schema_id = 0
        self.codec = "raw"
        self.compressor = "none"
        self.token_base = bytes(TOKEN_BYTES)
        self.tokens: Bytes | None = None
        self.explicit_tokens = False
        self.time_us = 0
        self.times: npt.NDArray[np.int64] | None = None
        self.key_column: Strings | None = None
        self.key_validity: Bytes | None = None
        self.header_column: HeaderColumn | None = None
        self.expires: npt.NDArray[np.int64] | None = None
        self.priority: npt.NDArray[np.uint8] | None = None
        self.side_bytes = 0
        self._body: Bytes | None = None
        self._stored: Bytes | None = None

    @classmethod
    def build(
        cls,
        topic: str,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers | None] | None = None,
        tokens: Sequence[bytes] | None = None,
        token_base: bytes = bytes(TOKEN_BYTES),
        times_us: Sequence[int] | int = 0,
        expires_us: Sequence[int] | None = None,
        priority: Sequence[int] | None = None,
        tenant: str = "default",
        codec: str = "raw",
        schema_id: int = 0,
    ) -> EventBatch:
        """Lay out lists as columns; every list must be as long as `payloads`."""
        count = len(payloads)
        same_length(count, keys=keys, headers=headers, tokens=tokens, expires_us=expires_us,
                    priority=priority, times_us=None if isinstance(times_us, int) else times_us)  # fmt: skip
        try:
            batch = cls(topic, count, Strings.of(payloads))
        except TypeError:
            raise _blame("payloads", payloads) from None
        if count == 1 and not isinstance(payloads[0], bytes | bytearray | memoryview):
            raise _blame("payloads", payloads)  # nothing was joined that could have objected
        batch.tenant, batch.codec, batch.schema_id = tenant, codec, schema_id
        batch.token_base = token_base
        if tokens is not None:
            batch.tokens = b"".join(tokens)
            batch.explicit_tokens = True
            if len(batch.tokens) != count * TOKEN_BYTES:
                raise InvalidBatch("every token has 16 bytes", column="tokens")
            batch.token_base = batch.tokens[:TOKEN_BYTES]
        if isinstance(times_us, int):
            batch.time_us = times_us
        else:
            batch.times = np.asarray(times_us, dtype=np.int64)
            batch.time_us = int(batch.times[0])
        if keys is not None and (count > 1 or keys[0] is not None):
            batch._set_keys(keys)
        if headers is not None and any(headers):
            batch.header_column = HeaderColumn.of(headers)
        if expires_us is not None:
            batch.expires = np.asarray(expires_us, dtype=np.int64)
        if priority is not None:
            batch.priority = np.asarray(priority, dtype=np.uint8)
        return batch

    def _set_keys(self, keys: Sequence[bytes | None]) -> None:
        if None in keys:
            present = np.fromiter((key is not None for key in keys), dtype=bool, count=len(keys))
            if not present.any():
                return
            self.key_validity = np.packbits(present, bitorder="little").tobytes()
            keys = [key or b"" for key in keys]
        try:
            self.key_column = Strings.of(keys)  # type: ignore[arg-type]
        except TypeError:
            raise _blame("keys", keys) from None

    # -- encoding ------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The batch as one byte string."""
        return b"".join(self.encode_parts())

    def encode_parts(self) -> tuple[bytes, Bytes]:
        """Head and body apart: the body is fixed early, the head gets its offset late."""
        return self._head(), self.stored_body()

    def stored_body(self) -> Bytes:
        """The body as it is stored: compressed when a compressor was chosen."""
        if self._stored is None:
            body = self.body()
            if self.compressor == "none":
                self._stored = body
            else:
                self._stored = compressors.get(self.compressor).compress(body)
        return self._stored

    def body(self) -> Bytes:
        """The columns, padded to eight bytes each and joined; computed once."""
        if self._body is None:
            parts: list[Bytes] = []
            buffers: list[Bytes] = []
            if self.tokens is not None:
                buffers.append(self.tokens)
            if self.times is not None:
                buffers.append(self.times.tobytes())
            if self.key_column is not None:
                if self.key_validity is not None:
                    buffers.append(self.key_validity)
                buffers += self.key_column.parts()
            offsets, data = self.payload_column.parts()
            before = sum(len(buffer) + (-len(buffer) & 7) for buffer in buffers)
            buffers += (offsets, data)
            if self.header_column is not None:
                buffers += self.header_column.parts()
            if self.expires is not None:
                buffers.append(self.expires.tobytes())
            if self.priority is not None:
                buffers.append(self.priority.tobytes())
            if self.append_times is not None:
                buffers.append(self.append_times.tobytes())
            for buffer in buffers:
                parts += (buffer, padding(len(buffer)))
            self._body = b"".join(parts)
            # From here on the payloads are held once, inside the body.
            view, start = memoryview(self._body), before + len(offsets) + (-len(offsets) & 7)
            self.payload_column = Strings(
                self.count, view[before : before + len(offsets)], view[start : start + len(data)]
            )
        return self._body

    def _head(self) -> bytes:
        topic, tenant = self.topic.encode(), self.tenant.encode()
        codec, compressor = self.codec.encode(), self.compressor.encode()
        names = b"".join((topic, tenant, codec, compressor))
        head = HEAD.pack(
            VERSION, self._flags(), self.count, self.partition, self.schema_id, self.base_offset,
            self.append_time_us, self.time_us, len(self.stored_body()), len(self.body()),
            self.side_bytes, len(topic), len(tenant), len(codec), len(compressor), self.token_base,
        )  # fmt: skip
        return b"".join((head, names, padding(HEAD.size + len(names))))

    def _flags(self) -> int:
        return (
            (CONSECUTIVE_TOKENS if self.tokens is None else 0)
            | (ONE_TIME if self.times is None else 0)
            | (KEYS if self.key_column is not None else 0)
            | (KEY_NULLS if self.key_validity is not None else 0)
            | (HEADERS if self.header_column is not None else 0)
            | (EXPIRES if self.expires is not None else 0)
            | (PRIORITY if self.priority is not None else 0)
            | (EXPLICIT_TOKENS if self.explicit_tokens else 0)
            | (APPEND_TIMES if self.append_times is not None else 0)
        )

    def compress_with(self, name: str) -> None:
        """Store the body through this compressor from now on."""
        self.compressor = name
        self._stored = None

    def forget_encoding(self) -> None:
        """A column was replaced: the next `encode` does not reuse the encoded form."""
        self._body = self._stored = None

    @classmethod
    def decode(cls, data: Bytes, *, limit_bytes: int = MAX_BODY_BYTES) -> EventBatch:
        """Slice a batch out of bytes made by `encode`; raises InvalidBatch on anything else."""
        view = memoryview(data)
        head = BatchHead.parse(view)
        body: Bytes = view[head.body_at : head.body_at + head.stored_bytes]
        if head.compressor != "none":
            body = bounded_decompress(head.compressor, body, head.raw_bytes, limit_bytes)
        batch = cls(head.topic, head.count, Strings(0, b"", b""))
        batch.tenant, batch.codec = head.tenant, head.codec
        batch.partition, batch.schema_id = head.partition, head.schema_id
        batch.base_offset, batch.append_time_us = head.base_offset, head.append_time_us
        batch.side_bytes = head.side_bytes
        batch.time_us, batch.token_base = head.time_us, head.token_base
        try:
            batch._slice_columns(memoryview(body), head.flags)
        except (ValueError, IndexError, struct.error) as error:
            raise InvalidBatch(f"the columns of a batch do not fit its head: {error}") from None
        return batch

    def _slice_columns(self, body: memoryview, flags: int) -> None:
        cursor = _Cursor(body)
        count = self.count
        if not flags & CONSECUTIVE_TOKENS:
            self.tokens = cursor.take(count * TOKEN_BYTES)
        self.explicit_tokens = bool(flags & EXPLICIT_TOKENS)
        if not flags & ONE_TIME:
            self.times = cursor.numbers(count)
        if flags & KEYS:
            if flags & KEY_NULLS:
                self.key_validity = cursor.take((count + 7) // 8)
            self.key_column = cursor.strings(count)
        self.payload_column = cursor.strings(count)
        if flags & HEADERS:
            offsets = cursor.take((count + 1) * 4)
            entries = offsets.cast("i")[count]
            self.header_column = HeaderColumn(
                count, offsets, cursor.strings(entries), cursor.strings(entries)
            )
        if flags & EXPIRES:
            self.expires = cursor.numbers(count)
        if flags & PRIORITY:
            self.priority = np.frombuffer(cursor.take(count), dtype=np.uint8)
        if flags & APPEND_TIMES:
            self.append_times = cursor.numbers(count)
        self._body = self._stored = body[: cursor.position]

    # -- reading -------------------------------------------------------------------------------

    @property
    def end_offset(self) -> int:
        """One past the last offset."""
        return self.base_offset + self.count

    @property
    def urgent(self) -> bool:
        """Whether some of its events may have a priority."""
        return self.priority is not None

    @property
    def size_bytes(self) -> int:
        """What the columns take, payload in a side file included."""
        return len(self.body()) + self.side_bytes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Event]:
        # In strides, so that what is built for one event is still in the processor's cache when
        # the caller looks at it: twice as fast on a batch of 65,536.
        column = self.header_column
        shared = None if column is None else column.shared_mappings()
        for start in range(0, self.count, STRIDE_EVENTS):
            stop = min(start + STRIDE_EVENTS, self.count)
            part = self.slice(start, stop)
            headers = part.headers() if shared is None else shared[start:stop]
            columns = (part.keys(), part.payloads(), headers)
            yield from map(Event, repeat(self), range(start, stop), *columns)

    def event(self, index: int, attempt: int = 0, delivery: Any = None) -> Event:
        """One event, as a view into this batch."""
        column = self.header_column
        headers = NO_HEADERS if column is None else column.at(index)
        payload = self.payload_column.at(index)
        return Event(self, index, self.key(index), payload, headers, attempt, delivery)

    def key(self, index: int) -> bytes | None:
        """The key of one event."""
        if self.key_column is None:
            return None
        if self.key_validity is not None and not self.key_validity[index >> 3] >> (index & 7) & 1:
            return None
        return self.key_column.at(index)

    def keys(self) -> Sequence[bytes | None]:
        """The keys of all events."""
        if self.key_column is None:
            return [None] * self.count
        values: list[bytes | None] = list(self.key_column.values())
        if self.key_validity is not None:
            bits = np.frombuffer(self.key_validity, dtype=np.uint8)
            present = np.unpackbits(bits, bitorder="little", count=self.count)
            for index in np.flatnonzero(present == 0).tolist():
                values[index] = None
        return values

    def payloads(self) -> list[bytes]:
        """The payloads of all events."""
        return self.payload_column.values()

    def headers(self) -> Sequence[Headers]:
        """The headers of all events."""
        if self.header_column is None:
            return [NO_HEADERS] * self.count
        return self.header_column.mappings()

    def token(self, index: int) -> bytes:
        """The token of one event."""
        if self.tokens is None:
            return token_at(self.token_base, index)
        return bytes(self.tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES])

    def token_bytes(self) -> Bytes:
        """The tokens of all events, joined."""
        return expand(self.token_base, self.count) if self.tokens is None else self.tokens

    def time(self, index: int) -> int:
        """The event time of one event, in microseconds since 1970 UTC."""
        return self.time_us if self.times is None else int(self.times[index])

    def append_time(self, index: int) -> int:
        """When the log took the event, in microseconds since 1970 UTC."""
        return self.append_time_us if self.append_times is None else int(self.append_times[index])

    def slice(self, start: int, stop: int) -> EventBatch:
        """The events from index `start` to `stop`, sharing the columns."""
        if start == 0 and stop == self.count:
            return self
        part = EventBatch(self.topic, stop - start, self.payload_column.slice(start, stop))
        part.tenant, part.codec, part.schema_id = self.tenant, self.codec, self.schema_id
        part.partition, part.base_offset = self.partition, self.base_offset + start
        part.append_time_us, part.time_us = self.append_time(start), self.time(start)
        part.explicit_tokens = self.explicit_tokens
        part.token_base = self.token(start)
        if self.tokens is not None:
            part.tokens = memoryview(self.tokens)[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        for name in ("times", "append_times", "expires", "priority"):
            column = getattr(self, name)
            if column is not None:
                setattr(part, name, column[start:stop])
        if self.key_column is not None:
            part.key_column = self.key_column.slice(start, stop)
            part.key_validity = _slice_bits(self.key_validity, start, stop)
        if self.header_column is not None:
            part.header_column = self.header_column.slice(start, stop)
        return part


class _Cursor:
    """Walks over the padded columns of a body."""

    __slots__ = ("body", "position")

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.position = 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self.position + size > len(self.body):
            raise ValueError(f"{size} bytes at {self.position} of {len(self.body)}")
        start = self.position
        self.position = start + size + (-size & 7)
        return self.body[start : start + size]

    def numbers(self, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.take(count * 8), dtype=np.int64)

    def strings(self, count: int) -> Strings:
        offsets = self.take((count + 1) * 4)
        return Strings(count, offsets, self.take(offsets.cast("i")[count]))


def _slice_bits(bits: Bytes | None, start: int, stop: int) -> bytes | None:
    if bits is None:
        return None
    values = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=stop)
    return np.packbits(values[start:], bitorder="little").tobytes()


# -- checks ---------------------------------------------------------------------------------------


def same_length(count: int, **columns: Sequence[Any] | None) -> None:
    """Raise InvalidBatch unless every column that is there has `count` values."""
    if count == 0:
        raise InvalidBatch("a batch needs at least one event", column="payloads")
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise InvalidBatch(
                f"column {name!r} has {len(column)} values for {count} payloads; "
                "give every column the same length",
                column=name,
            )


def _blame(name: str, values: Sequence[Any]) -> InvalidBatch:
    for index, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview):
            return InvalidBatch(
                f"{name}[{index}] is {type(value).__name__}, not bytes; encode it, or publish "
                "values and let a codec do it",
                column=name,
                index=index,
            )
    return InvalidBatch(f"column {name!r} does not hold bytes", column=name)


def check_columns(batch: EventBatch) -> None:
    """Prove that no offset points outside its column, and that headers are text.

    For batches from outside the checksum.
    """
    columns = [batch.payload_column, batch.key_column]
    if batch.header_column is not None:
        columns += (batch.header_column.keys, batch.header_column.values)
        ends = np.frombuffer(batch.header_column.offsets, dtype=np.int32)
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            raise InvalidBatch("header offsets run backwards")
    for column in columns:
        if column is None:
            continue
        ends = np.frombuffer(column.offsets, dtype=np.int32)
        if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > len(column.data):
            raise InvalidBatch("the offsets of a column run backwards or past its end")
    if batch.header_column is not None and not (
        batch.header_column.keys.is_text() and batch.header_column.values.is_text()
    ):
        raise InvalidBatch("a header is not text in UTF-8")


# -- the head of an encoded batch -----------------------------------------------------------------


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


def expanded_bytes(data: Bytes) -> int:
    """What an encoded batch that is compressed says that it expands to; 0 for any other bytes."""
    if len(data) < HEAD.size:
        return 0
    fields = HEAD.unpack_from(data)
    at = HEAD.size + sum(fields[_TOPIC_BYTES:_COMPRESSOR_BYTES])
    name = bytes(data[at : at + fields[_COMPRESSOR_BYTES]])
    return 0 if name == b"none" else int(fields[_RAW_BYTES])


# -- sizes ----------------------------------------------------------------------------------------


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

"""Many batches as few Arrow rows: what sealing does to thousands of small publishes.

Going through one RecordBatch for each EventBatch costs some 60 us, whatever its size; joining the
columns of all batches first costs a few microseconds a batch, so a journal full of single events
seals about as fast as one full of large batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.log.measure import event_bytes
from penstock.model.arrow import SCHEMA, TIME
from penstock.model.column import Bytes, Strings
from penstock.model.token import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.model.batch import EventBatch

# A row group is also cut at this many bytes: a reader decodes a whole one to get at one event,
# and Arrow's 32-bit offsets must never come near their end.
GROUP_MAX_BYTES = 32 * 1024 * 1024

Sized = tuple["EventBatch", int]  # a batch and its `event_bytes`, which are asked for many times


def gather(batches: Sequence[EventBatch]) -> pa.RecordBatch:
    """The events of all batches, in their order, as one RecordBatch of the log's schema.

    >>> from penstock.model.batch import EventBatch
    >>> rows = gather([EventBatch.build("a", [b"1"]), EventBatch.build("b", [b"2", b"3"])])
    >>> rows.column("topic").to_pylist(), rows.column("payload").to_pylist()
    (['a', 'b', 'b'], [b'1', b'2', b'3'])
    """
    counts = np.fromiter((batch.count for batch in batches), dtype=np.int64, count=len(batches))
    total = int(counts.sum())
    columns = [
        _names([batch.topic for batch in batches], counts),
        _repeat([batch.partition for batch in batches], counts, np.int32),
        pa.array(_offsets(batches, counts, total)),
        _times(batches, counts, "append_time_us", "append_times").view(TIME),
        _times(batches, counts, "time_us", "times").view(TIME),
        _tokens(batches, total),
        _keys(batches, counts, total),
        _strings([batch.payload_column for batch in batches], pa.binary()),
        _headers(batches, total),
        _names([batch.tenant for batch in batches], counts),
        _names([batch.codec for batch in batches], counts),
        _repeat([batch.schema_id for batch in batches], counts, np.int32),
        _expires(batches, total),
        _priority(batches, total),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def gather_groups(batches: Iterable[Sized], group_events: int) -> Iterator[pa.RecordBatch]:
    """All batches as RecordBatches of one row group each, cutting batches where needed."""
    group: list[EventBatch] = []
    events = size = 0
    for batch, weight in batches:
        while True:
            take = min(group_events - events, _fitting(batch, weight, GROUP_MAX_BYTES - size))
            if not take and not group:
                take = 1  # an event larger than a row group is a row group
            if take == batch.count:
                group.append(batch)
                events += take
                size += weight
                break
            if take:
                group.append(batch.slice(0, take))
                batch = batch.slice(take, batch.count)
                weight = event_bytes(batch)
            yield gather(group)
            group, events, size = [], 0, 0
    if group:
        yield gather(group)


def _fitting(batch: EventBatch, size: int, room: int) -> int:
    """How many events of a batch fit: payloads counted each, keys and headers by their mean."""
    if size <= room:
        return batch.count
    if batch.count == 1:
        return 0
    ends = np.frombuffer(batch.payload_column.offsets, dtype=np.int32, count=batch.count + 1)
    payload = ends[1:].astype(np.int64) - int(ends[0])
    rest = (size - int(payload[-1])) / batch.count
    sizes = payload + (np.arange(1, batch.count + 1) * rest).astype(np.int64)
    return int(np.searchsorted(sizes, room, side="right"))


def _offsets(batches: Sequence[EventBatch], counts: Any, total: int) -> Any:
    bases = np.fromiter((batch.base_offset for batch in batches), dtype=np.int64, count=len(counts))
    return np.arange(total) + np.repeat(bases - (np.cumsum(counts) - counts), counts)


def _names(names: list[str], counts: Any) -> pa.Array:
    codes: dict[str, int] = {}
    indices = [codes.setdefault(name, len(codes)) for name in names]
    return pa.DictionaryArray.from_arrays(
        _repeat(indices, counts, np.int32), pa.array(codes, pa.string())
    )


def _repeat(values: list[int], counts: Any, kind: Any) -> pa.Array:
    return pa.array(np.repeat(np.array(values, dtype=kind), counts))


def _times(batches: Sequence[EventBatch], counts: Any, one: str, many: str) -> pa.Array:
    times = np.repeat(np.array([getattr(batch, one) for batch in batches], dtype=np.int64), counts)
    start = 0
    for batch in batches:
        column = getattr(batch, many)
        if column is not None:
            times[start : start + batch.count] = column
        start += batch.count
    return pa.array(times)


def _tokens(batches: Sequence[EventBatch], total: int) -> pa.Array:
    parts = [batch.token_base if batch.count == 1 else batch.token_bytes() for batch in batches]
    return pa.Array.from_buffers(
        pa.binary(TOKEN_BYTES), total, [None, pa.py_buffer(b"".join(parts))]
    )


def _strings(columns: Sequence[Strings], kind: pa.DataType, validity: Any = None) -> pa.Array:
    """Join columns: the lengths of each, summed up anew, over the bytes of all."""
    parts: list[Bytes] = []
    for column in columns:
        ends = column.ends()
        first, last = ends[0], ends[column.count]
        whole = first == 0 and last == len(column.data)
        parts.append(column.data if whole else memoryview(column.data)[first:last])
    joined = np.frombuffer(b"".join([column.offsets for column in columns]), dtype=np.int32)
    counts = np.fromiter((column.count for column in columns), dtype=np.int64, count=len(columns))
    lengths = np.diff(joined)
    if len(columns) > 1:
        lengths = np.delete(lengths, np.cumsum(counts + 1)[:-1] - 1)
    ends_all = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends_all[1:])
    buffers = [validity, pa.py_buffer(ends_all), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def _empty(count: int) -> Strings:
    return Strings(count, bytes(4 * (count + 1)), b"")


def _keys(batches: Sequence[EventBatch], counts: Any, total: int) -> pa.Array:
    if all(batch.key_column is None for batch in batches):
        return pa.nulls(total, pa.binary())
    present = np.ones(total, dtype=bool)
    start = 0
    for batch in batches:
        stop = start + batch.count
        if batch.key_column is None:
            present[start:stop] = False
        elif batch.key_validity is not None:
            bits = np.frombuffer(batch.key_validity, dtype=np.uint8)
            present[start:stop] = np.unpackbits(bits, bitorder="little", count=batch.count)
        start = stop
    columns = [batch.key_column or _empty(batch.count) for batch in batches]
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    return _strings(columns, pa.binary(), validity)


def _headers(batches: Sequence[EventBatch], total: int) -> pa.Array:
    kind = SCHEMA.field("headers").type
    found = [batch.header_column for batch in batches if batch.header_column is not None]
    if not found:
        return pa.nulls(total, kind)
    lengths = np.zeros(total, dtype=np.int32)
    names, values = [], []
    start = 0
    for batch in batches:
        column = batch.header_column
        if column is not None:
            ends = np.frombuffer(column.offsets, dtype=np.int32, count=batch.count + 1)
            lengths[start : start + batch.count] = np.diff(ends)
            if ends[-1] > ends[0]:
                names.append(column.keys.slice(int(ends[0]), int(ends[-1])))
                values.append(column.values.slice(int(ends[0]), int(ends[-1])))
        start += batch.count
    text = pa.string()
    joined = [_strings(part or [_empty(0)], text) for part in (names, values)]
    entries = pa.StructArray.from_arrays(joined, fields=[kind.key_field, kind.item_field])
    ends_all = np.zeros(total + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends_all[1:])
    return pa.Array.from_buffers(kind, total, [None, pa.py_buffer(ends_all)], children=[entries])


def _expires(batches: Sequence[EventBatch], total: int) -> pa.Array:
    if all(batch.expires is None for batch in batches):
        return pa.nulls(total, TIME)
    values = np.concatenate(
        [
            np.zeros(batch.count, np.int64) if batch.expires is None else batch.expires
            for batch in batches
        ]
    )
    return pa.array(values, mask=values == 0).view(TIME)


def _priority(batches: Sequence[EventBatch], total: int) -> pa.Array:
    if all(batch.priority is None for batch in batches):
        return pa.nulls(total, pa.uint8())
    return pa.array(
        np.concatenate(
            [
                np.zeros(batch.count, np.uint8) if batch.priority is None else batch.priority
                for batch in batches
            ]
        )
    )

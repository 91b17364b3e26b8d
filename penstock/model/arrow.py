"""Batches as Arrow, and back, without copying what is variable in length."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.batch import EventBatch
from penstock.model.column import Bytes, HeaderColumn, Strings
from penstock.model.errors import InvalidBatch
from penstock.model.token import TOKEN_BYTES

TIME = pa.timestamp("us", tz="UTC")
NAME = pa.dictionary(pa.int32(), pa.string())
# What every reader of the log sees: Spark, Parquet files, DataFrames.
SCHEMA = pa.schema(
    [
        pa.field("topic", NAME, nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("append_time", TIME, nullable=False),
        pa.field("event_time", TIME, nullable=False),
        pa.field("token", pa.binary(TOKEN_BYTES), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.string())),
        pa.field("tenant", NAME, nullable=False),
        pa.field("codec", NAME, nullable=False),
        pa.field("schema_id", pa.int32(), nullable=False),
        pa.field("expires", TIME),
        pa.field("priority", pa.uint8()),
    ]
)


def to_arrow(batch: EventBatch) -> pa.RecordBatch:
    """A batch as an Arrow RecordBatch of `SCHEMA`; payloads, keys and headers share its memory.

    >>> to_arrow(EventBatch.build("orders", [b"a", b"b"])).column("payload").to_pylist()
    [b'a', b'b']
    """
    count = batch.count
    first = batch.base_offset
    columns = [
        _constant_name(batch.topic, count),
        pa.array(np.full(count, batch.partition, dtype=np.int32)),
        pa.array(np.arange(first, first + count, dtype=np.int64)),
        _times(batch.append_time_us, batch.append_times, count),
        _times(batch.time_us, batch.times, count),
        pa.Array.from_buffers(
            pa.binary(TOKEN_BYTES), count, [None, pa.py_buffer(batch.token_bytes())]
        ),
        _keys(batch),
        _strings(pa.binary(), batch.payload_column),
        _headers(batch),
        _constant_name(batch.tenant, count),
        _constant_name(batch.codec, count),
        pa.array(np.full(count, batch.schema_id, dtype=np.int32)),
        pa.nulls(count, TIME) if batch.expires is None else _expires(batch.expires),
        pa.nulls(count, pa.uint8()) if batch.priority is None else pa.array(batch.priority),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _constant_name(name: str, count: int) -> pa.Array:
    indices = pa.array(np.zeros(count, dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([name], pa.string()))


def _times(one: int, many: Any, count: int) -> pa.Array:
    values = np.full(count, one, dtype=np.int64) if many is None else many
    return pa.array(values).view(TIME)


def _expires(values: Any) -> pa.Array:
    return pa.array(values, mask=values == 0).view(TIME)


def _strings(kind: pa.DataType, column: Strings, validity: Bytes | None = None) -> pa.Array:
    buffers = [
        None if validity is None else pa.py_buffer(validity),
        pa.py_buffer(column.offsets),
        pa.py_buffer(column.data),
    ]
    return pa.Array.from_buffers(kind, column.count, buffers)


def _keys(batch: EventBatch) -> pa.Array:
    if batch.key_column is None:
        return pa.nulls(batch.count, pa.binary())
    return _strings(pa.binary(), batch.key_column, batch.key_validity)


def _headers(batch: EventBatch) -> pa.Array:
    kind = SCHEMA.field("headers").type
    column = batch.header_column
    if column is None:
        return pa.nulls(batch.count, kind)
    entries = pa.StructArray.from_arrays(
        [_strings(pa.string(), column.keys), _strings(pa.string(), column.values)],
        fields=[kind.key_field, kind.item_field],
    )
    return pa.Array.from_buffers(
        kind, batch.count, [None, pa.py_buffer(column.offsets)], children=[entries]
    )


def from_arrow(record: pa.RecordBatch) -> EventBatch:
    """A RecordBatch of `SCHEMA` back as a batch.

    All rows must be of one topic, partition, tenant, codec and schema, with consecutive offsets;
    `split_runs` cuts a longer RecordBatch into such pieces.
    """
    count = record.num_rows
    batch = EventBatch(
        record.column("topic")[0].as_py(), count, take_strings(record.column("payload"))
    )
    batch.partition = record.column("partition")[0].as_py()
    batch.base_offset = record.column("offset")[0].as_py()
    batch.tenant = record.column("tenant")[0].as_py()
    batch.codec = record.column("codec")[0].as_py()
    batch.schema_id = record.column("schema_id")[0].as_py()
    batch.append_time_us, batch.append_times = _read_times(record.column("append_time"))
    batch.time_us, batch.times = _read_times(record.column("event_time"))
    token = record.column("token")
    start = token.offset * TOKEN_BYTES
    batch.tokens = memoryview(token.buffers()[1])[start : start + count * TOKEN_BYTES]
    batch.token_base = bytes(batch.tokens[:TOKEN_BYTES])
    keys = record.column("key")
    if keys.null_count < count:
        batch.key_column, batch.key_validity = take_strings(keys), _validity(keys)
    headers = record.column("headers")
    if headers.null_count < count:
        batch.header_column = _read_headers(headers)
    if record.column("expires").null_count < count:
        batch.expires = record.column("expires").view(pa.int64()).fill_null(0).to_numpy()
    if record.column("priority").null_count < count:
        batch.priority = record.column("priority").fill_null(0).to_numpy()
    return batch


def take_strings(array: pa.Array) -> Strings:
    """The buffers of a binary or string array as a column."""
    buffers = array.buffers()
    start = array.offset * 4
    offsets = (
        memoryview(buffers[1])[start : start + (len(array) + 1) * 4] if buffers[1] else bytes(4)
    )
    return Strings(len(array), offsets, memoryview(buffers[2]) if buffers[2] else b"")


def _validity(array: pa.Array) -> bytes | None:
    if array.null_count == 0:
        return None
    present = array.is_valid().to_numpy(zero_copy_only=False)
    return np.packbits(present, bitorder="little").tobytes()


def _read_times(array: pa.Array) -> tuple[int, Any]:
    values = array.view(pa.int64()).to_numpy()
    first = int(values[0])
    return (first, None) if (values == first).all() else (first, values)


def _read_headers(array: pa.MapArray) -> HeaderColumn:
    offsets = array.buffers()[1]
    start = array.offset * 4
    window = memoryview(offsets)[start : start + (len(array) + 1) * 4]
    # `keys` and `items` ignore the slice's offset, which is right: the offsets are absolute.
    return HeaderColumn(len(array), window, take_strings(array.keys), take_strings(array.items))


def split_runs(record: pa.RecordBatch) -> list[EventBatch]:
    """Cut rows into batches where topic, partition, tenant, codec or schema change, or a gap opens."""
    count = record.num_rows
    if count == 0:
        return []
    cut = np.zeros(count, dtype=bool)
    for name in ("topic", "tenant", "codec"):
        indices = record.column(name).indices.to_numpy()
        cut[1:] |= indices[1:] != indices[:-1]
    for name in ("partition", "schema_id"):
        values = record.column(name).to_numpy()
        cut[1:] |= values[1:] != values[:-1]
    offsets = record.column("offset").to_numpy()
    cut[1:] |= offsets[1:] != offsets[:-1] + 1
    bounds = [0, *np.flatnonzero(cut).tolist(), count]
    return [
        from_arrow(record.slice(start, stop - start))
        for start, stop in pairwise(bounds)
        if stop > start
    ]


def batch_of_columns(topic: str, table: Any, *, tenant: str, codec: str) -> EventBatch:
    """A batch from a user's Arrow table or RecordBatch with a `payload` column.

    Columns taken: payload (binary or string), key, headers, event_time. Others are refused, so
    that nothing a caller passes is dropped in silence.
    """
    if isinstance(table, pa.Table):
        combined = table.combine_chunks()
        chunks = combined.to_batches()
        if len(chunks) != 1:
            raise InvalidBatch(
                f"the table has {combined.num_rows} rows; a batch needs at least one"
            )
        table = chunks[0]
    if not table.num_rows:
        raise InvalidBatch("the columns have no rows; a batch needs at least one event")
    known = {"payload", "key", "headers", "event_time"}
    unknown = set(table.schema.names) - known
    if unknown or "payload" not in table.schema.names:
        raise InvalidBatch(
            f"columns {sorted(table.schema.names)}: a batch takes 'payload' and optionally "
            f"{sorted(known - {'payload'})}",
            columns=table.schema.names,
        )
    payload = _as_binary(table.column("payload"), "payload")
    if payload.null_count:
        raise InvalidBatch("the payload column has nulls; use empty bytes", column="payload")
    batch = EventBatch(topic, table.num_rows, take_strings(payload))
    batch.tenant, batch.codec = tenant, codec
    if "key" in table.schema.names:
        keys = _as_binary(table.column("key"), "key")
        if keys.null_count < len(keys):
            batch.key_column, batch.key_validity = take_strings(keys), _validity(keys)
    if "headers" in table.schema.names:
        headers = table.column("headers")
        if not pa.types.is_map(headers.type) and headers.null_count < len(headers):
            raise InvalidBatch(
                f"column 'headers' is {headers.type}, not a map of text to text", column="headers"
            )
        batch.header_column = HeaderColumn.of(
            [dict(each) if each else None for each in headers.to_pylist()]
        )
    if "event_time" in table.schema.names:
        batch.times = _event_times(table.column("event_time"))
        batch.time_us = int(batch.times[0])
    return batch


def _event_times(array: pa.Array) -> Any:
    if array.null_count:
        raise InvalidBatch("the event_time column has nulls; leave it out", column="event_time")
    try:
        return array.cast(TIME).view(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise InvalidBatch(
            f"column 'event_time' is {array.type} and holds no times: {error}", column="event_time"
        ) from None


def _as_binary(array: pa.Array, name: str) -> pa.Array:
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return array
    if (
        pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_string_view(kind)
    ):
        return array.cast(pa.binary())
    raise InvalidBatch(f"column {name!r} is {kind}, not bytes or text", column=name)

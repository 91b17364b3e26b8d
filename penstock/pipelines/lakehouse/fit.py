"""Which rows fit a table: columns are cast as a whole, and only where that fails value by value.

A row that does not fit is set aside with the reason; together with those that do, every row that
came is there.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

FAULT = "fault"
SHOWN_CHARACTERS = (
    80  # of a value in a reason: it is there to be recognised, the payload has it all
)

REJECTED = pa.schema(
    [
        pa.field("reason", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("tenant", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("payload", pa.binary()),
    ]
)
"""Columns of a dead-letter table."""
RENAMED = {"topic": "source_topic"}
"""What a column is called in rows whose own `topic` would say where they are to be published."""


def fit(batch: pa.RecordBatch, target: pa.Schema) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Rows as a table wants them, and the rows it cannot take, in the columns of `REJECTED`.

    >>> rows = pa.record_batch({"n": ["1", "two"], "offset": [7, 8]})
    >>> good, bad = fit(rows, pa.schema([("n", pa.int64()), ("offset", pa.int64())]))
    >>> good.to_pylist(), bad.column("reason").to_pylist()
    ([{'n': 1, 'offset': 7}], ["column 'n': 'two' is no int64"])
    """
    reasons: dict[int, str] = {}
    if FAULT in batch.schema.names:
        faults = batch.column(FAULT)
        for row in np.flatnonzero(faults.is_valid().to_numpy(zero_copy_only=False)).tolist():
            reasons[row] = str(faults[row].as_py())
    columns = []
    for field in target:
        if field.name in batch.schema.names:
            columns.append(_take(batch.column(field.name), field, reasons))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
            if not field.nullable:
                _note(reasons, range(batch.num_rows), f"column {field.name!r} is missing")
    for name in batch.schema.names:
        if name not in target.names and name != FAULT:
            valid = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
            _note(
                reasons,
                np.flatnonzero(valid).tolist(),
                f"column {name!r} is not in the table",
            )
    return _split(batch, columns, target, reasons)


def _split(
    batch: pa.RecordBatch, columns: list[pa.Array], target: pa.Schema, reasons: dict[int, str]
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    if not reasons:
        good = pa.RecordBatch.from_arrays(columns, schema=target)
        return good, pa.RecordBatch.from_pylist([], schema=REJECTED)
    keep = np.ones(batch.num_rows, dtype=bool)
    rows = sorted(reasons)
    keep[rows] = False
    mask = pa.array(keep)
    good = pa.RecordBatch.from_arrays([each.filter(mask) for each in columns], schema=target)
    return good, _rejected(batch.take(pa.array(rows)), [reasons[row] for row in rows])


def _rejected(rows: pa.RecordBatch, reasons: list[str]) -> pa.RecordBatch:
    columns: list[pa.Array] = [pa.array(reasons, pa.string())]
    for field in list(REJECTED)[1:-1]:
        name = field.name if field.name in rows.schema.names else RENAMED.get(field.name)
        found = rows.column(name) if name in rows.schema.names else None
        # A column of the same name and another meaning is in the payload as it was.
        columns.append(
            pa.nulls(rows.num_rows, field.type)
            if found is None or not _castable(found, field.type)
            else found.cast(field.type)
        )
    columns.append(_payload(rows))
    return pa.RecordBatch.from_arrays(columns, schema=REJECTED)


def _castable(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        column.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _payload(rows: pa.RecordBatch) -> pa.Array:
    """The event's own bytes where the row has them, else the whole row as JSON."""
    if "payload" in rows.schema.names:
        column = rows.column("payload")
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            return column.cast(pa.binary())
    whole = [
        msgspec.json.encode({k: v for k, v in row.items() if k != FAULT}, enc_hook=str)
        for row in rows.to_pylist(maps_as_pydicts="lossy")
    ]
    return pa.array(whole, pa.binary())


def _take(column: pa.Array, field: pa.Field, reasons: dict[int, str]) -> pa.Array:
    if not field.nullable and column.null_count:
        empty = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        _note(reasons, empty.tolist(), f"column {field.name!r} is required and null")
    if column.type == field.type:
        return column
    if not _loses(column.type, field.type):
        try:
            return column.cast(field.type)
        except pa.ArrowException:
            pass  # some value does not fit: the loop below finds which
    return _value_by_value(column, field, reasons)


def _value_by_value(column: pa.Array, field: pa.Field, reasons: dict[int, str]) -> pa.Array:
    lost = _loses(column.type, field.type)
    whole = lost and not pa.types.is_floating(field.type)
    values: list[Any] = []
    for row in range(len(column)):
        one = column.slice(row, 1)
        try:
            if whole and one.null_count == 0:
                raise pa.ArrowInvalid("a part of it has no place in the table")
            cast = one.cast(field.type) if not whole else pa.nulls(1, field.type)
            if lost and not whole and not cast.cast(column.type).equals(one):
                raise pa.ArrowInvalid("it loses precision")
        except pa.ArrowException:
            cast = pa.nulls(1, field.type)
            shown = repr(one[0].as_py())
            shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…"
            _note(reasons, [row], f"column {field.name!r}: {shown} is no {field.type}")
        values.append(cast)
    return pa.concat_arrays(values)


def _loses(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Arrow's cast would drop something without a word."""
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        places = {field.name: field.type for field in wanted}
        return any(
            field.name not in places or _loses(field.type, places[field.name]) for field in given
        )
    if pa.types.is_list(given) and pa.types.is_list(wanted):
        return _loses(given.value_type, wanted.value_type)
    if pa.types.is_map(given) and pa.types.is_map(wanted):
        return _loses(given.item_type, wanted.item_type)
    return bool(pa.types.is_float64(given) and pa.types.is_float32(wanted))


def _note(reasons: dict[int, str], rows: Any, reason: str) -> None:
    for row in rows:
        reasons.setdefault(row, reason)


def column_names(schema: pa.Schema) -> list[str]:
    """The columns of a frame that are columns of its table: all but the fault."""
    return [name for name in schema.names if name != FAULT]


def days_of(column: pa.Array) -> pa.Array:
    """The UTC day of a date or timestamp, counted from 1970; null stays null."""
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, tz="UTC"))
    return column.cast(pa.date32()).cast(pa.int32())

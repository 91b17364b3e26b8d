"""Tables of results, the same for every format: files committed once, rows that fit, columns that change.

`Table` is what a format provides. `fit` casts columns as a whole, and value by value only where that
fails; rows that do not fit are set aside with the reason, so every row is in one of both results.
`adapt` adds and widens columns as rows need it; `evolve` also renames and drops them on command.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from penstock.model.errors import InvalidInput, SchemaMismatch, UnknownTable, Unsupported
from penstock.pipelines.lakehouse.warehouse import Warehouse

# -- tables ---------------------------------------------------------------------------------------

REJECTED_SUFFIX = "__rejected"
QUERY_PROPERTY = "penstock.query"
BATCH_PROPERTY = "penstock.batch"
DAYS = ("append_time", "event_time")  # timestamps whose day a table is cut by, the first there is


class WrittenFile(msgspec.Struct, frozen=True):
    """A Parquet file that a task wrote and the driver has not committed yet."""

    path: str
    rows: int
    size_bytes: int
    tenant: str | None = None
    day: int | None = None
    rejected: bool = False


@dataclass(frozen=True)
class Cut:
    """Which columns cut a table into partitions: a tenant, and a date or the day of a timestamp.

    >>> stamp = pa.timestamp("us", tz="UTC")
    >>> Cut.of(pa.schema([("tenant", pa.string()), ("event_time", stamp)]))
    Cut(tenant='tenant', day='event_time')
    """

    tenant: str | None = None
    day: str | None = None

    @classmethod
    def of(cls, schema: pa.Schema) -> Cut:
        """By the columns `tenant`, and `day`, `append_time` or `event_time`, where they exist."""

        def has(name: str, fits: object) -> bool:
            return name in schema.names and bool(fits(schema.field(name).type))  # type: ignore[operator]

        tenant = "tenant" if has("tenant", pa.types.is_string) else None
        if has("day", pa.types.is_date32):
            return cls(tenant, "day")
        return cls(tenant, next((n for n in DAYS if has(n, pa.types.is_timestamp)), None))


@dataclass(frozen=True)
class Layout:
    """Where and how tasks write the files of one attempt at one batch."""

    folder: str
    schema: pa.Schema
    cut: Cut
    hive: bool = False
    """Files lie in folders `tenant=…/day=…`."""
    prefix: str = ""
    """What file names begin with."""


class Table(Protocol):
    """A table that takes the files of a batch once, however often the batch is repeated."""

    name: str
    widens: bool
    """Whether its columns can take a wider type; where not, rows that need one are dead letters."""

    def schema(self) -> pa.Schema | None:
        """Its columns, or None when there is no such table."""
        ...

    def create(self, schema: pa.Schema, cut: Cut) -> None:
        """Make it, unless another writer just did."""
        ...

    def add(self, fields: Sequence[pa.Field]) -> None:
        """Add columns, null in all rows so far."""
        ...

    def widen(self, fields: Sequence[pa.Field]) -> None:
        """Give columns a wider type of the same kind."""
        ...

    def rename(self, names: dict[str, str]) -> None:
        """Give columns other names."""
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Take columns away."""
        ...

    def layout(self, query: str, batch: int, attempt: str) -> Layout:
        """Where the files of an attempt go."""
        ...

    def has_batch(self, query: str, batch: int) -> bool:
        """Whether this or a later batch of the query is in."""
        ...

    def commit(self, files: Sequence[WrittenFile], query: str, batch: int) -> bool:
        """Add all files at once, or nothing and False when the batch is in already."""
        ...

    def clean(self, query: str, batch: int) -> int:
        """Remove the files of this batch that are not in the table; returns how many."""
        ...

    def files(self) -> list[str]:
        """The data files the table consists of now."""
        ...


def total_rows(files: Iterable[WrittenFile]) -> int:
    """How many rows files hold together."""
    return sum(each.rows for each in files)


def unknown_table(name: str, uri: str) -> UnknownTable:
    """The error for a table without any batch yet."""
    return UnknownTable(
        f"there is no table {name!r} in {uri}; nothing was changed. A table is made by the first "
        "rows written to it",
        table=name,
    )


class ColumnsByName:
    """A format whose files know columns by their names cannot widen, rename or drop them."""

    name: str
    kind: str
    """What such a table is called."""
    widens = False

    def widen(self, fields: Sequence[pa.Field]) -> None:
        """Refused; a writer sends rows that need a wider type to the dead letters."""
        raise self._unsupported("widened", fields[0].name)

    def rename(self, names: dict[str, str]) -> None:
        """Refused."""
        raise self._unsupported("renamed", next(iter(names)))

    def drop(self, names: Sequence[str]) -> None:
        """Refused."""
        raise self._unsupported("dropped", names[0])

    def _unsupported(self, what: str, column: str) -> Unsupported:
        return Unsupported(
            f"columns of a {self.kind} are not {what}, for its files know them by name; "
            f"{self.name!r} keeps {column!r}. Use an Iceberg warehouse, or write another table",
            table=self.name,
        )


# -- rows that fit --------------------------------------------------------------------------------

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
    """Whether Arrow's cast would drop something silently."""
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


# -- changing columns -----------------------------------------------------------------------------

Step = Literal["add", "widen"]
AUTOMATIC: frozenset[Step] = frozenset({"add", "widen"})
"""Steps that a writer takes by itself: neither loses anything."""

TYPES = {
    "string": pa.string(), "binary": pa.binary(), "boolean": pa.bool_(), "int": pa.int32(),
    "long": pa.int64(), "float": pa.float32(), "double": pa.float64(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


def type_of(text: str) -> pa.DataType:
    """The type that a word names in a command.

    >>> type_of("long"), type_of("decimal(12,2)")
    (DataType(int64), Decimal128Type(decimal128(12, 2)))
    """
    decimal = _DECIMAL.fullmatch(text)
    if decimal is not None:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    if text not in TYPES:
        raise InvalidInput(
            f"{text!r} is no column type; the table stays as it was. Choose one of "
            f"{', '.join(TYPES)} or decimal(p,s)"
        )
    return TYPES[text]


def is_wider(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether every value of one type is the same value in the other, for good.

    >>> is_wider(pa.int32(), pa.int64()), is_wider(pa.int64(), pa.int32())
    (True, False)
    """
    if pa.types.is_signed_integer(given) and pa.types.is_signed_integer(wanted):
        return bool(wanted.bit_width > max(given.bit_width, 32))
    if pa.types.is_float32(given):
        return bool(pa.types.is_float64(wanted))
    if pa.types.is_decimal(given) and pa.types.is_decimal(wanted):
        return bool(wanted.scale == given.scale and wanted.precision > given.precision)
    return False


def adapt(table: Table, wanted: pa.Schema, allowed: Collection[Step] = AUTOMATIC) -> None:
    """Change an existing table so that rows of `wanted` fit, as far as that is allowed."""
    current = table.schema()
    if current is None:
        raise unknown_table(table.name, "this warehouse")
    if "add" in allowed:
        new = [pa.field(f.name, f.type) for f in wanted if f.name not in current.names]
        if new:
            table.add(new)
    if "widen" in allowed and table.widens:
        wider = [
            f for f in wanted
            if f.name in current.names and is_wider(current.field(f.name).type, f.type)
        ]  # fmt: skip
        if wider:
            table.widen(wider)


def evolve(
    warehouse: Warehouse,
    name: str,
    *,
    add: Mapping[str, str] | None = None,
    widen: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
) -> pa.Schema:
    """Change the columns of a table by command, in the order drop, rename, widen, add; returns the new ones.

    Each kind of change is one commit. Iceberg knows columns by number, so a renamed column keeps
    its values and a dropped one does not come back under its old name.
    """
    table = warehouse.table(name)
    schema = table.schema()
    if schema is None:
        raise unknown_table(name, warehouse.uri)
    wider = [pa.field(column, type_of(text)) for column, text in (widen or {}).items()]
    new = [pa.field(column, type_of(text)) for column, text in (add or {}).items()]
    _check(name, schema, [*drop, *(rename or {}), *(each.name for each in wider)])
    for each in wider:
        if not is_wider(schema.field(each.name).type, each.type):
            raise SchemaMismatch(
                f"column {each.name!r} of {name!r} is {schema.field(each.name).type}, and "
                f"{each.type} is not wider; the table stays as it was. Wider are long for int, "
                "double for float and a decimal with more digits and the same scale",
                table=name,
                column=each.name,
            )
    if drop:
        table.drop(drop)
    if rename:
        table.rename(dict(rename))
    if wider:
        renamed = rename or {}
        table.widen([pa.field(renamed.get(each.name, each.name), each.type) for each in wider])
    if new:
        table.add(new)
    return table.schema()


def _check(name: str, schema: pa.Schema, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in schema.names]
    if missing:
        raise SchemaMismatch(
            f"{name!r} has no column {missing[0]!r}; the table stays as it was. It has "
            f"{', '.join(schema.names)}",
            table=name,
            column=missing[0],
        )

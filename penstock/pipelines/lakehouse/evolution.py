"""How a table's columns change: added and widened as rows need it, renamed and dropped on command."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import pyarrow as pa

from penstock.model.errors import InvalidInput
from penstock.model.table_errors import SchemaMismatch
from penstock.pipelines.lakehouse.table import Table, unknown_table
from penstock.pipelines.lakehouse.warehouse import Warehouse

Step = Literal["add", "widen"]
AUTOMATIC: frozenset[Step] = frozenset({"add", "widen"})
"""What a writer does by itself: both lose nothing."""

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

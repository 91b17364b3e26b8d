"""The columns of an event as Spark sees it, and how the log's Arrow columns become them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.model.arrow import TIME
from penstock.model.errors import InvalidInput
from penstock.model.token import TOKEN_BYTES

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Name, Spark's type, Arrow's type, and the log's column it is made from.
EVENT_COLUMNS: dict[str, tuple[str, pa.DataType, str]] = {
    "topic": ("STRING", pa.string(), "topic"),
    "tenant": ("STRING", pa.string(), "tenant"),
    "partition": ("INT", pa.int32(), "partition"),
    "offset": ("BIGINT", pa.int64(), "offset"),
    "id": ("BINARY", pa.binary(), "token"),
    "append_time": ("TIMESTAMP", TIME, "append_time"),
    "event_time": ("TIMESTAMP", TIME, "event_time"),
    "key": ("BINARY", pa.binary(), "key"),
    "headers": ("MAP<STRING, STRING>", pa.map_(pa.string(), pa.string()), "headers"),
    "payload": ("BINARY", pa.binary(), "payload"),
    "codec": ("STRING", pa.string(), "codec"),
}
# Beside STRUCT and ARRAY, by the names that Spark's simpleString gives them.
PAYLOAD_TYPES = {
    "string", "binary", "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal",
    "date", "timestamp", "timestamp_ntz", "void",
}  # fmt: skip
VALUE, FAULT, LATE = "value", "fault", "late"
# Columns that are kept because the next piece has them again: topic, partition, tenant and codec.
# They hold a piece's rows each, so a fifth would only take memory.
REPEATED_VALUES = 4
# Spark looks at each value of every other column less when it knows that none of them is null.
MAYBE_NULL = ("key", VALUE, FAULT)


def row_ddl(
    names: Sequence[str], value_ddl: str | None, *, late: bool, comment: str | None = None
) -> str:
    """The columns of a read as Spark DDL: those named, or all there are; the first with a comment.

    >>> row_ddl(["offset", "value"], "n BIGINT", late=False)
    'offset BIGINT NOT NULL, value STRUCT<n BIGINT>'
    """
    known = {name: kind for name, (kind, _, _) in EVENT_COLUMNS.items()}
    if value_ddl is not None:
        known[VALUE], known[FAULT] = f"STRUCT<{value_ddl}>", "STRING"
    if late:
        known[LATE] = "BOOLEAN"
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"there is no column {name!r}; there is {', '.join(known)}. `value` and `fault` "
                "need the option `schema`, `late` needs `lateAfter`",
                column=name,
            )
    columns = [
        f"{name} {known[name]}{'' if name in MAYBE_NULL else ' NOT NULL'}"
        for name in names or known
    ]
    if comment is not None:
        quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
        columns[0] += f" COMMENT '{quoted}'"
    return ", ".join(columns)


def check_schema(wanted: StructType) -> None:
    """Refuse columns of a schema that the source does not have, or has as another type."""
    have = {name: kind for name, (kind, _, _) in EVENT_COLUMNS.items()}
    have |= {FAULT: "STRING", LATE: "BOOLEAN"}
    for each in wanted:
        kind = each.dataType.simpleString()
        if each.name == VALUE and kind.startswith("struct<"):
            kind = "struct"
            _check_may_be_missing(each.dataType, VALUE)
            check_payload(each.dataType, VALUE)
        expected = have.get(each.name, "STRUCT" if each.name == VALUE else None)
        if expected is None:
            raise InvalidInput(
                f"the schema asks for a column {each.name!r}; there is {', '.join(have)}, {VALUE}"
            )
        if kind != expected.lower().replace(" ", ""):
            raise InvalidInput(
                f"column {each.name!r} is {expected}, and the schema asks for {kind.upper()}; "
                "select the column and cast it"
            )
        if each.name in MAYBE_NULL and not each.nullable:
            raise InvalidInput(
                f"column {each.name!r} can be null; leave NOT NULL out of the schema"
            )
    if FAULT in wanted.names and VALUE not in wanted.names:
        raise InvalidInput(f"`{FAULT}` says why there is no `{VALUE}`: read both columns")


def check_payload(kind: Any, name: str) -> None:
    """Refuse types that no payload can be read as: each row would be a fault."""
    said = kind.simpleString()
    if hasattr(kind, "fields"):
        for each in kind.fields:
            check_payload(each.dataType, f"{name}.{each.name}")
    elif hasattr(kind, "elementType"):
        check_payload(kind.elementType, f"{name}[]")
    elif said.partition("(")[0] not in PAYLOAD_TYPES:
        raise InvalidInput(
            f"{name} is {said.upper()} in the schema, and payloads are not read as that; nothing was read. "
            "Take STRUCT, ARRAY, STRING, BINARY, BOOLEAN, a number, DATE or TIMESTAMP. For an object "
            "of any fields, or a value of any kind, leave it out and use from_json(CAST(payload AS STRING), ...) "
            "or parse_json(CAST(payload AS STRING))",
            column=name,
        )


def _check_may_be_missing(kind: Any, name: str) -> None:
    """Refuse NOT NULL inside a payload: Spark would take a missing field for a zero."""
    for each in getattr(kind, "fields", ()):
        if not each.nullable:
            raise InvalidInput(
                f"the schema says that {name}.{each.name} is never null, and any field can be missing "
                "from a payload; leave NOT NULL out, and filter rows where it is null"
            )
        _check_may_be_missing(each.dataType, f"{name}.{each.name}")
    if hasattr(kind, "elementType"):
        _check_may_be_missing(kind.elementType, name)


def log_columns(names: Sequence[str], *, decoded: bool, late: bool) -> list[str]:
    """What must be read of the log to give these columns."""
    wanted = {EVENT_COLUMNS[name][2] for name in names if name in EVENT_COLUMNS}
    if decoded:
        wanted |= {"payload", "codec"}
    if late:
        wanted.add("event_time")
    return [each for _, _, each in EVENT_COLUMNS.values() if each in wanted]


def plain(array: pa.Array) -> pa.Array:
    """A column of the log in the form Spark takes: no dictionaries, no fixed sizes, no null maps.

    >>> plain(pa.array(["a", "a"]).dictionary_encode()).type
    DataType(string)
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        if len(array.dictionary) == 1 and not array.null_count:
            return repeated(array.dictionary[0].as_py(), kind.value_type, len(array))
        return array.dictionary_decode()
    if pa.types.is_fixed_size_binary(kind):
        return _variable(array)
    if pa.types.is_map(kind):
        return _never_null(array)
    return array


@functools.lru_cache(REPEATED_VALUES)
def _longest(value: Any, kind: pa.DataType) -> list[pa.Array]:
    """The longest column so far that has this value in every row."""
    return [pa.repeat(pa.scalar(value, kind), 0)]


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """A column that has the same value in every row; made once, since most pieces have it again.

    >>> repeated("a", pa.string(), 2).to_pylist()
    ['a', 'a']
    """
    longest = _longest(value, kind)
    if len(longest[0]) < count:
        longest[0] = pa.repeat(pa.scalar(value, kind), count)
    return longest[0].slice(0, count)


def _never_null(maps: pa.MapArray) -> pa.MapArray:
    """No headers are an empty map: of null maps, Spark counts all so far for each row it passes on."""
    if not maps.null_count:
        return maps
    lengths = np.diff(maps.offsets.to_numpy())
    if lengths[maps.is_null().to_numpy(zero_copy_only=False)].any():
        return pa.array([each or [] for each in maps.to_pylist()], maps.type)
    return pa.MapArray.from_arrays(maps.offsets, maps.keys, maps.items)


def _variable(tokens: pa.Array) -> pa.Array:
    count, start = len(tokens), tokens.offset * TOKEN_BYTES
    data = tokens.buffers()[1].slice(start, count * TOKEN_BYTES)
    ends: Any = np.arange(count + 1, dtype=np.int32) * TOKEN_BYTES
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), data])

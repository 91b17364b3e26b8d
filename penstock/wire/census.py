"""Census: how many values a message holds, counted without making any of them.

A value takes one byte in a message and up to 72 in memory, so the bytes of a message say little about
what reading it costs. Each count is that of what a reader would make, or more: keys of maps are values.
"""

from __future__ import annotations

from penstock.model.errors import ProtocolViolation
from penstock.wire.frame import Bytes
from penstock.wire.schema import Column, Table

MAX_VARINT_BYTES = 10
_VARINT, _I64, _SIZED, _I32 = 0, 1, 2, 5  # wire types of protobuf; groups are none of ours
_PACKED = ("int64", "bool", "double")

# What msgpack values take by their first byte; 0 where bytes or values of a length follow.
_STEPS = [
    *[1] * 0x80, *[0] * 0x20, *range(1, 33), 1, 1, 1, 1, *[0] * 6, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9,
    3, 4, 6, 10, 18, *[0] * 7, *[1] * 0x20,
]  # fmt: skip
# Of those: how many bytes the length has, values for each of it, and bytes beside it.
_LENGTHS = {
    0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0), 0xC7: (1, 0, 1), 0xC8: (2, 0, 1), 0xC9: (4, 0, 1),
    0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0),
    0xDC: (2, 1, 0), 0xDD: (4, 1, 0), 0xDE: (2, 2, 0), 0xDF: (4, 2, 0),
}  # fmt: skip


def raw_values(data: Bytes, most: int) -> int:
    """Values of a msgpack message; it stops counting behind `most`, and where the message breaks off.

    >>> raw_values(bytes([0x92, 0x80, 0xA2]) + b"hi", 100)
    3
    """
    count, at, left = 0, 0, 1
    try:
        while left and count <= most:
            first = data[at]
            step = _STEPS[first]
            count += 1
            left -= 1
            if step:
                at += step
            elif first < 0xA0:  # a short map or list
                at += 1
                left += first - 0x90 if first >= 0x90 else 2 * (first - 0x80)
            else:
                width, values, beside = _LENGTHS[first]
                at += 1 + width
                length = int.from_bytes(data[at - width : at], "big")
                if values:
                    left += values * length
                else:
                    at += length + beside
    except IndexError:
        pass  # who reads it says so
    return count


def json_values(data: bytes) -> int:
    """At least as many as a JSON message holds; what looks like one inside a text counts as well.

    >>> json_values(b'{"a": [1, 2]}') >= 4
    True
    """
    signs = data.count(b",") + data.count(b":")
    return 1 + signs + 2 * (data.count(b"[") + data.count(b"{"))


def protobuf_values(data: bytes, table: Table, most: int) -> int:
    """Values of a protobuf message; stops as `raw_values` does, and raises on what none of ours has."""
    count, at = 0, 0
    inside = [(len(data), _columns(table))]
    try:
        while inside and count <= most:
            end, columns = inside[-1]
            if at >= end:
                inside.pop()
                continue
            tag, at = _varint(data, at)
            kind = tag & 7
            count += 1
            if kind == _SIZED:
                size, at = _varint(data, at)
                column = columns.get(tag >> 3)
                if column is not None and column.table is not None:
                    inside.append((at + size, _columns(column.table)))
                    continue
                if column is not None and column.kind == "json":
                    count += json_values(data[at : at + size])
                elif column is not None and column.kind in _PACKED:
                    count += size
                at += size
            elif kind == _VARINT:
                _, at = _varint(data, at)
            elif kind in (_I64, _I32):
                at += 8 if kind == _I64 else 4
            else:  # the fields of a group would be taken for ours
                raise ProtocolViolation(
                    f"a message has a field of wire type {kind}; ours have none"
                )
    except IndexError:
        pass
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next byte is."""
    first = data[at]
    if first < 0x80:
        return first, at + 1
    number = 0
    for place in range(MAX_VARINT_BYTES):
        byte = data[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise ProtocolViolation(f"a number of more than {MAX_VARINT_BYTES} bytes")


_known: dict[str, dict[int, Column]] = {}


def _columns(table: Table) -> dict[int, Column]:
    """The fields of a message by number; those of a map have messages of their own."""
    found = _known.get(table.name)
    if found is None:
        found = {column.number: _entries(table, column) for column in table.fields}
        _known[table.name] = found
    return found


def _entries(table: Table, column: Column) -> Column:
    if column.many != "map":
        return column
    pair = [Column("key", 1, column.key, ""), Column("value", 2, column.kind, "", column.table)]
    return column._replace(table=Table(f"{table.name}.{column.name}", "struct", pair))

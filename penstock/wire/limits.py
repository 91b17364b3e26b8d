"""How much the message of a client may hold, so that no frame keeps other clients waiting for long.

A broker reads a message at once, and serves no other client meanwhile. Large content belongs into parts.
A message may be large when a client that has no batches puts events into it, but it never holds many
values: docs/reference/protocol.md has the limits as a table.

A value takes one byte in a message and up to 72 in memory, so the size of a message says little about
the cost of reading it. Values are counted without making any; each count is that of a reader, or more,
and keys of maps are values.
"""

from __future__ import annotations

from penstock.model.errors import ProtocolViolation
from penstock.wire.encodings import MESSAGES, wire
from penstock.wire.frame import Bytes, Frame, Kind, Mark
from penstock.wire.protobuf import Column, Table

MIB = 1 << 20
# Names, numbers and short lists: more than any message of them needs.
MAX_SMALL_BYTES = MIB
# Payloads that JSON and protobuf clients put into messages, and payloads of schedules.
MAX_MESSAGE_BYTES = 16 * MIB
# With the deliveries that a client still holds after a restart of the broker, MAX_HELD of them.
MAX_SUBSCRIBE_BYTES = 4 * MIB
# Counting this many takes some 25 ms, making them 20 ms; at 72 bytes each they take 10 MB.
MAX_VALUES = 1 << 17
# The broker executes each call of a Settle before it serves another client.
MAX_SETTLE_VALUES = 1 << 14
# Protobuf is translated value by value, which takes several times as long.
MAX_PROTOBUF_VALUES = 1 << 14

_BYTES: dict[int, int] = {
    Kind.PUBLISH: MAX_MESSAGE_BYTES,
    Kind.TRANSACT: MAX_MESSAGE_BYTES,
    Kind.ASK: MAX_MESSAGE_BYTES,
    Kind.SUBSCRIBE: MAX_SUBSCRIBE_BYTES,
}

# A message of this size cannot hold too many values: each takes a byte or more.
UNCOUNTED_BYTES = min(MAX_VALUES, MAX_SETTLE_VALUES, MAX_PROTOBUF_VALUES)


def check_message(frame: Frame) -> None:
    """Raise ProtocolViolation when a client's message is larger, or holds more, than a broker reads.

    >>> check_message(Frame(Kind.PUBLISH, 1, bytes(2 * MIB)))
    >>> try:
    ...     check_message(Frame(Kind.SETTLE, 0, bytes(2 * MIB)))
    ... except ProtocolViolation as error:
    ...     error.data["limit_bytes"]
    1048576
    """
    size = len(frame.meta)
    if size <= UNCOUNTED_BYTES:
        return
    limit = _BYTES.get(frame.kind, MAX_SMALL_BYTES)
    if size > limit:
        raise ProtocolViolation(
            f"the message of a frame takes {size} bytes, over the {limit} that a broker reads of its "
            "kind. Send less at once; events go as batches into parts",
            size_bytes=size,
            limit_bytes=limit,
        )
    most = MAX_SETTLE_VALUES if frame.kind == Kind.SETTLE else MAX_VALUES
    if frame.mark == Mark.PROTOBUF:
        most = min(most, MAX_PROTOBUF_VALUES)
    if size > most and _values(frame, most) > most:
        raise ProtocolViolation(
            f"the message of a frame holds more than {most} values, which is what a broker reads of its "
            "kind. Send less at once; events go as batches into parts",
            limit_values=most,
        )


def _values(frame: Frame, most: int) -> int:
    if frame.mark == Mark.RAW:
        return raw_values(frame.meta, most)
    if frame.mark == Mark.JSON:
        return json_values(bytes(frame.meta))
    kind = MESSAGES.get(frame.kind)
    if kind is None:
        return 0
    return protobuf_values(bytes(frame.meta), wire().schema.table(kind), most)


# -- counting values ------------------------------------------------------------------------------


MAX_VARINT_BYTES = 10
_VARINT, _I64, _SIZED, _I32 = 0, 1, 2, 5  # the wire types of protobuf that the messages have
_PACKED = ("int64", "bool", "double")

# Bytes of a msgpack value by its first byte; 0 when its length follows.
_STEPS = [
    *[1] * 0x80, *[0] * 0x20, *range(1, 33), 1, 1, 1, 1, *[0] * 6, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9,
    3, 4, 6, 10, 18, *[0] * 7, *[1] * 0x20,
]  # fmt: skip
# For those: bytes of the length, values for each unit of it, and bytes besides.
_LENGTHS = {
    0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0), 0xC7: (1, 0, 1), 0xC8: (2, 0, 1), 0xC9: (4, 0, 1),
    0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0),
    0xDC: (2, 1, 0), 0xDD: (4, 1, 0), 0xDE: (2, 2, 0), 0xDF: (4, 2, 0),
}  # fmt: skip


def raw_values(data: Bytes, most: int) -> int:
    """Values of a msgpack message; it stops counting above `most`, and where the message ends too early.

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
        pass  # the reader of the message raises the error
    return count


def json_values(data: bytes) -> int:
    """The values of a JSON message or more: separators inside a text count as well.

    >>> json_values(b'{"a": [1, 2]}') >= 4
    True
    """
    signs = data.count(b",") + data.count(b":")
    return 1 + signs + 2 * (data.count(b"[") + data.count(b"{"))


def protobuf_values(data: bytes, table: Table, most: int) -> int:
    """Values of a protobuf message; stops like `raw_values`, and raises on wire types of no message."""
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
            else:  # the fields of a group would count as fields of the message
                raise ProtocolViolation(
                    f"a message has a field of wire type {kind}; ours have none"
                )
    except IndexError:
        pass
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and the position of the next byte."""
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

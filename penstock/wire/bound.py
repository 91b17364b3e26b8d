"""Bound: how much the message of a client may hold, so that no frame costs others more than a moment.

A broker reads a message at once, and nobody else is served meanwhile. What is large belongs into parts;
a message may be large where a client that knows no batches puts an event into it, but never holds many
values: docs/reference/protocol.md has the limits as a table.
"""

from __future__ import annotations

from penstock.model.errors import ProtocolViolation
from penstock.wire.census import json_values, protobuf_values, raw_values
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.mark import MESSAGES, wire

MIB = 1 << 20
# Names, numbers and short lists: more than any of them needs.
MAX_SMALL_BYTES = MIB
# Payloads as JSON and protobuf clients send them, and those of schedules: as much as they are sent.
MAX_MESSAGE_BYTES = 16 * MIB
# With the deliveries that a client still holds when its broker was restarted, MAX_HELD of them.
MAX_SUBSCRIBE_BYTES = 4 * MIB
# To count so many takes some 25 ms, and to make them 20; at 72 bytes each they are 10 MB.
MAX_VALUES = 1 << 17
# Each call of a Settle is carried out before anybody else is served.
MAX_SETTLE_VALUES = 1 << 14
# Protobuf is translated value by value, which takes several times as long.
MAX_PROTOBUF_VALUES = 1 << 14

_BYTES: dict[int, int] = {
    Kind.PUBLISH: MAX_MESSAGE_BYTES,
    Kind.TRANSACT: MAX_MESSAGE_BYTES,
    Kind.ASK: MAX_MESSAGE_BYTES,
    Kind.SUBSCRIBE: MAX_SUBSCRIBE_BYTES,
}

# No message of this size holds too many values, for each takes a byte or more.
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

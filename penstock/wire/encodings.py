"""Marks: frames translated between the encoding that a client chose and msgpack.

A client chooses how the meta of its frames is encoded: raw (msgpack), JSON or protobuf. With JSON or
protobuf it need not know the layout of a batch either: it publishes events as lists in the message, and
receives them as an `events` list. The broker itself only sees raw frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from penstock.model.batch import BatchHead, EventBatch
from penstock.model.errors import ProtocolViolation
from penstock.model.event import Event
from penstock.wire import message as say
from penstock.wire import protobuf
from penstock.wire.frame import MAX_META_BYTES, Bytes, Frame, Kind, Mark
from penstock.wire.protobuf import DeliverEvents, EventItem, Result

MESSAGES: dict[int, type[say.Message]] = {
    Kind.HELLO: say.Hello,
    Kind.HEARTBEAT: say.Beat,
    Kind.PUBLISH: say.Publish,
    Kind.TRANSACT: say.Transact,
    Kind.SUBSCRIBE: say.Subscribe,
    Kind.UNSUBSCRIBE: say.Feed,
    Kind.SETTLE: say.Settle,
    Kind.FETCH: say.Feed,
    Kind.COMMIT: say.Commit,
    Kind.READ: say.Read,
    Kind.ASK: say.Ask,
    Kind.WELCOME: say.Welcome,
    Kind.BEAT: say.Beat,
    Kind.RESULT: Result,
    Kind.FAULT: say.Fault,
    Kind.DELIVER: DeliverEvents,
    Kind.REFUSED: say.Refused,
    Kind.STOPPED: say.Feed,
}
"""The message in the meta of each kind. The meta of BYE, FLUSH and DRAIN is empty."""

# Batches of more bytes stay parts: in base64 and with names they would not fit into a meta.
MAX_EVENTS_BYTES = MAX_META_BYTES // 4
# Batches of more events stay parts, too: an event costs far more in a message than in its batch.
MAX_EVENTS = 100_000

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError, TypeError)
"""The errors that reading or writing a hostile message raises."""


def marks() -> tuple[str, ...]:
    """Names of the marks this installation has, as an offer names them."""
    return ("raw", "json", "protobuf") if protobuf.available() else ("raw", "json")


def from_mark(frame: Frame) -> Frame:
    """A client's frame with its meta in msgpack; raises ProtocolViolation when it cannot be read.

    >>> from_mark(Frame(Kind.FETCH, 5, b'{"feed": 3}', mark=Mark.JSON)).meta
    b'\\x81\\xa4feed\\x03'
    """
    kind = MESSAGES.get(frame.kind)
    if frame.mark == Mark.RAW:
        return frame
    if kind is None:
        return frame._replace(meta=b"", mark=Mark.RAW)
    try:
        if frame.mark == Mark.JSON:
            found = msgspec.json.decode(frame.meta or b"{}", type=kind)
        else:
            found = msgspec.convert(wire().decode(kind, frame.meta), kind)
        return frame._replace(meta=say.encode(found), mark=Mark.RAW)
    except UNREADABLE as error:
        raise ProtocolViolation(f"a {kind.__name__} message cannot be read: {error}") from None


def for_mark(frame: Frame, mark: int) -> Frame:
    """A broker's frame in the encoding of a client, with events instead of parts.

    >>> for_mark(Frame(Kind.STOPPED, 0, say.encode(say.Feed(3))), Mark.JSON).meta
    b'{"feed":3}'
    """
    if mark == Mark.RAW:
        return frame
    value: Any = msgspec.msgpack.decode(frame.meta) if frame.meta else {}
    parts = frame.parts
    if parts and frame.kind in (Kind.DELIVER, Kind.RESULT) and _listable(parts):
        value = {**value, "events": _events(parts, set(value.get("skip", ())))}
        parts = ()
    kind = MESSAGES.get(frame.kind)
    if kind is None:
        meta = b""
    elif mark == Mark.JSON:
        meta = msgspec.json.encode(value)
    else:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=False)
        meta = wire().encode(kind, _result(plain) if kind is Result else plain)
    return frame._replace(meta=meta, parts=parts, mark=mark)


def _result(value: Any) -> dict[str, Any]:
    """An answer in the fields of Result; an answer without fields there goes into `json`."""
    if isinstance(value, dict) and value.keys() <= _RESULT_FIELDS:
        return value
    return {"json": msgspec.json.encode(value).decode()}


_RESULT_FIELDS = {field.name for field in msgspec.structs.fields(Result)} - {"json"}


def _listable(parts: Sequence[Bytes]) -> bool:
    heads = [BatchHead.parse(memoryview(part)) for part in parts]
    return (
        sum(head.raw_bytes for head in heads) <= MAX_EVENTS_BYTES
        and sum(head.count for head in heads) <= MAX_EVENTS
    )


def _events(parts: Sequence[Bytes], skip: set[int]) -> list[EventItem]:
    return [
        _item(event, number)
        for number, part in enumerate(parts)
        for event in EventBatch.decode(part, limit_bytes=MAX_EVENTS_BYTES)
        if event.index not in skip
    ]


def _item(event: Event, part: int) -> EventItem:
    return EventItem(
        index=event.index,
        topic=event.topic,
        partition=event.partition,
        offset=event.offset,
        payload=event.payload,
        key=event.key,
        headers=dict(event.headers),
        codec=event.codec,
        tenant=event.tenant,
        token=event.batch.token(event.index),
        time_us=event.time_us,
        append_time_us=event.append_time_us,
        expires_us=event.expires_us,
        priority=event.priority,
        part=part,
    )


@cache
def wire() -> protobuf.Wire:
    """The messages as protobuf; raises MissingExtra without the library."""
    return protobuf.Wire(list(MESSAGES.values()))

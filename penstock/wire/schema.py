"""Schema: the messages as protobuf describes them, derived from the structs.

A field's number is its place in the struct, so a new field comes last. Every single value is
`optional`: what is absent has the default of docs/reference/protocol.md, which need not be zero.
docs/reference/penstock.proto is printed from here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from penstock.model.event import Receipt
from penstock.wire import message as say

PACKAGE = "penstock.v1"

SCALARS: dict[type, str] = {
    inspect.StrType: "string",
    inspect.IntType: "int64",
    inspect.FloatType: "double",
    inspect.BoolType: "bool",
    inspect.BytesType: "bytes",
    inspect.LiteralType: "string",
}
WRAPPED: dict[type, str] = {inspect.TupleType: "tuple", inspect.ListType: "list"}
ITEMS = {
    ("Settlement", "nacks"): ("Nack", "index", "delay_s", "reason"),
    ("Settlement", "rejects"): ("Reject", "index", "reason"),
    ("Settlement", "extends"): ("Extend", "index", "seconds"),
    ("Commit", "marks"): ("Place", "topic", "partition", "offset"),
    ("Transact", "acks"): ("LeasedEvent", "delivery", "index"),
    ("DraftMeta", "keys"): ("Key", "value"),
    ("DraftMeta", "headers"): ("Headers", "values"),
    ("Published", "receipts"): ("MaybeReceipt", "value"),
    ("Result", "receipts"): ("MaybeReceipt", "value"),
    ("Result", "adopted"): ("Indices", "values"),
    ("Welcome", "adopted"): ("Indices", "values"),
}
"""Items that are tuples or lists, or may be missing: protobuf wants a named message for each."""

NUMBERS = {("Deliver", "events"): 100}
"""Fields behind which others may come."""


class Table(NamedTuple):
    """A message: its name and its fields."""

    name: str
    form: str
    """What it stands for: a "struct", a "tuple", a "list", or "maybe" a value."""
    fields: list[Column]


class Column(NamedTuple):
    """A field of a message."""

    name: str
    number: int
    kind: str
    """A scalar of protobuf, "json" for a string that holds JSON, or "message"."""
    many: str
    """"" for one, "list" or "map"."""
    table: Table | None = None
    key: str = ""


class EventItem(say.Message, frozen=True):
    """An event inside a message, for clients that do not read batches."""

    index: int
    """Its place in the batch it came in: what Settlement counts."""
    topic: str
    partition: int
    offset: int
    payload: bytes
    key: bytes | None = None
    headers: dict[str, str] = {}
    codec: str = "raw"
    tenant: str = "default"
    token: bytes = b""
    time_us: int = 0
    append_time_us: int = 0
    expires_us: int | None = None
    priority: int = 0
    part: int = 0
    """Which batch of the frame it came in, from 0."""


class DeliverEvents(say.Deliver, frozen=True):
    """Deliver with its events in the message."""

    events: list[EventItem] = []


class Result(say.Message, frozen=True):
    """Any answer, for protobuf: what the request does not ask for is absent."""

    receipts: list[Receipt | None] = []
    faults: dict[int, say.Fault] = {}
    end: bool = False
    json: str | None = None
    """The answer to Ask, as JSON."""
    events: list[EventItem] = []
    adopted: dict[int, list[int]] = {}
    key_known: bool = False
    epoch: int = 0


class Schema:
    """All messages, by the struct they come from."""

    def __init__(self) -> None:
        self.tables: dict[Any, Table] = {}

    def table(self, struct: type[msgspec.Struct]) -> Table:
        """The message of a struct; made on first sight, with those inside it."""
        found = self.tables.get(struct)
        if found is None:
            name = "Deliver" if struct is DeliverEvents else struct.__name__
            found = self.tables[struct] = Table(name, "struct", [])
            kind = inspect.type_info(struct)
            assert isinstance(kind, inspect.StructType)
            for place, field in enumerate(kind.fields, 1):
                number = NUMBERS.get((name, field.name), place)
                found.fields.append(self._column(name, field.name, number, field.type))
        return found

    def _column(self, owner: str, name: str, number: int, kind: inspect.Type) -> Column:
        kind, _ = _without_none(kind)
        if isinstance(kind, inspect.DictType):
            if isinstance(kind.value_type, inspect.AnyType):
                return Column(name, number, "json", "")
            inner, table = self._item(owner, name, kind.value_type)
            return Column(name, number, inner, "map", table, SCALARS[type(kind.key_type)])
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            inner, table = self._item(owner, name, kind.item_type)
            return Column(name, number, inner, "list", table)
        inner, table = self._item(owner, name, kind)
        return Column(name, number, inner, "", table)

    def _item(self, owner: str, field: str, kind: inspect.Type) -> tuple[str, Table | None]:
        inner, missing = _without_none(kind)
        form = "maybe" if missing else WRAPPED.get(type(inner))
        if form is not None:
            return "message", self._wrapped(ITEMS[owner, field], inner, form)
        if isinstance(inner, inspect.StructType):
            return "message", self.table(inner.cls)
        return SCALARS[type(inner)], None

    def _wrapped(self, names: tuple[str, ...], kind: inspect.Type, form: str) -> Table:
        name, *fields = names
        found = self.tables.get(name)
        if found is None:
            found = self.tables[name] = Table(name, form, [])
            kinds = kind.item_types if isinstance(kind, inspect.TupleType) else (kind,)
            for number, (field, each) in enumerate(zip(fields, kinds, strict=True), 1):
                found.fields.append(self._column(name, field, number, each))
        return found


def _without_none(kind: inspect.Type) -> tuple[inspect.Type, bool]:
    if isinstance(kind, inspect.UnionType):
        rest = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
        if len(rest) == 1 and len(kind.types) == 2:
            return rest[0], True
    return kind, False


def proto_text(schema: Schema) -> str:
    """The schema as a .proto file."""
    lines = [
        "// The messages of the protocol: docs/reference/protocol.md says what they mean, and which",
        "// default an absent field has. Printed from the code by penstock.wire.schema.proto_text.",
        'syntax = "proto3";',
        f"package {PACKAGE};",
    ]
    for table in sorted(schema.tables.values(), key=lambda each: each.name):
        lines += ("", f"message {table.name} {{")
        lines += (f"  {_declared(column)}" for column in table.fields)
        lines.append("}")
    return "\n".join(lines) + "\n"


def _declared(column: Column) -> str:
    kind = column.table.name if column.table is not None else column.kind
    kind = "string" if kind == "json" else kind
    label = "repeated " if column.many == "list" else "optional "
    if column.many == "map":
        label, kind = "", f"map<{column.key}, {kind}>"
    note = " // JSON" if column.kind == "json" else ""
    return f"{label}{kind} {column.name} = {column.number};{note}"

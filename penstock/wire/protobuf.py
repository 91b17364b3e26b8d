"""Protobuf: the messages for clients that choose the mark 2, derived from the structs.

A field's number is its place in the struct, so a new field comes last. Every single value is `optional`:
an absent field has the default of docs/reference/protocol.md, which need not be zero.
docs/reference/penstock.proto is printed from here.

The library comes with the extra `penstock[protobuf]`; without it a broker does not offer the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from penstock.model.errors import MissingExtra, ProtocolViolation
from penstock.model.event import Receipt
from penstock.wire import message as say
from penstock.wire.frame import Bytes

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
"""Items that are tuples or lists, or may be missing: protobuf needs a named message for each."""

NUMBERS = {("Deliver", "events"): 100}
"""Fields with a number of their own: the struct they extend may get more fields."""


class Table(NamedTuple):
    """A message: its name and its fields."""

    name: str
    form: str
    """What it represents: a "struct", a "tuple", a "list", or "maybe" a value."""
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
    """Any answer, for protobuf; fields that do not belong to the request are absent."""

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
        """The message of a struct; made at the first call, with the messages inside it."""
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


# -- values to protobuf and back ------------------------------------------------------------------


class Wire:
    """Turns messages into protobuf and back: plain values on one side, bytes on the other."""

    def __init__(self, structs: list[type[msgspec.Struct]]) -> None:
        self.schema = Schema()
        for struct in structs:
            self.schema.table(struct)
        self._classes = _classes(self.schema)

    def encode(self, struct: type[msgspec.Struct], value: Mapping[str, Any]) -> bytes:
        """A message from plain values; fields that are missing stay absent."""
        table = self.schema.table(struct)
        found = self._classes[table.name]()
        try:
            _fill(found, table, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolViolation(f"a {table.name} does not fit protobuf: {error}") from None
        return bytes(found.SerializeToString(deterministic=True))

    def decode(self, struct: type[msgspec.Struct], data: Bytes) -> dict[str, Any]:
        """Plain values from a message; absent fields are left out."""
        from google.protobuf.message import DecodeError

        table = self.schema.table(struct)
        found = self._classes[table.name]()
        try:
            found.ParseFromString(bytes(data))
            values: dict[str, Any] = _read(found, table)
        except (DecodeError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"a {table.name} message cannot be read: {error}") from None
        return values


def available() -> bool:
    """Whether the library is installed."""
    try:
        import google.protobuf.message_factory  # noqa: F401
    except ImportError:
        return False
    return True


def _fill(found: Any, table: Table, value: Any) -> None:
    if table.form == "tuple":
        value = {column.name: each for column, each in zip(table.fields, value, strict=True)}
    elif table.form != "struct":
        value = {table.fields[0].name: value}
    for column in table.fields:
        each = value.get(column.name)
        if each is not None:
            _put(found, column, each)


def _put(found: Any, column: Column, value: Any) -> None:
    if column.kind == "json":
        setattr(found, column.name, msgspec.json.encode(value).decode())
    elif column.table is None:
        if column.many:
            target = getattr(found, column.name)
            target.extend(value) if column.many == "list" else target.update(value)
        else:
            setattr(found, column.name, value)
    elif column.many == "list":
        for each in value:
            _fill(getattr(found, column.name).add(), column.table, each)
    elif column.many == "map":
        for key, each in value.items():
            _fill(getattr(found, column.name)[key], column.table, each)
    else:
        inner = getattr(found, column.name)
        inner.SetInParent()
        _fill(inner, column.table, value)


def _read(found: Any, table: Table) -> Any:
    values = {}
    for column in table.fields:
        if column.many:
            many = getattr(found, column.name)
            if many:
                values[column.name] = _read_many(many, column)
        elif found.HasField(column.name):
            each = getattr(found, column.name)
            if column.kind == "json":
                each = msgspec.json.decode(each)
            values[column.name] = each if column.table is None else _read(each, column.table)
    if table.form == "tuple":
        return [values.get(column.name) for column in table.fields]
    if table.form == "struct":
        return values
    return values.get(table.fields[0].name, [] if table.form == "list" else None)


def _read_many(many: Any, column: Column) -> Any:
    table = column.table
    if column.many == "map":
        return {key: each if table is None else _read(each, table) for key, each in many.items()}
    return list(many) if table is None else [_read(each, table) for each in many]


def _classes(schema: Schema) -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise MissingExtra(
            "the mark 'protobuf' needs a library: pip install 'penstock[protobuf]'",
            extra="protobuf",
        ) from None
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock.proto", package=PACKAGE, syntax="proto3"
    )
    for table in schema.tables.values():
        _describe(file.message_type.add(name=table.name), table)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        table.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{PACKAGE}.{table.name}")
        )
        for table in schema.tables.values()
    }


def _describe(message: Any, table: Table) -> None:
    for column in table.fields:
        if column.many == "map":
            entry = message.nested_type.add(name=_entry_name(column.name))
            entry.options.map_entry = True
            _add(entry, Column("key", 1, column.key, ""), 1)
            _add(entry, Column("value", 2, column.kind, "", column.table), 1)
            path = f".{PACKAGE}.{table.name}.{entry.name}"
            message.field.add(
                name=column.name, number=column.number, label=3, type=11, type_name=path
            )
        else:
            field = _add(message, column, 3 if column.many else 1)
            if not column.many:
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{column.name}")


# Numbers of google.protobuf.FieldDescriptorProto.Type.
_TYPES = {"double": 1, "int64": 3, "bool": 8, "string": 9, "json": 9, "message": 11, "bytes": 12}


def _add(message: Any, column: Column, label: int) -> Any:
    field = message.field.add(
        name=column.name, number=column.number, label=label, type=_TYPES[column.kind]
    )
    if column.table is not None:
        field.type_name = f".{PACKAGE}.{column.table.name}"
    return field


@cache
def _entry_name(field: str) -> str:
    """The name protobuf gives the hidden message of a map."""
    return "".join(word.capitalize() for word in field.split("_")) + "Entry"

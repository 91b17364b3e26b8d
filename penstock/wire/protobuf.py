"""Protobuf: the meta of a frame with mark 2, for clients whose language likes it better.

The messages are those of docs/reference/penstock.proto. The library comes with the extra
`penstock[protobuf]`; without it a broker does not offer the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from penstock.model.errors import MissingExtra, ProtocolViolation
from penstock.wire.frame import Bytes
from penstock.wire.schema import PACKAGE, Column, Schema, Table


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

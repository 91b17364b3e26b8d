"""The messages of the protocol as protobuf declares them: docs/reference/penstock.proto."""

from __future__ import annotations

from penstock.wire.encodings import wire
from penstock.wire.protobuf import PACKAGE, Column


def page() -> str:
    """The text of the file."""
    lines = [
        "// The messages of the protocol: docs/reference/protocol.md says what they mean, and which",
        "// default an absent field has. Printed from penstock/wire/message.py by `make reference`.",
        'syntax = "proto3";',
        f"package {PACKAGE};",
    ]
    for table in sorted(wire().schema.tables.values(), key=lambda each: each.name):
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

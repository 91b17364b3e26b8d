"""What can be asked, in words: a section of docs/reference/protocol.md."""

from __future__ import annotations

import inspect as python
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect

from penstock.engines.requests import ANSWERS, READ_ONLY

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "## What can be asked\n"
PREFACE = f"""{TITLE}
`request` of an [Ask](#ask), its `fields`, and what the Result holds: a value as the last column says, null where
there is none. A field with `=` may be left out, and then has that value. Those marked * change nothing, and can be asked
again when the answer was lost. Send `actor` as an empty text: the broker puts the client's own name there, and only an
admin may act in another's.

This section is printed from `penstock/engines/requests.py` by `make reference`; change it there.
"""


def page() -> str:
    """The Markdown of the section: every request, then every struct that requests and answers are made of."""
    lines = [PREFACE, "| request | | fields | answer |", "|---|---|---|---|"]
    found: dict[str, inspect.StructType] = {}
    for kind, answer in ANSWERS.items():
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        fields = ", ".join(_field(each) for each in info.fields)
        mark = "*" if kind in READ_ONLY else ""
        about = (python.getdoc(kind) or "").splitlines()[0]
        answered = words(inspect.type_info(answer))
        lines.append(f"| {kind.__name__}{mark} | {about} | {fields} | {answered} |")
        for each in (*info.fields, inspect.type_info(answer)):
            found |= {struct.cls.__name__: struct for struct in _structs(each)}
    return "\n".join([*lines, "", *(_section(found[name]) for name in sorted(found))])


def within(text: str) -> str:
    """The text of protocol.md with this section as it is now."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    now = [f"{page().rstrip()}\n\n" if each.startswith(TITLE) else each for each in sections]
    return "".join(now).rstrip() + "\n"


def words(info: Any) -> str:
    """A type, the way the tables of the protocol write it.

    >>> words(inspect.type_info(dict[str, list[int | None]]))
    'map of text to list of int or null'
    """
    match info:
        case inspect.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case inspect.UnionType(types=types):
            return " or ".join(words(each) for each in types)
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return f"list of {words(item)}"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map of {words(key)} to {words(value)}"
    plain: dict[type, str] = {
        inspect.StrType: "text", inspect.IntType: "int", inspect.FloatType: "float",
        inspect.BoolType: "bool", inspect.BytesType: "bytes", inspect.NoneType: "null",
        inspect.AnyType: "anything",
    }  # fmt: skip
    return plain[type(info)]


def _field(field: inspect.Field) -> str:
    default = "" if field.required else f" = {_default(field)}"
    return f"`{field.encode_name}` {words(field.type)}{default}"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "-"
    made = field.default is msgspec.NODEFAULT
    return json.dumps(msgspec.to_builtins(field.default_factory() if made else field.default))


def _structs(info: Any) -> Iterator[inspect.StructType]:
    """The structs inside a type, those inside them included."""
    if isinstance(info, inspect.StructType):
        yield info
    inner = ("type", "types", "fields", "item_type", "key_type", "value_type")
    for each in (getattr(info, name, ()) for name in inner):
        for one in each if isinstance(each, tuple) else (each,):
            yield from _structs(one)


def _section(info: inspect.StructType) -> str:
    lines = [f"### {info.cls.__name__}", "", (python.getdoc(info.cls) or "").splitlines()[0], ""]
    lines += ["| field | type | default |", "|---|---|---|"]
    if info.tag is not None:
        lines.append(f'| {info.tag_field} | "{info.tag}" | - |')
    lines += [f"| {f.encode_name} | {words(f.type)} | {_default(f)} |" for f in info.fields]
    return "\n".join([*lines, ""])

"""The settings in words: what each field takes, and the whole reference page.

docs/reference/settings.md is the output of `reference`; a test compares the two.
"""

from __future__ import annotations

import inspect as python
from typing import Any

import msgspec
from msgspec import inspect

from penstock.model.quantity import show, unit_of
from penstock.model.setting import field_types
from penstock.model.settings import Settings, TenantLimits

PREFACE = """# Settings

Every setting has a default; `Settings()` is a complete, safe configuration. Values come from a TOML
file, then the environment, then flags; the later one wins, field by field.

| where | how |
|---|---|
| file | `[durability]` and below it `fsync = "interval"` |
| environment | `PENSTOCK_DURABILITY_FSYNC=interval` |
| flag | `durability.fsync=interval` |
| Python | `Settings(durability=Durability(fsync="interval"))` |

Names end in their unit. A field in `_bytes` takes `67108864`, `"64MiB"` or `"64MB"`; a field in `_s`
or `_ms` takes a number in that unit or `"100ms"`, `"30s"`, `"5m"`, `"2h"`, `"30d"`, in Python a `timedelta` too. `"none"` lifts a
limit that can be lifted. A list is a list in a file and `100ms,1s,10s` elsewhere.

`penstock config check` lists every problem at once, with its source, and starts nothing.

This page is printed from `penstock/model/settings.py`; change it there.
"""


def allowed(kind: Any, unit: str) -> str:
    """What a field's type takes, in words.

    >>> from penstock.model.setting import field_types
    >>> from penstock.model.settings import Delivery
    >>> allowed(field_types(Delivery)["max_attempts"], "")
    '1 to 1000'
    """
    return _words(inspect.type_info(kind), unit)


def _words(info: Any, unit: str) -> str:
    match info:
        case inspect.Metadata(type=inner):
            return _words(inner, unit)
        case inspect.UnionType(types=types):
            return " or ".join(_words(inner, unit) for inner in types)
        case inspect.NoneType():
            return "none"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=low, max_length=high):
            return "text" if high is None else f"text of {low or 0} to {high} characters"
        case inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            many = "any number of" if high is None else f"{low or 0} to {high}"
            return f"{many} values, each {_words(item, unit)}"
        case inspect.IntType() | inspect.FloatType():
            least = f"more than {info.gt:g}" if info.gt is not None else show(info.ge, unit)
            return f"{least} to {show(info.le, unit)}"
        case _:
            return "a table"


def reference() -> str:
    """The Markdown of docs/reference/settings.md."""
    pages = [PREFACE]
    for name, group in field_types(Settings).items():
        pages.append(_section(name, group))
        if name == "admission":
            pages.append(_section("admission.tenants.NAME", TenantLimits))
    return "\n".join(pages)


def _section(title: str, group: type[msgspec.Struct]) -> str:
    lines = [f"## {title}", "", python.getdoc(group) or "", ""]
    lines += ["| setting | default | allowed | what it is for |", "|---|---|---|---|"]
    defaults = group()
    for field, kind in field_types(group).items():
        unit = unit_of(field)
        default = getattr(defaults, field)
        shown = show(default, unit) if default != {} else "empty"
        lines.append(f"| `{field}` | {shown} | {allowed(kind, unit)} | {_purpose(kind)} |")
    return "\n".join(lines) + "\n"


def _purpose(kind: Any) -> str:
    notes = [meta.description for meta in kind.__metadata__ if isinstance(meta, msgspec.Meta)]
    return next(note for note in notes if note)

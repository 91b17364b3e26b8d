"""Every setting with its default and what it takes: docs/reference/settings.md."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from penstock.model.parameter import show, unit_of
from penstock.model.settings import Settings, TenantLimits, field_types
from penstock.model.settings_loader import allowed

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

This page is printed from `penstock/model/settings.py` by `make reference`; change it there.
"""


def page() -> str:
    """The Markdown of the page."""
    pages = [PREFACE]
    for name, group in field_types(Settings).items():
        pages.append(_section(name, group))
        if name == "admission":
            pages.append(_section("admission.tenants.NAME", TenantLimits))
    return "\n".join(pages)


def _section(title: str, group: type[msgspec.Struct]) -> str:
    lines = [f"## {title}", "", inspect.getdoc(group) or "", ""]
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

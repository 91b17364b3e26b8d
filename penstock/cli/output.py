"""What the commands print: tables on a terminal, aligned columns in a pipe, JSON lines on demand.

Results go to stdout, everything else to stderr. Control characters in data are shown escaped, so
that an event cannot take over the terminal it is looked at with.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import select
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.model.quantity import show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cli.invocation import Invocation

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def plain(value: Any) -> Any:
    """Any result of the API as data that JSON can carry.

    >>> import uuid
    >>> plain({"at": uuid.UUID(int=1), "payload": b"text", "blob": b"\\xff"})
    {'at': '00000000-0000-0000-0000-000000000001', 'payload': 'text', 'blob': {'base64': '/w=='}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _text_or_base64(bytes(value))
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields") and "offset" in value._fields:
        return str(value)
    if isinstance(value, Sequence | AbstractSet):
        return [plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return str(value)


def _text_or_base64(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        import base64

        return {"base64": base64.b64encode(data).decode()}


@lru_cache(maxsize=16)  # the events of a batch often share their time
def moment(time_us: int | None) -> str:
    """Microseconds since 1970 as a time a person can read; empty for none.

    >>> moment(1_767_225_600_000_000)
    '2026-01-01T00:00:00.000000Z'
    """
    if not time_us:
        return ""
    try:
        at = _EPOCH + datetime.timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def escaped(text: str) -> str:
    """Text with control characters made visible.

    >>> escaped("a" + chr(27) + "[31m")
    'a\\\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cell(value: Any) -> str:
    """A value in a table or in one line of text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return escaped(", ".join(value)) or "-"
    if isinstance(value, list | dict):
        return escaped(msgspec.json.encode(value).decode()) if value else "-"
    return escaped(str(value))


def print_json(value: Any) -> None:
    """One JSON object on a line of its own."""
    print_bytes(msgspec.json.encode(plain(value)) + b"\n")


def print_bytes(data: bytes) -> None:
    """Bytes as they are."""
    sys.stdout.buffer.write(data)


def print_text(text: str) -> None:
    """A line of text; what the terminal's encoding cannot show is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    print_bytes(text.encode(encoding, "replace") + b"\n")


def note(text: str) -> None:
    """Something worth knowing that is not the result."""
    print(escaped(text), file=sys.stderr, flush=True)


def complain(
    message: str, code: str, *, data: Mapping[str, Any] | None = None, json: bool = False
) -> None:
    """Report an error: on stderr for people, as an object on stdout with --json."""
    if json:
        print_json({"error": {"code": code, "message": message, "data": plain(data or {})}})
        sys.stdout.flush()
    else:
        note(f"error: {message} [{code}]")


def show_rows(
    invocation: Invocation, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> None:
    """Many things of one kind: JSON has all their fields, a table the named columns."""
    if invocation.json:
        for row in rows:
            print_json(row)
        return
    headings = [_heading(name) for name in columns]
    lines = [[_shown(row, name) for name in columns] for row in rows]
    if not lines:
        note("nothing to show")
    elif sys.stdout.isatty():
        _print_table(headings, lines)
    else:
        _print_columns(headings, lines)


def show_record(invocation: Invocation, record: Mapping[str, Any]) -> None:
    """One thing: an object in JSON, a field per line otherwise."""
    if invocation.json:
        print_json(record)
        return
    width = max((len(name) for name in record), default=0)
    for name in record:
        print_text(f"{_heading(name).ljust(width)}  {_shown(record, name)}")


def _heading(name: str) -> str:
    """A field's name without its unit: the value says that."""
    short = name.removesuffix("_us")
    if not short.endswith("_per_s"):
        short = short.removesuffix("_s")
    return short.replace("_", " ")


def _shown(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if name.endswith("_us") and isinstance(value, int):
        return moment(value) or "-"
    if name.endswith("_s") and isinstance(value, int | float) and not name.endswith("_per_s"):
        return show(value, "s")
    return cell(plain(value))


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    # Imported here: a pipe, a script or `--version` never needs it.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, *values in zip(headings, *lines, strict=True):
        numbers = all(value.replace(",", "").isdecimal() or value == "-" for value in values)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def _print_columns(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for line in [headings, *lines]:
        padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print_text("  ".join(padded).rstrip())


def reader_gone() -> bool:
    """Whether nobody reads our output any more: a follower would otherwise wait for ever."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

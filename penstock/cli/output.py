"""What the commands print: tables on a terminal, aligned columns in a pipe, JSON lines on demand.

Results go to stdout, everything else to stderr. Control characters in data are shown escaped, so that
an event cannot control the terminal that shows it.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import re
import select
import string
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.model.parameter import MAX_PAGE, MAX_SKIP, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import penstock
    from penstock.cli.invocation import Invocation

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

PRESETS = ("line", "value", "json")
FIELDS = (
    "id", "topic", "tenant", "partition", "offset", "key", "value", "codec", "time",
    "append_time", "token", "priority", "headers",
)  # fmt: skip
FORMAT_HELP = "line, value (the bare payload), json, or a template such as '{offset} {value}'."


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
    """Print a JSON object on a line of its own."""
    print_bytes(msgspec.json.encode(plain(value)) + b"\n")


def print_bytes(data: bytes) -> None:
    """Print bytes unchanged."""
    sys.stdout.buffer.write(data)


def print_text(text: str) -> None:
    """Print a line of text; characters outside the terminal's encoding are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    print_bytes(text.encode(encoding, "replace") + b"\n")


def note(text: str) -> None:
    """Print a remark that is not the result, on stderr."""
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
    """Print records of one kind: JSON has all their fields, a table the named columns."""
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
    """Print one record: an object in JSON, otherwise a line for each field."""
    if invocation.json:
        print_json(record)
        return
    width = max((len(name) for name in record), default=0)
    for name in record:
        print_text(f"{_heading(name).ljust(width)}  {_shown(record, name)}")


def _heading(name: str) -> str:
    """A field's name without its unit, which the value shows."""
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
    # Imported here, since a pipe, a script or `--version` does not need it.
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
    """Whether the reader of stdout is gone: a command that follows events would never end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


# -- events ---------------------------------------------------------------------------------------


def payload_fields(payload: bytes, codec: str | None) -> dict[str, Any]:
    """`value` when the payload can be decoded, `base64` otherwise.

    >>> payload_fields(b'{"id":7}', "json"), payload_fields(b"text", "raw"), payload_fields(b"\\xff", "raw")
    ({'value': {'id': 7}}, {'value': 'text'}, {'base64': '/w=='})
    """
    try:
        if codec == "json":
            return {"value": msgspec.json.decode(payload)}
        if codec == "msgpack":
            value = msgspec.msgpack.decode(payload)
            msgspec.json.encode(value)
            return {"value": value}
        if codec in ("raw", None):
            return {"value": payload.decode()}
    except (ValueError, TypeError, RecursionError):
        pass
    return {"base64": base64.b64encode(payload).decode()}


def key_text(key: bytes | None) -> Any:
    """A key as text if it is text."""
    return None if key is None else plain(key)


def event_record(event: penstock.Event) -> dict[str, Any]:
    """Everything about an event, for JSON."""
    record = {
        "id": str(event.id),
        "topic": event.topic,
        "tenant": event.tenant,
        "partition": event.partition,
        "offset": event.offset,
        "token": str(event.token),
        "time_us": event.time_us,
        "append_time_us": event.append_time_us,
        "key": key_text(event.key),
        "headers": dict(event.headers),
        "codec": event.codec,
        "priority": event.priority,
        "expires_us": event.expires_us,
    }
    return record | payload_fields(event.payload, event.codec)


def value_text(payload: bytes, codec: str | None) -> str:
    """A payload in one line of text."""
    found = payload_fields(payload, codec)
    if "base64" in found:
        return f"base64:{found['base64']}"
    value = found["value"]
    return escaped(value if codec in ("raw", None) else msgspec.json.encode(value).decode())


def _line(event: penstock.Event) -> bytes:
    key = "" if event.key is None else f" key={cell(key_text(event.key))}"
    headers = "".join(f" {escaped(f'{name}={value}')}" for name, value in event.headers.items())
    text = (
        f"{moment(event.time_us)} {event.id}{key}{headers} {value_text(event.payload, event.codec)}"
    )
    return text.encode("utf-8", "replace") + b"\n"


def _json(event: penstock.Event) -> bytes:
    return msgspec.json.encode(event_record(event)) + b"\n"


def _value(event: penstock.Event) -> bytes:
    return event.payload + b"\n"


def _template(text: str) -> Callable[[penstock.Event], bytes]:
    try:
        names = [
            (name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(text)
        ]
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None
    for name, spec, conversion in names:
        # Only plain names, so that a template cannot reach into objects.
        if name is not None and (name not in FIELDS or spec or conversion):
            raise click.BadParameter(f"{text!r}: {{{name}}} is not one of {', '.join(FIELDS)}")

    def render(event: penstock.Event) -> bytes:
        record = event_record(event)
        fields = {name: cell(record.get(name)) for name in FIELDS}
        fields["time"] = moment(event.time_us)
        fields["append_time"] = moment(event.append_time_us)
        fields["value"] = value_text(event.payload, event.codec)
        return text.format_map(fields).encode("utf-8", "replace") + b"\n"

    return render


def renderer(format: str, *, json: bool) -> Callable[[penstock.Event], bytes]:
    """The function that turns an event into the bytes to print."""
    presets = {"line": _line, "value": _value, "json": _json}
    if format not in presets and "{" not in format:
        raise click.BadParameter(f"--format {format}: give {', '.join(PRESETS)} or a template such as '{{offset}} {{value}}'")  # fmt: skip
    chosen = presets.get(format) or _template(format)
    return _json if json else chosen


# -- pages of lists -------------------------------------------------------------------------------


def note_rest(there: int, limit: int, offset: int) -> None:
    """Print how many rows follow this page of a list."""
    rest = there - offset - limit
    if rest > 0:
        note(f"{rest} more: go on with --offset {offset + limit}, or raise --limit")


def page_options(limit: int) -> Callable[[Any], Any]:
    """The `--limit` and `--offset` options of a command."""

    def decorate(function: Any) -> Any:
        most = click.IntRange(1, MAX_PAGE)
        function = click.option("--offset", type=click.IntRange(0, MAX_SKIP), default=0, show_default=True, help="After so many.")(function)  # fmt: skip
        return click.option("--limit", type=most, default=limit, show_default=True, help=f"At most so many, up to {MAX_PAGE}.")(function)  # fmt: skip

    return decorate

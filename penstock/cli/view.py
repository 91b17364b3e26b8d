"""How one event looks: an object, a line, its bare payload, or a template of yours."""

from __future__ import annotations

import base64
import string
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock

READABLE_CODECS = frozenset({"json", "msgpack"})
PRESETS = ("line", "value", "json")
FIELDS = (
    "id", "topic", "tenant", "partition", "offset", "key", "value", "codec", "time",
    "append_time", "token", "priority", "headers",
)  # fmt: skip


def payload_fields(payload: bytes, codec: str | None) -> dict[str, Any]:
    """`value` when the payload can be shown as it is meant, `base64` otherwise.

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
    """A key as text where it is text."""
    return None if key is None else output.plain(key)


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
    return output.escaped(value if codec in ("raw", None) else msgspec.json.encode(value).decode())


def _line(event: penstock.Event) -> bytes:
    key = "" if event.key is None else f" key={output.cell(key_text(event.key))}"
    headers = "".join(
        f" {output.escaped(f'{name}={value}')}" for name, value in event.headers.items()
    )
    text = f"{output.moment(event.time_us)} {event.id}{key}{headers} {value_text(event.payload, event.codec)}"
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
        # Only plain names: a template is no way to reach into objects.
        if name is not None and (name not in FIELDS or spec or conversion):
            raise click.BadParameter(f"{text!r}: {{{name}}} is not one of {', '.join(FIELDS)}")

    def render(event: penstock.Event) -> bytes:
        record = event_record(event)
        fields = {name: output.cell(record.get(name)) for name in FIELDS}
        fields["time"] = output.moment(event.time_us)
        fields["append_time"] = output.moment(event.append_time_us)
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


FORMAT_HELP = "line, value (the bare payload), json, or a template such as '{offset} {value}'."

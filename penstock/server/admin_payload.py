"""Payloads, keys and other bytes in JSON: as what they mean where that can be shown, else as base64."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

import msgspec

MAX_SHOWN_BYTES = 1 << 20  # of one payload: decoding more would hold up the broker's loop


class Base64(msgspec.Struct, frozen=True):
    """Bytes that are no text."""

    base64: str


def text_or_base64(data: bytes) -> str | Base64:
    """Bytes as text where they are text.

    >>> text_or_base64(b"text"), text_or_base64(b"\\xff")
    ('text', Base64(base64='/w=='))
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Base64(encoded(data))


def encoded(data: bytes) -> str:
    """Bytes as base64 text."""
    return base64.b64encode(data).decode()


def payload_fields(payload: bytes, codec: str) -> dict[str, Any]:
    """`value` when a payload can be shown as it is meant, `base64` otherwise, as `penstock dlq` does.

    >>> payload_fields(b'{"id":7}', "json"), payload_fields(b"\\xff", "raw")
    ({'value': {'id': 7}}, {'base64': '/w=='})
    """
    if len(payload) > MAX_SHOWN_BYTES:
        return {"omitted_bytes": len(payload)}
    try:
        if codec == "json":
            return {"value": msgspec.json.decode(payload)}
        if codec == "msgpack":
            value = _plain(msgspec.msgpack.decode(payload))
            msgspec.json.encode(value)
            return {"value": value}
        if codec == "raw":
            return {"value": payload.decode()}
    except (ValueError, TypeError, RecursionError):
        pass  # not what its codec says: the bytes themselves are the truth
    return {"base64": encoded(payload)}


def _plain(value: Any) -> Any:
    """What msgpack knows and JSON does not, in JSON."""
    if isinstance(value, bytes):
        return text_or_base64(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value

"""HTTP requests and answers of the admin API as values.

A request: the caller's identity (`admit`), its parameters and its JSON body, all checked. An error: one
body for all errors, and the status of each code. A payload, key or other bytes in an answer: decoded where
JSON can show the value, base64 otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from penstock.model.errors import (
    AccessDenied,
    DecodeFailed,
    InvalidInput,
    NotAuthenticated,
    PayloadTooLarge,
    RequestTimedOut,
)
from penstock.model.event import Identity
from penstock.server.admin.endpoint import AdminContext
from penstock.server.admin.gate import require
from penstock.server.auth import is_loopback
from penstock.wire.message import Fault

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES = 1 << 20  # a thousand ids with room to spare; payloads are published elsewhere
BODY_TIMEOUT_S = 10.0  # a request with half a body ends with an error after this
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
MAX_SHOWN_BYTES = 1 << 20  # of one payload: decoding more would hold up the broker's loop

INTERNAL = 500

STATUSES = {
    "invalid": 400,
    "invalid.too-large": 413,
    "missing": 400,
    "notfound": 404,
    "delivery": 409,
    "refused": 409,
    "refused.confirmation": 428,
    "rejected": 429,
    "rejected.deferred": 503,
    "rejected.disk-full": 507,
    "rejected.retention-full": 507,
    "rejected.disk-refused": 503,
    "storage": 503,
    "access.denied": 403,
    "access.unauthenticated": 401,
    "timeout": 408,
    "closed": 503,
}
"""HTTP status by error code, or by its family; every other error is a 500."""

MEANINGS = {
    400: "The request breaks a written rule; the message names the field.",
    401: "A token is missing, expired or not from here.",
    403: "This identity may not do that.",
    404: "No such name or id; what belongs to another tenant does not exist for you.",
    408: "The body did not arrive in time.",
    409: "Understood, and not allowed in the state that things are in.",
    413: "The body is too large.",
    428: "The confirmation word is missing; nothing was changed.",
    429: "A limit was reached; Retry-After says when to try again.",
    431: "Path and headers are too large.",
    500: "A defect of the broker; its log has the trace.",
    503: "Not now: starting, draining, too busy, or the storage failed.",
    507: "The disk is full, or a write-once topic is at its size limit.",
}


def admit(context: AdminContext, request: Request, role: str) -> Identity:
    """The identity of the caller, which must have the role; refused callers are logged."""
    try:
        identity = _identify(context, request)
        require(identity, role)
    except AccessDenied as error:
        client = request.client
        peer = "?" if client is None else f"{client.host}:{client.port}"
        context.refusals.warning("client refused", peer=peer, reason=error.message)
        raise
    return identity


def _identify(context: AdminContext, request: Request) -> Identity:
    """The identity of the caller; raises NotAuthenticated."""
    here = request.client is not None and is_loopback(request.client.host)
    if here and not context.authenticator.asks:
        _check_direct(request.headers)
    return context.authenticator.identify(_token(request.headers), "", "", loopback=here)


def _token(headers: Mapping[str, str]) -> str:
    if token := headers.get("x-admin-token"):
        return token.strip()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme and scheme.lower() != "bearer":
        raise NotAuthenticated("only Authorization: Bearer TOKEN and X-Admin-Token are taken")
    return token.strip()


def _check_direct(headers: Mapping[str, str]) -> None:
    """Refuse requests of this host that come from elsewhere through its browser or its proxy.

    A page that resolves its own name to 127.0.0.1 still sends that name as the Host; a proxy adds a
    header when it forwards.
    """
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:  # such as half an IPv6 address, which names no host
        host = ""
    if not is_loopback(host) or any(name in headers for name in _FORWARDED):
        raise NotAuthenticated(
            "without auth.jwt_secret or auth.admin_token only direct calls to localhost are taken; "
            "this one was forwarded, or meant another host. Set one of them, and show a token",
            host=host[:255],
        )


def parameters(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    """The query parameters, checked."""
    pairs = request.query_params.multi_items()
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidInput("a parameter is given twice; give each once")
    if kind is None:
        if found:
            raise InvalidInput(f"no parameter is called {sorted(found)[0]!r} here")
        return None
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong("the parameters", error) from None


async def body(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    """The JSON object of a request, checked; None where the endpoint takes none."""
    data = await _read(request)
    if kind is None:
        if data:
            raise InvalidInput("this takes no body; put what it needs behind the question mark")
        return None
    # A web page can send any other type without asking first, and would use its reader's rights.
    media = request.headers.get("content-type", "").partition(";")[0].strip()
    if media.lower() != "application/json":
        raise InvalidInput("send the body as Content-Type: application/json", field="Content-Type")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong("the body", error) from None
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"the body is no JSON: {error}; nothing was done") from None


async def _read(request: Request) -> bytes:
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(
                        f"the body is over {MAX_BODY_BYTES} bytes; nothing was done. Send fewer "
                        "records at once",
                        limit=MAX_BODY_BYTES,
                    )
    except TimeoutError:
        raise RequestTimedOut(
            f"the body did not arrive within {BODY_TIMEOUT_S:g} s; nothing was done. Send it again",
            timeout_s=BODY_TIMEOUT_S,
        ) from None
    return bytes(data)


def _wrong(what: str, error: msgspec.ValidationError) -> InvalidInput:
    """An InvalidInput with msgspec's message, and the field that it names as data."""
    text, _, place = str(error).partition(" - at `$.")
    field = place.rstrip("`") if place else text.rpartition(" `")[2].rstrip("`")
    where = f"{field}: " if place else ""
    return InvalidInput(f"{what} cannot be taken: {where}{text}; nothing was done", field=field)


# -- errors ------------------------------------------------------------------------------------------


class Detail(msgspec.Struct, frozen=True):
    """An error: `code` is the contract (docs/reference/errors.md), `message` is for people."""

    code: str
    message: str
    data: dict[str, Any]


class Problem(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: Detail


def status_of(code: str) -> int:
    """The status of an error code.

    >>> status_of("refused.confirmation"), status_of("notfound.topic"), status_of("error")
    (428, 404, 500)
    """
    return STATUSES.get(code) or STATUSES.get(code.partition(".")[0], INTERNAL)


def problem(fault: Fault) -> Problem:
    """An error as the body of an answer."""
    return Problem(Detail(fault.code, fault.message, fault.data))


def headers_for(fault: Fault) -> dict[str, str]:
    """The headers that go with an error.

    >>> headers_for(Fault("rejected.throttled", "", {"retry_after_s": 0.2}))
    {'Retry-After': '1'}
    """
    headers = {}
    if fault.code == "access.unauthenticated":
        headers["WWW-Authenticate"] = 'Bearer realm="penstock"'
    retry_after_s = fault.data.get("retry_after_s")
    if isinstance(retry_after_s, int | float):
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return headers


# -- payloads ----------------------------------------------------------------------------------------


class Base64(msgspec.Struct, frozen=True):
    """Bytes that are no text."""

    base64: str


def text_or_base64(data: bytes) -> str | Base64:
    """Bytes as text where they are valid UTF-8, else as base64.

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
        pass  # the payload does not match its codec: show the bytes themselves
    return {"base64": encoded(payload)}


def _plain(value: Any) -> Any:
    """A msgpack value with JSON replacements for the types that JSON lacks."""
    if isinstance(value, bytes):
        return text_or_base64(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value

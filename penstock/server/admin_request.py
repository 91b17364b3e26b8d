"""A request as it came over HTTP, made into a call: who sent it, its parameters, its body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from penstock.server.admin_endpoint import Surface
from penstock.server.admin_gate import require
from penstock.server.auth import is_loopback

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY_BYTES = 1 << 20  # a thousand ids with room to spare; payloads are published elsewhere
BODY_TIMEOUT_S = 10.0  # a client that sends half a body is not waited for
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def admit(surface: Surface, request: Request, role: str) -> Identity:
    """Who sent a request, if it has the role; whoever is turned away stands in the log."""
    try:
        identity = _identify(surface, request)
        require(identity, role)
    except AccessDenied as error:
        client = request.client
        peer = "?" if client is None else f"{client.host}:{client.port}"
        surface.refusals.warning("client refused", peer=peer, reason=error.message)
        raise
    return identity


def _identify(surface: Surface, request: Request) -> Identity:
    """Who sent a request; raises NotAuthenticated."""
    here = request.client is not None and is_loopback(request.client.host)
    if here and not surface.doorkeeper.asks:
        _check_direct(request.headers)
    return surface.doorkeeper.identify(_token(request.headers), "", "", loopback=here)


def _token(headers: Mapping[str, str]) -> str:
    if token := headers.get("x-admin-token"):
        return token.strip()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme and scheme.lower() != "bearer":
        raise NotAuthenticated("only Authorization: Bearer TOKEN and X-Admin-Token are taken")
    return token.strip()


def _check_direct(headers: Mapping[str, str]) -> None:
    """Trusting this host does not mean trusting whoever borrows its browser or its proxy.

    A page that resolves its own name to 127.0.0.1 still sends that name as the Host; a proxy says
    that it forwards.
    """
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:  # such as half an IPv6 address: nobody's name
        host = ""
    if not is_loopback(host) or any(name in headers for name in _FORWARDED):
        raise NotAuthenticated(
            "without auth.jwt_secret or auth.admin_token only direct calls to localhost are taken; "
            "this one was forwarded, or meant another host. Set one of them, and show a token",
            host=host[:255],
        )


def parameters(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    """What stands behind the question mark, checked."""
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
    """The message of msgspec names the field: keep it, and name it apart."""
    text, _, place = str(error).partition(" - at `$.")
    field = place.rstrip("`") if place else text.rpartition(" `")[2].rstrip("`")
    where = f"{field}: " if place else ""
    return InvalidInput(f"{what} cannot be taken: {where}{text}; nothing was done", field=field)

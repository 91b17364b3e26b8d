"""HTTP for operators and probes: the admin API, health, metrics and pressure, served by the broker's loop.

`build_app` makes one route for each endpoint of the tables in this package. `HttpServer` runs the app on
uvicorn, with limits on heads, on idle time and on slow clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from penstock.model.errors import (
    InvalidInput,
    InvalidSettings,
    MissingExtra,
    NotFound,
    PayloadTooLarge,
    PenstockError,
)
from penstock.model.event import Identity
from penstock.model.role import MONITOR
from penstock.server.admin import audit as admin_audit
from penstock.server.admin import dead_letters as admin_dlq
from penstock.server.admin import groups as admin_groups
from penstock.server.admin import health as admin_health
from penstock.server.admin import routes as admin_routes
from penstock.server.admin import schedules as admin_schedules
from penstock.server.admin import sessions as admin_sessions
from penstock.server.admin import topics as admin_topics
from penstock.server.admin.endpoint import AdminContext, Answered, Call, Endpoint
from penstock.server.admin.gate import Authorizer
from penstock.server.admin.openapi import Other, as_html, document
from penstock.server.admin.request import admit, body, headers_for, parameters, problem, status_of
from penstock.wire.message import to_fault

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra(
        "HTTP needs more packages: pip install 'penstock[server]'", extra="server"
    ) from error

MAX_CONNECTIONS = 512  # operators, scrapers and probes; clients of the bus use other ports
MAX_HEAD_BYTES = 16 << 10  # of a request: a token has at most half of it
HEAD_TOO_LARGE = 431
HEAD_TIMEOUT_S = 10.0  # for a whole request head; a slower client is disconnected
READ_TIMEOUT_S = 30.0  # for reading on; a client that does not read its answers is disconnected
IDLE_S = 15  # a scraper that asks this often keeps its connection
STOP_S = 5  # for requests that are under way when the server stops

ENDPOINTS: tuple[Endpoint, ...] = (
    *admin_health.ENDPOINTS, *admin_dlq.ENDPOINTS, *admin_audit.ENDPOINTS, *admin_topics.ENDPOINTS,
    *admin_groups.ENDPOINTS, *admin_routes.ENDPOINTS, *admin_schedules.ENDPOINTS,
    *admin_sessions.ENDPOINTS,
)  # fmt: skip
PAGES = (
    Other("GET", "/openapi.json", "This document.", ""),
    Other("GET", "/docs-free", "The same as a page, free of scripts and of other hosts.", ""),
)
NOBODY = Identity("", "", ())  # the caller of endpoints that are open to all
GUARDED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_encoder = msgspec.json.Encoder(enc_hook=str)

Serve = Callable[[Request], Awaitable[Response]]


def build_app(context: AdminContext, extra_routes: Sequence[Route] = ()) -> Starlette:
    """The application; extra routes, such as metrics, are open to role `monitor`."""
    gate = Authorizer(context.engine, context.ask)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [
        Route(path, _serving(context, gate, table), methods=list(table))
        for path, table in by_path.items()
    ]
    found = document(ENDPOINTS, [*PAGES, *_described(extra_routes)])
    text, html = _encoder.encode(found), as_html(found)

    async def openapi(request: Request) -> Response:
        return Response(text, media_type="application/json", headers=GUARDED)

    async def docs_free(request: Request) -> Response:
        return HTMLResponse(html, headers=GUARDED)

    views = (openapi, docs_free)
    pages = [Route(page.path, view) for page, view in zip(PAGES, views, strict=True)]
    app = Starlette(
        routes=[*pages, *routes, *(_guarded(context, route) for route in extra_routes)],
        exception_handlers={HTTPException: _no_such_endpoint, Exception: _defect},
    )
    app.router.redirect_slashes = False
    return app


def _serving(context: AdminContext, gate: Authorizer, table: dict[str, Endpoint]) -> Serve:
    async def serve(request: Request) -> Response:
        if not all(request.path_params.values()):
            raise HTTPException(404)
        endpoint = table["GET" if request.method == "HEAD" else request.method]
        try:
            return _json(await endpoint.handler(await _call(context, gate, endpoint, request)))
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone, and will not read it
        except PenstockError as error:
            return _refusal(error)

    return serve


async def _call(
    context: AdminContext, gate: Authorizer, endpoint: Endpoint, request: Request
) -> Call:
    """Check the caller before the fields: a caller without rights learns nothing from field errors."""
    if not endpoint.needs:
        return Call(context, gate, NOBODY, {})
    identity = admit(context, request, endpoint.needs)
    query = parameters(request, endpoint.query)
    return Call(
        context, gate, identity, request.path_params, query, await body(request, endpoint.body)
    )


def _json(answer: Any) -> Response:
    status, content = 200, answer
    if isinstance(answer, Answered):
        status, content = answer.status, answer.body
    return Response(_encoder.encode(content), status, GUARDED, "application/json")


def _refusal(error: BaseException, status: int | None = None) -> Response:
    fault = to_fault(error)
    return Response(
        _encoder.encode(problem(fault)),
        status_of(fault.code) if status is None else status,
        {**GUARDED, **headers_for(fault)},
        "application/json",
    )


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return _refusal(NotFound(f"there is no {what}; GET /openapi.json lists what there is"))
    wrong = InvalidInput(f"{what}: {error.detail}; GET /openapi.json lists what there is")
    response = _refusal(wrong, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _defect(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; Starlette raises it again, and uvicorn logs the trace."""
    return _refusal(error)


# -- extra routes ------------------------------------------------------------------------------------


def _described(routes: Sequence[Route]) -> list[Other]:
    found = []
    for route in routes:
        summary = (
            (getattr(route.endpoint, "__doc__", None) or route.name).strip().partition("\n")[0]
        )
        methods = sorted((route.methods or {"GET"}) - {"HEAD"})
        found += [Other(method, route.path, summary, MONITOR) for method in methods]
    return found


def _guarded(context: AdminContext, route: Route) -> Route:
    """A copy of a route that asks for a token first."""
    inner = route.app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = inner
        try:
            admit(context, Request(scope, receive), MONITOR)
        except PenstockError as error:
            answer = _refusal(error)
        await answer(scope, receive, send)

    copied = copy.copy(route)
    copied.app = guarded
    return copied


# -- the server ----------------------------------------------------------------------------------


def _bounded(app: ASGIApp) -> ASGIApp:
    """The application behind a limit on the size of heads: h11 limits only heads that are incomplete."""

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        answer = app
        if size > MAX_HEAD_BYTES:
            wrong = PayloadTooLarge(
                f"path and headers are over {MAX_HEAD_BYTES} bytes; nothing was done",
                limit=MAX_HEAD_BYTES,
            )
            answer = _refusal(wrong, HEAD_TOO_LARGE)
        ends = tuple(scope["server"] or ()), tuple(scope["client"] or ())
        connection = _connections.get(ends)
        with contextlib.nullcontext() if connection is None else connection.answering():
            await answer(scope, receive, send)

    return bounded


Ends = tuple[tuple[Any, ...], tuple[Any, ...]]
_connections: WeakValueDictionary[Ends, _TimedProtocol] = WeakValueDictionary()
"""By their local and remote addresses, which an ASGI scope has too."""


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits for sending a head and reading an answer; uvicorn itself has none.

    It relies on `asyncio.Protocol` and ASGI only, and on nothing internal to uvicorn.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection = transport
        self._under_way = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        here, there = (transport.get_extra_info(name) or () for name in ("sockname", "peername"))
        _connections[tuple(here[:2]), tuple(there[:2])] = self
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client does not read its answer: it has READ_TIMEOUT_S to continue."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._read_timer = loop.call_later(READ_TIMEOUT_S, self._connection.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered, no time limit for the next head runs."""
        self._under_way += 1
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        try:
            yield
        finally:
            self._under_way -= 1

    def _time_head(self) -> None:
        """Start the time limit for a head, unless it runs or a request is being answered."""
        if not self._under_way and self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if not self._under_way:
            self._connection.close()


UVICORN = ">=0.30,<1"
_OPTIONS = (
    "http", "ws", "lifespan", "loop", "log_config", "log_level", "access_log", "proxy_headers",
    "server_header", "limit_concurrency", "h11_max_incomplete_event_size", "timeout_keep_alive",
    "timeout_graceful_shutdown", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs",
)  # fmt: skip


def check_uvicorn() -> None:
    """Raise MissingExtra when the installed uvicorn lacks something that this server needs."""
    lacks = [name for name in ("serve", "capture_signals") if not hasattr(uvicorn.Server, name)]
    known = inspect.signature(uvicorn.Config).parameters
    lacks += [name for name in _OPTIONS if name not in known]
    if not issubclass(H11Protocol, asyncio.Protocol):
        lacks.append("H11Protocol")
    if lacks:
        raise MissingExtra(
            f"uvicorn {uvicorn.__version__} has no {', '.join(lacks)}, which HTTP needs: "
            f"pip install 'uvicorn{UVICORN}', or turn HTTP off with server.http = \"\"",
            extra="server",
            missing=lacks,
        )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The daemon handles signals."""
        yield


class HttpServer:
    """Serves an application on an address, as a task of the running loop."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        tls_certificate: str = "",
        tls_key: str = "",
        tls_client_ca: str = "",
    ) -> None:
        check_uvicorn()
        self._host, self._port = host, port
        config = uvicorn.Config(
            _bounded(app), http=_TimedProtocol, ws="none", lifespan="off", loop="none", log_config=None,
            log_level="error", access_log=False, proxy_headers=False, server_header=False,
            limit_concurrency=MAX_CONNECTIONS, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=STOP_S,
            ssl_certfile=tls_certificate or None, ssl_keyfile=tls_key or None,
            ssl_ca_certs=tls_client_ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls_client_ca else ssl.CERT_NONE,
        )  # fmt: skip
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(
                f"the files of server.tls_certificate, tls_key and tls_client_ca cannot be used: "
                f"{error}. Check that they are PEM files and belong together",
                certificate=tls_certificate,
            ) from error
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; returns the port, which is any free one for port 0."""
        listener = _listener(self._host, self._port)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="penstock-http")
        while not self._server.started:
            if self._task.done():
                listener.close()
                await self._task  # raises the reason
            await asyncio.sleep(0.001)
        return port

    async def stop(self) -> None:
        """Accept no more requests, finish those under way, and stop."""
        if self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._task = None


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidSettings(
            f"server.http cannot listen on {host}:{port}: {error.strerror or error}. Stop whoever uses "
            "it, or choose another port; 0 takes a free one",
            address=f"{host}:{port}",
        ) from error
    return listener

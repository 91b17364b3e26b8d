"""Routes over HTTP: the operations of `penstock route`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.core.routes import Route, RouteType
from penstock.engines import requests as ask
from penstock.engines.requests import Effect
from penstock.server.admin.endpoint import (
    Actor,
    Body,
    Call,
    Confirm,
    DryRun,
    Endpoint,
    Page,
    Paging,
    Query,
    Text,
    page,
)

PATH = "/api/admin/routes"


class RoutePut(Body, frozen=True):
    """A route to add, or to replace the one of the same pattern and destination."""

    pattern: Text
    destination: Text
    type: RouteType = "fanout"
    priority: int = 0
    enabled: bool = True
    tenant: Annotated[str | None, Meta(description="Only for this tenant; null is for all.")] = None
    actor: Actor = None


class Pair(Body, frozen=True):
    """A route, by its two ends."""

    pattern: Text
    destination: Text
    actor: Actor = None


class PairQuery(Query, frozen=True):
    """A route, by its two ends."""

    pattern: Text
    destination: Text
    confirm: Confirm = ""
    dry_run: DryRun = False
    actor: Actor = None


class ResolveQuery(Query, frozen=True):
    """An event to be."""

    topic: Text
    tenant: Annotated[str | None, Meta(description="As seen by this tenant.")] = None


class RouteDone(msgspec.Struct, frozen=True):
    """The change that was made to a route."""

    done: str
    pattern: str
    destination: str


class RouteRemoved(msgspec.Struct, frozen=True):
    """A route that is gone, or would be."""

    done: str | None
    """`removed`; null after a dry run."""
    pattern: str
    destination: str
    effect: Effect


class Resolved(msgspec.Struct, frozen=True):
    """The routes an event takes, in order."""

    items: list[Route]


async def list_routes(call: Call) -> Page[Route]:
    """Routes by precedence."""
    found: list[Any] = await call.ask(ask.ListRoutes())
    return page(found, call.query.limit, call.query.offset)


async def put(call: Call) -> Route:
    """Add or replace a route; it works at once."""
    body: RoutePut = call.body
    route = Route(
        body.pattern, body.destination, body.type, body.priority, body.enabled, body.tenant
    )
    await call.ask(ask.PutRoute(route, body.actor or ""))
    return route


async def remove(call: Call) -> RouteRemoved:
    """Remove a route."""
    wanted: PairQuery = call.query
    effect: Effect = await call.ask(
        ask.RemoveRoute(
            wanted.pattern, wanted.destination, wanted.actor or "", wanted.confirm, wanted.dry_run
        )
    )
    done = "removed" if effect.done else None
    return RouteRemoved(done, wanted.pattern, wanted.destination, effect)


async def enable(call: Call) -> RouteDone:
    """Switch a route on."""
    return await _switch(call, enabled=True)


async def disable(call: Call) -> RouteDone:
    """Switch a route off, and keep it."""
    return await _switch(call, enabled=False)


async def _switch(call: Call, *, enabled: bool) -> RouteDone:
    body: Pair = call.body
    request = ask.SwitchRoute(body.pattern, body.destination, enabled, body.actor or "")
    await call.ask(request)
    return RouteDone("enabled" if enabled else "disabled", body.pattern, body.destination)


async def resolve(call: Call) -> Resolved:
    """The routes that an event would take, in order."""
    return Resolved(await call.ask(ask.ResolveRoute(call.query.topic, call.query.tenant)))


ENDPOINTS = (
    Endpoint("GET", PATH, "List the routes.", list_routes, Page[Route], ask.ListRoutes,
             query=Paging),
    Endpoint("PUT", PATH, "Add or replace a route.", put, Route, ask.PutRoute, body=RoutePut),
    Endpoint("DELETE", PATH, "Remove a route.", remove, RouteRemoved, ask.RemoveRoute,
             query=PairQuery, confirms="REMOVE"),
    Endpoint("POST", f"{PATH}/enable", "Use a route again.", enable, RouteDone, ask.SwitchRoute,
             body=Pair),
    Endpoint("POST", f"{PATH}/disable", "Keep a route without using it.", disable, RouteDone,
             ask.SwitchRoute, body=Pair),
    Endpoint("GET", f"{PATH}/resolve", "Show where an event of a topic goes.", resolve, Resolved,
             ask.ResolveRoute, query=ResolveQuery),
)  # fmt: skip

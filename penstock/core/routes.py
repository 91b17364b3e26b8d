"""Where events go beyond their own topic: the versioned catalogue of routes.

A route sends what a pattern selects to a destination. The catalogue answers which routes apply to
a topic, counts its changes, and turns into bytes and back with a check that finds any damage. It
writes no file itself: engines store `encode()` atomically after each change and `decode` at start.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

from penstock.core.routing import RouteTree
from penstock.model.errors import Corrupted, FormatTooNew, InvalidInput, UnknownRoute
from penstock.model.parameter import Name, count, text
from penstock.model.topic import MAX_WORD_BYTES, check_pattern, precedence

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1  # of the encoded catalogue; raised when an older reader would misread it
MAX_ROUTES = 1_000_000  # the size up to which look-ups are measured
MAX_DESTINATION_BYTES = 255  # a topic or group name fits, and so does a URL of sensible length
MAX_PRIORITY = 32_767  # both ways from 0: a signed 16-bit number on every wire

DIRECT = "direct."
"""Groups of one consumer each, known by the name it registered with."""
RouteType = Literal["fanout", "direct", "group"]
ROUTE_TYPES: tuple[str, ...] = get_args(RouteType)

_DESTINATION = re.compile(rf"[!-~]{{1,{MAX_DESTINATION_BYTES}}}")
_TENANT = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_WORD_BYTES}}}")


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule of the catalogue: events whose topic the pattern selects go to the destination.

    A route with a tenant serves events of that tenant only; without one it serves all.

    >>> Route("orders.#", "archive").type
    'fanout'
    """

    pattern: Name
    destination: Annotated[str, partial(text, least=1, most=MAX_DESTINATION_BYTES)]
    type: RouteType = "fanout"
    priority: Annotated[int, partial(count, least=-MAX_PRIORITY, most=MAX_PRIORITY)] = 0
    enabled: bool = True
    tenant: str | None = None

    @property
    def group(self) -> str:
        """The consumer group that the route leads to: that of a client's own, for `direct`."""
        return f"{DIRECT}{self.destination}" if self.type == "direct" else self.destination


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    routes: list[Route]


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    sha256: str
    catalogue: msgspec.Raw


class _Format(msgspec.Struct, frozen=True):
    """All that is read of a catalogue before it is known to be of a format we understand."""

    format: int


class RouteCatalogue:
    """All routes of a bus, one for each pair of pattern and destination.

    >>> catalogue = RouteCatalogue()
    >>> catalogue.put(Route("orders.*", "billing", priority=5))
    True
    >>> [route.destination for route in catalogue.resolve("orders.created", tenant=None)]
    ['billing']
    >>> catalogue.version
    1
    """

    def __init__(self) -> None:
        self._tree: RouteTree[str] = RouteTree()
        self._routes: dict[str, dict[str, Route]] = {}  # by pattern, then by destination
        self._leading: dict[str, set[str]] = {}  # patterns by the destination of their routes
        self._count = 0
        self._version = 0

    @property
    def version(self) -> int:
        """The number of changes made so far; a call that changes nothing does not count."""
        return self._version

    def __len__(self) -> int:
        """Count the routes, disabled ones included."""
        return self._count

    def __iter__(self) -> Iterator[Route]:
        """Go through all routes, by precedence of pattern and then by destination."""
        for pattern in sorted(self._routes, key=precedence):
            routes = self._routes[pattern]
            for destination in sorted(routes):
                yield routes[destination]

    def get(self, pattern: str, destination: str) -> Route:
        """Return one route, or raise UnknownRoute."""
        try:
            return self._routes[pattern][destination]
        except KeyError:
            raise UnknownRoute(
                f"no route from pattern {pattern!r} to {destination!r}; nothing was changed. "
                "List the routes there are with `penstock route list`.",
                pattern=pattern,
                destination=destination,
            ) from None

    def put(self, route: Route) -> bool:
        """Add a route or replace the one of the same pattern and destination; False if unchanged."""
        _check(route)
        routes = self._routes.get(route.pattern)
        present = None if routes is None else routes.get(route.destination)
        if present == route:
            return False
        if present is None and self._count >= MAX_ROUTES:
            raise _invalid(route, "count", f"a catalogue holds {MAX_ROUTES} routes", "Remove some.")
        if routes is None:
            routes = self._routes[route.pattern] = {}
            self._tree.add(route.pattern, route.pattern)
        routes[route.destination] = route
        self._leading.setdefault(route.destination, set()).add(route.pattern)
        self._count += present is None
        self._version += 1
        return True

    def remove(self, pattern: str, destination: str) -> Route:
        """Take a route out and return it, or raise UnknownRoute."""
        route = self.get(pattern, destination)
        routes = self._routes[pattern]
        del routes[destination]
        leading = self._leading[destination]
        leading.discard(pattern)
        if not leading:
            del self._leading[destination]
        if not routes:
            del self._routes[pattern]
            self._tree.remove(pattern, pattern)
        self._count -= 1
        self._version += 1
        return route

    def enable(self, pattern: str, destination: str) -> bool:
        """Let a route apply again; False if it did already."""
        return self.put(msgspec.structs.replace(self.get(pattern, destination), enabled=True))

    def disable(self, pattern: str, destination: str) -> bool:
        """Keep a route but let it apply to nothing; False if it was disabled already."""
        return self.put(msgspec.structs.replace(self.get(pattern, destination), enabled=False))

    def resolve(self, topic: str, tenant: str | None) -> list[Route]:
        """List the routes that an event of this topic and tenant takes.

        Higher priority first, then the more specific pattern, then by destination. A destination
        that several routes lead to is listed for each of them. Of type `group` only the first
        applies: it takes the topic over from the others.
        """
        routes = [
            route
            for pattern in self._tree.match(topic)
            for _, route in sorted(self._routes[pattern].items())
            if route.enabled and (route.tenant is None or route.tenant == tenant)
        ]
        routes.sort(key=_by_priority)
        first = next((route for route in routes if route.type == "group"), None)
        return [route for route in routes if route.type != "group" or route is first]

    def leading_to(self, destination: str) -> list[str]:
        """The patterns of all routes to a destination, disabled ones included."""
        return sorted(self._leading.get(destination, ()))

    def encode(self) -> bytes:
        """Turn the catalogue into JSON that carries its format, its version and a SHA-256.

        >>> catalogue = RouteCatalogue()
        >>> RouteCatalogue.decode(catalogue.encode()).version
        0
        """
        body = msgspec.json.encode(_Body(self._version, list(self)))
        envelope = _Envelope(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
        return msgspec.json.encode(envelope)

    @classmethod
    def decode(cls, data: bytes) -> RouteCatalogue:
        """Rebuild a catalogue from `encode`'s bytes; raises Corrupted or FormatTooNew."""
        try:
            found = msgspec.json.decode(data, type=_Format).format
            if found > FORMAT:
                raise FormatTooNew(
                    f"the route catalogue has format {found}, this Penstock reads up to {FORMAT}; "
                    "it was left as it is. Upgrade Penstock to read it.",
                    found=found,
                    supported=FORMAT,
                )
            envelope = msgspec.json.decode(data, type=_Envelope)
            if hashlib.sha256(envelope.catalogue).hexdigest() != envelope.sha256:
                raise _corrupted("its SHA-256 does not match its routes")
            body = msgspec.json.decode(envelope.catalogue, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _corrupted(str(error)) from error
        return cls._rebuild(body, data)

    @classmethod
    def _rebuild(cls, body: _Body, data: bytes) -> RouteCatalogue:
        catalogue = cls()
        try:
            for route in body.routes:
                catalogue.put(route)
        except InvalidInput as error:
            raise _corrupted(error.message) from error
        catalogue._version = body.version
        # One catalogue has one encoding, so anything the checks above let through (a route twice,
        # an impossible format or version, a space) shows here.
        if body.version < len(catalogue) or catalogue.encode() != data:
            raise _corrupted("it is not in the form in which catalogues are written")
        return catalogue


def _by_priority(route: Route) -> int:
    return -route.priority


def _check(route: Route) -> None:
    """Structs do not check their fields when built by hand, so this does."""
    check_pattern(route.pattern)
    if not isinstance(route.destination, str) or not _DESTINATION.fullmatch(route.destination):
        problem = f"a destination is 1 to {MAX_DESTINATION_BYTES} printable ASCII characters"
        raise _invalid(route, "destination", problem, "Name a topic, group or URL without spaces.")
    if route.type not in ROUTE_TYPES:
        raise _invalid(route, "type", f"{route.type!r} is no type", f"Use one of {ROUTE_TYPES}.")
    if type(route.priority) is not int or abs(route.priority) > MAX_PRIORITY:
        problem = f"a priority is a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise _invalid(route, "priority", problem, "0 is the usual one; higher goes first.")
    if type(route.enabled) is not bool:
        raise _invalid(route, "enabled", "enabled is True or False", "Pass one of them.")
    if route.tenant is not None and not (
        isinstance(route.tenant, str) and _TENANT.fullmatch(route.tenant)
    ):
        problem = f"a tenant is one topic word of 1 to {MAX_WORD_BYTES} characters"
        raise _invalid(route, "tenant", problem, "Pass None for a route of all tenants.")


def _invalid(route: Route, field: str, problem: str, remedy: str) -> InvalidInput:
    return InvalidInput(
        f"route from {route.pattern!r}: {problem}; nothing was stored. {remedy}",
        pattern=route.pattern,
        field=field,
    )


def _corrupted(why: str) -> Corrupted:
    return Corrupted(
        f"the route catalogue is damaged: {why}; it was left as it is. "
        "Restore the file from a backup, or remove it and add the routes again.",
        what="route catalogue",
    )

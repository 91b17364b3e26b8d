"""Endpoints of the admin API as values: the input, answer, role and handler of each.

The HTTP server (`penstock.server.admin.http`) and the OpenAPI document (`penstock.server.admin.openapi`)
use the same table of endpoints, so they always agree.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine import Request
from penstock.engines.requests import Effect
from penstock.model.event import Identity
from penstock.model.parameter import MAX_PAGE, MAX_SKIP, moment_us
from penstock.model.settings import Settings
from penstock.server.admin.gate import RIGHTS, Answer, Authorizer
from penstock.server.auth import Authenticator
from penstock.server.logs import LogQuota

T = TypeVar("T")

log = logging.getLogger("penstock.server")

MAX_NAME_CHARACTERS = 4_096  # of one name or text in a request: beyond any name the bus allows

Text = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="At most so many.")]
Offset = Annotated[int, Meta(ge=0, le=MAX_SKIP, description="After so many.")]
Actor = Annotated[
    Text | None,
    Meta(
        description="Who the audit trail names; the token's subject unless an admin says another."
    ),
]


@dataclass(frozen=True)
class AdminContext:
    """The running broker, as the admin API uses it."""

    engine: EmbeddedEngine
    settings: Settings
    authenticator: Authenticator
    obstacles: Callable[[], list[str]]
    """The reasons why clients cannot publish: starting and draining, a full disk, no open files."""
    ask: Answer | None = None
    """The broker's own way to ask the engine, where there is one."""
    refusals: LogQuota = field(default_factory=lambda: LogQuota(log))
    """Logs refused callers; separate, so that many refusals over HTTP hide none of other transports."""


@dataclass(frozen=True)
class Call:
    """One checked request to an endpoint: the caller, and the fields."""

    context: AdminContext
    gate: Authorizer
    identity: Identity
    path: Mapping[str, str]
    query: Any = None
    body: Any = None

    async def ask(self, request: Request) -> Any:
        """The engine's answer, within the rights of the caller."""
        return await self.gate.ask(self.identity, request)

    @property
    def now_us(self) -> int:
        """The broker's wall clock, in microseconds since 1970 UTC."""
        return self.context.engine.runtime.wall_us()

    def moment_us(self, name: str, text: str | None) -> int | None:
        """Parse a time: ISO 8601, "@1767225600", or a duration before now ("2h")."""
        return None if text is None else moment_us(name, text, self.now_us)


@dataclass(frozen=True)
class Endpoint:
    """One operation of the API."""

    method: str
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Any]]
    answer: Any
    """The type that the handler returns, for the OpenAPI document."""
    asks: type[Request] | None = None
    """The engine request that it makes, which decides the role it needs."""
    role: str = ""
    """The role where no engine request decides; "" is open to all."""
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    confirms: str = ""
    """The confirmation word that the caller must give."""
    partial: bool = False
    """Whether some records can fail while others succeed: status 207."""

    @property
    def needs(self) -> str:
        """The least role that a caller needs."""
        return self.role if self.asks is None else RIGHTS[self.asks]


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters behind the question mark."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object in a request."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Some rows of a list."""

    items: list[T]
    more: bool = False
    """Whether there are rows behind these; ask again with `offset`."""


class Paging(Query, frozen=True):
    """Which part of a list."""

    limit: Limit = 1_000
    offset: Offset = 0


Confirm = Annotated[
    str,
    Meta(description="The operation's verb in capitals, such as DELETE; else nothing happens."),
]
DryRun = Annotated[bool, Meta(description="Change nothing; answer what would happen.")]


class Deleting(Query, frozen=True):
    """The parameters of a deletion."""

    confirm: Confirm = ""
    dry_run: DryRun = False
    actor: Actor = None


class Deleted(msgspec.Struct, frozen=True):
    """The thing that was deleted, or would be."""

    deleted: str | None
    """Its name; null after a dry run."""
    effect: Effect


def deleted(name: str, effect: Effect) -> Deleted:
    """The answer to a deletion."""
    return Deleted(name if effect.done else None, effect)


class Answered(msgspec.Struct, frozen=True):
    """An answer with a status of its own."""

    status: int
    body: Any


def page(rows: Iterable[T], limit: int, offset: int) -> Page[T]:
    """One page of a list.

    >>> page("abcd", limit=2, offset=1)
    Page(items=['b', 'c'], more=True)
    """
    found = list(islice(rows, offset, offset + limit + 1))
    return Page(found[:limit], len(found) > limit)

"""The Protocol of every engine: eight methods that the bus calls, and two kinds of feed.

Every engine passes the same tests, `penstock.testing.conformance`. What an engine cannot do is missing
in its `capabilities`, and it refuses such a request with Unsupported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from penstock.core.entry import GroupSpec
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.event import Event, Identity, Receipt
from penstock.model.parameter import GroupName, count, untouched

MAX_INFLIGHT = 1_000_000  # events of one consumer that are not settled, as in the settings


class ReadRange(NamedTuple):
    """Events of a partition that a member of a log group was handed, without a gap."""

    start: int
    stop: int
    epoch: int


class Subscribe(msgspec.Struct, frozen=True):
    """Who joins which group, and how: all that an engine needs to open a feed."""

    group: GroupName
    spec: GroupSpec
    member: GroupName
    max_inflight: Annotated[int, partial(count, least=1, most=MAX_INFLIGHT)]
    identity: Identity = Identity()
    handed: Annotated[dict[tuple[str, int], ReadRange], untouched] = {}
    """Log mode, by topic and partition: events the member was handed before the broker restarted."""


class Delivery(Protocol):
    """Consecutive leased events of one batch; `index` counts from the first of them."""

    batch: EventBatch
    attempt: int

    def hand(self) -> Event | None:
        """The next event, whose lease runs from now; None when all were handed out."""
        ...

    def ack(self, index: int) -> None:
        """The event is done."""
        ...

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """The event is to be delivered again, later."""
        ...

    def extend(self, index: int, seconds: float | None) -> None:
        """The consumer needs more time for the event."""
        ...

    def reject(self, index: int, reason: str) -> None:
        """The event becomes a dead letter."""
        ...


class QueueFeed(Protocol):
    """Leased events for one member of a queue group."""

    async def receive(self) -> Delivery:
        """Wait for the next events."""
        ...

    async def close(self) -> None:
        """Leave the group; what is not settled returns to it."""
        ...


class Handed(NamedTuple):
    """A batch that a member of a log group was handed."""

    batch: EventBatch
    epoch: int
    """How many resets of the group lie before its reading."""


class LogFeed(Protocol):
    """Batches in order for one member of a log group."""

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        ...

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer is done with everything before `offset` that was handed out in an epoch."""
        ...

    async def commit(self) -> None:
        """Make the marked offsets the group's; raises Fenced when a partition is not this member's.

        Marks from before a reset are left out: a commit does not undo a reset.
        """
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class Settle(msgspec.Struct, frozen=True):
    """An ack inside a transaction."""

    delivery: Any
    index: int


class Transaction(msgspec.Struct):
    """Publishes, acks and cursors that happen together or not at all."""

    drafts: list[Draft] = []
    acks: list[Settle] = []
    cursors: list[LogFeed] = []
    key: bytes | None = None
    """The transaction happens at most once for this key and its tenant."""
    tenant: str = "default"


class Request(msgspec.Struct, frozen=True):
    """An administrative question or command; penstock.engines.requests lists them."""


class Engine(Protocol):
    """A place where events live."""

    capabilities: frozenset[str]
    """Names of the optional features that it has."""

    async def open(self) -> None:
        """Connect or recover; the engine can be used when it returns."""
        ...

    async def close(self) -> None:
        """Flush, and release what `open` took."""
        ...

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; they are as durable as the settings say when it returns."""
        ...

    async def transact(self, transaction: Transaction) -> list[Receipt] | None:
        """Do all of it or nothing; None, and nothing done, when one with its key has happened."""
        ...

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Join a group, which is made when it does not exist."""
        ...

    def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches from `start` until `stop`, or until the end as it is now."""
        ...

    async def ask(self, request: Request) -> Any:
        """Answer an administrative request."""
        ...

    async def flush(self) -> None:
        """Make everything settled so far durable."""
        ...

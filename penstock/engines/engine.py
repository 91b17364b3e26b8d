"""The shape every engine has: what the bus asks of it, in seven methods and two kinds of feed.

Later engines (broker, JetStream, RabbitMQ) follow the same Protocol and pass the same suite,
penstock.testing.conformance. What an engine cannot do it leaves out of `capabilities` and refuses
with Unsupported.
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
    """Everything an engine needs to know to open a feed."""

    group: GroupName
    spec: GroupSpec
    member: GroupName
    max_inflight: Annotated[int, partial(count, least=1, most=MAX_INFLIGHT)]
    identity: Identity = Identity()
    handed: Annotated[dict[tuple[str, int], ReadRange], untouched] = {}
    """Log mode, by topic and partition: what the member has from before the broker was restarted."""


class Delivery(Protocol):
    """A stretch of leased events; `index` counts in its batch."""

    batch: EventBatch
    attempt: int

    def hand(self) -> Event | None:
        """The next event for the consumer, its lease running from now; None when all are out."""
        ...

    def ack(self, index: int) -> None:
        """Done."""
        ...

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """Again, later."""
        ...

    def extend(self, index: int, seconds: float | None) -> None:
        """More time."""
        ...

    def reject(self, index: int, reason: str) -> None:
        """Dead."""
        ...


class QueueFeed(Protocol):
    """Leased events for one member of a queue group."""

    async def receive(self) -> Delivery:
        """Wait for the next stretch of events."""
        ...

    async def close(self) -> None:
        """Leave the group; what is not settled returns to it."""
        ...


class Handed(NamedTuple):
    """A batch in the hands of a log group's member."""

    batch: EventBatch
    epoch: int
    """Between which resets of the group it was read."""


class LogFeed(Protocol):
    """Batches in order for one member of a log group."""

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        ...

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer is through with everything before `offset`, as handed out in an epoch."""
        ...

    async def commit(self) -> None:
        """Make what was marked the group's place; raises Fenced when it is not ours.

        What was read before a reset is left out: a commit does not undo it.
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
    """It happens at most once for this token and its tenant."""
    tenant: str = "default"


class Request(msgspec.Struct, frozen=True):
    """An administrative question or command; penstock.engines.requests lists them."""


class Engine(Protocol):
    """A place where events live."""

    capabilities: frozenset[str]

    async def open(self) -> None:
        """Connect, recover, be ready."""
        ...

    async def close(self) -> None:
        """Flush and let go."""
        ...

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; they are as durable as the settings say when it returns."""
        ...

    async def transact(self, transaction: Transaction) -> list[Receipt] | None:
        """All of it or nothing; None, and nothing, when its key is that of an earlier one."""
        ...

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Join a group, making it on first sight."""
        ...

    def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches from `start` until `stop`, or until the end as it is now."""
        ...

    async def ask(self, request: Request) -> Any:
        """Administer."""
        ...

    async def flush(self) -> None:
        """Everything settled so far is durable when it returns."""
        ...

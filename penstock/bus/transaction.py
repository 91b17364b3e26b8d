"""Transactions: publishes, acks and cursors that happen together or not at all."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from penstock.bus import tracing
from penstock.bus.drafting import PublishManyOptions, PublishOptions, key_token
from penstock.bus.subscription import Subscription
from penstock.engines.engine import Settle
from penstock.engines.engine import Transaction as EngineTransaction
from penstock.model.draft import Draft
from penstock.model.errors import InvalidInput
from penstock.model.event import Event, Receipt
from penstock.model.parameter import refused

if TYPE_CHECKING:
    from penstock.bus.bus import Bus


class Transaction:
    """Collects what belongs together; it happens when the `async with` block ends well.

    >>> import asyncio, penstock
    >>> async def transfer() -> int:
    ...     async with penstock.connect("mem:") as bus:
    ...         async with bus.transaction() as tx:
    ...             tx.publish("ledger.debits", {"amount": 5})
    ...             tx.publish("ledger.credits", {"amount": 5})
    ...         return len(tx.receipts)
    >>> asyncio.run(transfer())
    2

    With an idempotency key it happens at most once, however often it is tried: in this process or in
    another one, after a crash, at the same time. A key belongs to its tenant. It is known for
    `dedup.window_s` at least, unless the tenant uses more than `dedup.capacity` keys in that time:
    then the oldest are forgotten first. Of a repeated transaction nothing happens, its acks and
    cursors included: when `repeated` is set, settle the events apart.

    >>> async def twice() -> list[bool]:
    ...     async with penstock.connect("mem:") as bus:
    ...         seen = []
    ...         for _ in range(2):
    ...             async with bus.transaction(idempotency_key="invoice-7") as tx:
    ...                 tx.publish("ledger.debits", {"amount": 5})
    ...             seen.append(tx.repeated)
    ...         return seen
    >>> asyncio.run(twice())
    [False, True]
    """

    def __init__(self, bus: Bus, idempotency_key: str | None = None) -> None:
        self.receipts: list[Receipt] = []
        """One for each publish, once it has happened."""
        self.repeated = False
        """Its key was that of an earlier transaction: nothing of this one happened."""
        self._bus = bus
        self._parts = EngineTransaction(drafts=[], acks=[], cursors=[])
        if idempotency_key is not None:
            bus.need("idempotency")
            self._parts.key = key_token("idempotency_key", idempotency_key)
            self._parts.tenant = bus.identity.tenant
        self._open = True

    def publish(self, topic: str, value: Any, **options: Unpack[PublishOptions]) -> None:
        """Publish one event when the transaction commits; options as in `Bus.publish`."""
        self._add(self._bus.draft(topic, value, **options))

    def publish_many(self, topic: str, values: Any, **options: Unpack[PublishManyOptions]) -> None:
        """Publish many events when the transaction commits; options as in `Bus.publish_many`."""
        self._add(self._bus.draft_many(topic, values, **options))

    def _add(self, draft: Draft) -> None:
        self._check_open()
        if draft.deliver_at_us is not None:
            raise InvalidInput("a delayed event cannot be part of a transaction; publish it apart")
        self._parts.drafts.append(draft)

    def ack(self, event: Event) -> None:
        """Ack a leased event when the transaction commits."""
        self._check_open()
        if not isinstance(event, Event):
            raise refused("event", "an event of a queue subscription", event)
        self._parts.acks.append(Settle(event._leased(), event.index))

    def commit(self, subscription: Subscription) -> None:
        """Commit a log subscription's cursor when the transaction commits."""
        self._check_open()
        if not isinstance(subscription, Subscription):
            raise refused("subscription", 'a subscription with mode="log"', subscription)
        self._parts.cursors.append(subscription.cursor())

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidInput("the transaction is over; begin another one")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        if kind is None:
            bus = self._bus
            if tracing.tracer is None:
                receipts = await bus.engine.transact(self._parts)
            else:
                receipts = await tracing.transact(bus.engine, self._parts, bus.settings.limits)
            self.repeated = receipts is None
            self.receipts = receipts or []

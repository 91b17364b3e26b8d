"""Subscription: events for one consumer, as an async iterator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

from penstock.engines.engine import Delivery, LogFeed, QueueFeed
from penstock.model.batch import EventBatch
from penstock.model.errors import (
    BrokerUnreachable,
    BusClosed,
    ConnectionLost,
    DeliveryError,
    InvalidInput,
    SomeNotSettled,
)
from penstock.model.event import Event
from penstock.model.parameter import Seconds, many, refused, seconds


class Subscription:
    """Events of a pattern, for one member of a group. Use it with `async with`.

    >>> import asyncio, penstock
    >>> async def first() -> bytes:
    ...     async with penstock.connect("mem:") as bus:
    ...         await bus.publish("orders.created", b"hello")
    ...         async with bus.subscribe("orders.*", group="billing") as events:
    ...             async for event in events:
    ...                 await event.ack()
    ...                 return event.payload
    >>> asyncio.run(first())
    b'hello'
    """

    def __init__(
        self,
        mode: str,
        open_feed: Callable[[], Awaitable[QueueFeed | LogFeed]],
        after_close: Callable[[Subscription], Awaitable[None]],
    ) -> None:
        self.mode = mode
        self._open_feed = open_feed
        self._after_close = after_close
        self._feed: Any = None
        self._delivery: Delivery | None = None
        self._events: Any = iter(())
        self._last: Event | None = None
        self._epoch = 0
        self._receiving: asyncio.Future[Any] | None = None

    async def open(self) -> Self:
        """Join the group."""
        if self._feed is None:
            self._feed = await self._open_feed()
        return self

    async def close(self) -> None:
        """Leave the group; events that are not settled return to it."""
        feed, self._feed = self._feed, None
        if self._receiving is not None:
            self._receiving.cancel()
        if feed is not None:
            # A broker that is gone: its client goes on leaving, and who leaves can do nothing more about
            # it, but would lose the error or the Ctrl-C that it leaves for.
            with contextlib.suppress(BrokerUnreachable, ConnectionLost):
                await feed.close()
                await self._after_close(self)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = self.at_hand()
            if event is not None:
                return event
            received = await self._receive()
            if self.mode == "log":
                self._mark()
                self._events, self._epoch = iter(received.batch), received.epoch
            else:
                self._delivery = received

    def at_hand(self) -> Event | None:
        """The next event if it has arrived already; never waits."""
        if self.mode == "log":
            event = next(self._events, None)
            if event is not None:
                self._last = event
            return event
        return None if self._delivery is None else self._delivery.hand()

    async def _receive(self) -> Any:
        """Wait for the feed; the next call continues a wait that was abandoned."""
        if self._feed is None:
            raise BusClosed("the subscription is closed; subscribe again")
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._feed.receive())
            self._receiving.add_done_callback(_heard)
        try:
            received = await asyncio.shield(self._receiving)
        except asyncio.CancelledError:
            if self._receiving is not None and self._receiving.cancelled():
                self._receiving = None
                raise BusClosed("the subscription was closed while it waited") from None
            raise
        except BaseException:
            self._receiving = None
            raise
        self._receiving = None
        return received

    async def get(self, timeout_s: Seconds | None = None) -> Event | None:
        """The next event, or None when none came in time."""
        within_s = None if timeout_s is None else seconds("timeout_s", timeout_s)
        event = self.at_hand()
        if event is not None:
            return event
        try:
            async with asyncio.timeout(within_s):
                return await anext(self)
        except TimeoutError:
            return None

    async def batches(self) -> AsyncIterator[EventBatch]:
        """Whole batches, in order; only for `mode="log"`."""
        if self.mode != "log":
            raise InvalidInput('batches come with mode="log"; a queue leases events one by one')
        while True:
            batch, epoch = await self._receive()
            self._feed.mark(batch.topic, batch.partition, batch.end_offset, epoch)
            yield batch

    async def commit(self) -> None:
        """Make everything handed out so far the group's place, durably; only for `mode="log"`."""
        await self.cursor().commit()

    def cursor(self) -> LogFeed:
        """The engine's side of the cursor, up to date; for `commit` and for transactions."""
        if self.mode != "log":
            raise InvalidInput('only mode="log" has a cursor to commit; ack the events of a queue')
        if self._feed is None:
            raise BusClosed("the subscription is closed; subscribe again")
        self._mark()
        feed: LogFeed = self._feed
        return feed

    def _mark(self) -> None:
        """Tell the feed which event was handed out last; it could be in the middle of a batch."""
        event, self._last = self._last, None
        if event is not None:
            self._feed.mark(event.topic, event.partition, event.offset + 1, self._epoch)

    async def ack(self, events: Iterable[Event]) -> None:
        """Ack many events: all that can be, then SomeNotSettled names those that could not."""
        await _settle(events, Event.ack)

    async def nack(self, events: Iterable[Event], delay_s: Seconds | None = None) -> None:
        """Nack many events: all that can be, then SomeNotSettled names those that could not."""
        delay = None if delay_s is None else seconds("delay_s", delay_s)
        await _settle(events, lambda event: event.nack(delay))


async def _settle(events: Iterable[Event], settle: Callable[[Event], Awaitable[None]]) -> None:
    failures: list[tuple[Event, DeliveryError]] = []
    count = 0
    for event in _events(events):
        count += 1
        try:
            await settle(event)
        except DeliveryError as error:
            failures.append((event, error))
    if failures:
        event, first = failures[0]
        raise SomeNotSettled(
            f"{len(failures)} of {count} events could not be settled, the others are; {event.id}: "
            f"{first.message}. `failures` of this error has each event and why",
            failures=failures,
        )


def _heard(received: asyncio.Future[Any]) -> None:
    """Mark the error of an abandoned wait as seen; the next call raises its own."""
    if not received.cancelled():
        received.exception()


def _events(events: Iterable[Event]) -> list[Event]:
    """All of them, before the first is settled."""
    found: list[Event] = many("events", events, item=_event)
    return found


def _event(parameter: str, event: object) -> Event:
    if not isinstance(event, Event):
        raise refused(parameter, "an event of this subscription", event)
    return event

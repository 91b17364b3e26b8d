"""Handlers: how a function's outcome settles its event."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pytest_asyncio

import penstock
from penstock.testing.conformance.harness import (
    DEADLINE_S,
    QUIET_S,
    Contract,
    buried,
    dead_letters,
    nothing,
    numbers,
    owes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TWICE = penstock.Retry(ladder_ms=(20,), max_attempts=2)


class Order(msgspec.Struct):
    """A payload as a msgspec struct."""

    id: int
    item: str = "pump"


@dataclasses.dataclass
class Bill:
    """A payload as a dataclass."""

    id: int


class Note(TypedDict):
    """A payload as a typed dictionary."""

    id: int


class TestHandlers(Contract):
    """Handlers"""

    @pytest_asyncio.fixture
    async def calls(self) -> AsyncIterator[asyncio.Queue[Any]]:
        """What the handlers of a test were called with."""
        yield asyncio.Queue()

    async def test_success(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that returns has acked its event."""

        @bus.handler(topic, group=group)
        async def handle(value: dict[str, Any], event: penstock.Event) -> None:
            calls.put_nowait((value, event.attempt))

        await bus.publish(topic, {"id": 7})
        assert await next_of(calls) == ({"id": 7}, 1)
        await owes(bus, group, 0)
        assert calls.empty()

    async def test_typed_payloads(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """The payload is decoded into the type the handler's first parameter names."""

        @bus.handler(topic, group=f"{group}-struct")
        async def struct(order: Order) -> None:
            calls.put_nowait(order)

        @bus.handler(topic, group=f"{group}-dataclass")
        async def data(bill: Bill) -> None:
            calls.put_nowait(bill)

        @bus.handler(topic, group=f"{group}-dict")
        async def typed(note: Note) -> None:
            calls.put_nowait(note)

        @bus.handler(topic, group=f"{group}-bytes")
        async def raw(payload: bytes) -> None:
            calls.put_nowait(payload)

        @bus.handler(topic, group=f"{group}-event")
        async def event_only(event: penstock.Event) -> None:
            calls.put_nowait(event.topic)

        await bus.publish(topic, {"id": 7})
        seen = [await next_of(calls) for _ in range(5)]
        for wanted in (Order(7), Bill(7), {"id": 7}, b'{"id":7}', topic):
            assert wanted in seen

    async def test_failure(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that raises gets its event again, up to the last attempt; then it is a dead letter."""

        @bus.handler(topic, group=group, retry=TWICE)
        async def handle(value: bytes, event: penstock.Event) -> None:
            calls.put_nowait((value, event.attempt))
            if value == b"bad" or event.attempt == 1:
                raise ValueError("out of paper")

        await bus.publish_many(topic, [b"good", b"bad"])
        seen = [await next_of(calls) for _ in range(4)]
        assert sorted(seen) == [(b"bad", 1), (b"bad", 2), (b"good", 1), (b"good", 2)]
        [letter] = await dead_letters(bus, group, 1)
        assert letter.attempts == 2
        assert "out of paper" in letter.reason
        assert (await bus.dead_letters.inspect(letter.id)).payload == b"bad"

    async def test_reject(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that raises Reject makes its event a dead letter at once."""

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait(event.attempt)
            raise penstock.Reject("no such customer")

        await bus.publish(topic, b"x")
        assert await next_of(calls) == 1
        [letter] = await dead_letters(bus, group, 1)
        assert letter.attempts == 1
        assert "no such customer" in letter.reason
        assert calls.empty()

    async def test_retry_later(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that raises RetryLater gets its event again no earlier than it asked."""

        @bus.handler(topic, group=group, retry=penstock.Retry(ladder_ms=(0,), max_attempts=3))
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait((event.attempt, time.monotonic()))
            if event.attempt == 1:
                raise penstock.RetryLater(0.5)

        await bus.publish(topic, b"x")
        (first, began), (second, again) = await next_of(calls), await next_of(calls)
        assert (first, second) == (1, 2)
        assert again - began >= 0.45

    async def test_timeout(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that takes longer than its timeout is cancelled, and that was an attempt."""

        @bus.handler(topic, group=group, retry=TWICE, timeout_s=0.2)
        async def handle(event: penstock.Event) -> None:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                calls.put_nowait(event.attempt)
                raise

        await bus.publish(topic, b"x")
        assert [await next_of(calls), await next_of(calls)] == [1, 2]
        [letter] = await dead_letters(bus, group, 1)
        assert letter.attempts == 2

    async def test_cancelled(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler that ends in a cancellation loses nothing: its event comes again."""

        @bus.handler(topic, group=group, retry=TWICE)
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait((event.payload, event.attempt))
            if event.payload == b"0" and event.attempt == 1:
                raise asyncio.CancelledError

        await bus.publish_many(topic, numbers(2))
        seen = [await next_of(calls) for _ in range(3)]
        assert sorted(seen) == [(b"0", 1), (b"0", 2), (b"1", 1)]
        await owes(bus, group, 0)

    async def test_undecodable_payload(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A payload that is not of the handler's type ends as a dead letter and stops nothing else."""

        @bus.handler(topic, group=group, retry=TWICE)
        async def handle(order: Order) -> None:
            calls.put_nowait(order)

        await bus.publish(topic, {"id": "seven"})
        await bus.publish(topic, {"id": 8})
        assert await next_of(calls) == Order(8)
        assert await buried(bus, group, 1) == [b'{"id":"seven"}']

    async def test_concurrency(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """As many events are handled at the same time as the handler allows, and never more."""
        running, peak = 0, 0
        full = asyncio.Event()

        @bus.handler(topic, group=group, concurrency=3)
        async def handle(event: penstock.Event) -> None:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            if running == 3:
                full.set()
            await asyncio.wait_for(full.wait(), DEADLINE_S)
            await asyncio.sleep(0.01)
            running -= 1

        await bus.publish_many(topic, numbers(12))
        await owes(bus, group, 0)
        assert peak == 3

    async def test_run(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """Serving handlers goes on until it is cancelled."""

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait(event.payload)

        serving = asyncio.ensure_future(bus.run())
        await bus.publish(topic, b"x")
        assert await next_of(calls) == b"x"
        done, _ = await asyncio.wait([serving], timeout=QUIET_S)
        assert not done
        serving.cancel()
        done, _ = await asyncio.wait([serving], timeout=DEADLINE_S)
        assert done
        assert serving.cancelled() or serving.exception() is None

    async def test_closing(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A bus that is closed lets its handlers finish, and they begin no other event."""
        closing = asyncio.Event()

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait(event.payload)
            await closing.wait()
            await bus.flush()
            calls.put_nowait(b"finished")

        await bus.publish_many(topic, numbers(2))
        assert await next_of(calls) == b"0"
        closed = asyncio.ensure_future(bus.close(drain_s=DEADLINE_S))
        await asyncio.sleep(0.05)
        closing.set()
        await asyncio.wait_for(closed, DEADLINE_S)
        assert await next_of(calls) == b"finished"
        assert calls.empty()

    async def test_closing_from_inside(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler may close its bus."""

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> None:
            await bus.close()
            calls.put_nowait(event.payload)

        await bus.publish(topic, b"x")
        await asyncio.wait_for(bus.run(), DEADLINE_S)
        assert await next_of(calls) == b"x"

    async def test_beside_subscriptions(
        self, bus: penstock.Bus, topic: str, group: str, calls: asyncio.Queue[Any]
    ) -> None:
        """A handler is a member of its group: what it acked, no other member receives."""

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> None:
            calls.put_nowait(event.payload)

        await bus.publish(topic, b"x")
        assert await next_of(calls) == b"x"
        await owes(bus, group, 0)
        async with bus.subscribe(topic, group=group) as sub:
            await nothing(sub)


async def next_of(calls: asyncio.Queue[Any]) -> Any:
    """The next call a handler noted."""
    return await asyncio.wait_for(calls.get(), DEADLINE_S)

"""Capabilities about who gets which event when: key-order, single-active, priority, filters."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import penstock
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import (
    entered,
    eventually,
    nothing,
    numbers,
    owes,
    payloads,
    take,
)


class TestKeyOrder(Declared):
    """Order per key"""

    capability = "key-order"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Subscribe with order per key."""
        await entered(bus.subscribe(topic, group=group, order="key"))

    async def test_one_at_a_time(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """While an event of a key is held, no later one of that key is delivered; other keys go on."""
        keys = [b"a", b"a", b"b", b"a", b"b", b"c"]
        await bus.publish_many(topic, numbers(6), keys=keys)
        async with (
            bus.subscribe(topic, group=group, order="key", max_inflight=10) as one,
            bus.subscribe(topic, group=group, order="key", max_inflight=10) as two,
        ):

            async def either() -> penstock.Event | None:
                return await one.get(timeout_s=0.02) or await two.get(timeout_s=0.02)

            held = [await eventually(either, "the first event of each key") for _ in range(3)]
            assert sorted(payloads(held)) == [b"0", b"2", b"5"]
            await nothing(one)
            await nothing(two)
            [first_a] = [event for event in held if event.key == b"a"]
            await first_a.ack()
            following = await eventually(either, "the next event of the key")
            assert following.payload == b"1"

    async def test_retry_keeps_order(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A failed event holds back the later ones of its key until it is settled, and only those."""
        await bus.publish_many(topic, numbers(4), keys=[b"a", b"a", b"b", b"a"])
        quick = penstock.Retry(ladder_ms=(300,), max_attempts=5)
        async with bus.subscribe(topic, group=group, order="key", retry=quick) as sub:
            events = await take(sub, 2, ack=False)
            for event in events:
                if event.key == b"a":
                    await event.nack()
                else:
                    await event.ack()
            assert payloads(await take(sub, 3)) == [b"0", b"1", b"3"]

    async def test_all_delivered(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Every event is delivered, each key in its order."""
        keys = [f"k{number % 7}".encode() for number in range(210)]
        await bus.publish_many(topic, numbers(210), keys=keys)
        async with bus.subscribe(topic, group=group, order="key") as sub:
            events = await take(sub, 210)
        for key in set(keys):
            own = [int(event.payload) for event in events if event.key == key]
            assert own == [number for number in range(210) if keys[number] == key]


class TestSingleActive(Declared):
    """Single active consumer"""

    capability = "single-active"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Subscribe with a single active member."""
        await entered(bus.subscribe(topic, group=group, order="single"))

    async def test_one_member(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """One member receives everything, in order, while the others wait."""
        async with (
            bus.subscribe(topic, group=group, order="single") as active,
            bus.subscribe(topic, group=group, order="single") as spare,
        ):
            await bus.publish_many(topic, numbers(50))
            assert payloads(await take(active, 50)) == numbers(50)
            await nothing(spare)

    async def test_takeover(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """When the active member leaves, another takes over from the first event that is not settled."""
        options: dict[str, Any] = {"group": group, "order": "single", "max_inflight": 1}
        async with AsyncExitStack() as stay:
            async with bus.subscribe(topic, **options) as active:
                spare = await stay.enter_async_context(bus.subscribe(topic, **options))
                await bus.publish_many(topic, numbers(6))
                await take(active, 2)
                await take(active, 1, ack=False)
                await nothing(spare)
            assert payloads(await take(spare, 4)) == numbers(4, first=2)


class TestPriority(Declared):
    """Priority"""

    capability = "priority"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Publish with a priority."""
        await bus.publish(topic, b"x", priority=5)

    async def test_higher_first(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Of the events that wait, those of higher priority come first; equals keep their order."""
        async with bus.subscribe(topic, group=group, max_inflight=1):
            pass
        priorities = [0, 9, 0, 5, 9, 5]
        for payload, priority in zip(numbers(4), priorities[:4], strict=True):
            await bus.publish(topic, payload, priority=priority)
        await bus.publish_many(topic, numbers(2, first=4), priorities=priorities[4:])
        async with bus.subscribe(topic, group=group, max_inflight=1) as sub:
            events = await take(sub, 6)
        assert [event.priority for event in events] == [9, 9, 5, 5, 0, 0]
        assert payloads(events) == [b"1", b"4", b"3", b"5", b"0", b"2"]

    async def test_overtakes(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An urgent event overtakes a backlog that was published before it."""
        await bus.publish_many(topic, numbers(200))
        async with bus.subscribe(topic, group=group, max_inflight=1) as sub:
            [held] = await take(sub, 1, ack=False)
            await bus.publish(topic, b"urgent", priority=9)
            await held.ack()
            assert b"urgent" in payloads(await take(sub, 2))


class TestFilters(Declared):
    """Header filters"""

    capability = "filters"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Subscribe with a filter."""
        await entered(bus.subscribe(topic, group=group, filter={"kind": "a"}))

    async def test_match(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group with a filter receives the events whose headers match all of it, and owes no others."""
        headers: list[dict[str, str]] = [
            {"kind": "a", "land": "it"},
            {"kind": "a", "land": "at"},
            {"kind": "b", "land": "it"},
            {},
            {"kind": "a", "land": "it", "more": "1"},
        ]
        await bus.publish_many(topic, numbers(5), headers=headers)
        wanted = {"kind": "a", "land": "it"}
        async with bus.subscribe(topic, group=group, filter=wanted) as sub:
            assert payloads(await take(sub, 2)) == [b"0", b"4"]
            await nothing(sub)
            await owes(bus, group, 0)
        async with bus.subscribe(topic, group=f"{group}-all") as sub:
            assert payloads(await take(sub, 5)) == numbers(5)

    async def test_handler(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A handler with a filter is called for matching events only."""
        seen: list[bytes] = []

        @bus.handler(topic, group=group, filter={"kind": "a"})
        async def handle(event: penstock.Event) -> None:
            seen.append(event.payload)

        headers = [{"kind": "ab"[number % 2]} for number in range(10)]
        await bus.publish_many(topic, numbers(10), headers=headers)

        async def done() -> bool:
            return len(seen) >= 5

        await eventually(done, "five calls")
        assert sorted(seen) == numbers(10)[::2]

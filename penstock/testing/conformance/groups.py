"""Who receives what: groups that compete, groups side by side, broadcast, credit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.testing.conformance.harness import (
    DEADLINE_S,
    Contract,
    Harness,
    eventually,
    nothing,
    numbers,
    payloads,
    take,
)

if TYPE_CHECKING:
    import penstock


async def work(sub: penstock.Subscription, seen: list[bytes], wanted: int) -> None:
    """Ack and note events until all members together have seen enough."""
    while len(seen) < wanted:
        event = await sub.get(timeout_s=0.05)
        if event is not None:
            seen.append(event.payload)
            await event.ack()


class TestGroups(Contract):
    """Groups and broadcast"""

    async def test_order(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """One member receives the events of a partition in the order they were published."""
        for number in range(50):
            await bus.publish(topic, str(number).encode())
        await bus.publish_many(topic, numbers(450, first=50))
        async with bus.subscribe(topic, group=group) as sub:
            assert payloads(await take(sub, 500)) == numbers(500)

    async def test_order_per_partition(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """With several partitions, order holds within each of them."""
        await bus.topics.create(topic, partitions=3)
        for number in range(300):
            await bus.publish(topic, str(number).encode(), partition=number % 3)
        async with bus.subscribe(topic, group=group) as sub:
            events = await take(sub, 300)
        for partition in range(3):
            own = [event for event in events if event.partition == partition]
            assert [int(event.payload) for event in own] == list(range(partition, 300, 3))
            assert [event.offset for event in own] == sorted({event.offset for event in own})

    @pytest.mark.parametrize("partitions", [1, 4])
    async def test_competing_members(
        self, bus: penstock.Bus, topic: str, group: str, partitions: int
    ) -> None:
        """Members of a group share its events: each goes to exactly one of them, and all are delivered."""
        await bus.topics.create(topic, partitions=partitions)
        seen: list[bytes] = []
        async with (
            bus.subscribe(topic, group=group, max_inflight=10) as one,
            bus.subscribe(topic, group=group, max_inflight=10) as two,
            bus.subscribe(topic, group=group, max_inflight=10) as three,
        ):
            workers = [asyncio.ensure_future(work(sub, seen, 600)) for sub in (one, two, three)]
            keys = [f"k{number}".encode() for number in range(600)]
            await bus.publish_many(topic, numbers(300), keys=keys[:300])
            await bus.publish_many(topic, numbers(300, first=300), keys=keys[300:])
            await asyncio.wait_for(asyncio.gather(*workers), DEADLINE_S)
            await nothing(one)
        assert sorted(seen) == sorted(numbers(600))

    async def test_members_come_and_go(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Members that join and leave in the middle cause neither a loss nor a second delivery of acked events."""
        await bus.publish_many(topic, numbers(200))
        seen: list[bytes] = []
        async with bus.subscribe(topic, group=group, max_inflight=5) as steady:
            seen += payloads(await take(steady, 20))
            for _ in range(3):
                async with bus.subscribe(topic, group=group, max_inflight=5) as guest:
                    both = [work(steady, seen, len(seen) + 40), work(guest, seen, len(seen) + 40)]
                    await asyncio.wait_for(asyncio.gather(*both), DEADLINE_S)
            await asyncio.wait_for(work(steady, seen, 200), DEADLINE_S)
            await nothing(steady)
        assert sorted(seen) == sorted(numbers(200))

    async def test_groups_side_by_side(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Every group receives every event."""
        await bus.publish_many(topic, numbers(20))
        for name in (f"{group}-a", f"{group}-b"):
            async with bus.subscribe(topic, group=name) as sub:
                assert payloads(await take(sub, 20)) == numbers(20)

    async def test_group_continues(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group continues where it was, whatever start is asked for when it is joined again."""
        await bus.publish_many(topic, numbers(4))
        async with bus.subscribe(topic, group=group, max_inflight=1) as sub:
            assert payloads(await take(sub, 2)) == numbers(2)
        await bus.publish(topic, b"4")
        async with bus.subscribe(topic, group=group, start="latest") as sub:
            assert payloads(await take(sub, 3)) == numbers(3, first=2)
            await nothing(sub)

    @pytest.mark.parametrize("mode", ["queue", "log"])
    async def test_broadcast(self, bus: penstock.Bus, topic: str, mode: str) -> None:
        """A subscription without a group receives every event from now on, whoever else does."""
        await bus.publish(topic, b"before")
        async with bus.subscribe(topic, mode=mode) as one, bus.subscribe(topic, mode=mode) as two:
            await bus.publish_many(topic, numbers(20))
            assert payloads(await take(one, 20)) == numbers(20)
            assert payloads(await take(two, 20)) == numbers(20)
            await nothing(one)

    async def test_broadcast_leaves_nothing(self, bus: penstock.Bus, topic: str) -> None:
        """A subscription without a group leaves nothing behind when it is closed."""
        await bus.publish_many(topic, numbers(3))
        before = {info.name for info in await bus.groups.list()}
        async with bus.subscribe(topic, start="earliest") as sub:
            await take(sub, 2, ack=False)
        after = {info.name for info in await bus.groups.list()}
        assert after <= before

    async def test_patterns(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A pattern receives every topic it matches, those made later included, and no other."""
        root = topic.split(".")[0]
        await bus.publish(f"{root}.orders.created", b"1")
        await bus.publish(f"{root}.orders", b"not this")
        async with bus.subscribe(f"{root}.*.created", group=group) as sub:
            assert payloads(await take(sub, 1)) == [b"1"]
            await bus.publish(f"{root}.bills.created", b"2")
            await bus.publish(f"{root}.bills.paid", b"not this")
            assert payloads(await take(sub, 1)) == [b"2"]
            await nothing(sub)
        async with bus.subscribe(f"{root}.#", group=f"{group}-all") as sub:
            events = await take(sub, 4)
            await nothing(sub)
        assert {event.topic for event in events} == {
            f"{root}.{rest}" for rest in ("orders", "orders.created", "bills.created", "bills.paid")
        }

    async def test_start_positions(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A new group starts at the first event, or at the end, or at an offset, as it asks."""
        receipt = await bus.publish_many(topic, numbers(5))
        third = receipt.ids()[3].offset
        async with (
            bus.subscribe(topic, group=f"{group}-default") as default,
            bus.subscribe(topic, group=f"{group}-earliest", start="earliest") as earliest,
            bus.subscribe(topic, group=f"{group}-latest", start="latest") as latest,
            bus.subscribe(topic, group=f"{group}-offset", start=f"offset:{third}") as offset,
        ):
            await bus.publish(topic, b"5")
            assert payloads(await take(default, 6)) == numbers(6)
            assert payloads(await take(earliest, 6)) == numbers(6)
            assert payloads(await take(latest, 1)) == [b"5"]
            assert payloads(await take(offset, 3)) == numbers(3, first=3)
            for sub in (default, earliest, latest, offset):
                await nothing(sub, 0.05)


class TestCredit(Contract):
    """Flow control"""

    async def test_max_inflight(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A member never holds more unsettled events than it asked for; settling one lets the next come."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, max_inflight=3) as sub:
            held = await take(sub, 3, ack=False)
            await nothing(sub)
            for event in held:
                await event.ack()
                [after] = await take(sub, 1, ack=False)
                await nothing(sub, 0.05)
                held.append(after)
                if len(held) == 6:
                    break
            assert payloads(held) == numbers(6)

    async def test_nack_frees_credit(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event that waits for its retry does not use up the member's credit."""
        await bus.publish_many(topic, numbers(3))
        async with bus.subscribe(topic, group=group, max_inflight=1) as sub:
            [stuck] = await take(sub, 1, ack=False)
            await stuck.nack(delay_s=3_600)
            assert payloads(await take(sub, 2)) == [b"1", b"2"]

    async def test_slow_group(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group that does not read slows down neither producers nor another group."""
        async with (
            bus.subscribe(topic, group=f"{group}-slow", max_inflight=1) as slow,
            bus.subscribe(topic, group=f"{group}-fast") as fast,
        ):
            await bus.publish(topic, b"0")
            [held] = await take(slow, 1, ack=False)
            for first in range(1, 2_001, 100):
                await bus.publish_many(topic, numbers(100, first=first))
            assert payloads(await take(fast, 2_001)) == numbers(2_001)
            await held.ack()
            assert payloads(await take(slow, 10)) == numbers(10, first=1)

    async def test_stuck_member(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A member that settles nothing keeps no more than its credit from the others."""
        await bus.publish_many(topic, numbers(50))
        async with bus.subscribe(topic, group=group, max_inflight=5) as stuck:
            held = await take(stuck, 5, ack=False)
            async with bus.subscribe(topic, group=group) as other:
                rest = await take(other, 45)
        assert sorted(payloads(held + rest)) == sorted(numbers(50))


class TestConnections(Contract):
    """Several connections"""

    async def test_shared_data(
        self, harness: Harness, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """Two connections see the same topics, and members of one group on both share its events."""
        if not harness.supports_second_connection:
            pytest.skip("the engine has one connection at a time")
        other = await harness.connect()
        seen: list[bytes] = []
        async with (
            bus.subscribe(topic, group=group, max_inflight=5) as one,
            other.subscribe(topic, group=group, max_inflight=5) as two,
        ):
            await other.publish_many(topic, numbers(100))
            workers = [work(one, seen, 100), work(two, seen, 100)]
            await asyncio.wait_for(asyncio.gather(*workers), DEADLINE_S)
        assert sorted(seen) == sorted(numbers(100))

        async def listed() -> bool:
            return topic in [info.name for info in await bus.topics.list()]

        await eventually(listed, "the topic on the other connection")
        await other.close()

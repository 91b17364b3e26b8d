"""Log subscriptions: batches in order and a committed cursor; reading again by offset."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.harness import (
    Contract,
    eventually,
    nothing,
    numbers,
    owes,
    payloads,
    read,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def digest(events: Iterable[penstock.Event]) -> str:
    """One hash over everything an event carries."""
    total = hashlib.sha256()
    for event in events:
        headers = sorted(event.headers.items())
        total.update(repr((event.id, event.token, event.key, event.payload, headers)).encode())
    return total.hexdigest()


class TestCursors(Contract):
    """Log subscriptions"""

    async def test_events_in_order(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A log subscription gives the events of a partition in order, with nothing to settle."""
        await bus.publish_many(topic, numbers(100))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            events = await take(sub, 50)
            await bus.publish_many(topic, numbers(100, first=100))
            events += await take(sub, 150)
        assert payloads(events) == numbers(200)
        with pytest.raises(errors.NotLeased):
            await events[0].ack()

    async def test_batches(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Batches hold the same events in the same order, each of one topic and partition."""
        await bus.topics.create(topic, partitions=2)
        for number in range(100):
            await bus.publish(topic, str(number).encode(), partition=number % 2)
        seen: dict[int, list[bytes]] = {0: [], 1: []}
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            async for batch in sub.batches():
                assert batch.topic == topic
                seen[batch.partition] += [event.payload for event in batch]
                if sum(map(len, seen.values())) == 100:
                    break
        assert seen == {side: numbers(100)[side::2] for side in (0, 1)}

    async def test_commit(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group resumes behind what it committed; what it read but did not commit comes again."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            await take(sub, 4)
            await sub.commit()
            await take(sub, 3)
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            assert payloads(await take(sub, 6)) == numbers(6, first=4)
            await sub.commit()
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            await nothing(sub)
            await bus.publish(topic, b"10")
            assert payloads(await take(sub, 1)) == [b"10"]

    async def test_commit_of_batches(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A commit after batches covers every event of the batches given out."""
        await bus.publish_many(topic, numbers(10))
        seen: list[bytes] = []
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            async for batch in sub.batches():
                seen += [event.payload for event in batch]
                if len(seen) == 10:
                    await sub.commit()
                    break
        await bus.publish(topic, b"10")
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            assert payloads(await take(sub, 1)) == [b"10"]

    async def test_stale_commit(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """When a member of the same name takes over, the old one's commit raises Fenced and moves nothing."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, mode="log", member="worker") as old:
            await take(old, 6)
            async with bus.subscribe(topic, group=group, mode="log", member="worker") as new:
                assert payloads(await take(new, 2)) == numbers(2)
                await new.commit()
                with pytest.raises(errors.Fenced):
                    await old.commit()
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            assert payloads(await take(sub, 8)) == numbers(8, first=2)

    async def test_members_share_partitions(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """Members of a log group share its partitions: each partition is read by one of them."""
        await bus.topics.create(topic, partitions=4)
        async with (
            bus.subscribe(topic, group=group, mode="log", member="a") as one,
            bus.subscribe(topic, group=group, mode="log", member="b") as two,
        ):

            async def both() -> bool:
                return len((await bus.groups.info(group)).members) == 2

            await eventually(both, "two members")
            for number in range(80):
                await bus.publish(topic, str(number).encode(), partition=number % 4)
            events: list[tuple[str, penstock.Event]] = []

            async def everything() -> bool:
                for name, sub in (("a", one), ("b", two)):
                    event = await sub.get(timeout_s=0.01)
                    if event is not None:
                        events.append((name, event))
                return len({event.id for _, event in events}) == 80

            await eventually(everything, "80 events")
        assert {name for name, _ in events} == {"a", "b"}
        for partition in range(4):
            readers = [name for name, event in events if event.partition == partition]
            own = [int(event.payload) for _, event in events if event.partition == partition]
            assert len(set(readers)) == 1
            assert own == list(range(partition, 80, 4))

    async def test_lag(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group's lag is the number of events behind its committed cursor."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            await take(sub, 4)
            await sub.commit()
            await owes(bus, group, 6)


class TestReplay(Contract):
    """Replay"""

    async def test_everything(self, bus: penstock.Bus, topic: str) -> None:
        """A replay gives every event of the pattern once, in order, and ends."""
        await bus.publish_many(topic, numbers(500))
        await bus.publish(f"{topic}.more", b"more")
        assert payloads(await read(bus, topic)) == numbers(500)
        assert sorted(payloads(await read(bus, f"{topic}.#"))) == sorted([*numbers(500), b"more"])

    async def test_offsets(self, bus: penstock.Bus, topic: str) -> None:
        """A replay starts at `from_offset` and ends before `to_offset`."""
        receipt = await bus.publish_many(topic, numbers(10))
        offsets = [each.offset for each in receipt.ids()]
        middle = await read(bus, topic, from_offset=offsets[3], to_offset=offsets[7])
        assert payloads(middle) == numbers(4, first=3)
        assert payloads(await read(bus, topic, from_offset=offsets[8])) == numbers(2, first=8)
        assert payloads(await read(bus, topic, to_offset=offsets[2])) == numbers(2)
        assert await read(bus, topic, from_offset=offsets[9] + 1) == []

    async def test_batches(self, bus: penstock.Bus, topic: str) -> None:
        """A replay in batches gives the same events."""
        await bus.publish_many(topic, numbers(100), headers=[{"n": str(n)} for n in range(100)])
        events = [event async for batch in bus.replay_batches(topic) for event in batch]
        assert payloads(events) == numbers(100)
        assert digest(events) == digest(await read(bus, topic))

    async def test_same_again(self, bus: penstock.Bus, topic: str) -> None:
        """Two replays of the same range give the same bytes."""
        receipt = await bus.publish_many(topic, numbers(300), keys=numbers(300))
        first = digest(await read(bus, topic))
        await bus.publish(topic, b"later")
        end = receipt.ids()[-1].offset + 1
        assert digest(await read(bus, topic, to_offset=end)) == first

    async def test_moves_no_group(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A replay takes nothing away from any group, settled events included."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, max_inflight=1) as sub:
            await take(sub, 5)
            assert payloads(await read(bus, topic)) == numbers(10)
            assert payloads(await take(sub, 5)) == numbers(5, first=5)

    async def test_nothing_there(self, bus: penstock.Bus, topic: str) -> None:
        """A replay of a pattern that matches no topic gives nothing; of a topic that is not there, UnknownTopic."""
        assert await read(bus, f"{topic}.#") == []
        with pytest.raises(errors.UnknownTopic):
            await read(bus, topic)

    async def test_no_such_partition(self, bus: penstock.Bus, topic: str) -> None:
        """Reading a partition that a topic does not have raises UnknownTopic."""
        await bus.publish(topic, b"x")
        count = len((await bus.topics.info(topic)).partitions)
        for partition in (count, count + 10_000, -1):
            with pytest.raises(errors.UnknownTopic, match=f"not {partition}"):
                async for _ in bus.engine.read(topic, partition, 0, None):
                    pass

"""Opening and closing a bus, and looking after its topics and groups."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import penstock
from penstock import errors
from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance.harness import (
    DEADLINE_S,
    Contract,
    Harness,
    entered,
    numbers,
    owes,
    payloads,
    read,
    stored,
    take,
)


class TestLifecycle(Contract):
    """Opening and closing"""

    async def test_capabilities(self, harness: Harness, bus: penstock.Bus) -> None:
        """A bus declares exactly the capabilities its engine claims, all of them known ones."""
        assert bus.capabilities == harness.capabilities
        assert set(CAPABILITIES) >= bus.capabilities

    async def test_identity(self, bus: penstock.Bus, topic: str) -> None:
        """A bus knows who calls, and events belong to the caller's tenant."""
        await bus.publish(topic, b"x")
        [event] = await read(bus, topic)
        assert event.tenant == bus.identity.tenant

    async def test_closed(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Every call on a closed bus raises BusClosed."""
        await bus.publish(topic, b"x")
        await bus.close()
        with pytest.raises(errors.BusClosed):
            await bus.publish(topic, b"x")
        with pytest.raises(errors.BusClosed):
            await bus.publish_many(topic, [b"x"])
        with pytest.raises(errors.BusClosed):
            await entered(bus.subscribe(topic, group=group))
        with pytest.raises(errors.BusClosed):
            await read(bus, topic)
        with pytest.raises(errors.BusClosed):
            await bus.topics.list()
        with pytest.raises(errors.BusClosed):
            await bus.groups.list()
        with pytest.raises(errors.BusClosed):
            await bus.flush()

    async def test_closing_twice(self, bus: penstock.Bus) -> None:
        """Closing a closed bus is harmless."""
        await bus.close()
        await bus.close()

    async def test_closing_ends_waiting(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A consumer that waits for an event does not wait for ever when its bus is closed."""
        async with bus.subscribe(topic, group=group) as sub:
            waiting = asyncio.ensure_future(sub.get(timeout_s=3_600))
            await asyncio.sleep(0.05)
            await bus.close()
            with suppress(errors.BusClosed):
                assert await asyncio.wait_for(waiting, DEADLINE_S) is None

    async def test_flush(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A flush returns once every ack given so far is kept."""
        await bus.publish_many(topic, numbers(5))
        async with bus.subscribe(topic, group=group) as sub:
            await take(sub, 5)
            await bus.flush()
        assert (await bus.groups.info(group)).lag == 0


class TestTopics(Contract):
    """Topics"""

    async def test_create(self, bus: penstock.Bus, topic: str) -> None:
        """A topic is made with the partitions asked for, is listed, and exists once."""
        await bus.topics.create(topic, partitions=3)
        info = await bus.topics.info(topic)
        assert info.name == topic
        assert [part.partition for part in info.partitions] == [0, 1, 2]
        assert topic in [each.name for each in await bus.topics.list()]
        with pytest.raises(errors.AlreadyExists):
            await bus.topics.create(topic)

    async def test_first_use(self, bus: penstock.Bus, topic: str) -> None:
        """Publishing to a new topic makes it; its info says where its events begin and end."""
        receipt = await bus.publish_many(topic, numbers(7))
        [part] = (await bus.topics.info(topic)).partitions
        ids = receipt.ids()
        assert part.first_offset <= ids[0].offset
        assert part.end_offset == ids[-1].offset + 1

    async def test_configure(self, bus: penstock.Bus, topic: str) -> None:
        """A topic's settings can be changed and stay with it."""
        await bus.topics.create(topic, retention_age_s=3_600.0)
        before = await bus.topics.info(topic)
        await bus.topics.configure(topic, retention_age_s=7_200.0)
        after = await bus.topics.info(topic)
        assert (before.retention_age_s, after.retention_age_s) == (3_600.0, 7_200.0)

    async def test_delete(self, bus: penstock.Bus, topic: str) -> None:
        """A deleted topic is gone with its events, and its name can be used again."""
        await bus.publish_many(topic, numbers(3))
        await bus.topics.delete(topic, confirm="DELETE")
        with pytest.raises(errors.UnknownTopic):
            await bus.topics.info(topic)
        assert topic not in [each.name for each in await bus.topics.list()]
        assert await stored(bus, topic) == []
        await bus.publish(topic, b"new")
        assert await stored(bus, topic) == [b"new"]

    async def test_unknown(self, bus: penstock.Bus, topic: str) -> None:
        """Asking about, changing or deleting a topic that is not there raises UnknownTopic."""
        with pytest.raises(errors.UnknownTopic):
            await bus.topics.info(topic)
        with pytest.raises(errors.UnknownTopic):
            await bus.topics.configure(topic, retention_age_s=60.0)
        with pytest.raises(errors.UnknownTopic):
            await bus.topics.delete(topic, confirm="DELETE")


class TestGroupAdministration(Contract):
    """Groups, from outside"""

    @pytest.mark.parametrize("mode", ["queue", "log"])
    async def test_info(self, bus: penstock.Bus, topic: str, group: str, mode: str) -> None:
        """A group's info says what it reads, how, who its members are and how far behind it is."""
        await bus.publish_many(topic, numbers(8))
        async with bus.subscribe(topic, group=group, mode=mode, member="ann") as sub:
            info = await bus.groups.info(group)
            assert (info.name, info.mode, list(info.patterns)) == (group, mode, [topic])
            assert len(info.members) == 1
            await take(sub, 8)
            if mode == "log":
                await sub.commit()
            await owes(bus, group, 0)
            [lane] = (await bus.groups.info(group)).lanes
            assert (lane.topic, lane.partition, lane.lag, lane.outstanding) == (topic, 0, 0, 0)
        info = await bus.groups.info(group)
        assert len(info.members) == 0
        assert group in [each.name for each in await bus.groups.list()]

    async def test_delete(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A deleted group forgets its position: the next one of that name starts anew."""
        await bus.publish_many(topic, numbers(3))
        async with bus.subscribe(topic, group=group) as sub:
            await take(sub, 3)
        await bus.groups.delete(group, confirm="DELETE")
        assert group not in [each.name for each in await bus.groups.list()]
        async with bus.subscribe(topic, group=group) as sub:
            assert payloads(await take(sub, 3)) == numbers(3)

    async def test_unknown(self, bus: penstock.Bus, group: str) -> None:
        """Asking about or deleting a group that is not there raises UnknownGroup."""
        with pytest.raises(errors.UnknownGroup):
            await bus.groups.info(group)
        with pytest.raises(errors.UnknownGroup):
            await bus.groups.delete(group, confirm="DELETE")

    async def test_patterns_are_kept(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A group keeps what it has not read while nobody listens."""
        async with bus.subscribe(f"{topic}.*", group=group):
            pass
        await bus.publish(f"{topic}.a", b"1")
        await bus.publish(f"{topic}.b", b"2")
        async with bus.subscribe(f"{topic}.*", group=group, start="latest") as sub:
            assert sorted(payloads(await take(sub, 2))) == [b"1", b"2"]

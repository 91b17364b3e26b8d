"""Capabilities about time: delayed, schedules, ttl, time-replay."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import nothing, numbers, payloads, read, take


class TestDelayed(Declared):
    """Delayed delivery"""

    capability = "delayed"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Publish with a delay."""
        await bus.publish(topic, b"x", delay_s=0.1)

    async def test_delay(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A delayed event is delivered no earlier than its delay, unchanged; its receipt says that it waits."""
        async with bus.subscribe(topic, group=group) as sub:
            began = time.monotonic()
            receipt = await bus.publish(topic, b"x", key=b"k", headers={"h": "1"}, delay_s=0.6)
            assert receipt.scheduled
            await nothing(sub, 0.2)
            [event] = await take(sub, 1)
            assert time.monotonic() - began >= 0.55
        assert (event.payload, event.key, dict(event.headers)) == (b"x", b"k", {"h": "1"})
        assert event.token.bytes == receipt.token

    async def test_deliver_at(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event can name the time of its delivery; a time that has passed means now."""
        async with bus.subscribe(topic, group=group) as sub:
            began = time.monotonic()
            await bus.publish(
                topic, b"later", deliver_at=datetime.now(UTC) + timedelta(seconds=0.6)
            )
            await bus.publish(topic, b"now", deliver_at=datetime.now(UTC) - timedelta(hours=1))
            assert payloads(await take(sub, 2)) == [b"now", b"later"]
            assert time.monotonic() - began >= 0.5

    async def test_order_of_time(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Delayed events come in the order of their times and hold up no other event."""
        async with bus.subscribe(topic, group=group) as sub:
            await bus.publish(topic, b"third", delay_s=0.9)
            await bus.publish(topic, b"second", delay_s=0.4)
            await bus.publish(topic, b"far", delay_s=3_600)
            await bus.publish(topic, b"first")
            assert payloads(await take(sub, 3)) == [b"first", b"second", b"third"]

    async def test_not_before(self, bus: penstock.Bus, topic: str) -> None:
        """A delayed event is in no replay of its topic before its time."""
        await bus.publish(topic, b"now")
        await bus.publish(topic, b"far", delay_s=3_600)
        assert payloads(await read(bus, topic)) == [b"now"]


class TestSchedules(Declared):
    """Recurring events"""

    capability = "schedules"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Define a recurring event."""
        await bus.schedules.put(group, topic, b"x", every="1h")

    async def test_every(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A recurring event is published again and again until it is removed."""
        async with bus.subscribe(topic, group=group) as sub:
            await bus.schedules.put(group, topic, {"tick": 1}, every="200ms", headers={"h": "1"})
            assert group in [each.id for each in await bus.schedules.list()]
            events = await take(sub, 3)
            await bus.schedules.remove(group, confirm="REMOVE")
            assert group not in [each.id for each in await bus.schedules.list()]
            while await sub.get(timeout_s=0.1) is not None:
                pass
            await nothing(sub, 0.5)
        assert [event.value() for event in events] == [{"tick": 1}] * 3
        assert len({event.token for event in events}) == 3
        assert dict(events[0].headers)["h"] == "1"

    async def test_cron(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A cron expression is accepted, and putting the same id again replaces it."""
        await bus.schedules.put(group, topic, b"x", cron="0 3 * * *")
        await bus.schedules.put(group, topic, b"y", cron="@daily")
        assert [each.id for each in await bus.schedules.list()].count(group) == 1
        await bus.schedules.remove(group, confirm="REMOVE")

    async def test_wrong(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A schedule that can never be due raises InvalidSchedule, an unknown id UnknownSchedule."""
        with pytest.raises(errors.InvalidSchedule):
            await bus.schedules.put(group, topic, b"x", cron="0 0 31 2 *")
        with pytest.raises(errors.InvalidSchedule):
            await bus.schedules.put(group, topic, b"x")
        with pytest.raises(errors.UnknownSchedule):
            await bus.schedules.remove(group, confirm="REMOVE")


class TestTtl(Declared):
    """Time to live"""

    capability = "ttl"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Publish with a time to live."""
        await bus.publish(topic, b"x", ttl_s=60.0)

    async def test_expired(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event whose time is over is not delivered; one whose time is not over is."""
        await bus.publish(topic, b"short", ttl_s=0.2)
        await bus.publish_many(topic, [b"short", b"short"], ttl_s=0.2)
        await bus.publish(topic, b"long", ttl_s=3_600)
        await bus.publish(topic, b"for ever")
        await asyncio.sleep(0.5)
        async with bus.subscribe(topic, group=group) as sub:
            long, forever = await take(sub, 2)
            await nothing(sub)
        assert (long.payload, forever.payload) == (b"long", b"for ever")
        assert long.expires_us is not None
        assert forever.expires_us is None

    async def test_expired_while_waiting(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event that expires while it waits for a retry is not delivered again, and is owed no more."""
        await bus.publish(topic, b"x", ttl_s=0.5)
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.nack(delay_s=0.8)
            await nothing(sub, 1.2)
        assert (await bus.groups.info(group)).lag == 0


class TestTimeReplay(Declared):
    """Replay by time"""

    capability = "time-replay"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Replay from a point in time."""
        await bus.publish(topic, b"x")
        await read(bus, topic, since=datetime.now(UTC) - timedelta(hours=1))

    async def publish_apart(self, bus: penstock.Bus, topic: str) -> list[datetime]:
        """Publish four events, some time apart, and say a moment before each."""
        for payload in numbers(4):
            await bus.publish(topic, payload)
            await asyncio.sleep(0.05)
        taken = [event.append_time_us for event in await read(bus, topic)]
        assert taken == sorted(set(taken))
        return [datetime.fromtimestamp((each - 2_000) / 1e6, UTC) for each in taken]

    async def test_since_and_until(self, bus: penstock.Bus, topic: str) -> None:
        """A replay can be bounded by when events were taken: from `since` on, and before `until`."""
        moments = await self.publish_apart(bus, topic)
        assert payloads(await read(bus, topic, since=moments[2])) == numbers(2, first=2)
        assert payloads(await read(bus, topic, until=moments[1])) == numbers(1)
        between = await read(bus, topic, since=moments[1], until=moments[3])
        assert payloads(between) == numbers(2, first=1)
        written = moments[2].isoformat()
        assert payloads(await read(bus, topic, since=written)) == numbers(2, first=2)

    async def test_ago(self, bus: penstock.Bus, topic: str) -> None:
        """A time can be given as how long ago."""
        await self.publish_apart(bus, topic)
        assert payloads(await read(bus, topic, since="2h")) == numbers(4)
        assert await read(bus, topic, until="2h") == []

    async def test_group_start(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A new group can start at a point in time."""
        moments = await self.publish_apart(bus, topic)
        async with bus.subscribe(topic, group=f"{group}-a", start=moments[1]) as sub:
            assert payloads(await take(sub, 3)) == numbers(3, first=1)
        async with bus.subscribe(topic, group=f"{group}-b", start="2h") as sub:
            assert payloads(await take(sub, 4)) == numbers(4)

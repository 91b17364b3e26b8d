"""What grows with the number of things grows no faster than they do: counted in calls, not in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import penstock
from penstock.testing.work import counted_calls

# Twice as many things may take this many times the work: two, and some for what a size brings along.
MOST_GROWTH = 2.4


async def growth(cost: Callable[[int], Awaitable[int]], few: int) -> float:
    """How many times more work twice as many things take."""
    await cost(few)  # what is made once is made now
    return await cost(2 * few) / await cost(few)


# -- schedules (B13) -------------------------------------------------------------------------------


async def test_opening_a_folder_with_schedules_is_linear(tmp_path: Path) -> None:
    async def cost(count: int) -> int:
        folder = tmp_path / str(count)
        if not folder.exists():
            async with penstock.connect(folder) as bus, asyncio.TaskGroup() as group:
                for number in range(count):
                    put = bus.schedules.put(f"s{number}", "tick", b"", cron="0 5 * * *")
                    group.create_task(put)
        with counted_calls() as calls:
            async with penstock.connect(folder) as bus:
                assert len(await bus.schedules.list()) == count
        return calls.count

    assert await growth(cost, 200) < MOST_GROWTH


async def test_putting_a_schedule_costs_the_same_however_many_there_are(mem: penstock.Bus) -> None:
    async def cost(count: int) -> int:
        with counted_calls() as calls:
            for number in range(count):
                await mem.schedules.put(f"{count}-{number}", "tick", b"", cron="0 5 * * *")
        return calls.count

    assert await growth(cost, 400) < MOST_GROWTH


def test_a_minute_with_many_schedules_is_linear(world: Any) -> None:
    async def fire(bus: penstock.Bus, count: int) -> int:
        for number in range(count):
            await bus.schedules.put(f"s{number}", f"tick.t{number % 7}", b"x", every="60s")
        with counted_calls() as calls:
            await asyncio.sleep(62)
        topics = await bus.topics.list()
        assert sum(each.partitions[0].end_offset for each in topics) == count
        return calls.count

    few, many = (world().run(lambda bus, count=count: fire(bus, count)) for count in (300, 600))
    assert many / few < MOST_GROWTH


def test_a_schedule_that_is_removed_as_it_fires_stays_removed(world: Any) -> None:
    async def work(bus: penstock.Bus) -> None:
        await bus.schedules.put("s", "tick.t", b"x", every="10ms")
        await asyncio.sleep(0.105)
        await bus.schedules.remove("s")

    there = world()
    there.run(work)
    assert there.run(lambda bus: bus.schedules.list()) == []


# -- delivery (B14) --------------------------------------------------------------------------------


async def test_sharing_events_of_many_topics_among_members_is_linear() -> None:
    async def cost(count: int) -> int:
        async with penstock.connect("mem:") as bus:
            for number in range(count):
                await bus.publish(f"work.t{number}", b"x")
            left = count

            async def member() -> None:
                nonlocal left
                async with bus.subscribe("work.*", group="g", max_inflight=8) as sub:
                    async for event in sub:
                        await event.ack()
                        left -= 1
                        if not left:
                            done.set()

            done = asyncio.Event()
            with counted_calls() as calls:
                members = [asyncio.create_task(member()) for _ in range(2)]
                async with asyncio.timeout(60):
                    await done.wait()
                for each in members:
                    each.cancel()
                await asyncio.gather(*members, return_exceptions=True)
        return calls.count

    assert await growth(cost, 600) < MOST_GROWTH

"""What grows with the number of things grows no faster than they do: counted in calls, not in seconds."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import penstock
from penstock.core.entry import TopicSpec
from penstock.engines.requests import CreateTopic, DeleteTopic
from penstock.testing.work import counted_calls

# Twice as many things may take this many times the work: two, and some for what a size brings along.
MOST_GROWTH = 2.4


async def growth(cost: Callable[[int], Awaitable[int]], few: int) -> float:
    """How many times more work twice as many things take."""
    await cost(few)  # what is made once is made now
    return await cost(2 * few) / await cost(few)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


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
        await bus.schedules.remove("s", confirm="REMOVE")

    there = world()
    there.run(work)
    assert there.run(lambda bus: bus.schedules.list()) == []


# -- groups and topics (C16) ------------------------------------------------------------------------


async def test_joining_costs_what_matches_and_not_all_topics(mem: penstock.Bus) -> None:
    async def cost(count: int) -> int:
        for number in range(count):
            await mem.topics.create(f"other.{count}.t{number}")
        await mem.publish(f"mine.n{count}", b"x")
        with counted_calls() as calls:
            async with mem.subscribe(f"mine.n{count}", group=f"g{count}") as sub:
                await (await anext(sub)).ack()
            await mem.groups.delete(f"g{count}", confirm="DELETE")
        return calls.count

    await cost(10)
    few = await cost(100)
    assert await cost(900) < 1.5 * few


async def test_a_route_costs_what_it_selects_and_not_all_topics(mem: penstock.Bus) -> None:
    async with mem.subscribe("orders.new", group="billing"):
        pass

    async def cost(count: int) -> int:
        for number in range(count):
            await mem.topics.create(f"t{count}.n{number}")
        with counted_calls() as calls:
            await mem.routes.put(penstock.Route(f"t{count}.n1", "billing"))
            await mem.routes.remove(f"t{count}.n1", "billing", confirm="REMOVE")
        lanes = (await mem.groups.info("billing")).lanes
        assert f"t{count}.n1" in {lane.topic for lane in lanes}
        return calls.count

    await cost(10)
    few = await cost(100)
    assert await cost(500) < 1.5 * few


async def test_reply_inboxes_leave_nothing_in_the_state(tmp_path: Path) -> None:
    """Each was remembered for ever as a topic that was deleted."""

    async def size_after(count: int) -> int:
        folder = tmp_path / str(count)
        small = {"journal.file_bytes": 1 << 20, "sealing.process": False, "sealing.grace_s": 0.0}
        async with penstock.connect(folder, **small) as bus:
            for number in range(count):
                await bus.ask(CreateTopic(f"_inbox.n{number}", TopicSpec(ephemeral=True)))
                await bus.ask(DeleteTopic(f"_inbox.n{number}"))
            for _ in range(20):  # until a file is full, and a snapshot is made of it
                await bus.publish_many("filler", [os.urandom(100_000)])
            await until(lambda: any((folder / "state").glob("*.snap")))
        return max(path.stat().st_size for path in (folder / "state").glob("*.snap"))

    assert await size_after(200) < await size_after(10) + 1_000


def test_dead_letters_are_kept_as_long_as_their_copies(world: Any) -> None:
    """They were never dropped but by a purge (B15)."""
    here = world(3, retention__age_s=100.0, journal__roll_after_s=20.0)

    async def fail(bus: penstock.Bus) -> int:
        async with bus.subscribe("work", group="g", retry=penstock.Retry.none()) as sub:
            for number in range(20):
                await bus.publish("work", b"%d" % number)
                await (await anext(sub)).reject("no")
        await bus.flush()
        return len(await bus.dead_letters.list())

    async def wait(bus: penstock.Bus) -> int:
        for _ in range(40):
            await asyncio.sleep(10)
            await bus.publish("tick", bytes(5_000))
        return len(await bus.dead_letters.list())

    assert here.run(fail) == 20
    assert here.run(wait) == 0
    assert here.run(lambda bus: fail(bus)) == 20  # what is newer stays, also through a restart
    assert here.run(lambda bus: bus.dead_letters.list(limit=5)) != []


def test_what_retention_took_while_nobody_was_there_is_forgotten_at_the_start(world: Any) -> None:
    here = world(3, retention__age_s=100.0, journal__roll_after_s=20.0)

    async def fail(bus: penstock.Bus) -> None:
        async with bus.subscribe("work", group="g", retry=penstock.Retry.none()) as sub:
            await bus.publish("work", b"x")
            await (await anext(sub)).reject("no")
        await bus.flush()
        assert len(await bus.dead_letters.list()) == 1

    async def look(bus: penstock.Bus) -> None:
        for _ in range(30):
            await asyncio.sleep(10)
        assert await bus.dead_letters.list() == []

    here.run(fail)
    here.run_and_die(look, power=False)
    assert here.run(lambda bus: bus.dead_letters.list()) == []


async def test_the_cache_of_events_holds_no_more_than_it_may_however_small_they_are(
    tmp_path: Path,
) -> None:
    """What stayed of each short session was mostly the event that it published (C14)."""
    settings = {"limits.cache_bytes": 1 << 20, "durability.fsync": "never"}
    async with penstock.connect(tmp_path, **settings) as bus:
        await bus.publish("small", b"x")
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(10_000):  # one after the other, or they would share batches
                await bus.publish("small", b"x")
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 5 << 20


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

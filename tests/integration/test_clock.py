"""A wall clock that jumps: append times never run back, delays and leases keep their length."""

from __future__ import annotations

import asyncio

import penstock


def test_a_clock_that_jumps_back_an_hour(world) -> None:
    here = world(9)

    async def jump(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"before")
        here.clock.jump(-3_600)
        await bus.publish("orders", b"after")
        here.clock.jump(7_200)
        await bus.publish("orders", b"much later")
        events = [event async for event in bus.replay("orders")]
        times = [event.append_time_us for event in events]
        assert times == sorted(times)
        assert [event.payload for event in events] == [b"before", b"after", b"much later"]
        tokens = [event.token for event in events]
        assert len(set(tokens)) == 3

    here.run(jump)
    here.clock.jump(-36_000)

    async def again(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"a day earlier")
        times = [event.append_time_us async for event in bus.replay("orders")]
        assert times == sorted(times)
        assert len(times) == 4

    here.run(again)


def test_event_times_are_right_as_soon_as_the_clock_is(world) -> None:
    """After a jump that was corrected (C18); append times wait, since they never run back."""
    here = world(13)

    async def jump(bus: penstock.Bus) -> None:
        here.clock.jump(3_600)
        await bus.publish("orders", b"ahead")
        here.clock.jump(-3_600)
        await bus.publish("orders", b"one")
        await bus.publish_many("orders", [b"two", b"three"])
        ahead, *others = [event async for event in bus.replay("orders")]
        for event in others:
            assert event.append_time_us == ahead.append_time_us
            assert ahead.time_us - event.time_us > 3_590e6

    here.run(jump)


def test_delayed_events_follow_the_wall_clock_and_come_once(world) -> None:
    here = world(10)

    async def wait(bus: penstock.Bus) -> None:
        await bus.publish("jobs", b"a", delay_s=60)
        here.clock.jump(-3_600)
        await asyncio.sleep(120)
        assert (await bus.topics.info("jobs")).partitions[0].end_offset == 0
        here.clock.jump(3_600)
        await asyncio.sleep(2)
        assert (await bus.topics.info("jobs")).partitions[0].end_offset == 1
        here.clock.jump(-3_600)
        await asyncio.sleep(7_300)
        assert (await bus.topics.info("jobs")).partitions[0].end_offset == 1

    here.run(wait)


def test_leases_and_retries_do_not_notice(world) -> None:
    here = world(11)

    async def consume(bus: penstock.Bus) -> None:
        loop = asyncio.get_running_loop()
        await bus.publish("jobs", b"a")
        async with bus.subscribe("jobs", group="g", lease_s=30.0) as sub:
            event = await sub.get(timeout_s=5)
            here.clock.jump(3_600)
            await asyncio.sleep(1)
            await event.nack(delay_s=10.0)
            here.clock.jump(-7_200)
            start = loop.time()
            again = await sub.get(timeout_s=60)
            assert again.attempt == 2
            assert 9.9 <= loop.time() - start <= 10.1
            await again.ack()

    here.run(consume)


def test_a_jump_forward_does_not_empty_the_log(world) -> None:
    here = world(12, retention__age_s=1_000.0)

    async def age(bus: penstock.Bus) -> None:
        import random

        filler = [random.Random(n).randbytes(8_000) for n in range(40)]
        for _ in range(8):
            await bus.publish_many("orders", filler)
        await bus.engine.maintenance.settle()
        here.clock.jump(40 * 86_400)
        await asyncio.sleep(5)
        await bus.engine.maintenance.settle()
        assert (await bus.topics.info("orders")).partitions[0].first_offset == 0

    here.run(age)

"""Settling: what is asked for is done or refused, for each event, and nothing is left in between."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 30.0
NO_TIME: list[Any] = [math.nan, math.inf, -1.0, 1e30, "soon", True]


async def take(sub: penstock.Subscription, count: int) -> list[penstock.Event]:
    events = [await sub.get(timeout_s=DEADLINE_S) for _ in range(count)]
    return [event for event in events if event is not None]


async def lag(bus: penstock.Bus, group: str = "g") -> int:
    await bus.flush()
    return int((await bus.groups.info(group)).lag)


@pytest.mark.parametrize("seconds", NO_TIME, ids=str)
async def test_what_is_no_time_changes_nothing(anywhere: penstock.Bus, seconds: Any) -> None:
    """A5: the event stays with its consumer, who settles it afterwards."""
    bus = anywhere
    await bus.publish("jobs", b"x")
    async with bus.subscribe("jobs", group="g") as sub:
        [event] = await take(sub, 1)
        for call in (event.nack, event.extend):
            with pytest.raises(errors.PenstockError):
                await call(seconds)
        with pytest.raises(errors.PenstockError):
            await sub.nack([event], seconds)
        await event.ack()
        assert await lag(bus) == 0


async def test_a_shorter_lease_ends_sooner(anywhere: penstock.Bus) -> None:
    """A5: an extension is from now, be it longer or shorter than what was left."""
    bus = anywhere
    await bus.publish("jobs", b"x")
    retry = penstock.Retry(ladder_ms=(0,), max_attempts=3)
    async with bus.subscribe("jobs", group="g", retry=retry, lease_s=60.0) as sub:
        [event] = await take(sub, 1)
        await event.extend(0.2)
        began = time.monotonic()
        [again] = await take(sub, 1)
        assert again.attempt == 2
        assert time.monotonic() - began < DEADLINE_S
        await again.ack()


@pytest.mark.parametrize("how", ["ack", "nack"])
async def test_of_many_all_are_settled_that_can_be(anywhere: penstock.Bus, how: str) -> None:
    """B12: and one error names the others, with the reason of each."""
    bus = anywhere
    await bus.publish_many("jobs", [b"%d" % number for number in range(5)])
    retry = penstock.Retry(ladder_ms=(60_000,), max_attempts=3)
    async with bus.subscribe("jobs", group="g", retry=retry) as sub:
        events = await take(sub, 5)
        await events[1].ack()
        await events[3].reject("bad")
        with pytest.raises(errors.SomeNotSettled) as raised:
            await getattr(sub, how)(events)
        failures = {event.offset: type(error) for event, error in raised.value.failures}
        assert failures == {1: errors.AlreadySettled, 3: errors.AlreadySettled}
        assert await lag(bus) == (0 if how == "ack" else 3)
        await sub.ack([])


async def test_a_reset_refuses_nothing_that_nobody_settled(anywhere: penstock.Bus) -> None:
    """B18: a flush vouches for what was settled; events that were only held are void, and come again."""
    bus = anywhere
    await bus.publish_many("jobs", [b"0", b"1", b"2"])
    async with bus.subscribe("jobs", group="g") as sub:
        events = await take(sub, 3)
        await events[0].ack()
        await bus.flush()
        await bus.groups.reset("g", "earliest", confirm="RESET")
        await bus.flush()
        with pytest.raises(errors.Fenced):
            await events[1].ack()
        again = await take(sub, 3)
        assert [(event.payload, event.attempt) for event in again] == [
            (b"0", 1),
            (b"1", 1),
            (b"2", 1),
        ]
        await sub.ack(again)
        assert await lag(bus) == 0


async def test_what_was_settled_before_an_operators_call_counts_before_it(
    anywhere: penstock.Bus,
) -> None:
    """B18: the call overtakes no settlement of its own client."""
    bus = anywhere
    await bus.publish_many("jobs", [b"0", b"1", b"2"])
    async with bus.subscribe("jobs", group="g") as sub:
        events = await take(sub, 3)
        await sub.ack(events)
        assert (await bus.groups.info("g")).lag == 0
        await bus.groups.reset("g", "earliest", confirm="RESET")
        await bus.flush()
        again = await take(sub, 3)
        assert [(event.payload, event.attempt) for event in again] == [
            (b"0", 1), (b"1", 1), (b"2", 1),
        ]  # fmt: skip


async def test_what_is_given_back_costs_no_attempt(anywhere: penstock.Bus) -> None:
    """B2: it was handed out and not worked on to an end; with one attempt as with many."""
    bus = anywhere
    await bus.publish_many("jobs", [b"0", b"1"], keys=["k", "k"])
    options: dict[str, Any] = {"retry": penstock.Retry.none(), "max_inflight": 1}
    for order in ("any", "key", "single"):
        group = f"g-{order}"
        async with bus.subscribe("jobs", group=group, order=order, **options) as sub:
            for _ in range(3):
                [event] = await take(sub, 1)
                assert (event.payload, event.attempt) == (b"0", 1)
                event.delivery.give_back(event.index)
                with pytest.raises(errors.LeaseExpired):
                    await event.ack()
        async with bus.subscribe("jobs", group=group, order=order, **options) as sub:
            for payload in (b"0", b"1"):
                [event] = await take(sub, 1)
                assert (event.payload, event.attempt) == (payload, 1)
                await event.ack()
        assert await lag(bus, group) == 0
    assert await bus.dead_letters.list() == []


async def test_an_event_that_waits_can_be_made_a_dead_letter(anywhere: penstock.Bus) -> None:
    """B20: it was never delivered; those before and behind it are, in their order."""
    bus = anywhere
    receipt = await bus.publish_many("jobs", [b"%d" % n for n in range(5)])
    async with bus.subscribe("jobs", group="g", max_inflight=1) as sub:
        [first] = await take(sub, 1)
        for number in (3, 1):
            await bus.dead_letters.dead_letter(
                str(receipt.ids()[number]),
                consumer="g",
                topic="jobs",
                actor="ann",
                reason="known bad",
            )
        await first.ack()
        payloads = []
        for _ in range(2):
            [event] = await take(sub, 1)
            payloads.append(event.payload)
            await event.ack()
        assert payloads == [b"2", b"4"]
        assert await sub.get(timeout_s=0.3) is None
        assert await lag(bus) == 0
    letters = await bus.dead_letters.list(consumer="g")
    assert sorted((each.offset, each.attempts) for each in letters) == [(1, 0), (3, 0)]


async def test_what_was_taken_out_of_a_group_stays_out_over_a_restart(tmp_path: Path) -> None:
    """B20: of a group that nobody reads at the moment."""
    for order in ("any", "key"):
        topic = f"jobs.{order}"
        async with penstock.connect(tmp_path / "data") as bus:
            receipt = await bus.publish_many(topic, [b"%d" % n for n in range(4)], keys=["k"] * 4)
            async with bus.subscribe(topic, group=order, order=order, max_inflight=1):
                pass
            await bus.dead_letters.dead_letter(
                str(receipt.ids()[2]), consumer=order, topic=topic, actor="ann", reason="known bad"
            )
        async with (
            penstock.connect(tmp_path / "data") as bus,
            bus.subscribe(topic, group=order, order=order) as sub,
        ):
            for payload in (b"0", b"1", b"3"):
                [event] = await take(sub, 1)
                assert event.payload == payload
                await event.ack()
            assert await lag(bus, order) == 0


async def test_an_event_is_not_handed_out_after_its_time(anywhere: penstock.Bus) -> None:
    """B16: that it was fetched in time does not matter; it was never an attempt."""
    bus = anywhere
    await bus.publish_many("jobs", [b"first", b"last"])
    async with bus.subscribe("jobs", group="g", start="earliest") as sub:
        [first] = await take(sub, 1)
        await bus.publish("jobs", b"short", ttl_s=0.5)
        await asyncio.sleep(0.2)  # it is fetched
        time.sleep(0.6)  # and nobody asks for it, nor does the loop turn
        await first.ack()
        [last] = await take(sub, 1)
        assert last.payload == b"last"
        await last.ack()
        assert await sub.get(timeout_s=0.3) is None
        await bus.flush()
        [letter] = await bus.dead_letters.list(consumer="g")
        assert (letter.offset, letter.attempts) == (2, 0)
        assert "time to live" in letter.reason
        assert await lag(bus) == 0


async def test_what_is_left_of_a_lease_is_what_it_was_before_the_restart(tmp_path: Path) -> None:
    """B17: a broker that was started again does not lengthen the lease of who came back."""
    settings: dict[str, Any] = {"server__session_s": 60.0, "server__drain_s": 0.1}
    retry = penstock.Retry(ladder_ms=(0,), max_attempts=3)
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
            await bus.publish("jobs", b"0")
            async with bus.subscribe("jobs", group="g", retry=retry, lease_s=600.0) as sub:
                [event] = await take(sub, 1)
                await event.extend(8.0)
                began = time.monotonic()
                await asyncio.to_thread(broker.stop)
                await asyncio.to_thread(broker.start, **settings)
                [again] = await take(sub, 1)
                assert again.attempt == 2
                assert time.monotonic() - began >= 8.0
                await again.ack()


@pytest.mark.parametrize("kind", ["folder", "broker"])
async def test_priorities_hold_over_a_restart_with_some_fetched_and_some_new(
    tmp_path: Path, kind: str
) -> None:
    """B4: nothing overtakes the most urgent event while priorities are read from files."""
    with contextlib.ExitStack() as ends:
        broker = None
        url = str(tmp_path / "data")
        if kind == "broker":
            broker = ends.enter_context(BrokerProcess(tmp_path / "data").start())
            url = broker.url()
        async with penstock.connect(url) as bus:
            await bus.publish_many("jobs.a", [b"x"] * 30, priorities=[n % 3 for n in range(30)])
            async with bus.subscribe("jobs.*", group="g", max_inflight=10) as sub:
                for event in await take(sub, 4):
                    await event.ack()
            await bus.publish_many("jobs.b", [b"x"] * 3, priorities=[9, 0, 9])
        if broker is not None:
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
        async with (
            penstock.connect(url) as bus,
            bus.subscribe("jobs.*", group="g", max_inflight=1) as sub,
        ):
            found = []
            for _ in range(29):
                [event] = await take(sub, 1)
                assert event.batch.priority is not None
                found.append(int(event.batch.priority[event.index]))
                await event.ack()
            assert found == sorted(found, reverse=True)
            assert await lag(bus) == 0


async def test_a_retry_of_no_priority_does_not_overtake_urgent_events(
    anywhere: penstock.Bus,
) -> None:
    """B4: not even when its topic has no priorities."""
    bus = anywhere
    await bus.publish("plain", b"again")
    async with bus.subscribe("#", group="g", max_inflight=1) as sub:
        [event] = await take(sub, 1)
        await bus.publish_many("jobs", [b"urgent"] * 3, priorities=[9, 9, 9])
        await event.nack("0.1s")
        [first] = await take(sub, 1)
        await asyncio.sleep(0.3)
        await first.ack()
        order = []
        for _ in range(3):
            [event] = await take(sub, 1)
            order.append(event.payload)
            await event.ack()
    assert [first.payload, *order] == [b"urgent", b"urgent", b"urgent", b"again"]

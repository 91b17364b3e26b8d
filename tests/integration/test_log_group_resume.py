"""Events that a log subscription holds are not delivered again after the broker was killed (Q13, Q6)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import penstock
from penstock.engines.requests import DeleteGroup, Request, ResetGroup
from penstock.model.errors import BrokerUnreachable
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 20.0
QUIET_S = 1.0
GROUP = "mover"
FIRST = [b"%d" % number for number in range(10)]
LATER = [b"10", b"11"]


def reading(bus: penstock.Bus, **options: Any) -> penstock.Subscription:
    return bus.subscribe("in.*", group=GROUP, mode="log", **options)


async def restart(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)


async def take(sub: penstock.Subscription, count: int) -> list[penstock.Event]:
    events = [await sub.get(timeout_s=DEADLINE_S) for _ in range(count)]
    return [event for event in events if event is not None]


async def rest(sub: penstock.Subscription) -> list[bytes]:
    payloads = []
    while (event := await sub.get(timeout_s=QUIET_S)) is not None:
        payloads.append(event.payload)
    return payloads


def payloads(events: list[penstock.Event]) -> list[bytes]:
    return [event.payload for event in events]


async def stored(bus: penstock.Bus, topic: str) -> list[bytes]:
    batches = bus.engine.read(topic, 0, 0, None)
    return [bytes(each) async for batch in batches for each in batch.payloads()]


async def move(bus: penstock.Bus, sub: penstock.Subscription, event: penstock.Event) -> None:
    async with bus.transaction() as transaction:
        transaction.publish("out.a", event.payload)
        transaction.commit(sub)


@contextmanager
def kept_away(bus: penstock.Bus) -> Iterator[None]:
    """Let a client find no broker."""
    channel: Any = bus.engine.channel  # type: ignore[attr-defined]
    make_link = channel._make_link

    def nobody() -> Any:
        raise BrokerUnreachable("the test says so")

    channel._make_link = nobody
    try:
        yield
    finally:
        channel._make_link = make_link


async def test_a_fetch_that_waits_does_not_get_what_a_transaction_is_moving(
    broker: BrokerProcess,
) -> None:
    """The fetch comes to the new broker before the transaction that commits what is in hand."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish("in.a", b"0")
        async with reading(bus) as sub:
            [event] = await take(sub, 1)
            ahead = asyncio.create_task(sub.get(timeout_s=DEADLINE_S))
            await asyncio.sleep(0.2)
            os.kill(broker.pid, signal.SIGSTOP)
            moving = asyncio.create_task(move(bus, sub, event))
            await asyncio.sleep(0.1)  # it is sent, and never looked at
            await restart(broker)
            await moving
            await bus.publish("in.a", b"1")
            following = await ahead
            assert following is not None
            assert following.payload == b"1"
            await move(bus, sub, following)
        assert await stored(bus, "out.a") == [b"0", b"1"]


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
@pytest.mark.parametrize("restarts", [1, 2])
async def test_what_tasks_have_in_hand_does_not_come_again(
    broker: BrokerProcess, transport: str, restarts: int
) -> None:
    """None of it is committed yet; what is published meanwhile comes behind it."""
    async with penstock.connect(broker.url(transport)) as bus:
        for start in (0, 5):
            await bus.publish_many("in.a", FIRST[start : start + 5])
        async with reading(bus) as sub:
            await take(sub, 5)
            await sub.commit()
            events = await take(sub, 5)
            for _ in range(restarts):
                await restart(broker)
                await bus.flush()
            await bus.publish_many("in.a", LATER)
            events += await take(sub, 2)
            assert payloads(events) == FIRST[5:] + LATER
            await asyncio.gather(*(move(bus, sub, event) for event in events))
            assert await rest(sub) == []
        assert sorted(await stored(bus, "out.a")) == sorted(FIRST[5:] + LATER)
        async with reading(bus) as sub:
            assert await rest(sub) == []


async def test_a_listener_goes_on_where_it_was(broker: BrokerProcess) -> None:
    """Its group ended with the broker, and is made anew by the listener alone."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish_many("in.a", FIRST)
        async with bus.subscribe("in.*", mode="log", start="earliest") as sub:
            await take(sub, 10)
            await restart(broker)
            await bus.flush()
            await bus.publish_many("in.a", LATER)
            assert payloads(await take(sub, 2)) == LATER


async def test_a_subscription_that_is_new_gets_what_nobody_committed(broker: BrokerProcess) -> None:
    """It has nothing in hand, though its name is that of one that had."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish_many("in.a", FIRST)
        async with reading(bus, member="m") as sub:
            await take(sub, 10)
            await restart(broker)
            await bus.flush()
        async with reading(bus, member="m") as sub:
            assert payloads(await take(sub, 10)) == FIRST


@pytest.mark.parametrize(
    ("request_", "again"),
    [
        (ResetGroup(GROUP, "offset:3", confirm="RESET"), FIRST[3:]),
        (DeleteGroup(GROUP, confirm="DELETE"), FIRST),
    ],
    ids=["reset", "deleted"],
)
async def test_a_group_that_was_set_elsewhere_meanwhile_reads_from_there(
    broker: BrokerProcess, request_: Request, again: list[bytes]
) -> None:
    """Its member says what it has, and gets it again: that is what a reset is for."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish_many("in.a", FIRST)
        async with reading(bus) as sub:
            await take(sub, 10)
            await asyncio.to_thread(broker.kill)
            async with penstock.connect(broker.folder) as folder:
                await folder.engine.ask(request_)
            await asyncio.to_thread(broker.start)
            assert payloads(await take(sub, len(again))) == again
            assert await rest(sub) == []


async def test_another_member_that_took_the_partition_gets_what_was_in_hand(
    broker: BrokerProcess,
) -> None:
    """Nothing is lost: not with the one that lost it, nor when it has the partition again."""
    async with (
        penstock.connect(broker.url()) as slow,
        penstock.connect(broker.url()) as quick,
    ):
        await slow.publish_many("in.a", FIRST)
        async with reading(slow, member="slow") as sub:
            events = await take(sub, 10)
            with kept_away(slow):
                await restart(broker)
                other = await reading(quick, member="quick").open()
                assert payloads(await take(other, 4)) == FIRST[:4]
                await other.commit()
            with pytest.raises(penstock.Fenced):
                await move(slow, sub, events[0])
            await other.close()
            await restart(broker)
            assert payloads(await take(sub, 6)) == FIRST[4:]
            assert await rest(sub) == []
            await sub.commit()


async def test_a_partition_that_comes_later_begins_at_what_is_committed(
    broker: BrokerProcess,
) -> None:
    """Not behind what its member had in hand once: another one had it meanwhile."""
    async with (
        penstock.connect(broker.url()) as slow,
        penstock.connect(broker.url()) as quick,
    ):
        await slow.publish_many("in.a", FIRST)
        async with reading(slow, member="slow") as sub:
            await take(sub, 10)
            with kept_away(slow):
                await restart(broker)
                other = await reading(quick, member="quick").open()
                await take(other, 4)
                await other.commit()
            await slow.flush()  # then it is back
            await other.close()
            assert payloads(await take(sub, 6)) == FIRST[4:]

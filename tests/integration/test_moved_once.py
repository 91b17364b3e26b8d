"""Events that a transaction moves are moved once, also when the broker is killed meanwhile (Q13, Q6, T4)."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 20.0
QUIET_S = 1.0
PAYLOADS = [b"0", b"1", b"2", b"3"]


async def stored(bus: penstock.Bus, topic: str) -> list[bytes]:
    batches = bus.engine.read(topic, 0, 0, None)
    return [bytes(each) async for batch in batches for each in batch.payloads()]


@pytest.mark.parametrize("mode", ["log", "queue"])
async def test_a_transaction_that_comes_again_moves_its_event_once(
    broker: BrokerProcess, mode: str
) -> None:
    """A broker that is back does it, and hands out nothing of what it and the next ones commit."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish_many("in.a", PAYLOADS)
        async with bus.subscribe("in.*", group="mover", mode=mode) as sub:

            async def move(event: penstock.Event) -> None:
                async with bus.transaction() as transaction:
                    transaction.publish("out.a", event.payload)
                    if mode == "log":
                        transaction.commit(sub)
                    else:
                        transaction.ack(event)

            event = await sub.get(timeout_s=DEADLINE_S)
            assert event is not None
            await bus.flush()
            os.kill(broker.pid, signal.SIGSTOP)
            moving = asyncio.create_task(move(event))
            await asyncio.sleep(0.1)  # it is sent, and never looked at
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            await moving
            while (event := await sub.get(timeout_s=QUIET_S)) is not None:
                await move(event)
        assert await stored(bus, "out.a") == PAYLOADS


async def test_what_is_committed_after_a_restart_does_not_come_again(broker: BrokerProcess) -> None:
    """Q6: the client goes on with the batch in its hands, and the broker behind what it commits."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish_many("in.a", PAYLOADS)
        async with bus.subscribe("in.*", group="reader", mode="log") as sub:
            seen = [await sub.get(timeout_s=DEADLINE_S)]
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            while (event := await sub.get(timeout_s=QUIET_S)) is not None:
                seen.append(event)
                await sub.commit()
        assert [event and event.payload for event in seen] == PAYLOADS


async def test_a_reader_is_behind_what_its_member_commits(mem: penstock.Bus) -> None:
    """Batches that were read ahead, too, from the middle of one on."""
    for _ in range(3):
        await mem.publish_many("in.a", PAYLOADS)
    async with mem.subscribe("in.*", group="reader", mode="log") as sub:
        feed: Any = sub.cursor()
        batch, epoch = await feed.receive()
        assert (batch.base_offset, batch.count) == (0, 4)
        feed.mark("in.a", 0, 9, epoch)
        await feed.commit()
        batch, _ = await feed.receive()
        assert [bytes(each) for each in batch.payloads()] == PAYLOADS[1:]
        assert batch.base_offset == 9

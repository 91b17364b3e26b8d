"""What one client publishes to a topic is stored in the order it came, however it is prepared (X2, T11, T13)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

TOPIC = "orders.created"
LARGE_BYTES = 1 << 20
DEADLINE_S = 30.0


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    try:
        async with penstock.connect(broker.url()) as bus:
            await bus.topics.create(TOPIC)
            yield bus
    finally:
        await asyncio.to_thread(broker.stop)


async def offsets_of(calls: list[asyncio.Task[penstock.Receipt]]) -> list[int]:
    return [receipt.offset for receipt in await asyncio.gather(*calls)]


async def test_a_small_publish_stays_behind_a_large_one(bus: penstock.Bus) -> None:
    """T13: large payloads are prepared by a thread; what comes behind them waits for that."""
    for _ in range(3):
        calls = []
        for payload in (os.urandom(LARGE_BYTES), b"small", os.urandom(LARGE_BYTES), b"last"):
            calls.append(asyncio.create_task(bus.publish(TOPIC, payload)))
            await asyncio.sleep(0.002)  # a frame of its own
        offsets = await offsets_of(calls)
        assert offsets == sorted(offsets)


async def test_a_small_publish_stays_behind_many_batches(bus: penstock.Bus) -> None:
    """T11: a frame of many batches lets other clients have a word in between, not its own."""
    for _ in range(5):
        calls = [asyncio.create_task(bus.publish_many(TOPIC, [b"x"] * 100)) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(bus.publish(TOPIC, b"behind")))
        offsets = await offsets_of(calls)
        assert offsets == sorted(offsets)


async def test_another_topic_does_not_wait_for_a_large_payload(bus: penstock.Bus) -> None:
    await bus.topics.create("orders.paid")
    large = asyncio.create_task(bus.publish(TOPIC, os.urandom(8 << 20)))
    await asyncio.sleep(0.005)
    await asyncio.wait_for(bus.publish("orders.paid", b"at once"), DEADLINE_S)
    assert not large.done()
    await large


@pytest.mark.parametrize(
    "odd",
    [{"ttl_s": 60.0}, {"idempotency_key": "one"}, {"priority": 3}, {"payload": b"x" * 70_000}],
    ids=lambda odd: next(iter(odd)),
)
async def test_what_shares_a_frame_keeps_its_order(bus: penstock.Bus, odd: dict) -> None:
    """Small events of a frame share a batch, but not past one that has a batch of its own."""
    payload = odd.pop("payload", b"odd")
    calls = [
        asyncio.create_task(bus.publish(TOPIC, b"before")),
        asyncio.create_task(bus.publish(TOPIC, payload, **odd)),
        asyncio.create_task(bus.publish(TOPIC, b"behind")),
    ]
    assert await offsets_of(calls) == [0, 1, 2]


async def test_a_small_publish_stays_behind_one_that_is_put_aside(tmp_path: Path) -> None:
    """Without a broker, too: a huge payload goes to a file of its own first."""
    async with penstock.connect(str(tmp_path / "own")) as bus:
        await bus.topics.create(TOPIC)
        for _ in range(3):
            calls = []
            for payload in (os.urandom(5 << 20), b"small", b"last"):
                calls.append(asyncio.create_task(bus.publish(TOPIC, payload)))
                await asyncio.sleep(0)
            offsets = await offsets_of(calls)
            assert offsets == sorted(offsets)

"""What one client publishes to a topic is stored in the order it came, however it is prepared (X2, T11, T13)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import penstock
from penstock.core.entry import Produced
from penstock.engines.broker.publisher import described
from penstock.engines.embedded.publisher import Answer, Bundle
from penstock.testing.broker_process import BrokerProcess, broker_inside
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.message import Publish, encode

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


async def next_frame() -> None:
    """What was published so far is on its way; what comes now goes with a frame of its own."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.mark.parametrize("wait", ["a new topic", "the first delay"])
async def test_nobody_overtakes_a_frame_that_waits(bus: penstock.Bus, wait: str) -> None:
    """X2: a frame that waits for what one of its events needs keeps its place at all its topics."""
    for number in range(5 if wait == "a new topic" else 1):
        if wait == "a new topic":
            other = asyncio.create_task(bus.publish(f"orders.new{number}", b"first"))
        else:
            other = asyncio.create_task(bus.publish(TOPIC, b"later", delay_s=60))
        calls = [asyncio.create_task(bus.publish(TOPIC, b"before"))]
        await next_frame()
        calls.append(asyncio.create_task(bus.publish(TOPIC, b"behind")))
        offsets = await offsets_of(calls)
        assert offsets == sorted(offsets)
        await other


async def test_nobody_overtakes_a_payload_on_its_way_to_a_file(tmp_path: Path) -> None:
    """X2, T13: with the fast path off, too."""
    broker = BrokerProcess(tmp_path / "data")
    await asyncio.to_thread(lambda: broker.start(fastpath__enabled=False))
    try:
        async with penstock.connect(broker.url()) as bus:
            await bus.topics.create(TOPIC)
            calls = []
            for payload in (os.urandom(4 << 20), b"small"):
                calls.append(asyncio.create_task(bus.publish(TOPIC, payload)))
                await next_frame()
            assert await offsets_of(calls) == [0, 1]
    finally:
        await asyncio.to_thread(broker.stop)


async def test_events_of_several_tenants_in_a_frame_keep_their_order(tmp_path: Path) -> None:
    """X2, T11: a tenant's events do not wait in the queue of another one, which is long."""
    busy, idle = "orders.created.v1.acme", "orders.created.v1.beta"
    flags = {"journal__tenant_quantum_bytes": 64 << 10}
    async with penstock.connect(tmp_path / "data", **flags) as bus:
        for topic in (busy, idle):
            await bus.topics.create(topic)
        bundle = Bundle(bus.engine)  # type: ignore[arg-type]

        behind: list[asyncio.Task[list[Answer]]] = []

        async def frame(*topics: str, ready: Callable[[], None]) -> list[Answer]:
            drafts = [bus.draft(topic, b"1") for topic in topics]
            return await bundle.publish(drafts, lambda at: Produced("", 1, at), ready)

        def next_one() -> None:
            behind.append(asyncio.create_task(frame(idle, ready=lambda: None)))

        flood = [asyncio.create_task(bus.publish(busy, os.urandom(1_000_000)))]
        for _ in range(5):
            await asyncio.sleep(0)  # it is being written: what comes now waits together
        flood += [asyncio.create_task(bus.publish(busy, b"x" * 60_000)) for _ in range(5)]
        await asyncio.sleep(0)
        first = await frame(busy, idle, ready=next_one)
        second = await behind[0]
        assert [answer.offset for answer in (first[1], *second)] == [0, 1]  # type: ignore[union-attr]
        await asyncio.gather(*flood)


async def test_a_frame_of_one_tenant_stays_behind_one_of_several(tmp_path: Path) -> None:
    """X2: also when both are there in the same turn of the loop."""
    topics = ("orders.created.v1.acme", "orders.created.v1.beta")
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    try:
        async with penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}") as bus:
            for topic in topics:
                await bus.topics.create(topic)
            [session] = daemon.broker.sessions.values()
            for request, names in ((1_001, topics), (1_002, topics[1:])):
                parts: list[Bytes] = []
                metas = [described(bus.draft(name, b"%d" % request), parts) for name in names]
                meta = encode(Publish(request, metas))
                session.received(Frame(Kind.PUBLISH, request, meta, parts))
            await bus.publish(topics[1], b"last")
            found = [
                event.payload
                async for batch in bus.engine.read(topics[1], 0, 0, None)
                for event in batch
            ]
            assert found == [b"1001", b"1002", b"last"]
    finally:
        await daemon.stop()


async def test_nobody_overtakes_the_neighbours_of_what_cannot_be_sent(bus: penstock.Bus) -> None:
    calls = [asyncio.create_task(bus.publish(TOPIC, b"%d" % each)) for each in range(3)]
    bad = asyncio.create_task(bus.publish(TOPIC, b"bad", partition=2**70))
    await next_frame()
    calls.append(asyncio.create_task(bus.publish(TOPIC, b"behind")))
    assert await offsets_of(calls) == [0, 1, 2, 3]
    with pytest.raises(penstock.errors.InvalidInput):
        await bad


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

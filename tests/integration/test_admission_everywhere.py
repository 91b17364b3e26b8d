"""Every way of publishing passes admission: transactions and delayed events too (T11, X5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.testing.broker_process import BrokerProcess

TOPIC = "orders.created.v1.acme"
RATE = {"admission__tenants": {"acme": {"events_per_s": 10, "storage_bytes": 50_000}}}


@pytest_asyncio.fixture(params=["mem", "folder", "broker"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    if request.param == "broker":
        with BrokerProcess(tmp_path / "data").start(**RATE) as broker:
            async with penstock.connect(broker.url()) as bus:
                yield bus
    else:
        url = "mem:" if request.param == "mem" else str(tmp_path / "data")
        async with penstock.connect(url, **RATE) as bus:
            yield bus


async def stored(bus: penstock.Bus) -> int:
    return sum([1 async for _ in bus.replay("orders.#")])


async def test_a_transaction_over_the_rate_does_not_happen(bus: penstock.Bus) -> None:
    """T11: refused with a type and a time, nothing of it stored or acked, and the lease stays."""
    await bus.publish(TOPIC, b"an order")
    async with bus.subscribe(TOPIC, group="billing") as events:
        order = await events.get(timeout_s=10)
        assert order is not None
        with pytest.raises(penstock.Rejected) as caught:
            async with bus.transaction() as transaction:
                transaction.publish_many(TOPIC, [b"x"] * 6)
                transaction.publish_many(TOPIC, [b"y"] * 6)
                transaction.ack(order)
        assert caught.value.code == "rejected.dropped"
        assert caught.value.data["limit"] == "events_per_s"
        with pytest.raises(penstock.Throttled) as caught:
            for _ in range(10):
                async with bus.transaction() as transaction:
                    transaction.publish_many(TOPIC, [b"x"] * 4)
        assert caught.value.retry_after_s > 0
        assert await stored(bus) in (5, 9)  # one or two of four fit into the first second
        await asyncio.sleep(caught.value.retry_after_s)
        async with bus.transaction() as transaction:
            transaction.publish(TOPIC, b"at last")
            transaction.ack(order)


async def test_delayed_events_count_when_they_are_taken(bus: penstock.Bus) -> None:
    """T11, T7, X5: rates and quotas hold for what is delivered later; it counts once."""
    with pytest.raises(penstock.Dropped) as dropped:
        await bus.publish(TOPIC, b"x" * 60_000, delay_s=0.05)
    assert dropped.value.data["limit"] == "storage_bytes"
    taken = 0
    with pytest.raises(penstock.Throttled) as throttled:
        for _ in range(1_000):
            await bus.publish(TOPIC, b"x", delay_s=0.05)
            taken += 1
    assert throttled.value.data["limit"] == "events_per_s"
    assert taken >= 10
    async with asyncio.timeout(20):
        while await stored(bus) < taken:  # when their time comes nobody asks again
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert await stored(bus) == taken


@pytest.mark.parametrize("where", ["mem", "broker"])
async def test_sizes_are_what_the_documents_say(where: str, tmp_path: Path) -> None:
    """T11: a rate counts payload bytes, a quota what is kept; neither counts the journal's room."""
    limits = {"acme": {"bytes_per_s": 10_000}, "globex": {"storage_bytes": 10 * 164}}
    broker = BrokerProcess(tmp_path / "data")
    with contextlib.ExitStack() as stack:
        if where == "broker":
            stack.enter_context(broker.start(admission__tenants=limits))
        url, flags = ("mem:", {"admission__tenants": limits}) if where == "mem" else (broker.url(), {})  # fmt: skip
        async with penstock.connect(url, **flags) as bus:
            for _ in range(60):
                await bus.publish(TOPIC, b"x" * 100, codec="raw", key="not counted" * 9)
            async with bus.transaction() as transaction:
                for _ in range(30):
                    transaction.publish(TOPIC, b"x" * 100, codec="raw")
            with pytest.raises(penstock.Dropped):
                await bus.publish_many(TOPIC, [b"x" * 100] * 101, codec="raw")
            with pytest.raises(penstock.Throttled) as caught:
                await bus.publish_many(TOPIC, [b"x" * 500] * 20, codec="raw")
            assert caught.value.data["limit"] == "bytes_per_s"
            kept = TOPIC.replace("acme", "globex")
            for _ in range(8):
                await bus.publish(kept, b"x" * 100, codec="raw")
            async with bus.transaction() as transaction:
                transaction.publish_many(kept, [b"x" * 100] * 2, codec="raw")
            with pytest.raises(penstock.Throttled) as caught:
                await bus.publish(kept, b"", codec="raw")
            assert caught.value.data["limit"] == "storage_bytes"


async def test_ingress_ends_with_the_transaction(tmp_path: Path) -> None:
    """T11: what was admitted is given back, whether it was stored or not."""
    limits: dict[str, Any] = {"acme": {"max_ingress": 10}}
    async with penstock.connect("mem:", admission__tenants=limits) as bus:
        for number in range(5):
            async with bus.transaction() as transaction:
                transaction.publish_many(TOPIC, [b"x"] * 10)
            with pytest.raises(penstock.Dropped):
                async with bus.transaction() as transaction:
                    transaction.publish_many(TOPIC, [b"x"] * 11)
            assert await stored(bus) == 10 * (number + 1)

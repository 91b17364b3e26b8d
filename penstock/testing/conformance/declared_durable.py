"""The capability durable: what a clean stop and start of the engine leaves as it was."""

from __future__ import annotations

import pytest

import penstock
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import (
    Harness,
    buried,
    nothing,
    numbers,
    payloads,
    read,
    take,
)


class TestDurable(Declared):
    """Durability"""

    capability = "durable"

    async def test_refused_when_not_declared(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """An engine that does not keep its data says so: no call needs it, so nothing is refused."""
        assert "durable" not in bus.capabilities

    async def test_events(self, harness: Harness, topic: str) -> None:
        """Events, with everything they carry, are there after a restart, and offsets go on."""
        bus = await harness.connect()
        await bus.topics.create(topic, partitions=2)
        receipt = await bus.publish(topic, b"x", key=b"k", headers={"h": "1"}, partition=1)
        [before] = await read(bus, topic)
        await harness.restart()
        bus = await harness.connect()
        [after] = await read(bus, topic)
        for name in ("id", "payload", "key", "token", "codec", "time_us", "append_time_us"):
            assert getattr(after, name) == getattr(before, name), name
        assert dict(after.headers) == {"h": "1"}
        assert len((await bus.topics.info(topic)).partitions) == 2
        later = await bus.publish(topic, b"y", partition=1)
        assert later.offset > receipt.offset
        await bus.close()

    async def test_queue(self, harness: Harness, topic: str, group: str) -> None:
        """After a restart settled events stay settled; the others come back with their attempts counted."""
        bus = await harness.connect()
        quick = penstock.Retry(ladder_ms=(10,), max_attempts=4)
        await bus.publish_many(topic, numbers(6))
        async with bus.subscribe(topic, group=group, retry=quick, max_inflight=4) as sub:
            events = await take(sub, 4, ack=False)
            await events[0].ack()
            await events[1].reject()
            await events[2].nack()
        await harness.restart()
        bus = await harness.connect()
        async with bus.subscribe(topic, group=group, retry=quick) as sub:
            back = await take(sub, 4)
            await nothing(sub)
        attempts = {event.payload: event.attempt for event in back}
        assert attempts == {b"2": 2, b"3": 2, b"4": 1, b"5": 1}
        assert await buried(bus, group, 1) == [b"1"]
        await bus.close()

    async def test_cursor(self, harness: Harness, topic: str, group: str) -> None:
        """A log group resumes behind its committed cursor after a restart."""
        bus = await harness.connect()
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            await take(sub, 4)
            await sub.commit()
            await take(sub, 2)
        await harness.restart()
        bus = await harness.connect()
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            assert payloads(await take(sub, 6)) == numbers(6, first=4)
        await bus.close()

    async def test_waiting(self, harness: Harness, topic: str, group: str) -> None:
        """Where delayed delivery is declared too, an event waits for its time across a restart."""
        if "delayed" not in harness.capabilities:
            pytest.skip("delayed is not declared")
        bus = await harness.connect()
        await bus.publish(topic, b"later", delay_s=0.5)
        await harness.restart()
        bus = await harness.connect()
        async with bus.subscribe(topic, group=group) as sub:
            assert payloads(await take(sub, 1)) == [b"later"]
            await nothing(sub)
        await bus.close()

    async def test_idempotency(self, harness: Harness, topic: str) -> None:
        """Where idempotency is declared too, keys are remembered across a restart."""
        if "idempotency" not in harness.capabilities:
            pytest.skip("idempotency is not declared")
        bus = await harness.connect()
        first = await bus.publish(topic, b"x", idempotency_key="job-7")
        await harness.restart()
        bus = await harness.connect()
        second = await bus.publish(topic, b"x", idempotency_key="job-7")
        assert second.duplicate
        assert second.ids() == first.ids()
        await bus.close()

    async def test_transaction_keys(self, harness: Harness, topic: str) -> None:
        """Where transactions and idempotency are declared too, a transaction stays done across a restart."""
        if not {"transactions", "idempotency"} <= harness.capabilities:
            pytest.skip("transactions or idempotency are not declared")

        async def step() -> penstock.Bus:
            bus = await harness.connect()
            async with bus.transaction(idempotency_key=topic) as tx:
                tx.publish(topic, b"x")
            repeated.append(tx.repeated)
            return bus

        repeated: list[bool] = []
        await step()
        await harness.restart()
        bus = await step()
        assert repeated == [False, True]
        assert payloads(await read(bus, topic)) == [b"x"]
        await bus.close()

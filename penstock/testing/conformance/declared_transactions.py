"""The capability transactions: all or nothing, and with a key at most once."""

from __future__ import annotations

import asyncio
import uuid

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import (
    Harness,
    entered,
    nothing,
    numbers,
    payloads,
    read,
    stored,
    take,
)


class Change(Exception):
    """Raised inside a transaction to leave it."""


class TestTransactions(Declared):
    """Transactions"""

    capability = "transactions"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Begin a transaction."""
        await entered(bus.transaction())

    async def test_together(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Publishes to several topics and acks become visible together, when the block ends."""
        source, left, right = f"{topic}.source", f"{topic}.left", f"{topic}.right"
        await bus.publish(source, b"in")
        async with bus.subscribe(source, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            async with bus.transaction() as tx:
                tx.publish(left, b"1", key=b"k")
                tx.publish_many(right, [b"2", b"3"])
                tx.ack(event)
                assert await stored(bus, left) == []
                assert await stored(bus, right) == []
            assert [receipt.count for receipt in tx.receipts] == [1, 2]
        assert payloads(await read(bus, left)) == [b"1"]
        assert payloads(await read(bus, right)) == [b"2", b"3"]
        async with bus.subscribe(source, group=group) as sub:
            await nothing(sub)

    async def test_not_at_all(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """When the block is left by an exception, nothing of it has happened."""
        source, target = f"{topic}.source", f"{topic}.target"
        await bus.publish(source, b"in")

        async def fail(event: penstock.Event) -> None:
            async with bus.transaction() as tx:
                tx.publish(target, b"out")
                tx.ack(event)
                raise Change

        async with bus.subscribe(source, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            with pytest.raises(Change):
                await fail(event)
            assert await stored(bus, target) == []
            await event.nack(delay_s=0.0)
            [again] = await take(sub, 1)
            assert again.id == event.id

    async def test_bad_input(self, bus: penstock.Bus, topic: str) -> None:
        """One publish that is refused refuses the whole transaction."""

        async def fail() -> None:
            async with bus.transaction() as tx:
                tx.publish(topic, b"good")
                tx.publish("bad..topic", b"x")

        with pytest.raises(errors.InvalidTopic):
            await fail()
        assert await stored(bus, topic) == []

    async def test_commit(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A log group's cursor moves with the publishes of the transaction, or not at all."""
        source, target = f"{topic}.source", f"{topic}.target"
        await bus.publish_many(source, numbers(6))

        async def step(sub: penstock.Subscription, *, fail: bool) -> None:
            async with bus.transaction() as tx:
                for event in await take(sub, 2):
                    tx.publish(target, event.payload)
                tx.commit(sub)
                if fail:
                    raise Change

        async with bus.subscribe(source, group=group, mode="log") as sub:
            await step(sub, fail=False)
            with pytest.raises(Change):
                await step(sub, fail=True)
        async with bus.subscribe(source, group=group, mode="log") as sub:
            await step(sub, fail=False)
            await step(sub, fail=False)
        assert payloads(await read(bus, target)) == numbers(6)

    async def test_stale_ack(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A transaction with an ack that cannot be taken publishes nothing."""
        source, target = f"{topic}.source", f"{topic}.target"
        await bus.publish(source, b"in")

        async def twice(event: penstock.Event) -> None:
            async with bus.transaction() as tx:
                tx.publish(target, b"out")
                tx.ack(event)

        async with bus.subscribe(source, group=group) as sub:
            [event] = await take(sub, 1)
            with pytest.raises(errors.AlreadySettled):
                await twice(event)
        assert await stored(bus, target) == []

    async def test_receipts(self, bus: penstock.Bus, topic: str) -> None:
        """A transaction has one receipt for each publish, also where events go to several partitions."""
        spread, plain = f"{topic}.spread", f"{topic}.plain"
        await bus.topics.create(spread, partitions=4)
        async with bus.transaction() as tx:
            tx.publish_many(spread, numbers(20), keys=numbers(20))
            tx.publish(plain, b"x")
        assert [(each.topic, each.count) for each in tx.receipts] == [(spread, 20), (plain, 1)]
        stored_ids = {event.id for event in await read(bus, spread)}
        assert set(tx.receipts[0].ids()) == stored_ids
        assert len({part.partition for part in tx.receipts[0].parts}) > 1

    # -- with an idempotency key ----------------------------------------------------------------------

    @pytest.fixture
    def key(self, harness: Harness) -> str:
        """An idempotency key that nobody has used."""
        if "idempotency" not in harness.capabilities:
            pytest.skip("idempotency is not declared")
        return uuid.uuid4().hex

    async def test_key(self, bus: penstock.Bus, topic: str, key: str) -> None:
        """Of a second transaction with the same key nothing happens; it says so and raises nothing."""
        left, right = f"{topic}.left", f"{topic}.right"

        async def step(its_key: str, payload: bytes) -> penstock.Transaction:
            async with bus.transaction(idempotency_key=its_key) as tx:
                tx.publish(left, payload)
                tx.publish_many(right, [payload, payload])
            return tx

        first, again = await step(key, b"first"), await step(key, b"again")
        other = await step(f"{key}-2", b"other")
        assert [tx.repeated for tx in (first, again, other)] == [False, True, False]
        assert [len(tx.receipts) for tx in (first, again, other)] == [2, 0, 2]
        assert payloads(await read(bus, left)) == [b"first", b"other"]
        assert payloads(await read(bus, right)) == [b"first", b"first", b"other", b"other"]

    async def test_key_at_once(self, bus: penstock.Bus, topic: str, key: str) -> None:
        """Of transactions with the same key that are tried at the same time exactly one happens."""

        async def attempt(number: int) -> bool:
            async with bus.transaction(idempotency_key=key) as tx:
                tx.publish(f"{topic}.a", b"%d" % number)
                tx.publish(f"{topic}.b", b"%d" % number)
            return tx.repeated

        repeated = await asyncio.gather(*map(attempt, range(20)))
        assert sorted(repeated) == [False] + [True] * 19
        winner = b"%d" % repeated.index(False)
        assert payloads(await read(bus, f"{topic}.a")) == [winner]
        assert payloads(await read(bus, f"{topic}.b")) == [winner]

    async def test_key_with_ack(self, bus: penstock.Bus, topic: str, group: str, key: str) -> None:
        """An ack in a transaction that is repeated is not taken: the event is still leased."""
        source, target = f"{topic}.source", f"{topic}.target"
        await bus.publish_many(source, numbers(2))

        async def step(event: penstock.Event) -> bool:
            async with bus.transaction(idempotency_key=key) as tx:
                tx.publish(target, event.payload)
                tx.ack(event)
            return tx.repeated

        async with bus.subscribe(source, group=group) as sub:
            first, second = await take(sub, 2, ack=False)
            assert [await step(first), await step(second)] == [False, True]
            await second.nack(delay_s=0.0)
            assert [event.id for event in await take(sub, 1)] == [second.id]
        assert payloads(await read(bus, target)) == [first.payload]

    async def test_key_with_commit(
        self, bus: penstock.Bus, topic: str, group: str, key: str
    ) -> None:
        """A cursor in a transaction that is repeated stays where it was."""
        await bus.publish_many(topic, numbers(4))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            for repeated in (False, True):
                async with bus.transaction(idempotency_key=key) as tx:
                    await take(sub, 2)
                    tx.commit(sub)
                assert tx.repeated == repeated
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            assert payloads(await take(sub, 2)) == numbers(4)[2:]

    async def test_key_unused(self, bus: penstock.Bus, topic: str, group: str, key: str) -> None:
        """A transaction that does not happen leaves its key unused."""
        source, target = f"{topic}.source", f"{topic}.target"
        await bus.publish(source, b"in")

        async def step(event: penstock.Event | None = None) -> bool:
            async with bus.transaction(idempotency_key=key) as tx:
                tx.publish(target, b"out")
                if event is not None:
                    tx.ack(event)
            return tx.repeated

        async with bus.subscribe(source, group=group) as sub:
            [event] = await take(sub, 1)
            with pytest.raises(errors.AlreadySettled):
                await step(event)
        assert [await step(), await step()] == [False, True]
        assert payloads(await read(bus, target)) == [b"out"]

    async def test_key_apart(self, bus: penstock.Bus, topic: str, key: str) -> None:
        """The keys of transactions and those of publishes have nothing to do with each other."""
        await bus.publish(topic, b"x", idempotency_key=key)
        async with bus.transaction(idempotency_key=key) as tx:
            tx.publish(topic, b"y")
        assert not tx.repeated
        assert payloads(await read(bus, topic)) == [b"x", b"y"]

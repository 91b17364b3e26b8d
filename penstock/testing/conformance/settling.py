"""Queue subscriptions: leases, and the four ways to settle one."""

from __future__ import annotations

import time
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.harness import (
    SHORT_LEASE_S,
    Contract,
    dead_letters,
    eventually,
    nothing,
    numbers,
    payloads,
    read,
    take,
)

QUICK = penstock.Retry(ladder_ms=(50,), max_attempts=5)
PATIENT = penstock.Retry(ladder_ms=(0,), max_attempts=100)


class TestSettling(Contract):
    """Leases and settling"""

    async def test_ack(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An acked event is never delivered to its group again."""
        await bus.publish_many(topic, numbers(3))
        async with bus.subscribe(topic, group=group) as sub:
            await take(sub, 3)
            await nothing(sub)
        async with bus.subscribe(topic, group=group) as sub:
            await nothing(sub)

    async def test_iteration(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Iterating over a subscription gives the same events as asking for them one by one."""
        await bus.publish_many(topic, numbers(3))
        seen = []
        async with bus.subscribe(topic, group=group) as sub:
            async for event in sub:
                seen.append(event.payload)
                await event.ack()
                if len(seen) == 3:
                    break
        assert seen == numbers(3)

    async def test_nack(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A nacked event comes again, the same in everything but its attempt, which is one higher."""
        await bus.publish(topic, b"x", key=b"k", headers={"h": "1"})
        async with bus.subscribe(topic, group=group, retry=QUICK) as sub:
            [first] = await take(sub, 1, ack=False)
            await first.nack()
            [second] = await take(sub, 1)
        assert (first.attempt, second.attempt) == (1, 2)
        assert second.id == first.id
        assert second.token == first.token
        assert (second.payload, second.key, dict(second.headers)) == (b"x", b"k", {"h": "1"})

    async def test_nack_with_delay(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event nacked with a delay does not come again before the delay is over."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group, retry=PATIENT) as sub:
            [event] = await take(sub, 1, ack=False)
            started = time.monotonic()
            await event.nack(delay_s=0.6)
            await nothing(sub, 0.3)
            await take(sub, 1)
            assert time.monotonic() - started >= 0.55

    async def test_reject(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A rejected event becomes a dead letter at once, with the reason given."""
        await bus.publish(topic, b"hopeless")
        async with bus.subscribe(topic, group=group, retry=QUICK) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.reject(reason="no such customer")
            await nothing(sub)
        [letter] = await dead_letters(bus, group, 1)
        assert (await bus.dead_letters.inspect(letter.id)).payload == b"hopeless"
        assert letter.attempts == 1
        assert "no such customer" in letter.reason

    async def test_extend(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An extended lease outlives its first deadline, and the event can still be acked."""
        await bus.publish(topic, b"slow work")
        async with bus.subscribe(topic, group=group, lease_s=SHORT_LEASE_S) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.extend(30.0)
            await nothing(sub, 2 * SHORT_LEASE_S)
            await event.ack()
            await nothing(sub)

    async def test_lease_expiry(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event nobody settles is delivered again after its lease, to any member, one attempt later."""
        await bus.publish(topic, b"x")
        options: dict[str, Any] = {"group": group, "lease_s": SHORT_LEASE_S, "retry": PATIENT}
        async with bus.subscribe(topic, **options) as one, bus.subscribe(topic, **options) as two:

            async def next_delivery() -> penstock.Event | None:
                return await one.get(timeout_s=0.02) or await two.get(timeout_s=0.02)

            first = await eventually(next_delivery, "the first delivery")
            second = await eventually(next_delivery, "a second delivery")
        assert (first.attempt, second.attempt) == (1, 2)
        assert first.id == second.id

    async def test_ack_after_expiry(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A settle call after the lease ran out raises LeaseExpired and leaves the new delivery alone."""
        await bus.publish(topic, b"x")
        options: dict[str, Any] = {"group": group, "lease_s": SHORT_LEASE_S, "retry": PATIENT}
        async with bus.subscribe(topic, **options) as sub:
            [late] = await take(sub, 1, ack=False)
            [again] = await take(sub, 1, ack=False)
            await again.extend(30.0)
            for call in (late.ack, late.nack, late.extend, late.reject):
                with pytest.raises(errors.LeaseExpired):
                    await call()
            await again.ack()
            await nothing(sub)
        assert await bus.dead_letters.list(consumer=group) == []

    @pytest.mark.parametrize("first", ["ack", "nack", "reject"])
    async def test_settled_once(
        self, bus: penstock.Bus, topic: str, group: str, first: str
    ) -> None:
        """A delivery is settled once: every later call on it raises AlreadySettled."""
        await bus.publish(topic, b"x")
        patient = penstock.Retry(ladder_ms=(60_000,), max_attempts=5)
        async with bus.subscribe(topic, group=group, retry=patient) as sub:
            [event] = await take(sub, 1, ack=False)
            await getattr(event, first)()
            for call in (event.ack, event.nack, event.extend, event.reject):
                with pytest.raises(errors.AlreadySettled):
                    await call()

    async def test_many_at_once(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Many events are acked or nacked in one call, with the same meaning as one by one."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, retry=QUICK) as sub:
            events = await take(sub, 10, ack=False)
            await sub.ack(events[:6])
            await sub.nack(events[6:], delay_s=0.0)
            again = await take(sub, 4, ack=False)
            assert sorted(payloads(again)) == numbers(4, first=6)
            assert {event.attempt for event in again} == {2}
            await sub.ack(again)
            await nothing(sub)

    async def test_leaving_gives_back(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """What a member held when it left goes to the next one; only what it was handed counts."""
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group, retry=PATIENT) as sub:
            handed = await take(sub, 3, ack=False)
            await handed[0].ack()
        async with bus.subscribe(topic, group=group, retry=PATIENT) as sub:
            events = await take(sub, 9)
            await nothing(sub)
        assert sorted(payloads(events)) == sorted(numbers(10)[1:])
        attempts = {event.payload: event.attempt for event in events}
        expected = {payload: 2 if payload in (b"1", b"2") else 1 for payload in numbers(10)[1:]}
        assert attempts == expected

    async def test_settling_after_leaving(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event of a closed subscription can no longer be settled by it."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group, retry=PATIENT) as sub:
            [event] = await take(sub, 1, ack=False)
        with pytest.raises(errors.DeliveryError):
            await event.ack()
        async with bus.subscribe(topic, group=group, retry=PATIENT) as sub:
            assert payloads(await take(sub, 1)) == [b"x"]

    async def test_only_leased_events(self, bus: penstock.Bus, topic: str) -> None:
        """Settling an event that was read, not leased, raises NotLeased."""
        await bus.publish(topic, b"x")
        [event] = await read(bus, topic)
        assert event.attempt == 0
        for call in (event.ack, event.nack, event.extend, event.reject):
            with pytest.raises(errors.NotLeased):
                await call()

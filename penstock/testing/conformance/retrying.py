"""Retries: the ladder, its end, and that no event waits for another one's backoff."""

from __future__ import annotations

import asyncio
import time

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.harness import (
    DEADLINE_S,
    SHORT_LEASE_S,
    Contract,
    dead_letters,
    nothing,
    numbers,
    owes,
    payloads,
    take,
)

LADDER = penstock.Retry(ladder_ms=(100, 500), max_attempts=3)
TWICE = penstock.Retry(ladder_ms=(20,), max_attempts=2)


class TestRetrying(Contract):
    """Retries and dead letters"""

    async def test_ladder(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Attempt n+1 comes no earlier than step n of the ladder after attempt n failed."""
        await bus.publish(topic, b"x")
        waits = []
        async with bus.subscribe(topic, group=group, retry=LADDER) as sub:
            [event] = await take(sub, 1, ack=False)
            for attempt in (2, 3):
                failed = time.monotonic()
                await event.nack()
                [event] = await take(sub, 1, ack=False)
                waits.append(time.monotonic() - failed)
                assert event.attempt == attempt
            await event.ack()
        assert waits[0] >= 0.09
        assert waits[1] >= 0.45

    async def test_dead_letter(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """After the last attempt an event becomes a dead letter that keeps what it was."""
        await bus.publish(topic, b"poison", key=b"k", headers={"h": "1"})
        async with bus.subscribe(topic, group=group, retry=TWICE) as sub:
            for _ in range(2):
                [event] = await take(sub, 1, ack=False)
                await event.nack(reason="out of paper")
            await nothing(sub)
        [letter] = await dead_letters(bus, group, 1)
        assert letter.id == f"{event.token}@{group}"
        assert (letter.consumer, letter.topic, letter.tenant) == (group, topic, event.tenant)
        assert (letter.partition, letter.offset) == (event.partition, event.offset)
        whole = await bus.dead_letters.inspect(letter.id)
        assert (whole.payload, whole.key, dict(whole.headers)) == (b"poison", b"k", {"h": "1"})
        assert (whole.codec, whole.token) == ("raw", str(event.token))
        assert (letter.attempts, letter.replay_count) == (2, 0)
        assert "out of paper" in letter.reason
        assert letter.dead_lettered_at_us > 0

    async def test_dead_letter_topic(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A dead letter is also an event on the tenant's dead-letter topic."""
        await bus.publish(topic, b"poison")
        pattern = f"_dlq.{bus.identity.tenant}"
        async with (
            bus.subscribe(pattern, start="latest") as watch,
            bus.subscribe(topic, group=group, retry=penstock.Retry.none()) as sub,
        ):
            [event] = await take(sub, 1, ack=False)
            await event.nack()
            [seen] = await take(watch, 1)
        assert seen.topic == pattern
        assert seen.payload == b"poison"

    async def test_inspect(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A dead letter is found by its id; an id that is none raises UnknownDeadLetter."""
        await bus.publish(topic, b"poison")
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.reject()
        [letter] = await dead_letters(bus, group, 1)
        found = await bus.dead_letters.inspect(letter.id)
        assert (found.record.id, found.payload) == (letter.id, b"poison")
        with pytest.raises(errors.UnknownDeadLetter):
            await bus.dead_letters.inspect(f"00000000-0000-0000-0000-000000000000@{group}")

    async def test_listed_means_there(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A dead letter that is listed can be inspected, from the first moment on."""
        await bus.publish(topic, b"poison")
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.reject()
            async with asyncio.timeout(DEADLINE_S):
                # No pause: the moment between listed and stored is what is looked for.
                while not (letters := await bus.dead_letters.list(consumer=group)):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert (await bus.dead_letters.inspect(letters[0].id)).payload == b"poison"

    async def test_dead_letters_are_listed_by(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """Dead letters are listed by group and by topic, at most as many as asked for."""
        other = f"{topic}.other"
        await bus.publish_many(topic, numbers(3))
        await bus.publish(other, b"else")
        async with bus.subscribe(f"{topic}.#", group=group) as sub:
            for event in await take(sub, 4, ack=False):
                await event.reject()
        await dead_letters(bus, group, 4)
        assert len(await bus.dead_letters.list(consumer=group, limit=2)) == 2
        by_topic = await bus.dead_letters.list(topic=other)
        assert [(letter.consumer, letter.topic) for letter in by_topic] == [(group, other)]
        assert await bus.dead_letters.list(consumer=f"{group}-none") == []

    async def test_expiry_is_an_attempt(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A lease that runs out counts as an attempt: an event everyone drops becomes a dead letter."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group, retry=TWICE, lease_s=SHORT_LEASE_S) as sub:
            assert [event.attempt for event in await take(sub, 2, ack=False)] == [1, 2]
            [letter] = await dead_letters(bus, group, 1)
            await nothing(sub)
        assert letter.attempts == 2

    async def test_attempts_outlive_members(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """Attempts are counted for the group: a new member continues the count."""
        await bus.publish(topic, b"x")
        for attempt in (1, 2):
            async with bus.subscribe(topic, group=group, retry=TWICE) as sub:
                [event] = await take(sub, 1, ack=False)
                assert event.attempt == attempt
                await event.nack()
        [letter] = await dead_letters(bus, group, 1)
        assert letter.attempts == 2

    async def test_no_retry(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """With one attempt, what fails is a dead letter at once."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group, retry=penstock.Retry.none()) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.nack()
            await nothing(sub)
        [letter] = await dead_letters(bus, group, 1)
        assert letter.attempts == 1

    async def test_backoff_delays_nobody(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A long backoff of one event delays no other, neither new ones nor other retries."""
        await bus.publish_many(topic, numbers(20))
        async with bus.subscribe(topic, group=group, max_inflight=4) as sub:
            [stuck, brief] = await take(sub, 2, ack=False)
            await stuck.nack(delay_s=3_600)
            await brief.nack(delay_s=0.2)
            rest = await take(sub, 19)
            await bus.publish(topic, b"new")
            assert payloads(await take(sub, 1)) == [b"new"]
        assert sorted(payloads(rest)) == sorted(numbers(20)[1:])

    async def test_groups_fail_apart(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """What one group gives up, another receives as if nothing had happened."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=f"{group}-a") as sub:
            [event] = await take(sub, 1, ack=False)
            await event.reject()
        async with bus.subscribe(topic, group=f"{group}-b") as sub:
            [event] = await take(sub, 1)
            assert event.attempt == 1
        await dead_letters(bus, f"{group}-a", 1)
        assert await bus.dead_letters.list(consumer=f"{group}-b") == []

    async def test_dead_letters_owe_nothing(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """A group that gave an event up is done with it: its lag goes down to zero."""
        await bus.publish_many(topic, numbers(2))
        async with bus.subscribe(topic, group=group) as sub:
            events = await take(sub, 2, ack=False)
            await events[0].reject()
            await events[1].ack()
        await owes(bus, group, 0)

"""Capabilities of publishing: idempotency, request-reply."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import numbers, payloads, read, stored


class Answer(msgspec.Struct):
    """A typed reply."""

    sum: int


class TestIdempotency(Declared):
    """Idempotent publishing"""

    capability = "idempotency"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Publish under an idempotency key."""
        await bus.publish(topic, b"x", idempotency_key="job-7")

    async def test_key(self, bus: penstock.Bus, topic: str) -> None:
        """A second publish under the same key stores nothing; its receipt is that of the first."""
        first = await bus.publish(topic, b"first", idempotency_key="job-7")
        second = await bus.publish(topic, b"second", idempotency_key="job-7")
        other = await bus.publish(topic, b"other", idempotency_key="job-8")
        assert (first.duplicate, second.duplicate, other.duplicate) == (False, True, False)
        assert second.ids() == first.ids()
        assert second.token == first.token
        assert payloads(await read(bus, topic)) == [b"first", b"other"]

    async def test_token(self, bus: penstock.Bus, topic: str) -> None:
        """The same holds for a token given by the caller, which the event keeps."""
        token = uuid.uuid4().bytes
        tokens = [uuid.uuid4().bytes for _ in range(3)]
        first = await bus.publish(topic, b"x", token=token)
        second = await bus.publish(topic, b"x", token=token)
        assert (first.duplicate, second.duplicate) == (False, True)
        await bus.publish_many(topic, numbers(3), tokens=tokens)
        events = await read(bus, topic)
        assert payloads(events) == [b"x", *numbers(3)]
        assert [event.token.bytes for event in events] == [token, *tokens]

    @pytest.mark.parametrize("token", [b"short", "no uuid", 7], ids=repr)
    async def test_tokens_have_16_bytes(self, bus: penstock.Bus, topic: str, token: Any) -> None:
        """A token that is not 128 bits, or a column of tokens too short, is refused and nothing is stored."""
        await bus.publish(topic, b"before")
        with pytest.raises(errors.InvalidInput):
            await bus.publish(topic, b"x", token=token)
        with pytest.raises(errors.InvalidInput):
            await bus.publish_many(topic, [b"x", b"y"], tokens=[bytes(16), token])
        with pytest.raises(errors.InvalidBatch):
            await bus.publish_many(topic, [b"x", b"y"], tokens=[bytes(16)])
        assert payloads(await read(bus, topic)) == [b"before"]

    async def test_batch(self, bus: penstock.Bus, topic: str) -> None:
        """A batch published again under the same keys stores nothing."""
        keys = [f"job-{number}" for number in range(10)]
        first = await bus.publish_many(topic, numbers(10), idempotency_keys=keys)
        second = await bus.publish_many(topic, numbers(10), idempotency_keys=keys)
        assert (first.duplicate, second.duplicate) == (False, True)
        assert second.ids() == first.ids()
        assert payloads(await read(bus, topic)) == numbers(10)

    async def test_part_of_a_batch(self, bus: penstock.Bus, topic: str) -> None:
        """Of a batch that was published in part before, only the new events are stored."""
        await bus.publish_many(topic, numbers(2), idempotency_keys=["a", "b"])
        await bus.publish_many(topic, numbers(4), idempotency_keys=["a", "b", "c", "d"])
        assert payloads(await read(bus, topic)) == numbers(4)

    async def test_topics_apart(self, bus: penstock.Bus, topic: str) -> None:
        """A key is remembered for its topic only."""
        first = await bus.publish(f"{topic}.a", b"x", idempotency_key="job-7")
        second = await bus.publish(f"{topic}.b", b"x", idempotency_key="job-7")
        assert (first.duplicate, second.duplicate) == (False, False)


class TestRequestReply(Declared):
    """Request and reply"""

    capability = "request-reply"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Send a request."""
        await bus.request(topic, b"x", timeout_s=0.1)

    async def test_reply(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """What a handler returns is the reply to the request it handled, decoded as asked."""

        @bus.handler(topic, group=group)
        async def add(numbers: list[int]) -> dict[str, Any]:
            return {"sum": sum(numbers)}

        assert await bus.request(topic, [1, 2, 3]) == {"sum": 6}
        assert await bus.request(topic, [4, 5], type=Answer) == Answer(9)

    async def test_own_reply(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Requests made at the same time each get their own reply."""

        @bus.handler(topic, group=group, concurrency=10)
        async def double(number: int) -> int:
            await asyncio.sleep(0.01 * (number % 3))
            return 2 * number

        replies = await asyncio.gather(*(bus.request(topic, number) for number in range(30)))
        assert replies == [2 * number for number in range(30)]

    async def test_timeout(self, bus: penstock.Bus, topic: str) -> None:
        """A request nobody answers raises RequestTimedOut."""
        with pytest.raises(errors.RequestTimedOut):
            await bus.request(topic, b"anyone?", timeout_s=0.2)

    async def test_rejected(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A request that becomes a dead letter raises RequestRejected at once, with the reason."""

        @bus.handler(topic, group=group, retry=penstock.Retry(ladder_ms=(20,), max_attempts=2))
        async def handle(number: int, event: penstock.Event) -> int:
            if number == 1:
                raise penstock.Reject("no such account")
            raise OSError(f"down at attempt {event.attempt}")

        with pytest.raises(errors.RequestRejected, match="no such account"):
            await bus.request(topic, 1, timeout_s=3_600)
        with pytest.raises(errors.RequestRejected, match="down at attempt 2"):
            await bus.request(topic, 2, timeout_s=3_600)

    async def test_addresses(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A reply goes to an inbox and nowhere else, whatever a request's header says."""

        @bus.handler(topic, group=group)
        async def handle(event: penstock.Event) -> bytes:
            return b"reply"

        await bus.publish(topic, b"x", headers={"penstock-reply-to": f"{topic}.replies"})
        assert await bus.request(topic, b"y") == b"reply"
        assert await stored(bus, f"{topic}.replies") == []

    async def test_plain_publish(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """What a handler returns for an event that is no request goes nowhere."""

        @bus.handler(topic, group=group)
        async def echo(event: penstock.Event) -> bytes:
            return event.payload

        await bus.publish(topic, b"x")
        assert await bus.request(topic, b"y") == b"y"
        assert payloads(await read(bus, topic)) == [b"x", b"y"]

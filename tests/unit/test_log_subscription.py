"""`LogSubscription` keeps a fetched batch until the client has it (Q6, T4)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.core.entry import GroupSpec
from penstock.engines.engine import Handed, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import DeliveryError
from penstock.model.event import Identity
from penstock.server.subscriptions import LogSubscription


class Reader:
    """Hands out a batch when the test puts one, and is past it then."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[bytes] = asyncio.Queue()
        self.resets = 0

    async def receive(self) -> Handed:
        payload = await self.batches.get()
        return Handed(EventBatch.build("a.b", [payload]), self.resets)

    def epoch(self, topic: str, partition: int) -> int:
        return self.resets

    def put(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.batches.put_nowait(payload)


class Subscription(LogSubscription):
    """Answers with payloads."""

    def __init__(self, *payloads: bytes) -> None:
        self.source = Reader()
        self.source.put(*payloads)
        wanted = Subscribe("g", GroupSpec(("a.b",), mode="log"), "m", 1, Identity())
        super().__init__(wanted, cast(Any, self.source))

    async def ask(self, request: int) -> bytes:
        async with asyncio.timeout(5):
            return next(iter((await self.fetch(request)).batch)).payload


async def test_the_same_request_gets_the_same_batch_however_often_it_comes() -> None:
    subscription = Subscription(b"0", b"1")
    assert [await subscription.ask(request) for request in (4, 4, 4, 6, 6)] == [b"0"] * 3 + [
        b"1"
    ] * 2


async def test_a_fetch_that_was_answered_while_nobody_was_there_is_not_lost() -> None:
    subscription = Subscription()
    nobody_hears = asyncio.create_task(subscription.ask(4))
    await asyncio.sleep(0)
    subscription.source.put(b"0", b"1")
    await nobody_hears
    assert [await subscription.ask(4), await subscription.ask(5)] == [b"0", b"1"]


async def test_a_fetch_that_was_given_up_shares_its_batch_with_the_next() -> None:
    subscription = Subscription()
    both = asyncio.gather(subscription.ask(4), subscription.ask(5))
    await asyncio.sleep(0)
    subscription.source.put(b"0", b"1")
    assert await both == [b"0", b"0"]
    assert [await subscription.ask(4), await subscription.ask(5), await subscription.ask(6)] == [
        b"0",
        b"0",
        b"1",
    ]


async def test_a_group_that_was_reset_reads_from_there() -> None:
    subscription = Subscription(b"0", b"1")
    assert await subscription.ask(4) == b"0"
    subscription.source.resets += 1
    assert await subscription.ask(4) == b"1"
    assert await subscription.ask(4) == b"1"


@pytest.mark.parametrize("later", ["answered", "waits"])
async def test_what_is_gone_is_refused_and_never_the_next_in_its_place(later: str) -> None:
    """A client that fetches ahead lost two answers: only the later batch is still there."""
    subscription = Subscription(b"0", *[b"1"] * (later == "answered"))
    assert await subscription.ask(4) == b"0"
    ahead = asyncio.create_task(subscription.ask(5))
    await asyncio.sleep(0.01)
    with pytest.raises(DeliveryError, match="one batch at a time"):
        await subscription.ask(4)
    subscription.source.put(b"1", b"2")
    assert [await ahead, await subscription.ask(5)] == [b"1", b"1"]


async def test_what_the_client_has_is_not_kept() -> None:
    subscription = Subscription(b"0", b"1")
    await subscription.ask(4)
    subscription.forget_before(4)
    assert await subscription.ask(4) == b"0"
    subscription.forget_before(5)
    assert subscription._last is None
    with pytest.raises(DeliveryError, match="one batch at a time"):
        await subscription.ask(4)
    assert await subscription.ask(5) == b"1"

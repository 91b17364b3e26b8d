"""Handlers that raise, hang, are cancelled or get what they cannot read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

import penstock


class Order(msgspec.Struct):
    id: int


ONCE_MORE = penstock.Retry((0,), 2)


async def until(probe: Any, what: str = "it") -> None:
    for _ in range(1_000):
        if probe():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{what} did not happen")


async def letters(bus: penstock.Bus, count: int) -> list[Any]:
    for _ in range(1_000):
        found = await bus.dead_letters.list()
        if len(found) >= count:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"no {count} dead letters")


async def test_a_handler_that_raises_is_retried_and_then_dead(mem) -> None:
    attempts = []

    @mem.handler("orders", group="g", retry=ONCE_MORE)
    async def handle(order: Order, event: penstock.Event) -> None:
        attempts.append(event.attempt)
        raise ValueError("no paper")

    await mem.publish("orders", {"id": 1})
    (letter,) = await letters(mem, 1)
    assert attempts == [1, 2]
    assert "ValueError" in letter.reason
    assert "no paper" in letter.reason


async def test_a_handler_that_hangs_is_stopped_and_delays_nobody(mem) -> None:
    done: list[int] = []

    @mem.handler("orders", group="g", retry=penstock.Retry.none(), timeout_s=0.1, concurrency=2)
    async def handle(order: Order) -> None:
        if order.id == 0:
            await asyncio.Event().wait()
        done.append(order.id)

    await mem.publish_many("orders", [{"id": n} for n in range(20)])
    (letter,) = await letters(mem, 1)
    assert letter.offset == 0
    assert "timed out" in letter.reason
    await until(lambda: len(done) == 19)


async def test_a_cancelled_handler_returns_its_event(tmp_path, small) -> None:
    started = asyncio.Event()
    async with penstock.connect(tmp_path, settings=small(delivery__drain_s=0.1)) as bus:

        @bus.handler("orders", group="g")
        async def handle(order: Order) -> None:
            started.set()
            await asyncio.Event().wait()

        await bus.publish("orders", {"id": 1})
        await asyncio.wait_for(started.wait(), 5)
    async with (
        penstock.connect(tmp_path, settings=small()) as bus,
        bus.subscribe("orders", group="g") as sub,
    ):
        event = await sub.get(timeout_s=5)
        assert event.attempt == 1  # closing cost no attempt


async def test_a_handler_that_cancels_itself_does_not_lose_the_event(mem) -> None:
    seen = []

    @mem.handler("orders", group="g", retry=ONCE_MORE)
    async def handle(event: penstock.Event) -> None:
        seen.append(event.attempt)
        if len(seen) == 1:
            raise asyncio.CancelledError

    await mem.publish("orders", b"a")
    await until(lambda: seen)
    await asyncio.sleep(0.05)
    info = await mem.groups.info("g")
    assert info.lag == 1 or len(seen) == 2


async def test_a_payload_the_handler_cannot_read_is_dead_at_once(mem) -> None:
    calls = []

    @mem.handler("orders", group="g")
    async def handle(order: Order) -> None:
        calls.append(order.id)

    await mem.publish("orders", {"id": "not a number"})
    await mem.publish("orders", b"\xff\xfe not json", codec="raw")
    await mem.publish("orders", {"id": 3})
    found = await letters(mem, 1)
    await until(lambda: calls == [3])
    assert {letter.attempts for letter in found} == {1}


async def test_reject_and_retry_later(mem) -> None:
    seen: list[tuple[int, int]] = []

    @mem.handler("orders", group="g")
    async def handle(order: Order, event: penstock.Event) -> None:
        seen.append((order.id, event.attempt))
        if order.id == 1:
            raise penstock.Reject("hopeless")
        if event.attempt == 1:
            raise penstock.RetryLater(0.01)

    await mem.publish_many("orders", [{"id": 1}, {"id": 2}])
    (letter,) = await letters(mem, 1)
    assert letter.reason == "hopeless"
    await until(lambda: (2, 2) in seen)
    assert seen.count((1, 1)) == 1


async def test_a_lease_that_ran_out_while_the_handler_worked_does_not_count(mem) -> None:
    seen = []

    @mem.handler("orders", group="g", lease_s=0.1, timeout_s=10.0)
    async def handle(event: penstock.Event) -> None:
        seen.append(event.attempt)
        if len(seen) == 1:
            time.sleep(0.3)  # the loop stands still, and nothing can renew the lease

    await mem.publish("orders", b"a")
    await until(lambda: len(seen) >= 2)
    assert seen[:2] == [1, 2]


@pytest.mark.parametrize("wrong", ["none", "three"])
async def test_a_handler_with_a_wrong_signature_is_refused(mem, wrong: str) -> None:
    async def none() -> None: ...

    async def three(a: int, b: int, c: int) -> None: ...

    with pytest.raises(penstock.InvalidInput):
        mem.handler("orders", group="g")({"none": none, "three": three}[wrong])


async def test_plain_functions_run_beside_the_loop(mem) -> None:
    seen = []

    @mem.handler("orders", group="g")
    def handle(order: Order) -> None:
        seen.append(order.id)

    await mem.publish("orders", {"id": 5})
    await until(lambda: seen == [5])


async def test_a_request_nobody_answers_times_out_and_one_that_is_answered_does_not(mem) -> None:
    @mem.handler("add", group="g")
    async def add(pair: list[int]) -> int:
        return sum(pair)

    assert await mem.request("add", [1, 2]) == 3
    with pytest.raises(penstock.RequestTimedOut):
        await mem.request("nobody", 1, timeout_s=0.05)

"""Plain functions run as many at once as they were promised, and long work keeps its lease."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.conformance.harness import dead_letters, owes

PATIENCE_S = 30.0
# A stall of a busy machine must not be longer than two thirds of it.
LEASE_S = 1.5
TWICE = penstock.Retry(ladder_ms=(0,), max_attempts=2)


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("leases") / "data") as broker:
        yield broker.url()


@pytest_asyncio.fixture(params=["memory", "folder", "broker"])
async def bus(
    request: pytest.FixtureRequest, tmp_path: Path, broker_url: str
) -> AsyncIterator[penstock.Bus]:
    url = {"memory": "mem:", "folder": tmp_path / "data", "broker": broker_url}[request.param]
    async with penstock.connect(url, delivery__drain_s=0.2) as bus:
        yield bus


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex[:12]}.orders"


@pytest.fixture
def group() -> str:
    return f"g{uuid.uuid4().hex[:12]}"


async def test_plain_functions_run_exactly_as_many_at_once_as_promised(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    together = threading.Barrier(32)
    running: set[int] = set()
    peaks: list[int] = []

    @bus.handler(topic, group=group, concurrency=32)
    def handle(number: int) -> None:
        running.add(number)
        together.wait(PATIENCE_S)  # opens when 32 are here
        peaks.append(len(running))
        together.wait(PATIENCE_S)
        running.discard(number)

    await bus.publish_many(topic, list(range(64)))
    await owes(bus, group, 0)
    assert (len(peaks), max(peaks)) == (64, 32)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_work_that_outlives_its_lease_keeps_it(
    bus: penstock.Bus, topic: str, group: str, plain: bool
) -> None:
    attempts: list[int] = []

    def handle(event: penstock.Event) -> None:
        attempts.append(event.attempt)
        time.sleep(2 * LEASE_S)

    async def handle_async(event: penstock.Event) -> None:
        attempts.append(event.attempt)
        await asyncio.sleep(2 * LEASE_S)

    bus.handler(
        topic, group=group, retry=TWICE, concurrency=2, lease_s=LEASE_S, timeout_s=PATIENCE_S
    )(handle if plain else handle_async)
    await bus.publish(topic, b"x")
    await owes(bus, group, 0)
    assert attempts == [1]
    assert await bus.dead_letters.list(consumer=group) == []


async def test_a_plain_function_past_its_timeout_is_told_of_and_still_counts(
    bus: penstock.Bus, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    @bus.handler(topic, group=group, retry=TWICE, lease_s=LEASE_S, timeout_s=0.1)
    def slow(event: penstock.Event) -> None:
        attempts.append(event.attempt)
        time.sleep(2 * LEASE_S)

    await bus.publish(topic, b"x")
    await owes(bus, group, 0)
    assert attempts == [1]
    late = [r.message for r in caplog.records if "cannot be stopped" in r.message]
    assert len(late) == 1
    assert "slow" in late[0]


async def test_an_async_handler_past_its_timeout_is_cancelled_and_the_reason_says_so(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    @bus.handler(topic, group=group, retry=TWICE, timeout_s=0.1)
    async def handle(event: penstock.Event) -> None:
        await asyncio.sleep(3_600)

    await bus.publish(topic, b"x")
    [letter] = await dead_letters(bus, group, 1)
    assert letter.attempts == 2
    assert "timed out" in letter.reason
    assert "timeout_s" in letter.reason


async def test_a_handler_that_finishes_in_spite_of_its_timeout_has_done_its_event(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    seen: list[bytes] = []

    @bus.handler(topic, group=group, retry=TWICE, timeout_s=0.1)
    async def handle(payload: bytes) -> None:
        seen.append(payload)
        if payload == b"slow":
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                return

    await bus.publish_many(topic, [b"slow", b"next"])
    await owes(bus, group, 0)
    assert seen == [b"slow", b"next"]
    assert await bus.dead_letters.list(consumer=group) == []


async def test_a_handler_that_ignores_its_timeout_is_told_of_and_keeps_its_event(
    bus: penstock.Bus, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B10: its outcome counts, and the log says which event it holds meanwhile."""
    seen: list[int] = []

    @bus.handler(topic, group=group, retry=TWICE, lease_s=LEASE_S, timeout_s=0.1)
    async def deaf(event: penstock.Event) -> None:
        seen.append(event.attempt)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    await bus.publish(topic, b"x")
    await owes(bus, group, 0)
    assert seen == [1]
    told = [r.getMessage() for r in caplog.records if "ignores that it was" in r.getMessage()]
    assert len(told) == 1
    assert f"{topic}/0/0" in told[0]


async def test_many_slow_and_quick_events_time_out_each_on_their_own(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    done: list[int] = []

    @bus.handler(
        topic, group=group, retry=penstock.Retry.none(), concurrency=4, timeout_s=0.5
    )  # fmt: skip
    async def handle(number: int) -> None:
        await asyncio.sleep(3_600 if number % 10 == 0 else 0.01)
        done.append(number)

    await bus.publish_many(topic, list(range(40)))
    letters = await dead_letters(bus, group, 4)
    await owes(bus, group, 0)
    assert sorted(letter.offset for letter in letters) == [0, 10, 20, 30]
    assert sorted(done) == [n for n in range(40) if n % 10]

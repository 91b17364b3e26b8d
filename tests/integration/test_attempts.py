"""What counts as an attempt: what a consumer was handed, on a folder and over a broker alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 60.0
THREE = penstock.Retry(ladder_ms=(0,), max_attempts=3)
WORKER = """
import asyncio, os, signal, sys
import penstock

async def main(url, deadly, quick):
    bus = await penstock.connect(url).open()
    retry = penstock.Retry(ladder_ms=(0,), max_attempts=3)
    sub = await bus.subscribe("jobs", group="g", retry=retry, member="worker" + str(os.getpid())).open()
    while (event := await sub.get(timeout_s=3.0)) is not None:
        print(event.payload.decode(), event.attempt, flush=True)
        if event.payload == deadly.encode():
            os.kill(os.getpid(), signal.SIGKILL)
        await event.ack()
        if not quick:
            await bus.flush()
    await bus.close()

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "quick"))
"""


def work(url: str, deadly: str, pace: str = "slow") -> list[tuple[str, int]]:
    """Run a worker until it has nothing left to do, or an event kills it; says what it was handed."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, url, deadly, pace],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(payload, int(attempt)) for payload, attempt in lines]


@pytest.fixture(params=["folder", "broker"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """Where a bus is that one process after another uses."""
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    try:
        yield broker.url()
    finally:
        await asyncio.to_thread(broker.stop)


async def test_an_event_that_kills_its_worker_is_dead_after_its_attempts(url: str) -> None:
    """B1, B21: it alone is counted; what its worker had fetched besides was never handed out."""
    async with penstock.connect(url) as bus:
        await bus.publish_many("jobs", [b"fine", b"deadly", b"later", b"last"])
    handed = [await asyncio.to_thread(work, url, "deadly") for _ in range(4)]
    assert handed == [
        [("fine", 1), ("deadly", 1)],
        [("deadly", 2)],
        [("deadly", 3)],
        [("later", 1), ("last", 1)],
    ]
    async with penstock.connect(url) as bus:
        [letter] = await bus.dead_letters.list(consumer="g")
        assert (letter.offset, letter.attempts) == (1, 3)


async def test_an_event_that_kills_a_worker_in_a_hurry_is_counted_too(url: str) -> None:
    """B1: its worker never waits for anything between two events."""
    async with penstock.connect(url) as bus:
        await bus.publish_many("jobs", [b"a", b"b", b"deadly", b"later"])
    attempts = []
    for _ in range(4):
        attempts += await asyncio.to_thread(work, url, "deadly", "quick")
    assert [attempt for payload, attempt in attempts if payload == "deadly"] == [1, 2, 3]
    assert [attempt for payload, attempt in attempts if payload == "later"] == [1]


async def test_events_of_a_dead_worker_go_to_another_in_a_second(tmp_path: Path) -> None:
    """B3: its operating system closed the connection, nobody waits for the session to expire."""
    settings: dict[str, Any] = {"server__session_s": 600.0}
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish_many("jobs", [b"deadly", b"later"])
            assert await asyncio.to_thread(work, broker.url(), "deadly") == [("deadly", 1)]
            began = time.monotonic()
            async with bus.subscribe("jobs", group="g", retry=THREE) as sub:
                events = [await sub.get(timeout_s=DEADLINE_S) for _ in range(2)]
                found = sorted((each.payload, each.attempt) for each in events if each is not None)
                assert found == [(b"deadly", 2), (b"later", 1)]
            assert time.monotonic() - began < DEADLINE_S / 2


async def test_a_single_consumer_that_died_makes_room_for_the_next(tmp_path: Path) -> None:
    """B3: while its session waits, the one behind it is served."""
    settings: dict[str, Any] = {"server__session_s": 600.0}
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with (
            penstock.connect(broker.url()) as first,
            penstock.connect(broker.url()) as second,
            first.subscribe("jobs", group="g", order="single", retry=THREE) as active,
            second.subscribe("jobs", group="g", order="single", retry=THREE) as standby,
        ):
            await second.publish("jobs", b"0")
            assert await active.get(timeout_s=DEADLINE_S) is not None
            await asyncio.sleep(0.2)
            channel: Any = first.engine.channel  # type: ignore[attr-defined]
            channel._task.cancel()
            channel._link.close()  # and no word of it
            event = await standby.get(timeout_s=DEADLINE_S)
            assert event is not None
            assert (event.payload, event.attempt) == (b"0", 2)
            await event.ack()


async def test_a_single_consumer_that_comes_after_the_crash_is_served(tmp_path: Path) -> None:
    """B3: the dead one goes on to be a member until its session ends, and holds up nobody."""
    settings: dict[str, Any] = {"server__session_s": 600.0}
    options: dict[str, Any] = {"group": "g", "order": "single", "retry": THREE}
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with (
            penstock.connect(broker.url()) as first,
            penstock.connect(broker.url()) as second,
            first.subscribe("jobs", **options) as dead,
        ):
            await second.publish_many("jobs", [b"0", b"1"])
            assert await dead.get(timeout_s=DEADLINE_S) is not None
            await asyncio.sleep(0.2)
            channel: Any = first.engine.channel  # type: ignore[attr-defined]
            channel._task.cancel()
            channel._link.close()  # and no word of it
            await asyncio.sleep(1.5)  # nobody else is there when it is given up
            async with second.subscribe("jobs", **options) as sub:
                events = [await sub.get(timeout_s=DEADLINE_S) for _ in range(2)]
                found = sorted((each.payload, each.attempt) for each in events if each)
                assert found == [(b"0", 2), (b"1", 1)]


async def test_a_crash_costs_no_attempt_of_what_was_only_fetched(tmp_path: Path) -> None:
    """B21: with one attempt as with many, on a folder, where the worker's process is the bus's."""
    folder = str(tmp_path / "data")
    async with penstock.connect(folder) as bus:
        await bus.publish_many("jobs", [b"%d" % number for number in range(5)])
    for crash in range(3):
        [(payload, attempt)] = await asyncio.to_thread(work, folder, "0")
        assert (payload, attempt) == ("0", crash + 1)
    assert await asyncio.to_thread(work, folder, "none") == [(str(n), 1) for n in range(1, 5)]
    async with penstock.connect(folder) as bus:
        assert [each.offset for each in await bus.dead_letters.list()] == [0]

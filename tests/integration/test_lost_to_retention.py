"""Events that retention deletes before a group read them are counted, logged and shown, and leave its lag (C13)."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

FLAGS: dict[str, Any] = {"journal__file_bytes": 1 << 20, "sealing__grace_s": 0}
TOPIC, EVENTS, DEADLINE_S = "orders", 96, 60.0
SIZE = 1 << 16


@pytest.fixture(params=["mem", "folder", "broker"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    """A bus that keeps about two megabytes of each topic."""
    process = BrokerProcess(tmp_path / "data")
    if request.param == "broker":
        url = (await asyncio.to_thread(process.start, **FLAGS)).url()
        flags: dict[str, Any] = {}
    else:
        url, flags = "mem:" if request.param == "mem" else str(tmp_path / "data"), FLAGS
    try:
        async with penstock.connect(url, **flags) as made:
            made.process = process if request.param == "broker" else None  # type: ignore[attr-defined]
            yield made
    finally:
        if request.param == "broker":
            await asyncio.to_thread(process.stop)


async def fill(bus: penstock.Bus) -> None:
    """More than is kept, and enough after it that all of it is sealed."""
    for _ in range(EVENTS):
        await bus.publish(TOPIC, random.randbytes(SIZE))


async def until(bus: penstock.Bus, group: str, condition: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            info = await bus.groups.info(group)
            if condition(info):
                return info
            await bus.publish(
                "other", random.randbytes(SIZE)
            )  # journal files close, and are sealed
            await asyncio.sleep(0.05)


async def settled(bus: penstock.Bus) -> int:
    """How many events are kept when retention is through with its work."""
    before = -1
    async with asyncio.timeout(DEADLINE_S):
        while True:
            part = (await bus.topics.info(TOPIC)).partitions[0]
            if part.first_offset == before:
                return part.end_offset - part.first_offset
            before = part.first_offset
            await asyncio.sleep(6)  # longer than one of its rounds


@pytest.mark.parametrize("mode", ["queue", "log"])
async def test_a_group_that_lost_events_says_how_many_and_its_lag_is_what_is_left(
    bus: penstock.Bus, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C13: lost and lag are together what was published, and what is left can be read to the end."""
    caplog.set_level(logging.WARNING, "penstock.engines")
    await bus.topics.create(TOPIC, retention_bytes=2 << 20)
    async with bus.subscribe(TOPIC, group="slow", mode=mode, max_inflight=1):
        pass
    await fill(bus)
    await until(bus, "slow", lambda info: info.lost > 0)
    kept = await settled(bus)
    found = await bus.groups.info("slow")
    assert (found.lag, found.lost) == (kept, EVENTS - kept)
    assert [(lane.lag, lane.lost) for lane in found.lanes] == [(kept, EVENTS - kept)]
    [listed] = [each for each in await bus.groups.list() if each.name == "slow"]
    assert (listed.lag, listed.lost) == (kept, EVENTS - kept)
    if bus.process is None:  # type: ignore[attr-defined]
        said = [each for each in caplog.records if "had not read" in each.getMessage()]
        assert len(said) == 1, "at most one line a minute for a group"
        assert said[0].group == "slow"  # type: ignore[attr-defined]
    else:
        await _seen_by_operators(bus.process, found)  # type: ignore[attr-defined]
    if mode == "queue":
        async with bus.subscribe(TOPIC, group="slow") as subscription:
            for _ in range(kept):
                event = await subscription.get(timeout_s=DEADLINE_S)
                assert event is not None
                await event.ack()
            await bus.flush()
        assert (await bus.groups.info("slow")).lag == 0


async def _seen_by_operators(process: BrokerProcess, found: Any) -> None:
    """Metrics, `/pressure`, REST and the command line say the same."""
    base = f"http://127.0.0.1:{process.ports['http']}"
    async with httpx.AsyncClient(trust_env=False, base_url=base) as client:
        metrics = (await client.get("/metrics")).text
        pressure = (await client.get("/pressure")).json()["groups"]["slow"]
        rest = (await client.get("/api/admin/groups/slow")).json()
    assert (
        f'penstock_group_lost_events_total{{group="slow",topic="{TOPIC}"}} {found.lost}.0'
        in metrics
    )
    assert f'penstock_group_lag_events{{group="slow"}} {found.lag}.0' in metrics
    for told in (pressure, rest):
        assert (told["lag"], told["lost"]) == (found.lag, found.lost)
    shown = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "group", "list", "--json",
        "--url", process.url(), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    row = next(
        each
        for each in map(json.loads, (await shown.communicate())[0].splitlines())
        if each["name"] == "slow"
    )
    assert (row["lag"], row["lost"]) == (found.lag, found.lost)


async def test_a_group_that_has_read_everything_loses_nothing(bus: penstock.Bus) -> None:
    """C13: retention of what was settled is no loss; nor is a group lost for what came before it."""
    await bus.topics.create(TOPIC, retention_bytes=2 << 20)
    async with bus.subscribe(TOPIC, group="quick") as subscription:
        for _ in range(EVENTS):
            await bus.publish(TOPIC, random.randbytes(SIZE))
            event = await subscription.get(timeout_s=DEADLINE_S)
            assert event is not None
            await event.ack()
        await bus.flush()
    async with asyncio.timeout(DEADLINE_S):
        while (await bus.topics.info(TOPIC)).partitions[0].first_offset == 0:
            await bus.publish("other", random.randbytes(SIZE))
            await asyncio.sleep(0.05)
    info = await bus.groups.info("quick")
    assert (info.lag, info.lost) == (0, 0)

"""The durability table (Y1): docs/guide/durability.md says what survives, this proves each cell."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.testing.simulation.disk import Faults

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "durability.md"
SEEDS = range(10)
INTERVAL_S = 0.05


def table() -> dict[str, tuple[str, str]]:
    """The rows of the first table: setting, what a kill leaves, what a power failure leaves."""
    rows = {}
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3 and "." not in cells[0]:
            rows[cells[0].strip("`")] = (cells[1], cells[2])
    return rows


CELLS = [
    (setting, failure, promise)
    for setting, promises in table().items()
    for failure, promise in zip(("kill", "power"), promises, strict=True)
]


def test_the_table_has_a_row_for_every_setting() -> None:
    assert set(table()) == {"always", "interval", "never"}
    promises = {promise for _, _, promise in CELLS}
    assert promises <= {"everything", "everything older than the interval", "a prefix"}


async def publish_some(bus: penstock.Bus) -> tuple[list[bytes], int]:
    """Publish one by one; returns what was acknowledged, and how many of it long ago."""
    acked: list[bytes] = []
    for number in range(15):
        payload = b"%d:" % number + b"x" * (number * 37 % 700)
        await bus.publish("orders", payload)
        acked.append(payload)
    old = len(acked)
    await asyncio.sleep(4 * INTERVAL_S)
    for number in range(15, 20):
        payload = b"%d" % number
        await bus.publish("orders", payload)
        acked.append(payload)
    return acked, old


async def everything(bus: penstock.Bus) -> list[bytes]:
    try:
        return [event.payload async for event in bus.replay("orders")]
    except penstock.UnknownTopic:
        return []


@pytest.mark.parametrize(("setting", "failure", "promise"), CELLS)
def test_what_survives(world, setting: str, failure: str, promise: str) -> None:
    lost_something = 0
    for seed in SEEDS:
        here = world(seed, durability__fsync=setting)
        if seed == 0:
            here.disk.faults = Faults(lost=1.0)  # the worst case the setting allows
        acked, old = here.run_and_die(publish_some, power=failure == "power")
        kept = here.run(everything)
        assert kept == acked[: len(kept)], f"seed {seed}: not a prefix of what was acknowledged"
        if promise == "everything":
            assert kept == acked, f"seed {seed}"
        elif promise == "everything older than the interval":
            assert len(kept) >= old, f"seed {seed}"
        lost_something += len(kept) < len(acked)
        assert here.run(everything) == kept, "a second recovery found something else"
    assert (lost_something > 0) == (promise != "everything"), "the row promises too little"


@pytest.mark.parametrize("power", [False, True])
def test_a_bus_goes_on_after_each_kind_of_death(world, power: bool) -> None:
    for setting in ("always", "interval", "never"):
        for seed in range(6):
            here = world(seed, durability__fsync=setting)
            here.run_and_die(publish_some, power=power)
            kept = here.run(everything)

            async def more(bus: penstock.Bus) -> int:
                return (await bus.publish("orders", b"after")).offset

            assert here.run(more) == len(kept)
            assert here.run(everything) == [*kept, b"after"]


def test_acks_ride_the_next_commit_and_a_flush_makes_them_durable(world) -> None:
    """The redelivery window: within it an ack may be forgotten, the attempt never is."""
    for seed in range(8):
        here = world(seed)

        async def consume(bus: penstock.Bus) -> None:
            await bus.publish_many("orders", [b"0", b"1", b"2"])
            sub = await bus.subscribe("orders", group="g").open()
            first = await sub.get(timeout_s=5)
            await first.ack()
            await bus.flush()
            second = await sub.get(timeout_s=5)
            await second.ack()  # and dies at once

        here.run_and_die(consume, power=True)

        async def again(bus: penstock.Bus) -> dict[bytes, int]:
            async with bus.subscribe("orders", group="g") as sub:
                found = {}
                while (event := await sub.get(timeout_s=2)) is not None:
                    found[event.payload] = event.attempt
                    await event.ack()
                return found

        attempts = here.run(again)
        assert b"0" not in attempts, "an ack that was flushed came again"
        assert attempts.get(b"1", 2) == 2, "the attempt before the crash was forgotten"
        assert attempts[b"2"] in (1, 2)


def test_a_failed_fsync_stops_the_writer_for_good_and_reads_go_on(world) -> None:
    here = world(3)

    async def fail(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"kept")
        here.disk.faults = Faults(failed_sync=1.0)
        with pytest.raises(penstock.WriterFailed):
            await bus.publish("orders", b"lost?")
        here.disk.faults = Faults()
        for _ in range(3):
            with pytest.raises(penstock.WriterFailed):
                await bus.publish("orders", b"never")
        assert [event.payload async for event in bus.replay("orders")] == [b"kept"]

    here.run_and_die(fail, power=True)
    kept = here.run(everything)
    assert kept[0] == b"kept"
    assert b"never" not in kept


def test_a_transaction_is_there_completely_or_not_at_all(world) -> None:
    """Q13: whatever operation the power fails in."""
    outcomes = set()
    for step in range(1, 12):
        here = world(step)

        async def transact(bus: penstock.Bus, here=here, step=step) -> None:
            await bus.publish("one", b"before")
            await bus.publish("two", b"before")
            here.disk.crash_at(here.disk.operations + step)
            async with bus.transaction() as tx:
                tx.publish("one", b"x" * 3_000)
                tx.publish_many("two", [b"y" * 3_000] * 3)

        here.run_and_die(transact, power=True)

        async def count(bus: penstock.Bus) -> tuple[int, int]:
            return (
                len([e async for e in bus.replay("one")]),
                len([e async for e in bus.replay("two")]),
            )

        found = here.run(count)
        assert found in ((1, 1), (2, 4)), f"step {step}: half a transaction"
        outcomes.add(found)
    assert (1, 1) in outcomes


def test_a_crash_at_any_step_of_sealing_loses_and_repeats_nothing(world) -> None:
    """Segment written, manifest written, journal removed: the power may fail between any two."""
    filler = [random.Random(number).randbytes(8_000) for number in range(40)]
    steps: list[int] = []

    async def seal(bus: penstock.Bus, here: Any, crash_after: int | None) -> None:
        await bus.publish_many("orders", [b"%d" % number for number in range(20)])
        await bus.publish("orders", b"once", idempotency_key="job-7")
        engine: Any = bus.engine
        async with engine.maintenance._turn:  # no sealing before all is there
            for _ in range(4):
                await bus.publish_many("filler", filler)
            start = here.disk.operations
            if crash_after is not None:
                here.disk.crash_at(start + crash_after)
        while engine.log.manifest.sealed_to < engine.journal.base:
            await engine.maintenance.settle()
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # the grace time is over: files go
        await engine.maintenance.settle()
        steps.append(here.disk.operations - start)

    async def check(bus: penstock.Bus) -> None:
        expected = [*(b"%d" % number for number in range(20)), b"once"]
        assert [event.payload async for event in bus.replay("orders")] == expected
        assert (await bus.publish("orders", b"once", idempotency_key="job-7")).offset == 20
        assert [event.payload async for event in bus.replay("filler")] == filler * 4

    here = world(1)
    here.run(lambda bus: seal(bus, here, None))
    here.run(check)
    assert steps[0] > 10
    for step in range(1, steps[0] + 1, max(1, steps[0] // 20)):
        here = world(1)
        here.run_and_die(lambda bus, here=here, step=step: seal(bus, here, step), power=True)
        here.run(check)
        here.run(check)

"""A full disk, a real one: publishes are refused, reads go on, and it recovers by itself."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import penstock
from penstock.core.routes import Route
from penstock.testing.broker_process import BrokerProcess

MIB = 1 << 20


async def fill(bus: penstock.Bus) -> int:
    dice, stored = random.Random(1), 0
    with pytest.raises(penstock.DiskFull) as caught:
        for _ in range(200):
            await bus.publish("orders", dice.randbytes(100_000))
            stored += 1
    assert caught.value.code == "rejected.disk-full"
    assert caught.value.retry_after_s > 0
    return stored


async def test_a_full_disk_refuses_publishes_serves_reads_and_recovers(small_disk, small) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\1" * (2 * MIB))
    settings = small(sealing__enabled=False)
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        stored = await fill(bus)
        assert stored >= 5
        assert len([event async for event in bus.replay("orders")]) == stored
        # Acks have room kept back for them.
        async with bus.subscribe("orders", group="g", max_inflight=3) as sub:
            event = await sub.get(timeout_s=10)
            await event.ack()
            await asyncio.wait_for(bus.flush(), 10)
        with pytest.raises(penstock.DiskFull):
            await bus.publish("orders", b"x" * 500_000)
        ballast.unlink()
        for _ in range(100):
            try:
                receipt = await bus.publish("orders", b"there is room again")
                break
            except penstock.DiskFull:
                await asyncio.sleep(0.1)
        assert receipt.offset == stored
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        events = [event async for event in bus.replay("orders")]
        assert len(events) == stored + 1
        assert events[-1].payload == b"there is room again"


async def test_a_folder_on_a_full_disk_opens_and_can_be_read(small_disk, small) -> None:
    settings = small(sealing__enabled=False)
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        await bus.publish("orders", b"before")
    with (small_disk / "ballast").open("wb") as file:
        try:
            while True:
                file.write(b"\1" * 65_536)
                file.flush()
        except OSError:
            pass
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        assert [event.payload async for event in bus.replay("orders")] == [b"before"]
        with pytest.raises(penstock.DiskFull):
            await bus.publish("orders", b"no")
    assert [event.payload async for event in _read(small_disk / "data", settings)] == [b"before"]


async def _read(path: Path, settings):
    async with penstock.connect(f"{path}?mode=ro", settings=settings) as bus:
        async for event in bus.replay("orders"):
            yield event


def take_all(folder: Path) -> Path:
    """Fill the disk to the last block; gives back the file that does."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\1" * 4_096)
        except OSError:
            pass
    return ballast


async def act(bus: penstock.Bus, first: int, count: int = 20) -> None:
    """Do what operators do, until the audit trail has outgrown its last block."""
    for offset in range(first, first + count):
        await bus.dead_letters.dead_letter(
            f"orders/0/{offset}", consumer="g", topic="orders", actor="me", reason="x" * 500
        )


async def test_an_audit_trail_without_room(small_disk, small) -> None:
    """It is not shown with gaps, nobody waits for it, it stops no start, and it catches up."""
    settings = small(sealing__enabled=False)
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        for _ in range(60):
            await bus.publish("orders", b"x")
        take_all(small_disk)
        await act(bus, 0)
        for question in (bus.audit.query, bus.audit.verify):
            with pytest.raises(penstock.DiskFull, match="audit trail lacks the last actions"):
                await asyncio.wait_for(question(), 5)
        async with asyncio.timeout(5):
            await bus.close()
    take_all(small_disk)
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        assert len([event async for event in bus.replay("orders")]) == 60
        with pytest.raises(penstock.DiskFull):
            await bus.audit.query()
        take_all(small_disk).unlink()
        await asyncio.sleep(2.5)
        await act(bus, 20)
        assert len(await bus.audit.query(operation="dlq.dead-letter")) == 40
        assert (await bus.audit.verify()).ok


async def test_dead_letters_without_room_keep_no_bus_open(small_disk, small) -> None:
    """They wait for room; a flush says so, the bus closes all the same, and they are buried later."""
    settings = small(sealing__enabled=False, delivery__max_attempts=1)
    async with penstock.connect(small_disk / "data", settings=settings) as bus:
        await bus.publish("orders", b"x" * 100_000)
        take_all(small_disk)
        async with bus.subscribe("orders", group="g") as sub:
            event = await sub.get(timeout_s=10)
            await fill(bus)
            await event.reject("broken")
            with pytest.raises(penstock.DiskFull):
                await asyncio.wait_for(bus.flush(), 5)
        async with asyncio.timeout(5):
            await bus.close()
    (small_disk / "ballast").unlink()
    async with penstock.connect(small_disk / "data", settings=settings) as bus, asyncio.timeout(10):
        while not await bus.dead_letters.list():
            await asyncio.sleep(0.05)


async def refused(bus: penstock.Bus, size: int) -> None:
    """Publish until there is no room for so many bytes."""
    with pytest.raises(penstock.DiskFull):
        while True:
            await bus.publish("orders", b"x" * size)


async def test_who_comes_to_a_full_broker_is_let_in(small_disk, tmp_path) -> None:
    """Small publishes, or a busy consumer, left no room to note a new client; and the log was silent."""
    settings = {"journal__file_bytes": MIB, "sealing__enabled": False}
    log = (tmp_path / "log").open("wb")
    broker = await asyncio.to_thread(BrokerProcess(small_disk / "data", log=log).start, **settings)
    try:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish("orders", b"x")
            take_all(small_disk)
            for size in (10_000, 1_000, 1):
                await refused(bus, size)
            async with penstock.connect(broker.url()) as late:
                assert [each.name for each in await late.topics.list()] == ["orders"]
            retry = penstock.Retry((1,), 1_000)
            async with bus.subscribe("orders", group="g", retry=retry) as events:
                while (event := await events.get(timeout_s=2)) is not None:
                    await event.nack()
            async with penstock.connect(broker.url()) as operator, asyncio.timeout(5):
                await operator.topics.configure("orders", retention_age_s=60.0)
            take_all(small_disk).unlink()
            async with asyncio.timeout(10):
                while "trouble is over  part=disk" not in (tmp_path / "log").read_text():
                    await asyncio.sleep(0.1)
            assert "warning trouble  part=disk" in (tmp_path / "log").read_text()
    finally:
        assert await asyncio.to_thread(broker.stop) == 0
        log.close()


def test_a_change_that_cannot_be_kept_is_not_in_force(world) -> None:
    """A route or schedule that was refused worked on until the restart, without an audit record."""
    here = world(22, sealing__enabled=False)

    async def full(bus: penstock.Bus) -> None:
        await bus.schedules.put("there", "jobs.run", b"old", every="1h")
        await bus.publish("orders", b"x")
        here.disk.capacity_bytes = 0
        with pytest.raises(penstock.DiskFull, match="nothing was changed"):
            await bus.routes.put(Route("orders.#", "billing"))
        assert await bus.routes.list() == []
        with pytest.raises(penstock.DiskFull):
            for number in range(100_000):
                await bus.topics.create(f"topic{number}")
        for name in ("there", "new"):
            with pytest.raises(penstock.DiskFull):
                await bus.schedules.put(name, "jobs.run", b"new", every="2h")
        assert [(each.id, each.payload) for each in await bus.schedules.list()] == [
            ("there", b"old")
        ]
        here.disk.capacity_bytes = None
        await asyncio.sleep(5)
        assert {each.operation for each in await bus.audit.query()} == {"schedule.put"}

    here.run(full)

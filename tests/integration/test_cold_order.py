"""Events that are read from files reach a consumer in order, like those at hand (Y3, Y6, X2)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock import errors
from penstock.core.delivery import MAX_LEASE_EVENTS
from penstock.engines.embedded.delivery import LeasedRange
from penstock.engines.embedded.engine import EmbeddedEngine

TOPIC = "orders"
COLD = 2 * MAX_LEASE_EVENTS
WARM = 500
DEADLINE_S = 10.0


class Reader:
    """In place of the readers' threads: each read waits for what the test wants."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._read, self._load = engine.runtime.read, engine.log.load
        self.begun = 0
        self.wait: Callable[[int], Any] = lambda number: asyncio.sleep(0)
        engine.runtime.read = self.read  # type: ignore[method-assign]

    async def read(self, function: Any, *args: Any) -> Any:
        if function == self._load:  # not what maintenance reads
            self.begun += 1
            await self.wait(self.begun)
        return await self._read(function, *args)


def engine(bus: penstock.Bus) -> EmbeddedEngine:
    assert isinstance(bus.engine, EmbeddedEngine)
    return bus.engine


@pytest_asyncio.fixture
async def bus(tmp_path: Path, small: Any) -> AsyncIterator[penstock.Bus]:
    """Two leases of events in files, and half a lease of events in memory behind them."""
    settings = small(limits__cache_bytes=1 << 20)
    async with penstock.connect(tmp_path, settings=settings) as before:
        await before.publish_many(TOPIC, [b"%d" % number for number in range(COLD)])
    async with penstock.connect(tmp_path, settings=settings) as bus:
        await bus.publish_many(TOPIC, [b"%d" % number for number in range(COLD, COLD + WARM)])
        yield bus


async def taken(sub: penstock.Subscription, count: int) -> list[int]:
    """The offsets of the next events, which are acked."""
    offsets = []
    for _ in range(count):
        event = await sub.get(timeout_s=DEADLINE_S)
        assert event is not None
        assert event.attempt == 1
        offsets.append(event.offset)
        await event.ack()
    return offsets


@pytest.mark.parametrize("order", ["any", "single"])
async def test_a_slow_read_is_not_overtaken(bus: penstock.Bus, order: Any) -> None:
    """Found by review: each lease was read by a task of its own, and put when it was there."""
    reader = Reader(engine(bus))
    reader.wait = lambda number: asyncio.sleep(0.2 / number)
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000, order=order) as sub:
        assert await taken(sub, COLD + WARM) == list(range(COLD + WARM))
        await bus.publish(TOPIC, b"next")
        assert await taken(sub, 1) == [COLD + WARM]


async def test_leases_are_read_side_by_side(bus: penstock.Bus) -> None:
    reader, both = Reader(engine(bus)), asyncio.Barrier(2)
    reader.wait = lambda number: asyncio.wait_for(both.wait(), DEADLINE_S)
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert await taken(sub, COLD + WARM) == list(range(COLD + WARM))


async def test_what_is_read_waits_until_the_last_was_taken(
    bus: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q7: of all that a consumer was leased, a few pieces lie in memory."""
    monkeypatch.setattr("penstock.log.event_log.READ_BYTES", 1)
    for _ in range(6):
        await bus.publish(TOPIC, bytes(1 << 19))  # more than is kept at hand
    end = COLD + WARM + 6
    reader = Reader(engine(bus))
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        event = await sub.get(timeout_s=DEADLINE_S)
        assert event is not None
        await asyncio.sleep(0.1)
        assert (await bus.groups.info("g")).outstanding == end
        assert reader.begun <= 4, (
            "one in hand, one at hand, and one of each lease that is read ahead"
        )
        await event.ack()
        assert await taken(sub, end - 1) == list(range(1, end))


async def test_what_was_taken_back_is_not_read(
    bus: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4, found by review: all of a lease was read for nobody, before what came again."""
    monkeypatch.setattr("penstock.log.event_log.READ_BYTES", 1)
    for _ in range(20):
        await bus.publish("large", bytes(1 << 19))  # more than is kept at hand
    reader = Reader(engine(bus))
    async with bus.subscribe("large", group="g", max_inflight=20) as sub:
        event = await sub.get(timeout_s=DEADLINE_S)
        assert event is not None
        dispatcher = engine(bus).dispatcher
        [inbox] = dispatcher._inboxes.values()
        [lease] = inbox.member.leases.values()
        kept = LeasedRange(inbox.group, lease, 0, 1, lambda: 0.0, lambda group: None)
        begun = reader.begun
        dispatcher.take_back(inbox, [kept])
        again = [await sub.get(timeout_s=DEADLINE_S) for _ in range(19)]
        assert [each.offset - event.offset for each in again if each] == list(range(1, 20))
        assert reader.begun - begun <= 20


async def test_members_do_not_wait_for_each_other(bus: penstock.Bus) -> None:
    reader, gate = Reader(engine(bus)), asyncio.Event()

    async def wait(number: int) -> None:
        if number == 1:
            await gate.wait()

    reader.wait = wait
    async with (
        bus.subscribe(TOPIC, group="g", max_inflight=MAX_LEASE_EVENTS) as first,
        bus.subscribe(TOPIC, group="g", max_inflight=MAX_LEASE_EVENTS) as second,
    ):
        offsets = await taken(second, COLD + WARM - MAX_LEASE_EVENTS)
        assert offsets == list(range(MAX_LEASE_EVENTS, COLD + WARM))
        gate.set()
        assert await taken(first, MAX_LEASE_EVENTS) == list(range(MAX_LEASE_EVENTS))


@pytest.mark.parametrize(
    "error", [errors.Corrupted("unreadable", path="a", position=0), OSError("unreadable")], ids=repr
)
async def test_behind_what_cannot_be_read_nothing_comes(
    bus: penstock.Bus, error: Exception
) -> None:
    """The consumer hears why; what it was leased returns to the group and costs no attempt."""
    reader = Reader(engine(bus))
    read = reader._read

    async def fails(function: Any, *args: Any) -> Any:
        if function == reader._load and args[-2] == 0:  # the offset
            await asyncio.sleep(0.05)
            raise error
        return await read(function, *args)

    reader._read = fails
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        with pytest.raises(penstock.PenstockError, match="unreadable"):
            await sub.get(timeout_s=DEADLINE_S)
    reader._read = read
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert sorted(await taken(sub, COLD + WARM)) == list(range(COLD + WARM))


async def test_what_retention_took_meanwhile_is_skipped_in_its_place(
    bus: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, first = engine(bus).log, MAX_LEASE_EVENTS - 24
    plan = log.plan

    def overtaken(topic: str, partition: int, offset: int, limit: int) -> Any:
        if topic == TOPIC and offset < first:
            raise errors.OffsetExpired(
                "gone", topic=topic, partition=partition, first_offset=first, end_offset=COLD + WARM
            )
        return plan(topic, partition, offset, limit)

    monkeypatch.setattr(log, "plan", overtaken)
    Reader(engine(bus)).wait = lambda number: asyncio.sleep(0.2 / number)
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert await taken(sub, COLD + WARM - first) == list(range(first, COLD + WARM))
    assert (await bus.groups.info("g")).lag == 0


async def test_who_leaves_while_events_are_read_leaves_them_to_the_next(bus: penstock.Bus) -> None:
    reader, gate = Reader(engine(bus)), asyncio.Event()
    reader.wait = lambda number: gate.wait()
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert await sub.get(timeout_s=0.1) is None
        assert reader.begun == 2
    gate.set()
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert sorted(await taken(sub, COLD + WARM)) == list(range(COLD + WARM))


async def test_a_topic_may_be_deleted_while_it_is_read(bus: penstock.Bus) -> None:
    reader, gate = Reader(engine(bus)), asyncio.Event()

    async def wait(number: int) -> None:
        if number == 1:
            await gate.wait()

    reader.wait = wait
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000) as sub:
        assert await sub.get(timeout_s=0.1) is None
        await bus.topics.delete(TOPIC, confirm="DELETE")
        gate.set()
        await bus.publish("others", b"1")
        async with bus.subscribe("others", group="h") as other:
            assert await taken(other, 1) == [0]


async def test_a_bus_may_be_closed_while_events_are_read(bus: penstock.Bus) -> None:
    reader = Reader(engine(bus))
    reader.wait = lambda number: asyncio.sleep(3_600)
    sub = await bus.subscribe(TOPIC, group="g", max_inflight=5_000).open()
    assert await sub.get(timeout_s=0.1) is None
    async with asyncio.timeout(DEADLINE_S):
        await bus.close()
    assert not engine(bus).dispatcher._file_reads._tasks


async def test_keys_are_read_once_however_often_a_group_is_looked_at(bus: penstock.Bus) -> None:
    """Q7, found by review: each ack and each publish meanwhile began to read them anew."""
    reader, gate = Reader(engine(bus)), asyncio.Event()
    reader.wait = lambda number: gate.wait()
    async with bus.subscribe(TOPIC, group="g", max_inflight=5_000, order="key") as sub:
        for _ in range(10):
            await bus.publish(TOPIC, b"more")
        assert reader.begun == 1
        gate.set()
        assert await taken(sub, COLD + WARM + 10) == list(range(COLD + WARM + 10))


async def test_a_topic_may_be_deleted_while_its_keys_are_read(
    bus: penstock.Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.log.event_log.READ_BYTES", 1)
    for _ in range(6):
        await bus.publish("large", bytes(1 << 19), key="k")  # more than is kept at hand
    reader, gate = Reader(engine(bus)), asyncio.Event()
    reader.wait = lambda number: gate.wait()
    async with bus.subscribe("large", group="g", order="key") as sub:
        assert await sub.get(timeout_s=0.1) is None
        await bus.topics.delete("large", confirm="DELETE")
        gate.set()
        assert await sub.get(timeout_s=0.1) is None
    gc.collect()
    assert "never retrieved" not in caplog.text

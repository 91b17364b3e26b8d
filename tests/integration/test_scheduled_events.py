"""Scheduled events are published when due, next to bad ones and after a full disk (T7, T11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.engines.embedded import schedules
from penstock.testing.simulation.disk import SimDisk

WAIT_S = 3.0
LABELS = [
    {"penstock-expires-us": "soon"},
    {"penstock-expires-us": "9" * 20},
    {"penstock-partition": "7"},
    {"penstock-partition": "-1"},
    {"penstock-priority": "9999"},
]


async def stored(bus: penstock.Bus, topic: str) -> list[penstock.Event]:
    try:
        return [event async for event in bus.replay(topic)]
    except errors.UnknownTopic:
        return []


async def arrived(bus: penstock.Bus, topic: str) -> list[penstock.Event]:
    """The events of a topic, as soon as there are any."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await stored(bus, topic)):
            await asyncio.sleep(0.02)
    return found


async def test_a_delay_for_a_partition_that_is_not_there_is_refused(mem: penstock.Bus) -> None:
    """It was taken, could not be published when its time came, and nothing scheduled came any more."""
    with pytest.raises(errors.UnknownTopic, match="partitions 0 to 0, not 9"):
        await mem.publish("jobs.run", b"x", delay_s=0.01, partition=9)
    await mem.publish("jobs.run", b"y", delay_s=0.05)
    assert [event.payload for event in await arrived(mem, "jobs.run")] == [b"y"]


@pytest.mark.parametrize("headers", LABELS, ids=str)
async def test_headers_called_like_the_labels_of_delayed_events(
    mem: penstock.Bus, headers: dict[str, str]
) -> None:
    """One such header stopped everything scheduled, or the whole bus, and again at every start."""
    await mem.publish("jobs.run", b"x", delay_s=0.01, headers={**headers, "mine": "1"})
    await mem.publish("jobs.later", b"y", delay_s=0.05)
    (event,) = await arrived(mem, "jobs.run")
    assert dict(event.headers) == {"mine": "1"}
    assert await arrived(mem, "jobs.later")
    assert (await mem.publish("jobs.run", b"z")).offset == 1


@pytest.mark.parametrize("headers", LABELS, ids=str)
async def test_such_headers_that_lie_in_the_log_already(
    mem: penstock.Bus, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as as_before:
        as_before.setattr(schedules, "LABELS", ())
        await mem.publish("jobs.run", b"x", delay_s=0.2, headers=headers)
    assert len(await arrived(mem, "jobs.run")) == 1


async def test_a_topic_that_has_fewer_partitions_when_the_time_comes(mem: penstock.Bus) -> None:
    await mem.topics.create("jobs.run", partitions=4)
    await mem.publish("jobs.run", b"x", delay_s=0.2, partition=3)
    await mem.topics.delete("jobs.run", confirm="DELETE")
    await mem.publish("jobs.later", b"y", delay_s=0.3)
    assert len(await arrived(mem, "jobs.run")) == 1
    assert await arrived(mem, "jobs.later")


async def test_one_that_cannot_be_published_holds_up_no_other(
    mem: penstock.Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage, say: it is logged, and the others come."""
    engine: Any = mem.engine
    read = engine.event_at

    async def damaged(topic: str, partition: int, offset: int) -> penstock.Event:
        if topic == schedules.SCHEDULED and offset == 1:
            raise errors.Corrupted("a checksum does not match")
        return await read(topic, partition, offset)  # type: ignore[no-any-return]

    monkeypatch.setattr(engine, "event_at", damaged)
    for number in range(3):
        await mem.publish(f"jobs.run{number}", b"x", delay_s=0.1)
    assert await arrived(mem, "jobs.run0")
    assert await arrived(mem, "jobs.run2")
    assert not await stored(mem, "jobs.run1")
    assert "a delayed event cannot be published: a checksum does not match" in caplog.text


def test_a_tick_that_finds_the_disk_full_comes_when_there_is_room(world) -> None:
    """A daily job whose minute it was did not run that day, and nothing counted it."""
    here = world(21, sealing__enabled=False)

    async def full(bus: penstock.Bus) -> None:
        disk: SimDisk = here.disk
        for name in ("daily", "weekly"):
            await bus.schedules.put(name, f"jobs.{name}", b"x", every="10m")
        disk.capacity_bytes = 0
        for size in (10_000, 1):
            with pytest.raises(errors.DiskFull):
                while True:
                    await bus.publish("filler", b"x" * size)
        await asyncio.sleep(1_500)
        assert not [each for each in await bus.topics.list() if each.name.startswith("jobs.")]
        disk.capacity_bytes = None
        await asyncio.sleep(5)
        for name in ("daily", "weekly"):
            assert len(await stored(bus, f"jobs.{name}")) == 1, name
        assert [each.missed for each in await bus.schedules.list()] == [1, 1]

    here.run(full)


async def test_what_is_put_by_hand_is_held_to_the_limits_of_a_publish() -> None:
    """T7, T8: a schedule published what a publish was refused, again and again."""
    limits = {"limits__max_payload_bytes": 1_000, "limits__max_batch_bytes": 10_000}
    headers = {"limits__max_headers": 2, "limits__max_headers_bytes": 100}
    async with penstock.connect("mem:", **limits, **headers) as bus:
        for wrong in ({"value": bytes(1_001)}, {"value": b"x", "headers": {"a": "x" * 100}}):
            with pytest.raises(errors.InvalidInput, match="nothing was stored"):
                await bus.schedules.put("tick", "jobs.tick", every="1h", **wrong)
        with pytest.raises(errors.InvalidHeaders):
            await bus.schedules.put("tick", "jobs.tick", b"x", every="1h", headers=dict.fromkeys("abc", ""))  # fmt: skip
        assert await bus.schedules.list() == []
        await bus.schedules.put("tick", "jobs.tick", bytes(1_000), every="10ms", headers={"a": "x", "b": "y"})  # fmt: skip
        assert (await arrived(bus, "jobs.tick"))[0].headers["penstock-schedule"] == "tick"
        by_hand: dict[str, Any] = {"consumer": "mail", "topic": "jobs.run", "reason": "lost", "actor": "ann"}  # fmt: skip
        with pytest.raises(errors.PayloadTooLarge):
            await bus.dead_letters.dead_letter("mail-7", payload=bytes(1_001), **by_hand)
        assert (await bus.dead_letters.dead_letter("mail-7", payload=bytes(1_000), **by_hand)).id

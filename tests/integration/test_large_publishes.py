"""Publishes over a broker that are large, with tokens, delays and limits: stored once, or refused at once (T1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock import errors
from penstock.model.settings_loader import load
from penstock.server.daemon import Daemon

MIB = 1 << 20
LARGE = bytes(100_000)  # travels beside the message


async def started(folder: Path, **server: Any) -> Daemon:
    here = {f"server.{name}": "127.0.0.1:0" for name in ("tcp", "zmq")}
    flags = {f"server.{name}": value for name, value in server.items()}
    off = {"server.http": "", "server.pub": ""}
    daemon = Daemon(folder / "data", load(None, {}, {**off, **here, **flags}))
    await daemon.start()
    return daemon


def url(daemon: Daemon, transport: str) -> str:
    scheme = "penstock" if transport == "tcp" else "penstock+zmq"
    return f"{scheme}://127.0.0.1:{daemon.ports[transport]}"


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    daemon = await started(tmp_path)
    async with penstock.connect(url(daemon, "tcp"), client__deadline_s=30.0) as bus:
        yield bus
    await daemon.stop()


async def test_the_largest_payload_has_room_for_a_key(bus: penstock.Bus) -> None:
    """T1: 64 MiB, as much as a message may have; so it does not travel in the message."""
    first = await bus.publish("a.b", bytes(64 * MIB), idempotency_key="k")
    again = await bus.publish("a.b", bytes(64 * MIB), idempotency_key="k")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.offset == first.offset


@pytest.mark.parametrize("partitions", [1, 3])
async def test_of_a_large_publish_only_what_is_new_is_stored(
    bus: penstock.Bus, partitions: int
) -> None:
    """T1: a hundred events with keys, some of which came before, and the same again."""
    await bus.topics.create("a.b", partitions=partitions)

    async def publish(numbers: range) -> int:
        receipt = await bus.publish_many(
            "a.b",
            [b"%d" % number for number in numbers],
            keys=[b"%d" % number for number in numbers],
            idempotency_keys=[str(number) for number in numbers],
        )
        return sum(each.count for each in leaves(receipt) if not each.duplicate)

    assert await publish(range(100)) == 100
    assert await publish(range(60, 160)) == 60
    assert await publish(range(60, 160)) == 0
    stored = [int(event.payload) async for event in bus.replay("a.b")]
    assert sorted(stored) == list(range(160))


def leaves(receipt: penstock.Receipt) -> list[penstock.Receipt]:
    return [leaf for part in receipt.parts for leaf in leaves(part)] if receipt.parts else [receipt]


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}], ids=["plain", "key"])
async def test_a_large_payload_can_wait_for_its_time(
    bus: penstock.Bus, options: dict[str, Any]
) -> None:
    """T1, Q1: it comes as a batch, of which the broker made a delayed draft without events, and ended."""
    receipt = await bus.publish(
        "a.b", LARGE, key="k", headers={"x": "y"}, priority=3, delay_s=0.05, **options
    )
    assert receipt.scheduled
    async with bus.subscribe("a.b", group="g", start="earliest") as events:
        event = await events.get(timeout_s=10)
    assert event is not None
    assert (event.payload, event.key, dict(event.headers)) == (LARGE, b"k", {"x": "y"})
    assert event.priority == 3


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_a_frame_over_the_limit_of_the_broker_is_refused_at_once(
    tmp_path: Path, transport: str
) -> None:
    """T1, T4: without a word to the broker, and the session goes on over this connection and the next."""
    daemon = await started(tmp_path, max_frame_bytes=MIB)
    async with penstock.connect(url(daemon, transport), client__deadline_s=5.0) as bus:
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        link = channel._link
        with pytest.raises(errors.PayloadTooLarge, match="nothing was sent"):
            await bus.publish("a.b", bytes(2 * MIB))
        await bus.publish("a.b", b"y")
        assert channel._link is link
        link.close()
        channel._lost("cut by the test")
        async with asyncio.timeout(3):
            await bus.publish("a.b", b"z")
        assert channel._link not in (None, link)
        small = await asyncio.gather(*(bus.publish("a.b", bytes(60_000)) for _ in range(40)))
        assert len(small) == 40
    await daemon.stop()

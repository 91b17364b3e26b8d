"""`client.linger_ms`: publishes that wait a little for others share a frame."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.wire.frame import Kind

TURNS = 10  # of the loop, between two publishes


async def frames_of_two(url: str, linger_ms: int) -> int:
    """How many frames two publishes take that come some turns of the loop apart."""
    async with penstock.connect(url, client__linger_ms=linger_ms) as bus:
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        kinds: list[Kind] = []
        begin = channel.begin

        def counted(kind: Kind, *args: Any, **options: Any) -> Any:
            kinds.append(kind)
            return begin(kind, *args, **options)

        channel.begin = counted
        first = asyncio.create_task(bus.publish("orders.created", b"one"))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        receipts = await asyncio.gather(first, bus.publish("orders.created", b"two"))
        assert receipts[1].offset == receipts[0].offset + 1
        return kinds.count(Kind.PUBLISH)


async def test_publishes_that_linger_share_a_frame(tmp_path: Path) -> None:
    """Row Y3: without it each turn of the loop sends its own; both are durable either way."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        assert await frames_of_two(broker.url(), 0) == 2
        assert await frames_of_two(broker.url(), 1_000) == 1

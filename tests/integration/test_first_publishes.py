"""The first publishes to a topic that is made for them stay in the order they came (T2, X2)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import penstock


async def test_nobody_overtakes_who_waits_for_a_new_topic(tmp_path: Path) -> None:
    """A topic is known before it is durable; who comes in between still waits behind the others."""
    async with penstock.connect(str(tmp_path / "data")) as bus:
        for number in range(5):
            topic = f"orders.new{number}"
            calls = []
            for each in range(40):
                calls.append(asyncio.create_task(bus.publish(topic, b"%d" % each)))
                await asyncio.sleep(0)
            offsets = [receipt.offset for receipt in await asyncio.gather(*calls)]
            assert offsets == sorted(offsets)

"""Publishes to one topic stay in the order they came, whatever they have to wait for (T2, X2)."""

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


async def test_nobody_overtakes_who_waits_for_room(tmp_path: Path) -> None:
    """X2: when more waits for the disk than may, those who come when there is room again are behind."""
    names = ("pending_max", "commit_max", "tenant_quantum", "side_file")
    small = {f"journal__{name}_bytes": 64 << 10 for name in names}
    async with penstock.connect(str(tmp_path / "data"), **small) as bus:
        await bus.topics.create("orders.many")
        calls = []
        for each in range(600):
            payload = b"x" * (40_000 if each % 3 else 10)
            calls.append(asyncio.create_task(bus.publish("orders.many", payload)))
            if not each % 4:
                await asyncio.sleep(0.0005)  # commits end meanwhile, and there is room again
        offsets = [receipt.offset for receipt in await asyncio.gather(*calls)]
        assert offsets == sorted(offsets)


async def test_nobody_overtakes_who_pays_for_sealing(tmp_path: Path) -> None:
    """X2: publishes are paced while sealing is behind; when it is not any more, none is first."""
    async with penstock.connect(str(tmp_path / "data")) as bus:
        await bus.topics.create("orders.paced")
        sealing_backlog = bus.engine.sealing_backlog
        sealing_backlog.backlog_bytes = bus.engine.settings.sealing.backlog_max_bytes
        calls = []
        for each in range(30):
            payload = b"x" * (100_000 if each % 3 else 10)
            calls.append(asyncio.create_task(bus.publish("orders.paced", payload)))
            await asyncio.sleep(0.001)
            if each == 15:
                sealing_backlog.backlog_bytes = 0
        offsets = [receipt.offset for receipt in await asyncio.gather(*calls)]
        assert offsets == sorted(offsets)

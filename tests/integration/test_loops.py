"""The broker and its clients on both event loops: asyncio's own, and uvloop (extra `speed`)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

uvloop = pytest.importorskip("uvloop")

WORK = """
import asyncio, sys
import penstock

async def work(url):
    async with penstock.connect(url) as bus:
        await bus.topics.create("loops")
        large = bytes(range(256)) * 4096
        async with bus.subscribe("loops", group="g") as events:
            await bus.publish("loops", b"small")
            await bus.publish("loops", large)
            found = []
            for _ in range(2):
                event = await anext(events)
                found.append(event.payload)
                await event.ack()
        assert found == [b"small", large], [len(each) for each in found]
        await bus.flush()

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(work(sys.argv[1]))
else:
    asyncio.run(work(sys.argv[1]))
"""


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
@pytest.mark.parametrize("client", ["uvloop", "asyncio"])
@pytest.mark.parametrize("server", ["uvloop", "asyncio"])
def test_both_ends_on_either_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, client: str, transport: str
) -> None:
    if server == "asyncio":  # as if the extra were not installed
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden" / "uvloop.py").write_text("raise ImportError('hidden by the test')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    with BrokerProcess(tmp_path / "data").start() as broker:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        script = [sys.executable, "-c", WORK, broker.url(transport), client]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert asyncio.run(_stored(tmp_path / "data")) == 2


def test_retries_that_are_due_in_a_moment_on_uvloop(tmp_path: Path) -> None:
    """There, a timer of less than half a millisecond does not know its time."""

    async def publish(bus: penstock.Bus) -> None:
        for _ in range(100):
            await bus.publish("loops", b"x")

    async def work() -> list[int]:
        async with penstock.connect(tmp_path / "data") as bus:
            await bus.topics.create("loops")
            attempts: list[int] = []
            async with asyncio.timeout(60), bus.subscribe("loops", group="g") as events:
                publishing = asyncio.create_task(publish(bus))
                while len(attempts) < 300:
                    event = await anext(events)
                    attempts.append(event.attempt)
                    if event.attempt < 3:
                        await event.nack(delay_s=0.0004)
                    else:
                        await event.ack()
                await publishing
            return attempts

    assert sorted(uvloop.run(work())) == [1] * 100 + [2] * 100 + [3] * 100


async def _stored(folder: Path) -> int:
    async with penstock.connect(f"{folder}?mode=ro") as bus:
        return len([event async for event in bus.replay("loops")])

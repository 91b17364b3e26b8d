"""A follower in another process sees committed data only, while the writer runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).resolve().parent.parent

FOLLOW = """
    import asyncio, sys, penstock
    async def main():
        async with penstock.connect(sys.argv[1] + "?mode=ro") as bus:
            async with bus.subscribe("orders", mode="log", start="earliest") as events:
                print("open", flush=True)
                async for event in events:
                    print(event.offset, event.payload.decode(), flush=True)
                    if event.payload == b"end":
                        return
    asyncio.run(main())
"""


async def test_a_follower_in_another_process_sees_everything_once_in_order(tmp_path, small) -> None:
    async with penstock.connect(tmp_path / "data", settings=small()) as bus:
        await bus.publish("orders", b"0")
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(FOLLOW), str(tmp_path / "data")],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        try:
            assert await asyncio.to_thread(process.stdout.readline) == "open\n"
            for number in range(1, 200):
                await bus.publish("orders", b"%d" % number)
                if number % 50 == 0:
                    await bus.publish_many("filler", [b"x" * 90_000] * 10)
            await bus.publish("orders", b"end")
            # Not communicate(), which forgets what readline() read ahead.
            out = await asyncio.to_thread(process.stdout.read)
            assert await asyncio.to_thread(process.wait, 30) == 0
        finally:
            process.kill()
            process.communicate()
    lines = [line.split() for line in out.splitlines()]
    assert lines == [[str(n), str(n)] for n in range(200)] + [["200", "end"]]


def follower(here) -> penstock.Bus:
    from penstock.engines.embedded.follower import FollowerEngine
    from penstock.engines.embedded.runtime import Runtime

    engine = FollowerEngine(here.disk, here.settings, Runtime())
    return penstock.Bus(engine, here.settings, penstock.Identity(), engine.capabilities)


def test_what_is_written_and_not_synced_is_not_seen(world) -> None:
    """DESIGN, what will bite: a reader must never see what a power failure can take back."""
    here = world(4)

    async def watch(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"committed")
        reader = follower(here)
        await reader.open()
        journal = bus.engine.journal
        write, seen = journal.write, []

        def unsynced(commit, *, sync):
            write(commit, sync=False)
            seen.append(len(here.disk.snapshot()))

        journal.write = unsynced
        await bus.publish("orders", b"in the page cache")
        assert seen
        assert [e.payload async for e in reader.replay("orders")] == [b"committed"]
        journal.write = write
        await bus.publish("orders", b"synced")
        assert len([e async for e in reader.replay("orders")]) == 3
        await reader.close()

    here.run(watch)


async def test_a_follower_only_reads(tmp_path, small) -> None:
    async with penstock.connect(tmp_path / "data", settings=small()) as bus:
        await bus.publish("orders", b"a")
        async with bus.subscribe("orders", group="g"):
            pass
        async with penstock.connect(f"{tmp_path}/data?mode=ro") as reader:
            calls = [
                lambda: reader.publish("orders", b"b"),
                lambda: reader.topics.create("new"),
                lambda: reader.topics.delete("orders", confirm="DELETE"),
                lambda: reader.groups.reset("g", "earliest", confirm="RESET"),
                lambda: reader.subscribe("orders", group="g").open(),
                lambda: reader.subscribe("orders", group="l", mode="log").open(),
            ]
            for call in calls:
                with pytest.raises(penstock.Unsupported):
                    await call()
            assert [topic.name for topic in await reader.topics.list()] == ["orders"]
            assert (await reader.groups.info("g")).lag == 1
            assert (await reader.audit.verify()).ok
            await bus.publish("orders", b"b")
            assert [e.payload async for e in reader.replay("orders")] == [b"a", b"b"]

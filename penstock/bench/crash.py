"""Makes a folder the way kill -9 leaves it: every event leased to a consumer, none acked.

Run as a process of its own, `python -m penstock.bench.crash FOLDER EVENTS`, which ends by killing
itself: a bus that is closed gives its leases back first.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

import penstock
from penstock.bench.case import Window
from penstock.model.errors import PenstockError
from penstock.model.settings import Sealing, Settings

TOPIC = "bench.leased"
GROUP = "workers"
# Longer than any run: what was handed out stays out.
LEASE_S = 3_600.0
PRODUCERS = 8
# All of it is to be recovered from the journal, nothing from segments.
SETTINGS = Settings(sealing=Sealing(enabled=False))


async def leave_leased(folder: Path, events: int) -> None:
    """Publish events to a consumer that takes them and never answers; returns when all are out."""
    window = Window(seconds=0, folder=folder, shared=folder)
    batches = itertools.cycle(window.batches())
    left = iter(range(events // window.batch_events))
    bus = await penstock.connect(folder, settings=SETTINGS).open()
    await bus.topics.create(TOPIC)
    sub = await bus.subscribe(TOPIC, group=GROUP, max_inflight=events, lease_s=LEASE_S).open()

    async def produce() -> None:
        for _ in left:
            await bus.publish_many(TOPIC, next(batches))

    await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
    wanted = events // window.batch_events * window.batch_events
    while (await bus.groups.info(GROUP)).outstanding < wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await sub.get()  # the first event was handed over, so that it is an attempt
    await bus.flush()


async def crash(folder: Path, events: int) -> None:
    """Have another process do it and die."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from penstock.bench.crash import main; main()",
        str(folder),
        str(events),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        code = await child.wait()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    if code != -signal.SIGKILL:
        raise PenstockError(
            f"the process that was to leave a crashed folder ended with {code}; what it printed "
            "says why",
            exit_code=code,
        )


def main() -> None:
    """Make the folder and die."""
    folder, events = sys.argv[1:]
    asyncio.run(leave_leased(Path(folder), int(events)))
    os.kill(os.getpid(), signal.SIGKILL)

"""Full rate for a long time: does memory stay where it is, does the disk, and what rate is kept?

    python -m penstock.bench.soak --minutes 10
    python -m penstock.bench.soak --gigabytes 20

Publishes as the case `publish-batched` does, with retention by size so that the disk stays bounded.
Ends with 1 when memory grows or the folder holds more than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.case import PAYLOAD_BYTES, Window
from penstock.bench.cases.publish import BATCHED_TOPICS
from penstock.bench.cases.workload import (
    PRODUCERS,
    DiskWrites,
    embedded,
    make_topics,
    open_bus,
    sealed,
    together,
)
from penstock.model.settings import GIB, Retention, Sealing, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from penstock.bus.bus import Bus

READING_S = 10.0
BURST_S = 30.0  # what a queue of work takes at once, before sealing sets the pace
WARM_S = 120.0  # caches fill and the allocator settles in the first two minutes
MAX_SLOPE_MB_PER_MIN = 1.0
# Segments replaced and journal files sealed a moment ago still lie there: bounded, not zero.
MAX_FOLDER_SHARE = 1.3
SPARE_FILES = 2  # the journal file in use and the one made ready behind it
KEEP_BYTES = 4 * GIB
# A sealing backlog counts towards what is kept, so it may only be a part of it.
SETTINGS = Settings(
    retention=Retention(age_s=None, max_bytes=KEEP_BYTES),
    sealing=Sealing(backlog_max_bytes=GIB, grace_s=5.0),
)
SETTLE_TIMEOUT_S = 300.0
QUIET_S = 12.0  # housekeeping looks every 5 s: twice that without a change, and it is done


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of the process and its folder at one moment."""

    at_s: float
    events: int
    rss_mb: float
    sealer_rss_mb: float
    folder_mb: float
    backlog_mb: float


class Soak:
    """One run: publishes until its end, and takes a reading every ten seconds."""

    def __init__(self, bus: Bus, folder: Path, seconds: float, journal_bytes: float) -> None:
        self.readings: list[Reading] = []
        self.events = 0
        self._bus = bus
        self._folder = folder
        self._seconds = seconds
        self._journal_bytes = journal_bytes
        self._start = time.perf_counter()

    @property
    def running(self) -> bool:
        """Whether neither the time nor the bytes asked for are reached."""
        elapsed_s = time.perf_counter() - self._start
        return elapsed_s < self._seconds and (
            embedded(self._bus).journal.position < self._journal_bytes
        )

    async def run(self) -> None:
        """Publish at full rate until the end."""
        window = Window(seconds=0, folder=self._folder, shared=self._folder)
        batches = itertools.cycle(window.batches())
        topics = itertools.cycle(await make_topics(self._bus, BATCHED_TOPICS))

        async def produce() -> None:
            while self.running:
                batch = next(batches)
                await self._bus.publish_many(next(topics), batch)
                self.events += len(batch)

        self._start = time.perf_counter()
        watching = asyncio.create_task(self._watch())
        try:
            await together(*(produce() for _ in range(PRODUCERS)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        last_s = self.readings[-1].at_s if self.readings else 0.0
        if time.perf_counter() - self._start > last_s + 1:  # else the rate would be noise
            await self.read()

    async def _watch(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(self._start + number * READING_S - time.perf_counter())
            await self.read()

    async def read(self) -> None:
        """Take a reading and print it."""
        folder_bytes = await asyncio.to_thread(disk_bytes, self._folder)
        reading = Reading(
            at_s=round(time.perf_counter() - self._start, 1),
            events=self.events,
            rss_mb=round(rss_mb(os.getpid()), 1),
            sealer_rss_mb=round(sum(map(rss_mb, children())), 1),
            folder_mb=round(folder_bytes / 1e6, 1),
            backlog_mb=round(unsealed_bytes(self._bus) / 1e6, 1),
        )
        before = self.readings[-1] if self.readings else Reading(0, 0, 0, 0, 0, 0)
        self.readings.append(reading)
        rate = (reading.events - before.events) / max(reading.at_s - before.at_s, 1e-9)
        print(
            f"{reading.at_s:6.0f} s  {rate:10,.0f} events/s  RSS {reading.rss_mb:7.1f} MB  "
            f"sealing process {reading.sealer_rss_mb:7.1f} MB  folder {reading.folder_mb:8.1f} MB  "
            f"unsealed {reading.backlog_mb:7.1f} MB",
            flush=True,
        )

    async def settle(self) -> None:
        """Wait until everything closed is sealed and what was replaced is deleted."""
        await sealed(self._bus)
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            last = -1
            while (now := await asyncio.to_thread(disk_bytes, self._folder)) != last:
                last = now
                await asyncio.sleep(SETTINGS.sealing.grace_s + QUIET_S)


def slope_mb_per_min(readings: Sequence[Reading]) -> float:
    """How fast memory grows: the median of the slopes between all readings after two minutes.

    A leak moves most of them. A file mapped for a moment while it is merged moves few; the peak is
    reported beside it.

    >>> slope_mb_per_min([Reading(120 + 60 * at, 0, 200 + 3 * at, 0, 0, 0) for at in range(5)])
    3.0
    """
    points = [(each.at_s / 60, each.rss_mb) for each in readings if each.at_s >= WARM_S]
    if len(points) < 2:
        return 0.0
    return statistics.median(
        (y - before_y) / (x - before_x)
        for (before_x, before_y), (x, y) in itertools.combinations(points, 2)
        if x > before_x
    )


def rate(readings: Sequence[Reading], start_s: float, stop_s: float) -> float:
    """Events a second between two times, as far as there are readings.

    >>> rate([Reading(10, 1000, 0, 0, 0, 0), Reading(20, 3000, 0, 0, 0, 0)], 10, 20)
    200.0
    """
    known = [Reading(0, 0, 0, 0, 0, 0), *readings]
    first = max((each for each in known if each.at_s <= start_s), key=lambda each: each.at_s)
    last = max((each for each in known if each.at_s <= stop_s + 1), key=lambda each: each.at_s)
    span_s = last.at_s - first.at_s
    return (last.events - first.events) / span_s if span_s > 0 else 0.0


async def soak(folder: Path, seconds: float, journal_bytes: float) -> dict[str, Any]:
    """Run it and judge it; returns everything measured, JSON-ready."""
    writes = DiskWrites()
    async with open_bus(folder, SETTINGS) as bus:
        run = Soak(bus, folder, seconds, journal_bytes)
        await run.run()
        await run.settle()
        kept_bytes = unsealed_bytes(bus) + sum(
            info.size_bytes for info in embedded(bus).log.manifest.segments()
        )
        folder_bytes = disk_bytes(folder)
        written_bytes = embedded(bus).journal.position
        problem = embedded(bus).maintenance.problem
    readings = run.readings
    end_s = readings[-1].at_s
    limit_bytes = MAX_FOLDER_SHARE * kept_bytes + SPARE_FILES * SETTINGS.journal.file_bytes
    slope = slope_mb_per_min(readings)
    return {
        "events": run.events,
        "seconds": end_s,
        "burst_per_s": round(rate(readings, 0, min(BURST_S, end_s))),
        "sustained_per_s": round(rate(readings, WARM_S if end_s > 2 * WARM_S else 0, end_s)),
        "rss_slope_mb_per_min": round(slope, 3),
        "rss_peak_mb": max(each.rss_mb for each in readings),
        "rss_steady": slope <= MAX_SLOPE_MB_PER_MIN,
        "write_amplification": round(writes.per_byte(run.events * PAYLOAD_BYTES), 3),
        "journal_bytes": written_bytes,
        "retention_bytes": KEEP_BYTES,
        "kept_bytes": kept_bytes,
        "folder_bytes": folder_bytes,
        "folder_limit_bytes": round(limit_bytes),
        "folder_peak_mb": max(each.folder_mb for each in readings),
        "folder_bounded": kept_bytes <= KEEP_BYTES and folder_bytes <= limit_bytes,
        "problem": problem,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "penstock.bench.soak", *sys.argv[1:]]),
        "readings": [asdict(each) for each in readings],
    }


def unsealed_bytes(bus: Bus) -> int:
    """Journal bytes that are in no segment yet."""
    engine = embedded(bus)
    return engine.journal.position - engine.log.manifest.sealed_to


def disk_bytes(folder: Path) -> int:
    """What a folder takes on the disk, room set aside for files included."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(f"{place}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue  # deleted since it was listed
    return total


def rss_mb(pid: int) -> float:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def children() -> list[int]:
    """The processes this one has started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def carry_out(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Run a campaign in a folder of its own, which goes with it; keeps its result and prints it."""
    parser.add_argument("--dir", type=Path, default=Path(), help="which disk to use")
    parser.add_argument("--json", type=Path, default=None, help="where to write the result")
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix=f".penstock-{parser.prog.split('.')[-1]}-", dir=given.dir))
    try:
        result = asyncio.run(run(given, place))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "readings"}))
    return result


def main() -> int:
    """Run it, print it, and say whether memory and disk stayed in bounds."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=inf, help="how long to publish")
    parser.add_argument("--gigabytes", type=float, default=inf, help="how much to publish")

    async def run(given: argparse.Namespace, place: Path) -> dict[str, Any]:
        endless = given.minutes == given.gigabytes == inf
        return await soak(place, 600.0 if endless else given.minutes * 60, given.gigabytes * 1e9)

    result = carry_out(parser, run)
    return 0 if result["rss_steady"] and result["folder_bounded"] else 1


if __name__ == "__main__":
    sys.exit(main())

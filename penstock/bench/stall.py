"""A consumer that stalls while others work at full rate: does the broker's memory stay level?

    python -m penstock.bench.stall --minutes 10

One process publishes and handles events as fast as it can. After the first part of the run another
process, which is a member of the same group and of a group of its own, is stopped by SIGSTOP: it
holds leases, reads nothing from its connection and answers no heartbeat. Ends with 1 when memory
grows, or when the others get less done than before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import statistics
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.cases.broker_peer import connect
from penstock.bench.client_process import Crew
from penstock.bench.measure import percentile
from penstock.bench.soak import (
    MAX_SLOPE_MB_PER_MIN,
    READING_S,
    Reading,
    carry_out,
    disk_bytes,
    rate,
    rss_mb,
    slope_mb_per_min,
)
from penstock.model.settings import GIB
from penstock.testing.broker_process import BrokerProcess

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

PART = "penstock.bench.stall:StallPart"
TOPIC, SHARED, OWN = "bench.stall", "workers", "stuck"
BATCH_EVENTS = 500
UNDER_WAY_EVENTS = 20_000  # published and not handled yet: what is measured is work, not a backlog
CALM_SHARE = 0.2  # of the run, before anybody stalls
STALLED_INFLIGHT = 1_000
MIN_RATE_SHARE = 0.85  # rates of a minute differ by a tenth on a machine that others share
KEEP_BYTES = 2 * GIB


class StallPart:
    """A client in its own process: it works, or it takes events and never settles them."""

    def __init__(self) -> None:
        self._bus: Bus | None = None
        self._handled = self._published = 0
        self._publish_s: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def work(self, url: str) -> None:
        """Publish and handle from now on."""
        bus = self._bus = await connect(url).open()
        await bus.topics.create(TOPIC)

        async def handle(payload: bytes) -> None:
            self._handled += 1

        bus.handler(TOPIC, group=SHARED)(handle)
        await bus.ready()
        self._tasks = [asyncio.create_task(self._publish(bus)) for _ in range(4)]

    async def _publish(self, bus: Bus) -> None:
        batch = [os.urandom(50) + bytes(50) for _ in range(BATCH_EVENTS)]
        while True:
            while self._published - self._handled > UNDER_WAY_EVENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            self._published += BATCH_EVENTS
            began = time.perf_counter()
            await bus.publish_many(TOPIC, batch)
            self._publish_s.append(time.perf_counter() - began)

    async def count(self) -> dict[str, float]:
        """What was done so far, and the publish latency since the last call."""
        for task in self._tasks:
            if task.done():
                task.result()
        times, self._publish_s = sorted(self._publish_s), []
        p99_s = percentile(times, 0.99) if times else 0.0
        return {"handled": self._handled, "publish_p99_ms": 1e3 * p99_s}

    async def hold(self, url: str) -> int:
        """Join both groups and take what credit allows, settling nothing; returns how much."""
        bus = self._bus = await connect(url).open()
        held = 0
        for group in (SHARED, OWN):
            events = await bus.subscribe(
                TOPIC, group=group, max_inflight=STALLED_INFLIGHT
            ).__aenter__()
            await anext(events)
            held += 1
        return held


async def stall(place: Path, seconds: float, every_s: float = READING_S) -> dict[str, Any]:
    """Run it and judge it; returns everything measured, JSON-ready."""
    worker, stalled = (crew := Crew(place, PART, PART)).clients
    readings: list[Reading] = []
    p99s_ms: list[float] = []
    calm_s = CALM_SHARE * seconds
    with BrokerProcess(place / "data").start(retention__max_bytes=KEEP_BYTES) as broker:
        try:
            await crew.start()
            await worker.order("work", url=broker.url())
            start = time.perf_counter()
            stopped = False
            while (now_s := time.perf_counter() - start) < seconds:
                if not stopped and now_s >= calm_s:
                    stopped = True
                    await stalled.order("hold", url=broker.url())
                    os.kill(stalled.pid, signal.SIGSTOP)
                    print(f"{now_s:6.0f} s  a consumer stalls", flush=True)
                await asyncio.sleep(every_s - (time.perf_counter() - start) % every_s)
                counts = await worker.order("count")
                p99s_ms.append(counts["publish_p99_ms"])
                readings.append(_reading(start, counts, broker.pid, place / "data"))
                _tell(readings, p99s_ms[-1])
        finally:
            os.kill(stalled.pid, signal.SIGCONT)
            await crew.stop()
    return _judged(readings, p99s_ms, calm_s, every_s)


def _reading(start: float, counts: dict[str, float], pid: int, folder: Path) -> Reading:
    return Reading(
        at_s=round(time.perf_counter() - start, 1),
        events=int(counts["handled"]),
        rss_mb=round(rss_mb(pid), 1),
        sealer_rss_mb=0.0,
        folder_mb=round(disk_bytes(folder) / 1e6, 1),
        backlog_mb=0.0,
    )


def _tell(readings: list[Reading], p99_ms: float) -> None:
    now = readings[-1]
    per_s = rate(readings, readings[-2].at_s if len(readings) > 1 else 0.0, now.at_s)
    print(
        f"{now.at_s:6.0f} s  {per_s:10,.0f} events/s handled  publish p99 {p99_ms:6.1f} ms  "
        f"broker RSS {now.rss_mb:7.1f} MB  folder {now.folder_mb:8.1f} MB",
        flush=True,
    )


def _judged(
    readings: list[Reading], p99s_ms: list[float], calm_s: float, settle_s: float
) -> dict[str, Any]:
    """Compare before and after, leaving out what follows the start and the stall at once."""
    end_s = readings[-1].at_s
    calm = [at for at, each in enumerate(readings) if settle_s < each.at_s <= calm_s]
    later = [at for at, each in enumerate(readings) if each.at_s > calm_s + settle_s]
    before = rate(readings, settle_s, calm_s)
    during = rate(readings, calm_s + settle_s, end_s)
    slope = slope_mb_per_min([each for each in readings if each.at_s > calm_s + settle_s])
    return {
        "events": readings[-1].events,
        "seconds": end_s,
        "calm_per_s": round(before),
        "stalled_per_s": round(during),
        "rate_share": round(during / before, 3) if before else 0.0,
        "calm_publish_p99_ms": round(_median([p99s_ms[at] for at in calm]), 2),
        "stalled_publish_p99_ms": round(_median([p99s_ms[at] for at in later]), 2),
        "rss_slope_mb_per_min": round(slope, 3),
        "rss_calm_mb": _median([readings[at].rss_mb for at in calm]),
        "rss_peak_mb": max(each.rss_mb for each in readings),
        "rss_steady": slope <= MAX_SLOPE_MB_PER_MIN,
        "others_unharmed": during >= MIN_RATE_SHARE * before > 0,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "penstock.bench.stall", *sys.argv[1:]]),
        "readings": [asdict(each) for each in readings],
    }


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def main() -> int:
    """Run it, print it, and say whether memory stayed level and the others worked on."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.stall", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run")
    result = carry_out(parser, lambda given, place: stall(place, given.minutes * 60))
    return 0 if result["rss_steady"] and result["others_unharmed"] else 1


if __name__ == "__main__":
    sys.exit(main())

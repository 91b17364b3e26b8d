"""Publishing at a steady rate, whatever the answers: for latencies, and for neighbours.

A call that takes long does not hold up the next one, so a slow moment shows in all the calls that
fell into it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.case import PAYLOAD_BYTES, Window
from penstock.bench.cases.broker_board import Board
from penstock.bench.cases.broker_peer import GROUP, PREFETCH, PenstockBroker, connect
from penstock.bench.cases.broker_queue import expect_acked
from penstock.bench.cases.broker_text import texts
from penstock.bench.cases.workload import expect
from penstock.bench.client_process import all_of, start_soon, until
from penstock.bench.measure import Meter, Sample, disk_sync_s, percentile
from penstock.model.errors import PenstockError, Rejected

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

PACED_PARTS = ("penstock.bench.cases.broker_paced:PacedPart",) * 2
LATENCY_PER_S = 1_000
# Calls without an answer; beyond it the pace is not kept, and the figure is refused.
MAX_UNDER_WAY = 4_000
PACED_BATCHES = 16  # few, because they are made while others wait for the start
SELDOM_S = 0.02  # between two looks at the board: a busier loop would be measured too
STAMP = struct.Struct("<q")


# -- in a client's process -------------------------------------------------------------------------


class PacedPart:
    """A client in its own process: publishes at a pace, in a loop, or handles what comes."""

    def __init__(self) -> None:
        self._bus: Any = None
        self._board: Any = None
        self._meter = Meter(0)

    async def connect(self, url: str, tenant: str = "default") -> None:
        """Connect as a tenant."""
        await self.leave()
        self._bus = await connect(url, tenant=tenant).open()

    async def leave(self) -> None:
        """Close the connection."""
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()

    async def pace(
        self,
        topic: str,
        per_s: float,
        seconds: float,
        start: float,
        batch_events: int = 1,
        board: str | None = None,
        server_pid: int | None = None,
        seed: int | None = None,
        warm_s: float = 0.0,
    ) -> dict[str, Any]:
        """Publish so many events a second, each with the time it was sent; refusals are counted.

        With a seed the calls come at random times, as those of a publisher that knows of no other:
        two that keep the same pace would meet in every call, or in none. Latencies are those of the
        calls that begin when `warm_s` of the time is over.
        """
        meter = Meter(seconds, server_pid=server_pid)
        pacer = _Pacer(self._bus, topic, batch_events, meter, seed, start + warm_s)
        with pacer.meter:
            await until(start)
            await pacer.run(batch_events / per_s)
        if board is not None:
            Board(board).finish(pacer.meter.events)
        return {
            "sample": pacer.meter.sample().as_dict(),
            "events": pacer.meter.events,
            "refused": pacer.refused,
            "seconds": pacer.meter.wall_s,
            "latencies_s": pacer.latencies_s,
        }

    async def repeat(
        self, topic: str, payload_bytes: int, seconds: float, start: float
    ) -> dict[str, Any]:
        """Publish one large payload after another."""
        [payload] = texts(payload_bytes, 1, seed=1)
        with Meter(seconds) as meter:
            await until(start)
            while meter.running:
                begun = time.perf_counter()
                await self._bus.publish(topic, payload)
                meter.add(time.perf_counter() - begun, 1, len(payload))
        return {"sample": meter.sample().as_dict(), "events": meter.events}

    async def listen(self, topic: str, board: str) -> None:
        """Handle what comes from now on; its age is measured when the handler has it."""
        self._board = progress = Board(board)

        async def handle(payload: bytes) -> None:
            age_ns = time.perf_counter_ns() - STAMP.unpack_from(payload)[0]
            self._meter.add(age_ns / 1e9)
            progress.had(0, self._meter.events)

        self._bus.handler(topic, group=GROUP, max_inflight=PREFETCH)(handle)
        await self._bus.ready()

    async def handled(self, server_pid: int) -> dict[str, Any]:
        """Wait until everything that was published has been handled."""
        self._meter = Meter(0, server_pid=server_pid)
        with self._meter as meter:
            await self._board.everything(0, look_s=SELDOM_S)
            await self._bus.flush()
        return {"sample": meter.sample().as_dict(), "events": meter.events}


class _Pacer:
    """Calls that begin at their time, each a task of its own."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        batch_events: int,
        meter: Meter,
        seed: int | None,
        warm_at: float,
    ) -> None:
        self.meter = meter
        self.refused = 0
        self.latencies_s: list[float] = []
        self._rng = None if seed is None else random.Random(seed)
        self._warm_at = warm_at
        self._bus = bus
        self._topic = topic
        window = Window(0, Path(), Path(), payload_bytes=PAYLOAD_BYTES, batch_events=batch_events)
        self._batches = itertools.cycle(window.batches(PACED_BATCHES))
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, every_s: float) -> None:
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while self.meter.running:
                while due <= time.perf_counter():
                    due += every_s if self._rng is None else self._rng.expovariate(1 / every_s)
                    task = group.create_task(self._call())
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)
                if len(self._under_way) > MAX_UNDER_WAY:
                    raise PenstockError(
                        f"{len(self._under_way)} calls have no answer: the broker does not keep "
                        f"up with one call every {every_s * 1000:g} ms. Try a quieter machine"
                    )
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _call(self) -> None:
        batch = next(self._batches)
        begun = time.perf_counter()
        stamped = [STAMP.pack(time.perf_counter_ns()) + batch[0][STAMP.size :], *batch[1:]]
        try:
            if len(stamped) == 1:
                await self._bus.publish(self._topic, stamped[0])
            else:
                await self._bus.publish_many(self._topic, stamped)
        except Rejected:
            self.refused += len(stamped)
        else:
            took_s = time.perf_counter() - begun
            self.meter.add(took_s, len(stamped))
            if begun >= self._warm_at:
                self.latencies_s.append(took_s)


# -- in the benchmark's process --------------------------------------------------------------------


async def broker_latency(window: Window) -> Sample:
    """From publish in one process to the handler in another, at 1,000 events a second."""
    broker = PenstockBroker()
    syncs = disk_sync_s(window.folder)
    producer, consumer = window.clients
    async with broker.serving(window):
        await broker.open("queue")
        [topic] = broker.topics
        await all_of(*(each.order("connect", url=broker.url) for each in (producer, consumer)))
        board = window.folder / "board"
        Board.make(board, consumers=1)
        await consumer.order("listen", topic=topic, board=str(board))
        paced, handled = await all_of(
            producer.order(
                "pace", topic=topic, per_s=LATENCY_PER_S, seconds=window.seconds,
                start=start_soon(), board=str(board),
            ),
            consumer.order("handled", server_pid=broker.server_pid),
        )  # fmt: skip
        expect(paced["refused"], 0, "refused")
        expect(handled["events"], paced["events"], "handled")
        expect(await broker.stored(), paced["events"], "stored")
        await expect_acked(broker)
    # Before and after, so that a disk that slows down meanwhile slows both.
    syncs += disk_sync_s(window.folder)
    return _beside_the_disk(paced["sample"], handled["sample"], syncs)


def _beside_the_disk(paced: dict[str, Any], handled: dict[str, Any], syncs: list[float]) -> Sample:
    disk_ms = percentile(sorted(syncs), 0.5) * 1000
    figures = {name: handled[name] for name in handled if name != "extra"}
    figures["cpu"] += paced["cpu"]
    figures["rss_mb"] += paced["rss_mb"]
    return Sample(
        **figures,
        extra={
            "publish_p50_ms": paced["p50_ms"],
            "publish_p99_ms": paced["p99_ms"],
            "fdatasync_p50_ms": disk_ms,
            "p50_over_fdatasync_ms": handled["p50_ms"] - disk_ms,
        },
    )

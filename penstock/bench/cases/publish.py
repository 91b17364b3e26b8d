"""Publishing: in batches, by a hundred callers, and by one."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from penstock.bench.cases.workload import (
    PRODUCERS,
    DiskWrites,
    expect,
    make_topics,
    open_bus,
    sealed_share,
    stored,
    together,
)
from penstock.bench.measure import disk_sync_s, percentile
from penstock.bench.peers.operation import AWAITED_CONCURRENCY

if TYPE_CHECKING:
    from penstock.bench.case import Window
    from penstock.bench.measure import Sample
    from penstock.bus.bus import Bus

BATCHED_TOPICS = 100


async def publish_batched(window: Window) -> Sample:
    """Calls of 1,000 payloads rotating over 100 topics, several in flight, sealing on."""
    batches = itertools.cycle(window.batches())
    writes = DiskWrites()
    async with open_bus(window.folder) as bus:
        topics = itertools.cycle(await make_topics(bus, BATCHED_TOPICS))
        with window.meter() as meter:

            async def produce() -> None:
                while meter.running:
                    batch = next(batches)
                    start = time.perf_counter()
                    await bus.publish_many(next(topics), batch)
                    meter.add(time.perf_counter() - start, len(batch))

            await together(*(produce() for _ in range(PRODUCERS)))
        expect(await stored(bus), meter.events, "stored")
        sealed = sealed_share(bus)
    # After the close: only then are the sealing process's writes counted with ours.
    return meter.sample(
        published=meter.events,
        sealed_share=sealed,
        write_amplification=writes.per_byte(meter.events * window.payload_bytes),
    )


async def publish_awaited(window: Window) -> Sample:
    """A hundred callers, each waiting for its one event to be durable."""
    async with open_bus(window.folder) as bus:
        return await _publish_singly(bus, window, AWAITED_CONCURRENCY)


async def publish_serial(window: Window) -> Sample:
    """One caller, one event at a time; beside it what the disk alone takes for its fdatasync."""
    syncs = disk_sync_s(window.folder)
    async with open_bus(window.folder / "bus") as bus:
        sample = await _publish_singly(bus, window, 1)
    # Before and after, so that a disk that slows down meanwhile slows both.
    syncs += disk_sync_s(window.folder)
    fdatasync_p99_ms = percentile(sorted(syncs), 0.99) * 1000
    sample.extra["fdatasync_p99_ms"] = fdatasync_p99_ms
    sample.extra["p99_to_fdatasync_p99"] = sample.p99_ms / fdatasync_p99_ms
    return sample


async def _publish_singly(bus: Bus, window: Window, concurrency: int) -> Sample:
    [topic] = await make_topics(bus, 1)
    payloads = itertools.cycle(itertools.chain.from_iterable(window.batches(count=8)))
    with window.meter() as meter:

        async def produce() -> None:
            while meter.running:
                payload = next(payloads)
                start = time.perf_counter()
                await bus.publish(topic, payload)
                meter.add(time.perf_counter() - start)

        await together(*(produce() for _ in range(concurrency)))
    expect(await stored(bus), meter.events, "stored")
    return meter.sample(published=meter.events)

"""Publishing through a broker: in batches, and what a batch costs the broker against one event.

The benchmark's own process is the producer; the broker has its own.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.cases.broker_peer import PenstockBroker
from penstock.bench.cases.publish import BATCHED_TOPICS
from penstock.bench.cases.workload import expect
from penstock.bench.peers.operation import publish_batched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.bench.case import Window
    from penstock.bench.measure import Meter, Sample
    from penstock.bus.bus import Bus

# Calls of one kind before the other kind has its turn: a slow moment of the machine hits both.
BLOCK_CALLS = 20
WARM_CALLS = 50
NANOSECONDS_PER_S = 1e9


async def broker_publish_batched(window: Window) -> Sample:
    """Calls of 1,000 payloads rotating over 100 topics, eight under way, sealing on."""
    broker = PenstockBroker(topics=BATCHED_TOPICS)
    async with broker.serving(window):
        return await publish_batched(broker, replace(window, server_pid=broker.server_pid))


async def batch_cost(window: Window) -> Sample:
    """The broker's CPU time for a frame of 1,000 events and for a frame of one, in turns."""
    broker = PenstockBroker()
    async with broker.serving(window):
        await broker.open("queue")
        return await _cost(broker, replace(window, server_pid=broker.server_pid))


async def _cost(broker: PenstockBroker, window: Window) -> Sample:
    batches = window.batches()
    ones = [batch[:1] for batch in batches]
    warm = window.meter()
    for batch in (ones, batches):
        await _calls(broker.bus, broker.topics[0], batch, warm, WARM_CALLS)
    spent = {1: 0.0, window.batch_events: 0.0}
    frames = dict.fromkeys(spent, 0)
    with window.meter() as meter:
        while meter.running:
            for kind in (ones, batches):
                size = len(kind[0])
                before = process_cpu_s(broker.pid)
                await _calls(broker.bus, broker.topics[0], kind, meter, BLOCK_CALLS)
                spent[size] += process_cpu_s(broker.pid) - before
                frames[size] += BLOCK_CALLS
    expect(await broker.stored(), warm.events + meter.events, "stored")
    one_s, batch_s = (spent[size] / frames[size] for size in spent)
    return meter.sample(
        published=meter.events,
        frames=sum(frames.values()),
        one_event_cpu_us=one_s * 1e6,
        batch_cpu_us=batch_s * 1e6,
        batch_to_one=batch_s / one_s,
    )


async def _calls(
    bus: Bus,
    topic: str,
    batches: list[Sequence[bytes]] | list[list[bytes]],
    meter: Meter,
    count: int,
) -> None:
    """Publish so many batches, a frame each, one after another."""
    for batch in itertools.islice(itertools.cycle(batches), count):
        start = time.perf_counter()
        await bus.publish_many(topic, batch)
        meter.add(time.perf_counter() - start, len(batch))


def process_cpu_s(pid: int) -> float:
    """CPU time of one process, all its threads, to the nanosecond as the scheduler counts it.

    >>> import os
    >>> process_cpu_s(os.getpid()) > 0
    True
    """
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        total_ns += int(path.read_text().split()[0])
    return total_ns / NANOSECONDS_PER_S

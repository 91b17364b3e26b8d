"""Reading back what is stored, part of it sealed, part of it still in the journal."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from penstock.bench.cases.workload import (
    PRODUCERS,
    expect,
    make_topics,
    open_bus,
    sealed,
    sealed_share,
    stored,
    together,
)
from penstock.model.settings import MIB, Journal, Sealing, Settings

if TYPE_CHECKING:
    from penstock.bench.case import Window
    from penstock.bench.measure import Sample

# A hundred megabytes of payload: more than any cache of ours holds.
FILL_EVENTS = 1_000_000
READ_TOPICS = 4
# What an event takes in the journal, about: decides how many files there are to seal.
PLAIN_EVENT_BYTES = 110
KEYED_EVENT_BYTES = 160
PATTERN = "bench.*"
# Nothing is sealed between the rounds, so that every round reads the same files.
AS_IT_LIES = Settings(sealing=Sealing(enabled=False))
# Latencies of single events would time the clock.
TIMED_EVENTS = 1_000


async def fill_plain(window: Window) -> None:
    """Store events of a payload only."""
    await _fill(window, PLAIN_EVENT_BYTES, keyed=False)


async def fill_keyed(window: Window) -> None:
    """Store events that have a key and a header each."""
    await _fill(window, KEYED_EVENT_BYTES, keyed=True)


async def _fill(window: Window, event_bytes: int, *, keyed: bool) -> None:
    # Two and a half files: two are closed and get sealed, the rest stays in the journal.
    file_bytes = max(MIB, FILL_EVENTS * event_bytes * 2 // 5)
    settings = Settings(journal=Journal(file_bytes=file_bytes))
    size = window.batch_events
    keys = [b"key-%06d" % number for number in range(size)] if keyed else None
    headers = [{"kind": f"kind-{number % 8}"} for number in range(size)] if keyed else None
    batches = itertools.cycle(window.batches())
    left = iter(range(FILL_EVENTS // size))
    async with open_bus(window.shared / "data", settings) as bus:
        topics = itertools.cycle(await make_topics(bus, READ_TOPICS))

        async def produce() -> None:
            for _ in left:
                await bus.publish_many(next(topics), next(batches), keys=keys, headers=headers)

        await together(*(produce() for _ in range(PRODUCERS)))
        expect(await stored(bus), FILL_EVENTS // size * size, "stored")
        await sealed(bus)


async def read_batches(window: Window) -> Sample:
    """Replay everything as batches, again and again, looking at the payloads of each."""
    async with open_bus(window.shared / "data", AS_IT_LIES) as bus:
        filled = await stored(bus)
        passes = payload_bytes = 0
        with window.meter() as meter:
            while meter.running or not passes:
                before = meter.events
                start = time.perf_counter()
                async for batch in bus.replay_batches(PATTERN):
                    ends = batch.payload_column.ends()
                    payload_bytes += ends[-1] - ends[0]
                    now = time.perf_counter()
                    meter.add(now - start, batch.count)
                    start = now
                expect(meter.events - before, filled, "read")
                passes += 1
        expect(payload_bytes, meter.events * window.payload_bytes, "bytes of payload")
        return meter.sample(stored=filled, passes=passes, sealed_share=sealed_share(bus))


async def read_events(window: Window) -> Sample:
    """Replay everything as events and touch key, payload and headers of each."""
    async with open_bus(window.shared / "data", AS_IT_LIES) as bus:
        filled = await stored(bus)
        passes = 0
        with window.meter() as meter:
            while meter.running or not passes:
                got = touched = 0
                due = TIMED_EVENTS
                start = time.perf_counter()
                async for event in bus.replay(PATTERN):
                    key, payload, kind = event.key, event.payload, event.headers["kind"]
                    touched += len(key) + len(payload) + len(kind)  # type: ignore[arg-type]
                    got += 1
                    if got == due:
                        now = time.perf_counter()
                        meter.add(now - start, TIMED_EVENTS)
                        start, due = now, due + TIMED_EVENTS
                meter.events += got % TIMED_EVENTS
                expect(got, filled, "read")
                expect(touched, got * (window.payload_bytes + 16), "bytes touched")
                passes += 1
        return meter.sample(stored=filled, passes=passes, sealed_share=sealed_share(bus))

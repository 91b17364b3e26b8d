"""Delivering: a queue whose events are acked one by one, eight readers of everything, and both."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from penstock.bench.cases.workload import expect, make_topics, open_bus, together
from penstock.bench.peers import FANOUT_SUBSCRIBERS
from penstock.bench.peers.operation import DRAIN_TIMEOUT_S, MAX_BATCHES_AHEAD, Ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from penstock.bench.case import Window
    from penstock.bench.measure import Meter, Sample
    from penstock.bus.bus import Bus

# Events leased ahead of the handler; the RabbitMQ peer prefetches as many.
PREFETCH = 2_000
MIXED_TOPICS = 8
MIXED_BATCH_EVENTS = 100
GROUP = "workers"


async def queue(window: Window) -> Sample:
    """Publish, hand each event to a handler and ack it on its own, all at the same time."""
    batches = itertools.cycle(window.batches())
    meter = window.meter()
    ledger = Ledger(1, window.batch_events, meter)
    async with open_bus(window.folder) as bus:
        [topic] = await make_topics(bus, 1)
        _handle(bus, topic, ledger.counter(0))
        await bus.ready()
        with meter:
            await _produce(bus, topic, batches, ledger, meter)
            await bus.flush()  # an ack that is not durable yet is not counted for nothing
        await _expect_acked(bus)
        expect(ledger.received[0], ledger.published, "acked")
    return meter.sample(published=ledger.published)


async def fanout(window: Window) -> Sample:
    """Every event to eight groups that read in order; deliveries are counted."""
    batches = itertools.cycle(window.batches())
    meter = window.meter()
    ledger = Ledger(FANOUT_SUBSCRIBERS, window.batch_events, meter)
    async with open_bus(window.folder) as bus, AsyncExitStack() as stack:
        [topic] = await make_topics(bus, 1)
        for place in range(FANOUT_SUBSCRIBERS):
            await stack.enter_async_context(
                _reading(bus, topic, f"readers-{place}", {topic: ledger.counter(place)})
            )
        with meter:
            await _produce(bus, topic, batches, ledger, meter)
        for received in ledger.received:
            expect(received, ledger.published, "delivered")
    return meter.sample(published=ledger.published)


async def mixed(window: Window) -> Sample:
    """Eight topics, each with a producer and a handler, and one reader of all of them."""
    batches = itertools.cycle(_cut(window.batches(), MIXED_BATCH_EVENTS))
    meter = window.meter()
    async with open_bus(window.folder) as bus:
        topics = await make_topics(bus, MIXED_TOPICS)
        ledgers = {topic: Ledger(2, MIXED_BATCH_EVENTS, meter) for topic in topics}
        counters = {topic: ledger.counter(1) for topic, ledger in ledgers.items()}
        for topic, ledger in ledgers.items():
            _handle(bus, topic, ledger.counter(0))
        await bus.ready()
        async with _reading(bus, "bench.*", "readers", counters):
            with meter:
                await together(
                    *(
                        _produce(bus, topic, batches, ledger, meter)
                        for topic, ledger in ledgers.items()
                    )
                )
                await bus.flush()
        await _expect_acked(bus)
        for ledger in ledgers.values():
            expect(min(ledger.received), ledger.published, "delivered")
    return meter.sample(published=sum(ledger.published for ledger in ledgers.values()))


async def _produce(
    bus: Bus, topic: str, batches: Iterator[Sequence[bytes]], ledger: Ledger, meter: Meter
) -> None:
    """Publish as fast as consumers keep up, then wait for them: what was paid for is counted."""
    while meter.running:
        await ledger.until_ahead(MAX_BATCHES_AHEAD - 1, DRAIN_TIMEOUT_S)
        ledger.started.append(time.perf_counter())
        await bus.publish_many(topic, next(batches))
    await ledger.until_ahead(0, DRAIN_TIMEOUT_S)


def _handle(bus: Bus, topic: str, count: Callable[[int], None]) -> None:
    @bus.handler(topic, group=f"{GROUP}-{topic}", max_inflight=PREFETCH)
    async def handle(payload: bytes) -> None:
        count(1)


@asynccontextmanager
async def _reading(
    bus: Bus, pattern: str, group: str, counters: dict[str, Callable[[int], None]]
) -> AsyncIterator[None]:
    """A group that reads on while this is open, each event as an object of its own."""
    async with bus.subscribe(pattern, group=group, mode="log") as subscription:

        async def read() -> None:
            async for batch in subscription.batches():
                events = sum(1 for event in batch if event.payload)
                counters[batch.topic](events)

        reading = asyncio.create_task(read())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _expect_acked(bus: Bus) -> None:
    for group in await bus.groups.list():
        if group.mode == "queue":
            expect(group.lag, 0, "left unacked")


def _cut(batches: list[list[bytes]], events: int) -> list[list[bytes]]:
    return [
        batch[start : start + events] for batch in batches for start in range(0, len(batch), events)
    ]

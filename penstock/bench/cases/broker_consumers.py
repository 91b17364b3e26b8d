"""A thousand connected consumers, each with a connection, a topic and a group of its own.

Every consumer is sent events at the same pace and acks each. What counts is the rate of the slowest
one: all of them have to be served, not only most. First each event comes on its own, twelve times a
second, then twelve come together once a second (`burst_` in the figures).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from penstock.bench.case import PAYLOAD_BYTES, Window
from penstock.bench.cases.broker_board import STALLED_S
from penstock.bench.cases.broker_paced import STAMP
from penstock.bench.cases.broker_peer import PenstockBroker, connect
from penstock.bench.cases.broker_queue import expect_acked
from penstock.bench.cases.workload import expect, together
from penstock.bench.client_process import all_of, start_soon, until
from penstock.bench.measure import Meter, Sample
from penstock.model.errors import Deferred

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

CONSUMERS = 1_000
PROCESSES = 2
CONSUMERS_PARTS = ("penstock.bench.cases.broker_consumers:ConsumersPart",) * (1 + PROCESSES)
# A fifth above the goal of 10 a second, so that a consumer which misses some still shows it.
EVENTS_PER_S = 12
CONNECTING = 50  # connections being opened at once by one process
# Published and not yet answered: a broker that cannot keep the pace sets it.
UNDER_WAY = 2_000
FRAME_TOPICS = 100  # published together, so that a tick is spread over its time
LOOK_S = 0.01  # between two looks whether all have had everything


class ConsumersPart:
    """Many consumers, or the one producer, in a process."""

    def __init__(self) -> None:
        self._buses: list[Bus] = []
        self._counts: dict[str, int] = {}
        self._ends: dict[str, float] = {}
        self._meter = Meter(0)

    async def connect(self, url: str, topics: list[str]) -> int:
        """One consumer for each topic, all subscribed when it returns."""
        await self.leave()
        turns = asyncio.Semaphore(CONNECTING)

        async def one(topic: str) -> None:
            async with turns:
                bus = await connect(url, client=f"consumer.{topic}").open()
                self._buses.append(bus)
                self._handle(bus, topic)
                await bus.ready()

        async with asyncio.TaskGroup() as group:
            for topic in topics:
                group.create_task(one(topic))
        return len(topics)

    async def leave(self) -> None:
        """Close all connections."""
        buses, self._buses = self._buses, []
        self._counts.clear()
        self._ends.clear()
        await together(*(bus.close() for bus in buses))

    def _handle(self, bus: Bus, topic: str) -> None:
        self._counts[topic] = 0

        async def handle(payload: bytes) -> None:
            now = time.perf_counter_ns()
            self._meter.add((now - STAMP.unpack_from(payload)[0]) / 1e9)
            self._counts[topic] += 1
            self._ends[topic] = now / 1e9

        bus.handler(topic, group=f"only.{topic}")(handle)

    async def consume(self, start: float, each: int) -> dict[str, Any]:
        """Wait until every consumer has had so many; says when each had its last."""
        self._counts = dict.fromkeys(self._counts, 0)
        with Meter(0) as self._meter:
            await until(start)
            seen, since = -1, start
            while min(self._counts.values()) < each and time.perf_counter() - since < STALLED_S:
                if (had := sum(self._counts.values())) != seen:
                    seen, since = had, time.perf_counter()
                await asyncio.sleep(LOOK_S)
        return {
            "sample": self._meter.sample().as_dict(),
            "events": self._counts,
            "seconds": {topic: at - start for topic, at in self._ends.items()},
        }

    async def produce(
        self, url: str, topics: list[str], each: int, burst: int, start: float, server_pid: int
    ) -> dict[str, Any]:
        """So many events for every topic, `burst` at a time, at the rate of the case."""
        if not self._buses:
            self._buses.append(await connect(url).open())
        [bus] = self._buses
        chunks = [topics[at : at + FRAME_TOPICS] for at in range(0, len(topics), FRAME_TOPICS)]
        every_s = burst / (EVENTS_PER_S * len(chunks))
        turns = asyncio.Semaphore(UNDER_WAY // burst)
        with Meter(0, server_pid=server_pid) as meter:
            async with asyncio.TaskGroup() as group:
                for number in range(each // burst * len(chunks)):
                    await until(start + number * every_s)
                    for topic in chunks[number % len(chunks)]:
                        await turns.acquire()
                        task = group.create_task(_publish(bus, topic, burst, meter))
                        task.add_done_callback(lambda _: turns.release())
        return {"sample": meter.sample().as_dict(), "events": meter.events}


async def _publish(bus: Bus, topic: str, burst: int, meter: Meter) -> None:
    begun = time.perf_counter()
    payload = STAMP.pack(time.perf_counter_ns()).ljust(PAYLOAD_BYTES, b".")
    while True:
        try:
            if burst == 1:
                await bus.publish(topic, payload)
            else:
                await bus.publish_many(topic, [payload] * burst)
        except Deferred as busy:
            await asyncio.sleep(busy.retry_after_s)
        else:
            meter.add(time.perf_counter() - begun, burst)
            return


# -- in the benchmark's process --------------------------------------------------------------------


async def broker_consumers(window: Window) -> Sample:
    """A thousand consumers that each receive and ack at least ten events a second."""
    broker = PenstockBroker(topics=CONSUMERS)
    ticks = max(1, round(window.seconds))
    _, *clients = window.clients
    async with broker.serving(window):
        await broker.open("queue")
        shares = [broker.topics[number::PROCESSES] for number in range(PROCESSES)]
        begun = time.perf_counter()
        await all_of(
            *(
                client.order("connect", url=broker.url, topics=share)
                for client, share in zip(clients, shares, strict=True)
            )
        )
        connect_s = time.perf_counter() - begun
        singly = await _phase(broker, window, ticks * EVENTS_PER_S, burst=1)
        bursts = await _phase(broker, window, ticks * EVENTS_PER_S, burst=EVENTS_PER_S)
        expect(await broker.stored(), 2 * ticks * EVENTS_PER_S * CONSUMERS, "stored")
        await expect_acked(broker)
    singly.extra.update(
        connect_s=connect_s,
        burst_per_s=bursts.per_s,
        burst_slowest_per_s=bursts.extra["slowest_per_s"],
        burst_p99_ms=bursts.p99_ms,
        burst_cpu=bursts.cpu,
        burst_server_cpu=bursts.server_cpu or 0.0,
    )
    return singly


async def _phase(broker: PenstockBroker, window: Window, each: int, burst: int) -> Sample:
    """Send every consumer so many events, and refuse the figure when one had more or fewer."""
    producer, *clients = window.clients
    start = start_soon()
    produced, *consumed = await all_of(
        producer.order(
            "produce", url=broker.url, topics=broker.topics, each=each, burst=burst, start=start,
            server_pid=broker.server_pid,
        ),
        *(client.order("consume", start=start, each=each) for client in clients),
    )  # fmt: skip
    counts = {topic: had for part in consumed for topic, had in part["events"].items()}
    for topic in broker.topics:
        expect(counts[topic], each, f"handled by the consumer of {topic}")
    expect(produced["events"], each * CONSUMERS, "published")
    return _sample(each, produced["sample"], consumed)


def _sample(each: int, produced: dict[str, Any], consumed: list[dict[str, Any]]) -> Sample:
    samples = [part["sample"] for part in consumed]
    # No consumer can be faster than it was sent events.
    least_s = each / EVENTS_PER_S
    lasts_s = sorted(max(at, least_s) for part in consumed for at in part["seconds"].values())
    return Sample(
        per_s=each * CONSUMERS / lasts_s[-1],
        p50_ms=max(sample["p50_ms"] for sample in samples),
        p95_ms=max(sample["p95_ms"] for sample in samples),
        p99_ms=max(sample["p99_ms"] for sample in samples),
        cpu=sum(sample["cpu"] for sample in (*samples, produced)),
        rss_mb=sum(sample["rss_mb"] for sample in (*samples, produced)),
        server_cpu=produced["server_cpu"],
        server_rss_mb=produced["server_rss_mb"],
        extra={
            "consumers": CONSUMERS,
            "events_each": each,
            "slowest_per_s": each / lasts_s[-1],
            "median_per_s": each / lasts_s[len(lasts_s) // 2],
            "publish_p50_ms": produced["p50_ms"],
        },
    )

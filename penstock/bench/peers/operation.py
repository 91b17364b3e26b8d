"""The timed operations, written once over `Peer`, so that all peers are timed by the same loops.

Each operation ends by asking the server what it holds: a peer that dropped an event it had
acknowledged fails the turn instead of winning it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from penstock.bench.peers import FANOUT_SUBSCRIBERS, Peer, Shape
from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.bench.case import Operation, Window
    from penstock.bench.measure import Meter, Sample

AWAITED_CONCURRENCY = 100
# Published and not yet delivered: enough that neither side of a queue waits for the other.
MAX_BATCHES_AHEAD = 4
FILL_MAX_EVENTS = 50_000
FILL_MAX_S = 1.5
DRAIN_TIMEOUT_S = 5.0  # some servers count late: RabbitMQ by up to a second


async def publish_batched(peer: Peer, window: Window) -> Sample:
    """Batches of 1,000, pipelined as the client does best."""
    await peer.open("queue")
    batches = itertools.cycle(window.batches())
    with window.meter() as meter:

        async def work() -> None:
            while meter.running:
                batch = next(batches)
                start = time.perf_counter()
                await peer.publish(batch)
                meter.add(time.perf_counter() - start, len(batch))

        await _all(*(work() for _ in range(peer.pipeline_depth)))
    await _expect(peer, peer.stored, meter.events, "stored")
    return meter.sample(published=meter.events)


async def publish_awaited(peer: Peer, window: Window) -> Sample:
    """A hundred callers, each waiting for the ack of its one event."""
    return await _publish_singly(peer, window, AWAITED_CONCURRENCY)


async def publish_serial(peer: Peer, window: Window) -> Sample:
    """One caller, one event at a time."""
    return await _publish_singly(peer, window, 1)


async def _publish_singly(peer: Peer, window: Window, concurrency: int) -> Sample:
    await peer.open("queue")
    publish = peer.publisher(concurrency)
    payloads = itertools.cycle(itertools.chain.from_iterable(window.batches(count=8)))
    await _all(*(publish(next(payloads)) for _ in range(concurrency)))  # connections are made
    with window.meter() as meter:

        async def work() -> None:
            while meter.running:
                payload = next(payloads)
                start = time.perf_counter()
                await publish(payload)
                meter.add(time.perf_counter() - start)

        await _all(*(work() for _ in range(concurrency)))
    await _expect(peer, peer.stored, meter.events + concurrency, "stored")
    return meter.sample(published=meter.events + concurrency)


async def queue(peer: Peer, window: Window) -> Sample:
    """Publish, deliver and ack each event, publisher and consumer at the same time."""
    return await _deliver(peer, window, "queue", subscribers=1)


async def fanout(peer: Peer, window: Window) -> Sample:
    """Every event to eight subscribers; what is counted is deliveries."""
    return await _deliver(peer, window, "fanout", subscribers=FANOUT_SUBSCRIBERS)


class Ledger:
    """What was published and who has had it: gives each batch its latency when all have it."""

    def __init__(self, subscribers: int, batch_events: int, meter: Meter) -> None:
        self.batch_events = batch_events
        self.received = [0] * subscribers
        self.started: list[float] = []
        self._meter = meter
        self._complete = 0
        self._moved = asyncio.Event()

    def counter(self, subscriber: int) -> Callable[[int], None]:
        """The callback of one subscriber; the common case costs an addition and a comparison."""
        received = self.received
        batch_events = mark = self.batch_events

        def count(events: int) -> None:
            nonlocal mark
            received[subscriber] += events
            if received[subscriber] >= mark:
                mark += batch_events * ((received[subscriber] - mark) // batch_events + 1)
                self._advance()

        return count

    def _advance(self) -> None:
        now = time.perf_counter()
        had_by_all = min(self.received) // self.batch_events
        while self._complete < had_by_all:
            self._meter.add(
                now - self.started[self._complete], self.batch_events * len(self.received)
            )
            self._complete += 1
        self._moved.set()

    @property
    def published(self) -> int:
        """Events handed to the peer so far."""
        return len(self.started) * self.batch_events

    @property
    def ahead(self) -> int:
        """Batches published that some subscriber has not had in full."""
        return len(self.started) - self._complete

    async def until_ahead(self, batches: int, timeout_s: float) -> None:
        """Wait until no more than that many batches are ahead."""
        async with asyncio.timeout(timeout_s):
            while self.ahead > batches:
                self._moved.clear()
                await self._moved.wait()


async def _deliver(peer: Peer, window: Window, shape: Shape, subscribers: int) -> Sample:
    await peer.open(shape)
    batches = itertools.cycle(window.batches())
    meter = window.meter()
    ledger = Ledger(subscribers, window.batch_events, meter)
    try:
        async with AsyncExitStack() as stack:
            for place in range(subscribers):
                await stack.enter_async_context(peer.deliver(shape, ledger.counter(place)))
            with meter:
                while meter.running:
                    await ledger.until_ahead(MAX_BATCHES_AHEAD - 1, DRAIN_TIMEOUT_S)
                    batch = next(batches)
                    ledger.started.append(time.perf_counter())
                    await peer.publish(batch)
                # The rest is delivered inside the window's time: what was paid for is counted.
                await ledger.until_ahead(0, DRAIN_TIMEOUT_S)
    except TimeoutError:
        raise PenstockError(
            f"{peer.name} delivered {ledger.received} of {ledger.published} "
            f"events to each subscriber and then nothing for {DRAIN_TIMEOUT_S:g} s; "
            "run the case again, and look at the server's log if it stays",
            peer=peer.name,
        ) from None
    if shape == "queue":
        await _expect(peer, peer.leftover, 0, "left unacked")
    return meter.sample(published=ledger.published)


async def read_batches(peer: Peer, window: Window) -> Sample:
    """Read a filled stream from its beginning, again and again until the time is up."""
    await peer.open("log")
    filled = await _fill(peer, window)
    meter = window.meter()
    passes = 0
    with meter:
        while meter.running or not passes:
            done = asyncio.Event()
            start = time.perf_counter()
            got = 0

            def count(events: int, done: asyncio.Event = done) -> None:
                nonlocal got, start
                got += events
                now = time.perf_counter()
                if got % window.batch_events < events:
                    meter.add(now - start, 0)
                    start = now
                if got >= filled:
                    done.set()

            async with peer.deliver("log", count):
                async with asyncio.timeout(window.seconds + DRAIN_TIMEOUT_S):
                    await done.wait()
            if got != filled:
                raise _wrong(peer, "read", got, filled)
            meter.events += got
            passes += 1
    return meter.sample(stored=filled, passes=passes)


async def _fill(peer: Peer, window: Window) -> int:
    filled = 0
    end = time.perf_counter() + FILL_MAX_S
    for batch in itertools.cycle(window.batches()):
        await peer.publish(batch)
        filled += len(batch)
        if filled >= FILL_MAX_EVENTS or time.perf_counter() >= end:
            break
    await _expect(peer, peer.stored, filled, "stored")
    return filled


async def _all(*calls: Awaitable[None]) -> None:
    """Run together; when one fails the others are stopped, not left running."""
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(_as_coroutine(call))


async def _as_coroutine(call: Awaitable[None]) -> None:
    await call


async def _expect(peer: Peer, ask: Callable[[], Awaitable[int]], expected: int, what: str) -> None:
    end = time.monotonic() + DRAIN_TIMEOUT_S
    while (found := await ask()) != expected:
        if time.monotonic() > end:
            raise _wrong(peer, what, found, expected)
        await asyncio.sleep(0.05)


def _wrong(peer: Peer, what: str, found: int, expected: int) -> PenstockError:
    return PenstockError(
        f"{peer.name} says {found} events are {what} where {expected} were expected; "
        "its figure would mean nothing and is left out",
        peer=peer.name,
        found=found,
        expected=expected,
    )


OPERATIONS: dict[Operation, Callable[[Peer, Window], Awaitable[Sample]]] = {
    "publish_batched": publish_batched,
    "publish_awaited": publish_awaited,
    "publish_serial": publish_serial,
    "queue": queue,
    "fanout": fanout,
    "read_batches": read_batches,
}

"""Events on their way from one process to others, through a broker: Penstock's or a peer's.

`flow` runs a producer and its consumers, each in a process of its own, for one window, and puts
what they measured together. The loops are the same for every system.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.case import BATCH_EVENTS, DISTINCT_BATCHES, PAYLOAD_BYTES, Window
from penstock.bench.cases.broker_blocks import Blocks
from penstock.bench.cases.broker_board import Board, Counter
from penstock.bench.cases.broker_peer import PenstockBroker, connect, reading
from penstock.bench.cases.broker_text import texts
from penstock.bench.cases.workload import expect, together
from penstock.bench.client_process import all_of, start_soon, until
from penstock.bench.measure import Meter, Sample
from penstock.bench.peers import make_peer
from penstock.model.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.bench.client_process import ClientProcess
    from penstock.bench.peers import Count, Peer, Shape

FLOW = "penstock.bench.cases.broker_flow:FlowPart"
# Published and not yet delivered: enough that neither side waits for the other's look at the board.
BATCHES_AHEAD = 8
PREPARED_BYTES = 8 * MIB  # of payloads made beforehand, so that large ones do not fill the memory
PROBE_S = 0.3  # how long memory blocks are counted, after the window

Seat = tuple[str, int]
"""A consumer's place: the path of a board, and its number there."""


# -- in a client's process -------------------------------------------------------------------------


class FlowPart:
    """A producer or a consumer in its own process; `flow` gives the orders."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._stack = AsyncExitStack()
        self._counters: list[Counter] = []
        self._boards: list[tuple[Board, int]] = []
        self._meter = Meter(0)
        self._batches: list[list[bytes]] = []

    async def join(self, peer: str, tickets: list[dict[str, Any]]) -> None:
        """Connect to a running server, once for each ticket; earlier connections are closed."""
        await self.leave()
        self._peers = [PenstockBroker() if peer == "penstock" else make_peer(peer) for _ in tickets]
        await together(
            *(each.join(ticket) for each, ticket in zip(self._peers, tickets, strict=True))
        )

    async def leave(self) -> None:
        """Close all connections."""
        peers, self._peers = self._peers, []
        await together(*(peer.stop() for peer in peers))

    async def prepare(self, batch_events: int, payload_bytes: int, text: bool) -> None:
        """Make what will be published, before any clock runs."""
        self._batches = _batches(batch_events, payload_bytes, text)

    async def subscribe(
        self, shape: Shape, seats: list[Seat], batch_events: int, server_pid: int | None
    ) -> None:
        """Begin to consume: seat after seat, over the connections in turn."""
        self._sit(seats, batch_events, server_pid)
        for peer, counter in zip(itertools.cycle(self._peers), self._counters, strict=False):
            await self._stack.enter_async_context(peer.deliver(shape, counter))

    async def subscribe_all(
        self, pattern: str, topics: list[str], seats: list[Seat], batch_events: int
    ) -> None:
        """Begin to read all topics of a pattern on one connection (Penstock only)."""
        [peer] = self._peers
        assert isinstance(peer, PenstockBroker)
        self._sit(seats, batch_events, None)
        bus = await self._stack.enter_async_context(connect(peer.url))
        counters: dict[str, Count] = dict(zip(topics, self._counters, strict=True))
        await self._stack.enter_async_context(reading(bus, pattern, counters))

    def _sit(self, seats: list[Seat], batch_events: int, server_pid: int | None) -> None:
        self._meter = Meter(0, server_pid=server_pid)
        self._boards = [(Board(path), place) for path, place in seats]
        self._counters = [
            board.counter(place, batch_events, self._meter) for board, place in self._boards
        ]

    async def consume(self, probe: bool) -> dict[str, Any]:
        """Wait until everything has come; what is not settled durably is not counted."""
        with Blocks(probe) as blocks, self._meter as meter:
            for board, place in self._boards:
                await board.everything(place)
            for peer in self._peers:
                if isinstance(peer, PenstockBroker):
                    await peer.flush()
        await self._stack.aclose()
        return {
            "sample": meter.sample().as_dict(),
            "events": [counter.events for counter in self._counters],
            "blocks": blocks.left,
        }

    async def produce(
        self,
        boards: list[str],
        start: float,
        seconds: float,
        ahead: int,
        probe: bool,
    ) -> dict[str, Any]:
        """Publish batches for that long, one stream for each board, a few batches ahead."""
        batches = itertools.cycle(self._batches)
        opened = [Board(path) for path in boards]
        meter = Meter(seconds)
        with Blocks(probe) as blocks, meter:
            await until(start)
            await together(
                *(
                    _stream(peer, board, batches, meter, len(self._batches[0]), ahead)
                    for peer, board in zip(itertools.cycle(self._peers), opened, strict=False)
                )
            )
        return {"sample": meter.sample().as_dict(), "events": meter.events, "blocks": blocks.left}


async def _stream(
    peer: Peer,
    board: Board,
    batches: Iterator[Sequence[bytes]],
    meter: Meter,
    batch_events: int,
    ahead: int,
) -> None:
    published = 0

    async def work() -> None:
        nonlocal published
        while True:
            await board.room(ahead, batch_events)
            if not meter.running:
                return
            batch = next(batches)
            board.begin()
            begun = time.perf_counter()
            await peer.publish(batch)
            meter.add(time.perf_counter() - begun, len(batch))
            published += len(batch)

    await together(*(work() for _ in range(min(peer.pipeline_depth, ahead))))
    board.finish(published)


def _batches(batch_events: int, payload_bytes: int, text: bool) -> list[list[bytes]]:
    fitting = PREPARED_BYTES // (payload_bytes * batch_events)
    count = min(DISTINCT_BATCHES, max(fitting, BATCHES_AHEAD))
    if text:
        return [texts(payload_bytes, batch_events, seed) for seed in range(count)]
    window = Window(0, Path(), Path(), payload_bytes=payload_bytes, batch_events=batch_events)
    return window.batches(count)


# -- in the benchmark's process --------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """What flows: how much at once, to how many consumers, and for how long."""

    folder: Path
    seconds: float
    shape: Shape = "queue"
    topics: int = 1
    consumers: int = 1
    batch_events: int = BATCH_EVENTS
    payload_bytes: int = PAYLOAD_BYTES
    text: bool = False
    ahead: int = BATCHES_AHEAD
    server_pid: int | None = None

    def boards(self, run: str) -> list[str]:
        """A new board for each topic."""
        paths = [self.folder / f"board-{run}-{topic}" for topic in range(self.topics)]
        for path in paths:
            Board.make(path, self.consumers)
        return [str(path) for path in paths]


@dataclass
class Flowed:
    """What a flow came to."""

    published: int
    producer: dict[str, Any]
    consumers: list[dict[str, Any]]

    def sample(self, **extra: float) -> Sample:
        """The figures of all processes: rates and CPU added up, latencies of the slowest one."""
        samples = [each["sample"] for each in self.consumers]
        everyone = [*samples, self.producer["sample"]]
        servers = [each for each in samples if "server_cpu" in each]
        return Sample(
            per_s=sum(each["per_s"] for each in samples),
            p50_ms=max(each["p50_ms"] for each in samples),
            p95_ms=max(each["p95_ms"] for each in samples),
            p99_ms=max(each["p99_ms"] for each in samples),
            cpu=sum(each["cpu"] for each in everyone),
            rss_mb=sum(each["rss_mb"] for each in everyone),
            server_cpu=servers[0]["server_cpu"] if servers else None,
            server_rss_mb=servers[0]["server_rss_mb"] if servers else None,
            extra={
                "published": self.published,
                "publish_p50_ms": self.producer["sample"]["p50_ms"],
                "publish_p99_ms": self.producer["sample"]["p99_ms"],
                **extra,
            },
        )

    @property
    def blocks_per_op(self) -> float:
        """Memory blocks the clients kept for each event that was published."""
        left: int = sum(each["blocks"] for each in (self.producer, *self.consumers))
        return left / max(self.published, 1)


Orders = list[tuple[str, dict[str, Any]]]
"""For each consumer: which order makes it subscribe, and what goes with it; `seats` always does."""


async def flow(
    stream: Stream,
    producer: ClientProcess,
    consumers: Sequence[ClientProcess],
    orders: Callable[[list[str]], Orders],
    *,
    run: str = "timed",
    probe: bool = False,
) -> Flowed:
    """Run a stream; `orders` says, for the boards given, how each consumer subscribes.

    Raises when a consumer has more or fewer events than were published to it.
    """
    boards = stream.boards(run)
    seats = orders(boards)
    await producer.order(
        "prepare", batch_events=stream.batch_events, payload_bytes=stream.payload_bytes,
        text=stream.text,
    )  # fmt: skip
    for consumer, (name, given) in zip(consumers, seats, strict=True):
        await consumer.order(name, batch_events=stream.batch_events, **given)
    start = start_soon()
    produced, *consumed = await all_of(
        producer.order(
            "produce", boards=boards, start=start, seconds=stream.seconds, ahead=stream.ahead,
            probe=probe,
        ),
        *(consumer.order("consume", probe=probe) for consumer in consumers),
    )  # fmt: skip
    totals = {path: Board(path).total for path in boards}
    expect(sum(totals.values()), produced["events"], "noted as published")
    for (_, given), each in zip(seats, consumed, strict=True):
        for (path, _), events in zip(given["seats"], each["events"], strict=True):
            expect(events, totals[path], "delivered")
    return Flowed(produced["events"], produced, consumed)

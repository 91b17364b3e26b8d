"""Direct delivery: a consumer that registered with its Hello is sent each event, and acks it.

Sixty-four callers publish single events; the age of each is taken when the consumer acks it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.bench.case import PAYLOAD_BYTES
from penstock.bench.cases.broker_blocks import Blocks
from penstock.bench.cases.broker_board import Board
from penstock.bench.cases.broker_flow import PROBE_S, Flowed
from penstock.bench.cases.broker_paced import STAMP
from penstock.bench.cases.broker_peer import PenstockBroker, connect
from penstock.bench.cases.broker_queue import expect_acked
from penstock.bench.cases.workload import expect, together
from penstock.bench.client_process import all_of, start_soon, until
from penstock.bench.measure import Meter
from penstock.engines.broker.channel import Channel
from penstock.engines.broker.tcp import TcpLink
from penstock.model.batch import EventBatch
from penstock.model.errors import Deferred
from penstock.model.settings import Client
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Deliver, Hello, Settlement, decode

if TYPE_CHECKING:
    from penstock.bench.case import Window
    from penstock.bench.measure import Sample
    from penstock.bus.bus import Bus

DIRECT_PARTS = ("penstock.bench.cases.broker_direct:DirectPart",) * 2
NAME = "direct-bench"
CALLERS = 64
# Published and not yet acked; a broker lets 256 of a topic wait for a direct consumer.
EVENTS_AHEAD = 128


# -- in a client's process -------------------------------------------------------------------------


class DirectPart:
    """The producer, or the registered consumer, in its own process."""

    def __init__(self) -> None:
        self._channel: Any = None
        self._bus: Any = None
        self._meter = Meter(0)
        self._events = 0
        self._board: Any = None

    async def connect(self, url: str) -> None:
        """Connect as a producer."""
        self._bus = await connect(url).open()

    async def register(self, url: str, topic: str) -> None:
        """Connect as a consumer to which events of the topic go directly."""
        where = urlsplit(url)
        host, port = where.hostname or "", where.port or 0
        hello = Hello(NAME, subscriptions=[topic], max_inflight=EVENTS_AHEAD)
        self._channel = Channel(lambda: TcpLink(host, port), Client(), hello)
        self._channel.on_push = self._pushed
        await self._channel.open()

    async def leave(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
        if self._bus is not None:
            await self._bus.close()
        self._channel = self._bus = None

    def _pushed(self, frame: Frame) -> None:
        if frame.kind != Kind.DELIVER:
            return
        deliver: Deliver = decode(frame.meta, Deliver)
        payloads = EventBatch.decode(frame.parts[0]).payloads()
        now = time.perf_counter_ns()
        for payload in payloads:
            self._meter.add((now - STAMP.unpack_from(payload)[0]) / 1e9)
        settled = Settlement(deliver.delivery, len(payloads), [0, len(payloads)])
        self._channel.settle([settled])
        self._events += len(payloads)
        self._board.had(0, self._events)

    async def open(self, board: str, server_pid: int) -> None:
        """Count from now on, on a new board."""
        self._board, self._events = Board(board), 0
        self._meter = Meter(0, server_pid=server_pid)

    async def consume(self, probe: bool) -> dict[str, Any]:
        """Wait until everything has come and is acked for good."""
        with Blocks(probe) as blocks, self._meter as meter:
            await self._board.everything(0)
            await self._channel.call(Kind.FLUSH)
        sample = meter.sample().as_dict()
        return {"sample": sample, "events": self._events, "blocks": blocks.left}

    async def produce(
        self, topic: str, board: str, start: float, seconds: float, probe: bool
    ) -> dict[str, Any]:
        """Single events by many callers; one that is deferred is published again, and counted."""
        calls = _Callers(self._bus, topic, Board(board), Meter(seconds))
        with Blocks(probe) as blocks, calls.meter as meter:
            await until(start)
            await together(*(calls.work() for _ in range(CALLERS)))
        Board(board).finish(meter.events)
        return {
            "sample": meter.sample().as_dict(),
            "events": meter.events,
            "deferred": calls.deferred,
            "blocks": blocks.left,
        }


class _Callers:
    """What the callers share."""

    def __init__(self, bus: Bus, topic: str, board: Board, meter: Meter) -> None:
        self.meter = meter
        self.deferred = 0
        self._bus = bus
        self._topic = topic
        self._board = board

    async def work(self) -> None:
        while True:
            await self._board.room(EVENTS_AHEAD, 1)
            if not self.meter.running:
                return
            self._board.begin()
            begun = time.perf_counter()
            while not await self._published():
                self.deferred += 1
            self.meter.add(time.perf_counter() - begun)

    async def _published(self) -> bool:
        stamp = STAMP.pack(time.perf_counter_ns())
        try:
            await self._bus.publish(self._topic, stamp.ljust(PAYLOAD_BYTES, b"."))
        except Deferred as busy:
            await asyncio.sleep(busy.retry_after_s)
            return False
        return True


# -- in the benchmark's process --------------------------------------------------------------------


async def broker_direct_ack(window: Window) -> Sample:
    """Single events to a registered consumer, which acks each."""
    broker = PenstockBroker()
    producer, consumer = window.clients
    async with broker.serving(window):
        await broker.open("queue")
        await consumer.order("register", url=broker.url, topic=broker.topics[0])
        await producer.order("connect", url=broker.url)
        flowed = await _direct(broker, window)
        short = replace(window, seconds=min(window.seconds, PROBE_S))
        probed = await _direct(broker, short, probe=True)
        expect(await broker.stored(), flowed.published + probed.published, "stored")
        await expect_acked(broker)
    deferred = flowed.producer["deferred"]
    return flowed.sample(blocks_per_op=probed.blocks_per_op, deferred=deferred)


async def _direct(broker: PenstockBroker, window: Window, probe: bool = False) -> Flowed:
    producer, consumer = window.clients
    board = window.folder / f"board-{probe}"
    Board.make(board, consumers=1)
    await consumer.order("open", board=str(board), server_pid=broker.server_pid)
    produced, consumed = await all_of(
        producer.order(
            "produce", topic=broker.topics[0], board=str(board), start=start_soon(),
            seconds=window.seconds, probe=probe,
        ),
        consumer.order("consume", probe=probe),
    )  # fmt: skip
    expect(consumed["events"], produced["events"], "delivered")
    return Flowed(produced["events"], produced, [consumed])

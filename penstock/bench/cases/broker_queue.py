"""Delivering through a broker: a queue acked one by one, eight subscribers, and eight topics.

The producer and the consumers have processes of their own, for Penstock and for every peer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.bench.cases.broker_flow import FLOW, PROBE_S, Flowed, Orders, Stream, flow
from penstock.bench.cases.broker_peer import PenstockBroker
from penstock.bench.cases.workload import expect
from penstock.bench.client_process import all_of
from penstock.bench.peers import FANOUT_SUBSCRIBERS
from penstock.bench.peers.operation import DRAIN_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.bench.case import Window
    from penstock.bench.measure import Sample
    from penstock.bench.peers import Peer

# Two processes of four subscribers: eight would be four times the cores of a small machine.
FANOUT_PROCESSES = 2
MIXED_TOPICS = 8
MIXED_BATCH_EVENTS = 100

QUEUE_PARTS = (FLOW,) * 2
FANOUT_PARTS = (FLOW,) * (1 + FANOUT_PROCESSES)
MIXED_PARTS = (FLOW,) * 3


async def broker_queue(window: Window) -> Sample:
    """Publish, hand each event to a handler in another process, ack each."""
    broker = PenstockBroker()
    async with broker.serving(window):
        flowed = await _queue(broker, window)
        expect(await broker.stored(), flowed.published, "stored")
    return flowed.sample()


async def queue_apart(peer: Peer, window: Window) -> Sample:
    """The same for a peer."""
    return (await _queue(peer, window)).sample()


async def _queue(peer: Peer, window: Window) -> Flowed:
    await peer.open("queue")
    await all_of(
        *(each.order("join", peer=peer.name, tickets=[peer.ticket()]) for each in window.clients)
    )
    producer, consumer = window.clients
    stream = Stream(
        window.folder, window.seconds, "queue", batch_events=window.batch_events,
        payload_bytes=window.payload_bytes, server_pid=peer.server_pid,
    )  # fmt: skip
    flowed = await flow(stream, producer, [consumer], lambda boards: [_seats(stream, boards, [0])])
    await expect_acked(peer)
    return flowed


async def broker_fanout(window: Window) -> Sample:
    """Every event to eight subscribers in other processes; deliveries are counted."""
    broker = PenstockBroker()
    async with broker.serving(window):
        flowed = await _fanout(broker, window)
        short = replace(window, seconds=min(window.seconds, PROBE_S))
        probed = await _fanout(broker, short, probe=True)
        expect(await broker.stored(), flowed.published + probed.published, "stored")
    return flowed.sample(blocks_per_op=probed.blocks_per_op)


async def fanout_apart(peer: Peer, window: Window) -> Sample:
    """The same for a peer."""
    return (await _fanout(peer, window)).sample()


async def _fanout(peer: Peer, window: Window, probe: bool = False) -> Flowed:
    producer, *consumers = window.clients
    if not probe:
        await peer.open("fanout")
    each = FANOUT_SUBSCRIBERS // FANOUT_PROCESSES
    # Which of the subscribers' queues a process takes, where a peer has one for each.
    taken = [0, *(number * each for number in range(FANOUT_PROCESSES))]
    await all_of(
        *(
            client.order("join", peer=peer.name, tickets=[peer.ticket() | {"taken": first}])
            for client, first in zip(window.clients, taken, strict=True)
        )
    )
    stream = Stream(
        window.folder, window.seconds, "fanout", consumers=FANOUT_SUBSCRIBERS,
        batch_events=window.batch_events, payload_bytes=window.payload_bytes,
        server_pid=peer.server_pid,
    )  # fmt: skip

    def orders(boards: list[str]) -> Orders:
        return [_seats(stream, boards, range(first, first + each)) for first in taken[1:]]

    run = "probe" if probe else "timed"
    return await flow(stream, producer, consumers, orders, run=run, probe=probe)


async def broker_mixed(window: Window) -> Sample:
    """Eight topics with a producer and a handler each, and one reader of all, in three processes."""
    broker = PenstockBroker(topics=MIXED_TOPICS)
    producer, workers, reader = window.clients
    async with broker.serving(window):
        await broker.open("queue")
        tickets = [broker.ticket() | {"topics": [topic]} for topic in broker.topics]
        await all_of(
            producer.order("join", peer=broker.name, tickets=tickets),
            workers.order("join", peer=broker.name, tickets=tickets),
            reader.order("join", peer=broker.name, tickets=[broker.ticket()]),
        )
        flowed = await _mixed(broker, window)
        short = replace(window, seconds=min(window.seconds, PROBE_S))
        probed = await _mixed(broker, short, probe=True)
        await expect_acked(broker)
        expect(await broker.stored(), flowed.published + probed.published, "stored")
    return flowed.sample(blocks_per_op=probed.blocks_per_op)


async def _mixed(broker: PenstockBroker, window: Window, probe: bool = False) -> Flowed:
    producer, *consumers = window.clients
    stream = Stream(
        window.folder, window.seconds, topics=MIXED_TOPICS, consumers=2,
        batch_events=MIXED_BATCH_EVENTS, payload_bytes=window.payload_bytes,
        server_pid=broker.server_pid,
    )  # fmt: skip

    def orders(boards: list[str]) -> Orders:
        read_all = {"pattern": "bench.*", "topics": broker.topics, "seats": _row(boards, 1)}
        return [_seats(stream, boards, [0]), ("subscribe_all", read_all)]

    run = "probe" if probe else "timed"
    return await flow(stream, producer, consumers, orders, run=run, probe=probe)


def _seats(stream: Stream, boards: list[str], places: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """The order by which one process takes these places on every board."""
    seats = [seat for place in places for seat in _row(boards, place)]
    given = {"shape": stream.shape, "seats": seats, "server_pid": stream.server_pid}
    return "subscribe", given


def _row(boards: list[str], place: int) -> list[tuple[str, int]]:
    return [(board, place) for board in boards]


async def expect_acked(peer: Peer) -> None:
    """Refuse a figure when the server says that something is not acked; some count late."""
    end = time.monotonic() + DRAIN_TIMEOUT_S
    while (left := await peer.leftover()) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    expect(left, 0, f"left unacked at {peer.name}")

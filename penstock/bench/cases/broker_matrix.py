"""Every combination of payload class, compression on the wire and number of connections.

In each cell events are published, delivered to a handler in another process and acked, with as
many connections on either side. Payloads are text that compresses about three times.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.bench.cases.broker_flow import FLOW, Flowed, Orders, Stream, flow
from penstock.bench.cases.broker_peer import PenstockBroker
from penstock.bench.cases.broker_queue import expect_acked
from penstock.bench.cases.workload import expect
from penstock.bench.client_process import all_of
from penstock.bench.measure import Sample
from penstock.model.settings import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bench.case import Window

# Bytes of a payload, and events in a call: about as long under way, whatever the class.
CLASSES = {"small": (100, 100), "medium": (4 * KIB, 16), "large": (256 * KIB, 1)}
COMPRESSORS = ("none", "lz4", "zstd")
CONNECTIONS = (1, 4)
MATRIX_PARTS = (FLOW,) * 2
# Eighteen cells and two rounds have to fit into the time of a case.
CELL_SHARE = 0.2
PROBE_SHARE = 0.25
CELL_FIGURES = (
    "per_s", "mb_per_s", "p50_ms", "p95_ms", "p99_ms", "cpu", "rss_mb", "server_cpu", "server_rss_mb",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One combination.

    >>> Cell("small", "lz4", 4).name
    'small.lz4.4'
    """

    payload_class: str
    compressor: str
    connections: int

    @property
    def name(self) -> str:
        """As it stands in the results."""
        return f"{self.payload_class}.{self.compressor}.{self.connections}"


def cells() -> Iterator[Cell]:
    """All combinations.

    >>> len(list(cells()))
    18
    """
    return itertools.starmap(Cell, itertools.product(CLASSES, COMPRESSORS, CONNECTIONS))


async def matrix(window: Window) -> Sample:
    """All cells, one after another on one broker; the figures of each are in `extra`."""
    broker = PenstockBroker(topics=max(CONNECTIONS))
    measured: dict[str, dict[str, float]] = {}
    published = 0
    async with broker.serving(window):
        await broker.open("queue")
        for cell in cells():
            flowed, probed = await _cell(cell, broker, window)
            measured[cell.name] = _figures(cell, flowed, probed)
            published += flowed.published + probed.published
        expect(await broker.stored(), published, "stored")
        await expect_acked(broker)
    return _sample(measured)


async def _cell(cell: Cell, broker: PenstockBroker, window: Window) -> tuple[Flowed, Flowed]:
    producer, consumer = window.clients
    topics = broker.topics[: cell.connections]
    client = {"compressor": cell.compressor}
    tickets = [broker.ticket() | {"topics": [topic], "client": client} for topic in topics]
    await all_of(
        *(each.order("join", peer=broker.name, tickets=tickets) for each in (producer, consumer))
    )
    payload_bytes, batch_events = CLASSES[cell.payload_class]

    def orders(boards: list[str]) -> Orders:
        seats = [(board, 0) for board in boards]
        given: dict[str, Any] = {"shape": "queue", "seats": seats}
        return [("subscribe", given | {"server_pid": broker.server_pid})]

    async def run(seconds: float, probe: bool) -> Flowed:
        stream = Stream(
            window.folder, seconds, topics=cell.connections, batch_events=batch_events,
            payload_bytes=payload_bytes, text=True,
        )  # fmt: skip
        name = f"{cell.name}-{'probe' if probe else 'timed'}"
        return await flow(stream, producer, [consumer], orders, run=name, probe=probe)

    seconds = window.seconds * CELL_SHARE
    return await run(seconds, probe=False), await run(seconds * PROBE_SHARE, probe=True)


def _figures(cell: Cell, flowed: Flowed, probed: Flowed) -> dict[str, float]:
    sample = flowed.sample()
    payload_bytes, _ = CLASSES[cell.payload_class]
    found = {name: getattr(sample, name) for name in CELL_FIGURES if name != "mb_per_s"}
    found["mb_per_s"] = sample.per_s * payload_bytes / 1e6
    found["blocks_per_op"] = probed.blocks_per_op
    return found


def _sample(measured: dict[str, dict[str, float]]) -> Sample:
    """The whole as one line: medians over the cells, and the largest memory."""

    def middle(name: str) -> float:
        return statistics.median(cell[name] for cell in measured.values())

    def largest(name: str) -> float:
        return max(cell[name] for cell in measured.values())

    return Sample(
        per_s=middle("per_s"),
        p50_ms=middle("p50_ms"),
        p95_ms=middle("p95_ms"),
        p99_ms=middle("p99_ms"),
        cpu=middle("cpu"),
        rss_mb=largest("rss_mb"),
        mb_per_s=middle("mb_per_s"),
        server_cpu=middle("server_cpu"),
        server_rss_mb=largest("server_rss_mb"),
        extra={
            f"{cell}.{name}": value
            for cell, figures in measured.items()
            for name, value in figures.items()
        },
    )

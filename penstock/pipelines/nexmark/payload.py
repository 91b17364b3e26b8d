"""Nexmark on a bus: payloads as JSON, made in columns, one topic for each kind of event.

The event time is the envelope's; the payload does not repeat it. Other times are milliseconds
since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock.pipelines.nexmark.generator import AUCTION, BID, PERSON, Generator

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

TOPICS = {"persons": "nexmark.person", "auctions": "nexmark.auction", "bids": "nexmark.bid"}
SCHEMAS = {"persons": PERSON, "auctions": AUCTION, "bids": BID}
EVENT_TIME = "date_time"
BATCH_EVENTS = 20_000  # about 4 MB of bids a call


def json_payloads(table: pa.Table) -> pa.ChunkedArray:
    """The rows of a table as JSON, without the event time.

    Texts are taken as they are: the generator makes none that JSON would want escaped.

    >>> made = Generator(events=50).generate()
    >>> json_payloads(made.persons.select(["id", "state", "date_time"])).to_pylist()[0][:19]
    b'{"id":1000,"state":'
    """
    parts: list[object] = []
    for name in table.schema.names:
        if name == EVENT_TIME:
            continue
        column, kind = table.column(name), table.schema.field(name).type
        opening = ("," if parts else "{") + f'"{name}":'
        if pa.types.is_string(kind):
            parts += [f'{opening}"', column, '"']
            continue
        if pa.types.is_timestamp(kind):
            column = pc.divide(column.cast(pa.int64()), 1000)
        parts += [opening, pc.cast(column, pa.string())]
    return pc.binary_join_element_wise(*_fewer(parts), "}", "").cast(pa.binary())


def _fewer(parts: list[object]) -> Iterator[object]:
    """The same parts with neighbouring constants in one: each part costs a copy for every row."""
    waiting = ""
    for part in parts:
        if isinstance(part, str):
            waiting += part
            continue
        yield from chain([waiting] if waiting else [], [part])
        waiting = ""
    if waiting:
        yield waiting


def bus_columns(table: pa.Table) -> pa.Table:
    """A table of events as the columns that `Bus.publish_many` takes: payload and event time."""
    return pa.table({"payload": json_payloads(table), "event_time": table.column(EVENT_TIME)})


async def publish(
    bus: Bus,
    generator: Generator,
    *,
    batch_events: int = BATCH_EVENTS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Publish all events of a generator; the number of events by topic.

    `progress` is told how many of how many events are published, after each batch.
    """
    counts = dict.fromkeys(TOPICS.values(), 0)
    for events in generator.chunks():
        for kind, topic in TOPICS.items():
            columns = bus_columns(getattr(events, kind))
            for first in range(0, columns.num_rows, batch_events):
                batch = columns.slice(first, batch_events)
                await bus.publish_many(topic, batch, codec="json")
                counts[topic] += batch.num_rows
                if progress is not None:
                    progress(sum(counts.values()), generator.events)
    return counts

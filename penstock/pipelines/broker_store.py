"""A store that asks a broker: for readers that do not see the folder, or may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import pyarrow as pa

from penstock.engines.broker import BrokerEngine
from penstock.engines.request import FindOffset
from penstock.log.gather import gather
from penstock.model.batch import EventBatch
from penstock.model.errors import OffsetExpired
from penstock.model.topic import is_system, is_wildcard, matches
from penstock.pipelines.connection import Connection
from penstock.pipelines.plan import Bounds, Split
from penstock.pipelines.store import PIECE_BYTES, PIECE_EVENTS


class BrokerStore:
    """A broker, over one connection for all tasks of a process."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._connection = Connection(url, token)
        self._bus = self._connection.bus

    def identity(self) -> str:
        """What tells the broker's bus from every other; older brokers do not say."""
        engine = self._bus.engine
        return engine.bus_id if isinstance(engine, BrokerEngine) else ""

    def bounds(self, pattern: str) -> Bounds:
        """First and end offset of every partition of the topics that match, as of now."""
        found = self._connection.wait(self._bus.topics.list(system=is_system(pattern)))
        wanted = (info for info in found if info.name == pattern or (
            is_wildcard(pattern) and matches(pattern, info.name)
        ))  # fmt: skip
        return {
            (info.name, part.partition): (part.first_offset, part.end_offset)
            for info in wanted
            for part in info.partitions
        }

    def find_time(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset appended at or after a time."""
        found: int = self._connection.wait(self._bus.ask(FindOffset(topic, partition, time_us)))
        return found

    def rows(self, split: Split, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The log's columns of these names, in this order, as they are stored."""
        batches = self._bus.engine.read(split.topic, split.partition, split.start, split.stop)
        at = split.start
        while at < split.stop:
            some = self._connection.wait(_some(batches))
            if not some:
                raise OffsetExpired(
                    f"{split} was to be read, and the broker has nothing from {at} on: the topic "
                    "was deleted and made anew, or this is another broker",
                    topic=split.topic,
                    partition=split.partition,
                )
            yield gather(some).select(list(columns))
            at = some[-1].end_offset

    def close(self) -> None:
        """Leave the broker."""
        self._connection.close()


async def _some(batches: AsyncIterator[EventBatch]) -> list[EventBatch]:
    """The next batches, up to a piece."""
    some: list[EventBatch] = []
    events = size = 0
    async for batch in batches:
        some.append(batch)
        events += batch.count
        size += batch.size_bytes
        if events >= PIECE_EVENTS or size >= PIECE_BYTES:
            break
    return some

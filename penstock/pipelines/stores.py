"""Stores: where a reader in a Spark process finds topics, offsets and rows.

`FolderStore` reads a folder's files itself, `BrokerStore` asks a broker. A Spark worker runs many
tasks, so `store_at` opens a store once in a process and reuses it. `Connection` is an open bus for code
without an event loop: the loop runs in a thread.
"""

from __future__ import annotations

import atexit
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from penstock.bus.bus import Bus
from penstock.bus.connect import BROKER, connect
from penstock.bus.sync import LoopThread
from penstock.engines.broker.engine import BrokerEngine
from penstock.engines.requests import FindOffset
from penstock.log.audit_reader import read_identity
from penstock.log.disk import RealDisk
from penstock.log.event_log import InSegment
from penstock.log.recovery import open_for_reading
from penstock.log.segment import SegmentInfo, rows_of
from penstock.log.segment_reader import SegmentReader
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, NotADataFolder, OffsetExpired
from penstock.model.settings import Settings
from penstock.model.topic import is_system, is_wildcard, matches
from penstock.pipelines.columns import repeated
from penstock.pipelines.plan import Bounds, Split

# -- stores ---------------------------------------------------------------------------------------

T = TypeVar("T")

# Rows handed to Spark at once: a row group of a segment, and never much memory.
PIECE_EVENTS = 65_536
PIECE_BYTES = 8 << 20


class Store(Protocol):
    """A folder or a broker that holds events."""

    def identity(self) -> str:
        """The id of this bus; empty when a broker does not tell it."""
        ...

    def bounds(self, pattern: str) -> Bounds:
        """First and end offset of every partition of the topics that match, as of now."""
        ...

    def find_time(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset appended at or after a time."""
        ...

    def rows(self, split: Split, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The log's columns of these names, in this order, as they are stored."""
        ...

    def close(self) -> None:
        """Release what it holds open."""
        ...


_open: dict[tuple[str, str | None], Store] = {}


def store_at(url: str, token: str | None = None) -> Store:
    """The store of a URL, the same one for the life of this process."""
    key = (url, token)
    found = _open.get(key)
    if found is None:
        found = _open[key] = _opener(url)(url, token)
    return found


def _opener(url: str) -> Callable[[str, str | None], Store]:
    return BrokerStore if is_broker(url) else FolderStore


@atexit.register
def close_stores() -> None:
    """Close every store of this process."""
    while _open:
        _open.popitem()[1].close()


# -- a folder -------------------------------------------------------------------------------------

# Columns that a segment's metadata gives for a whole range of rows, so they are not read.
CONSTANT = ("topic", "partition", "offset")


class FolderStore:
    """A folder that another process may be writing; sees what is committed."""

    def __init__(self, folder: str, token: str | None = None) -> None:
        self._disk = RealDisk(Path(folder))
        try:
            self._open()
        except NotADataFolder as error:
            raise NotADataFolder(
                f"there is nothing to read: {folder!r} is no data folder of Penstock. Correct `url`; "
                "a broker's is penstock://host:port",
                **error.data,
            ) from None

    def _open(self) -> None:
        self._recovery = open_for_reading(self._disk, Settings())
        self._log = self._recovery.log
        self._readers: dict[int, SegmentReader] = {}

    def _advance(self) -> None:
        try:
            self._recovery.advance()
        except OffsetExpired:  # it was sealed and reclaimed unseen: the segments have it
            self.close()
            self._open()
        live = {info.id for info in self._log.manifest.segments()} if self._readers else set()
        for number in set(self._readers) - live:
            self._readers.pop(number).close()

    def identity(self) -> str:
        """The id of this bus."""
        return read_identity(self._disk)

    def bounds(self, pattern: str) -> Bounds:
        """First and end offset of every partition of the topics that match, as of now."""
        self._advance()
        system = is_system(pattern)
        return {
            (topic, partition): self._log.bounds(topic, partition)
            for topic, spec in sorted(self._recovery.fold.state.topics.items())
            if (system or not is_system(topic)) and matches(pattern, topic)
            for partition in range(spec.partitions)
        }

    def find_time(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset appended at or after a time."""
        return self._log.find_time(topic, partition, time_us)

    def rows(self, split: Split, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The log's columns of these names, in this order, as they are stored."""
        at, moved = split.start, False
        self._advance()
        while at < split.stop:
            try:
                for behind, piece in self._piece(split, at, columns):
                    yield piece
                    at, moved = behind, False
            except (Corrupted, FileNotFoundError):
                # A file that was sealed, merged or reclaimed since the look-up is not damaged.
                if moved:
                    raise
                moved = True
                self._advance()

    def _piece(
        self, split: Split, at: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The next rows where they lie now, each with the offset behind it."""
        sources = self._log.plan(
            split.topic, split.partition, at, min(PIECE_EVENTS, split.stop - at)
        )
        if not sources:
            self._raise_not_there(split, at)
        first = sources[0]
        if isinstance(first, InSegment):
            last = min(at + self._rows_in_range(first.info, split, at), split.stop) - 1
            scan = self._reader(first.info).scan(
                split.topic, split.partition, at, last, [n for n in columns if n not in CONSTANT]
            )
            for start, rows in scan:
                yield from _pieces(_completed(rows, columns, split, start), start)
        else:
            batches = self._log.load(sources, at, min(PIECE_EVENTS, split.stop - at))
            yield from _pieces(_gathered(batches, columns), at)

    def _rows_in_range(self, info: SegmentInfo, split: Split, at: int) -> int:
        for each in info.ranges:
            if (each.topic, each.partition) == (split.topic, split.partition) and (
                each.first_offset <= at <= each.last_offset
            ):
                return each.last_offset + 1 - at
        raise AssertionError(f"{info.path} does not hold {split}")

    def _raise_not_there(self, split: Split, at: int) -> None:
        first, end = self._log.bounds(split.topic, split.partition)
        raise OffsetExpired(
            f"{split.topic}/{split.partition}/{at} is not there: the log has {first} to {end - 1}. "
            "The checkpoint belongs to another folder, or the topic was deleted and made anew",
            topic=split.topic,
            partition=split.partition,
            first_offset=first,
            end_offset=end,
        )

    def _reader(self, info: SegmentInfo) -> SegmentReader:
        reader = self._readers.get(info.id)
        if reader is None:
            reader = self._readers[info.id] = SegmentReader(self._disk, info)
        return reader

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._log.close()
        self._log.manifest.close()


def _gathered(batches: Sequence[EventBatch], columns: Sequence[str]) -> pa.RecordBatch:
    return rows_of(batches).select(list(columns))


def _completed(
    rows: pa.RecordBatch, columns: Sequence[str], split: Split, start: int
) -> pa.RecordBatch:
    """Add the columns that are the same, or count up, in a whole range of rows."""
    count = rows.num_rows
    arrays = []
    for name in columns:
        if name == "topic":
            arrays.append(repeated(split.topic, pa.string(), count))
        elif name == "partition":
            arrays.append(repeated(split.partition, pa.int32(), count))
        elif name == "offset":
            arrays.append(pa.array(np.arange(start, start + count, dtype=np.int64)))
        else:
            arrays.append(rows.column(name))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _pieces(rows: pa.RecordBatch, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut rows so that none is much larger than a piece; each with the offset behind it."""
    parts = max(1, -(-rows.nbytes // PIECE_BYTES))
    size = -(-rows.num_rows // parts)
    for begin in range(0, rows.num_rows, size):
        piece = rows.slice(begin, size)
        yield start + begin + piece.num_rows, piece


# -- a broker -------------------------------------------------------------------------------------


class BrokerStore:
    """A broker, over one connection for all tasks of a process."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._connection = Connection(url, token)
        self._bus = self._connection.bus

    def identity(self) -> str:
        """The id of the broker's bus; empty for older brokers, which do not tell it."""
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
            yield rows_of(some).select(list(columns))
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


# -- connections ----------------------------------------------------------------------------------


def is_broker(url: str) -> bool:
    """Whether a URL names a broker, and not a folder.

    >>> is_broker("penstock://127.0.0.1"), is_broker("./data")
    (True, False)
    """
    scheme, found, _ = url.partition("://")
    return bool(found) and scheme in BROKER


def credentials(token: str | None) -> dict[str, Any]:
    """The settings that show a token to a broker, which knows the tenant it speaks for."""
    return {} if token is None else {"client__token": token}


class Connection:
    """An open bus, for code that has no loop."""

    def __init__(self, url: str, token: str | None, **more: Any) -> None:
        self._thread = LoopThread()
        try:
            self.bus: Bus = self._thread.call(lambda: connect(url, **credentials(token), **more))
            self.wait(self.bus.open())
        except BaseException:
            self._thread.stop()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the bus's loop and wait for it."""
        return self._thread.wait(work)

    def close(self) -> None:
        """Leave the bus."""
        self.wait(self.bus.close())
        self._thread.stop()

"""`spark.read.format("penstock")` and `readStream`: topics as DataFrames.

The driver plans a read with `BatchReader` or `StreamReader`; each task reads its `Task` with `read`.
A task reads one piece ahead: a worker that hands a piece to Spark waits until Spark has room for it,
and the next piece is read meanwhile.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.model.errors import InvalidInput, UnknownTopic
from penstock.model.parameter import place
from penstock.model.topic import is_wildcard
from penstock.pipelines.columns import LATE, VALUE, check_schema, row_ddl
from penstock.pipelines.failure import failpoint, plain_errors, warn_skipped
from penstock.pipelines.options import (
    SINKS,
    SOURCES,
    SourceOptions,
    offsets_of,
    source_options,
    table_comment,
    with_tables,
)
from penstock.pipelines.plan import (
    PUSHDOWN,
    Bounds,
    Narrowing,
    Offsets,
    Place,
    Split,
    ahead,
    behind,
    expired,
    splits,
)
from penstock.pipelines.rows import Reading, newest_us
from penstock.pipelines.session import freeze_modules
from penstock.pipelines.sink import BatchWriter, StreamWriter
from penstock.pipelines.stores import Store, store_at

# -- source ---------------------------------------------------------------------------------------

T = TypeVar("T")

# Partitions and events read to estimate the size of an event for `maxBytesPerTrigger`: few, because
# they are read before every batch.
SAMPLED_LANES, SAMPLED_EVENTS = 16, 100


@plain_errors
class PenstockSource(DataSource):
    """Topics of a bus, to read and to write. docs/guide/spark.md has the options."""

    @classmethod
    def name(cls) -> str:
        """What follows `format(`."""
        return "penstock"

    def schema(self) -> str:
        """All columns, or those of the option `columns`."""
        options = source_options(self.options)
        late = options.late_after_us is not None
        comment = table_comment(self.options)
        return row_ddl(options.columns, options.schema, late=late, comment=comment)

    def reader(self, schema: StructType) -> BatchReader:
        """Read once; with filters pushed down if Spark was told to push them."""
        options = self._read_options(schema)
        pushing = os.environ.get(PUSHDOWN) == "1" if options.pushdown is None else options.pushdown
        return (PushingReader if pushing else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Read as a stream."""
        return StreamReader(self._read_options(schema), schema)

    def _read_options(self, schema: StructType) -> SourceOptions:
        return source_options(with_tables(self.options, schema, SOURCES))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Write once."""
        return BatchWriter(with_tables(self.options, schema, SINKS), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Write as a stream."""
        return StreamWriter(with_tables(self.options, schema, SINKS), schema)


class Task(InputPartition):
    """Splits that one task reads, the event time before which rows are late, and where partitions began."""

    def __init__(self, parts: Sequence[Split], late_before_us: int | None, bounds: Bounds) -> None:
        super().__init__(", ".join(map(str, parts)))
        self.parts = list(parts)
        self.late_before_us = late_before_us
        lanes = {(part.topic, part.partition) for part in parts}
        self.began: Offsets = {lane: bounds[lane][0] for lane in lanes & bounds.keys()}

    def rows(self, reading: Reading) -> Iterator[pa.RecordBatch]:
        """What the task reads."""
        return reading.rows(self.parts, self.late_before_us, self.began)


def _reading(options: SourceOptions, schema: StructType) -> Reading:
    check_schema(schema)
    value_type = None
    if VALUE in schema.names:
        fields = schema[VALUE].dataType
        assert isinstance(fields, StructType)
        value_type = to_arrow_schema(fields, timezone="UTC").serialize().to_pybytes()
    skip = options.on_expired == "skip"
    never_null = tuple(each.name for each in schema if not each.nullable)
    return Reading(options.url, options.token, tuple(schema.names), never_null, value_type, skip)


@plain_errors
class _Reader:
    """What batch and stream readers share."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self.reading = _reading(options, schema)
        self._told: set[Split] = set()

    def store(self) -> Store:
        return store_at(self.options.url, self.options.token)

    def bounds(self, *, all_there: bool = False) -> Bounds:
        """The partitions there are now; with `all_there`, a topic named in full must exist."""
        wanted = self.options.topics
        found = wanted.bounds(self.store().bounds)
        for name in wanted.patterns if all_there else ():
            if not is_wildcard(name) and name not in {topic for topic, _ in found}:
                raise UnknownTopic(
                    f"there is no topic {name!r} in {self.options.url}; "
                    "`penstock topic list` shows them",
                    topic=name,
                )
        return found

    def at(self, text: str, bounds: Bounds) -> Offsets:
        """The offsets that `earliest`, `latest`, a time or JSON of these and of offsets mean."""
        given = offsets_of(text)
        now_us = time.time_ns() // 1_000
        if given is None:
            return {lane: self._at(text, lane, bounds[lane], now_us) for lane in bounds}
        self._check_given(given, bounds)
        chosen = {lane: given.get(lane, "earliest") for lane in bounds}
        return {lane: self._at(each, lane, bounds[lane], now_us) for lane, each in chosen.items()}

    def _at(
        self, wanted: int | str, lane: tuple[str, int], ends: tuple[int, int], now_us: int
    ) -> int:
        if isinstance(wanted, int):
            return wanted
        if wanted in ("earliest", "latest"):
            return ends[wanted == "latest"]
        kind, _, number = place("start", wanted, now_us).partition(":")
        if kind == "offset":
            return max(ends[0], min(int(number), ends[1]))
        return self.store().find_time(*lane, int(number))

    def _check_given(self, given: Mapping[tuple[str, int], int | str], bounds: Bounds) -> None:
        for lane, offset in given.items():
            if lane not in bounds:
                raise InvalidInput(
                    f"offsets name {lane[0]}/{lane[1]}, which is not among the topics that are read"
                )
            if isinstance(offset, int) and offset > bounds[lane][1]:
                raise InvalidInput(
                    f"offset {offset} of {lane[0]}/{lane[1]} is beyond the end, {bounds[lane][1]}"
                )

    def tell_expired(self, begin: Offsets, until: Offsets, bounds: Bounds) -> None:
        """Warn of events that retention deleted, where they are skipped; otherwise a task fails on them."""
        if self.reading.skip_expired:
            for gone in set(expired(begin, until, bounds)) - self._told:
                self._told.add(gone)
                warn_skipped(gone)

    def newest_us(self, parts: Iterable[Split], so_far_us: int) -> int:
        """The newest event time of some events, from which lateness is counted."""
        for split in parts:
            for rows in self.reading.stored(split, ["append_time", "event_time"]):
                events, appended = (rows.column(at).view(pa.int64()).to_numpy() for at in (1, 0))
                so_far_us = newest_us(events, appended, so_far_us)
        return so_far_us

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; Spark makes a task without a partition where there are none."""
        if not isinstance(partition, Task):
            return
        failpoint("source.reading")
        yield from read_ahead(partition.rows(self.reading))
        freeze_modules()


@plain_errors
class BatchReader(_Reader, DataSourceReader):
    """Reads the events between two points."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        if LATE in schema.names:
            raise InvalidInput("a batch read knows no late events; leave `lateAfter` out")
        self._narrowing = Narrowing()

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks."""
        bounds = self.bounds(all_there=True)
        begin, until = self.at(self.options.start, bounds), self.at(self.options.end, bounds)
        begin, until = self._narrowing.narrowed(begin, until, self.store().find_time)
        self.tell_expired(begin, until, bounds)
        tasks = splits(Place(begin), Place(until), self.options.events_per_task)
        return [Task(parts, None, bounds) for parts in tasks]


@plain_errors
class PushingReader(BatchReader):
    """The same with filters: Spark refuses a reader that has them where it was not told to push."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Use filters on topic, tenant, partition, offset and append time to read less.

        All are handed back: files are cut at row groups, and Spark looks at each row anyhow.
        """
        self._narrowing = Narrowing.of(filters)
        return filters


@plain_errors
class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on as events come; its place is in Spark's checkpoint."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._until: Bounds | None = None
        self._began_s = time.monotonic()
        """When the last batch began, for `maxTriggerDelay`."""
        self._planned: Offsets = {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins."""
        bounds = self.bounds(all_there=True)
        begin = self.at(self.options.start, bounds)
        bus = self.store().identity()
        return Place(begin, reads=str(self.options.topics), bus=bus).as_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options allow in one batch; of both limits bytes are looked at beside."""
        if self.options.max_events_per_trigger is not None:
            return ReadMaxRows(self.options.max_events_per_trigger)
        if self.options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self.options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on nothing newer exists."""
        self._until = self.bounds()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes."""
        place, bus = Place.from_json(start), self.store().identity()
        place.check_bus(bus, self.options.url)
        bounds = self.bounds() if self._until is None else self._until
        self._check_there(place, bounds)
        self._planned = place.offsets
        if self._too_few(place, bounds):
            return start
        reached = ahead(place.offsets, bounds, self._max_events(limit, place, bounds))
        if reached.offsets == place.offsets:
            return start
        self._planned, self._began_s = reached.offsets, time.monotonic()
        newest_us = place.newest_us
        if self.options.late_after_us is not None:
            tasks = splits(place, reached, self.options.events_per_task)
            newest_us = self.newest_us((part for parts in tasks for part in parts), newest_us)
        gone = expired(place.offsets, reached.offsets, bounds) if self.reading.skip_expired else []
        return Place(
            reached.offsets,
            newest_us,
            reached.began,
            str(self.options.topics),
            place.skipped + sum(each.stop - each.start for each in gone),
            bus or place.bus,
        ).as_json()

    def _too_few(self, place: Place, bounds: Bounds) -> bool:
        """Whether a batch should wait for more events; never when the query ends with those there are."""
        least = self.options.min_events_per_trigger
        if least is None or self._until is not None:
            return False
        waited_s = time.monotonic() - self._began_s
        return behind(place.offsets, bounds) < least and (
            waited_s * 1e6 < self.options.max_trigger_delay_us
        )

    def _check_there(self, place: Place, bounds: Bounds) -> None:
        """Refuse a checkpoint of another query or bus, or of a topic that was deleted and created again."""
        place.check_reads(str(self.options.topics))
        if place.offsets and not place.offsets.keys() & bounds.keys():
            lane, offset = min(place.offsets.items())
            raise InvalidInput(
                f"the checkpoint is at {lane[0]}/{lane[1]}/{offset}, and {self.options.url} has no "
                "topic that it reads: it belongs to another bus, or the topics were deleted. It was "
                "left as it is. Give this query a checkpoint of its own, or correct `url`"
            )
        for lane, offset in place.offsets.items():
            if lane in bounds and offset > bounds[lane][1]:
                raise InvalidInput(
                    f"the checkpoint is at {lane[0]}/{lane[1]}/{offset}, and the log ends at "
                    f"{bounds[lane][1]}: it belongs to another bus, or the topic was made anew. "
                    "Give this query a checkpoint of its own"
                )

    def _max_events(self, limit: ReadLimit, place: Place, bounds: Bounds) -> int | None:
        """The limit in events; of two limits Spark hands over one, and the other is our own option."""
        rows = size = None
        if isinstance(limit, ReadMaxRows):
            rows, size = limit.max_rows, self.options.max_bytes_per_trigger
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        if size is None:
            return rows
        fitting = max(1, int(size / self._event_bytes(place, bounds)))
        return fitting if rows is None else min(rows, fitting)

    def _event_bytes(self, place: Place, bounds: Bounds) -> float:
        """What an event takes, by some of those that the batch begins with."""
        begun = {
            lane: max(place.offsets.get(lane, 0), first) for lane, (first, _) in bounds.items()
        }
        waiting = sorted(bounds, key=lambda lane: begun[lane] - bounds[lane][1])
        size = events = 0
        for lane in waiting[:SAMPLED_LANES]:
            start, end = begun[lane], bounds[lane][1]
            if start < end:
                split = Split(*lane, start, min(end, start + SAMPLED_EVENTS))
                for rows in self.reading.stored(split, ["key", "headers", "payload"]):
                    size += rows.nbytes
                    events += rows.num_rows
        return max(1.0, size / events) if events else 1.0

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where the log ends, and as `lag` how many events lie between the last batch and there."""
        bounds = self.bounds()
        ends = Place({lane: end for lane, (_, end) in bounds.items()})
        return ends.as_json() | {"lag": behind(self._planned, bounds)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch."""
        begin, until = Place.from_json(start), Place.from_json(end)
        # A batch that a crash left is not planned again.
        until.check_reads(str(self.options.topics))
        until.check_bus(self.store().identity(), self.options.url)
        late_before_us = None
        if self.options.late_after_us is not None:
            late_before_us = max(0, begin.newest_us - self.options.late_after_us)
        # Not with the offsets: a batch that a crash left planned may be days old when it is read.
        bounds: Bounds = {}
        if self.reading.skip_expired:
            bounds = self.bounds()
            self.tell_expired(begin.offsets, until.offsets, bounds)
        tasks = splits(begin, until, self.options.events_per_task)
        failpoint("source.planned")
        return [Task(parts, late_before_us, bounds) for parts in tasks]


# -- reading ahead --------------------------------------------------------------------------------

AHEAD = 1  # pieces that wait; a second one would only take memory
LOOK_S = 0.05  # between two checks whether the caller has ended


class _End(Exception):
    """The end of the pieces."""


def read_ahead(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces in the same order, each read before it is asked for; errors come at their place.

    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    waiting: queue.Queue[T | BaseException] = queue.Queue(AHEAD)
    over = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(pieces, waiting, over), name="penstock-read-ahead", daemon=True
    )
    thread.start()
    try:
        while True:
            piece = waiting.get()
            if isinstance(piece, _End):
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        # The thread uses the store, which the next task of this process needs for itself.
        over.set()
        thread.join()


def _fill(
    pieces: Iterator[T], waiting: queue.Queue[T | BaseException], over: threading.Event
) -> None:
    def put(piece: T | BaseException) -> bool:
        while not over.is_set():
            try:
                waiting.put(piece, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    try:
        for piece in pieces:
            if not put(piece):
                return
    except BaseException as error:
        put(error)
    else:
        put(_End())

"""Rows of a read: the log's columns as Spark wants them, typed values and lateness beside them.

Spark drops rows behind its watermark silently, and one clock that is ahead carries the watermark with
it, so that the events of all others are dropped. The source marks late rows by a watermark of its own,
which such a clock does not move, and `timely` keeps Spark's behind it: every row is counted by the
pipeline, or is among those that it can send elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as sql

from penstock.core.schedule import parse_duration
from penstock.model.arrow import TIME
from penstock.model.errors import Corrupted, OffsetExpired
from penstock.pipelines.columns import EVENT_COLUMNS, FAULT, LATE, VALUE, log_columns, plain
from penstock.pipelines.failure import reading, warn_skipped
from penstock.pipelines.payload import Decoder
from penstock.pipelines.plan import Offsets, Split
from penstock.pipelines.stores import store_at

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column, DataFrame


# -- reading rows ---------------------------------------------------------------------------------


class Reading(msgspec.Struct, frozen=True):
    """A read as every task needs it; Spark sends it to the workers."""

    url: str
    token: str | None
    columns: tuple[str, ...]
    never_null: tuple[str, ...]
    """Columns that Spark was told hold no null, so that it does not check."""
    value_type: bytes | None
    """The struct of `value`, as an Arrow schema."""
    skip_expired: bool

    def rows(
        self, splits: Sequence[Split], late_before_us: int | None, began: Offsets
    ) -> Iterator[pa.RecordBatch]:
        """Everything in these splits; `began` is where their partitions began when they were planned."""
        wanted = log_columns(
            self.columns,
            decoded=bool({VALUE, FAULT} & set(self.columns)),
            late=LATE in self.columns,
        )
        shaper = _Shaper(self, late_before_us)
        for split in splits:
            with reading([split]):
                for stored in self.stored(split, wanted, began):
                    yield shaper.shape(stored)

    def stored(
        self, split: Split, wanted: Sequence[str], began: Offsets | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The log's columns of a split; events that retention deleted fail it or are skipped, as the
        option says.

        The planner warns of events deleted before it looked, this method of those deleted since.
        """
        store = store_at(self.url, self.token)
        try:
            yield from store.rows(split, wanted)
        except OffsetExpired as error:
            first = error.data.get("first_offset")
            if not self.skip_expired or first is None or first <= split.start:
                raise
            upto = min(first, split.stop)
            if began is not None:
                lane = (split.topic, split.partition)
                gone = msgspec.structs.replace(
                    split, start=max(split.start, began.get(lane, 0)), stop=upto
                )
                if gone.start < upto:
                    warn_skipped(gone)
            if upto < split.stop:
                yield from store.rows(msgspec.structs.replace(split, start=upto), wanted)


class _Shaper:
    """Makes a read's columns out of the log's."""

    def __init__(self, reading: Reading, late_before_us: int | None) -> None:
        self._columns = reading.columns
        self._never_null = frozenset(reading.never_null)
        self._decoder = None
        if reading.value_type is not None:
            fields = pa.ipc.read_schema(pa.py_buffer(reading.value_type))
            self._decoder = Decoder(pa.struct(list(fields)))
        self._late_before = pa.scalar(late_before_us or 0, pa.int64()).cast(TIME)

    def shape(self, stored: pa.RecordBatch) -> pa.RecordBatch:
        arrays: list[Any] = []
        value = fault = None
        if self._decoder is not None and {VALUE, FAULT} & set(self._columns):
            value, fault = self._decoder.decode(
                stored.column("payload"), plain(stored.column("codec")).to_pylist()
            )
        for name in self._columns:
            if name == VALUE:
                arrays.append(value)
            elif name == FAULT:
                arrays.append(fault)
            elif name == LATE:
                arrays.append(pc.less(stored.column("event_time"), self._late_before))
            else:
                arrays.append(plain(stored.column(EVENT_COLUMNS[name][2])))
        return pa.RecordBatch.from_arrays(
            arrays, schema=pa.schema(list(map(self._field, self._columns, arrays)))
        )

    def _field(self, name: str, array: pa.Array) -> pa.Field:
        if name in self._never_null and array.null_count:
            raise Corrupted(f"column {name!r} of the log has {array.null_count} nulls in a batch")
        return pa.field(name, array.type, nullable=name not in self._never_null)


# -- event time -----------------------------------------------------------------------------------

AHEAD = "1m"
"""How far a producer's clock may be ahead of the log's."""


def timely(events: DataFrame, late_after: str, ahead: str = AHEAD) -> DataFrame:
    """The rows to count, under a watermark: neither late nor from the future.

    `late_after` is what the pipeline's input says. A window closes when an event is that much newer,
    and `ahead` more.
    """
    kept = events.where(~_untimely(events, ahead))
    return (
        kept.withWatermark("event_time", delay(late_after, ahead)) if events.isStreaming else kept
    )


def untimely(events: DataFrame, ahead: str = AHEAD) -> DataFrame:
    """The rows that `timely` leaves out, for a topic of their own."""
    return events.where(_untimely(events, ahead))


def from_the_future(ahead: str = AHEAD) -> Column:
    """Whether an event says that it happened long after it was appended."""
    latest = sql.col("append_time") + sql.expr(f"INTERVAL {seconds(ahead)} SECONDS")
    return sql.col("event_time") > latest


def newest_us(events_us: NDArray[np.int64], appended_us: NDArray[np.int64], so_far_us: int) -> int:
    """The newest event time of some events: none counts as newer than its appending, and those from
    the future do not count at all.

    >>> appended = np.array([90_000_000, 91_000_000, 92_000_000])
    >>> newest_us(np.array([80_000_000, 91_000_002, 999_000_000]), appended, 0)
    91000000
    """
    possible = events_us <= appended_us + parse_duration(AHEAD)
    return int(np.minimum(events_us, appended_us).max(initial=so_far_us, where=possible))


def delay(late_after: str, ahead: str = AHEAD) -> str:
    """The delay of a watermark of Spark's that stays behind the source's.

    >>> delay("10m")
    '661 seconds'
    """
    return f"{seconds(late_after) + seconds(ahead) + 1} seconds"


def seconds(duration: str) -> int:
    """A duration in whole seconds.

    >>> seconds("10m")
    600
    """
    return -(-parse_duration(duration) // 1_000_000)


def _untimely(events: DataFrame, ahead: str) -> Column:
    # A batch read knows no late rows: everything is there at once.
    late = sql.col("late") if "late" in events.columns else sql.lit(False)
    return late | from_the_future(ahead)

"""Event time: which rows a stream still counts, under a watermark that drops none of them.

Spark drops what is behind its watermark without a word, and one clock that is ahead carries the
watermark with it, so that everybody else's events are dropped. The source marks late rows by a
watermark of its own, which no clock that is ahead moves. Spark's is kept behind that one here: every
row is counted by the pipeline or is among those that it can send elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as sql

from penstock.core.schedule import parse_duration

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import Column, DataFrame

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

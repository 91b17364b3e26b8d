"""How a running query gets on, as values: rows a second, lag, watermark, state, batch time.

Taken by asking the query, not by a listener: a listener needs a server for calls from Java and
hears of a batch some time later, while whoever shows progress waits anyway. No batch is missed:
Spark keeps the last hundred, and they are counted by their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.pipelines.plan import Place

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_EPOCH = datetime.fromtimestamp(0, UTC)


class Progress(msgspec.Struct, frozen=True):
    """One batch of a query, as Spark reported it."""

    batch: int
    at: datetime
    """When the batch began."""
    rows_in: int
    rows_out: int | None
    """Rows written; None for a sink that does not say."""
    in_per_s: float
    """Rows that arrived a second, since the batch before."""
    done_per_s: float
    """Rows a second while it worked."""
    batch_s: float
    lag_events: int | None
    """Events stored and not read when the batch was planned; None for a source that does not say."""
    newest: datetime | None
    """The newest event time of the batch."""
    watermark: datetime | None
    """Older windows are closed; None before the first event, and without a watermark."""
    state_rows: int
    state_bytes: int
    dropped_rows: int
    """Rows that came after the watermark and were left out by Spark."""
    skipped_events: int = 0
    """Events that retention took before they were read, with `onExpired=skip`."""

    @property
    def watermark_delay_s(self) -> float | None:
        """Seconds from the watermark to the beginning of the batch."""
        return (self.at - self.watermark).total_seconds() if self.watermark else None


def summary(progress: Mapping[str, Any]) -> Progress:
    """What matters in Spark's report of a batch, which is JSON.

    >>> summary({"batchId": 3, "timestamp": "2026-01-01T00:00:00.000Z", "numInputRows": 50,
    ...     "processedRowsPerSecond": 25.0, "durationMs": {"triggerExecution": 2000}}).done_per_s
    25.0
    """
    batch_s = progress.get("durationMs", {}).get("triggerExecution", 0) / 1000
    rows_out: int | None = progress.get("sink", {}).get("numOutputRows", -1)
    if rows_out is not None and rows_out < 0:  # Spark's word for unknown
        rows_out = None
    times = progress.get("eventTime", {})
    watermark = _moment(times.get("watermark"))
    operators = progress.get("stateOperators", [])
    return Progress(
        batch=progress["batchId"],
        at=_moment(progress["timestamp"]) or _EPOCH,
        rows_in=progress.get("numInputRows", 0),
        rows_out=rows_out,
        in_per_s=_rate(progress.get("inputRowsPerSecond")),
        done_per_s=_rate(progress.get("processedRowsPerSecond")),
        batch_s=batch_s,
        lag_events=lag(progress.get("sources", [])),
        newest=_moment(times.get("max")),
        watermark=None if watermark == _EPOCH else watermark,
        state_rows=sum(each.get("numRowsTotal", 0) for each in operators),
        state_bytes=sum(each.get("memoryUsedBytes", 0) for each in operators),
        dropped_rows=sum(each.get("numRowsDroppedByWatermark", 0) for each in operators),
        skipped_events=skipped(progress.get("sources", [])),
    )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _rate(value: Any) -> float:
    """A first batch has no rate: Spark writes it as NaN, Infinity or leaves it out."""
    try:
        rate = float(value or 0)
    except ValueError:
        return 0.0
    return rate if 0 <= rate < float("inf") else 0.0


def lag(sources: list[Mapping[str, Any]]) -> int | None:
    """Events behind the end of the log, over all sources of Penstock's; None if none says.

    >>> end = {"penstock": 1, "topics": {"orders": {"0": 7}}}
    >>> latest = {"penstock": 1, "topics": {"orders": {"0": 9}, "refunds": {"0": 3}}}
    >>> lag([{"endOffset": end, "latestOffset": latest}])
    5
    """
    found = None
    for source in sources:
        end, latest = _place(source.get("endOffset")), _place(source.get("latestOffset"))
        if end is None or latest is None:
            continue
        behind = sum(
            max(0, offset - end.offsets.get(lane, latest.began.get(lane, 0)))
            for lane, offset in latest.offsets.items()
        )
        found = (found or 0) + behind
    return found


def skipped(sources: list[Mapping[str, Any]]) -> int:
    """Events that a batch passed over; places count them from the beginning of the query.

    >>> skipped([{"startOffset": {"penstock": 1, "topics": {}, "skipped": 2},
    ...     "endOffset": {"penstock": 1, "topics": {}, "skipped": 9}}])
    7
    """
    ends = [(_place(each.get("startOffset")), _place(each.get("endOffset"))) for each in sources]
    return sum(end.skipped - (start.skipped if start else 0) for start, end in ends if end)


def _place(found: Any) -> Place | None:
    """Offsets of our own source; another source in the same query has a form of its own."""
    if isinstance(found, str):
        found = json.loads(found)
    if not isinstance(found, Mapping) or "penstock" not in found:
        return None
    return Place.from_json(found)


class Meter:
    """Follows one query: the newest batch, and the sums over all batches since it started."""

    def __init__(self, query: StreamingQuery) -> None:
        self.query = query
        self.last: Progress | None = None
        self.rows_in = 0
        self.rows_out = 0
        self.dropped_rows = 0
        self.skipped_events = 0
        self.batches = 0
        self.batch_s = 0.0
        self._seen = -1

    @property
    def ended(self) -> bool:
        """Whether the query has stopped, for whatever reason."""
        return not self.query.isActive

    def look(self) -> bool:
        """Ask the query; whether there was a new batch."""
        newest = self.query.lastProgress
        if newest is None or newest.batchId <= self._seen:
            return False
        # The list costs a hundred times as much, so it is asked for only if one went by unseen.
        alone = newest.batchId == self._seen + 1
        for each in [newest] if alone else self.query.recentProgress:
            if each.batchId > self._seen:
                self._count(summary(json.loads(each.json)))
        return True

    def _count(self, done: Progress) -> None:
        self._seen = done.batch
        self.last = done
        self.batches += 1
        self.rows_in += done.rows_in
        self.rows_out += done.rows_out or 0
        self.dropped_rows += done.dropped_rows
        self.skipped_events += done.skipped_events
        self.batch_s += done.batch_s

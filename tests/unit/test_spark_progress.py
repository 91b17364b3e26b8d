"""Row S8: progress as values and on a terminal, from reports that Spark really made."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from penstock.model.errors import PipelineFailed
from penstock.pipelines import progress
from penstock.pipelines.progress import Meter, lag, summary

END = {"penstock": 1, "topics": {"orders": {"0": 400}}, "newest_us": 0, "began": {}}
LATEST = {"penstock": 1, "topics": {"orders": {"0": 1634}}, "newest_us": 0, "began": {}}
# The report of a window count, as PySpark 4.3 gave it; the source is described by its offsets.
RECORDED: dict[str, Any] = {
    "id": "ef2c45fd-b0e4-40a3-9d41-167316af2be9",
    "runId": "64cf906a-5518-4791-9f94-ccf155d00631",
    "name": "risk",
    "timestamp": "2026-11-16T05:33:18.679Z",
    "batchId": 3,
    "batchDuration": 2845,
    "numInputRows": 100,
    "inputRowsPerSecond": 39.9,
    "processedRowsPerSecond": 35.1,
    "durationMs": {"addBatch": 1664, "latestOffset": 8, "triggerExecution": 2839, "walCommit": 262},
    "eventTime": {
        "avg": "2026-01-01T00:05:49.500Z",
        "max": "2026-01-01T00:06:39.000Z",
        "min": "2026-01-01T00:05:00.000Z",
        "watermark": "2026-01-01T00:04:49.000Z",
    },
    "stateOperators": [
        {
            "operatorName": "stateStoreSave",
            "numRowsTotal": 5,
            "numRowsUpdated": 4,
            "memoryUsedBytes": 2864,
            "numRowsDroppedByWatermark": 2,
            "customMetrics": {"stateOnCurrentVersionSizeBytes": 1432},
        }
    ],
    "sources": [
        {
            "description": "PythonMicroBatchStreamWithAdmissionControl@7fd77da6",
            "startOffset": {"penstock": 1, "topics": {"orders": {"0": 300}}},
            "endOffset": END,
            "latestOffset": LATEST,
            "numInputRows": 100,
        }
    ],
    "sink": {"description": "NoopTable", "numOutputRows": 3},
}


class Report(dict[str, Any]):
    """PySpark's report: a dictionary that also has its JSON."""

    @property
    def batchId(self) -> int:
        return int(self["batchId"])

    @property
    def json(self) -> str:
        return json.dumps(self)


class Query:
    """A query that has done these batches."""

    def __init__(self, *batches: int, active: bool = False, failure: Any = None) -> None:
        self.recentProgress = [Report(RECORDED | {"batchId": batch}) for batch in batches]
        self.isActive = active
        self.failure = failure
        self.listed = 0

    @property
    def lastProgress(self) -> Report | None:
        return self.recentProgress[-1] if self.recentProgress else None

    def exception(self) -> Any:
        return self.failure


def test_a_report_becomes_values() -> None:
    found = summary(RECORDED)
    assert (found.batch, found.rows_in, found.rows_out) == (3, 100, 3)
    assert (found.in_per_s, found.done_per_s) == (39.9, 35.1)
    assert found.batch_s == pytest.approx(2.839)
    assert found.lag_events == 1234
    assert found.watermark == datetime(2026, 1, 1, 0, 4, 49, tzinfo=UTC)
    assert found.newest == datetime(2026, 1, 1, 0, 6, 39, tzinfo=UTC)
    assert (found.state_rows, found.state_bytes, found.dropped_rows) == (5, 2864, 2)
    assert found.watermark_delay_s == (found.at - found.watermark).total_seconds()


def test_what_is_not_known_is_none_and_not_zero() -> None:
    report = RECORDED | {"sink": {"numOutputRows": -1}, "eventTime": {}, "sources": []}
    found = summary(report)
    assert (found.rows_out, found.lag_events) == (None, None)
    assert (found.watermark, found.watermark_delay_s) == (None, None)


@pytest.mark.parametrize("rate", ["NaN", "Infinity", None, float("inf"), float("nan")])
def test_a_first_batch_has_no_rate(rate: Any) -> None:
    assert summary(RECORDED | {"inputRowsPerSecond": rate}).in_per_s == 0


def test_a_watermark_of_1970_is_none_yet() -> None:
    assert (
        summary(RECORDED | {"eventTime": {"watermark": "1970-01-01T00:00:00.000Z"}}).watermark
        is None
    )


def test_lag_is_the_sum_over_sources_and_partitions() -> None:
    end = {"penstock": 1, "topics": {"a": {"0": 5, "1": 9}}}
    latest = {
        "penstock": 1,
        "topics": {"a": {"0": 8, "1": 9}, "b": {"0": 7}},
        "began": {"b": {"0": 3}},
    }
    assert (
        lag([{"endOffset": end, "latestOffset": latest}, {"endOffset": END, "latestOffset": END}])
        == 7
    )
    assert lag([{"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)}]) == 7


def test_sources_of_others_have_no_lag() -> None:
    assert (
        lag([{"endOffset": 9, "latestOffset": 12}, {"endOffset": None, "latestOffset": None}])
        is None
    )
    assert lag([{"endOffset": {"a/0": 9}, "latestOffset": {"a/0": 12}}]) is None


def test_every_batch_is_counted_once() -> None:
    """Row S8: however seldom one looks."""
    query = Query(0)
    meter = Meter(query)  # type: ignore[arg-type]
    assert meter.look()
    assert not meter.look()
    query.recentProgress += Query(1, 2, 3).recentProgress
    assert meter.look()
    assert (meter.batches, meter.rows_in, meter.rows_out, meter.dropped_rows) == (4, 400, 12, 8)
    assert meter.last is not None
    assert meter.last.batch == 3


def test_events_that_were_skipped_are_counted_and_shown() -> None:
    """S1: a place counts them from the beginning of the query, a batch has those of its own."""
    query = Query(0, 1)
    for report, before, after in zip(query.recentProgress, (3, 10), (10, 10), strict=True):
        [source] = RECORDED["sources"]
        begin, end = source["startOffset"] | {"skipped": before}, END | {"skipped": after}
        report["sources"] = [source | {"startOffset": begin, "endOffset": end}]
    meter = Meter(query)  # type: ignore[arg-type]
    assert meter.look()
    assert meter.skipped_events == 7
    assert progress.line("risk", meter).endswith("skipped 7")


def test_a_query_without_a_batch_has_no_numbers() -> None:
    meter = Meter(Query())  # type: ignore[arg-type]
    assert not meter.look()
    assert progress.line("risk", meter) == "risk  waiting for the first batch"
    assert progress.caught_up(meter) == 1


def watched(query: Query, *, terminal: bool, quiet: bool = False) -> str:
    printed = io.StringIO()
    console = Console(
        file=printed, force_terminal=terminal, width=160, quiet=quiet, _environ={}
    )  # whatever terminal the tests have
    progress.watch({"risk-tags": query}, console=console, quiet=quiet)  # type: ignore[dict-item]
    return printed.getvalue()


def test_a_pipe_gets_lines() -> None:
    text = watched(Query(0, 1), terminal=False)
    assert len(text.splitlines()) == 1
    for part in ("risk-tags", "rows 200", "in 40/s", "lag 1,234", "watermark 2026-01-01 00:04:49",
                 "state 5 rows 2.9 kB", "batch 1 in 2.84 s", "dropped 4"):  # fmt: skip
        assert part in text
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar() -> None:
    text = watched(Query(0, 1), terminal=True)
    for part in ("caught up", "risk-tags", "14%", "1,234", "2026-01-01 00:04:49", "━"):
        assert part in text


def test_silence_is_kept() -> None:
    assert watched(Query(0, 1), terminal=False, quiet=True) == ""


def test_a_failed_query_is_raised_in_words() -> None:
    query = Query(0, failure=RuntimeError("Query [id = 1] terminated with exception: Job aborted"))
    with pytest.raises(PipelineFailed, match="'risk-tags' failed: Job aborted"):
        watched(query, terminal=False)


def test_watching_ends_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.0)
    answers = iter([False, False, True])
    looks = []
    meters = progress.watch(
        {"risk-tags": Query(0, active=True)},  # type: ignore[dict-item]
        until=lambda: next(answers),
        quiet=True,
        looked=lambda now: looks.append(now["risk-tags"].rows_in),
    )
    assert looks == [100, 100, 100]
    assert meters["risk-tags"].batches == 1

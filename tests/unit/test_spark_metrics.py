"""Row S8: query progress as metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.model.errors import InvalidSettings
from penstock.pipelines.progress import FAMILIES, Meter, PipelineMetrics, serve_metrics

PAGE = Path(penstock.__file__).resolve().parent.parent / "docs" / "guide" / "spark.md"


class Query:
    """A query that has done one batch."""

    isActive = True

    def __init__(self, **report: Any) -> None:
        found = {"batchId": 0, "timestamp": "2026-01-01T00:00:10.000Z", **report}
        self.lastProgress = type("Report", (), {"batchId": 0, "json": json.dumps(found)})


def taken(**report: Any) -> PipelineMetrics:
    metrics = PipelineMetrics()
    meter = Meter(Query(**report))  # type: ignore[arg-type]
    meter.look()
    metrics.take({"risk-tags": meter})
    return metrics


def values(text: str) -> dict[str, float]:
    found = re.findall(r'^(\w+)\{pipeline="risk-tags"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


FULL = {
    "numInputRows": 50,
    "inputRowsPerSecond": 5.0,
    "processedRowsPerSecond": 25.0,
    "durationMs": {"triggerExecution": 2000},
    "eventTime": {"watermark": "2026-01-01T00:00:03.000Z"},
    "stateOperators": [{"numRowsTotal": 7, "memoryUsedBytes": 900, "numRowsDroppedByWatermark": 1}],
    "sources": [
        {
            "endOffset": {"penstock": 1, "topics": {"a": {"0": 4}}},
            "latestOffset": {"penstock": 1, "topics": {"a": {"0": 10}}},
        }
    ],
    "sink": {"numOutputRows": 20},
}


def test_progress_becomes_metrics() -> None:
    assert values(taken(**FULL).text()) == {
        "penstock_pipeline_input_rows_total": 50,
        "penstock_pipeline_output_rows_total": 20,
        "penstock_pipeline_dropped_rows_total": 1,
        "penstock_pipeline_skipped_events_total": 0,
        "penstock_pipeline_batches_total": 1,
        "penstock_pipeline_batch_seconds_total": 2,
        "penstock_pipeline_batch_seconds": 2,
        "penstock_pipeline_input_rows_per_second": 5,
        "penstock_pipeline_processed_rows_per_second": 25,
        "penstock_pipeline_lag_events": 6,
        "penstock_pipeline_watermark_delay_seconds": 7,
        "penstock_pipeline_state_rows": 7,
        "penstock_pipeline_state_bytes": 900,
        "penstock_pipeline_running": 1,
    }


def test_what_is_not_known_is_not_exported() -> None:
    found = values(taken(numInputRows=5).text())
    assert not {"penstock_pipeline_lag_events", "penstock_pipeline_watermark_delay_seconds"} & set(
        found
    )
    assert "penstock_pipeline_output_rows_total" not in found


def test_metrics_are_served_on_a_free_port() -> None:
    metrics = taken(**FULL)
    with serve_metrics(metrics) as server:
        assert server.port > 0
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            assert values(answer.read().decode())["penstock_pipeline_lag_events"] == 6
        with pytest.raises(InvalidSettings, match=f":{server.port}: .*in use"):
            serve_metrics(metrics, server.port)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url, timeout=10)


def test_every_metric_is_documented() -> None:
    rows = re.findall(
        r"^\| `(penstock_pipeline_\w+)` \| (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == [(name, each.kind, each.about) for name, each in FAMILIES.items()]

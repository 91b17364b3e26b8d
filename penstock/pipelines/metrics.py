"""Metrics of pipelines for Prometheus, from the numbers that `watch` takes.

The registry is our own: what else lives in the process does not show up here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.model.errors import InvalidSettings, MissingExtra
from penstock.pipelines.progress import Meter, Progress

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Family(NamedTuple):
    """One metric; each has the label `pipeline`."""

    kind: str
    about: str
    value: Callable[[Meter, Progress], float | None]
    """None leaves it out: unknown is not zero."""


FAMILIES: dict[str, Family] = {
    "penstock_pipeline_input_rows_total": Family(
        "counter", "Rows read.", lambda meter, _: meter.rows_in
    ),
    "penstock_pipeline_output_rows_total": Family(
        "counter",
        "Rows written; left out for a sink that does not say.",
        lambda meter, last: None if last.rows_out is None else meter.rows_out,
    ),
    "penstock_pipeline_dropped_rows_total": Family(
        "counter",
        "Rows after the watermark that Spark left out.",
        lambda meter, _: meter.dropped_rows,
    ),
    "penstock_pipeline_skipped_events_total": Family(
        "counter",
        "Events that retention took before they were read.",
        lambda meter, _: meter.skipped_events,
    ),
    "penstock_pipeline_batches_total": Family(
        "counter", "Batches done.", lambda meter, _: meter.batches
    ),
    "penstock_pipeline_batch_seconds_total": Family(
        "counter", "Time spent in batches.", lambda meter, _: meter.batch_s
    ),
    "penstock_pipeline_batch_seconds": Family(
        "gauge", "Time of the last batch.", lambda _, last: last.batch_s
    ),
    "penstock_pipeline_input_rows_per_second": Family(
        "gauge", "Rows that arrived a second, last batch.", lambda _, last: last.in_per_s
    ),
    "penstock_pipeline_processed_rows_per_second": Family(
        "gauge", "Rows a second while it worked, last batch.", lambda _, last: last.done_per_s
    ),
    "penstock_pipeline_lag_events": Family(
        "gauge", "Events stored and not yet read.", lambda _, last: last.lag_events
    ),
    "penstock_pipeline_watermark_delay_seconds": Family(
        "gauge",
        "From the watermark to the beginning of the last batch.",
        lambda _, last: last.watermark_delay_s,
    ),
    "penstock_pipeline_state_rows": Family(
        "gauge", "Rows of state: open windows, keys, joins.", lambda _, last: last.state_rows
    ),
    "penstock_pipeline_state_bytes": Family(
        "gauge", "Their memory.", lambda _, last: last.state_bytes
    ),
    "penstock_pipeline_running": Family(
        "gauge", "1 while the query runs, 0 after it ended.", lambda meter, _: not meter.ended
    ),
}


class PipelineMetrics:
    """The newest numbers of each pipeline; `watch(queries, looked=metrics.take)` keeps them so.

    >>> PipelineMetrics().text().startswith("# HELP penstock_pipeline_input_rows_total")
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}
        self.registry = _prometheus().CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def take(self, meters: Mapping[str, Meter]) -> None:
        """Note how the pipelines are now."""
        for pipeline, meter in meters.items():
            if meter.last is None:
                continue
            now = {name: each.value(meter, meter.last) for name, each in FAMILIES.items()}
            known = {name: float(value) for name, value in now.items() if value is not None}
            with self._lock:
                self._values[pipeline] = known

    def collect(self) -> Iterator[Metric]:
        """Every family, for the registry."""
        core = _prometheus().core
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        with self._lock:
            values = dict(self._values)
        for name, family in FAMILIES.items():
            metric = kinds[family.kind](name, family.about, labels=("pipeline",))
            for pipeline, known in values.items():
                if name in known:
                    metric.add_metric((pipeline,), known[name])
            yield metric

    def text(self) -> str:
        """What a scrape gets."""
        made: bytes = _prometheus().exposition.generate_latest(self.registry)
        return made.decode()


class MetricsServer:
    """Answers `GET /metrics` in a thread of its own until closed; a context manager."""

    def __init__(self, metrics: PipelineMetrics, port: int, host: str) -> None:
        try:
            self._server, self._thread = _prometheus().start_http_server(
                port, addr=host, registry=metrics.registry
            )
        except OSError as error:
            raise InvalidSettings(
                f"no metrics at {host}:{port}: {error.strerror or error}. Choose another port, or 0 "
                "for any that is free",
                setting="metrics port",
            ) from error
        self.port = int(self._server.server_port)
        self.url = f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve_metrics(
    metrics: PipelineMetrics, port: int = 0, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve these metrics; port 0 takes a free one, which `port` of the result names."""
    return MetricsServer(metrics, port, host)


def _prometheus() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise MissingExtra(
            "metrics need prometheus-client: pip install 'penstock[spark]'"
        ) from None
    return prometheus_client

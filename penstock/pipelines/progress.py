"""Progress of running queries as values, on a terminal and as metrics for Prometheus.

The values are rows a second, lag, watermark, state and batch time. `Meter` asks the query for them
instead of listening: a listener needs a server for calls from Java and hears of a batch some time
later. No batch is missed: Spark keeps the last hundred reports, and they are counted by number.
`watch` shows a bar for each pipeline on a terminal, and lines in a pipe. The metrics have a registry
of their own, without the other metrics of the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from penstock.model.errors import InvalidSettings, MissingExtra
from penstock.pipelines.failure import explain_failure
from penstock.pipelines.plan import Place

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from pyspark.sql.streaming.query import StreamingQuery
    from rich.console import Console
    from rich.table import Table


# -- values ---------------------------------------------------------------------------------------

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
    """The values in Spark's report of a batch, which is JSON.

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
    """Events behind the end of the log, over all sources of Penstock's; None if no source says.

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
        """Whether the query has stopped, for any reason."""
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


# -- on a terminal --------------------------------------------------------------------------------

LOOK_S = 0.5  # between two looks on a terminal
LINE_S = 3.0  # between two lines in a pipe
BAR_CELLS = 16
HEADINGS = ("caught up", "rows", "in/s", "done/s", "lag", "watermark", "state", "batch")


def watch(
    queries: Mapping[str, StreamingQuery],
    *,
    until: Callable[[], bool] = lambda: False,
    console: Console | None = None,
    quiet: bool = False,
    looked: Callable[[Mapping[str, Meter]], None] = lambda _: None,
) -> dict[str, Meter]:
    """Show pipelines by name until all have ended or `until()`; raise when one fails.

    `looked` is called with the numbers after each look, which is how metrics get theirs. The
    queries are left running: their caller stops them.
    """
    from rich.console import Console

    meters = {name: Meter(query) for name, query in queries.items()}
    console = console or Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        show = _bars(console, stack) if console.is_terminal and not quiet else _lines(console)
        while True:
            # Asked before the numbers are: the last batch of a query that ends is counted too.
            over = all(meter.ended for meter in meters.values()) or until()
            for name, meter in meters.items():
                meter.look()
                failure = meter.query.exception() if meter.ended else None
                if failure is not None:
                    raise explain_failure(failure, name)
            looked(meters)
            show(meters, over)
            if over:
                return meters
            time.sleep(LOOK_S)


def _bars(console: Console, stack: ExitStack) -> Callable[[Mapping[str, Meter], bool], None]:
    from rich.live import Live

    live = stack.enter_context(Live(console=console, transient=True, auto_refresh=False))

    def show(meters: Mapping[str, Meter], _: bool) -> None:
        live.update(table(meters), refresh=True)

    return show


def _lines(console: Console) -> Callable[[Mapping[str, Meter], bool], None]:
    """A line for each pipeline every few seconds, and at the end."""
    printed = began = time.monotonic()

    def show(meters: Mapping[str, Meter], last: bool) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= LINE_S or last:
            printed = now
            for name, meter in meters.items():
                text = f"{now - began:6.1f} s  {line(name, meter)}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    return show


def cells(meter: Meter) -> dict[str, str]:
    """The numbers of a pipeline as texts, by heading."""
    last = meter.last
    if last is None:
        return dict.fromkeys(HEADINGS, "-") | {"rows": "0"}
    behind = last.lag_events
    share = "-" if behind is None else f"{caught_up(meter):.0%}"
    state = f"{last.state_rows:,} rows {_size(last.state_bytes)}" if last.state_bytes else "-"
    texts = (
        share,
        f"{meter.rows_in:,}",
        f"{last.in_per_s:,.0f}",
        f"{last.done_per_s:,.0f}",
        "-" if behind is None else f"{behind:,}",
        _time(last.watermark),
        state,
        f"{last.batch} in {last.batch_s:.2f} s",
    )
    return dict(zip(HEADINGS, texts, strict=True))


def caught_up(meter: Meter) -> float:
    """Rows read as a share of those that could be read; 1 where the lag is unknown."""
    behind = meter.last.lag_events if meter.last is not None else None
    return meter.rows_in / (meter.rows_in + behind) if behind else 1.0


def line(name: str, meter: Meter) -> str:
    """One line for a pipe."""
    if meter.last is None:
        return f"{name}  waiting for the first batch"
    shown = cells(meter)
    dropped = f"  dropped {meter.dropped_rows:,}" if meter.dropped_rows else ""
    skipped = f"  skipped {meter.skipped_events:,}" if meter.skipped_events else ""
    return (
        f"{name}  rows {shown['rows']}  in {shown['in/s']}/s  done {shown['done/s']}/s  "
        f"lag {shown['lag']}  watermark {shown['watermark']}  state {shown['state']}  "
        f"batch {shown['batch']}{dropped}{skipped}"
    )


def table(meters: Mapping[str, Meter]) -> Table:
    """A row for each pipeline, with a bar of how much of the log it has read."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    shown.add_column("pipeline")
    shown.add_column("", width=BAR_CELLS)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, meter in meters.items():
        bar = ProgressBar(total=1.0, completed=caught_up(meter), pulse=meter.last is None)
        shown.add_row(Text(name), bar, *map(Text, cells(meter).values()))
    return shown


def _time(moment: datetime | None) -> str:
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def _size(size_bytes: float) -> str:
    """Bytes for people.

    >>> _size(512), _size(2_864), _size(5_000_000)
    ('512 B', '2.9 kB', '5.0 MB')
    """
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} GB"


# -- metrics --------------------------------------------------------------------------------------


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

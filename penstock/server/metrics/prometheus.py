"""Metrics of the broker, as Prometheus reads them.

`Metrics.collect` reads the numbers on the loop, where nothing changes meanwhile; a thread writes them out
as text. The registry is the broker's own, so that other libraries in the process do not show up.

The catalogue below lists every exported name with its kind, labels and meaning. `make reference` prints it as
docs/reference/metrics.md; tests compare the page with the catalogue, and the catalogue with a scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.core.lease import EXPIRED, NACKED, REJECTED, RETURNED, STATES
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.model.errors import MissingExtra
from penstock.server.client_bytes import ClientBytes
from penstock.server.fastpath import FastPath
from penstock.server.metrics.counters import (
    BOUNDS_S,
    Counters,
    Histogram,
)
from penstock.server.metrics.engine_stats import (
    PARTS,
    GroupStats,
    Retained,
    group_stats,
    pending_bytes,
    quotas,
    troubles_of,
)
from penstock.server.metrics.pressure import Pressure, PressureMonitor

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

Sample = tuple[str, tuple[str, ...], float]
"""Name, label values, value."""

_BOUND_TEXTS = [*map(str, BOUNDS_S), "+Inf"]


class Metrics:
    """Reads an open engine, the counters and the pressure; `collect` gives the numbers of a scrape."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        counters: Counters,
        gauge: PressureMonitor,
        fastpath: FastPath,
        client_bytes: ClientBytes,
    ) -> None:
        self._client_bytes = client_bytes
        self._fastpath = fastpath
        self._engine = engine
        self._counters = counters
        self._monitor = gauge
        self._retained = Retained(counters.labels)
        engine.dead_letter_store.buried = counters.dead_letter
        engine.dead_letter_store.revived = counters.dead_letter_replayed
        try:
            self._version = version("penstock")
        except PackageNotFoundError:  # run from its sources
            self._version = "unknown"

    def collect(self) -> Scrape:
        """All numbers as of now; call it on the loop."""
        known = group_stats(self._engine)
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in FAMILIES}
        for part in (
            self._traffic(),
            self._failures(),
            self._groups(known),
            self._clients(),
            self._storage(),
            _pressure(self._monitor.read(known)),
        ):
            for name, labels, value in part:
                samples[name].append((labels, value))
        histograms = {
            "penstock_publish_seconds": _copied(self._counters.publish),
            "penstock_delivery_seconds": _copied(self._counters.delivery),
        }
        return Scrape(samples, histograms)

    def _traffic(self) -> Iterator[Sample]:
        yield "penstock_build_info", (self._version,), 1
        for pair, flow in self._counters.flows.items():
            yield "penstock_published_events_total", pair, flow.published_events
            yield "penstock_published_bytes_total", pair, flow.published_bytes
            yield "penstock_delivered_events_total", pair, flow.delivered_events
            yield "penstock_delivered_bytes_total", pair, flow.delivered_bytes
            yield "penstock_replayed_events_total", pair, flow.replayed_events
            yield "penstock_duplicate_events_total", pair, flow.duplicate_events
        for kind, events in self._counters.settled_events.items():
            yield "penstock_settled_events_total", (kind,), events

    def _failures(self) -> Iterator[Sample]:
        engine, counters = self._engine, self._counters
        for refusal, count in counters.refusals.items():
            yield "penstock_refused_publishes_total", refusal, count
        yield "penstock_fastpath_total", ("taken",), self._fastpath.taken
        yield "penstock_fastpath_total", ("fallen-back",), self._fastpath.fallen_back
        for reason, count in counters.held_back.items():
            yield "penstock_backpressure_total", (reason,), count
        for code, count in counters.frame_errors.items():
            yield "penstock_frame_errors_total", (code,), count
        for pair, count in counters.dead_letters.items():
            yield "penstock_dead_letters_total", pair, count
        for pair, count in counters.dead_letters_replayed.items():
            yield "penstock_dead_letters_replayed_total", pair, count
        for state in (NACKED, EXPIRED, REJECTED, RETURNED):
            failed = engine.dispatcher.failures[state]
            yield "penstock_failed_deliveries_total", (STATES[state],), failed
        yield "penstock_dead_letters_kept", (), len(engine.state.dead)
        troubles = troubles_of(engine)
        for part in PARTS:
            yield "penstock_problem", (part,), float(part in troubles)

    def _groups(self, known: dict[str, GroupStats]) -> Iterator[Sample]:
        folded: dict[str, GroupStats] = {}
        for name, each in known.items():
            label = self._counters.labels.group(name)
            folded[label] = each if label not in folded else _together(folded[label], each)
        for label, each in folded.items():
            yield "penstock_group_lag_events", (label,), each.lag
            yield "penstock_group_outstanding_events", (label,), each.outstanding
            yield "penstock_group_oldest_seconds", (label,), each.oldest_s
            yield "penstock_group_waiting_seconds", (label,), each.waiting_s
            yield "penstock_group_members", (label,), each.members
        yield "penstock_groups", (), len(known)
        lost: dict[tuple[str, str], int] = {}
        for name, losses in self._engine.unread.lost.items():
            for (topic, _), events in losses.items():
                key = self._counters.labels.group_topic(name, topic)
                lost[key] = lost.get(key, 0) + events
        for key, events in lost.items():
            yield "penstock_group_lost_events_total", key, events

    def _clients(self) -> Iterator[Sample]:
        engine, counters = self._engine, self._counters
        yield "penstock_connections", (), counters.connections
        yield "penstock_connections_opened_total", (), counters.connections_opened
        yield "penstock_client_held_bytes", (), self._client_bytes.used
        yield "penstock_client_limit_bytes", (), self._client_bytes.limit
        worst: dict[tuple[str, str], float] = {}
        for quota in quotas(engine):
            key = counters.labels.tenant(quota.tenant), quota.quota
            worst[key] = max(worst.get(key, 0.0), quota.ratio)
        for key, ratio in worst.items():
            yield "penstock_quota_usage_ratio", key, ratio

    def _storage(self) -> Iterator[Sample]:
        engine = self._engine
        manifest = engine.log.manifest
        self._retained.update(manifest.segments())
        for pair, size in self._retained.bytes.items():
            yield "penstock_retained_bytes", pair, size
        journal, segments = engine.journal.written_bytes, engine.maintenance.bytes_out
        side = engine.publisher.aside_bytes
        published = self._counters.published_bytes()
        written = journal + segments + side
        yield "penstock_disk_written_bytes_total", ("journal",), journal
        yield "penstock_disk_written_bytes_total", ("segments",), segments
        yield "penstock_disk_written_bytes_total", ("side",), side
        yield "penstock_write_amplification_ratio", (), written / published if published else 0.0
        yield "penstock_commits_total", (), engine.commits.commits
        yield "penstock_commit_seconds_total", (), engine.commits.write_s
        yield "penstock_journal_pending_bytes", (), pending_bytes(engine)
        yield "penstock_journal_backlog_bytes", (), engine.sealing_backlog.backlog_bytes
        yield "penstock_segment_bytes", (), manifest.total_bytes
        yield "penstock_topics", (), len(engine.state.topics)
        yield "penstock_scheduled_events", (), len(engine.state.schedule.delayed)
        yield "penstock_dedup_tokens", (), sum(map(len, engine.fold.dedup.values()))
        yield (
            "penstock_audit_behind_bytes",
            (),
            max(0, engine.journal.durable - engine.audit.position),
        )


def _pressure(pressure: Pressure) -> Iterator[Sample]:
    yield "penstock_pressure_ratio", (), pressure.pressure
    for resource, ratio in pressure.saturation.items():
        yield "penstock_saturation_ratio", (resource,), ratio
    for objective, rates in pressure.burn.items():
        for window, rate in rates.items():
            yield "penstock_slo_burn_ratio", (objective, window), rate
    yield "penstock_p99_seconds", ("publish",), pressure.publish_p99_s
    yield "penstock_p99_seconds", ("delivery",), pressure.delivery_p99_s


def _together(one: GroupStats, other: GroupStats) -> GroupStats:
    """Two groups under one label: sums of events and members, the higher of ages."""
    return GroupStats(
        one.lag + other.lag,
        one.outstanding + other.outstanding,
        max(one.oldest_s, other.oldest_s),
        max(one.waiting_s, other.waiting_s),
        one.members + other.members,
        one.held + other.held,
        one.credit + other.credit,
        lost=one.lost + other.lost,
    )


def _copied(histograms: dict[str, Histogram]) -> dict[str, tuple[list[int], float]]:
    return {tenant: (each.counts.copy(), each.sum_s) for tenant, each in histograms.items()}


class Scrape:
    """The numbers of one moment; a registry writes them out in any thread."""

    def __init__(
        self,
        samples: dict[str, list[tuple[tuple[str, ...], float]]],
        histograms: dict[str, dict[str, tuple[list[int], float]]],
    ) -> None:
        self._samples = samples
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        """Every family of the catalogue."""
        core = _prometheus().core
        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        for name, family in FAMILIES.items():
            metric = kinds[family.kind](name, family.about, labels=family.labels)
            for labels, value in self._samples[name]:
                metric.add_metric(labels, value)
            for tenant, (counts, sum_s) in self._histograms.get(name, {}).items():
                below = accumulate(counts)
                metric.add_metric([tenant], list(zip(_BOUND_TEXTS, below, strict=True)), sum_s)
            yield metric


def _prometheus() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise MissingExtra(
            "metrics need prometheus-client: pip install 'penstock[server]'"
        ) from None
    return prometheus_client


def metrics_routes(collect: Callable[[], Scrape]) -> list[Route]:
    """`GET /metrics` for a Starlette application; `collect` is `Metrics.collect`."""
    prometheus = _prometheus()
    try:
        from starlette.responses import Response as Answer
        from starlette.routing import Route as Way
    except ImportError:
        raise MissingExtra(
            "the HTTP side of the broker needs Starlette: pip install 'penstock[server]'"
        ) from None
    one_at_a_time = asyncio.Lock()

    async def answer(request: Request) -> Response:
        """Metrics, in the text format of Prometheus or OpenMetrics."""
        encoder, kind = prometheus.exposition.choose_encoder(request.headers.get("accept", ""))
        async with one_at_a_time:  # with many callers, the loop still does one scrape at a time
            registry = prometheus.CollectorRegistry(auto_describe=False)
            prometheus.ProcessCollector(registry=registry)
            registry.register(collect())
            text = await asyncio.to_thread(encoder, registry)
        return Answer(text, headers={"content-type": kind})

    return [Way("/metrics", answer, methods=["GET"])]


# -- the catalogue ----------------------------------------------------------------------------------


class Family(NamedTuple):
    """One metric with all its labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    about: str


PAIR = ("tenant", "topic")


def _counter(name: str, about: str, *labels: str) -> Family:
    return Family(name, "counter", labels, about)


def _gauge(name: str, about: str, *labels: str) -> Family:
    return Family(name, "gauge", labels, about)


def _histogram(name: str, about: str, *labels: str) -> Family:
    return Family(name, "histogram", labels, about)


SECTIONS: dict[str, tuple[Family, ...]] = {
    "Events and bytes": (
        _counter("penstock_published_events_total", "Events that became durable.", *PAIR),
        _counter("penstock_published_bytes_total", "Bytes of their payloads, uncompressed.", *PAIR),
        _counter("penstock_delivered_events_total", "Events sent to consumers, every attempt.", *PAIR),
        _counter("penstock_delivered_bytes_total", "Bytes of their payloads, uncompressed.", *PAIR),
        _counter("penstock_replayed_events_total", "Stored events that were read back.", *PAIR),
        _counter("penstock_duplicate_events_total", "Published events that had been stored before and were recognised by their token: exactly-once hits.", *PAIR),
        _counter("penstock_settled_events_total", "Events settled by consumers: `ack`, `nack`, `reject`, `extend`; `late` came after the lease.", "kind"),
    ),
    "Latency": (
        _histogram("penstock_publish_seconds", "From a publish at the broker's door until it was durable; one observation for each publish.", "tenant"),
        _histogram("penstock_delivery_seconds", "From the append of an event until it was first sent to a consumer of a group; one for each event and group. Left out is what is sent again: retries, a delivery to a client that came back, what a group reads again after a reset, replayed dead letters, and what of the partition was on its way just then. What a consumer left without having looked at it, and what is read again after a restart of the broker, counts once more.", "tenant"),
        _gauge("penstock_p99_seconds", "99th percentile of the last 5 minutes, of `publish` and of `delivery`.", "path"),
        _counter("penstock_commit_seconds_total", "Time spent writing and syncing commits."),
    ),
    "Refusals and failures": (
        _counter("penstock_refused_publishes_total", "Publishes, replays and connections that were refused, and the limit that was reached. `deferred` and `throttled` are back-pressure; `dropped` never fits. Of a connection no tenant is known.", "kind", "limit", "tenant"),
        _counter("penstock_backpressure_total", "Times that deliveries to a client were stopped, and why: its `send-buffer` was full, or the `fan-out` had no room for a batch and left it out.", "reason"),
        _counter("penstock_fastpath_total", "Large payloads and frames whose work was `taken` off the broker's loop, or had `fallen-back` to it because all threads were busy.", "outcome"),
        _counter("penstock_failed_deliveries_total", "Deliveries that were `nacked`, `expired`, `returned` by a consumer that left, or `rejected`. All but the last are tried again until attempts run out: the retry rate.", "cause"),
        _counter("penstock_dead_letters_total", "Events that became dead letters.", *PAIR),
        _counter("penstock_dead_letters_replayed_total", "Dead letters given back to their consumer.", *PAIR),
        _gauge("penstock_dead_letters_kept", "Dead letters in the view."),
        _counter("penstock_frame_errors_total", "Requests that were answered with an error, and what was no frame.", "code"),
        _gauge("penstock_problem", "1 while something is wrong: the `writer` failed, `housekeeping` or the `audit` chain did, the `disk` is full, or write-once topics are at a size limit of `retention`.", "part"),
    ),
    "Groups": (
        _gauge("penstock_group_lag_events", "Events a group has still to settle and can still read.", "group"),
        _gauge("penstock_group_outstanding_events", "Those of them handed out or between two attempts.", "group"),
        _gauge("penstock_group_oldest_seconds", "Age of the oldest event that is not settled: the queue's age.", "group"),
        _gauge("penstock_group_waiting_seconds", "Age of the oldest event that was never handed out.", "group"),
        _counter("penstock_group_lost_events_total", "Events that retention deleted before the group had read them.", "group", "topic"),
        _gauge("penstock_group_members", "Consumers in the group.", "group"),
    ),
    "Clients": (
        _gauge("penstock_connections", "Clients connected now."),
        _counter("penstock_connections_opened_total", "Clients that ever connected."),
        _gauge("penstock_client_held_bytes", "What clients make the broker hold: partial uploads, expanded frames, requests without an answer, answers that are not read or were not confirmed."),
        _gauge("penstock_client_limit_bytes", "The most it may be: `server.max_client_bytes`."),
        _gauge("penstock_quota_usage_ratio", "How much of a tenant's limit is used; 1 is all of it. A rate is used up when nothing is left of its burst.", "tenant", "quota"),
    ),
    "Storage": (
        _counter("penstock_commits_total", "Group commits."),
        _counter("penstock_disk_written_bytes_total", "Bytes written by the `journal`, to `segments` and to `side` files.", "part"),
        _gauge("penstock_write_amplification_ratio", "Bytes written to disk for each byte published, since the broker started."),
        _gauge("penstock_journal_pending_bytes", "Bytes waiting for the next commit."),
        _gauge("penstock_journal_backlog_bytes", "Closed journal files that are not sealed yet."),
        _gauge("penstock_retained_bytes", "Sealed bytes of events that retention keeps, before compression.", *PAIR),
        _gauge("penstock_segment_bytes", "Size of all segments on disk."),
        _gauge("penstock_topics", "Topics."),
        _gauge("penstock_groups", "Consumer groups."),
        _gauge("penstock_scheduled_events", "Events waiting for their time."),
        _gauge("penstock_dedup_tokens", "Tokens remembered for recognising duplicates."),
        _gauge("penstock_audit_behind_bytes", "Journal that the audit chain has not caught up with."),
    ),
    "Pressure": (
        _gauge("penstock_pressure_ratio", "The one number of `/pressure`: 0 idle, 1 at a limit, more beyond it."),
        _gauge("penstock_saturation_ratio", "How full one resource is: 1 is at its limit.", "resource"),
        _gauge("penstock_slo_burn_ratio", "How fast the error budget of an objective is used over a window: 1 is just as fast as it may be.", "objective", "window"),
    ),
    "About": (
        _gauge("penstock_build_info", "Always 1; the label is the version.", "version"),
    ),
}  # fmt: skip

FAMILIES = {family.name: family for section in SECTIONS.values() for family in section}

"""The catalogue of metrics: every name the broker exports, with its kind, labels and meaning.

docs/reference/metrics.md is the output of `reference`; a test compares the two, and another one
what is exported with what stands here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.server.metrics_counters import (
    BOUNDS_S,
    MAX_GROUPS,
    MAX_PAIRS,
    MAX_TENANTS,
    MAX_TOPICS,
    MAX_WORDS,
)


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

PREFACE = f"""# Metrics

The broker exports these at `GET /metrics`, in the text format of Prometheus or, when asked for, of
OpenMetrics. Counters begin at zero when the broker starts. Beside them stand the usual `process_*`
metrics: processor time, memory, open files.

**Bounded cardinality.** The first {MAX_TENANTS} tenants, {MAX_TOPICS} topics ({MAX_PAIRS} pairs of both) and {MAX_GROUPS} groups
that are seen have series of their own; all later ones share the label `other`, sums as sums and ages as
the highest. Topics and groups that the bus names itself go by their first word: `_inbox`, `_dlq`,
`_listener`. Kinds, limits, codes and reasons are words of the code, at most {MAX_WORDS}. A topic with events
of several tenants has the tenant `other` in `penstock_retained_bytes`.

**Latency buckets**, in seconds: {", ".join(f"{bound:g}" for bound in BOUNDS_S)}.

[Observability](../guide/observability.md) says what to watch and when to worry.
`deploy/grafana/penstock.json` is a dashboard over these names, `deploy/prometheus/` holds a scrape
configuration and alerts.

This page is printed by `python -m penstock.server.metrics_catalogue`; change it there.
"""


def reference() -> str:
    """The Markdown of docs/reference/metrics.md."""
    pages = [PREFACE]
    for title, families in SECTIONS.items():
        lines = [f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.about} |")
        pages.append("\n".join(lines) + "\n")
    return "\n".join(pages)


if __name__ == "__main__":
    print(reference(), end="")

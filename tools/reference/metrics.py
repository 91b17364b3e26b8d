"""Every metric the broker exports: docs/reference/metrics.md."""

from __future__ import annotations

from penstock.server.metrics.counters import (
    BOUNDS_S,
    MAX_GROUPS,
    MAX_PAIRS,
    MAX_TENANTS,
    MAX_TOPICS,
    MAX_WORDS,
)
from penstock.server.metrics.prometheus import SECTIONS

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

This page is printed from `penstock/server/metrics/prometheus.py` by `make reference`; change it there.
"""


def page() -> str:
    """The Markdown of the page."""
    pages = [PREFACE]
    for title, families in SECTIONS.items():
        lines = [f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.about} |")
        pages.append("\n".join(lines) + "\n")
    return "\n".join(pages)

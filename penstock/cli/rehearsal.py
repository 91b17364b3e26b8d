"""Rehearsal of a quota change: recorded traffic through the limits in force and through new ones.

`penstock doctor --simulate FILE` applies nothing. It runs the admission machine that the broker
runs, at the times at which the recorded events came.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.admission import ADMITTED, Admission, Decision

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cli.traffic import Batch, Traffic
    from penstock.core.quota import AdmissionLimits

ONE_BY_ONE = 64
"""Publishes of fewer events share a batch with others when they are stored (penstock.engines.layout),
so a smaller batch is taken event by event, a larger one as the one publish it probably was."""

KINDS = ("deferred", "throttled", "dropped")
SECOND_US = 1_000_000
MICRO = 1e-6


class Outcome(msgspec.Struct):
    """What would have become of one tenant's events under one set of limits."""

    admitted: int = 0
    deferred: int = 0
    throttled: int = 0
    dropped: int = 0
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    """Events that each limit kept out."""

    def refuse(self, decision: Decision, events: int) -> None:
        """Count events that were turned away."""
        setattr(self, decision.kind, getattr(self, decision.kind) + events)
        self.limits[decision.limit] = self.limits.get(decision.limit, 0) + events

    @property
    def refused(self) -> int:
        """Events that were turned away, for whatever reason."""
        return self.deferred + self.throttled + self.dropped


class TenantRehearsal(msgspec.Struct, kw_only=True):
    """One tenant: what it published, and how two sets of limits would have answered."""

    tenant: str
    events: int
    size_bytes: int
    """Of payloads, as rates count them."""
    peak_per_s: int
    """Most events in one second of the clock."""
    now: Outcome
    new: Outcome

    def row(self) -> dict[str, Any]:
        """For a table: one column for each answer, before and after."""
        cells: dict[str, Any] = {"tenant": self.tenant, "events": self.events, "bytes": self.size_bytes, "peak_per_s": self.peak_per_s}  # fmt: skip
        for kind in KINDS:
            cells[kind] = f"{getattr(self.now, kind)} -> {getattr(self.new, kind)}"
        cells["limits"] = ", ".join(sorted({*self.now.limits, *self.new.limits})) or "-"
        return cells


def rehearse(traffic: Traffic, now: AdmissionLimits, new: AdmissionLimits) -> list[TenantRehearsal]:
    """Each tenant under both sets of limits, the most refused first."""
    before, after = run(traffic, now), run(traffic, new)
    events: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    seconds: Counter[tuple[str, int]] = Counter()
    for batch in traffic.batches:
        events[batch.tenant] += batch.events
        sizes[batch.tenant] += batch.payload_bytes
        seconds[batch.tenant, batch.time_us // SECOND_US] += batch.events
    peaks: dict[str, int] = {}
    for (tenant, _), count in seconds.items():
        peaks[tenant] = max(peaks.get(tenant, 0), count)
    rows = [
        TenantRehearsal(tenant=tenant, events=count, size_bytes=sizes[tenant], peak_per_s=peaks[tenant],
                        now=before[tenant], new=after[tenant])
        for tenant, count in events.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda each: (-each.new.refused, -each.events, each.tenant))


def run(traffic: Traffic, limits: AdmissionLimits) -> dict[str, Outcome]:
    """Let the traffic meet limits; refused events do not come again.

    Batches with one append time were in one commit: they wait for the disk together, and are
    through before the next ones come.

    >>> from penstock.cli.traffic import Batch, Traffic
    >>> from penstock.core.quota import AdmissionLimits, TenantLimits
    >>> limits = AdmissionLimits(tenants={"acme": TenantLimits(events_per_s=2)})
    >>> came = [Batch(at, "acme", "orders", 3, 300, 492) for at in (1_000_000, 2_000_000)]
    >>> run(Traffic(batches=came, stored_bytes={}, cut=False), limits)["acme"].throttled
    2
    """
    admission = Admission(limits)
    for tenant, size in traffic.stored_bytes.items():
        admission.stored(tenant, size)
    outcomes: dict[str, Outcome] = {}
    for time_us, commit in groupby(traffic.batches, key=lambda batch: batch.time_us):
        _commit(admission, commit, time_us * MICRO, outcomes)
    return outcomes


def _commit(
    admission: Admission, batches: Iterable[Batch], now_s: float, outcomes: dict[str, Outcome]
) -> None:
    let_in: list[tuple[str, int, int]] = []
    for batch in batches:
        outcome = outcomes.setdefault(batch.tenant, Outcome())
        count, size, decision = _admit(admission, batch, now_s)
        if decision is not ADMITTED:
            outcome.refuse(decision, batch.events - count)
        if count:
            outcome.admitted += count
            let_in.append((batch.tenant, count, size))
    for tenant, count, size in let_in:
        admission.ingress_done(tenant, count, size)
        admission.stored(tenant, size)


def _admit(admission: Admission, batch: Batch, now_s: float) -> tuple[int, int, Decision]:
    """How many of a batch's events come in, their event bytes, and why not more."""
    # Nothing is known here of direct consumers: what waits in the log has no queue limit.
    tenant, topic, events = batch.tenant, batch.topic, batch.events
    decision = admission.admit(
        tenant, topic, events, batch.payload_bytes, now_s, stored_bytes=batch.event_bytes
    )
    if decision is ADMITTED:
        return events, batch.event_bytes, ADMITTED
    if batch.events >= ONE_BY_ONE:
        return 0, 0, decision
    payload, each = batch.payload_bytes // events, batch.event_bytes // events
    for count in range(events):
        decision = admission.admit(tenant, topic, 1, payload, now_s, stored_bytes=each)
        if decision is not ADMITTED:  # and so for the rest: no time passes between them
            return count, count * each, decision
    return events, events * each, ADMITTED

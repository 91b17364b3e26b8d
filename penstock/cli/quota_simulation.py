"""A rehearsal of new limits: recorded traffic under the limits in force and under new ones.

`penstock doctor --simulate FILE` applies nothing. It runs the broker's admission machine at the times of
the recorded events, which are read from the log without payloads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.admission import ADMITTED, Admission, Decision
from penstock.log.disk import RealDisk
from penstock.log.recovery import Recovered, Recovery, check_folder
from penstock.log.segment_reader import corrupted
from penstock.model.batch import BatchHead, measured
from penstock.model.topic import is_system

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.core.admission import AdmissionLimits
    from penstock.log.segment import SegmentInfo
    from penstock.model.settings import Settings

ONE_BY_ONE = 64
"""Publishes of fewer events share a batch with others when they are stored (penstock.engines.embedded.batching),
so a smaller batch is admitted event by event, a larger one as the one publish that it probably was."""

KINDS = ("deferred", "throttled", "dropped")
SECOND_US = 1_000_000
MICRO = 1e-6

MAX_BATCHES = 500_000
"""Batches of a rehearsal, the newest ones: about 100 MB, and 5 s of a core for two sets of limits."""

COLUMNS = ["topic", "append_time", "tenant"]


class Outcome(msgspec.Struct):
    """The answers to one tenant's events under one set of limits."""

    admitted: int = 0
    deferred: int = 0
    throttled: int = 0
    dropped: int = 0
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    """Events that each limit refused."""

    def refuse(self, decision: Decision, events: int) -> None:
        """Count refused events."""
        setattr(self, decision.kind, getattr(self, decision.kind) + events)
        self.limits[decision.limit] = self.limits.get(decision.limit, 0) + events

    @property
    def refused(self) -> int:
        """Events that were refused for any reason."""
        return self.deferred + self.throttled + self.dropped


class TenantRehearsal(msgspec.Struct, kw_only=True):
    """The publishes of one tenant, and the answers of two sets of limits."""

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
    """The outcome of each tenant under these limits; refused events are not published again.

    Batches with one append time were in one commit: they wait for the disk together, and are stored
    before the next ones arrive.

    >>> from penstock.cli.quota_simulation import Batch, Traffic
    >>> from penstock.core.admission import AdmissionLimits, TenantLimits
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
    admitted: list[tuple[str, int, int]] = []
    for batch in batches:
        outcome = outcomes.setdefault(batch.tenant, Outcome())
        count, size, decision = _admit(admission, batch, now_s)
        if decision is not ADMITTED:
            outcome.refuse(decision, batch.events - count)
        if count:
            outcome.admitted += count
            admitted.append((batch.tenant, count, size))
    for tenant, count, size in admitted:
        admission.ingress_done(tenant, count, size)
        admission.stored(tenant, size)


def _admit(admission: Admission, batch: Batch, now_s: float) -> tuple[int, int, Decision]:
    """How many events of a batch are admitted, their event bytes, and the decision that ends them."""
    # Direct consumers are unknown here, and events that wait in the log have no queue limit.
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
        if decision is not ADMITTED:  # the rest gets the same answer: no time passes between them
            return count, count * each, decision
    return events, events * each, ADMITTED


# -- recorded traffic -----------------------------------------------------------------------------


class Batch(NamedTuple):
    """Events of one tenant and topic that were stored together."""

    time_us: int
    tenant: str
    topic: str
    events: int
    payload_bytes: int
    event_bytes: int
    """As `penstock.model.batch` and storage count them, with keys and headers."""


class Traffic(msgspec.Struct, kw_only=True):
    """The publishes of a period, and the bytes stored before it."""

    batches: list[Batch]
    stored_bytes: dict[str, int]
    """Bytes of each tenant when the period began."""
    cut: bool
    """Whether the oldest batches are left out, because there are more than MAX_BATCHES."""


def read_traffic(folder: Path, settings: Settings, window_s: float) -> Traffic:
    """The traffic in the log during `window_s` before its newest event."""
    disk = RealDisk(folder)
    check_folder(disk, write=False)
    recovered = Recovery(disk, settings, write=False, measure=True).run()
    log = recovered.log
    try:
        for topic, partition in log.manifest.topics():
            log.partition(topic, partition)
        ends = [lane.last_time_us for (topic, _), lane in log.partitions.items() if not is_system(topic)]  # fmt: skip
        newest_us = max(ends, default=0)
        return _gather(folder, recovered, newest_us - round(window_s * 1_000_000))
    finally:
        log.close()
        log.manifest.close()


def _gather(folder: Path, recovered: Recovered, start_us: int) -> Traffic:
    found: list[Batch] = []
    stored: dict[str, int] = {}
    for tenants in recovered.unsealed.values():
        for tenant, size in tenants.items():
            stored[tenant] = stored.get(tenant, 0) + size
    cut = False
    for info in recovered.log.manifest.segments():
        for each in info.ranges:
            for tenant in each.tenants:
                stored[tenant] = stored.get(tenant, 0) + each.event_bytes
        if info.last_time_us >= start_us:
            found += _sealed(folder, info, start_us)
        if len(found) > 2 * MAX_BATCHES:
            found, cut = _newest(found), True
    found += _unsealed(recovered, start_us)
    cut = cut or len(found) > MAX_BATCHES
    found = _newest(found)
    for batch in found:
        stored[batch.tenant] = max(0, stored.get(batch.tenant, 0) - batch.event_bytes)
    return Traffic(batches=found, stored_bytes=stored, cut=cut)


def _newest(batches: list[Batch]) -> list[Batch]:
    return sorted(batches)[-MAX_BATCHES:]


def _unsealed(recovered: Recovered, start_us: int) -> Iterator[Batch]:
    """Batches of the journal, as they were committed."""
    log = recovered.log
    for (topic, _), lane in log.partitions.items():
        if is_system(topic):  # the bus publishes these without admission
            continue
        for at in range(bisect_left(lane.times, start_us), len(lane.times)):
            body = log.journal.body(lane.files[at], lane.positions[at])
            encoded = body[lane.inners[at] :]
            head = BatchHead.parse(encoded)
            sizes = measured(head, encoded)
            yield Batch(head.append_time_us, head.tenant, topic, head.count, *sizes)


def _sealed(folder: Path, info: SegmentInfo, start_us: int) -> Iterator[Batch]:
    """Batches of a segment: events of one topic and tenant with one append time shared a commit."""
    try:
        table = pq.read_table(folder / info.path, columns=COLUMNS, partitioning=None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupted(info, f"it cannot be decoded: {error}") from error
    times = table.column("append_time").combine_chunks().view(pa.int64()).to_numpy()
    topics, topic_names = _numbered(table.column("topic"))
    tenants, tenant_names = _numbered(table.column("tenant"))
    # Bytes are known for each range only, so each event counts as its share.
    rows = [each.rows for each in info.ranges]
    payloads = np.repeat([each.payload_bytes / each.rows for each in info.ranges], rows)
    sizes = np.repeat([each.event_bytes / each.rows for each in info.ranges], rows)
    changed = np.ones(len(times), bool)
    changed[1:] = (
        (times[1:] != times[:-1]) | (topics[1:] != topics[:-1]) | (tenants[1:] != tenants[:-1])
    )
    starts = np.flatnonzero(changed)
    counts = np.diff(starts, append=len(times))
    totals = [np.add.reduceat(each, starts).round().astype(int) for each in (payloads, sizes)]
    columns = [column.tolist() for column in (starts, counts, *totals)]
    for at, count, payload, size in zip(*columns, strict=True):
        topic = topic_names[topics[at]]
        if times[at] >= start_us and not is_system(topic):
            tenant = tenant_names[tenants[at]]
            yield Batch(int(times[at]), tenant, topic, count, payload, size)


def _numbered(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """A column of names as numbers, and the names."""
    whole = column.combine_chunks()
    if not pa.types.is_dictionary(whole.type):
        whole = whole.dictionary_encode()
    return whole.indices.to_numpy(), whole.dictionary.to_pylist()

"""Figures of a running engine for metrics, `/pressure` and the doctor: groups, quotas, sizes, problems.

Everything here runs on the engine's loop and only reads. Reading costs a step for each lease, run, lane
or changed segment, never one for each event.

`troubles_of` names the problems of a broker that goes on running; `Troubles` logs when one begins or ends.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from penstock.core.admission import Bucket
from penstock.core.delivery import QueueGroup
from penstock.core.lease import OUT
from penstock.core.state import Place
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.lost_events import lag_behind, unreadable
from penstock.log.event_log import EventLog
from penstock.log.segment import Range, SegmentInfo
from penstock.server.metrics.counters import OTHER, Labels

log = logging.getLogger("penstock.server")

# How often `Troubles` looks for problems.
LOOK_S = 0.5
# The parts of the broker that can have a problem, as labels of `penstock_problem`.
PARTS = ("writer", "housekeeping", "disk", "retention", "audit")
# Full topics that a message names: enough to begin with.
SHOWN_TOPICS = 5


class GroupStats(msgspec.Struct):
    """The state of one group. Ages are in seconds since an event was appended."""

    lag: int
    """Unsettled events: waiting, handed out or between two attempts."""
    outstanding: int
    """Unsettled events that were handed out, or wait for another attempt."""
    oldest_s: float
    """Age of the oldest unsettled event: the queue's age."""
    waiting_s: float
    """Age of the oldest event that was never handed out: more consumers would reduce it."""
    members: int
    held: int
    """Events in the hands of members now."""
    credit: int
    """Events that the members offered to hold."""
    mode: str = "queue"
    lost: int = 0
    """Events that retention deleted before the group had read them, since the broker started."""


class Unsettled(NamedTuple):
    """The events that a queue group has handed out and not settled."""

    events: int
    lowest: dict[Place, int]
    """The lowest such offset in each partition."""


def group_stats(engine: EmbeddedEngine) -> dict[str, GroupStats]:
    """The state of every group, by name."""
    now_us = engine.runtime.wall_us()
    found = {name: _stats_of(engine, name, now_us) for name in engine.state.groups}
    for name, losses in engine.unread.lost.items():
        if name in found:
            found[name].lost = sum(losses.values())
    return found


def _stats_of(engine: EmbeddedEngine, name: str, now_us: int) -> GroupStats:
    machine = engine.dispatcher.groups.get(name)
    if machine is not None:
        return _queue_stats(engine.log, machine, now_us)
    cursors = engine.state.groups[name].cursors
    lag, since_us = 0, None
    for place, cursor in cursors.items():
        _, behind = lag_behind(engine.log, place, cursor)
        if behind > 0:
            lag += behind
            since_us = _earlier(since_us, appended_us(engine.log, place, cursor))
    age_s = _age_s(since_us, now_us)
    readers = engine.groups.logs[name].readers if name in engine.groups.logs else {}
    return GroupStats(lag, 0, age_s, age_s, len(readers), 0, 0, "log")


def _queue_stats(log: EventLog, machine: QueueGroup, now_us: int) -> GroupStats:
    unsettled = unsettled_in(machine)
    lag = unsettled.events - sum(unreadable(log, machine).values())
    waiting_us = oldest_us = None
    for place, lane in machine.lanes.items():
        if lane.cursor < lane.end:
            lag += lane.end - lane.cursor
            waiting_us = _earlier(waiting_us, appended_us(log, place, lane.cursor))
    for place, offset in unsettled.lowest.items():
        oldest_us = _earlier(oldest_us, appended_us(log, place, offset))
    if waiting_us is not None:
        oldest_us = _earlier(oldest_us, waiting_us)
    members = machine.members.values()
    return GroupStats(
        lag,
        unsettled.events,
        _age_s(oldest_us, now_us),
        _age_s(waiting_us, now_us),
        len(members),
        sum(member.inflight for member in members),
        sum(member.max_inflight for member in members),
    )


def unsettled_in(machine: QueueGroup) -> Unsettled:
    """Count a machine's unsettled events, in steps of leases and runs, not of events."""
    events = 0
    lowest: dict[Place, int] = {}
    for lease in machine.leases.values():
        events += lease.open
        _lower(
            lowest, (lease.lane.topic, lease.lane.partition), lease.start + lease.states.find(OUT)
        )
    for run in machine.waiting():
        events += run.count
        _lower(lowest, (run.lane.topic, run.lane.partition), run.start)
    return Unsettled(events, lowest)


def _lower(lowest: dict[Place, int], place: Place, offset: int) -> None:
    known = lowest.get(place)
    if known is None or offset < known:
        lowest[place] = offset


def appended_us(log: EventLog, place: Place, offset: int) -> int:
    """When an event was appended: recorded in the journal, estimated in a sealed segment.

    A segment records the times of its first and last events; the estimate spreads the others evenly.
    """
    part = log.partition(*place)
    if part.bases and offset >= part.bases[0]:
        return part.times[bisect_right(part.bases, offset) - 1]
    found = log.manifest.find(*place, offset)
    if found is None:  # retention deleted it: the remaining events begin here
        return part.times[0] if part.bases else part.last_time_us
    stretch = found[1]
    share = max(0, offset - stretch.first_offset) / stretch.rows
    return stretch.first_time_us + int(share * (stretch.last_time_us - stretch.first_time_us))


def _earlier(known_us: int | None, time_us: int) -> int:
    return time_us if known_us is None else min(known_us, time_us)


def _age_s(since_us: int | None, now_us: int) -> float:
    return 0.0 if since_us is None else max(0, now_us - since_us) / 1e6


class Quota(NamedTuple):
    """How much of one limit a tenant uses; 1 is all of it."""

    tenant: str
    quota: str
    ratio: float


def quotas(engine: EmbeddedEngine) -> Iterator[Quota]:
    """Every limit that is set for a tenant, and how much of it is used."""
    admission, now_s = engine.admission, engine.runtime.now()
    windows = engine.dispatcher.windows.by_tenant
    for name in {**admission._tenants, **windows}:
        tenant = admission._tenant(name)  # makes it for a tenant that only consumes
        limits = tenant.limits
        stored = tenant.stored_bytes + tenant.ingress_bytes
        held = windows[name].held if name in windows else 0
        queued = 0 if limits.max_queued is None else engine.groups.queued(name)
        for quota, used, allowed in (
            ("max_inflight", held, limits.max_inflight),
            ("max_queued", queued, limits.max_queued),
            ("max_ingress", tenant.ingress, limits.max_ingress),
            ("storage_bytes", stored, limits.storage_bytes),
        ):
            if allowed is not None:
                yield Quota(name, quota, _ratio(used, allowed))
        for quota, bucket in (
            ("events_per_s", tenant.by_events),
            ("bytes_per_s", tenant.by_bytes),
            ("replays_per_minute", tenant.by_replays),
        ):
            if bucket is not None:
                yield Quota(name, quota, _spent(bucket, now_s))


def _spent(bucket: Bucket, now_s: float) -> float:
    """The share of a bucket that is used up, counting the tokens earned meanwhile."""
    bucket.wait_s(0, now_s)
    return _ratio(bucket.capacity - bucket._tokens, bucket.capacity)


def _ratio(used: float, allowed: float) -> float:
    """Use against a limit; a limit of zero is always reached."""
    return max(0.0, used / allowed) if allowed else 1.0


def saturation(engine: EmbeddedEngine) -> dict[str, float]:
    """How full each part of the engine is: 1 at its limit, 0 where it has no limit."""
    ingress = engine.admission.limits.max_global_ingress
    return {
        "ingress": 0.0 if ingress is None else _ratio(engine.admission._ingress, ingress),
        "pending": pending_bytes(engine) / engine.settings.journal.pending_max_bytes,
        "backlog": engine.sealing_backlog.pressure(),
        "storage": float(disk_full(engine)),
    }


def disk_full(engine: EmbeddedEngine) -> bool:
    """Whether publishes are refused because the disk is full."""
    return engine.commits._full is not None


def pending_bytes(engine: EmbeddedEngine) -> int:
    """Bytes that wait for the next commit."""
    return engine.commits._pending.bytes


class Retained:
    """Sealed bytes by tenant and topic, updated from the segments that were added and deleted."""

    def __init__(self, labels: Labels) -> None:
        self.bytes: dict[tuple[str, str], int] = {}
        self._labels = labels
        self._seen: dict[int, SegmentInfo] = {}

    def update(self, segments: Iterable[SegmentInfo]) -> None:
        """Compare with the live segments; only new and deleted ones cost anything."""
        live = {info.id: info for info in segments}
        for gone in self._seen.keys() - live.keys():
            self._count(self._seen[gone].ranges, -1)
        for new in live.keys() - self._seen.keys():
            self._count(live[new].ranges, 1)
        self._seen = live

    def _count(self, ranges: Iterable[Range], sign: int) -> None:
        for each in ranges:
            tenant = each.tenants[0] if len(each.tenants) == 1 else OTHER
            pair = self._labels.pair(tenant, each.topic)
            self.bytes[pair] = self.bytes.get(pair, 0) + sign * each.event_bytes


def troubles_of(engine: EmbeddedEngine) -> dict[str, str]:
    """The current problems, by the part of the broker."""
    found: dict[str, str] = {}
    if engine.commits.failed is not None:
        found["writer"] = engine.commits.failed.message
    if engine.maintenance.problem is not None:
        found["housekeeping"] = engine.maintenance.problem
    if disk_full(engine):
        found["disk"] = "there is no room for more events: publishes are refused, the rest goes on"
    if full := _full_topics(engine):
        found["retention"] = full
    if engine.audit.failure is not None:
        found["audit"] = engine.audit.failure
    return found


def _full_topics(engine: EmbeddedEngine) -> str:
    """The write-once topics that accept no publishes, and the limit that they reached; "" for none."""
    keeper = engine.maintenance
    if keeper.shortage_bytes:
        return (
            f"write-once keeps {keeper.shortage_bytes} bytes over retention.max_bytes: publishes to "
            "write-once topics are refused, the rest goes on"
        )
    names = sorted(keeper.full_topics)
    shown = ", ".join(names[:SHOWN_TOPICS]) + (" and more" if names[SHOWN_TOPICS:] else "")
    return f"write-once topics at their size limit take no publishes: {shown}" if names else ""


class Troubles:
    """Logs each problem once when it begins, and once when it ends.

    >>> troubles = Troubles()
    >>> troubles.report({"disk": "it is full"}), troubles.report({"disk": "it is full"})
    (['disk'], [])
    >>> troubles.report({})
    ['disk']
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def watch(self, engine: EmbeddedEngine) -> None:
        """Look for problems until it is cancelled."""
        while True:
            self.report(troubles_of(engine))
            await asyncio.sleep(LOOK_S)

    def report(self, now: Mapping[str, str]) -> list[str]:
        """Log problems that began or ended since the last call; returns their parts."""
        began, ended = sorted(now.keys() - self._known), sorted(self._known - now.keys())
        for part in began:
            log.warning("trouble", extra={"part": part, "problem": now[part]})
        for part in ended:
            log.info("trouble is over", extra={"part": part})
        self._known = set(now)
        return began + ended

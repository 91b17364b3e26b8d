"""Defects that the simulator found in the engine, kept as mutants: each must be found again.

A seed that found a defect once proves little after the workload has changed. Bringing the defect
itself back, and seeing it found, proves that nobody can bring it back unseen.
"""

from __future__ import annotations

from typing import Any

from penstock.core.delivery import QueueGroup
from penstock.core.lease import Lane, Run
from penstock.engines.embedded.audit import AuditTrail
from penstock.engines.embedded.commit import CommitLoop, OpenCommit
from penstock.engines.embedded.maintenance import Maintenance
from penstock.engines.embedded.schedules import Scheduler
from penstock.log.event_log import EventLog
from penstock.log.recovery import Recovery
from penstock.model.errors import PenstockError, Rejected
from penstock.testing.simulation.mutant import Mutant


def _past_the_gate(original: Any) -> Any:
    """While keys were loaded from disk, events went out without waiting for their key."""

    def next_run(self: QueueGroup, limit: int) -> Run | None:
        run: Run | None = original(self, limit)
        return self._pull(limit) if run is None and self._gate is not None else run

    return next_run


def _empty_leases(original: Any) -> Any:
    """After a reset to the end, a lane without events stayed in line and was leased, empty."""

    def reset(self: QueueGroup, lane: Lane, offset: int) -> None:
        line = lane.line
        original(self, lane, offset)
        if line is not None and lane.line is None:
            lane.line = line
            line.append(lane)

    return reset


def _replayed_twice(original: Any) -> Any:
    """A dead letter that a reset had brought back already was given back once more."""

    def again(self: QueueGroup, lane: Lane, offset: int, now: float) -> None:
        self._again(Run(lane, offset, 1, 0), now, 0.0)

    return again


def _flush_without_room(original: Any) -> Any:
    """On a full disk a flush returned although nothing of it was written."""

    def take(self: CommitLoop, now_us: int) -> OpenCommit:
        taken: OpenCommit = original(self, now_us)
        taken.drained = True
        return taken

    return take


def _audit_gives_up(original: Any) -> Any:
    """A full disk kept an action out of the audit chain, and sealing then removed the journal."""

    async def append(self: AuditTrail, entries: Any, end: int) -> None:
        try:
            self.log.append_missing(entries)
        except PenstockError:
            self.failure = None
        self._behind = max(self._behind, end)

    return append


def _clock_stops(original: Any) -> Any:
    """A full disk ended the timekeeper: nothing delayed came any more until the next start."""

    async def fire(self: Scheduler) -> None:
        try:
            await original(self)
        except Rejected as error:  # no longer one that its caller waits and tries again for
            raise PenstockError(str(error)) from error

    return fire


def _late_sweep(original: Any) -> Any:
    """The sweep for orphans ran beside publishers, and took side files that were just written."""

    async def run(self: Maintenance) -> None:
        await self._engine.runtime.read(self.sweep_orphans)
        await original(self)

    return run


def _trust_page_cache(original: Any) -> Any:
    """After a failed fsync, recovery believed bytes that only the page cache had."""

    class Mute:
        def __init__(self, real: Any) -> None:
            self._real = real

        def write_at(self, offset: int, data: Any) -> None:
            """The bytes are there already, are they not."""

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    class Folder(Mute):
        def open(self, path: str, **how: Any) -> Any:
            return Mute(self._real.open(path, **how))

    def read_file(self: Recovery, base: int, following: int | None) -> None:
        disk, self.disk = self.disk, Folder(self.disk)
        try:
            original(self, base, following)
        finally:
            self.disk = disk

    return read_file


def _over_the_gap(original: Any) -> Any:
    """Retention left older events of a shared file readable behind a gap."""

    def bounds(self: EventLog, topic: str, partition: int) -> tuple[int, int]:
        first, end = original(self, topic, partition)
        sealed = self.manifest.ranges(topic, partition)
        log = self.partition(topic, partition)
        return max(log.floor, sealed[0][1].first_offset if sealed else first), end

    return bounds


def _nothing_waits(original: Any) -> Any:
    """Retention deleted delayed events before they came."""

    def waiting(self: Maintenance) -> set[int]:
        return set()

    return waiting


DEFECTS = (
    Mutant("past-the-gate", "a key waits also while keys are loaded", QueueGroup, "_next_run", _past_the_gate),
    Mutant("empty-leases", "a lease has events", QueueGroup, "reset", _empty_leases),
    Mutant("replayed-twice", "a dead letter comes back once", QueueGroup, "revive", _replayed_twice, 20),
    Mutant("flush-without-room", "a flush returns when it is durable", CommitLoop, "_take", _flush_without_room, 20),
    Mutant("audit-gives-up", "a full disk costs no audit record", AuditTrail, "_append", _audit_gives_up),
    Mutant("clock-stops", "a full disk delays what is delayed, no more", Scheduler, "_publish_delayed", _clock_stops),
    Mutant("late-sweep", "only orphans are swept", Maintenance, "run", _late_sweep),
    Mutant("trust-page-cache", "what recovery saw is durable", Recovery, "_read_file", _trust_page_cache, 20),
    Mutant("over-the-gap", "what is readable has no gap", EventLog, "bounds", _over_the_gap, 40),
    Mutant("nothing-waits", "a delayed event is kept until it came", Maintenance, "_waiting_segments", _nothing_waits, 40),
)  # fmt: skip
"""What was broken once."""

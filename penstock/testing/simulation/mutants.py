"""Mutants: the production code with one guarantee broken on purpose, to see the simulator notice.

Each mutant replaces a function of the engine while a seed runs. A mutant that survives its seeds
means that an invariant, or the fault that would show it, is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.delivery import QueueGroup
from penstock.core.entry import Acked, Retried
from penstock.core.lease import EXPIRED, FENCED, Lane, Lease, Run
from penstock.core.ordering import KeyGate
from penstock.core.schedule import Delayed
from penstock.engines.embedded.audit import AuditTrail
from penstock.engines.embedded.batching import Batcher, Placed
from penstock.engines.embedded.commit import CommitLoop, OpenCommit
from penstock.engines.embedded.log_groups import LogReader
from penstock.log.journal import Commit
from penstock.testing.simulation.defects import DEFECTS
from penstock.testing.simulation.mutant import Broken, Mutant, nothing_async
from penstock.testing.simulation.storage_mutants import STORAGE_MUTANTS


def _early_ack(original: Any) -> Any:
    def take(self: CommitLoop, now_us: int) -> OpenCommit:
        taken: OpenCommit = original(self, now_us)
        taken.answer(None)
        return taken

    return take


def _early_delivery(original: Any) -> Any:
    def take(self: CommitLoop, now_us: int) -> OpenCommit:
        taken: OpenCommit = original(self, now_us)
        leases, taken.leases = taken.leases, []
        self._source.deliver(leases)  # type: ignore[attr-defined]
        return taken

    return take


def _forget_attempt(original: Any) -> Any:
    def lease(self: QueueGroup, run: Run, member: Any, now: float) -> Lease:
        made: Lease = original(self, run, member, now)
        entry = self._entries.pop()
        # The place is kept, or nothing would be recovered at all; only the count is lost.
        lane = run.lane
        self._entries.append(
            Retried(self.name, lane.topic, lane.partition, run.start, run.count, run.made, 0)
        )
        del entry
        return made

    return lease


def _accept(state: int) -> Broken:
    def broken(original: Any) -> Any:
        def ack(self: QueueGroup, lease: Lease, index: int, now: float) -> None:
            if lease.states[index] != state:
                original(self, lease, index, now)

        return ack

    return broken


def _half_transaction(original: Any) -> Any:
    """Each part of a submission is a frame of its own, so that a torn write keeps some of them."""

    def add(
        self: Batcher, bodies: list[Any], laid: list[Any], commit: Commit, placed: list[Placed]
    ) -> int:
        position = commit.end
        for at, body in enumerate(bodies):
            position = original(self, [body], laid[at : at + 1], commit, placed)
        return position

    return add


def _skip_audit(original: Any) -> Any:
    def committed(self: AuditTrail, submissions: Sequence[Any], end: int) -> None:
        """Sealing takes the journal away, and with it the last copy."""

    return committed


def _open_gate(original: Any) -> Any:
    def offer(self: KeyGate, lane: Lane, start: int, made: int, keys: Sequence[Any]) -> list[Run]:
        return [Run(lane, start, len(keys), made)]

    return offer


def _at_once(original: Any) -> Any:
    def again(self: QueueGroup, run: Run, now: float, delay_s: float) -> None:
        original(self, run, now, 0.0)

    return again


def _nack_is_ack(original: Any) -> Any:
    def again(self: QueueGroup, run: Run, now: float, delay_s: float) -> None:
        lane = run.lane
        self._entries.append(Acked(self.name, lane.topic, lane.partition, [run.start, run.count]))

    return again


def _too_early(original: Any) -> Any:
    def due(self: Delayed, now_us: int, limit: int | None = None) -> list[int]:
        found: list[int] = original(self, now_us + 300_000, limit)
        return found

    return due


ENGINE_MUTANTS = (
    Mutant("early-ack", "a publish returns after the commit", CommitLoop, "_take", _early_ack),
    Mutant("forget-attempt", "an attempt is counted before it is made", QueueGroup, "_lease", _forget_attempt),
    Mutant("accept-expired", "an expired lease settles nothing", QueueGroup, "ack", _accept(EXPIRED)),
    Mutant("accept-fenced", "a lease from before a reset settles nothing", QueueGroup, "ack", _accept(FENCED), 20),
    Mutant("half-transaction", "a transaction is all or nothing", Batcher, "_add", _half_transaction, 20),
    Mutant("early-delivery", "a lease is durable before the event goes out", CommitLoop, "_take", _early_delivery),
    Mutant("open-gate", "a key's events go out one at a time", KeyGate, "offer", _open_gate),
    Mutant("retry-at-once", "a retry waits for its step", QueueGroup, "_again", _at_once),
    Mutant("nack-is-ack", "what failed comes again", QueueGroup, "_again", _nack_is_ack),
    Mutant("skip-audit", "every action is in the audit chain", AuditTrail, "committed", _skip_audit, 20),
    Mutant("lose-commit", "a committed cursor is durable", LogReader, "commit", nothing_async),
    Mutant("too-early", "a delayed event waits for its time", Delayed, "due", _too_early),
)  # fmt: skip

MUTANTS: tuple[Mutant, ...] = (*STORAGE_MUTANTS, *ENGINE_MUTANTS, *DEFECTS)
"""All mutants, those that were real defects last."""


def named(name: str) -> Mutant:
    """The mutant of a name."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)

"""The audit trail of an embedded engine: copies operators' actions from the journal to the chain.

An action and its audit entry are one journal entry, so neither exists without the other. The chain
follows a moment later; until it has an entry the journal keeps it, and after a crash the next life
catches up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.audit import AuditEntry, State
from penstock.core.entry import Audited
from penstock.engines.pending import Submission
from penstock.log.auditlog import AuditLog
from penstock.model.errors import DiskFull, PenstockError

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine


class AuditTrail:
    """Appends to the audit chain, behind the commits and in their order."""

    def __init__(self, engine: EmbeddedEngine, entropy: bytes) -> None:
        recovered = engine.recovered
        self._engine = engine
        self.log = AuditLog.open(engine.disk, now_us=engine.runtime.wall_us(), entropy=entropy)
        self.log.append_missing(_chained(entry, ref) for ref, entry in recovered.audited)
        self.position = recovered.position
        """Everything before this journal position is in the chain."""
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._failed = False

    def entry(
        self,
        actor: str,
        operation: str,
        target: str,
        prior: State,
        result: State,
        reason: str = "",
    ) -> Audited:
        """What goes into the journal together with the action itself."""
        at_us = self._engine.runtime.wall_us()
        return Audited(at_us, actor, operation, [target], reason, prior, result)

    def committed(self, submissions: Sequence[Submission], end: int) -> None:
        """A commit that ends at `end` is durable: chain the actions in it."""
        entries = [
            _chained(entry, submission.position + number)
            for submission in submissions
            for number, entry in enumerate(
                entry for entry in submission.written if isinstance(entry, Audited)
            )
        ]
        if entries:
            task = self._engine.spawn(self._append(entries, end))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        elif not self._waiting and not self._failed:
            self.position = end

    async def _append(self, entries: list[AuditEntry], end: int) -> None:
        async with self._turn:
            # While it is not in the chain it must stay in the journal: nothing is sealed past it.
            while not self._failed:
                try:
                    await self._engine.runtime.read(self.log.append_missing, entries)
                    break
                except DiskFull as error:
                    await asyncio.sleep(error.retry_after_s)
                except PenstockError:
                    self._failed = True  # the next life catches up from the journal
                    raise
        if not self._failed:
            self.position = max(self.position, end)

    async def settled(self) -> None:
        """Return when everything committed so far is in the chain."""
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def close(self) -> None:
        """Sign the end and release the files."""
        self.log.close()


def _chained(entry: Audited, ref: int) -> AuditEntry:
    return AuditEntry(
        at_us=entry.at_us, actor=entry.actor, operation=entry.operation, targets=entry.targets,
        reason=entry.reason, prior=entry.prior, result=entry.result, ref=ref,
    )  # fmt: skip

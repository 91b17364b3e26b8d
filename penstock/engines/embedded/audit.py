"""The audit trail of an embedded engine: copies operators' actions from the journal to the audit chain.

An action and its audit entry are written together, so neither exists without the other. The chain gets
the entry a moment later; until then the journal keeps it, and after a crash the next start copies it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.audit import AuditEntry, State
from penstock.core.entry import Audited, as_recovered
from penstock.engines.embedded.batching import Submission
from penstock.engines.embedded.runtime import BackgroundTasks
from penstock.log.audit_log import AuditLog
from penstock.log.audit_reader import AuditReader
from penstock.log.manifest import AuditMark
from penstock.model.errors import DiskRefused, PenstockError

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger("penstock.engines")


class AuditTrail:
    """Appends to the audit chain, after the commits and in their order."""

    def __init__(self, engine: EmbeddedEngine, entropy: bytes) -> None:
        recovered = engine.recovered
        self._engine = engine
        self.log = AuditLog.open(engine.disk, now_us=engine.runtime.wall_us(), entropy=entropy)
        before = recovered.log.manifest.audit
        self._continues = before is None or (
            before.public_key == self.log.public_key
            and AuditReader(engine.disk).holds(before.sequence, before.hash)
        )
        if before is not None and not self._continues:
            log.warning(
                "the audit chain lacks records that it had: %d of key %s. Run `penstock audit verify`",
                before.sequence, before.public_key[:16],
            )  # fmt: skip
        self._behind = recovered.position
        """While the chain is behind: everything before this journal position is in it."""
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self.failure: str | None = None
        """Why nothing more is appended until the next start."""
        self._late = [_chained(entry, ref) for ref, entry in recovered.audited]
        """Entries that recovery found in the journal only."""
        try:
            self.log.append_missing(self._late)
            self._late = []
        except DiskRefused:  # the engine starts all the same: the journal has them
            self._behind = self._late[0].ref

    @property
    def position(self) -> int:
        """Everything before this journal position is in the chain; nothing is sealed past it."""
        behind = self._late or self._tasks or self.failure is not None
        return self._behind if behind else self._engine.committed_to

    def start(self) -> None:
        """Append the entries that recovery found in the journal only, as soon as there is room."""
        if self._late:
            late, self._late = self._late, []
            self._follow(late, self._engine.recovered.position)

    def mark(self) -> AuditMark | None:
        """How far the chain reaches; None when the manifest knows it.

        The manifest keeps the mark of a chain that was lost: another chain does not replace it.
        """
        head = self.log.head
        found = AuditMark(head.sequence, head.hash, self.log.public_key)
        known = found == self._engine.log.manifest.audit or not head.sequence
        return None if known or not self._continues else found

    def entry(
        self,
        actor: str,
        operation: str,
        target: str,
        prior: State,
        result: State,
        reason: str = "",
    ) -> Audited:
        """The entry that is written to the journal together with the action."""
        at_us = self._engine.runtime.wall_us()
        return as_recovered(Audited(at_us, actor, operation, [target], reason, prior, result))

    def committed(self, submissions: Sequence[Submission], end: int) -> None:
        """A commit that ends at `end` is durable: append its actions to the chain."""
        entries = [
            _chained(entry, submission.position + number)
            for submission in submissions
            for number, entry in enumerate(
                entry for entry in submission.written if isinstance(entry, Audited)
            )
        ]
        self._follow(entries, end)

    def _follow(self, entries: list[AuditEntry], end: int) -> None:
        if not self._tasks and self.failure is None:
            self._behind = entries[0].ref
        self._tasks.add(self._engine.spawn(self._append(entries, end)))

    async def _append(self, entries: list[AuditEntry], end: int) -> None:
        async with self._turn:
            # Until the entries are in the chain they must stay in the journal: nothing is sealed past them.
            while self.failure is None and not self._tasks.ending:
                try:
                    await self._engine.runtime.read(self.log.append_missing, entries)
                    self._tasks.full = None
                    self._behind = max(self._behind, end)
                    return
                except DiskRefused as error:
                    await self._tasks.waits(error)
                except PenstockError as error:
                    self.failure = error.message
                    raise

    async def settled(self) -> None:
        """Wait until all committed actions are in the chain; raises DiskRefused when the disk is full."""
        try:
            await self._tasks.settled()
        except DiskRefused as error:
            raise type(error)(
                f"the audit trail lacks the last actions; the journal has them, and nothing is lost: "
                f"{error.message}",
                **error.data,
            ) from error

    async def end(self) -> None:
        """Append what there is room for; the next start appends the rest."""
        with contextlib.suppress(DiskRefused):
            await self.settled()
        await self._tasks.end()  # the file is closed next: no task may be writing to it

    def close(self) -> None:
        """Sign the end and release the files."""
        self.log.close()


def _chained(entry: Audited, ref: int) -> AuditEntry:
    return AuditEntry(
        at_us=entry.at_us, actor=entry.actor, operation=entry.operation, targets=entry.targets,
        reason=entry.reason, prior=entry.prior, result=entry.result, ref=ref,
    )  # fmt: skip

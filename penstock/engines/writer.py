"""Writer: has commits on the disk, by whoever gets them there first without holding up the loop.

Large commits, and those that begin a file, are a thread's. Small ones are written here and synced by
the kernel meanwhile; where a program allows it, and while the disk is quick, they are synced here.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from penstock.engines.runtime import Runtime
from penstock.log.journal import Commit, Journal
from penstock.model.settings import Durability

# A commit that takes the disk no longer than its sync.
LITTLE_BYTES = 128 * 1024
# Writing a few pages into memory takes microseconds. When it takes this long, the system has stopped
# the writers of the file; a busy machine only takes the processor away, and gives it back sooner.
HELD_UP_S = 0.05
# Commits under way at a time. One for a tenant with much to say, one for everybody else: more would
# make commits smaller, and each costs a sync.
SIDE_BY_SIDE = 2
# Small writes that a thread does after a slow one, and after one that took many times as long.
SLOW_WRITES, STALLED_WRITES, STALL = 32, 1_000, 4


class Haste:
    """Whether a disk is so quick that handing a write to a thread takes longer than the write.

    One slow write, and the next ones are a thread's again; a stall, and very many are.

    >>> haste = Haste(limit_s=0.001)
    >>> for _ in range(SLOW_WRITES):
    ...     haste.took(0.0002)
    >>> haste.quick
    True
    >>> haste.took(0.003)
    >>> haste.quick
    False
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._thread_for = SLOW_WRITES

    @property
    def quick(self) -> bool:
        """Whether the next write may be done here and now."""
        return self._thread_for == 0 and self._limit_s > 0

    def took(self, seconds: float) -> None:
        """A small write is done."""
        if seconds > STALL * self._limit_s:
            self._thread_for = STALLED_WRITES
        elif seconds > self._limit_s:
            self._thread_for = max(self._thread_for, SLOW_WRITES)
        elif self._thread_for:
            self._thread_for -= 1


class Writing(NamedTuple):
    """A commit that is written, and synced by the kernel at present."""

    commit: Commit
    descriptor: int
    synced: asyncio.Future[None]
    began: float
    held_up_s: float


class Writer:
    """Writes one commit after another, and small ones of several tenants side by side."""

    def __init__(self, journal: Journal, runtime: Runtime, settings: Durability) -> None:
        self._journal = journal
        self._runtime = runtime
        self._fsync = settings.fsync
        self._syncs = Haste(runtime.quick_s)
        self._writes = Haste(HELD_UP_S)
        self._syncing: set[int] = set()

    def beside(self, commit: Commit) -> bool:
        """Whether a commit can be begun now, whatever else is under way."""
        return (
            self._little(commit)
            and not self._syncs.quick
            and self._writes.quick
            and self._runtime.syncs_alone
            and self._idle() is not None
        )

    def _little(self, commit: Commit) -> bool:
        return self._fsync == "always" and len(commit) <= LITTLE_BYTES and commit.roll is None

    def _idle(self) -> int | None:
        """An opening of the journal that nobody syncs at present."""
        for descriptor in self._journal.descriptors(SIDE_BY_SIDE):
            if descriptor not in self._syncing:
                return descriptor
        return None

    def begin(self, commit: Commit) -> Writing:
        """Write a commit and have the kernel sync it: `end` must follow, in the order of begins."""
        descriptor = self._idle()
        assert descriptor is not None
        began = self._runtime.stopwatch()
        self._journal.write(commit, sync=False)
        held_up_s = self._runtime.stopwatch() - began
        synced = asyncio.ensure_future(self._runtime.sync(descriptor))
        self._syncing.add(descriptor)
        return Writing(commit, descriptor, synced, began, held_up_s)

    def end(self, writing: Writing) -> float:
        """A commit was synced: it is durable now, or the writer is dead. How long it took."""
        self._syncing.remove(writing.descriptor)
        began = self._runtime.stopwatch()
        try:
            writing.synced.result()
            self._journal.harden(writing.commit.end)
        except OSError as error:
            raise self._journal.fail(error) from error
        now = self._runtime.stopwatch()
        self._writes.took(writing.held_up_s + now - began)
        self._syncs.took(now - writing.began)
        return now - writing.began

    async def write(self, commit: Commit) -> None:
        """Return when a commit is as durable as the settings want it; nothing may be under way."""
        if not self._little(commit):
            # With `interval` a thread syncs meanwhile: both are the writer's, one after the other.
            await self._runtime.write(self._write, commit)
            return
        began = self._runtime.stopwatch()
        if self._syncs.quick:
            self._write(commit)
        else:
            await self._runtime.write(self._write, commit)
            self._writes.took(0.0)
        self._syncs.took(self._runtime.stopwatch() - began)

    def _write(self, commit: Commit) -> None:
        self._journal.write(commit, sync=self._fsync == "always")
        if self._fsync == "never":
            self._journal.publish(commit.end)

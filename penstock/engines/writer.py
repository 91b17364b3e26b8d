"""Writer: has commits on the disk, by whoever gets them there first without holding up the loop.

Large commits, and those that begin a file, are a thread's. Small ones are written here and synced by
the kernel meanwhile; where a program allows it, and while the disk is quick, they are synced here.
"""

from __future__ import annotations

from penstock.engines.runtime import Runtime
from penstock.log.journal import Commit, Journal
from penstock.model.settings import Durability

# A commit that takes the disk no longer than its sync.
LITTLE_BYTES = 64 * 1024
# Writing a few pages into memory takes microseconds. When it takes this long, the system has stopped
# the writers of the file; a busy machine only takes the processor away, and gives it back sooner.
HELD_UP_S = 0.05
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


class Writer:
    """Writes one commit after another."""

    def __init__(self, journal: Journal, runtime: Runtime, settings: Durability) -> None:
        self._journal = journal
        self._runtime = runtime
        self._fsync = settings.fsync
        self._syncs = Haste(runtime.quick_s)
        self._writes = Haste(HELD_UP_S)

    async def write(self, commit: Commit) -> None:
        """Return when a commit is as durable as the settings want it."""
        if self._fsync != "always" or len(commit) > LITTLE_BYTES or commit.roll is not None:
            # With `interval` a thread syncs meanwhile: both are the writer's, one after the other.
            await self._runtime.write(self._write, commit)
            return
        began = self._runtime.stopwatch()
        descriptor = self._journal.descriptor
        if self._syncs.quick:
            self._write(commit)
        elif descriptor is not None and self._runtime.syncs_alone and self._writes.quick:
            await self._write_then_sync(commit, descriptor)
        else:
            await self._runtime.write(self._write, commit)
            self._writes.took(0.0)
        self._syncs.took(self._runtime.stopwatch() - began)

    def _write(self, commit: Commit) -> None:
        self._journal.write(commit, sync=self._fsync == "always")
        if self._fsync == "never":
            self._journal.publish(commit.end)

    async def _write_then_sync(self, commit: Commit, descriptor: int) -> None:
        began = self._runtime.stopwatch()
        self._journal.write(commit, sync=False)
        took_s = self._runtime.stopwatch() - began
        try:
            await self._runtime.sync(descriptor)
            began = self._runtime.stopwatch()
            self._journal.harden(commit.end)
        except OSError as error:
            raise self._journal.fail(error) from error
        self._writes.took(took_s + self._runtime.stopwatch() - began)

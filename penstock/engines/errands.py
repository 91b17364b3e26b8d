"""Errands: tasks behind the commits that others may wait for, but not while these wait for room."""

from __future__ import annotations

import asyncio

from penstock.model.errors import Rejected

# Whoever waits looks this often whether the disk is full: nobody may wait for as long as it is.
LOOK_AGAIN_S = 0.05


class Errands:
    """The tasks that are under way, and why they do not get on.

    >>> errands = Errands()
    >>> asyncio.run(errands.settled()), bool(errands)
    (None, False)
    """

    def __init__(self) -> None:
        self.full: Rejected | None = None
        """What the disk says, while it has no room for them."""
        self.ending = False
        """Whether those that wait for room should give up."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, task: asyncio.Task[None]) -> None:
        """Count a task as under way until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def waits(self, error: Rejected) -> None:
        """There is no room: wait as long as the error says, and let others know."""
        self.full = error
        await asyncio.sleep(error.retry_after_s)

    async def settled(self) -> None:
        """Return when those under way now have ended; raises the error when they wait for room."""
        waiting = set(self._tasks)
        while waiting:
            if self.full is not None:
                raise self.full
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_AGAIN_S)

    async def end(self) -> None:
        """Return when none is under way any more; those that wait for room give up."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(self._tasks)

"""Courtesy: who can wait is served when nobody's publish is under way.

One loop serves everybody, and a batch or a greeting takes it a good part of a millisecond. A publisher
that would come meanwhile waits that long; one that has come already need not. Tenants ahead of their
rates, the pieces of large payloads, newcomers and those who leave let others go first.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque

# How long a batch waits at most for a moment in which nobody else publishes. Where there is none,
# a tenant ahead of its rate gets some hundred turns a second.
PATIENCE_S = 0.005
# And for a commit of somebody else, if there was a publish so lately that there is another one soon.
COMPANY_S = 0.005
LATELY_S = 2 * COMPANY_S
# How often a thread looks, which cannot be told; a publish takes about this long.
LOOK_S = 0.001


class Courtesy:
    """Publishes of tenants within their rates, and whoever lets them go first.

    >>> async def order() -> list[str]:
    ...     courtesy, seen = Courtesy(), []
    ...     async def hasty() -> None:
    ...         await courtesy.turn()
    ...         seen.append("hasty")
    ...     courtesy.begin()
    ...     task = asyncio.ensure_future(hasty())
    ...     await asyncio.sleep(0)
    ...     seen.append("patient")
    ...     courtesy.end()
    ...     await task
    ...     return seen
    >>> asyncio.run(order())
    ['patient', 'hasty']
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._latest_s = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def begin(self) -> None:
        """A publish of a tenant within its rate came."""
        self._under_way += 1
        self._latest_s = time.monotonic()

    def company_s(self) -> float:
        """How long to wait for a commit of somebody within its rate, who pays for the sync anyway."""
        soon = self._under_way or time.monotonic() < self._latest_s + LATELY_S
        return COMPANY_S if soon else 0.0

    def end(self) -> None:
        """It is answered."""
        self._under_way -= 1
        self._call_next()

    def pause(self) -> None:
        """The same as `turn` for a thread."""
        until = time.monotonic() + PATIENCE_S
        while self._under_way and time.monotonic() < until:
            time.sleep(LOOK_S)

    async def turn(self) -> None:
        """Wait until nobody else's publish is under way, one after another, and not for ever."""
        # What others have sent already is read in the first turn of the loop, and begun in the second.
        for _ in range(2):
            await asyncio.sleep(0)
        if self._under_way or self._waiting:
            await self._called()
        os.sched_yield()  # who was answered last may share our processor

    async def _called(self) -> None:
        loop = asyncio.get_running_loop()
        free = loop.create_future()
        self._waiting.append(free)
        timer = loop.call_later(PATIENCE_S, _resolve, free)
        try:
            await free
        finally:
            timer.cancel()
            if free in self._waiting:
                self._waiting.remove(free)
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._under_way:
            # In a later turn of the loop: what was answered in this one goes out before.
            asyncio.get_running_loop().call_soon(self._free_first)

    def _free_first(self) -> None:
        if self._waiting and not self._under_way:
            _resolve(self._waiting[0])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""Rest: a pause in which nothing is read from one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.server.courtesy import Courtesy


class Rest:
    """The pauses of one client, one at a time; `over` is called at the end of each."""

    def __init__(self, over: Callable[[], None], courtesy: Courtesy | None = None) -> None:
        self._over = over
        self._courtesy = courtesy
        self._task: asyncio.Task[None] | None = None

    @property
    def on(self) -> bool:
        """Whether there is one at present."""
        return self._task is not None

    def begin(self, seconds: float, *, courteous: bool = False) -> None:
        """Rest for a while, and longer if that is courteous and somebody wants to go first."""
        self._task = asyncio.create_task(self._rest(seconds, courteous))

    async def _rest(self, seconds: float, courteous: bool) -> None:
        await asyncio.sleep(seconds)
        if courteous and self._courtesy is not None:
            await self._courtesy.turn()
        self._task = None
        self._over()

    def cancel(self) -> None:
        """End it without a word."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

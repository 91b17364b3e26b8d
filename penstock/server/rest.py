"""Rest: a pause in which nothing is read from one client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.server.courtesy import LOOK_S, PATIENCE_S, Courtesy


class Rest:
    """The pauses of one client, one at a time; `over` is called at the end of each."""

    def __init__(self, over: Callable[[], None], courtesy: Courtesy | None = None) -> None:
        self._over = over
        self._courtesy = courtesy
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def on(self) -> bool:
        """Whether there is one at present."""
        return self._timer is not None

    def begin(self, seconds: float, *, courteous: bool = False) -> None:
        """Rest for a while, and longer if that is courteous and somebody wants to go first."""
        until_s = self._loop.time() + seconds
        if courteous and self._courtesy is not None:
            until_s += PATIENCE_S
        self._timer = self._loop.call_later(seconds, self._look, until_s)

    def _look(self, until_s: float) -> None:
        if self._courtesy is not None and self._courtesy.wanted and self._loop.time() < until_s:
            self._timer = self._loop.call_later(LOOK_S, self._look, until_s)
        else:
            self._timer = None
            self._over()

    def cancel(self) -> None:
        """End it without a word."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

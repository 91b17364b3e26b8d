"""The brake: slows publishing down, gently, when sealing cannot keep up.

Below half of `backlog_max_bytes` nothing happens: bursts run at full speed. From there on publishes
are paced towards the rate at which the sealer really works, and at the limit they run at that rate.
"""

from __future__ import annotations

import asyncio

from penstock.engines.runtime import Runtime
from penstock.engines.turnstile import Turnstile
from penstock.model.settings import Settings

FREE_SHARE = 0.5  # of the backlog limit: what a burst may use
# Until a job was measured, and as a floor: a sealer slower than this is stuck, not slow.
SLOWEST_BYTES_PER_S = 8 << 20
# Shorter waits are saved up: a timer is not finer than this.
LEAST_WAIT_S = 0.005


def _limit_of(settings: Settings) -> int | None:
    """Most bytes that may wait to be sealed: half of what the folder may hold, where that is bounded."""
    sealing, most = settings.sealing, settings.retention.max_bytes
    if not sealing.enabled:
        return None
    if most is None:
        return sealing.backlog_max_bytes
    return min(sealing.backlog_max_bytes, max(2 * settings.journal.file_bytes, most // 2))


class Brake:
    """How far sealing is behind, and what that costs a publisher."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self.backlog_bytes = 0
        """Closed journal files that are not sealed yet."""
        self._runtime = runtime
        self._limit = _limit_of(settings)
        self._bytes_per_s = float(SLOWEST_BYTES_PER_S)
        self._paced_to = 0.0
        self._way_in = Turnstile()

    def sealed(self, size: int, seconds: float) -> None:
        """A job is done: the backlog shrinks, and the sealer's speed is known better."""
        self.backlog_bytes = max(0, self.backlog_bytes - size)
        if seconds > 0:
            self._bytes_per_s = max(size / seconds, SLOWEST_BYTES_PER_S)

    def pressure(self) -> float:
        """0 while there is room for a burst, 1 at the limit, more beyond it."""
        if self._limit is None:
            return 0.0
        return max(0.0, (self.backlog_bytes / self._limit - FREE_SHARE) / (1 - FREE_SHARE))

    async def wait(self, size: int) -> None:
        """Pay for publishing `size` bytes; free when sealing keeps up."""
        if not self.pressure() and not self._way_in:
            return
        async with self._way_in:
            now = self._runtime.now()
            self._paced_to = max(self._paced_to, now) + self.pressure() * size / self._bytes_per_s
            if self._paced_to - now > LEAST_WAIT_S:
                await asyncio.sleep(self._paced_to - now)

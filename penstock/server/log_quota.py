"""LogQuota: so many lines a second about clients that are refused, however many there are.

A line costs the broker's loop about as much as an event. Whoever sends broken frames all day must not
be able to spend that; `penstock_frame_errors_total` counts them all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES_PER_S = 10  # enough to see who it is and what is wrong


class LogQuota:
    """Warnings through a log, most of them left out when there are many.

    >>> quota = LogQuota(logging.getLogger("example"), now=lambda: 0.0)
    >>> [quota.warning("client refused", peer="10.0.0.1:5") for _ in range(12)].count(True)
    10
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._since_s = now()
        self._lines = self._left_out = 0

    def warning(self, message: str, **extra: object) -> bool:
        """Log it, unless there were many within this second; the next line says how many were left out."""
        now_s = self._now()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._lines = now_s, 0
        if self._lines >= LINES_PER_S:
            self._left_out += 1
            return False
        self._lines += 1
        if self._left_out:
            extra["left_out"], self._left_out = self._left_out, 0
        self._log.warning("%s", message, extra=extra)
        return True

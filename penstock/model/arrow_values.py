"""When Arrow is used to build Python values out of columns, and how it is started."""

from __future__ import annotations

import threading

import pyarrow as pa

# How many values a process reads before Arrow's start is worth its price.
AFTER_VALUES = 500_000


class ArrowValues:
    """Arrow builds Python objects four times as fast as slicing does, after a slow start.

    Its first call imports pandas where that is installed: half a second, which a process that
    reads little never gets back, and which no event should wait for.
    """

    def __init__(self) -> None:
        self._ready = False
        self._left = AFTER_VALUES

    def worth(self, count: int) -> bool:
        """Whether to build this many values with it."""
        if not self._ready and self._left > 0:
            self._left -= count
            if self._left <= 0:
                threading.Thread(target=self._start, name="penstock-arrow", daemon=True).start()
        return self._ready

    def _start(self) -> None:
        pa.array([""]).dictionary_encode().indices.to_numpy(zero_copy_only=False)
        self._ready = True


arrow_values = ArrowValues()

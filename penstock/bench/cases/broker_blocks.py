"""Allocations per operation: the memory blocks that work leaves behind in a client's process."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Blocks:
    """Counts memory blocks that are left behind: `sys.getallocatedblocks`, the collector off.

    Blocks that are freed again at once do not show; what is kept, and garbage in cycles, does.

    >>> with Blocks(True) as blocks:
    ...     kept = [object() for _ in range(1_000)]
    >>> blocks.left >= 1_000
    True
    """

    def __init__(self, counting: bool) -> None:
        self.left = 0
        self._counting = counting

    def __enter__(self) -> Blocks:
        if self._counting:
            gc.collect()
            gc.disable()
            self._before = sys.getallocatedblocks()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._counting:
            self.left = sys.getallocatedblocks() - self._before
            gc.enable()

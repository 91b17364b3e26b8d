"""Runtime: time, threads and randomness, handed to an engine from outside.

Production uses the system's; the simulator brings its own, and the same engine code runs under it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Runtime:
    """What an engine needs of the world beside a disk.

    The writer has a thread of its own, so that a commit never queues behind a slow read.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """Seconds on a clock that never jumps; the loop's own once an engine runs on it."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="penstock-writer")
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="penstock-reader")

    def wall_us(self) -> int:
        """Microseconds since 1970 UTC; may jump."""
        return time.time_ns() // 1_000

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the time of this loop, on which the engine runs."""
        self.now = loop.time

    def entropy(self, count: int) -> bytes:
        """Random bytes."""
        return os.urandom(count)

    async def write(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run on the writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)

    async def read(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run on one of the readers' threads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def begin_read(self, function: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Start on a reader's thread right now, even if the caller does not wait for long."""
        return asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def close(self) -> None:
        """Let the threads end."""
        self._writer.shutdown()
        self._readers.shutdown()

"""Runtime: time, threads and randomness, handed to an engine from outside.

Production uses the system's; the simulator brings its own, and the same engine code runs under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

# Small writes that a thread does after a slow one, and after one that took many times as long.
SLOW_WRITES, STALLED_WRITES, STALL = 32, 1_000, 4
T = TypeVar("T")
Args = TypeVarTuple("Args")


class Worker:
    """One thread that does one thing after another: an executor with less to pass around.

    Every commit waits for two hand-overs, so what they cost shows in every publish.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = self._closed = False

    async def run(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run a function there; what is under way is not stopped when its caller is."""
        if self._closed:
            raise RuntimeError(f"{self._thread.name} is closed")
        if not self._started:
            self._started = True
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                tell(_set_exception, future, error)
            else:
                tell(_set_result, future, result)

        def tell(callback: Callable[..., None], *values: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(callback, *values)

        self._jobs.put(job)
        return await future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Do what waits, then end. Safe to call twice."""
        if self._started and not self._closed:
            self._jobs.put(None)
            self._thread.join()
        self._closed = True


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


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


class Runtime:
    """What an engine needs of the world beside a disk.

    The writer has a thread of its own, so that a commit never queues behind a slow read. While the
    disk takes less than `quick_s` for a small write, those are done without it.
    """

    def __init__(self, quick_s: float = 0.0) -> None:
        self._haste = Haste(quick_s)
        self.now: Callable[[], float] = time.monotonic
        """Seconds on a clock that never jumps; the loop's own once an engine runs on it."""
        self._writer = Worker("penstock-writer")
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
        return await self._writer.run(function, *args)

    async def write_little(self, function: Callable[[*Args], None], *args: *Args) -> None:
        """Run on the writer's thread, or right here while that is quicker."""
        haste = self._haste

        def timed() -> None:
            began = time.perf_counter()
            function(*args)
            haste.took(time.perf_counter() - began)

        if haste.quick:
            timed()
        else:
            await self.write(timed)

    async def read(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run on one of the readers' threads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def begin_read(self, function: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Start on a reader's thread right now, even if the caller does not wait for long."""
        return asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def close(self) -> None:
        """Let the threads end."""
        self._writer.close()
        self._readers.shutdown()

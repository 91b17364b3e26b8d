"""Runtime: time, threads and randomness, handed to an engine from outside.

Production uses the system's; the simulator brings its own, and the same engine code runs under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

from penstock.engines.aio_sync import AioSync
from penstock.engines.kernel_sync import KernelSync
from penstock.engines.uring_sync import UringSync

log = logging.getLogger("penstock.engine")

# Refusals that last; others mean that the system is busy just now.
NO_SUCH_CALL = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})

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


def _open_kernel(loop: asyncio.AbstractEventLoop) -> KernelSync:
    """The best that the system has: containers often forbid io_uring."""
    try:
        return UringSync(loop)
    except OSError:
        return AioSync(loop)


class Runtime:
    """What an engine needs of the world beside a disk.

    The writer has a thread of its own, so that a commit never queues behind a slow read.
    """

    def __init__(self, quick_s: float = 0.0) -> None:
        self.quick_s = quick_s
        """For how long a sync may hold up the loop."""
        self.syncs_alone = True
        """Whether `sync` needs no thread; true until the system objects."""
        self._kernel: KernelSync | None = None
        self.now: Callable[[], float] = time.monotonic
        """Seconds on a clock that never jumps; the loop's own once an engine runs on it."""
        self.stopwatch: Callable[[], float] = time.perf_counter
        """Seconds that show how long a call held up the loop, whose own clock stands still meanwhile."""
        self._make_threads()

    def _make_threads(self) -> None:
        """None of them starts before it has something to do."""
        self._closed = False
        self._writer = Worker("penstock-writer")
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="penstock-reader")

    def wall_us(self) -> int:
        """Microseconds since 1970 UTC; may jump."""
        return time.time_ns() // 1_000

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the time of this loop, on which the engine runs; new threads if the old ones ended."""
        self.now = loop.time
        if self._closed:
            self._make_threads()

    def entropy(self, count: int) -> bytes:
        """Random bytes."""
        return os.urandom(count)

    async def write(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run on the writer's thread."""
        return await self._writer.run(function, *args)

    def sync(self, descriptor: int) -> Awaitable[None]:
        """Have an open file's bytes on stable storage; gives OSError when they may not be."""
        return self._ask_kernel(descriptor) or self.write(os.fdatasync, descriptor)

    def _ask_kernel(self, descriptor: int) -> asyncio.Future[None] | None:
        """A sync that is under way; None when the system does not take it, now or ever."""
        try:
            if self._kernel is None:
                self._kernel = _open_kernel(asyncio.get_running_loop())
            return self._kernel.sync(descriptor)
        except (OSError, NotImplementedError) as error:
            if self._kernel is None or getattr(error, "errno", None) in NO_SUCH_CALL:
                log.info("syncs take a thread: the system has no others", extra={"why": str(error)})
                self.syncs_alone = False
            return None

    async def read(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run on one of the readers' threads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def begin_read(self, function: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Start on a reader's thread right now, even if the caller does not wait for long."""
        return asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def close(self) -> None:
        """Let the threads end."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()
        self._writer.close()
        self._readers.shutdown()
        self._closed = True

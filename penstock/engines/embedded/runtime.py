"""What an engine needs of the world beside a disk: time, threads, randomness, and how commits are synced.

`Runtime` has the system's clock, threads and random bytes; the simulator brings its own, and the same
engine code runs under it. `Writer` brings commits to the disk without holding up the loop: a thread
writes large commits and those that begin a file; small ones are written on the loop and synced by the
kernel meanwhile (`KernelSync`), or on the loop where a program allows it and the disk is quick.
`BackgroundTasks` and `FairGate` are what several parts of an engine use to work behind commits and to
wait in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from penstock.log.journal import Commit, Journal
from penstock.model.errors import Rejected
from penstock.model.settings import Durability

log = logging.getLogger("penstock.engine")

# Refusals that last; others mean that the system is busy just now.
NO_SUCH_CALL = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})

T = TypeVar("T")
Args = TypeVarTuple("Args")

AT_ONCE = 8  # a journal syncs few commits at a time
# io_setup, io_destroy, io_submit, io_getevents: no library has them, but the kernel does.
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
FDSYNC = 3  # IOCB_CMD_FDSYNC
TELL_EVENTFD = 1  # IOCB_FLAG_RESFD


class _Request(ctypes.Structure):
    """struct iocb."""

    _fields_ = (
        ("number", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64), ("size", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("eventfd", ctypes.c_uint32),
    )  # fmt: skip


class _Completion(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("number", ctypes.c_uint64), ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64), ("result2", ctypes.c_int64),
    )  # fmt: skip


class KernelSync:
    """Syncs files for one event loop, by Linux's asynchronous I/O and without a thread.

    A thread that syncs needs the interpreter before and after, which a busy loop keeps for itself. The
    kernel needs none: the loop submits a sync and hears of its end as it hears of bytes on a socket.
    Containers that forbid io_uring allow these calls.

    Making one raises OSError where the system has no such calls, and NotImplementedError on a loop
    that cannot listen to files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        if sys.platform != "linux" or sys.maxsize <= 2**32:  # 32 bits have other numbers
            raise OSError(errno.ENOSYS, "asynchronous syncs are known on Linux with 64 bits only")
        numbers = CALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "the numbers of these calls are not known here")
        setup, self._destroy_call, self._submit_call, self._events_call = numbers
        self._loop = loop
        # Unlike CDLL it keeps the interpreter: submitting and collecting never wait.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._context = ctypes.c_ulong(0)
        self._request = _Request(opcode=FDSYNC, flags=TELL_EVENTFD, eventfd=self._eventfd)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._completions = (_Completion * AT_ONCE)()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._eventfd)
            loop.add_reader(self._eventfd, self._completed)
            undo.callback(loop.remove_reader, self._eventfd)
            self._call(setup, ctypes.c_uint(AT_ONCE), ctypes.byref(self._context))
            undo.pop_all()

    def sync(self, descriptor: int) -> asyncio.Future[None]:
        """Have a file's bytes on stable storage; raises OSError, now or later."""
        self._number += 1
        self._request.number, self._request.descriptor = self._number, descriptor
        self._call(self._submit_call, self._context, ctypes.c_long(1), self._requests)
        future = self._waiting[self._number] = self._loop.create_future()
        return future

    def close(self) -> None:
        """Give everything back once nothing is under way; pending futures stay as they are."""
        self._loop.remove_reader(self._eventfd)
        # The system takes tens of milliseconds for it; nothing waits for that.
        threading.Thread(target=self._destroy, name="penstock-sync-end", daemon=True).start()

    def _completed(self) -> None:
        os.eventfd_read(self._eventfd)
        self._tell(self._collect())

    def _tell(self, completions: list[tuple[int, int]]) -> None:
        for number, result in completions:
            future = self._waiting.pop(number)
            if future.done():
                continue  # its caller was cancelled
            if result < 0:
                future.set_exception(OSError(-result, os.strerror(-result)))
            else:
                future.set_result(None)

    def _collect(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        count = AT_ONCE
        while count == AT_ONCE:  # there may be more
            count = self._call(
                self._events_call, self._context, ctypes.c_long(0), ctypes.c_long(AT_ONCE),
                self._completions, None,
            )  # fmt: skip
            found += [(each.number, each.result) for each in self._completions[:count]]
        return found

    def _call(self, number: int, *arguments: Any) -> int:
        result: int = self._syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result

    def _destroy(self) -> None:
        try:
            ctypes.CDLL(None).syscall(ctypes.c_long(self._destroy_call), self._context)
        finally:
            os.close(self._eventfd)


class WorkerThread:
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
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers with it
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
        self._writer = WorkerThread("penstock-writer")
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
                self._kernel = KernelSync(asyncio.get_running_loop())
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


# -- writing commits ------------------------------------------------------------------------------

# A commit that takes the disk no longer than its sync.
LITTLE_BYTES = 128 * 1024
# Writing a few pages into memory takes microseconds. When it takes this long, the system has stopped
# the writers of the file; a busy machine only takes the processor away, and gives it back sooner.
HELD_UP_S = 0.05
# Commits under way at a time. One for a tenant with much to say, one for everybody else: more would
# make commits smaller, and each costs a sync.
SIDE_BY_SIDE = 2
# Small writes that a thread does after a slow one, and after one that took many times as long.
SLOW_WRITES, STALLED_WRITES, STALL = 32, 1_000, 4


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


class Writing(NamedTuple):
    """A commit that is written, and synced by the kernel at present."""

    commit: Commit
    descriptor: int
    synced: asyncio.Future[None]
    began: float
    held_up_s: float


class Writer:
    """Writes one commit after another, and small ones of several tenants side by side."""

    def __init__(self, journal: Journal, runtime: Runtime, settings: Durability) -> None:
        self._journal = journal
        self._runtime = runtime
        self._fsync = settings.fsync
        self._syncs = Haste(runtime.quick_s)
        self._writes = Haste(HELD_UP_S)
        self._syncing: set[int] = set()

    def beside(self, commit: Commit) -> bool:
        """Whether a commit can be begun now, whatever else is under way."""
        return (
            self._little(commit)
            and not self._syncs.quick
            and self._writes.quick
            and self._runtime.syncs_alone
            and self._idle() is not None
        )

    def _little(self, commit: Commit) -> bool:
        return self._fsync == "always" and len(commit) <= LITTLE_BYTES and commit.roll is None

    def _idle(self) -> int | None:
        """An opening of the journal that is not being synced."""
        for descriptor in self._journal.descriptors(SIDE_BY_SIDE):
            if descriptor not in self._syncing:
                return descriptor
        return None

    def begin(self, commit: Commit) -> Writing:
        """Write a commit and have the kernel sync it: `end` must follow, in the order of begins."""
        descriptor = self._idle()
        assert descriptor is not None
        began = self._runtime.stopwatch()
        self._journal.write(commit, sync=False)
        held_up_s = self._runtime.stopwatch() - began
        synced = asyncio.ensure_future(self._runtime.sync(descriptor))
        self._syncing.add(descriptor)
        return Writing(commit, descriptor, synced, began, held_up_s)

    def end(self, writing: Writing) -> float:
        """A commit was synced: it is durable now, or the writer is dead. How long it took."""
        self._syncing.remove(writing.descriptor)
        began = self._runtime.stopwatch()
        try:
            writing.synced.result()
            self._journal.harden(writing.commit.end)
        except OSError as error:
            raise self._journal.fail(error) from error
        now = self._runtime.stopwatch()
        self._writes.took(writing.held_up_s + now - began)
        self._syncs.took(now - writing.began)
        return now - writing.began

    async def write(self, commit: Commit) -> None:
        """Return when a commit is as durable as the settings want it; nothing may be under way."""
        if not self._little(commit):
            # With `interval` a thread syncs meanwhile: both are the writer's, one after the other.
            await self._runtime.write(self._write, commit)
            return
        began = self._runtime.stopwatch()
        if self._syncs.quick:
            self._write(commit)
        else:
            await self._runtime.write(self._write, commit)
            self._writes.took(0.0)
        self._syncs.took(self._runtime.stopwatch() - began)

    def _write(self, commit: Commit) -> None:
        self._journal.write(commit, sync=self._fsync == "always")
        if self._fsync == "never":
            self._journal.publish(commit.end)


# -- background tasks -----------------------------------------------------------------------------

# How often callers that wait look whether the disk is full: they must not wait for as long as it is.
LOOK_AGAIN_S = 0.05


class BackgroundTasks:
    """The tasks that are under way, and why they do not get on.

    >>> tasks = BackgroundTasks()
    >>> asyncio.run(tasks.settled()), bool(tasks)
    (None, False)
    """

    def __init__(self) -> None:
        self.full: Rejected | None = None
        """What the disk says, while it has no room for them."""
        self.ending = False
        """Whether those that wait for room should give up."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, task: asyncio.Task[None]) -> None:
        """Count a task as under way until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def waits(self, error: Rejected) -> None:
        """There is no room: wait as long as the error says, and let others know."""
        self.full = error
        await asyncio.sleep(error.retry_after_s)

    async def settled(self) -> None:
        """Return when those under way now have ended; raises the error when they wait for room."""
        waiting = set(self._tasks)
        while waiting:
            if self.full is not None:
                raise self.full
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_AGAIN_S)

    async def end(self) -> None:
        """Return when none is under way any more; those that wait for room give up."""
        self.ending = True
        if self._tasks:
            await asyncio.wait(self._tasks)


class FairGate:
    """A gate that is usually open; true while callers wait, and later callers wait behind them.

    A lock alone would not do: between its release and the next holder's turn it looks free.

    >>> async def order() -> list[str]:
    ...     gate, seen = FairGate(), []
    ...     async def come(name: str, seconds: float) -> None:
    ...         if seconds or gate:
    ...             async with gate:
    ...                 await asyncio.sleep(seconds)
    ...         seen.append(name)
    ...     await asyncio.gather(come("slow", 0.01), come("quick", 0))
    ...     return seen
    >>> asyncio.run(order())
    ['slow', 'quick']
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._lock = asyncio.Lock()

    def __bool__(self) -> bool:
        return self._waiting > 0

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._waiting -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._waiting -= 1

"""KernelSync: fdatasync beside the loop, without a thread of this process.

A thread that syncs needs the interpreter before and after, which a busy loop keeps for itself. The
kernel needs nobody: the loop submits a sync and hears of its end as it hears of bytes on a socket.
How a system is asked is a subclass's: penstock.engines.embedded.runtime, penstock.engines.embedded.runtime.

AioSync: syncs by Linux's first asynchronous I/O, which containers allow that forbid io_uring.

The kernel's worker runs on the processor that asked, when it is free: a loop that goes on working
holds its own syncs up. io_uring does better where there is one.

UringSync: syncs by io_uring, whose workers run on any processor.

Requests and completions lie in two rings that the kernel shares with the process. Only the calls
that submit touch the first, and the eventfd says when to look at the second: no other barrier is
needed between the two sides.

Runtime: time, threads and randomness, handed to an engine from outside.

Production uses the system's; the simulator brings its own, and the same engine code runs under it.

Writer: has commits on the disk, by whoever gets them there first without holding up the loop.

Large commits, and those that begin a file, are a thread's. Small ones are written here and synced by
the kernel meanwhile; where a program allows it, and while the disk is quick, they are synced here.

Errands: tasks behind the commits that others may wait for, but not while these wait for room.

Turnstile: whoever has to wait goes on in the order they came, one at a time.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from penstock.log.journal import Commit, Journal
from penstock.model.errors import Rejected
from penstock.model.settings import Durability

# -- kernel_sync ----------------------------------------------------------------------------------


AT_ONCE = 8  # a journal syncs few commits at a time


class KernelSync(abc.ABC):
    """Syncs files for one event loop.

    Making one raises OSError where the system has no such thing, and NotImplementedError on a loop
    that cannot listen to files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        if sys.platform != "linux" or sys.maxsize <= 2**32:  # 32 bits have other numbers
            raise OSError(errno.ENOSYS, "asynchronous syncs are known on Linux with 64 bits only")
        self._loop = loop
        # Unlike CDLL it keeps the interpreter: submitting and collecting never wait.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._eventfd)
            loop.add_reader(self._eventfd, self._completed)
            undo.callback(loop.remove_reader, self._eventfd)
            self._open()
            undo.pop_all()

    def sync(self, descriptor: int) -> asyncio.Future[None]:
        """Have a file's bytes on stable storage; raises OSError, now or later."""
        self._number += 1
        self._submit(self._number, descriptor)
        future = self._waiting[self._number] = self._loop.create_future()
        return future

    def _completed(self) -> None:
        os.eventfd_read(self._eventfd)
        self._tell(self._collect())

    def _tell(self, completions: Iterable[tuple[int, int]]) -> None:
        for number, result in completions:
            future = self._waiting.pop(number)
            if future.done():
                continue  # whoever waited was cancelled
            if result < 0:
                future.set_exception(OSError(-result, os.strerror(-result)))
            else:
                future.set_result(None)

    def _call(self, number: int, *arguments: Any) -> int:
        result: int = self._syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result

    def close(self) -> None:
        """Give everything back once nothing is under way; nobody is told of its end any more."""
        self._loop.remove_reader(self._eventfd)
        self._close()

    @abc.abstractmethod
    def _open(self) -> None:
        """Get what requests need from the system."""

    @abc.abstractmethod
    def _submit(self, number: int, descriptor: int) -> None:
        """Have the system begin; it adds to the eventfd when it is done."""

    @abc.abstractmethod
    def _collect(self) -> list[tuple[int, int]]:
        """Numbers of requests that are done, with 0 or an error below it."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Give everything back, the eventfd included."""


# -- aio_sync -------------------------------------------------------------------------------------


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


class AioSync(KernelSync):
    """Syncs by io_submit."""

    def _open(self) -> None:
        numbers = CALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "the numbers of these calls are not known here")
        self._destroy_call, self._submit_call, self._events_call = numbers[1:]
        self._context = ctypes.c_ulong(0)
        self._request = _Request(opcode=FDSYNC, flags=TELL_EVENTFD, eventfd=self._eventfd)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._completions = (_Completion * AT_ONCE)()
        self._call(numbers[0], ctypes.c_uint(AT_ONCE), ctypes.byref(self._context))

    def _submit(self, number: int, descriptor: int) -> None:
        self._request.number, self._request.descriptor = number, descriptor
        self._call(self._submit_call, self._context, ctypes.c_long(1), self._requests)

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

    def _close(self) -> None:
        # The system takes tens of milliseconds for it, which nobody need wait for.
        threading.Thread(target=self._destroy, name="penstock-sync-end", daemon=True).start()

    def _destroy(self) -> None:
        try:
            ctypes.CDLL(None).syscall(ctypes.c_long(self._destroy_call), self._context)
        finally:
            os.close(self._eventfd)


# -- uring_sync -----------------------------------------------------------------------------------


MACHINES = (
    "x86_64",
    "aarch64",
)  # calls since 5.1 have one number everywhere; others are not tested
SETUP, ENTER, REGISTER = 425, 426, 427
REGISTER_EVENTFD = 4
REQUESTS_AT = 0x10000000  # IORING_OFF_SQES
ONE_MAP = 1  # IORING_FEAT_SINGLE_MMAP: both rings in one mapping, since 5.4
# struct io_uring_params: sizes and features, then where things lie in each ring.
PARAMS = struct.Struct("<5I I 4I 10I 10I")
# struct io_uring_sqe: opcode, flags, priority, file, offset, address, length, fsync flags, number.
REQUEST = struct.Struct("<BBHiQQIIQ24x")
FSYNC, DATA_ONLY = 3, 1
COMPLETION = struct.Struct("<QiI")
UINT = 1 << 32


class UringSync(KernelSync):
    """Syncs by io_uring."""

    def _open(self) -> None:
        if platform.machine() not in MACHINES:
            raise OSError(errno.ENOSYS, "io_uring is not known here")
        params = ctypes.create_string_buffer(PARAMS.size)
        self._ring = self._call(SETUP, ctypes.c_uint(AT_ONCE), params)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._ring)
            self._map(PARAMS.unpack(params.raw))
            self._call(
                REGISTER, ctypes.c_uint(self._ring), ctypes.c_uint(REGISTER_EVENTFD),
                ctypes.byref(ctypes.c_int(self._eventfd)), ctypes.c_uint(1),
            )  # fmt: skip
            undo.pop_all()

    def _map(self, params: tuple[int, ...]) -> None:
        requests, completions, features = params[0], params[1], params[5]
        if not features & ONE_MAP:
            raise OSError(errno.ENOSYS, "this io_uring is too old")
        _, tail, mask, _, _, _, order = params[10:17]
        head, end, end_mask, _, _, done = params[20:26]
        size = max(order + 4 * requests, done + COMPLETION.size * completions)
        self._shared = mmap.mmap(self._ring, size)
        self._requests = mmap.mmap(self._ring, REQUEST.size * requests, offset=REQUESTS_AT)
        self._words = memoryview(self._shared)[: size // 4 * 4].cast("I")
        self._tail, self._order, self._mask = tail // 4, order // 4, self._words[mask // 4]
        self._head, self._end, self._end_mask = head // 4, end // 4, self._words[end_mask // 4]
        self._done = done

    def _submit(self, number: int, descriptor: int) -> None:
        words, tail = self._words, self._words[self._tail]
        at = tail & self._mask
        REQUEST.pack_into(
            self._requests, at * REQUEST.size, FSYNC, 0, 0, descriptor, 0, 0, 0, DATA_ONLY, number
        )
        words[self._order + at] = at
        words[self._tail] = (tail + 1) % UINT
        try:
            self._call(
                ENTER, ctypes.c_uint(self._ring), ctypes.c_uint(1), ctypes.c_uint(0),
                ctypes.c_uint(0), None, ctypes.c_size_t(0),
            )  # fmt: skip
        except OSError:
            words[self._tail] = tail  # the kernel did not take it
            raise

    def _collect(self) -> list[tuple[int, int]]:
        words, found = self._words, []
        head, end = words[self._head], words[self._end]
        while head != end:
            at = self._done + (head & self._end_mask) * COMPLETION.size
            number, result, _ = COMPLETION.unpack_from(self._shared, at)
            found.append((number, result))
            head = (head + 1) % UINT
        words[self._head] = head
        return found

    def _close(self) -> None:
        self._words.release()
        self._shared.close()
        self._requests.close()
        os.close(self._ring)
        os.close(self._eventfd)


# -- runtime --------------------------------------------------------------------------------------


log = logging.getLogger("penstock.engine")

# Refusals that last; others mean that the system is busy just now.
NO_SUCH_CALL = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM})

T = TypeVar("T")
Args = TypeVarTuple("Args")


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


# -- writer ---------------------------------------------------------------------------------------


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
        """An opening of the journal that nobody syncs at present."""
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


# -- errands --------------------------------------------------------------------------------------


# Whoever waits looks this often whether the disk is full: nobody may wait for as long as it is.
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


# -- turnstile ------------------------------------------------------------------------------------


class FairGate:
    """A way in that is usually open: true while somebody waits, and who comes then must wait too.

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

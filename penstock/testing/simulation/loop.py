"""Virtual time for asyncio: the event loop and the clock of the simulator.

`SimLoop` never sleeps and never starts a thread: when nothing is ready it jumps to the next
timer, and work for an executor runs in the loop's own thread after a delay drawn from its seed.
The same seed and the same program give the same schedule, so one number replays a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.engines.embedded.runtime import Args, Runtime
from penstock.testing.simulation.disk import SimCrash

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

# A run that needs more callbacks than this is going round in circles: a full seed of the
# simulator takes fewer than a million.
MAX_STEPS = 20_000_000

THREAD_DELAY_S = 0.002  # longest hand-over to and from a simulated thread: a busy machine's

# How often a coroutine may refuse to end when its process dies before it is left as it is.
CLOSE_ATTEMPTS = 100

# Where simulated wall clocks start: 2024-01-01, so that times look like times.
EPOCH_US = 1_704_067_200_000_000


class SimDeadlock(RuntimeError):
    """Nothing is ready, no timer is set, and what the loop waits for is not done."""


class SimStepLimit(RuntimeError):
    """The loop ran more callbacks than its bound: something spins without end."""


class SimTask(asyncio.Task[T]):
    """A task that hashes by its number, so that sets of tasks are walked in the same order."""

    def __init__(self, coro: Coroutine[Any, Any, T], *, loop: SimLoop, **options: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[T]):
    """A future that hashes by its number, for the same reason."""

    def __init__(self, *, loop: SimLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class LoopRuntime(Runtime):
    """A runtime whose threads are the loop's: under virtual time nothing may happen beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs_alone = False
        self.stopwatch = lambda: asyncio.get_running_loop().time()
        self._lane = ThreadPoolExecutor(1, "penstock-lane")

    async def write(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """One after another, as the writer's own thread would."""
        return await asyncio.get_running_loop().run_in_executor(self._lane, function, *args)

    def close(self) -> None:
        """Let the threads end."""
        super().close()
        self._lane.shutdown()


class SimLoop(asyncio.BaseEventLoop):
    """An asyncio event loop whose time is a number and whose luck is a seed.

    >>> async def nap():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> loop = SimLoop(seed=1)
    >>> loop.run_until_complete(nap())
    3600.0
    >>> loop.close()

    `shuffle` permutes the wake-ups of different tasks that are ready together; plain callbacks
    keep their order, as asyncio promises. `start_s` lets the next life go on where one was killed.
    """

    # The parts of the base class that a loop of one's own has to know.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(
        self,
        seed: int | Random = 0,
        *,
        shuffle: bool = False,
        start_s: float = 0.0,
        max_steps: int = MAX_STEPS,
        thread_delay_s: float = THREAD_DELAY_S,
    ) -> None:
        super().__init__()
        self.rng = seed if isinstance(seed, Random) else Random(seed)
        self.shuffle = shuffle
        self.max_steps = max_steps
        self.thread_delay_s = thread_delay_s
        self.steps = 0
        self._now_s = start_s
        self._numbers = itertools.count()
        self._halted: BaseException | None = None
        self._lanes: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self.set_task_factory(_new_task)

    def time(self) -> float:
        """Virtual seconds; only waiting and `advance` make it pass."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass as if the process had been held up for so long."""
        self._now_s += seconds

    def next_number(self) -> int:
        """The next number of a task or future of this loop."""
        return next(self._numbers)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Start a coroutine, unless the simulated process is dead."""
        if self._halted is not None:
            coro.close()
            raise SimCrash("the simulated process is dead")
        return super().create_task(coro, **options)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return SimFuture(loop=self)

    def halt(self, error: BaseException | None = None) -> None:
        """End the run, by default with SimCrash, after the present callback; nothing else runs.

        Tasks store a SimCrash like any error and the others would go on: give this to
        `SimDisk.on_power_off` so that a power cut stops them all.
        """
        self._halted = error or SimCrash("the simulated process is dead")

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function later in virtual time; an executor of one worker keeps its order."""
        future: asyncio.Future[T] = SimFuture(loop=self)
        start_s = self._now_s + self.rng.random() * self.thread_delay_s
        done_after_s = self.rng.random() * self.thread_delay_s
        if getattr(executor, "_max_workers", 0) == 1:
            start_s = max(start_s, self._lanes.get(executor, 0.0))
            self._lanes[executor] = start_s + done_after_s
        self.call_at(start_s, self._work, future, done_after_s, func, args)
        return future

    def _work(
        self, future: asyncio.Future[T], done_after_s: float, func: Callable[..., T], args: Any
    ) -> None:
        # A thread may or may not have begun when its caller gives up on it.
        if future.cancelled() and self.rng.random() < 0.5:
            return
        error: BaseException | None = None
        try:
            result = func(*args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as caught:
            error = caught

        def report() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.call_later(done_after_s, report)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report a stray error, except those of a process that is dead anyway."""
        if self._halted is None and not self.is_closed():
            super().call_exception_handler(context)

    def _run_once(self) -> None:
        self._collect()
        ready = self._ready
        if self.shuffle and len(ready) > 1:
            self._shuffle()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self.steps += 1
            handle._run()
            if self._halted is not None:
                raise self._halted
        if self.steps > self.max_steps:
            raise SimStepLimit(
                f"{self.steps} callbacks at virtual second {self._now_s}: a task spins without "
                "waiting for anything. Look at what runs, or raise max_steps"
            )

    def _collect(self) -> None:
        """Move due timers to the ready queue, jumping to the next one if nothing is ready."""
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
        if not self._ready and not self._stopping:
            if not timers:
                waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
                raise SimDeadlock(
                    f"nothing is ready and no timer is set at virtual second {self._now_s}. "
                    f"Still waiting: {', '.join(waiting) or 'no task'}"
                )
            self._now_s = max(self._now_s, timers[0].when())
        while timers and timers[0].when() <= self._now_s:
            handle = heapq.heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(handle)

    def _shuffle(self) -> None:
        ready = list(self._ready)
        places = [place for place, handle in enumerate(ready) if _wakes_task(handle)]
        mixed = places[:]
        self.rng.shuffle(mixed)
        self._ready.clear()
        moved = {place: ready[other] for place, other in zip(places, mixed, strict=True)}
        self._ready.extend(moved.get(place, handle) for place, handle in enumerate(ready))

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        # A generator of a dead process must not be closed politely.
        if self._halted is None and not self.is_closed():
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]

    def __del__(self) -> None:
        """Nothing to release, so nothing to warn of when nobody closed it."""

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets here."""

    def _write_to_self(self) -> None:
        """There is no selector to wake: `call_soon_threadsafe` is `call_soon`."""


def _new_task(loop: Any, coro: Any, **options: Any) -> SimTask[Any]:
    return SimTask(coro, loop=loop, **options)


def _wakes_task(handle: asyncio.Handle) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


class SimClock:
    """The clocks of a simulated machine: one that may jump and one that only goes forward.

    >>> clock = SimClock(SimLoop())
    >>> clock.advance(2.5); clock.jump(-3600)
    >>> clock.monotonic(), clock.wall_us() - EPOCH_US
    (2.5, -3597500000)
    """

    def __init__(self, loop: SimLoop, start_us: int = EPOCH_US) -> None:
        self.loop = loop  # set to the next loop when the process starts again
        self._start_us = start_us

    def wall_us(self) -> int:
        """Microseconds since 1970, as the machine believes."""
        return self._start_us + round(self.loop.time() * 1e6)

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self.loop.time()

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.loop.advance(seconds)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back; the monotonic one does not notice."""
        self._start_us += round(seconds * 1e6)


def kill(loop: SimLoop) -> None:
    """Abandon everything on a loop as if the process had died, quietly, and close it.

    Cut the power of the disk first: `finally` blocks run here while coroutines are taken apart,
    and must find that nothing they touch works any more.
    """
    if loop.is_running():
        raise RuntimeError("a loop is killed from outside: call halt() and let the run end first")
    loop.halt()
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: getattr(task, "number", 0))
    # Code that is being taken apart may still ask for its loop, and make coroutines for it.
    asyncio._set_running_loop(loop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for task in tasks:
                _close(task.get_coro())
            loop._ready.clear()
            loop._scheduled.clear()
            # What was just abandoned sits in reference cycles with its errors: end it here,
            # where warnings are off. It is young, so the whole heap need not be walked.
            gc.collect(1)
    finally:
        asyncio._set_running_loop(None)
        loop.close()


def _close(coroutine: Any) -> None:
    for _ in range(CLOSE_ATTEMPTS):
        with contextlib.suppress(BaseException):
            coroutine.close()
            return

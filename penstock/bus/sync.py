"""The blocking bus: the same public API for code that has no event loop.

A thread runs the loop. Each method hands its asynchronous twin to that thread and waits for the
result, so a method is one line here: its parameters, types and docstring are those of the original.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from penstock.bus.admin import Audit, DeadLetters, Groups, Routes, Schedules, Topics
from penstock.bus.bus import Bus
from penstock.bus.connect import connect
from penstock.bus.drafting import PublishManyOptions, PublishOptions
from penstock.bus.handler import handling
from penstock.bus.subscription import Subscription
from penstock.bus.transaction import Transaction
from penstock.engines.credential import Token
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, InvalidInput
from penstock.model.event import Event, Identity, Receipt
from penstock.model.parameter import Seconds, seconds
from penstock.model.settings import Settings

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class _Terminated(KeyboardInterrupt):
    """SIGTERM while a blocking bus runs; like Ctrl-C it cancels what is waited for."""


class LoopThread:
    """An event loop in a thread of its own; the thread starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # a signal handler may come in between
        self._stopped = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; Ctrl-C cancels it and waits for its end."""
        try:
            loop = self._running()
        except BaseException:
            work.close()
            raise
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(functools.partial(_pass_on, result))

        loop.call_soon_threadsafe(begin)
        try:
            return result.result()
        except KeyboardInterrupt:
            if not result.done():
                # A lambda, because `begin` may not have run yet when this line does.
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # noqa: PLW0108
                concurrent.futures.wait([result])
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for it."""

        async def run() -> T:
            return function()

        return self.wait(run())

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop without waiting; nothing happens once the loop has ended."""
        with self._starting:
            loop = self._loop
        if loop is None:
            work.close()
        else:
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(work))

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._stopped:
                raise BusClosed("this bus was closed; call penstock.connect_sync again")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="penstock-loop", daemon=True
                )
                self._thread.start()
        if threading.current_thread() is self._thread:
            raise InvalidInput(
                "a blocking bus was called from its own event loop, where waiting would never end. "
                "In a handler of a blocking bus, use a plain function instead of 'async def'"
            )
        return self._loop

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """End the loop and its thread; calling it again changes nothing."""
        with self._starting:
            loop, thread = self._loop, self._thread
            self._loop, self._stopped = None, True
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():  # the collector may run on the loop's thread
            thread.join()
            loop.close()


def _pass_on(result: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        result.cancel()
        result.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


class Blocking(Generic[T]):
    """An object of the asynchronous API with the thread whose loop it lives on."""

    def __init__(self, target: T, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def waits(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Blocking[T], P], R]:
    """The blocking form of a coroutine method."""

    def call(self: Blocking[T], /, *args: P.args, **options: P.kwargs) -> R:
        return self._thread.wait(method(self._target, *args, **options))

    functools.update_wrapper(call, method)
    return call


def calls(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[Blocking[T], P], R]:
    """A plain method, run on the loop that its object belongs to."""

    def call(self: Blocking[T], /, *args: P.args, **options: P.kwargs) -> R:
        return self._thread.call(lambda: method(self._target, *args, **options))

    functools.update_wrapper(call, method)
    return call


def iterates(
    method: Callable[Concatenate[T, P], AsyncIterator[R]],
) -> Callable[Concatenate[Blocking[T], P], Iterator[R]]:
    """The blocking form of an asynchronous generator: the loop runs while the next item is asked for."""

    def call(self: Blocking[T], /, *args: P.args, **options: P.kwargs) -> Iterator[R]:
        source = method(self._target, *args, **options)

        async def following() -> R | _End:
            return await anext(source, _END)

        try:
            while not isinstance(item := self._thread.wait(following()), _End):
                yield item
        finally:
            if inspect.isasyncgen(source):
                self._thread.begin(source.aclose())

    functools.update_wrapper(call, method)
    return call


class _End:
    """The end of an iterator, told apart from every item."""


_END = _End()


class SyncTopics(Blocking[Topics]):
    """`bus.topics` of a blocking bus."""

    list = waits(Topics.list)
    info = waits(Topics.info)
    create = waits(Topics.create)
    configure = waits(Topics.configure)
    grow = waits(Topics.grow)
    seal = waits(Topics.seal)
    delete = waits(Topics.delete)


class SyncGroups(Blocking[Groups]):
    """`bus.groups` of a blocking bus."""

    list = waits(Groups.list)
    info = waits(Groups.info)
    reset = waits(Groups.reset)
    delete = waits(Groups.delete)


class SyncDeadLetters(Blocking[DeadLetters]):
    """`bus.dead_letters` of a blocking bus."""

    list = waits(DeadLetters.list)
    inspect = waits(DeadLetters.inspect)
    replay = waits(DeadLetters.replay)
    dead_letter = waits(DeadLetters.dead_letter)
    purge = waits(DeadLetters.purge)


class SyncAudit(Blocking[Audit]):
    """`bus.audit` of a blocking bus."""

    query = waits(Audit.query)
    verify = waits(Audit.verify)
    export = waits(Audit.export)


class SyncRoutes(Blocking[Routes]):
    """`bus.routes` of a blocking bus."""

    list = waits(Routes.list)
    put = waits(Routes.put)
    remove = waits(Routes.remove)
    enable = waits(Routes.enable)
    disable = waits(Routes.disable)
    resolve = waits(Routes.resolve)


class SyncSchedules(Blocking[Schedules]):
    """`bus.schedules` of a blocking bus."""

    list = waits(Schedules.list)
    put = waits(Schedules.put)
    remove = waits(Schedules.remove)


def _settles(
    method: Callable[Concatenate[Event, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[SyncEvent, P], None]:
    def call(self: SyncEvent, /, *args: P.args, **options: P.kwargs) -> None:
        self._thread.wait(method(self, *args, **options))

    functools.update_wrapper(call, method)
    return call


class SyncEvent(Event, gc=False, eq=False, repr_omit_defaults=True):
    """An event of a blocking subscription: an `Event` whose `ack`, `nack`, `extend` and `reject` wait."""

    _thread: Any = None

    ack = _settles(Event.ack)  # type: ignore[assignment]
    nack = _settles(Event.nack)  # type: ignore[assignment]
    extend = _settles(Event.extend)  # type: ignore[assignment]
    reject = _settles(Event.reject)  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SyncEvent(id={str(self.id)!r}, attempt={self.attempt}, payload={self.payload!r})"


def _plain(events: Any) -> Any:
    """Events as the asynchronous side knows them; anything else is left for it to refuse."""
    if isinstance(events, str | bytes | Mapping) or not isinstance(events, Iterable):
        return events
    return [
        Event(
            each.batch, each.index, each.key, each.payload, each.headers, each.attempt, each.delivery
        )
        if isinstance(each, Event)
        else each
        for each in events
    ]  # fmt: skip


class SyncSubscription(Blocking[Subscription]):
    """A subscription of a blocking bus: iterate over it inside `with`."""

    open = waits(Subscription.open)
    close = waits(Subscription.close)
    batches = iterates(Subscription.batches)
    commit = waits(Subscription.commit)

    def ack(self, events: Iterable[Event]) -> None:
        """Ack many events."""
        self._thread.wait(self._target.ack(_plain(events)))

    def nack(self, events: Iterable[Event], delay_s: Seconds | None = None) -> None:
        """Nack many events."""
        self._thread.wait(self._target.nack(_plain(events), delay_s))

    @property
    def mode(self) -> str:
        """How events are read: "queue" or "log"."""
        return self._target.mode

    def get(self, timeout_s: Seconds | None = None) -> SyncEvent | None:
        """The next event, or None when none came in time."""
        event = self._thread.wait(self._target.get(timeout_s))
        return None if event is None else self._blocking(event)

    def __iter__(self) -> Iterator[SyncEvent]:
        while True:
            yield self._blocking(self._thread.wait(self._target.__anext__()))

    def _blocking(self, event: Event) -> SyncEvent:
        return SyncEvent(
            event.batch, event.index, event.key, event.payload, event.headers, event.attempt,
            event.delivery, self._thread,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SyncTransaction(Blocking[Transaction]):
    """A transaction of a blocking bus: it happens when the `with` block ends well."""

    ack = calls(Transaction.ack)

    def publish(self, topic: str, value: Any, **options: Unpack[PublishOptions]) -> None:
        """Publish one event when the transaction commits; options as in `Bus.publish`."""
        self._thread.call(lambda: self._target.publish(topic, value, **options))

    def publish_many(self, topic: str, values: Any, **options: Unpack[PublishManyOptions]) -> None:
        """Publish many events when the transaction commits; options as in `Bus.publish_many`."""
        self._thread.call(lambda: self._target.publish_many(topic, values, **options))

    @property
    def receipts(self) -> list[Receipt]:
        """One for each publish, once it has happened."""
        return self._target.receipts

    @property
    def repeated(self) -> bool:
        """Its key was that of an earlier transaction: nothing of this one happened."""
        return self._target.repeated

    def commit(self, subscription: SyncSubscription) -> None:
        """Commit a log subscription's cursor when the transaction commits."""
        log: Any = getattr(subscription, "_target", subscription)  # what is none is refused there
        self._thread.call(lambda: self._target.commit(log))

    def __enter__(self) -> Self:
        self._thread.wait(self._target.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.wait(self._target.__aexit__(kind, error, trace))


def _subscribes(
    method: Callable[Concatenate[Bus, P], Subscription],
) -> Callable[Concatenate[SyncBus, P], SyncSubscription]:
    def call(self: SyncBus, /, *args: P.args, **options: P.kwargs) -> SyncSubscription:
        made = self._thread.call(lambda: method(self._target, *args, **options))
        return SyncSubscription(made, self._thread)

    functools.update_wrapper(call, method)
    return call


def _transacts(
    method: Callable[Concatenate[Bus, P], Transaction],
) -> Callable[Concatenate[SyncBus, P], SyncTransaction]:
    def call(self: SyncBus, /, *args: P.args, **options: P.kwargs) -> SyncTransaction:
        made = self._thread.call(lambda: method(self._target, *args, **options))
        return SyncTransaction(made, self._thread)

    functools.update_wrapper(call, method)
    return call


def _registers(
    method: Callable[Concatenate[Bus, P], Callable[[Any], Any]],
) -> Callable[Concatenate[SyncBus, P], Callable[[F], F]]:
    def call(self: SyncBus, /, *args: P.args, **options: P.kwargs) -> Callable[[F], F]:
        register = self._thread.call(lambda: method(self._target, *args, **options))

        def decorate(function: F) -> F:
            self._thread.call(lambda: register(function))
            return function

        return decorate

    functools.update_wrapper(call, method)
    return call


def _reads(
    method: Callable[Concatenate[Bus, P], AsyncIterator[EventBatch]],
) -> Callable[Concatenate[SyncBus, P], Iterator[Event]]:
    batches = iterates(method)

    def call(self: SyncBus, /, *args: P.args, **options: P.kwargs) -> Iterator[Event]:
        for batch in batches(self, *args, **options):
            yield from batch

    functools.update_wrapper(call, Bus.replay)
    return call


class SyncBus(Blocking[Bus]):
    """A blocking bus, made by `penstock.connect_sync`; every method waits for its result.

    Handlers are plain functions, registered with `@bus.handler` as on an asynchronous bus. They run
    in threads of their own and may call the bus.
    """

    def __init__(self, bus: Bus, thread: LoopThread) -> None:
        super().__init__(bus, thread)
        self.topics = SyncTopics(bus.topics, thread)
        self.groups = SyncGroups(bus.groups, thread)
        self.dead_letters = SyncDeadLetters(bus.dead_letters, thread)
        self.audit = SyncAudit(bus.audit, thread)
        self.routes = SyncRoutes(bus.routes, thread)
        self.schedules = SyncSchedules(bus.schedules, thread)
        # A bus that is dropped without `close` must not leave its thread behind.
        weakref.finalize(self, thread.stop)

    publish = waits(Bus.publish)
    publish_many = waits(Bus.publish_many)
    flush = waits(Bus.flush)
    request = waits(Bus.request)
    reply = waits(Bus.reply)
    ready = waits(Bus.ready)
    ask = waits(Bus.ask)
    need = calls(Bus.need)
    transaction = _transacts(Bus.transaction)
    subscribe = _subscribes(Bus.subscribe)
    handler = _registers(Bus.handler)
    replay_batches = iterates(Bus.replay_batches)
    # Batches cross from the loop's thread; their events are made in the caller's.
    replay = _reads(Bus.replay_batches)

    @property
    def settings(self) -> Settings:
        """The settings this bus was made with."""
        return self._target.settings

    @property
    def identity(self) -> Identity:
        """Who publishes and asks."""
        return self._target.identity

    @property
    def capabilities(self) -> frozenset[str]:
        """What the engine behind this bus can do."""
        return self._target.capabilities

    @property
    def closed(self) -> bool:
        """Whether this bus was closed, or is being closed."""
        return self._target.closed

    def open(self) -> Self:
        """Connect; handlers registered before begin to serve."""
        self._thread.wait(self._target.open())
        return self

    def run(self, *, drain_s: Seconds | None = None) -> None:
        """Serve the handlers until Ctrl-C, SIGTERM, or a handler's subscription fails; then close."""

        terminated = False

        def terminate(number: int, frame: Any) -> None:
            nonlocal terminated
            if not terminated:
                terminated = True
                raise _Terminated

        main = threading.current_thread() is threading.main_thread()
        ours = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if ours:
            signal.signal(signal.SIGTERM, terminate)
        try:
            self._thread.wait(self._target.run(drain_s=drain_s))
        except _Terminated:  # it may have come before there was anything to cancel
            self._thread.wait(self._target.close(drain_s=drain_s))
        finally:
            if ours:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._target.closed:  # a wrong argument leaves it as it was
                self._thread.stop()

    def close(self, *, drain_s: Seconds | None = None) -> None:
        """Let the handlers finish, flush, disconnect and end the loop's thread.

        In a handler it returns at once, and the bus closes when the handlers have finished.
        """
        if self._thread.stopped:
            return
        if handling.get() is self._target:
            self._thread.wait(self._target.close(drain_s=drain_s))
            return
        if drain_s is not None:
            drain_s = seconds("drain_s", drain_s)
        try:
            self._thread.wait(self._target.close(drain_s=drain_s))
        finally:
            self._thread.stop()

    def __enter__(self) -> Self:
        try:
            return self.open()
        except BaseException:
            self._thread.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect_sync(
    url: str | Path,
    *,
    settings: Settings | None = None,
    identity: Identity | None = None,
    token: Token | None = None,
    **flags: Any,
) -> SyncBus:
    """The same as `connect`, blocking: every method waits for its result.

    >>> with connect_sync("mem:") as bus:
    ...     bus.publish("orders.created", {"id": 7}).offset
    0
    """
    bus = connect(url, settings=settings, identity=identity, token=token, **flags)
    return SyncBus(bus, LoopThread())

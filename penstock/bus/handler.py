"""Handlers: functions that are called with each event, and whose outcome settles it.

Everything between the hand-over of an event and its settlement happens in `Handler._handle`: what
goes wrong there fails that event. Only the end of the subscription ends a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import threading
import typing
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.bus import tracing
from penstock.model.codec import codecs
from penstock.model.errors import (
    AlreadySettled,
    BusClosed,
    DecodeFailed,
    DeliveryError,
    InvalidInput,
    PenstockError,
    UnknownCodec,
    UnknownTopic,
)
from penstock.model.event import REPLY_TO, Event
from penstock.model.parameter import Seconds, seconds
from penstock.model.topic import is_inbox

if TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.bus.subscription import Subscription

log = logging.getLogger("penstock")

# Time for a cancelled handler to clean up; after that nothing waits for it.
CANCEL_S = 1.0
# A lease is renewed after this part of it: two renewals may fail before it ends.
RENEW_AFTER = 1 / 3
MAX_REASON_CHARACTERS = 500

handling: contextvars.ContextVar[Bus | None] = contextvars.ContextVar("handling", default=None)
"""The bus whose handler runs here."""


class Reject(Exception):
    """Raise it in a handler: the event is hopeless and becomes a dead letter now."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raise it in a handler: try again after `delay_s`, whatever the ladder says.

    >>> RetryLater("1.5s").delay_s
    1.5
    """

    def __init__(self, delay_s: Seconds, reason: str = "the handler asked to retry") -> None:
        super().__init__(reason)
        self.delay_s = seconds("delay_s", delay_s)
        self.reason = reason


class Call:
    """How a handler wants to be called, read from its signature once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        inner: Any = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        if callable(inner) and not inspect.isroutine(inner) and not inspect.isclass(inner):
            inner = inner.__call__  # an object that can be called
        self.name: str = getattr(inner, "__qualname__", None) or repr(function)
        self.function = function
        self.asynchronous = inspect.iscoroutinefunction(inner)
        if not callable(inner) or inspect.isclass(inner):
            raise self._unfit("is not a function or method")
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise self._unfit("is a generator (it has a yield), so a call would not run it")
        try:
            hints = typing.get_type_hints(inner)
            parameters = list(inspect.signature(function).parameters.values())
        except Exception as error:
            raise InvalidInput(
                f"the annotations of handler {self.name!r} cannot be resolved: {error}. Define the "
                "payload type at module level"
            ) from None
        first, second = self._places(parameters)
        kind = hints.get(first.name)
        self.event_only = kind is Event
        self.with_event = second is not None and (
            second.default is second.empty
            or second.name == "event"
            or hints.get(second.name) is Event
        )
        if self.event_only and self.with_event:
            raise self._unfit("takes the event first and something else second")
        self.kind = None if self.event_only or kind is Any else kind

    def _places(
        self, parameters: list[inspect.Parameter]
    ) -> tuple[inspect.Parameter, inspect.Parameter | None]:
        """The parameters for the payload, or the event, and for the event beside it."""
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = [each for each in parameters if each.kind in by_place]
        needed = [each for each in places if each.default is each.empty]
        named = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
        if not places or len(needed) > 2:
            raise self._unfit(f"takes {len(needed)} parameters")
        if any(each.default is each.empty for each in named):
            raise self._unfit("needs keyword arguments")
        return places[0], places[1] if len(places) > 1 else None

    def _unfit(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"handler {self.name!r} {why}; write a function of (payload), (event: penstock.Event) "
            "or (payload, event)",
            handler=self.name,
        )

    def arguments(self, event: Event) -> tuple[Any, ...]:
        """The arguments of the function; raises DecodeFailed when the payload does not fit."""
        if self.event_only:
            return (event,)
        if self.kind is bytes:
            value: Any = event.payload
        else:
            value = codecs.get(event.batch.codec).decode(event.payload, self.kind)
        return (value, event) if self.with_event else (value,)


class Thread:
    """A thread that runs one plain function at a time. It keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run the function there; what it returns, or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()
        self._calls.put((loop, answer, functools.partial(context.run, function, *arguments)))
        result, error = await answer
        if isinstance(error, KeyboardInterrupt):  # of the function: signals reach the main thread
            error = RuntimeError("the function raised KeyboardInterrupt")
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return result

    def stop(self) -> None:
        """End after the call that runs, if any."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, answer, function = call
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = function(), None
            except BaseException as error:
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nothing waits there
                loop.call_soon_threadsafe(_answer, answer, outcome)
            del call, function, outcome


def _answer(answer: asyncio.Future[Any], outcome: Any) -> None:
    if not answer.done():
        answer.set_result(outcome)


class Worker:
    """One of the events that a handler works on at the same time."""

    __slots__ = (
        "began_at", "due_at", "event", "late", "renew_at", "returned", "seen", "task", "thread",
        "timed_out",
    )  # fmt: skip

    def __init__(self) -> None:
        self.event: Event | None = None
        """The event it works on; None while it waits for one."""
        self.began_at = 0.0
        self.returned = False
        """The function has returned; only the reply is left."""
        self.late = False
        """It was cancelled because the bus closes."""
        self.seen: Event | None = None
        """The event for which `renew_at` and `due_at` hold: most are done before they matter."""
        self.renew_at = math.inf
        self.due_at = math.inf
        self.timed_out = False
        self.thread: Thread | None = None
        self.task: asyncio.Task[None]


class Handler:
    """A registered function and the tasks that serve it."""

    def __init__(
        self,
        bus: Bus,
        function: Callable[..., Any],
        open_subscription: Callable[[], Subscription],
        *,
        concurrency: int,
        timeout_s: float,
        lease_s: float,
        ended: Callable[[Exception], None],
    ) -> None:
        self.call = Call(function)
        self._bus = bus
        self._open = open_subscription
        self._ended = ended
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._serving: asyncio.Task[None] | None = None
        self._workers: list[Worker] = []
        self._subscription: Subscription | None = None
        self._started = asyncio.Event()
        self._error: Exception | None = None
        """The error that ended the subscription."""
        self._stopping = False
        self._turn = asyncio.Lock()
        self._stopped = False
        self._look_s = min(RENEW_AFTER * lease_s, timeout_s)
        self._alarm: asyncio.TimerHandle | None = None
        """The next check of the workers; None while none has worked since the last one."""
        self._misdirected = 0
        self.worked = False
        """Whether it was given any event."""

    # -- starting and ending -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="penstock-handler")

    async def _serve(self) -> None:
        try:
            subscription = self._open()
            await subscription.open()
        except Exception as error:
            self._end(error)
            return
        self._subscription = subscription
        for number in range(self._concurrency):
            worker = Worker()
            if not self.call.asynchronous:
                worker.thread = Thread(f"penstock-{self.call.name}-{number}")
            worker.task = asyncio.create_task(
                self._work(worker, subscription), name=f"penstock-handler-{self.call.name}"
            )
            self._workers.append(worker)
        self._started.set()
        # Cancelled with all other tasks when the loop ends, which tells the workers what cancels them.
        await asyncio.get_running_loop().create_future()

    def _end(self, error: Exception) -> None:
        """The subscription has ended: say so once, also to a bus that runs."""
        if self._error is None and not self._stopping:
            self._error = error
            log.error("handler %s has ended and gets no more events: %s", self.call.name, error)
            self._started.set()
            self._ended(error)

    async def ready(self) -> None:
        """Return when the handler is subscribed, or raise why it cannot be."""
        await self._started.wait()
        if self._error is not None:
            raise self._error

    def drain(self) -> list[asyncio.Task[None]]:
        """Begin no more events; the tasks of those in work end when these are settled."""
        self._stopping = True
        if self._error is None and not self._started.is_set():
            self._error = BusClosed("the bus was closed before its handlers were subscribed")
            self._started.set()
        if self._serving is not None:
            self._serving.cancel()
        for worker in self._workers:
            if worker.event is None:
                worker.task.cancel()
        return [worker.task for worker in self._workers]

    async def stop(self) -> None:
        """Cancel what is still in work, give it back, and leave the group; after `drain`."""
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        late = [worker for worker in self._workers if not worker.task.done()]
        for worker in late:
            if worker.event is not None:
                log.warning(
                    "handler %s did not finish %s before the bus was closed; the event goes back to "
                    "its group", self.call.name, worker.event.id,
                )  # fmt: skip
            worker.late = True
            worker.task.cancel()
        if late:
            await asyncio.wait([worker.task for worker in late], timeout=CANCEL_S)
        for worker in late:
            event = worker.event
            if event is not None and not worker.task.done():
                log.error(
                    "handler %s ignores that it was cancelled and still works on %s; nothing waits "
                    "for it any more", self.call.name, event.id,
                )  # fmt: skip
                self._settle(event, event.delivery.give_back)
        self._stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.stop()
        if self._subscription is not None:
            await self._subscription.close()

    # -- one event after another -------------------------------------------------------------

    async def _work(self, worker: Worker, events: Subscription) -> None:
        handling.set(self._bus)
        now, call = asyncio.get_running_loop().time, self.call
        while not self._over:
            if worker.task.cancelling():
                await self._calm(worker)
                continue
            try:
                event = events.at_hand()
                if event is None:
                    event = await self._next(events)
            except asyncio.CancelledError:
                if self._over:
                    raise
                continue
            except Exception as error:
                self._end(error)
                return
            worker.event, worker.began_at = event, now()
            self.worked = True
            if self._alarm is None:
                self._arm(worker.began_at + self._look_s)
            try:
                arguments = call.arguments(event)
                if call.asynchronous:
                    work = call.function(*arguments)
                else:
                    work = self._beside(worker, arguments)
                if tracing.tracer is not None:
                    work = tracing.handle(event, call.name, work)
                result = await work
                worker.returned = True
                if worker.timed_out:
                    self._overcome(worker)
                if REPLY_TO in event.headers:
                    await self._reply(event, result)
                event.delivery.ack(event.index)
            except BaseException as error:
                if not self._failed(worker, event, error):
                    raise
            finally:
                worker.event, worker.returned = None, False

    @property
    def _over(self) -> bool:
        """Whether no worker begins another event: the bus closes, or the loop ends."""
        return self._stopping or self._serving is None or self._serving.cancelling() > 0

    @staticmethod
    async def _calm(worker: Worker) -> None:
        """A function cancelled the task that it ran in: that was for its event, not for the next one."""
        while worker.task.cancelling():
            worker.task.uncancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # what is still to be raised is raised here

    async def _next(self, events: Subscription) -> Event:
        if self._concurrency == 1:
            return await anext(events)
        async with self._turn:  # one worker waits for the feed, the others for their turn
            return await anext(events)

    async def _beside(self, worker: Worker, arguments: tuple[Any, ...]) -> Any:
        """Call a plain function in the worker's thread; it may return something to wait for."""
        assert worker.thread is not None
        result = await worker.thread.call(self.call.function, arguments)
        return await result if inspect.isawaitable(result) else result

    async def _reply(self, event: Event, result: Any) -> None:
        if not is_inbox(event.headers[REPLY_TO]):
            self._misdirected += 1
            if self._misdirected & (self._misdirected - 1) == 0:  # 1, 2, 4, ...: no flood of them
                log.warning(
                    "%s wants its reply at %r, which is no inbox of a request; handler %s sends none. "
                    "So far %d events had such an address", event.id,
                    event.headers[REPLY_TO][:80], self.call.name, self._misdirected,
                )  # fmt: skip
            return
        try:
            await self._bus.reply(event, result)
        except UnknownTopic:
            log.info("the caller of request %s is gone; its reply is dropped", event.id)
        except InvalidInput as error:  # the next attempt would return the same
            raise Reject(f"the reply cannot be sent: {error.message}") from error

    # -- settling ----------------------------------------------------------------------------

    def _failed(self, worker: Worker, event: Event, error: BaseException) -> bool:
        """Settle an event that was not done; False when it is the worker that is to end."""
        if isinstance(error, GeneratorExit) and not _is_running(worker.task):
            return False  # its loop is gone, and the garbage collector cleans up
        if worker.timed_out:
            self._overcome(worker)
            if isinstance(error, asyncio.CancelledError):
                error = TimeoutError(f"it took more than {self._timeout_s:g} s (timeout_s)")
        if isinstance(error, DeliveryError) and worker.returned:
            self._not_counted(event, error)
            return True
        if isinstance(error, KeyboardInterrupt):
            self._settle(event, event.delivery.give_back)
            return False
        cancelled = isinstance(error, asyncio.CancelledError)
        loop_ends = self._over and not self._stopping
        closed = worker.late or loop_ends or (self._stopping and cancelled)
        if closed and not isinstance(error, Reject | RetryLater):
            self._settle(event, event.delivery.give_back)
            return not cancelled
        try:
            settle, *how = _verdict(event, error)
        except Exception as defect:  # what the function raised has no text, or a wrong delay
            why = f"{type(error).__name__}, which cannot be read: {type(defect).__name__}"
            settle, *how = _verdict(event, RuntimeError(why))
        self._settle(event, settle, *how)
        return True

    @staticmethod
    def _overcome(worker: Worker) -> None:
        """The function is over, so its timeout is not a cancellation of the worker."""
        worker.timed_out = False
        worker.task.uncancel()

    def _settle(self, event: Event, settle: Callable[..., None], *how: Any) -> None:
        try:
            settle(event.index, *how)
        except DeliveryError as error:
            self._not_counted(event, error)
        except Exception:
            log.exception("handler %s could not settle %s", self.call.name, event.id)

    def _not_counted(self, event: Event, error: DeliveryError) -> None:
        if not isinstance(error, AlreadySettled):  # by the function itself, or by its transaction
            log.warning(
                "what handler %s made of %s does not count: %s", self.call.name, event.id, error
            )

    # -- time --------------------------------------------------------------------------------

    def _arm(self, at: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        """Renew the leases of events in work, and cancel functions that exceed their timeout."""
        now = asyncio.get_running_loop().time()
        # Events that begin from now on need no earlier alarm: this method runs again in time.
        first = now + self._look_s
        busy = [worker for worker in self._workers if worker.event is not None]
        for worker in busy:
            event = worker.event
            assert event is not None
            if worker.seen is not event:
                worker.seen = event
                worker.renew_at = worker.began_at + RENEW_AFTER * self._lease_s
                worker.due_at = worker.began_at + self._timeout_s
            if worker.renew_at <= now:
                self._renew(worker, event, now)
            if worker.due_at <= now and not worker.returned:
                self._overdue(worker, event)
            first = min(first, worker.renew_at, worker.due_at)
        self._alarm = None
        if busy and not self._stopped:
            self._arm(max(first, now))

    def _renew(self, worker: Worker, event: Event, now: float) -> None:
        worker.renew_at = now + RENEW_AFTER * self._lease_s
        try:
            event.delivery.extend(event.index, self._lease_s)
        except PenstockError:  # it is settled, or lost; the settlement at the end says which
            worker.renew_at = math.inf

    def _overdue(self, worker: Worker, event: Event) -> None:
        worker.due_at = math.inf
        if worker.timed_out:
            log.warning(
                "handler %s ignores that it was cancelled after %g s (timeout_s) and still works on %s. "
                "The event stays leased until it returns", self.call.name, self._timeout_s, event.id,
            )  # fmt: skip
        elif self.call.asynchronous:
            worker.timed_out = True
            worker.due_at = asyncio.get_running_loop().time() + CANCEL_S
            worker.task.cancel()
        else:
            log.warning(
                "handler %s has worked on %s for more than %g s (timeout_s). A plain function cannot "
                "be stopped: the event stays leased until it returns", self.call.name, event.id,
                self._timeout_s,
            )  # fmt: skip


def _verdict(event: Event, error: BaseException) -> tuple[Any, ...]:
    """How to settle an event whose handler raised: the call, and what follows the index."""
    delivery = event.delivery
    if isinstance(error, Reject):
        return delivery.reject, _text(error.reason)
    if isinstance(error, RetryLater):
        return delivery.nack, seconds("delay_s", error.delay_s), _text(error.reason)
    if isinstance(error, DecodeFailed | UnknownCodec):
        return delivery.reject, _text(error)  # the next attempt would read the same bytes
    kind = "timed out" if isinstance(error, TimeoutError) else type(error).__name__
    text = error.message if isinstance(error, PenstockError) else error
    return delivery.nack, None, _text(f"{kind}: {text}")


def _is_running(task: asyncio.Task[None]) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        return False


def _text(reason: Any) -> str:
    """A reason as it can be stored: UTF-8, and not too much of it."""
    return str(reason)[:MAX_REASON_CHARACTERS].encode("utf-8", "replace").decode()

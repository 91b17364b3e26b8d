"""Handlers: functions that are called with each event, and whose outcome settles it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import typing
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from penstock.bus import tracing
from penstock.model.codec import codecs
from penstock.model.errors import (
    BusClosed,
    DecodeFailed,
    DeliveryError,
    InvalidInput,
    PenstockError,
    UnknownCodec,
)
from penstock.model.event import Event

if TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.bus.subscription import Subscription

log = logging.getLogger("penstock")

REPLY_TO = "penstock-reply-to"
CORRELATION = "penstock-correlation"


class Reject(Exception):
    """Raise it in a handler: the event is hopeless and becomes a dead letter now."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raise it in a handler: try again after `delay_s`, whatever the ladder says."""

    def __init__(self, delay_s: float, reason: str = "the handler asked to retry") -> None:
        super().__init__(reason)
        self.delay_s = delay_s
        self.reason = reason


class Call:
    """How a handler wants to be called, read from its signature once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.asynchronous = inspect.iscoroutinefunction(function)
        parameters = list(inspect.signature(function).parameters.values())
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise InvalidInput(
                f"the annotations of handler {function.__name__!r} cannot be resolved: {error}. Define "
                "the payload type at module level"
            ) from None
        kinds = [hints.get(parameter.name) for parameter in parameters]
        if not 1 <= len(parameters) <= 2:
            raise InvalidInput(
                f"handler {function.__name__!r} takes {len(parameters)} parameters; write "
                "(payload), (event: Event) or (payload, event)"
            )
        self.event_only = len(parameters) == 1 and kinds[0] is Event
        self.with_event = len(parameters) == 2
        self.kind = None if self.event_only else kinds[0]
        if self.kind is Any:
            self.kind = None

    def arguments(self, event: Event) -> tuple[Any, ...]:
        """What the function is called with; raises DecodeFailed when the payload does not fit."""
        if self.event_only:
            return (event,)
        if self.kind is bytes:
            value: Any = event.payload
        else:
            value = codecs.get(event.batch.codec).decode(event.payload, self.kind)
        return (value, event) if self.with_event else (value,)


class Begun:
    """The rest of a coroutine that was started by hand and waits for something now."""

    def __init__(self, work: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        work, waits_for = self._work, self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = work.throw(error)
                else:
                    waits_for = work.send(sent)
        except StopIteration as done:
            return done.value


class Handler:
    """A registered function and the tasks that serve it."""

    def __init__(
        self,
        bus: Bus,
        function: Callable[..., Any],
        open_subscription: Callable[[], Subscription],
        *,
        concurrency: int,
        timeout_s: float | None,
    ) -> None:
        if concurrency < 1:
            raise InvalidInput("concurrency is at least 1", concurrency=concurrency)
        self.call = Call(function)
        self.failures = 0
        self._bus = bus
        self._open = open_subscription
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None
        self._started = asyncio.Event()
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Begin to serve."""
        if not self._tasks:
            task = asyncio.create_task(self._serve(), name="penstock-handler")
            task.add_done_callback(self._ended)
            self._tasks = [task]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody may be waiting for the task: a handler that serves no more must not be silent."""
        error = None if task.cancelled() else task.exception()
        if error is not None and task in self._tasks:  # else it was told to stop
            name = self.call.function.__name__
            log.error("handler %s has ended and gets no more events: %s", name, error)

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that serve, for whoever waits for their end."""
        return self._tasks

    async def ready(self) -> None:
        """Return when the handler is subscribed, or raise why it cannot be."""
        started = asyncio.ensure_future(self._started.wait())
        await asyncio.wait([started, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Stop serving; events in work go back to their group."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> None:
        self._subscription = self._open()
        async with self._subscription as events:
            self._started.set()
            if self._concurrency == 1:
                await self._work(events)
            else:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._concurrency):
                        group.create_task(self._work(events))

    async def _work(self, events: Subscription) -> None:
        call = self.call
        while True:
            event = events.at_hand()
            if event is None:
                try:
                    event = await self._next(events)
                except BusClosed:
                    return
            try:
                arguments = call.arguments(event)
                work = self._run(arguments)
                if tracing.tracer is not None:
                    work = tracing.handle(event, call.function.__qualname__, work)
                result = await work
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # we are being stopped; the event goes back to its group
                self.failures += 1
                self._settle(self._failed, event, error)
                continue
            except Exception as error:
                self.failures += 1
                self._settle(self._failed, event, error)
                continue
            if REPLY_TO in event.headers:
                await self._bus.reply(event, result)
            self._settle(self._done, event, None)

    async def _next(self, events: Subscription) -> Event:
        if self._concurrency == 1:
            return await anext(events)
        async with self._turn:  # one worker waits for the feed, the others for their turn
            return await anext(events)

    async def _run(self, arguments: tuple[Any, ...]) -> Any:
        call = self.call
        if not call.asynchronous:
            return await asyncio.to_thread(call.function, *arguments)
        work = call.function(*arguments)
        try:
            waits_for = work.send(None)
        except StopIteration as done:
            return done.value  # it never waited, so it needs no timeout
        async with asyncio.timeout(self._timeout_s):
            return await Begun(work, waits_for)

    @staticmethod
    def _settle(
        settle: Callable[[Event, BaseException | None], None],
        event: Event,
        error: BaseException | None,
    ) -> None:
        try:
            settle(event, error)
        except DeliveryError:
            # The lease ran out while the handler worked: the event is with somebody else by now,
            # and this outcome may not count.
            return

    @staticmethod
    def _done(event: Event, _: BaseException | None) -> None:
        event.delivery.ack(event.index)

    @staticmethod
    def _failed(event: Event, error: BaseException | None) -> None:
        delivery, index = event.delivery, event.index
        if isinstance(error, Reject):
            delivery.reject(index, error.reason)
        elif isinstance(error, RetryLater):
            delivery.nack(index, error.delay_s, error.reason)
        elif isinstance(error, DecodeFailed | UnknownCodec):
            delivery.reject(index, str(error))  # the next attempt would read the same bytes
        else:
            kind = "timed out" if isinstance(error, TimeoutError) else type(error).__name__
            text = error.message if isinstance(error, PenstockError) else str(error)
            delivery.nack(index, None, f"{kind}: {text}"[:500])

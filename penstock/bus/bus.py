"""Bus: the public API, the same on every engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.bus import tracing
from penstock.bus.admin import Audit, DeadLetters, Groups, Routes, Schedules, Topics
from penstock.bus.drafting import MIN_TTL_S, DraftBuilder, Key, Token, due_us
from penstock.bus.handler import Handler, handling
from penstock.bus.replay import Window, replay_batches
from penstock.bus.request_reply import Requests
from penstock.bus.subscription import Subscription
from penstock.bus.transaction import Transaction
from penstock.core.assignment import Strategy
from penstock.core.entry import MIN_LEASE_S, GroupSpec
from penstock.core.retry import Retry
from penstock.engines import requests as ask
from penstock.engines.engine import Engine, Request, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.errors import BusClosed, InvalidInput, PenstockError, Unsupported
from penstock.model.event import Event, Identity, Receipt
from penstock.model.parameter import (
    MAX_NAME_CHARACTERS,
    Moment,
    Seconds,
    checked,
    count,
    microseconds,
    place,
    refused,
    seconds,
    text,
)
from penstock.model.settings import Settings
from penstock.model.topic import check_pattern

log = logging.getLogger("penstock")

F = TypeVar("F", bound=Callable[..., Any])
NEEDED = {"any": None, "key": "key-order", "single": "single-active"}
"""The capability that each order needs."""
# Events prefetched for a handler beyond those it works on: enough to hide a commit.
HANDLER_PREFETCH = 256
MAX_CONCURRENCY = 10_000  # tasks of one handler
# How long closing waits until the last settlements of handlers are durable; then it gives up, and their
# events may be delivered again.
FLUSH_S = 5.0


class Bus:
    """A connection to a place where events live. Made by `penstock.connect`.

    >>> import asyncio, penstock
    >>> async def hello() -> int:
    ...     async with penstock.connect("mem:") as bus:
    ...         receipt = await bus.publish("greetings.sent", {"text": "hello"})
    ...         return receipt.offset
    >>> asyncio.run(hello())
    0
    """

    def __init__(
        self, engine: Engine, settings: Settings, identity: Identity, capabilities: frozenset[str]
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.identity = identity
        self.capabilities = capabilities
        self.topics = Topics(self)
        self.groups = Groups(self)
        self.dead_letters = DeadLetters(self)
        self.audit = Audit(self)
        self.routes = Routes(self)
        self.schedules = Schedules(self)
        self.drafting = DraftBuilder(settings, identity)
        self._handlers: list[Handler] = []
        self._state = "new"
        self._requests = Requests(self)
        self._closing: asyncio.Task[None] | None = None
        self._closed_inside = False
        """A handler has closed it, which may be before `run` begins."""
        self._hurry = asyncio.Event()
        """Closing waits for no handler any more."""
        self._halt = asyncio.Event()
        """There is no more to run: a handler has ended, or the bus is closed."""
        self._failure: Exception | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Connect; handlers registered before begin to serve."""
        if self.closed:
            raise BusClosed("this bus was closed; call penstock.connect again")
        if self._state == "new":
            await self.engine.open()
            tracing.detect()
            self._state = "open"
            for handler in self._handlers:
                handler.start()
        return self

    @property
    def closed(self) -> bool:
        """Whether this bus was closed, or is being closed."""
        return self._state == "closed" or self._closing is not None

    async def close(self, *, drain_s: Seconds | None = None) -> None:
        """Let the handlers finish, flush and disconnect.

        No handler begins another event. Those in work have `drain_s` (`delivery.drain_s` by default)
        to finish; what is not done by then is cancelled and goes back to its group, and that attempt
        does not count. In a handler it returns at once, and the bus closes when the handlers have
        finished. Cancelling it gives up the waiting, not the closing.
        """
        default_s = self.settings.delivery.drain_s
        patience_s = default_s if drain_s is None else seconds("drain_s", drain_s)
        if self._closing is None:
            if self._state != "open":
                return
            self._closing = asyncio.create_task(self._close(patience_s), name="penstock-close")
            self._closed_inside = handling.get() is self
        closing = self._closing
        if closing.done() or handling.get() is self:
            return
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            self._hurry.set()
            await asyncio.wait([closing])
            raise

    async def _close(self, drain_s: float) -> None:
        try:
            if self._handlers:
                await self._stop_handlers(drain_s)
            await self._requests.close()
        finally:
            self._state = "closed"
            self._halt.set()
            await self.engine.close()

    async def _stop_handlers(self, drain_s: float) -> None:
        work = [task for handler in self._handlers for task in handler.drain()]
        hurry = asyncio.create_task(self._hurry.wait())
        drained = asyncio.create_task(_ended(work))
        try:
            await asyncio.wait(
                [drained, hurry], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            drained.cancel()
            hurry.cancel()
            stopped = await asyncio.gather(
                *(handler.stop() for handler in self._handlers), return_exceptions=True
            )
            for error in stopped:
                if error is not None:
                    log.warning("a handler did not leave its group in order: %s", error)
            if any(handler.worked for handler in self._handlers):
                await self._flush_handlers()

    async def _flush_handlers(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.engine.flush()
        except (PenstockError, TimeoutError) as error:
            log.warning("some of what the handlers did may be delivered again: %s", error)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._state != "open":
            hint = (
                "it was closed" if self._state == "closed" else "use 'async with' or await open()"
            )
            raise BusClosed(f"the bus is not open: {hint}")

    def need(self, capability: str) -> None:
        """Raise Unsupported unless the engine has a capability."""
        if capability not in self.capabilities:
            raise Unsupported(
                f"this engine has no {capability!r}; `penstock docs capabilities` says which have",
                capability=capability,
            )

    async def ask(self, request: Request) -> Any:
        """Send an administrative request to the engine."""
        self._check_open()
        if not isinstance(request, Request):
            raise refused("request", "a request of penstock.engines.requests", request)
        return await self.engine.ask(checked(request))

    @staticmethod
    def wall_us() -> int:
        """Microseconds since 1970 UTC."""
        return time.time_ns() // 1_000

    # -- publishing ----------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        value: Any,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token | None = None,
        idempotency_key: str | None = None,
        event_time: Moment | None = None,
        delay_s: Seconds | None = None,
        deliver_at: Moment | None = None,
        ttl_s: Seconds | None = None,
        priority: int = 0,
        codec: str | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish one event; it is durable when this returns."""
        self._check_open()
        draft = self.draft(
            topic, value, key=key, headers=headers, token=token, idempotency_key=idempotency_key,
            event_time=event_time, delay_s=delay_s, deliver_at=deliver_at, ttl_s=ttl_s,
            priority=priority, codec=codec, partition=partition,
        )  # fmt: skip
        if tracing.tracer is not None:
            return await tracing.publish(self.engine, draft, self.settings.limits)
        return await self.engine.publish(draft)

    def draft(
        self,
        topic: str,
        value: Any,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token | None = None,
        idempotency_key: str | None = None,
        event_time: Moment | None = None,
        delay_s: Seconds | None = None,
        deliver_at: Moment | None = None,
        ttl_s: Seconds | None = None,
        priority: int = 0,
        codec: str | None = None,
        partition: int | None = None,
    ) -> Draft:
        """What `publish` hands to the engine; for engines, transactions and tests."""
        draft = self.drafting.one(
            topic, value, key=key, headers=headers, token=token, idempotency_key=idempotency_key,
            event_time=event_time, expires_us=self._expires(ttl_s), priority=priority, codec=codec,
            partition=partition,
        )  # fmt: skip
        return self._delayed(draft, delay_s, deliver_at)

    def _delayed(self, draft: Draft, delay_s: Seconds | None, deliver_at: Moment | None) -> Draft:
        if delay_s is not None or deliver_at is not None:
            self.need("delayed")
            draft.deliver_at_us = due_us(delay_s, deliver_at, self.wall_us())
        if draft.priority is not None:
            self.need("priority")
        if draft.tokens is not None:
            self.need("idempotency")
        return draft

    def _expires(self, ttl_s: Seconds | None) -> int | None:
        if ttl_s is None:
            return None
        self.need("ttl")
        return self.wall_us() + microseconds("ttl_s", ttl_s, least=MIN_TTL_S)

    async def publish_many(
        self,
        topic: str,
        values: Any,
        *,
        keys: Sequence[Key | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        tokens: Sequence[Token] | None = None,
        idempotency_keys: Sequence[str] | None = None,
        event_times: Sequence[Moment | None] | None = None,
        delay_s: Seconds | None = None,
        deliver_at: Moment | None = None,
        ttl_s: Seconds | None = None,
        priorities: Sequence[int] | None = None,
        codec: str | None = None,
        partition: int | None = None,
    ) -> Receipt:
        """Publish many events in one go: a list, or Arrow, pandas or Polars columns."""
        self._check_open()
        draft = self.draft_many(
            topic, values, keys=keys, headers=headers, tokens=tokens,
            idempotency_keys=idempotency_keys, event_times=event_times, delay_s=delay_s,
            deliver_at=deliver_at, ttl_s=ttl_s, priorities=priorities, codec=codec,
            partition=partition,
        )  # fmt: skip
        if tracing.tracer is not None:
            return await tracing.publish(self.engine, draft, self.settings.limits)
        return await self.engine.publish(draft)

    def draft_many(
        self,
        topic: str,
        values: Any,
        *,
        keys: Sequence[Key | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        tokens: Sequence[Token] | None = None,
        idempotency_keys: Sequence[str] | None = None,
        event_times: Sequence[Moment | None] | None = None,
        delay_s: Seconds | None = None,
        deliver_at: Moment | None = None,
        ttl_s: Seconds | None = None,
        priorities: Sequence[int] | None = None,
        codec: str | None = None,
        partition: int | None = None,
    ) -> Draft:
        """What `publish_many` hands to the engine."""
        draft = self.drafting.many(
            topic, values, keys=keys, headers=headers, tokens=tokens,
            idempotency_keys=idempotency_keys, event_times=event_times,
            expires_us=self._expires(ttl_s), priorities=priorities, codec=codec,
            partition=partition,
        )  # fmt: skip
        return self._delayed(draft, delay_s, deliver_at)

    def transaction(self, *, idempotency_key: str | None = None) -> Transaction:
        """Publishes, acks and cursors that happen together or not at all; with a key, at most once."""
        self._check_open()
        self.need("transactions")
        return Transaction(self, idempotency_key)

    async def flush(self) -> None:
        """Every ack given so far is durable when this returns."""
        self._check_open()
        await self.engine.flush()

    # -- consuming -----------------------------------------------------------------------------

    def subscribe(
        self,
        pattern: str,
        *,
        group: str | None = None,
        mode: str = "queue",
        start: Moment | None = None,
        max_inflight: int | None = None,
        order: str = "any",
        filter: Mapping[str, str] | None = None,
        retry: Retry | None = None,
        lease_s: Seconds | None = None,
        member: str | None = None,
        assignment: Strategy = "sticky",
    ) -> Subscription:
        """Receive events of a pattern; without a group, as a listener of its own.

        `start` is "earliest", "latest", an offset ("offset:42"), a time, or how long ago ("2h").
        """
        check_pattern(pattern)
        delivery = self.settings.delivery
        default_retry = Retry(delivery.ladder_ms, delivery.max_attempts)
        alone = group is None
        name = group if group is not None else f"_listener.{uuid.uuid4().hex}"
        if start is None:
            start = "latest" if alone else "earliest"
        spec = GroupSpec(
            patterns=(pattern,),
            mode=mode,
            order=order,
            retry=default_retry if retry is None else retry,
            lease_s=delivery.lease_s if lease_s is None else lease_s,  # type: ignore[arg-type]
            filter={} if filter is None else filter,  # type: ignore[arg-type]
            start=place("start", start, self.wall_us()),
            ephemeral=alone,
            assignment=assignment,
        )
        inflight = delivery.max_inflight if max_inflight is None else max_inflight
        member = uuid.uuid4().hex if member is None else member
        wanted = checked(Subscribe(name, spec, member, inflight, self.identity))
        if name.startswith("_") and not alone:
            raise refused("group", "a name that does not begin with '_'", name)
        if (needed := NEEDED[wanted.spec.order]) is not None:
            self.need(needed)
        if wanted.spec.filter:
            self.need("filters")
        mode = wanted.spec.mode

        async def open_feed() -> Any:
            self._check_open()
            return await self.engine.subscribe(wanted)

        async def after_close(_: Subscription) -> None:
            if alone and self._state == "open":
                await self.engine.ask(ask.DeleteGroup(name))

        return Subscription(mode, open_feed, after_close)

    def handler(
        self,
        pattern: str,
        *,
        group: str,
        concurrency: int = 1,
        retry: Retry | None = None,
        timeout_s: Seconds | None = None,
        order: str = "any",
        filter: Mapping[str, str] | None = None,
        start: Moment | None = None,
        max_inflight: int | None = None,
        lease_s: Seconds | None = None,
    ) -> Callable[[F], F]:
        """Call the decorated function with each event: returning acks, raising retries.

        Its lease is kept while the function works, for at most `timeout_s` (the lease by default)
        when it is asynchronous. Then it is cancelled. A plain function runs in a thread, which cannot
        be stopped.
        """
        group = text("group", group, least=1, most=MAX_NAME_CHARACTERS)
        concurrency = count("concurrency", concurrency, least=1, most=MAX_CONCURRENCY)
        inflight = max_inflight
        if inflight is None:
            inflight = max(concurrency, min(HANDLER_PREFETCH, self.settings.delivery.max_inflight))
        lease = seconds(
            "lease_s",
            self.settings.delivery.lease_s if lease_s is None else lease_s,
            least=MIN_LEASE_S,
        )
        timeout = lease if timeout_s is None else seconds("timeout_s", timeout_s, least=MIN_LEASE_S)
        if self.closed:
            raise BusClosed("this bus was closed; call penstock.connect again")

        def open_subscription() -> Subscription:
            return self.subscribe(
                pattern, group=group, retry=retry, order=order, filter=filter, start=start,
                max_inflight=inflight, lease_s=lease,
            )  # fmt: skip

        open_subscription()  # a wrong value is refused here, not when the handler starts

        def register(function: F) -> F:
            handler = Handler(
                self, function, open_subscription, concurrency=concurrency,
                timeout_s=timeout, lease_s=lease, ended=self._handler_ended,
            )  # fmt: skip
            self._handlers.append(handler)
            if self._state == "open":
                handler.start()
            return function

        return register

    async def ready(self) -> None:
        """Return when every handler is subscribed, or raise why one cannot be."""
        self._check_open()
        for handler in self._handlers:
            await handler.ready()

    async def run(self, *, drain_s: Seconds | None = None) -> None:
        """Serve the handlers until SIGTERM, until it is cancelled or until the bus is closed.

        Then it closes the bus, as `close(drain_s=...)` does. It raises the error that ends a
        handler's subscription. SIGTERM is taken in the main thread, unless the program has a handler
        for it.
        """
        if drain_s is not None:
            drain_s = seconds("drain_s", drain_s)
        if not self._handlers:
            raise InvalidInput("the bus has nothing to run; register a handler with @bus.handler")
        serving = asyncio.create_task(self._serve(), name="penstock-run")
        terminated = False

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            serving.cancel()

        with _on_sigterm(terminate):
            try:
                await serving
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not terminated or (task is not None and task.cancelling()):
                    raise
                log.info("SIGTERM: the handlers finish, then the bus is closed")
            finally:
                await self.close(drain_s=drain_s)

    async def _serve(self) -> None:
        try:
            await self.open()
            await self.ready()
            await self._halt.wait()
        except BusClosed:
            if not self._closed_inside:
                raise
        if self._failure is not None:
            raise self._failure

    def _handler_ended(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._halt.set()

    # -- reading back --------------------------------------------------------------------------

    async def replay(
        self,
        pattern: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
        from_offset: int | None = None,
        to_offset: int | None = None,
        partition: int | None = None,
    ) -> AsyncIterator[Event]:
        """Stored events of a pattern, in order within each partition, up to now.

        `to_offset` and `until` are the first that is left out.
        """
        batches = self.replay_batches(
            pattern, since=since, until=until, from_offset=from_offset, to_offset=to_offset,
            partition=partition,
        )  # fmt: skip
        async for batch in batches:
            for event in batch:
                yield event

    async def replay_batches(
        self,
        pattern: str,
        *,
        since: Moment | None = None,
        until: Moment | None = None,
        from_offset: int | None = None,
        to_offset: int | None = None,
        partition: int | None = None,
    ) -> AsyncIterator[EventBatch]:
        """The same as whole batches."""
        self._check_open()
        window = Window(since, until, from_offset, to_offset, partition)
        async for batch in replay_batches(self, pattern, window):
            yield batch

    # -- request and reply -----------------------------------------------------------------------

    async def request(
        self,
        topic: str,
        value: Any,
        *,
        timeout_s: Seconds = 5.0,
        type: Any = None,
        headers: Mapping[str, str] | None = None,
        key: Key | None = None,
    ) -> Any:
        """Publish a request and wait for what its handler returns."""
        self._check_open()
        self.need("request-reply")
        timeout = seconds("timeout_s", timeout_s, least=MIN_TTL_S)
        if headers is not None:
            self.drafting.check_headers(headers)
        return await self._requests.ask(topic, value, timeout, type, headers, key)

    async def reply(self, request: Event, value: Any) -> None:
        """Answer a request; handlers do this with what they return."""
        if not isinstance(request, Event):
            raise refused("request", "the event of a request", request)
        await self._requests.answer(request, value)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


@contextlib.contextmanager
def _on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """Act on SIGTERM, unless the program does so itself."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)

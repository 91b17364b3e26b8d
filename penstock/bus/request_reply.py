"""Requests: publish a question, wait for what its handler returns.

A connection has one inbox, a topic that goes with it; replies find their caller by correlation. A
request that becomes a dead letter is answered too, by the engine: with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.bus.drafting import MIN_TTL_S
from penstock.core.entry import TopicSpec
from penstock.engines import requests as administer
from penstock.engines.embedded.dead_letters import RequestVerdict
from penstock.model.errors import AlreadyExists, InvalidInput, RequestRejected, RequestTimedOut
from penstock.model.event import CORRELATION, REJECTED, REPLY_TO, Event
from penstock.model.topic import is_inbox

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

# Between two attempts to listen while requests wait.
REOPEN_S = 0.05


class Requests:
    """The questions a bus has open."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = f"_inbox.{uuid.uuid4().hex}"
        self._waiting: dict[str, asyncio.Future[Event]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None]

    async def ask(
        self,
        topic: str,
        value: Any,
        timeout_s: float,
        type: Any,
        headers: Mapping[str, str] | None,
        key: bytes | str | None,
    ) -> Any:
        """Publish a request and wait for its reply; all of it within the deadline."""
        correlation = uuid.uuid4().hex
        answer: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = answer
        labelled = {**(headers or {}), REPLY_TO: self._inbox, CORRELATION: correlation}
        now = asyncio.get_running_loop().time
        until_s = now() + timeout_s
        stored = False
        try:
            async with asyncio.timeout_at(until_s) as deadline:
                await self._listening()
                # Nothing waits for an answer after the deadline, so the question need not outlive it.
                left_s = max(MIN_TTL_S, until_s - now())
                ttl_s = left_s if "ttl" in self._bus.capabilities else None
                await self._bus.publish(topic, value, key=key, headers=labelled, ttl_s=ttl_s)
                stored = True
                event = await self._answer(answer)
        except TimeoutError:
            if not deadline.expired():
                raise
            words = (
                "Is a handler subscribed? It may still run: make it idempotent"
                if stored
                else "The bus did not even confirm that it is stored: check that the broker runs"
            )
            raise RequestTimedOut(
                f"no answer to the request on {topic!r} within {timeout_s:g} s. {words}",
                topic=topic,
                timeout_s=timeout_s,
            ) from None
        finally:
            del self._waiting[correlation]
        if REJECTED in event.headers:
            raise _rejected(topic, event.value(RequestVerdict))
        return event.value(type)

    async def _listening(self) -> None:
        """Open the inbox, unless it is open."""
        if self._listener is None or self._listener.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._listener = asyncio.create_task(self._listen(self._ready), name="penstock-replies")
            for each in (self._ready, self._listener):
                each.add_done_callback(_heard)
        await asyncio.shield(self._ready)

    async def _answer(self, answer: asyncio.Future[Event]) -> Event:
        """Wait for an answer, and listen again when the inbox was closed meanwhile."""
        while True:
            assert self._listener is not None
            ends: list[asyncio.Future[Any]] = [answer, self._listener]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            await asyncio.sleep(REOPEN_S)
            await self._listening()

    async def _listen(self, ready: asyncio.Future[None]) -> None:
        try:
            with contextlib.suppress(AlreadyExists):  # it listened before
                await self._bus.ask(administer.CreateTopic(self._inbox, TopicSpec(ephemeral=True)))
            async with self._bus.subscribe(self._inbox, mode="log", start="earliest") as inbox:
                ready.set_result(None)
                async for event in inbox:
                    headers = event.headers
                    correlation = headers.get(CORRELATION) or headers.get(REJECTED, "")
                    waiting = self._waiting.get(correlation)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(event)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    async def answer(self, request: Event, value: Any) -> None:
        """Send a reply to where a request wants it."""
        target = request.headers.get(REPLY_TO)
        if target is None or not is_inbox(target):
            raise InvalidInput(
                f"{request.id} is no request: its headers name no inbox to reply to. Publish the answer "
                "to a topic instead",
                id=str(request.id),
            )
        draft = self._bus.drafting.one(
            target, value, key=None, headers={CORRELATION: request.headers.get(CORRELATION, "")},
            token=None, idempotency_key=None, event_time=None, expires_us=None, priority=0,
            codec=None, system=True,
        )  # fmt: skip
        await self._bus.engine.publish(draft)

    async def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)


def _rejected(topic: str, verdict: RequestVerdict) -> RequestRejected:
    return RequestRejected(
        f"the request on {topic!r} was given up by {verdict.consumer!r} at attempt {verdict.attempts}: "
        f"{verdict.reason}. It is a dead letter; correct the request, or replay it",
        topic=topic,
        consumer=verdict.consumer,
        attempts=verdict.attempts,
        reason=verdict.reason,
    )


def _heard(future: asyncio.Future[None]) -> None:
    """What fails here is raised to the requests that wait, if any does."""
    if not future.cancelled():
        future.exception()

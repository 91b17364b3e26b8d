"""Requests: publish a question, wait for what its handler returns.

A connection has one inbox, a topic that goes with it; replies find their caller by correlation.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.bus.handler import CORRELATION, REPLY_TO
from penstock.core.entry import TopicSpec
from penstock.engines import request as administer
from penstock.model.errors import InvalidInput, RequestTimedOut
from penstock.model.event import Event

if TYPE_CHECKING:
    from penstock.bus.bus import Bus


class Requests:
    """The questions a bus has open."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = f"_inbox.{uuid.uuid4().hex}"
        self._waiting: dict[str, asyncio.Future[Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    async def ask(
        self,
        topic: str,
        value: Any,
        timeout_s: float,
        type: Any,
        headers: Mapping[str, str] | None,
        key: bytes | str | None,
    ) -> Any:
        """Publish a request and wait for its reply."""
        await self._open()
        correlation = uuid.uuid4().hex
        answer: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = answer
        labelled = {**(headers or {}), REPLY_TO: self._inbox, CORRELATION: correlation}
        # Nobody waits for an answer after the deadline, so the question need not outlive it.
        ttl_s = timeout_s if "ttl" in self._bus.capabilities else None
        try:
            await self._bus.publish(topic, value, key=key, headers=labelled, ttl_s=ttl_s)
            async with asyncio.timeout(timeout_s):
                event = await answer
        except TimeoutError:
            raise RequestTimedOut(
                f"nobody answered the request on {topic!r} within {timeout_s} s. Is a handler "
                "subscribed? It may still run: make it idempotent",
                topic=topic,
                timeout_s=timeout_s,
            ) from None
        finally:
            del self._waiting[correlation]
        return event.value(type)

    async def _open(self) -> None:
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._listen(self._ready), name="penstock-replies")
        await asyncio.shield(self._ready)

    async def _listen(self, ready: asyncio.Future[None]) -> None:
        try:
            await self._bus.ask(administer.CreateTopic(self._inbox, TopicSpec(ephemeral=True)))
            async with self._bus.subscribe(self._inbox, mode="log", start="earliest") as inbox:
                ready.set_result(None)
                async for event in inbox:
                    waiting = self._waiting.get(event.headers.get(CORRELATION, ""))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(event)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    async def answer(self, request: Event, value: Any) -> None:
        """Send a reply to where a request wants it."""
        target = request.headers.get(REPLY_TO)
        if target is None:
            raise InvalidInput(
                f"{request.id} is no request: it has no reply address", id=str(request.id)
            )
        draft = self._bus.drafting.one(
            target, value, key=None, headers={CORRELATION: request.headers.get(CORRELATION, "")},
            token=None, idempotency_key=None, event_time=None, expires_us=None, priority=0,
            codec=None, system=True,
        )  # fmt: skip
        await self._bus.engine.publish(draft)

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

"""Desks: the administrative side of a bus, one small object for each noun."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.bus.publishing import When, when_us
from penstock.core.catalogue import Route
from penstock.core.entry import TopicSpec
from penstock.core.schedule import parse_every
from penstock.engines import request as ask
from penstock.model.codec import codecs
from penstock.model.topic import check_topic

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

SEAL_LOOK_S = 0.02  # a little is sealed in milliseconds, a full journal file in seconds
# Desks have a method `list`, which would hide the type in their annotations.
Rows = list[Any]
RouteRows = list[Route]


class Desk:
    """What all desks share: a bus to ask."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def _actor(self) -> str:
        return self._bus.identity.subject


class Topics(Desk):
    """Topics: `bus.topics`.

    >>> import asyncio, penstock
    >>> async def names() -> list[str]:
    ...     async with penstock.connect("mem:") as bus:
    ...         await bus.topics.create("orders.created", partitions=2)
    ...         return [topic.name for topic in await bus.topics.list()]
    >>> asyncio.run(names())
    ['orders.created']
    """

    async def list(self, *, system: bool = False) -> Rows:
        """All topics; with `system`, the bus's own too."""
        return await self._bus.ask(ask.ListTopics(system))  # type: ignore[no-any-return]

    async def info(self, name: str) -> Any:
        """One topic with its partitions."""
        return await self._bus.ask(ask.DescribeTopic(name))

    async def create(
        self,
        name: str,
        *,
        partitions: int = 1,
        retention_age_s: float | None = None,
        retention_bytes: int | None = None,
        write_once: bool | None = None,
    ) -> Any:
        """Make a topic before anybody publishes to it."""
        if write_once is not None:
            self._bus.need("write-once")
        check_topic(name)
        spec = TopicSpec(partitions, retention_age_s, retention_bytes, write_once)
        return await self._bus.ask(ask.CreateTopic(name, spec))

    async def configure(
        self,
        name: str,
        *,
        retention_age_s: float | None = None,
        retention_bytes: int | None = None,
        write_once: bool | None = None,
    ) -> Any:
        """Change the retention of a topic; what is left out stays as it is."""
        if write_once is not None:
            self._bus.need("write-once")
        return await self._bus.ask(
            ask.ConfigureTopic(
                name, None, retention_age_s, retention_bytes, write_once, self._actor
            )
        )

    async def grow(self, name: str, partitions: int) -> Any:
        """Add partitions; keys move by consistent hashing."""
        self._bus.need("grow-partitions")
        return await self._bus.ask(ask.ConfigureTopic(name, partitions, actor=self._actor))

    async def seal(self) -> None:
        """Bring what is stored now from the journal into Parquet segments; returns when it is there.

        The log does this by itself when a journal file is full or `journal.roll_after_s` old.
        """
        info = await self._bus.ask(ask.Seal(actor=self._actor))
        pause_s = SEAL_LOOK_S
        while info.sealed_to < info.before:
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
            info = await self._bus.ask(ask.Seal(info.before, self._actor))

    async def delete(self, name: str) -> None:
        """Remove a topic and its events; refused and audited when it is write-once."""
        await self._bus.ask(ask.DeleteTopic(name, self._actor))


class Groups(Desk):
    """Consumer groups: `bus.groups`."""

    async def list(self) -> Rows:
        """All groups with their lag."""
        return await self._bus.ask(ask.ListGroups())  # type: ignore[no-any-return]

    async def info(self, name: str) -> Any:
        """One group with its lanes."""
        return await self._bus.ask(ask.DescribeGroup(name))

    async def reset(self, name: str, to: When, *, topic: str | None = None) -> Any:
        """Read again from "earliest", "latest", an offset (int), a datetime or how long ago ("2h")."""
        self._bus.need("group-reset")
        place = self._bus.place(to)
        return await self._bus.ask(ask.ResetGroup(name, place, topic, self._actor))

    async def delete(self, name: str) -> None:
        """Forget a group and where it was."""
        await self._bus.ask(ask.DeleteGroup(name, self._actor))


class DeadLetters(Desk):
    """Dead letters: `bus.dead_letters` (row T8).

    Changes name an actor for the audit trail; a broker that was shown a token knows it by itself.
    """

    async def list(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        everything: bool = False,
        offset: int = 0,
    ) -> Rows:
        """Dead letters, newest first; `everything` shows those that were replayed, too."""
        wanted = ask.ListDead(consumer, topic, tenant, limit, everything, offset)
        return await self._bus.ask(wanted)  # type: ignore[no-any-return]

    async def inspect(self, id: str) -> Any:
        """One dead letter with its payload, key and headers."""
        return await self._bus.ask(ask.InspectDead(id))

    async def replay(
        self,
        ids: Sequence[str],
        *,
        target_consumer: str,
        target_topic: str,
        reason: str,
        confirm: str,
        actor: str = "",
    ) -> Any:
        """Give dead letters back to their consumer; restate the exact target, and confirm="REPLAY"."""
        self._bus.need("dead-letter-replay")
        return await self._bus.ask(
            ask.ReplayDead([*ids], target_consumer, target_topic, actor, reason, confirm)
        )

    async def dead_letter(
        self,
        id: str,
        *,
        consumer: str,
        topic: str,
        payload: bytes | None = None,
        reason: str,
        actor: str = "",
    ) -> Any:
        """Quarantine a message by hand: an event of the log by its id, or a payload given here."""
        self._bus.need("dead-letter-replay")
        return await self._bus.ask(ask.Quarantine(id, consumer, topic, actor, reason, payload))

    async def purge(self, ids: Sequence[str], *, reason: str, confirm: str, actor: str = "") -> Any:
        """Take dead letters out of the view, with confirm="PURGE"; the log keeps the events."""
        self._bus.need("dead-letter-replay")
        return await self._bus.ask(ask.PurgeDead([*ids], actor, reason, confirm))


class Audit(Desk):
    """The audit chain: `bus.audit` (row T9)."""

    async def query(
        self,
        *,
        message: str | None = None,
        actor: str | None = None,
        since: When | None = None,
        until: When | None = None,
        operation: str | None = None,
    ) -> Rows:
        """Operator actions, oldest first."""
        self._bus.need("audit")
        now_us = self._bus.wall_us()
        return await self._bus.ask(  # type: ignore[no-any-return]
            ask.QueryAudit(
                message,
                actor,
                None if since is None else when_us(since, now_us),
                None if until is None else when_us(until, now_us),
                operation,
            )
        )

    async def verify(self) -> Any:
        """Whether the chain is whole; names the first broken link when it is not."""
        self._bus.need("audit")
        return await self._bus.ask(ask.VerifyAudit())

    async def export(self, folder: str) -> Any:
        """Copy the chain, with a signed manifest, to a folder."""
        self._bus.need("audit")
        return await self._bus.ask(ask.ExportAudit(folder))


class Routes(Desk):
    """The route catalogue: `bus.routes` (row T2)."""

    async def list(self) -> RouteRows:
        """All routes."""
        self._bus.need("routes")
        return await self._bus.ask(ask.ListRoutes())  # type: ignore[no-any-return]

    async def put(self, route: Route) -> None:
        """Add a route, or replace the one with its pattern and destination."""
        self._bus.need("routes")
        await self._bus.ask(ask.PutRoute(route, self._actor))

    async def remove(self, pattern: str, destination: str) -> None:
        """Drop a route."""
        self._bus.need("routes")
        await self._bus.ask(ask.RemoveRoute(pattern, destination, self._actor))

    async def enable(self, pattern: str, destination: str) -> None:
        """Let a route work."""
        await self._switch(pattern, destination, enabled=True)

    async def disable(self, pattern: str, destination: str) -> None:
        """Keep a route without letting it work."""
        await self._switch(pattern, destination, enabled=False)

    async def _switch(self, pattern: str, destination: str, *, enabled: bool) -> None:
        self._bus.need("routes")
        await self._bus.ask(ask.SwitchRoute(pattern, destination, enabled, self._actor))

    async def resolve(self, topic: str, tenant: str | None = None) -> RouteRows:
        """The routes an event of a topic takes, in order."""
        self._bus.need("routes")
        return await self._bus.ask(ask.ResolveRoute(topic, tenant))  # type: ignore[no-any-return]


class Schedules(Desk):
    """Recurring events: `bus.schedules` (row T7)."""

    async def list(self) -> Rows:
        """All recurring events."""
        self._bus.need("schedules")
        return await self._bus.ask(ask.ListSchedules())  # type: ignore[no-any-return]

    async def put(
        self,
        id: str,
        topic: str,
        value: Any,
        *,
        cron: str | None = None,
        every: str | float | None = None,
        headers: dict[str, str] | None = None,
        codec: str | None = None,
    ) -> Any:
        """Publish a value again and again: cron="*/5 * * * *" or every="90s"."""
        self._bus.need("schedules")
        name = codec or ("raw" if isinstance(value, bytes) else self._bus.settings.media.codec)
        payload = codecs.get(name).encode(value)
        every_us = None if every is None else parse_every(every)
        return await self._bus.ask(
            ask.PutSchedule(id, topic, payload, name, headers or {}, cron, every_us, self._actor)
        )

    async def remove(self, id: str) -> None:
        """Stop publishing a recurring event."""
        self._bus.need("schedules")
        await self._bus.ask(ask.RemoveSchedule(id, self._actor))

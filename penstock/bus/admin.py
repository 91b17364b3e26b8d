"""The administrative API of a bus: `bus.topics`, `bus.groups`, `bus.dead_letters` and so on.

There is one class for each noun. Its methods check their values and let the engine answer the request;
`Bus.need` refuses what the engine cannot do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.audit import AuditRecord, State, Verdict
from penstock.core.entry import MAX_TOPIC_PARTITIONS, TopicSpec
from penstock.core.routes import Route
from penstock.core.schedule import Definition, parse_every
from penstock.core.state import DeadLetter
from penstock.engines import requests as ask
from penstock.engines.requests import DeadLetterDetail, Effect, GroupInfo, Outcome, TopicInfo
from penstock.log.audit_reader import AuditManifest
from penstock.model.codec import codecs
from penstock.model.parameter import (
    MAX_NAME_CHARACTERS,
    Moment,
    Seconds,
    Size,
    count,
    made,
    moment_us,
    place,
    text,
)
from penstock.model.topic import check_topic

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

# First pause between two requests whether sealing is done; it doubles up to a second. A few events are
# sealed in milliseconds, a full journal file in seconds.
SEAL_LOOK_S = 0.02
# The classes have a method `list`, which would hide the type in their annotations.
TopicInfos = list[TopicInfo]
GroupInfos = list[GroupInfo]
Letters = list[DeadLetter]
Records = list[AuditRecord]
RouteRows = list[Route]
Definitions = list[Definition]

TRUTHS = {"True": True, "False": False}
"""The audit chain keeps texts and numbers only: these texts are its booleans."""
BOOLEANS = ("enabled", "write_once")
"""The fields of audit records that hold booleans."""


class AdminApi:
    """The base of these classes: a bus whose engine answers requests."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def _actor(self) -> str:
        return self._bus.identity.subject


class Topics(AdminApi):
    """Topics: `bus.topics`.

    >>> import asyncio, penstock
    >>> async def names() -> list[str]:
    ...     async with penstock.connect("mem:") as bus:
    ...         await bus.topics.create("orders.created", partitions=2)
    ...         return [topic.name for topic in await bus.topics.list()]
    >>> asyncio.run(names())
    ['orders.created']
    """

    async def list(self, *, system: bool = False) -> TopicInfos:
        """All topics; with `system`, the topics of the bus itself, too."""
        found: TopicInfos = await self._bus.ask(ask.ListTopics(system))
        return found

    async def info(self, name: str) -> TopicInfo:
        """One topic with its partitions."""
        found: TopicInfo = await self._bus.ask(ask.DescribeTopic(name))
        return found

    async def create(
        self,
        name: str,
        *,
        partitions: int = 1,
        retention_age_s: Seconds | None = None,
        retention_bytes: Size | None = None,
        write_once: bool | None = None,
    ) -> TopicInfo:
        """Make a topic before its first publish."""
        check_topic(name)
        spec = made(TopicSpec, partitions, retention_age_s, retention_bytes, write_once)
        if write_once is not None:
            self._bus.need("write-once")
        found: TopicInfo = await self._bus.ask(ask.CreateTopic(name, spec))
        return found

    async def configure(
        self,
        name: str,
        *,
        retention_age_s: Seconds | None = None,
        retention_bytes: Size | None = None,
        write_once: bool | None = None,
    ) -> TopicInfo:
        """Change the retention of a topic; values that are left out stay the same."""
        wanted = made(
            ask.ConfigureTopic,
            name,
            None,
            retention_age_s,
            retention_bytes,
            write_once,
            self._actor,
        )
        if write_once is not None:
            self._bus.need("write-once")
        found: TopicInfo = await self._bus.ask(wanted)
        return found

    async def grow(self, name: str, partitions: int) -> TopicInfo:
        """Add partitions; keys move by consistent hashing."""
        wanted = count("partitions", partitions, least=1, most=MAX_TOPIC_PARTITIONS)
        self._bus.need("grow-partitions")
        found: TopicInfo = await self._bus.ask(ask.ConfigureTopic(name, wanted, actor=self._actor))
        return found

    async def seal(self) -> None:
        """Move all stored events from the journal into Parquet segments; returns when they are there.

        The log does this by itself when a journal file is full or `journal.roll_after_s` old.
        """
        info = await self._bus.ask(ask.Seal(actor=self._actor))
        pause_s = SEAL_LOOK_S
        while info.sealed_to < info.before:
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)
            info = await self._bus.ask(ask.Seal(info.before, self._actor))

    async def delete(self, name: str, *, confirm: str = "", dry_run: bool = False) -> Effect:
        """Remove a topic and its events, with confirm="DELETE"; refused and audited when it is write-once.

        `dry_run` changes nothing, needs no confirmation and returns the effect that it would have.
        """
        request = ask.DeleteTopic(name, self._actor, confirm, dry_run)
        return await self._bus.ask(request)  # type: ignore[no-any-return]


class Groups(AdminApi):
    """Consumer groups: `bus.groups`."""

    async def list(self) -> GroupInfos:
        """All groups with their lag."""
        found: GroupInfos = await self._bus.ask(ask.ListGroups())
        return found

    async def info(self, name: str) -> GroupInfo:
        """One group with its lanes."""
        found: GroupInfo = await self._bus.ask(ask.DescribeGroup(name))
        return found

    async def reset(
        self,
        name: str,
        to: Moment,
        *,
        topic: str | None = None,
        confirm: str = "",
        dry_run: bool = False,
    ) -> GroupInfo:
        """Move a group, with confirm="RESET", to "earliest", "latest", "offset:42", a time or how long ago ("2h").

        `dry_run` changes nothing, needs no confirmation and returns the group as it would be.
        """
        where = place("to", to, self._bus.wall_us())
        self._bus.need("group-reset")
        found: GroupInfo = await self._bus.ask(
            ask.ResetGroup(name, where, topic, self._actor, confirm, dry_run)
        )
        return found

    async def delete(self, name: str, *, confirm: str = "", dry_run: bool = False) -> Effect:
        """Delete a group and its position, with confirm="DELETE"; `dry_run` returns the effect only."""
        request = ask.DeleteGroup(name, self._actor, confirm, dry_run)
        return await self._bus.ask(request)  # type: ignore[no-any-return]


class DeadLetters(AdminApi):
    """Dead letters: `bus.dead_letters`.

    Changes name an actor for the audit trail; a broker takes the actor from the token instead, if it
    was shown one.
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
    ) -> Letters:
        """Dead letters, newest first; with `everything`, also the replayed ones."""
        wanted = ask.ListDead(consumer, topic, tenant, limit, everything, offset)
        found: Letters = await self._bus.ask(wanted)
        return found

    async def inspect(self, id: str) -> DeadLetterDetail:
        """One dead letter with its payload, key and headers."""
        found: DeadLetterDetail = await self._bus.ask(ask.InspectDead(id))
        return found

    async def replay(
        self,
        ids: Sequence[str],
        *,
        target_consumer: str,
        target_topic: str,
        reason: str,
        confirm: str = "",
        actor: str = "",
        dry_run: bool = False,
    ) -> Outcome:
        """Deliver dead letters to their consumer again; restate the exact target, and confirm="REPLAY".

        `dry_run` changes nothing, needs no confirmation and returns the outcome for each.
        """
        self._bus.need("dead-letter-replay")
        found: Outcome = await self._bus.ask(
            made(
                ask.ReplayDead, ids, target_consumer, target_topic, actor, reason, confirm, dry_run
            )
        )
        return found

    async def dead_letter(
        self,
        id: str,
        *,
        consumer: str,
        topic: str,
        payload: bytes | None = None,
        reason: str,
        actor: str = "",
    ) -> DeadLetter:
        """Quarantine a message by hand: an event of the log by its id, or a payload given here."""
        self._bus.need("dead-letter-replay")
        found: DeadLetter = await self._bus.ask(
            ask.Quarantine(id, consumer, topic, actor, reason, payload)
        )
        return found

    async def purge(
        self,
        ids: Sequence[str],
        *,
        reason: str,
        confirm: str = "",
        actor: str = "",
        dry_run: bool = False,
    ) -> Outcome:
        """Remove dead letters from the list, with confirm="PURGE"; the log keeps the events.

        `dry_run` changes nothing, needs no confirmation and returns the outcome for each.
        """
        self._bus.need("dead-letter-replay")
        found: Outcome = await self._bus.ask(
            made(ask.PurgeDead, ids, actor, reason, confirm, dry_run)
        )
        return found


class Audit(AdminApi):
    """The audit chain: `bus.audit`."""

    async def query(
        self,
        *,
        message: str | None = None,
        actor: str | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        operation: str | None = None,
    ) -> Records:
        """Operator actions, oldest first."""
        self._bus.need("audit")
        now_us = self._bus.wall_us()
        found: Records = await self._bus.ask(
            ask.QueryAudit(
                message,
                actor,
                None if since is None else moment_us("since", since, now_us),
                None if until is None else moment_us("until", until, now_us),
                operation,
            )
        )
        return [_with_booleans(record) for record in found]

    async def verify(self) -> Verdict:
        """Check that the chain is whole; the verdict names the first broken link when it is not."""
        self._bus.need("audit")
        found: Verdict = await self._bus.ask(ask.VerifyAudit())
        return found

    async def export(self, folder: str) -> AuditManifest:
        """Copy the chain, with a signed manifest, to a folder."""
        self._bus.need("audit")
        found: AuditManifest = await self._bus.ask(ask.ExportAudit(folder))
        return found


class Routes(AdminApi):
    """The route catalogue: `bus.routes`."""

    async def list(self) -> RouteRows:
        """All routes."""
        self._bus.need("routes")
        found: RouteRows = await self._bus.ask(ask.ListRoutes())
        return found

    async def put(self, route: Route) -> None:
        """Add a route, or replace the route with the same pattern and destination."""
        self._bus.need("routes")
        await self._bus.ask(ask.PutRoute(route, self._actor))

    async def remove(
        self, pattern: str, destination: str, *, confirm: str = "", dry_run: bool = False
    ) -> Effect:
        """Remove a route, with confirm="REMOVE"; `dry_run` returns the topics it would no longer lead."""
        self._bus.need("routes")
        request = ask.RemoveRoute(pattern, destination, self._actor, confirm, dry_run)
        return await self._bus.ask(request)  # type: ignore[no-any-return]

    async def enable(self, pattern: str, destination: str) -> None:
        """Put a route into effect."""
        await self._switch(pattern, destination, enabled=True)

    async def disable(self, pattern: str, destination: str) -> None:
        """Keep a route without effect."""
        await self._switch(pattern, destination, enabled=False)

    async def _switch(self, pattern: str, destination: str, *, enabled: bool) -> None:
        self._bus.need("routes")
        await self._bus.ask(ask.SwitchRoute(pattern, destination, enabled, self._actor))

    async def resolve(self, topic: str, tenant: str | None = None) -> RouteRows:
        """The routes that an event of a topic takes, in order."""
        self._bus.need("routes")
        found: RouteRows = await self._bus.ask(ask.ResolveRoute(topic, tenant))
        return found


class Schedules(AdminApi):
    """Recurring events: `bus.schedules`."""

    async def list(self) -> Definitions:
        """All recurring events."""
        self._bus.need("schedules")
        found: Definitions = await self._bus.ask(ask.ListSchedules())
        return found

    async def put(
        self,
        id: str,
        topic: str,
        value: Any,
        *,
        cron: str | None = None,
        every: Seconds | None = None,
        headers: Mapping[str, str] | None = None,
        codec: str | None = None,
    ) -> Definition:
        """Publish a value repeatedly: cron="*/5 * * * *" or every="90s"."""
        self._bus.need("schedules")
        if codec is not None:
            codec = text("codec", codec, least=1, most=MAX_NAME_CHARACTERS)
        name = codec or ("raw" if isinstance(value, bytes) else self._bus.settings.media.codec)
        payload = codecs.get(name).encode(value)
        every_us = None if every is None else parse_every(every)
        found: Definition = await self._bus.ask(
            made(
                ask.PutSchedule,
                id,
                topic,
                payload,
                name,
                {} if headers is None else headers,
                cron,
                every_us,
                self._actor,
            )
        )
        return found

    async def remove(self, id: str, *, confirm: str = "", dry_run: bool = False) -> Effect:
        """Stop publishing a recurring event, with confirm="REMOVE"; `dry_run` returns the effect only."""
        self._bus.need("schedules")
        found: Effect = await self._bus.ask(ask.RemoveSchedule(id, self._actor, confirm, dry_run))
        return found


def _with_booleans(record: AuditRecord) -> AuditRecord:
    """A record with True and False in place of their texts."""
    prior, result = _booleans(record.prior), _booleans(record.result)
    return msgspec.structs.replace(record, prior=prior, result=result)


def _booleans(state: State) -> State:
    return {
        name: TRUTHS.get(str(value), value) if name in BOOLEANS else value
        for name, value in state.items()
    }

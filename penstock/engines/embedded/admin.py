"""Answers to everything that operators ask of an embedded engine.

`Administration` has one method for each request of `penstock.engines.requests`: topics, groups, dead
letters, audit, routes, schedules. Every change leaves an audit record, in the same journal entry, with
what was in force before and after. Requests that destroy something need a confirmation word, and with
`dry_run` only tell what they would do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.core import state as journal_state
from penstock.core.admission import ADMITTED
from penstock.core.audit import State
from penstock.core.entry import (
    Entry,
    RecurringGone,
    RecurringPut,
    TopicGone,
    TopicPut,
    TopicSpec,
    as_recovered,
)
from penstock.core.routes import Route
from penstock.core.schedule import Definition
from penstock.engines import requests as ask
from penstock.engines.embedded.dead_letters import newest_letters
from penstock.engines.embedded.lost_events import lag_behind, unreadable
from penstock.engines.engine import Request
from penstock.engines.requests import (
    Effect,
    GroupEffect,
    GroupInfo,
    LaneInfo,
    PartitionInfo,
    SealInfo,
    TopicInfo,
    check_consumer,
    check_content,
    check_word,
    group_info,
    known_partition,
    known_topic,
    retention_of,
)
from penstock.log.disk import RealDisk
from penstock.log.event_log import EventLog
from penstock.log.retention import check_change
from penstock.model.errors import (
    AlreadyExists,
    DiskFull,
    InvalidInput,
    PenstockError,
    Refused,
    StorageError,
    UnknownRoute,
    UnknownSchedule,
    Unsupported,
    WriteOnce,
)
from penstock.model.settings import Settings
from penstock.model.topic import check_topic, is_system, tenant_of

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

E = TypeVar("E", bound=PenstockError)

SHOWN_CHARACTERS = 1_000  # of one text in an audit record, which has a bound itself
SHOWN_TOPICS = 1_000  # that a route leads: a pattern can match every topic there is
LOCAL = "local"  # the actor where clients have no names


class Administration:
    """Answers administrative requests, each with a method of its own."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._answers: dict[type[Request], Callable[[Any], Awaitable[Any]]] = {
            ask.ListTopics: self._list_topics,
            ask.DescribeTopic: self._describe_topic,
            ask.CreateTopic: self._create_topic,
            ask.ConfigureTopic: self._configure_topic,
            ask.DeleteTopic: self._delete_topic,
            ask.Seal: self._seal,
            ask.FindOffset: self._find_offset,
            ask.AdmitReplay: self._admit_replay,
            ask.ListGroups: self._list_groups,
            ask.DescribeGroup: self._describe_group,
            ask.ResetGroup: self._reset_group,
            ask.DeleteGroup: self._delete_group,
            ask.ListDead: self._list_dead,
            ask.InspectDead: self._inspect_dead,
            ask.ReplayDead: self._replay_dead,
            ask.Quarantine: self._quarantine,
            ask.PurgeDead: self._purge_dead,
            ask.QueryAudit: self._query_audit,
            ask.VerifyAudit: self._verify_audit,
            ask.ExportAudit: self._export_audit,
            ask.ListRoutes: self._list_routes,
            ask.PutRoute: self._put_route,
            ask.RemoveRoute: self._remove_route,
            ask.SwitchRoute: self._switch_route,
            ask.ResolveRoute: self._resolve_route,
            ask.ListSchedules: self._list_schedules,
            ask.PutSchedule: self._put_schedule,
            ask.RemoveSchedule: self._remove_schedule,
            ask.Pressure: self._pressure,
        }

    async def answer(self, request: Request) -> Any:
        """Dispatch one request."""
        handler = self._answers.get(type(request))
        if handler is None:
            name = type(request).__name__
            raise Unsupported(f"this engine does not know {name}", request=name)
        return await handler(request)

    async def _refused(self, error: E, actor: str, operation: str, target: str) -> E:
        """Put a forbidden attempt into the audit chain before it is refused."""
        entry = self._engine.audit.entry(
            actor, operation, target, {}, {"status": "refused", "code": error.code}
        )
        await self._engine.publisher.write_entries([entry])
        return error

    # -- topics and replay ---------------------------------------------------------------------

    def _spec(self, topic: str) -> TopicSpec:
        return known_topic(self._engine.state, topic)

    def _topic_info(self, topic: str) -> TopicInfo:
        return topic_info(self._engine.state, self._engine.log, self._engine.settings, topic)

    async def _list_topics(self, request: ask.ListTopics) -> list[TopicInfo]:
        names = sorted(self._engine.state.topics)
        return [self._topic_info(name) for name in names if request.system or not is_system(name)]

    async def _describe_topic(self, request: ask.DescribeTopic) -> TopicInfo:
        return self._topic_info(request.topic)

    async def _create_topic(self, request: ask.CreateTopic) -> TopicInfo:
        check_topic(request.topic, system=request.spec.ephemeral)
        if request.topic in self._engine.state.topics:
            raise AlreadyExists(f"topic {request.topic!r} exists already", topic=request.topic)
        spec = as_recovered(TopicPut(request.topic, request.spec)).spec
        retention_of(spec, self._engine.settings.retention)  # raises when it is impossible
        await self._engine.topics.ensure(request.topic, spec)
        return self._topic_info(request.topic)

    async def _configure_topic(self, request: ask.ConfigureTopic) -> TopicInfo:
        engine, topic = self._engine, request.topic
        old = self._spec(topic)
        new = TopicSpec(
            partitions=old.partitions if request.partitions is None else request.partitions,
            retention_age_s=_first_given(request.retention_age_s, old.retention_age_s),
            retention_bytes=_first_given(request.retention_bytes, old.retention_bytes),
            write_once=_first_given(request.write_once, old.write_once),
            ephemeral=old.ephemeral,
            floors=old.floors,
        )
        new = as_recovered(TopicPut(topic, new)).spec
        if new.partitions < old.partitions:
            raise InvalidInput(
                f"{topic!r} has {old.partitions} partitions; they can be added, never removed",
                topic=topic,
            )
        try:
            general = engine.settings.retention
            check_change(retention_of(old, general), retention_of(new, general), topic=topic)
        except WriteOnce as error:
            raise await self._refused(error, request.actor, "topic.configure", topic) from None
        prior, result = _topic_state(old), _topic_state(new)
        audit = self._engine.audit.entry(request.actor, "topic.configure", topic, prior, result)

        def entries(_: Any) -> list[Entry]:
            engine.state.topics[topic] = new
            lanes = engine.groups.topic_made(topic, old.partitions, new.partitions)
            return [TopicPut(topic, new), *lanes, audit]

        await engine.publisher.submit([], when_taken=entries)
        engine.maintenance.wake()  # a topic at its limit may have room now
        return self._topic_info(topic)

    async def _delete_topic(self, request: ask.DeleteTopic) -> Effect:
        engine, topic = self._engine, request.topic
        spec = self._spec(topic)
        if not (request.dry_run or spec.ephemeral):
            check_word("DELETE", request.confirm)
        forbidden: Refused | None = None
        if is_system(topic) and not spec.ephemeral:
            forbidden = Refused(
                f"{topic!r} is the bus's own and stays; nothing was changed. Dead letters go by "
                "`dlq purge`",
                topic=topic,
            )
        elif retention_of(spec, engine.settings.retention).write_once:
            forbidden = WriteOnce(
                f"{topic!r} is write-once: its events stay until their retention is over. Nothing "
                "was changed, and attempts are in the audit log",
                topic=topic,
            )
        if forbidden is not None:
            if not request.dry_run:
                forbidden = await self._refused(forbidden, request.actor, "topic.delete", topic)
            raise forbidden
        effect = self._loss_of_topic(topic, done=not request.dry_run)
        if request.dry_run:
            return effect
        audit = self._engine.audit.entry(
            request.actor, "topic.delete", topic, _topic_state(spec), {"status": "deleted"}
        )

        def entries(_: Any) -> list[Entry]:
            ends = tuple(engine.log.partition(topic, p).next for p in range(spec.partitions))
            engine.topics.forget(topic)
            return [TopicGone(topic, ends), audit]

        await engine.publisher.submit([], when_taken=entries)
        engine.maintenance.wake()
        return effect

    def _loss_of_topic(self, topic: str, *, done: bool) -> Effect:
        """The effect of deleting a topic: its events are lost, and the groups that read it lose lag."""
        parts = self._topic_info(topic).partitions
        groups: list[GroupEffect] = []
        for reader in self._engine.dispatcher.readers_of(topic):
            if not self._engine.state.groups[reader.name].spec.ephemeral:
                lanes = self._group_info(reader.name).lanes
                left = sum(lane.lag for lane in lanes if lane.topic != topic)
                groups.append(GroupEffect(reader.name, sum(lane.lag for lane in lanes), left))
        return Effect(
            "topic.delete", topic, done, sum(each.end_offset - each.first_offset for each in parts),
            sum(each.sealed_bytes for each in parts), [topic],
            sorted(groups, key=lambda group: group.name),
        )  # fmt: skip

    async def _find_offset(self, request: ask.FindOffset) -> int:
        known_partition(self._engine.state, request.topic, request.partition)
        log = self._engine.log
        return await self._engine.runtime.read(
            log.find_time, request.topic, request.partition, request.time_us
        )

    async def _admit_replay(self, request: ask.AdmitReplay) -> None:
        now_s = self._engine.runtime.now()
        decision = self._engine.admission.admit_replay(request.tenant, now_s)
        if decision is not ADMITTED:
            raise decision.error()

    # -- groups --------------------------------------------------------------------------------

    def _group_info(self, name: str) -> GroupInfo:
        engine = self._engine
        group = engine.groups.known(name)
        log_group, machine = engine.groups.logs.get(name), engine.dispatcher.groups.get(name)
        lanes: list[LaneInfo] = []
        members: list[str] = []
        lost = engine.unread.lost.get(name, {})
        if log_group is not None:
            for place, cursor in sorted(group.cursors.items()):
                end, lag = lag_behind(engine.log, place, cursor)
                lanes.append(LaneInfo(*place, cursor, end, 0, lag, lost.get(place, 0)))
            members = sorted(log_group.readers)
        elif machine is not None:
            owed, gone = machine.ledgers(engine.runtime.now()), unreadable(engine.log, machine)
            for place, lane in sorted(machine.lanes.items()):
                waiting = owed[place].outstanding()
                lag = lane.end - lane.cursor + waiting - gone.get(place, 0)
                lanes.append(
                    LaneInfo(*place, lane.cursor, lane.end, waiting, lag, lost.get(place, 0))
                )
            members = sorted(machine.members)
        return group_info(name, group.spec, members, lanes, engine.groups.routed(name))

    async def _list_groups(self, request: ask.ListGroups) -> list[GroupInfo]:
        return [self._group_info(name) for name in sorted(self._engine.state.groups)]

    async def _describe_group(self, request: ask.DescribeGroup) -> GroupInfo:
        return self._group_info(request.group)

    async def _reset_group(self, request: ask.ResetGroup) -> GroupInfo:
        before = self._group_info(request.group)
        if request.dry_run:
            return self._moved(before, request)
        check_word("RESET", request.confirm)
        prior: State = {f"{lane.topic}/{lane.partition}": lane.cursor for lane in before.lanes}
        audit = self._engine.audit.entry(
            request.actor, "group.reset", request.group, prior, {"to": request.to}
        )
        await self._engine.groups.reset(request.group, request.to, request.topic, [audit])
        return self._group_info(request.group)

    def _moved(self, before: GroupInfo, request: ask.ResetGroup) -> GroupInfo:
        """A group as it would be after a reset, which ends its leases."""
        offsets = self._engine.groups.offsets(request.group, request.to, request.topic)
        lanes: list[LaneInfo] = []
        for lane in before.lanes:
            offset = offsets.get((lane.topic, lane.partition))
            if offset is not None:
                lag = max(0, lane.end - offset)
                lane = LaneInfo(lane.topic, lane.partition, offset, lane.end, 0, lag)
            lanes.append(lane)
        spec = self._engine.groups.known(request.group).spec
        return group_info(request.group, spec, before.members, lanes)

    async def _delete_group(self, request: ask.DeleteGroup) -> Effect:
        spec = self._engine.groups.known(request.group).spec
        if not (request.dry_run or spec.ephemeral):
            check_word("DELETE", request.confirm)
        lag = self._group_info(request.group).lag
        groups = [GroupEffect(request.group, lag, 0)]
        effect = Effect("group.delete", request.group, not request.dry_run, groups=groups)
        if request.dry_run:
            return effect
        extra: list[Entry] = []
        if not spec.ephemeral:
            prior: State = {"mode": spec.mode, "patterns": " ".join(spec.patterns)}
            extra = [
                self._engine.audit.entry(
                    request.actor, "group.delete", request.group, prior, {"status": "deleted"}
                )
            ]
        await self._engine.groups.remove(request.group, extra)
        return effect

    # -- dead letters and audit ----------------------------------------------------------------

    async def _list_dead(self, request: ask.ListDead) -> Any:
        return newest_letters(self._engine.state.dead.values(), request)

    async def _inspect_dead(self, request: ask.InspectDead) -> Any:
        return await self._engine.dead_letter_store.inspect(request.id)

    async def _replay_dead(self, request: ask.ReplayDead) -> Any:
        return await self._engine.dead_letter_store.replay(
            request.ids, request.target_consumer, request.target_topic, request.actor,
            request.reason, request.confirm, request.dry_run,
        )  # fmt: skip

    async def _quarantine(self, request: ask.Quarantine) -> Any:
        return await self._engine.dead_letter_store.quarantine(
            request.id,
            request.consumer,
            request.topic,
            request.payload,
            request.actor,
            request.reason,
        )

    async def _purge_dead(self, request: ask.PurgeDead) -> Any:
        return await self._engine.dead_letter_store.purge(
            request.ids, request.actor, request.reason, request.confirm, request.dry_run
        )

    async def _query_audit(self, request: ask.QueryAudit) -> Any:
        engine = self._engine
        await engine.audit.settled()
        return await engine.runtime.read(
            lambda: list(
                engine.audit.log.records(
                    message=request.message, actor=request.actor, since_us=request.since_us,
                    until_us=request.until_us, operation=request.operation,
                )
            )
        )  # fmt: skip

    async def _verify_audit(self, request: ask.VerifyAudit) -> Any:
        await self._engine.audit.settled()
        return await self._engine.runtime.read(self._engine.audit.log.verify)

    async def _export_audit(self, request: ask.ExportAudit) -> Any:
        engine = self._engine
        await engine.audit.settled()
        target = RealDisk(request.folder)
        target.make_dir("")
        at_us = engine.runtime.wall_us()
        return await engine.runtime.read(lambda: engine.audit.log.export(target, at_us=at_us))

    # -- routes --------------------------------------------------------------------------------

    async def _list_routes(self, request: ask.ListRoutes) -> Any:
        return list(self._engine.routes)

    async def _put_route(self, request: ask.PutRoute) -> None:
        route = request.route
        if route.enabled:
            self._check_destination(route)
        before = self._route(route.pattern, route.destination)
        self._engine.routes.put(route)
        await self._routes_changed(
            request.actor, "route.put", route.pattern, route.destination, before
        )

    async def _remove_route(self, request: ask.RemoveRoute) -> Effect:
        ends = (request.pattern, request.destination)
        route = self._engine.routes.get(*ends)
        if not request.dry_run:
            check_word("REMOVE", request.confirm)
        led = [
            topic
            for topic in sorted(self._engine.groups.selected([request.pattern]))
            if route in self._engine.routes.resolve(topic, self._engine.topics.tenant_for(topic))
        ]
        target = " -> ".join(ends)
        effect = Effect("route.remove", target, not request.dry_run, topics=led[:SHOWN_TOPICS])
        if request.dry_run:
            return effect
        before = self._engine.routes.remove(*ends)
        await self._routes_changed(
            request.actor, "route.remove", request.pattern, request.destination, before
        )
        return effect

    async def _switch_route(self, request: ask.SwitchRoute) -> None:
        routes, ends = self._engine.routes, (request.pattern, request.destination)
        before = routes.get(*ends)
        if request.enabled:
            self._check_destination(before)
        switch = routes.enable if request.enabled else routes.disable
        switch(*ends)
        word = "route.enable" if request.enabled else "route.disable"
        await self._routes_changed(request.actor, word, *ends, before)

    def _check_destination(self, route: Route) -> None:
        """Raise unless a route leads to a group that exists or can be made for it."""
        if route.group not in self._engine.state.groups:
            check_consumer(route.group)

    def _route(self, pattern: str, destination: str) -> Route | None:
        with suppress(UnknownRoute):
            return self._engine.routes.get(pattern, destination)
        return None

    async def _routes_changed(
        self, actor: str, operation: str, pattern: str, destination: str, before: Route | None
    ) -> None:
        engine, route = self._engine, self._route(pattern, destination)
        after = _route_state(route, gone="removed")
        after["version"] = engine.routes.version
        try:
            audit = engine.audit.entry(
                actor, operation, f"{pattern} -> {destination}", _route_state(before), after
            )
            await engine.save_routes()
            await engine.publisher.submit(
                [], when_taken=lambda _: [*engine.groups.routes_changed(pattern, route), audit]
            )
        except PenstockError:
            await self._undo_route(pattern, destination, before)
            raise

    async def _undo_route(self, pattern: str, destination: str, before: Route | None) -> None:
        """Take back a change of the catalogue that could not be stored."""
        if before is not None:
            self._engine.routes.put(before)
        elif self._route(pattern, destination) is not None:
            self._engine.routes.remove(pattern, destination)
        with suppress(PenstockError):  # the file may still hold the catalogue of before
            await self._engine.save_routes()

    async def _resolve_route(self, request: ask.ResolveRoute) -> Any:
        check_topic(request.topic)
        tenant = request.tenant or self._engine.topics.tenant_for(request.topic)
        return self._engine.routes.resolve(request.topic, tenant)

    # -- schedules -----------------------------------------------------------------------------

    async def _list_schedules(self, request: ask.ListSchedules) -> list[Definition]:
        return self._engine.state.schedule.recurring.definitions()

    async def _put_schedule(self, request: ask.PutSchedule) -> Definition:
        engine, recurring = self._engine, self._engine.state.schedule.recurring
        check_topic(request.topic)
        check_content(request.payload, request.headers, engine.settings.limits)
        wanted = Definition(
            id=request.id, topic=request.topic, payload=request.payload, codec=request.codec,
            headers=request.headers, cron=request.cron, every_us=request.every_us,
        )  # fmt: skip
        before: Definition | None = None
        with suppress(UnknownSchedule):
            before = recurring.get(request.id)
        definition = recurring.put(wanted, engine.runtime.wall_us())
        try:
            audit = engine.audit.entry(
                request.actor or LOCAL, "schedule.put", request.id, _schedule_state(before),
                _schedule_state(definition),
            )  # fmt: skip
            put = RecurringPut(request.id, msgspec.msgpack.encode(definition))
            await engine.publisher.write_entries([put, audit])
        except PenstockError:
            recurring.undo(definition, before)
            raise
        engine.scheduler.wake()
        return definition

    async def _remove_schedule(self, request: ask.RemoveSchedule) -> Effect:
        engine = self._engine
        before = engine.state.schedule.recurring.get(request.id)
        done, topics = not request.dry_run, [before.topic]
        effect = Effect("schedule.remove", request.id, done, topics=topics)
        if request.dry_run:
            return effect
        check_word("REMOVE", request.confirm)
        audit = engine.audit.entry(
            request.actor or LOCAL, "schedule.remove", request.id, _schedule_state(before),
            _schedule_state(None, gone="removed"),
        )  # fmt: skip
        await engine.publisher.write_entries([RecurringGone(request.id), audit])
        return effect

    # -- sealing and pressure ------------------------------------------------------------------

    async def _seal(self, request: ask.Seal) -> SealInfo:
        engine, before = self._engine, request.before
        if not engine.settings.sealing.enabled:
            raise Unsupported(
                "sealing.enabled is off here, so events stay in the journal; nothing was done. Turn it on "
                "and open the bus again"
            )
        if before is None:
            before = engine.journal.position
            engine.journal.close_file()
            audit = engine.audit.entry(request.actor, "journal.seal", "journal", {}, {})
            await engine.publisher.write_entries([audit])
            if engine.journal.base < before:
                raise DiskFull(
                    "no room for another journal file, so this one cannot be closed; nothing was sealed. "
                    "Free some space or lower retention",
                    retry_after_s=1.0,
                )
            engine.maintenance.wake()
        sealed_to = engine.log.manifest.sealed_to
        if engine.maintenance.problem is not None and sealed_to < before:
            raise StorageError(
                f"sealing fails: {engine.maintenance.problem}. Nothing is lost; it is tried again"
            )
        return SealInfo(before, sealed_to)

    async def _pressure(self, request: ask.Pressure) -> dict[str, Any]:
        engine = self._engine
        written = engine.journal.written_bytes + engine.maintenance.bytes_out
        return {
            "commits": engine.commits.commits,
            "journal_bytes": engine.journal.written_bytes,
            "backlog_bytes": engine.sealing_backlog.backlog_bytes,
            "segment_bytes": engine.log.manifest.total_bytes,
            "sealed_in_bytes": engine.maintenance.bytes_in,
            "sealed_out_bytes": engine.maintenance.bytes_out,
            "write_amplification": written / max(1, engine.journal.written_bytes),
            "problem": engine.maintenance.problem,
        }


def _first_given(first: Any, second: Any) -> Any:
    return second if first is None else first


def _topic_state(spec: TopicSpec) -> State:
    return {
        "partitions": spec.partitions,
        "retention_age_s": None if spec.retention_age_s is None else str(spec.retention_age_s),
        "retention_bytes": spec.retention_bytes,
        "write_once": None if spec.write_once is None else str(spec.write_once),
    }


def _route_state(route: Route | None, gone: str | None = None) -> State:
    if route is None:
        return {"status": gone}
    return {
        "type": route.type,
        "priority": route.priority,
        "enabled": str(route.enabled),
        "tenant": route.tenant,
    }


def _schedule_state(definition: Definition | None, gone: str | None = None) -> State:
    if definition is None:
        return {"status": gone}
    return {
        "topic": definition.topic,
        "cron": None if definition.cron is None else definition.cron[:SHOWN_CHARACTERS],
        "every_us": definition.every_us,
        "codec": definition.codec,
        "headers": msgspec.json.encode(definition.headers).decode()[:SHOWN_CHARACTERS],
        "payload_bytes": len(definition.payload),
        "payload_sha256": hashlib.sha256(definition.payload).hexdigest(),
    }


def topic_info(
    state: journal_state.State, log: EventLog, settings: Settings, topic: str
) -> TopicInfo:
    """One topic with its partitions."""
    spec = known_topic(state, topic)
    retention = retention_of(spec, settings.retention)
    partitions = []
    for partition in range(spec.partitions):
        first, end = log.bounds(topic, partition)
        sealed = sum(each.event_bytes for _, each in log.manifest.ranges(topic, partition))
        partitions.append(PartitionInfo(partition, first, end, sealed))
    return TopicInfo(
        topic, tenant_of(topic) or settings.identity.tenant, partitions, retention.age_s,
        retention.topic_max_bytes, retention.write_once,
    )  # fmt: skip


def recorded_group(name: str, group: journal_state.GroupState, log: EventLog) -> GroupInfo:
    """A group by the entries of the journal: without members, which the writing process knows."""
    lanes: list[LaneInfo] = []
    for place, cursor in sorted(group.cursors.items()):
        end, lag = lag_behind(log, place, cursor)
        lanes.append(LaneInfo(*place, cursor, end, 0, lag))
    for place, ledger in sorted(group.ledgers.items()):
        end, lag = lag_behind(log, place, ledger.high)
        first = log.bounds(*place)[0]
        kept = sum(max(0, run.stop - max(run.start, first)) for run in ledger.open())
        lanes.append(LaneInfo(*place, ledger.high, end, ledger.outstanding(), lag + kept))
    return group_info(name, group.spec, [], lanes)

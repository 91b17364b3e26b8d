"""Administration: the answers to everything operators ask of an embedded engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from penstock.core.admission import ADMITTED
from penstock.core.audit import State
from penstock.core.entry import (
    Entry,
    TopicGone,
    TopicPut,
    TopicSpec,
)
from penstock.core.takeup import ledgers as owed
from penstock.engines import request as ask
from penstock.engines.deadletters import newest_letters
from penstock.engines.engine import Request
from penstock.engines.operator_rules import check_actor
from penstock.engines.standing_orders import StandingOrders
from penstock.engines.views import (
    GroupInfo,
    LaneInfo,
    TopicInfo,
    group_info,
    known_partition,
    known_topic,
    retention_of,
    topic_info,
)
from penstock.log.disk import RealDisk
from penstock.log.retention import check_change
from penstock.model.errors import (
    AlreadyExists,
    InvalidInput,
    PenstockError,
    Refused,
    Unsupported,
    WriteOnce,
)
from penstock.model.topic import check_topic, is_system

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine

MAX_PARTITIONS = 1_024  # of one topic in one folder; more belongs on a cluster


class Administration:
    """Answers requests."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        orders = StandingOrders(engine)
        self._answers: dict[type[Request], Callable[[Any], Awaitable[Any]]] = {
            ask.ListTopics: self._list_topics,
            ask.DescribeTopic: self._describe_topic,
            ask.CreateTopic: self._create_topic,
            ask.ConfigureTopic: self._configure_topic,
            ask.DeleteTopic: self._delete_topic,
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
            ask.ListRoutes: orders.list_routes,
            ask.PutRoute: orders.put_route,
            ask.RemoveRoute: orders.remove_route,
            ask.SwitchRoute: orders.switch_route,
            ask.ResolveRoute: orders.resolve_route,
            ask.ListSchedules: orders.list_schedules,
            ask.PutSchedule: orders.put_schedule,
            ask.RemoveSchedule: orders.remove_schedule,
            ask.Pressure: self._pressure,
        }

    async def answer(self, request: Request) -> Any:
        """Dispatch one request."""
        handler = self._answers.get(type(request))
        if handler is None:
            name = type(request).__name__
            raise Unsupported(f"this engine does not know {name}", request=name)
        check_actor(getattr(request, "actor", None) or "")
        return await handler(request)

    async def _refused(
        self, error: PenstockError, actor: str, operation: str, target: str
    ) -> PenstockError:
        """A forbidden attempt goes into the audit chain before it is refused (row X5)."""
        entry = self._engine.audit.entry(
            actor, operation, target, {}, {"status": "refused", "code": error.code}
        )
        await self._engine.intake.write_entries([entry])
        return error

    # -- topics --------------------------------------------------------------------------------

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
        _check_partitions(request.spec.partitions)
        await self._engine.topics.ensure(request.topic, request.spec)
        return self._topic_info(request.topic)

    async def _configure_topic(self, request: ask.ConfigureTopic) -> TopicInfo:
        engine, topic = self._engine, request.topic
        old = self._spec(topic)
        new = TopicSpec(
            partitions=old.partitions if request.partitions is None else request.partitions,
            retention_age_s=_either(request.retention_age_s, old.retention_age_s),
            retention_bytes=_either(request.retention_bytes, old.retention_bytes),
            write_once=_either(request.write_once, old.write_once),
            ephemeral=old.ephemeral,
            floors=old.floors,
        )
        _check_partitions(new.partitions)
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
        prior, result = _plain(old), _plain(new)
        audit = self._engine.audit.entry(request.actor, "topic.configure", topic, prior, result)

        def entries(_: Any) -> list[Entry]:
            engine.state.topics[topic] = new
            lanes = engine.groups.topic_made(topic, old.partitions, new.partitions)
            return [TopicPut(topic, new), *lanes, audit]

        await engine.intake.submit([], when_taken=entries)
        return self._topic_info(topic)

    async def _delete_topic(self, request: ask.DeleteTopic) -> None:
        engine, topic = self._engine, request.topic
        spec = self._spec(topic)
        if is_system(topic) and not spec.ephemeral:
            own = Refused(
                f"{topic!r} is the bus's own and stays; nothing was changed. Dead letters go by "
                "`dlq purge`",
                topic=topic,
            )
            raise await self._refused(own, request.actor, "topic.delete", topic)
        if retention_of(spec, engine.settings.retention).write_once:
            error = WriteOnce(
                f"{topic!r} is write-once: its events stay until their retention is over. Nothing "
                "was changed, and the attempt is in the audit log",
                topic=topic,
            )
            raise await self._refused(error, request.actor, "topic.delete", topic)
        audit = self._engine.audit.entry(
            request.actor, "topic.delete", topic, _plain(spec), {"status": "deleted"}
        )

        def entries(_: Any) -> list[Entry]:
            ends = tuple(engine.log.partition(topic, p).next for p in range(spec.partitions))
            engine.topics.forget(topic)
            return [TopicGone(topic, ends), audit]

        await engine.intake.submit([], when_taken=entries)
        engine.housekeeper.wake()

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
        log, machine = engine.groups.logs.get(name), engine.dispatcher.groups.get(name)
        lanes: list[LaneInfo] = []
        members: list[str] = []
        if log is not None:
            for (topic, partition), cursor in sorted(group.cursors.items()):
                end = engine.log.partition(topic, partition).end
                lanes.append(LaneInfo(topic, partition, cursor, end, 0, max(0, end - cursor)))
            members = sorted(log.readers)
        elif machine is not None:
            ledgers = owed(machine, engine.runtime.now())
            for (topic, partition), lane in sorted(machine.lanes.items()):
                open_events = ledgers[topic, partition].outstanding()
                lag = lane.end - lane.cursor + open_events
                lanes.append(LaneInfo(topic, partition, lane.cursor, lane.end, open_events, lag))
            members = sorted(machine.members)
        return group_info(name, group.spec, members, lanes, engine.groups.routed(name))

    async def _list_groups(self, request: ask.ListGroups) -> list[GroupInfo]:
        return [self._group_info(name) for name in sorted(self._engine.state.groups)]

    async def _describe_group(self, request: ask.DescribeGroup) -> GroupInfo:
        return self._group_info(request.group)

    async def _reset_group(self, request: ask.ResetGroup) -> GroupInfo:
        before = self._group_info(request.group)
        prior: State = {f"{lane.topic}/{lane.partition}": lane.cursor for lane in before.lanes}
        audit = self._engine.audit.entry(
            request.actor, "group.reset", request.group, prior, {"to": request.to}
        )
        await self._engine.groups.reset(request.group, request.to, request.topic, [audit])
        return self._group_info(request.group)

    async def _delete_group(self, request: ask.DeleteGroup) -> None:
        spec = self._engine.groups.known(request.group).spec
        extra: list[Entry] = []
        if not spec.ephemeral:
            prior: State = {"mode": spec.mode, "patterns": " ".join(spec.patterns)}
            extra = [
                self._engine.audit.entry(
                    request.actor, "group.delete", request.group, prior, {"status": "deleted"}
                )
            ]
        await self._engine.groups.remove(request.group, extra)

    # -- dead letters, audit -------------------------------------------------------------------

    async def _list_dead(self, request: ask.ListDead) -> Any:
        return newest_letters(self._engine.state.dead.values(), request)

    async def _inspect_dead(self, request: ask.InspectDead) -> Any:
        return await self._engine.graveyard.inspect(request.id)

    async def _replay_dead(self, request: ask.ReplayDead) -> Any:
        return await self._engine.graveyard.replay(
            request.ids, request.target_consumer, request.target_topic, request.actor,
            request.reason, request.confirm,
        )  # fmt: skip

    async def _quarantine(self, request: ask.Quarantine) -> Any:
        return await self._engine.graveyard.quarantine(
            request.id,
            request.consumer,
            request.topic,
            request.payload,
            request.actor,
            request.reason,
        )

    async def _purge_dead(self, request: ask.PurgeDead) -> Any:
        return await self._engine.graveyard.purge(
            request.ids, request.actor, request.reason, request.confirm
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

    async def _pressure(self, request: ask.Pressure) -> dict[str, Any]:
        engine = self._engine
        written = engine.journal.written_bytes + engine.housekeeper.bytes_out
        return {
            "commits": engine.commits.commits,
            "journal_bytes": engine.journal.written_bytes,
            "backlog_bytes": engine.brake.backlog_bytes,
            "segment_bytes": engine.log.manifest.total_bytes,
            "sealed_in_bytes": engine.housekeeper.bytes_in,
            "sealed_out_bytes": engine.housekeeper.bytes_out,
            "write_amplification": written / max(1, engine.journal.written_bytes),
            "problem": engine.housekeeper.problem,
        }


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _plain(spec: TopicSpec) -> dict[str, Any]:
    return {
        "partitions": spec.partitions,
        "retention_age_s": None if spec.retention_age_s is None else str(spec.retention_age_s),
        "retention_bytes": spec.retention_bytes,
        "write_once": None if spec.write_once is None else str(spec.write_once),
    }


def _check_partitions(count: int) -> None:
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidInput(
            f"a topic has 1 to {MAX_PARTITIONS} partitions, not {count}", partitions=count
        )

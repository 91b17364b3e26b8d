"""Views: topics, groups, sessions and tenants as operators see them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.entry import GroupSpec, TopicSpec
from penstock.core.quota import TenantLimits
from penstock.core.state import DeadLetter, GroupState, State
from penstock.engines.unread import lag_behind
from penstock.log.eventlog import EventLog
from penstock.model.error import PenstockError
from penstock.model.errors import UnknownTopic
from penstock.model.settings import Retention, Settings
from penstock.model.topic import tenant_of


class Outcome(msgspec.Struct):
    """What became of each record of an operator's request."""

    requested: int
    done: int = 0
    failures: list[dict[str, str]] = []

    def failed(self, id: str, error: PenstockError) -> None:
        """One record could not be done."""
        self.failures.append({"id": id, "code": error.code, "message": error.message})


class DeadLetterDetail(msgspec.Struct):
    """A dead letter with the event itself."""

    record: DeadLetter
    payload: bytes
    key: bytes | None
    headers: dict[str, str]
    codec: str
    token: str


class PartitionInfo(msgspec.Struct):
    """One partition: the offsets it holds."""

    partition: int
    first_offset: int
    end_offset: int
    sealed_bytes: int


class TopicInfo(msgspec.Struct):
    """One topic: what is configured for it, and its partitions.

    >>> part = PartitionInfo(0, first_offset=3, end_offset=10, sealed_bytes=0)
    >>> TopicInfo("orders", "default", [part], None, None, False).events
    7
    """

    name: str
    tenant: str
    partitions: list[PartitionInfo]
    retention_age_s: float | None
    retention_bytes: int | None
    write_once: bool

    @property
    def events(self) -> int:
        """How many events are kept."""
        return sum(part.end_offset - part.first_offset for part in self.partitions)

    @property
    def sealed_bytes(self) -> int:
        """What its events take in segments."""
        return sum(part.sealed_bytes for part in self.partitions)


class SealInfo(msgspec.Struct):
    """How far sealing is."""

    before: int
    """Position in the journal up to which everything is to be sealed."""
    sealed_to: int
    """Position up to which everything is."""


class LaneInfo(msgspec.Struct):
    """How far a group is in one partition."""

    topic: str
    partition: int
    cursor: int
    end: int
    outstanding: int
    lag: int
    """Events it has still to settle and can still read."""
    lost: int = 0
    """Events that retention deleted before the group had read them, since the bus was opened."""


class GroupInfo(msgspec.Struct):
    """One consumer group, and how far it is in each partition.

    >>> GroupInfo("billing", "queue", "any", ["orders.*"], [], 0, 0, []).lag
    0
    """

    name: str
    mode: str
    order: str
    patterns: list[str]
    members: list[str]
    lag: int
    outstanding: int
    lanes: list[LaneInfo]
    lost: int = 0
    """Events that retention deleted before the group had read them, since the bus was opened."""
    routed: list[str] = []
    """Topics that routes lead to it, beside those of its patterns."""


class GroupEffect(msgspec.Struct, frozen=True):
    """What a destructive request does to one group."""

    name: str
    lag_before: int
    lag_after: int


class Effect(msgspec.Struct, frozen=True):
    """What a destructive request did or, asked with `dry_run`, would do."""

    operation: str
    target: str
    done: bool
    """False after a dry run: nothing was changed."""
    events: int = 0
    """Events that are deleted."""
    sealed_bytes: int = 0
    """What they take in sealed segments."""
    topics: list[str] = []
    """Topics that are deleted, or that the route or schedule no longer serves."""
    groups: list[GroupEffect] = []
    """Groups that lose events to read, or their place."""


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as operators see it."""

    id: str
    client: str
    tenant: str
    subject: str
    agent: str
    peer: str
    connected: bool
    resumable: bool
    silent_s: float
    subscriptions: list[str]
    groups: list[str]
    held: int
    """Events leased and not settled."""


class TenantInfo(msgspec.Struct, frozen=True):
    """One tenant."""

    tenant: str
    limits: TenantLimits
    stored_bytes: int
    ingress_events: int
    """Taken in and not yet durable."""
    refusals: dict[str, int]
    """By kind and limit, since the broker started."""


def known_topic(state: State, topic: str) -> TopicSpec:
    """A topic that exists."""
    spec = state.topics.get(topic)
    if spec is None:
        raise UnknownTopic(f"no topic {topic!r}; `penstock topic list` shows them", topic=topic)
    return spec


def known_partition(state: State, topic: str, partition: int) -> None:
    """Raise unless a topic exists and has this partition: looking for others would leave traces."""
    count = known_topic(state, topic).partitions
    if not 0 <= partition < count:
        raise UnknownTopic(
            f"{topic!r} has partitions 0 to {count - 1}, not {partition}", topic=topic
        )


def retention_of(spec: TopicSpec, general: Retention) -> Retention:
    """The retention of one topic: its own where it has one."""
    return msgspec.structs.replace(
        general,
        age_s=general.age_s if spec.retention_age_s is None else spec.retention_age_s,
        topic_max_bytes=general.topic_max_bytes
        if spec.retention_bytes is None
        else spec.retention_bytes,
        write_once=general.write_once if spec.write_once is None else spec.write_once,
    )


def topic_info(state: State, log: EventLog, settings: Settings, topic: str) -> TopicInfo:
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


def group_info(
    name: str,
    spec: GroupSpec,
    members: list[str],
    lanes: list[LaneInfo],
    routed: Sequence[str] = (),
) -> GroupInfo:
    """One group with its lanes."""
    return GroupInfo(
        name, spec.mode, spec.order, list(spec.patterns), members, sum(lane.lag for lane in lanes),
        sum(lane.outstanding for lane in lanes), lanes, sum(lane.lost for lane in lanes), list(routed),
    )  # fmt: skip


def recorded_group(name: str, group: GroupState, log: EventLog) -> GroupInfo:
    """A group as the journal tells of it: without members, which live in the writer's process."""
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

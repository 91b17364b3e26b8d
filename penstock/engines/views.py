"""Views: topics, groups, sessions and tenants as operators see them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.entry import GroupSpec, TopicSpec
from penstock.core.quota import TenantLimits
from penstock.core.state import GroupState, State
from penstock.log.eventlog import EventLog
from penstock.model.errors import UnknownTopic
from penstock.model.settings import Retention, Settings
from penstock.model.topic import tenant_of


class PartitionInfo(msgspec.Struct):
    """One partition: the offsets it holds."""

    partition: int
    first_offset: int
    end_offset: int
    sealed_bytes: int


class TopicInfo(msgspec.Struct):
    """One topic."""

    name: str
    tenant: str
    partitions: list[PartitionInfo]
    retention_age_s: float | None
    retention_bytes: int | None
    write_once: bool


class LaneInfo(msgspec.Struct):
    """How far a group is in one partition."""

    topic: str
    partition: int
    cursor: int
    end: int
    outstanding: int
    lag: int


class GroupInfo(msgspec.Struct):
    """One consumer group."""

    name: str
    mode: str
    order: str
    patterns: list[str]
    members: list[str]
    lag: int
    outstanding: int
    lanes: list[LaneInfo]
    routed: list[str] = []
    """Topics that routes lead to it, beside those of its patterns."""


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
        sum(lane.outstanding for lane in lanes), lanes, list(routed),
    )  # fmt: skip


def recorded_group(name: str, group: GroupState, log: EventLog) -> GroupInfo:
    """A group as the journal tells of it: without members, which live in the writer's process."""
    lanes: list[LaneInfo] = []
    for (topic, partition), cursor in sorted(group.cursors.items()):
        end = log.partition(topic, partition).end
        lanes.append(LaneInfo(topic, partition, cursor, end, 0, max(0, end - cursor)))
    for (topic, partition), ledger in sorted(group.ledgers.items()):
        end = log.partition(topic, partition).end
        open_events = ledger.outstanding()
        lag = max(0, end - ledger.high) + open_events
        lanes.append(LaneInfo(topic, partition, ledger.high, end, open_events, lag))
    return group_info(name, group.spec, [], lanes)

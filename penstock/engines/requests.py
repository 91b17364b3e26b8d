"""What can be asked of an engine: every administrative request, with the struct that answers it.

Requests and answers are plain structs, so a wire can carry them as they are. The type of a field says
how its value is converted and checked: `penstock.model.parameter.checked` does both at every door. The
command line, the admin API and the wire all send these requests, so they follow the same rules.

The order: topics, sealing, groups, dead letters, audit, routes, schedules, sessions and tenants. Then
`ANSWERS`, the table of requests and answers. Then functions for the engines that answer: checks that a
topic exists, the answers that state and log alone can give, and the rules for changes by hand. What
passes these rules stays in the journal and in the audit chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from penstock.core.admission import TenantLimits
from penstock.core.audit import AuditRecord, Verdict
from penstock.core.entry import GroupSpec, Partitions, RetentionBytes, TopicSpec
from penstock.core.routes import Route
from penstock.core.schedule import MAX_DURATION_US, MIN_EVERY_US, Definition
from penstock.core.state import DeadLetter, State
from penstock.engines.engine import Request
from penstock.log.audit_reader import AuditManifest
from penstock.model.errors import (
    ConfirmationNeeded,
    InvalidHeaders,
    InvalidInput,
    PayloadTooLarge,
    PenstockError,
    UnknownTopic,
)
from penstock.model.parameter import (
    MAX_ID_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_SKIP,
    Id,
    Ids,
    Name,
    Number,
    Partition,
    Span,
    count,
    engine_place,
    path,
    shown,
)
from penstock.model.settings import Limits, Retention

# -- changes --------------------------------------------------------------------------------------


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


class GroupEffect(msgspec.Struct, frozen=True):
    """What a destructive request does to one group."""

    name: str
    lag_before: int
    lag_after: int


class Outcome(msgspec.Struct):
    """What became of each record of an operator's request."""

    requested: int
    done: int = 0
    failures: list[dict[str, str]] = []

    def failed(self, id: str, error: PenstockError) -> None:
        """One record could not be done."""
        self.failures.append({"id": id, "code": error.code, "message": error.message})


# -- topics ---------------------------------------------------------------------------------------


class ListTopics(Request, frozen=True):
    """All topics."""

    system: bool = False


class DescribeTopic(Request, frozen=True):
    """One topic with its partitions."""

    topic: Name


class CreateTopic(Request, frozen=True):
    """Make a topic."""

    topic: Name
    spec: TopicSpec


class ConfigureTopic(Request, frozen=True):
    """Change what is configured for a topic; None leaves a setting as it is."""

    topic: Name
    partitions: Partitions | None = None
    retention_age_s: Span | None = None
    retention_bytes: RetentionBytes | None = None
    write_once: bool | None = None
    actor: str = "local"


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


class PartitionInfo(msgspec.Struct):
    """One partition: the offsets it holds."""

    partition: int
    first_offset: int
    end_offset: int
    sealed_bytes: int


class DeleteTopic(Request, frozen=True):
    """Remove a topic and its events."""

    topic: Name
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class FindOffset(Request, frozen=True):
    """The first offset appended at or after a time."""

    topic: Name
    partition: Partition
    time_us: Number


class AdmitReplay(Request, frozen=True):
    """Ask to start a replay; refused with ReplayLimited when a tenant does it too often."""

    tenant: str


# -- sealing and pressure -------------------------------------------------------------------------


class Seal(Request, frozen=True):
    """Close the journal file in use, so that what is in it is sealed; with `before`, ask how far that is."""

    before: Number | None = None
    actor: str = "local"


class SealInfo(msgspec.Struct):
    """How far sealing is."""

    before: int
    """Position in the journal up to which everything is to be sealed."""
    sealed_to: int
    """Position up to which everything is."""


class Pressure(Request, frozen=True):
    """How the engine is doing; a broker adds what keeps clients from publishing and which limits refuse."""


# -- groups ---------------------------------------------------------------------------------------


class ListGroups(Request, frozen=True):
    """All consumer groups."""


class DescribeGroup(Request, frozen=True):
    """One group with its lanes."""

    group: Name


class ResetGroup(Request, frozen=True):
    """Move a group: to "earliest", "latest", an offset ("offset:42") or a time ("time:MICROSECONDS")."""

    group: Name
    to: Annotated[str, engine_place]
    topic: Name | None = None
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


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


class DeleteGroup(Request, frozen=True):
    """Forget a group and its cursors."""

    group: Name
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


# -- dead letters ---------------------------------------------------------------------------------


class ListDead(Request, frozen=True):
    """Dead letters, newest first."""

    consumer: str | None = None
    topic: Name | None = None
    tenant: str | None = None
    limit: Annotated[int, partial(count, least=1, most=MAX_SKIP)] = 100
    everything: bool = False
    offset: Annotated[int, partial(count, most=MAX_SKIP)] = 0


class InspectDead(Request, frozen=True):
    """One dead letter with its payload."""

    id: Id


class DeadLetterDetail(msgspec.Struct):
    """A dead letter with the event itself."""

    record: DeadLetter
    payload: bytes
    key: bytes | None
    headers: dict[str, str]
    codec: str
    token: str


class ReplayDead(Request, frozen=True):
    """Give dead letters back to their consumer."""

    ids: Ids
    target_consumer: str
    target_topic: str
    actor: str
    reason: str
    confirm: str
    dry_run: bool = False


class Quarantine(Request, frozen=True):
    """Put a message among the dead letters by hand."""

    id: Id
    consumer: str
    topic: Name
    actor: str
    reason: str
    payload: bytes | None = None


class PurgeDead(Request, frozen=True):
    """Take dead letters out of the view."""

    ids: Ids
    actor: str
    reason: str
    confirm: str
    dry_run: bool = False


# -- audit ----------------------------------------------------------------------------------------


class QueryAudit(Request, frozen=True):
    """Operator actions."""

    message: str | None = None
    actor: str | None = None
    since_us: Number | None = None
    until_us: Number | None = None
    operation: str | None = None


class VerifyAudit(Request, frozen=True):
    """Whether the audit chain is whole."""


class ExportAudit(Request, frozen=True):
    """Copy the audit chain to a folder."""

    folder: Annotated[str, path]


# -- routes ---------------------------------------------------------------------------------------


class ListRoutes(Request, frozen=True):
    """The route catalogue."""


class PutRoute(Request, frozen=True):
    """Add or replace a route."""

    route: Route
    actor: str = "local"


class RemoveRoute(Request, frozen=True):
    """Drop a route."""

    pattern: Name
    destination: str
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class SwitchRoute(Request, frozen=True):
    """Enable or disable a route."""

    pattern: Name
    destination: str
    enabled: bool
    actor: str = "local"


class ResolveRoute(Request, frozen=True):
    """The routes an event of a topic takes."""

    topic: Name
    tenant: str | None = None


# -- schedules ------------------------------------------------------------------------------------


class ListSchedules(Request, frozen=True):
    """Recurring events."""


class PutSchedule(Request, frozen=True):
    """Define a recurring event."""

    id: Id
    topic: Name
    payload: bytes
    codec: str
    headers: dict[str, str] = {}
    cron: str | None = None
    every_us: Annotated[int, partial(count, least=MIN_EVERY_US, most=MAX_DURATION_US)] | None = None
    actor: str = ""


class RemoveSchedule(Request, frozen=True):
    """Drop a recurring event."""

    id: Id
    actor: str = ""
    confirm: str = ""
    dry_run: bool = False


# -- sessions and tenants of a broker -------------------------------------------------------------


class ListSessions(Request, frozen=True):
    """The sessions of a broker's clients."""


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


class ListTenants(Request, frozen=True):
    """The tenants of a broker: limits in force, and their use."""


class TenantInfo(msgspec.Struct, frozen=True):
    """One tenant."""

    tenant: str
    limits: TenantLimits
    stored_bytes: int
    ingress_events: int
    """Taken in and not yet durable."""
    refusals: dict[str, int]
    """By kind and limit, since the broker started."""


# -- which answer belongs to which request --------------------------------------------------------


ANSWERS: dict[type[Request], Any] = {
    ListTopics: list[TopicInfo],
    DescribeTopic: TopicInfo,
    CreateTopic: TopicInfo,
    ConfigureTopic: TopicInfo,
    DeleteTopic: Effect,
    Seal: SealInfo,
    FindOffset: int,
    AdmitReplay: None,
    ListGroups: list[GroupInfo],
    DescribeGroup: GroupInfo,
    ResetGroup: GroupInfo,
    DeleteGroup: Effect,
    ListDead: list[DeadLetter],
    InspectDead: DeadLetterDetail,
    ReplayDead: Outcome,
    Quarantine: DeadLetter,
    PurgeDead: Outcome,
    QueryAudit: list[AuditRecord],
    VerifyAudit: Verdict,
    ExportAudit: AuditManifest,
    ListRoutes: list[Route],
    PutRoute: None,
    RemoveRoute: Effect,
    SwitchRoute: None,
    ResolveRoute: list[Route],
    ListSchedules: list[Definition],
    PutSchedule: Definition,
    RemoveSchedule: Effect,
    ListSessions: list[SessionInfo],
    ListTenants: list[TenantInfo],
    Pressure: dict[str, Any],
}

REQUESTS: dict[str, type[Request]] = {kind.__name__: kind for kind in ANSWERS}

# These change nothing: they are safe to send again when the first answer was lost.
READ_ONLY = frozenset(
    {
        ListTopics, DescribeTopic, FindOffset, ListGroups, DescribeGroup,
        ListDead, InspectDead, QueryAudit, VerifyAudit, ListRoutes,
        ResolveRoute, ListSchedules, ListSessions, ListTenants, Pressure,
    }
)  # fmt: skip


# -- answers from state and log -------------------------------------------------------------------


def known_topic(state: State, topic: str) -> TopicSpec:
    """The specification of a topic; raises UnknownTopic when it does not exist."""
    spec = state.topics.get(topic)
    if spec is None:
        raise UnknownTopic(f"no topic {topic!r}; `penstock topic list` shows them", topic=topic)
    return spec


def known_partition(state: State, topic: str, partition: int) -> None:
    """Raise unless a topic exists and has this partition: asking the log for others would make them."""
    count = known_topic(state, topic).partitions
    if not 0 <= partition < count:
        raise UnknownTopic(
            f"{topic!r} has partitions 0 to {count - 1}, not {partition}", topic=topic
        )


def retention_of(spec: TopicSpec, general: Retention) -> Retention:
    """The retention of one topic: its own settings, else the general ones."""
    return msgspec.structs.replace(
        general,
        age_s=general.age_s if spec.retention_age_s is None else spec.retention_age_s,
        topic_max_bytes=general.topic_max_bytes
        if spec.retention_bytes is None
        else spec.retention_bytes,
        write_once=general.write_once if spec.write_once is None else spec.write_once,
    )


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


# -- rules for changes by hand --------------------------------------------------------------------


def signed(actor: str, reason: str) -> str:
    """The reason, as the audit trail keeps it; raises InvalidInput without an actor or a reason.

    >>> signed("ann", " fixed the bug ")
    'fixed the bug'
    """
    if not actor.strip():
        raise InvalidInput(
            "an operator's action needs an actor for the audit trail; nothing was changed. Only a "
            "token tells a broker who the actor is",
            field="actor",
        )
    reason = reason.strip()
    if not reason:
        raise InvalidInput(
            "the reason is empty, and the audit trail keeps one for every action; nothing was "
            "changed. Say why in a few words",
            field="reason",
        )
    return reason


def confirmed(word: str, confirm: str, actor: str, reason: str) -> str:
    """The reason, as `signed` returns it; raises unless the confirmation word is exactly right."""
    reason = signed(actor, reason)
    check_word(word, confirm)
    return reason


def check_word(word: str, confirm: str) -> None:
    """Raise ConfirmationNeeded unless a destructive request repeats its verb, in capitals."""
    if confirm != word:
        raise ConfirmationNeeded(
            f"this needs the word {word} and got {confirm!r}; nothing was changed. Repeat with "
            f"confirm={word!r}, on the command line --confirm {word}; dry_run=True, or --dry-run, "
            "shows what would happen",
            wanted=word,
        )


def check_id(id: str) -> None:
    """Raise InvalidInput for an id that no command could name."""
    # The command line separates ids by commas and strips them.
    fits = 0 < len(id) <= MAX_ID_CHARACTERS and id.isprintable()
    if not fits or "," in id or id != id.strip():
        raise InvalidInput(
            f"{shown(id)} is no id for a message: 1 to {MAX_ID_CHARACTERS} printable characters, "
            "without commas and without spaces around them; nothing was stored. Choose another",
            field="id",
        )


def check_consumer(name: str) -> None:
    """Raise InvalidInput for a name that no group has and none should get."""
    fits = 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
    if not fits or name.startswith("_") or any(each.isspace() or each == "," for each in name):
        raise InvalidInput(
            f"{shown(name)} is no consumer group, and no name for one: 1 to {MAX_NAME_CHARACTERS} "
            "printable characters without spaces and commas, not beginning with '_'; nothing was "
            "stored. `penstock group list` shows the groups",
            field="consumer",
        )


def check_content(payload: bytes, headers: Mapping[str, str], limits: Limits) -> None:
    """Raise what a publish of this would raise: it is not checked again when it is published."""
    if len(payload) > limits.max_payload_bytes:
        raise PayloadTooLarge(
            f"a payload of {len(payload)} bytes is over the limit of {limits.max_payload_bytes}; "
            "nothing was stored. Store it elsewhere and name a reference, or raise "
            "limits.max_payload_bytes",
            size_bytes=len(payload),
            limit_bytes=limits.max_payload_bytes,
        )
    size = sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())
    if len(headers) > limits.max_headers or size > limits.max_headers_bytes:
        raise InvalidHeaders(
            f"{len(headers)} headers of {size} bytes are over the limit of {limits.max_headers} and "
            f"{limits.max_headers_bytes} bytes; nothing was stored. Put the rest into the payload"
        )

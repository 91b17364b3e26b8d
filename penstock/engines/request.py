"""Administrative requests: every question and command an engine answers, as values.

They are plain structs so that a wire can carry them as they are. The type of a field says how its
value is converted and checked: `penstock.model.parameter.checked` does both, at every door.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from penstock.core.catalogue import Route
from penstock.core.entry import Partitions, RetentionBytes, TopicSpec
from penstock.core.schedule import MAX_DURATION_US, MIN_EVERY_US
from penstock.engines.engine import Request
from penstock.model.page import MAX_SKIP
from penstock.model.parameter import (
    Id,
    Ids,
    Name,
    Number,
    Partition,
    Span,
    count,
    engine_place,
    path,
)


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


class DeleteTopic(Request, frozen=True):
    """Remove a topic and its events."""

    topic: Name
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class Seal(Request, frozen=True):
    """Close the journal file in use, so that what is in it is sealed; with `before`, ask how far that is."""

    before: Number | None = None
    actor: str = "local"


class FindOffset(Request, frozen=True):
    """The first offset appended at or after a time."""

    topic: Name
    partition: Partition
    time_us: Number


class AdmitReplay(Request, frozen=True):
    """Ask to start a replay; refused with ReplayLimited when a tenant does it too often."""

    tenant: str


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


class DeleteGroup(Request, frozen=True):
    """Forget a group and its cursors."""

    group: Name
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


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


class ListSessions(Request, frozen=True):
    """The sessions of a broker's clients."""


class ListTenants(Request, frozen=True):
    """The tenants of a broker: limits in force, and their use."""


class Pressure(Request, frozen=True):
    """How the engine is doing; a broker adds what keeps clients from publishing and which limits refuse."""

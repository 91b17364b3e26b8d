"""Administrative requests: every question and command an engine answers, as values.

They are plain structs so that a wire can carry them as they are.
"""

from __future__ import annotations

from penstock.core.catalogue import Route
from penstock.core.entry import TopicSpec
from penstock.engines.engine import Request


class ListTopics(Request, frozen=True):
    """All topics."""

    system: bool = False


class DescribeTopic(Request, frozen=True):
    """One topic with its partitions."""

    topic: str


class CreateTopic(Request, frozen=True):
    """Make a topic."""

    topic: str
    spec: TopicSpec


class ConfigureTopic(Request, frozen=True):
    """Change what is configured for a topic; None leaves a setting as it is."""

    topic: str
    partitions: int | None = None
    retention_age_s: float | None = None
    retention_bytes: int | None = None
    write_once: bool | None = None
    actor: str = "local"


class DeleteTopic(Request, frozen=True):
    """Remove a topic and its events."""

    topic: str
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class FindOffset(Request, frozen=True):
    """The first offset appended at or after a time."""

    topic: str
    partition: int
    time_us: int


class AdmitReplay(Request, frozen=True):
    """Ask to start a replay; refused with ReplayLimited when a tenant does it too often."""

    tenant: str


class ListGroups(Request, frozen=True):
    """All consumer groups."""


class DescribeGroup(Request, frozen=True):
    """One group with its lanes."""

    group: str


class ResetGroup(Request, frozen=True):
    """Move a group: to "earliest", "latest", an offset ("offset:42") or a time ("time:MICROSECONDS")."""

    group: str
    to: str
    topic: str | None = None
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class DeleteGroup(Request, frozen=True):
    """Forget a group and its cursors."""

    group: str
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class ListDead(Request, frozen=True):
    """Dead letters, newest first."""

    consumer: str | None = None
    topic: str | None = None
    tenant: str | None = None
    limit: int = 100
    everything: bool = False
    offset: int = 0


class InspectDead(Request, frozen=True):
    """One dead letter with its payload."""

    id: str


class ReplayDead(Request, frozen=True):
    """Give dead letters back to their consumer."""

    ids: list[str]
    target_consumer: str
    target_topic: str
    actor: str
    reason: str
    confirm: str
    dry_run: bool = False


class Quarantine(Request, frozen=True):
    """Put a message among the dead letters by hand."""

    id: str
    consumer: str
    topic: str
    actor: str
    reason: str
    payload: bytes | None = None


class PurgeDead(Request, frozen=True):
    """Take dead letters out of the view."""

    ids: list[str]
    actor: str
    reason: str
    confirm: str
    dry_run: bool = False


class QueryAudit(Request, frozen=True):
    """Operator actions."""

    message: str | None = None
    actor: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    operation: str | None = None


class VerifyAudit(Request, frozen=True):
    """Whether the audit chain is whole."""


class ExportAudit(Request, frozen=True):
    """Copy the audit chain to a folder."""

    folder: str


class ListRoutes(Request, frozen=True):
    """The route catalogue."""


class PutRoute(Request, frozen=True):
    """Add or replace a route."""

    route: Route
    actor: str = "local"


class RemoveRoute(Request, frozen=True):
    """Drop a route."""

    pattern: str
    destination: str
    actor: str = "local"
    confirm: str = ""
    dry_run: bool = False


class SwitchRoute(Request, frozen=True):
    """Enable or disable a route."""

    pattern: str
    destination: str
    enabled: bool
    actor: str = "local"


class ResolveRoute(Request, frozen=True):
    """The routes an event of a topic takes."""

    topic: str
    tenant: str | None = None


class ListSchedules(Request, frozen=True):
    """Recurring events."""


class PutSchedule(Request, frozen=True):
    """Define a recurring event."""

    id: str
    topic: str
    payload: bytes
    codec: str
    headers: dict[str, str] = {}
    cron: str | None = None
    every_us: int | None = None
    actor: str = ""


class RemoveSchedule(Request, frozen=True):
    """Drop a recurring event."""

    id: str
    actor: str = ""
    confirm: str = ""
    dry_run: bool = False


class ListSessions(Request, frozen=True):
    """The sessions of a broker's clients."""


class ListTenants(Request, frozen=True):
    """The tenants of a broker: limits in force, and their use."""


class Pressure(Request, frozen=True):
    """How the engine is doing; a broker adds what keeps clients from publishing and which limits refuse."""

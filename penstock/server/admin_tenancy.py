"""Tenancy: which topics, groups, dead letters and audit records belong to which tenant.

A topic's name says whose it is: the fourth word of `orders.created.v1.acme`. Where a name has no
tenant the topic is open to all, and the bus's own tenant looks after it. A group is a tenant's
when everything it reads is.
"""

from __future__ import annotations

from penstock.core.audit import AuditRecord
from penstock.core.schedule import Definition
from penstock.core.state import DeadLetter
from penstock.engines.deadletters import dead_letter_topic
from penstock.engines.embedded import EmbeddedEngine
from penstock.engines.views import GroupInfo
from penstock.model.errors import UnknownDeadLetter
from penstock.model.topic import ANY_WORDS, is_system, is_wildcard, tenant_of

_DEAD_LETTERS = dead_letter_topic("")


class Tenancy:
    """What one tenant owns on an engine; an answer of False says no more than "not yours"."""

    def __init__(self, engine: EmbeddedEngine, tenant: str) -> None:
        self.tenant = tenant
        self._engine = engine

    def topic(self, name: str) -> bool:
        """A topic, by its name alone: it need not exist."""
        if is_system(name):
            return name == _DEAD_LETTERS + self.tenant
        return (tenant_of(name) or self._engine.settings.identity.tenant) == self.tenant

    def open_topic(self, name: str) -> bool:
        """A topic the tenant may look at: its own, or one whose name has no tenant."""
        return self.topic(name) or (not is_system(name) and tenant_of(name) is None)

    def pattern(self, pattern: str) -> bool:
        """A pattern that can never select a topic of anybody else."""
        if not is_wildcard(pattern):
            return self.topic(pattern)
        return ANY_WORDS not in pattern.split(".") and tenant_of(pattern) == self.tenant

    def group(self, group: GroupInfo) -> bool:
        """A group: by what it reads, or by its patterns while it reads nothing."""
        if group.lanes:
            return all(self.topic(lane.topic) for lane in group.lanes)
        return bool(group.patterns) and all(map(self.pattern, group.patterns))

    def letter(self, letter: DeadLetter) -> bool:
        """A dead letter: the tenant whose event it was."""
        return letter.tenant == self.tenant

    def letter_id(self, id: str) -> bool:
        """A dead letter by its id; one that does not exist is nobody's."""
        try:
            return self.letter(self._engine.graveyard.find(id))
        except UnknownDeadLetter:
            return False

    def schedule(self, definition: Definition) -> bool:
        """A recurring event: by the topic it is published to."""
        return self.topic(definition.topic)

    def record(self, record: AuditRecord) -> bool:
        """An audit record about something of the tenant; routes are the operator's of the bus."""
        match record.operation.partition(".")[0]:
            case "topic":
                return all(map(self.topic, record.targets))
            case "dlq":
                topic = record.prior.get("topic") or record.result.get("topic")
                return self.topic(str(topic)) or any(map(self.letter_id, record.targets))
            case "schedule":
                topics = [
                    each["topic"] for each in (record.prior, record.result) if "topic" in each
                ]
                return bool(topics) and all(self.topic(str(topic)) for topic in topics)
            case "group":
                places = [place.rpartition("/")[0] for place in record.prior if "/" in place]
                patterns = str(record.prior.get("patterns") or "").split()
                read = [*map(self.topic, places), *map(self.pattern, patterns)]
                return bool(read) and all(read)
        return False

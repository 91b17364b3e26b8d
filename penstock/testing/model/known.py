"""What an engine does not keep yet. The model does not hold these against it; take each out when it is mended."""

from __future__ import annotations

from typing import NamedTuple

ALL = frozenset({"mem", "folder", "broker"})


class Known(NamedTuple):
    """One promise that is not kept yet."""

    finding: str
    engines: frozenset[str]
    reason: str


KNOWN = (
    Known("B4", ALL, "priority and the order of a partition are lost for events that were on their way when"
          " their member left or the engine stopped, and priority where one of the lanes is read from files"),
    Known("B20", ALL, "an event that was never delivered cannot be made a dead letter by hand"),
    Known("M4", ALL, "an event that was made a dead letter by hand while it waited is owed again after a restart"),
    Known("M6", ALL, "a retry that was due before the engine stopped waits once more after each start"),
    Known("M5", frozenset({"broker"}), "after a restart a member is handed more than max_inflight events"),
    Known("M2", ALL, "idempotency keys and tokens of delayed events and of others do not know each other, and"
          " those of delayed events are known on all topics"),
)  # fmt: skip


def excused_on(engine: str) -> frozenset[str]:
    """The findings that are open on an engine."""
    return frozenset(each.finding for each in KNOWN if engine in each.engines)

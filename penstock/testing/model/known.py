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
    Known("B4", ALL, "priority is lost for events older than the group, after a restart, and when a member "
          "leaves that had them on their way"),
    Known("B21", frozenset({"folder"}), "a process that dies costs events an attempt that were on their way, and"
          " makes dead letters of them"),
    Known("M1", ALL, "subscribe(start=offset) that is refused, since the offset is gone, leaves its group"),
    Known("M2", ALL, "idempotency keys and tokens of delayed events and of others do not know each other, and"
          " those of delayed events are known on all topics"),
    Known("M4", ALL, "an event that was made a dead letter by hand while it waited is owed again after a restart"),
    Known("B20", ALL, "an event that was never delivered cannot be made a dead letter by hand"),
    Known("B16", ALL, "an event that expired on its way to a member is handed out;"
          " and the dead letter of an event that expired counts an attempt that nobody was given"),
)  # fmt: skip


def excused_on(engine: str) -> frozenset[str]:
    """The findings that are open on an engine."""
    return frozenset(each.finding for each in KNOWN if engine in each.engines)

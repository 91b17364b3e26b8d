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
    Known("M6", ALL, "a retry that was due before the engine stopped waits once more after each start"),
    Known("M5", frozenset({"broker"}), "after a restart a member is handed more than max_inflight events"),
    Known("M2", ALL, "the receipts of delayed events and of others under one key do not know each other"),
)  # fmt: skip


def excused_on(engine: str) -> frozenset[str]:
    """The findings that are open on an engine."""
    return frozenset(each.finding for each in KNOWN if engine in each.engines)

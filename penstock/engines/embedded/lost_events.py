"""Lost events: counts and logs events that retention deleted before a group had read them.

The lag of a group holds only events that it can still read, so nothing else tells of these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.core.lease import Run
from penstock.core.state import Place

if TYPE_CHECKING:
    from penstock.core.delivery import QueueGroup
    from penstock.engines.embedded.engine import EmbeddedEngine
    from penstock.log.event_log import EventLog

log = logging.getLogger("penstock.engines")

LOG_EVERY_S = 60.0
"""Between two lines about the same group: retention works every few seconds."""
SHOWN_TOPICS = 5
"""Topics named in one line; a group may read thousands."""


class LostEvents:
    """Events that groups lost to retention since the bus was opened, by group and partition."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.lost: dict[str, dict[Place, int]] = {}
        """Events deleted before a group had read them, by group and partition."""
        self._engine = engine
        self._logged: dict[str, tuple[float, int]] = {}
        """When each group was last in the log, and how many events it had lost by then."""

    def retained(self, before: Mapping[Place, int]) -> None:
        """Retention has deleted events: before that each partition began at the offset in `before`."""
        engine = self._engine
        for place, first in before.items():
            now_first = engine.log.bounds(*place)[0]
            if place[0] not in engine.state.topics:
                continue
            for reader in engine.dispatcher.readers_of(place[0]):
                lost = _lost(engine, reader.name, place, first, now_first)
                if lost:
                    known = self.lost.setdefault(reader.name, {})
                    known[place] = known.get(place, 0) + lost
        for name, losses in self.lost.items():
            self._warn(name, losses)

    def forget(self, name: str) -> None:
        """A group was deleted; the next of its name begins at zero."""
        self.lost.pop(name, None)
        self._logged.pop(name, None)

    def _warn(self, name: str, losses: Mapping[Place, int]) -> None:
        now, total = self._engine.runtime.now(), sum(losses.values())
        logged_at, logged = self._logged.get(name, (now - LOG_EVERY_S, 0))
        if total == logged or now - logged_at < LOG_EVERY_S:
            return
        self._logged[name] = (now, total)
        topics = sorted({topic for topic, _ in losses})
        log.warning(
            "retention deleted events that a group had not read",
            extra={
                "group": name, "events": total - logged, "topics": ", ".join(topics[:SHOWN_TOPICS]),
                "action": "add consumers, or keep events longer (retention.age_s, retention.max_bytes)",
            },
        )  # fmt: skip


def _lost(engine: EmbeddedEngine, name: str, place: Place, first: int, now_first: int) -> int:
    """How many events between an earlier and the present start of a partition a group had not read."""
    machine = engine.dispatcher.groups.get(name)
    if machine is None:
        cursor = engine.state.groups[name].cursors.get(place, now_first)
        return max(0, now_first - max(cursor, first))
    lane = machine.lanes.get(place)
    if lane is None:
        return 0
    lost = max(0, now_first - max(lane.cursor, first))
    for run in machine.waiting():
        if run.lane is lane:
            lost += _before(run, now_first) - _before(run, first)
    return lost


def _before(run: Run, offset: int) -> int:
    """How many events of a run lie before an offset."""
    return min(run.count, max(0, offset - run.start))


def unreadable(log: EventLog, machine: QueueGroup) -> dict[Place, int]:
    """Events that a group has still to deliver and retention has deleted, by partition."""
    found: dict[Place, int] = {}
    starts: dict[Place, int] = {}

    def count(place: Place, start: int, events: int) -> None:
        if not events or log.at_hand(*place, start):
            return
        if place not in starts:
            starts[place] = log.bounds(*place)[0]
        gone = min(events, starts[place] - start)
        if gone > 0:
            found[place] = found.get(place, 0) + gone

    for place, lane in machine.lanes.items():
        count(place, lane.cursor, lane.end - lane.cursor)
    for run in machine.waiting():
        count((run.lane.topic, run.lane.partition), run.start, run.count)
    return found


def lag_behind(log: EventLog, place: Place, cursor: int) -> tuple[int, int]:
    """The end of a partition, and how many events from a cursor on can still be read."""
    end = log.partition(*place).end
    first = cursor if log.at_hand(*place, cursor) else log.bounds(*place)[0]
    return end, max(0, end - max(cursor, first))

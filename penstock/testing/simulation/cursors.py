"""The oracle's view of log groups: nothing is skipped between commits, no commit is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.model.batch import EventBatch
    from penstock.testing.simulation.oracle import Oracle, Place
    from penstock.testing.simulation.plan import Group


class ReadSession:
    """One membership in a log group: what it got so far."""

    def __init__(self, version: int) -> None:
        self.next: dict[Place, int] = {}
        self.received: dict[Place, int] = {}
        self.version = version


class CursorWatch:
    """Judges what members of one log group read."""

    def __init__(self, group: Group, oracle: Oracle) -> None:
        self.group = group
        self.confirmed: dict[Place, int] = {}
        """Commits that returned."""
        self.tried: dict[Place, int] = {}
        """The highest commit anybody asked for."""
        self.version = 0
        self.moving = 0
        self._meanwhile: dict[Place, int] = {}
        self._oracle = oracle

    def session(self) -> ReadSession:
        """Somebody joins."""
        return ReadSession(self.version)

    def received(self, session: ReadSession, batch: EventBatch) -> None:
        """A member got a batch."""
        self._oracle.read(batch)
        place = (batch.topic, batch.partition)
        base = batch.base_offset
        if not self.moving and session.version == self.version:
            expected = session.next.get(place)
            first = self._oracle.firsts.get(place, 0)
            if base != expected:
                # A partition was given to this member: it begins at the group's cursor.
                low, high = self.confirmed.get(place, 0), self.tried.get(place, 0)
                if base < low:
                    self._oracle.fail(
                        "cursor-lost", f"{self.group.name} {place}: read at {base}, committed {low}"
                    )
                if base > max(high, first, expected or 0):
                    self._oracle.fail(
                        "skipped",
                        f"{self.group.name} {place}: read at {base}, cursor at most {high}",
                    )
        else:
            session.version = self.version
        session.next[place] = batch.end_offset
        session.received[place] = batch.end_offset

    def committing(self, session: ReadSession, held: set[Place]) -> dict[Place, int]:
        """A member is about to commit what it received of the partitions it still holds."""
        wanted = {place: at for place, at in session.received.items() if place in held}
        for place, offset in wanted.items():
            self.tried[place] = max(self.tried.get(place, 0), offset)
            if self.moving:
                self._meanwhile[place] = max(self._meanwhile.get(place, 0), offset)
        return wanted

    def committed(self, session: ReadSession, wanted: dict[Place, int]) -> None:
        """A commit returned."""
        if session.version != self.version or self.moving:
            return
        for place, offset in wanted.items():
            self.confirmed[place] = offset
        session.received = {}

    def began(self) -> None:
        """The process started again."""
        if self.moving:
            self.forget()
        self.moving = 0

    def forget(self, places: dict[Place, int] | None = None) -> None:
        """A reset to these places; None when nobody knows where to."""
        self.version += 1
        self.confirmed.clear()
        self.tried = dict.fromkeys(self._oracle.ends, 1 << 60) | (places or {})
        for place, offset in self._meanwhile.items():  # it may have been after the reset
            self.tried[place] = max(self.tried.get(place, 0), offset)
        self._meanwhile.clear()

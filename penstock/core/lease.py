"""Leases: the right of one member to work on a run of events, and the state of each of them.

`Lane` is a partition as a group sees it, `Run` are neighbours in it, `Member` is a consumer with its credit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.model.errors import AlreadySettled, DeliveryError, Fenced, LeaseExpired
from penstock.model.parameter import seconds as in_seconds

if TYPE_CHECKING:
    from penstock.core.admission import CreditWindow
    from penstock.core.delivery import QueueGroup

OUT = 0  # leased to a member, not settled: "dispatched" in docs/reference/delivery.md
ACKED = 1
NACKED = 2
EXPIRED = 3
REJECTED = 4
RETURNED = 5  # the member left
FENCED = 6  # the group was reset under it
STATES = ("dispatched", "acked", "nacked", "expired", "rejected", "returned", "fenced")


class Lane:
    """One partition as one group sees it."""

    __slots__ = ("cursor", "end", "known", "line", "looked_to", "partition", "topic", "unread", "urgent_to")  # fmt: skip

    def __init__(
        self, topic: str, partition: int, cursor: int, end: int, urgent_to: int = 0
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.cursor = cursor
        """The next offset that was never handed out."""
        self.end = end
        """Behind the last event that may be handed out."""
        self.known = 0
        """The group was given events before this once already; some of them may come back."""
        self.line: deque[Lane] | None = None
        """The line of lanes it is in, while it has events to hand out."""
        self.urgent_to = urgent_to
        """Behind the last event that may have a priority."""
        self.looked_to = 0
        """Behind the last event whose priority was compared with others."""
        self.unread = 0
        """Events that were never handed out, as its group has counted them."""

    @property
    def urgent(self) -> bool:
        """Whether events that were never handed out may have a priority."""
        return self.cursor < self.urgent_to

    def __repr__(self) -> str:
        return f"Lane({self.topic}/{self.partition} {self.cursor}..{self.end})"


class Run(NamedTuple):
    """Consecutive events of a lane with the same number of attempts behind them."""

    lane: Lane
    start: int
    count: int  # type: ignore[assignment]
    made: int

    def holds(self, lane: Lane, offset: int) -> bool:
        """Whether an event is one of them."""
        return self.lane is lane and self.start <= offset < self.start + self.count

    def without(self, lane: Lane, offset: int) -> list[Run]:
        """The rest, when one event is cut out."""
        if not self.holds(lane, offset):
            return [self]
        before = self._replace(count=offset - self.start)
        after = self._replace(start=offset + 1, count=self.start + self.count - offset - 1)
        return [part for part in (before, after) if part.count]


def check_span(name: str, seconds: object) -> None:
    """Raise InvalidInput when a delay or an extension is no length of time.

    >>> check_span("delay_s", 1.5)
    """
    if seconds is not None:
        in_seconds(name, seconds)


def cut(queue: deque[Run], limit: int) -> Run:
    """Take at most `limit` events from the front of a queue of runs."""
    run = queue.popleft()
    if run.count > limit:
        queue.appendleft(run._replace(start=run.start + limit, count=run.count - limit))
        run = run._replace(count=limit)
    return run


def runs(indices: list[int]) -> list[int]:
    """Start and count of each run of consecutive numbers; sorts them.

    >>> runs([7, 3, 4])
    [3, 2, 7, 1]
    """
    if not indices:
        return []
    indices.sort()
    found: list[int] = []
    first = previous = indices[0]
    for index in indices[1:]:
        if index != previous + 1:
            found += (first, previous + 1 - first)
            first = index
        previous = index
    return [*found, first, previous + 1 - first]


class Doomed(NamedTuple):
    """An event on its way to the dead letters."""

    lane: Lane
    offset: int
    attempts: int
    reason: str


class Member:
    """A consumer in a group, with the credit it gave."""

    __slots__ = ("away", "id", "inflight", "leases", "max_inflight", "paused", "window")

    def __init__(self, member_id: str, max_inflight: int) -> None:
        self.id = member_id
        self.max_inflight = max_inflight
        self.inflight = 0
        self.paused = False
        """It takes nothing at the moment, whatever its credit."""
        self.away = False
        """Its events were given to others: in a group with one active member, another one is active."""
        self.leases: dict[int, Lease] = {}
        self.window: CreditWindow | None = None
        """The limit it shares with its tenant's other consumers, if the tenant has one."""

    def ready(self, group: QueueGroup) -> bool:
        """Whether it takes more events: it and its tenant have credit left."""
        return not self.paused and self.inflight < self.max_inflight and self.room(group) > 0

    def room(self, group: QueueGroup, most: int = 1) -> int:
        """How many of `most` events its tenant's limit allows it now."""
        return most if self.window is None else min(most, self.window.room(group))

    def took(self, count: int) -> None:
        """It holds more events."""
        self.inflight += count
        if self.window is not None:
            self.window.held += count

    def gave(self, count: int) -> None:
        """It holds fewer events."""
        self.inflight -= count
        if self.window is not None:
            self.window.returned(count)


class Lease:
    """A run of events held by one member. Its number, the fence, only ever grows in a group."""

    __slots__ = (
        "attempt",
        "count",
        "counted",
        "deadlines",
        "dirty",
        "fence",
        "lane",
        "mark",
        "member",
        "open",
        "start",
        "states",
    )  # fmt: skip

    def __init__(self, fence: int, run: Run, member: Member) -> None:
        self.fence = fence
        self.lane = run.lane
        self.start = run.start
        self.count = run.count
        self.attempt = run.made + 1
        self.member = member
        self.states = bytearray(run.count)
        self.open = run.count
        self.deadlines: list[float] = []
        """When each event handed to the consumer so far must be settled; handed out in order."""
        self.dirty: list[int] = []
        """Acked since the last journal entry about this lease."""
        self.counted = True
        """False when no consumer was given any of it: then its end costs no attempt."""
        self.mark: MutableSequence[int] | None = None
        """Where to note, for the time after a crash, how far it was handed out."""

    def hand(self, index: int, deadline: float) -> None:
        """The consumer got an event; until then it cannot expire."""
        deadlines = self.deadlines
        if len(deadlines) < index:
            deadlines += [math.inf] * (index - len(deadlines))
        deadlines.append(deadline)

    def handed(self, index: int) -> bool:
        """Whether the consumer got an event."""
        return index < len(self.deadlines) and self.deadlines[index] < math.inf

    def expiring(self, now: float) -> list[int]:
        """Indices whose time is up."""
        states = self.states
        return [
            index
            for index, deadline in enumerate(self.deadlines)
            if deadline <= now and states[index] == OUT
        ]

    def next_deadline(self) -> float | None:
        """When the next event of this lease runs out, if any is being worked on."""
        states = self.states
        pending = [
            deadline
            for index, deadline in enumerate(self.deadlines)
            if states[index] == OUT and deadline < math.inf
        ]
        return min(pending) if pending else None

    def acked_runs(self) -> list[int]:
        """Start and count of each run acked since the last call."""
        dirty = self.dirty
        self.dirty = []
        if len(dirty) == self.count:
            return [self.start, self.count]
        found = runs(dirty)
        found[::2] = [self.start + first for first in found[::2]]
        return found

    def refusal(self, index: int) -> DeliveryError:
        """Why an event that is no longer out cannot be settled."""
        state = self.states[index]
        where = f"{self.lane.topic}/{self.lane.partition}/{self.start + index}"
        if state in (EXPIRED, RETURNED):
            return LeaseExpired(
                f"the lease on {where} ran out; the event is or will be delivered again. Make the "
                "effect idempotent, extend() long work, or raise lease_s",
                id=where,
                fence=self.fence,
            )
        if state == FENCED:
            return Fenced(
                f"the group was reset, lease {self.fence} on {where} no longer counts; drop the work",
                id=where,
                fence=self.fence,
            )
        return AlreadySettled(
            f"{where} was already {STATES[state]}; settle each delivery once",
            id=where,
            state=STATES[state],
        )

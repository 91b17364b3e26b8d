"""The oracle's view of queue groups: who was given what, how often, and what became of it.

What a crash may take is taken from docs/guide/durability.md: an attempt is durable before the event
is handed out; an ack, a nack or a reject is durable a commit later, so an event settled shortly
before a crash may come again, always with a higher attempt number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from penstock.model.errors import AlreadySettled, DeliveryError, Fenced, LeaseExpired
from penstock.model.topic import matches

if TYPE_CHECKING:
    from penstock.model.event import Event
    from penstock.testing.simulation.oracle import Oracle
    from penstock.testing.simulation.plan import Group

# An ack rides the next commit; under the slowest simulated disk it is durable after this long.
ACK_WINDOW_S = 10.0
GRAIN_S = 1e-6

OPEN, ACKED, DEAD = "open", "acked", "dead"
MAYBE = "maybe"  # acked in a transaction that has not returned

At = tuple[str, int, int]


class Track:
    """What one group was told about one event."""

    __slots__ = (
        "attempt",
        "count",
        "durable",
        "key",
        "leased_until",
        "life",
        "not_before",
        "revived",
        "settled_at",
        "state",
    )

    def __init__(self, key: bytes | None) -> None:
        self.revived = False
        self.key = key
        self.attempt = 0
        self.count = 0
        self.state = OPEN
        self.durable = False
        self.life = 0
        self.not_before = 0.0
        self.leased_until = 0.0
        self.settled_at = 0.0


class Held:
    """One delivery in the hands of a consumer."""

    __slots__ = ("at", "deadline", "earliest", "event", "life", "open", "track", "version", "watch")

    def __init__(self, watch: GroupWatch, at: At, event: Event, track: Track) -> None:
        self.watch = watch
        self.at = at
        self.event = event
        self.track = track
        self.life = watch.life
        self.version = watch.version
        self.deadline = 0.0
        self.earliest = 0.0
        self.open = True

    def in_doubt(self) -> None:
        """It is to be acked in a transaction; somebody else may have settled it already."""
        if self.track.state == OPEN:
            self.track.state = MAYBE

    def decided(self, *, acked: bool) -> None:
        """The transaction this was to be acked in has happened, or not."""
        if self.track.state == MAYBE:
            self.track.state, self.track.durable = (ACKED, True) if acked else (OPEN, False)


class GroupWatch:
    """Judges the deliveries of one queue group."""

    def __init__(self, group: Group, oracle: Oracle) -> None:
        self.group = group
        self.life = 0
        self.version = 0
        """Moves with every reset: handles from before are void."""
        self.moving = 0
        """Resets under way: nothing can be said about order and budgets."""
        self.full = False
        """The disk was full in this life: acks had to wait."""
        self.tracks: dict[At, Track] = {}
        self.floors: dict[tuple[str, int], int] = {}
        self.unplaced = False
        """Nobody knows the floors: the last life ended during a reset."""
        self.members: dict[str, float] = {}
        self.touched: set[At] = set()
        """Events that operators gave back, purged or took away: out of their order."""
        self.first_of: Callable[[tuple[str, int]], int] = lambda place: 0
        """What retention has left of a partition."""
        self._oracle = oracle
        self._flying: dict[tuple[str, int, bytes], dict[int, Held]] = {}
        self._firsts: dict[tuple[str, int, bytes], int] = {}
        self._unflushed: list[Track] = []

    def _fail(self, invariant: str, at: At, why: str) -> None:
        self._oracle.fail(invariant, f"group {self.group.name}, {at[0]}/{at[1]}/{at[2]}: {why}")

    # -- deliveries ----------------------------------------------------------------------------

    def delivered(self, member: str, event: Event, asked_at: float) -> Held:
        """A consumer was handed an event."""
        at = (event.topic, event.partition, event.offset)
        sent = self._oracle.read(event.batch.slice(event.index, event.index + 1))[0]
        now = self._oracle.now()
        track = self.tracks.get(at)
        if track is None:
            track = self.tracks[at] = Track(sent.key)
        if not self.moving:
            self._judge(at, event, track, now)
            if self.group.order == "key" and sent.key is not None:
                self._judge_key(at, sent.key, track, now)
            if self.group.order == "single" and member != min(
                self.members, key=self.members.__getitem__
            ):
                self._fail("single-active", at, f"went to {member}, members are {self.members}")
        if self.group.filter is not None:
            name, value = self.group.filter
            if event.headers.get(name) != value:
                self._fail("filter", at, f"headers {event.headers}")
        track.attempt, track.count = event.attempt, track.count + 1
        track.state, track.life, track.durable = OPEN, self.life, False
        track.not_before = 0.0  # that was for this delivery
        held = Held(self, at, event, track)
        held.earliest, held.deadline = asked_at + self.group.lease_s, now + self.group.lease_s
        track.leased_until = held.earliest
        if sent.key is not None:
            self._flying.setdefault((at[0], at[1], sent.key), {})[at[2]] = held
        self._oracle.note("deliver", f"{self.group.name} {at} #{event.attempt} to {member}")
        return held

    def _judge(self, at: At, event: Event, track: Track, now: float) -> None:
        limit = self.group.retry.max_attempts
        if not 1 <= event.attempt <= limit or track.count >= limit:
            self._fail(
                "attempts", at, f"attempt {event.attempt}, delivery {track.count + 1} of {limit}"
            )
        if event.attempt <= track.attempt:
            self._fail("attempt-repeated", at, f"attempt {event.attempt} after {track.attempt}")
        # A transaction that waits for longer than its leases last will be refused.
        waited = track.state == MAYBE and now >= track.leased_until - GRAIN_S
        if track.state != OPEN and not waited:
            if track.life == self.life:
                self._fail("settled-again", at, f"was {track.state} in this life and came again")
            if track.durable:
                self._fail("settled-again", at, f"was {track.state}, durably, and came again")
        if track.life == self.life and now < track.not_before - GRAIN_S:
            self._fail("retry-early", at, f"at {now}, not before {track.not_before}")

    def _judge_key(self, at: At, key: bytes, track: Track, now: float) -> None:
        slot = (at[0], at[1], key)
        for offset, held in self._flying.get(slot, {}).items():
            if offset == at[2] or held.track.state != OPEN or offset < self.first_of(at[:2]):
                continue
            if held.life == self.life and held.open and now < held.earliest:
                self._fail("key-order", at, f"{offset} of the same key is in flight")
            # Each crash may have cost an attempt that was leased and never handed out.
            spent = held.track.attempt + self.life - held.life >= self.group.retry.max_attempts
            if offset < at[2] and not (track.revived or held.track.revived or spent):
                self._fail("key-order", at, f"{offset} of the same key is not settled")
        if not track.count and not track.revived and at[2] < self._firsts.get(slot, -1):
            self._fail("key-order", at, f"{self._firsts[slot]} of the same key came first")
        self._firsts[slot] = max(self._firsts.get(slot, -1), at[2])

    # -- settling ------------------------------------------------------------------------------

    def settled(self, held: Held, state: str, delay_s: float | None = None) -> None:
        """A settle was accepted; `delay_s` belongs to a nack."""
        now = self._oracle.now()
        if held.version != self.version or held.life != self.life:
            self._fail("stale-settle", held.at, f"{state} accepted from before a reset or restart")
        if now > held.deadline + GRAIN_S:
            self._fail(
                "stale-settle", held.at, f"{state} accepted at {now}, lease ended {held.deadline}"
            )
        if not held.open:
            self._fail("stale-settle", held.at, f"{state} accepted after another settle")
        held.open = False
        track = held.track
        track.settled_at = now
        retry = self.group.retry
        if state == ACKED:
            track.state = ACKED
            self._unflushed.append(track)
        elif state == DEAD or retry.exhausted(track.attempt):
            track.state = DEAD
        else:
            delay = retry.delay_s(track.attempt) if delay_s is None else delay_s
            track.not_before = now + delay
        if track.state != OPEN:
            self.landed(held)

    def landed(self, held: Held) -> None:
        """An event is out of the way of the others of its key."""
        if held.track.key is not None:
            self._flying.get((held.at[0], held.at[1], held.track.key), {}).pop(held.at[2], None)

    def extended(self, held: Held, seconds: float) -> None:
        """A lease was prolonged."""
        held.deadline = held.earliest = self._oracle.now() + seconds
        held.track.leased_until = held.earliest

    def refused(self, held: Held, error: DeliveryError) -> None:
        """A settle was refused: there must be a reason."""
        now = self._oracle.now()
        if held.version != self.version or held.life != self.life or self.moving:
            return
        if held.track.revived:
            held.open = False
            return
        if isinstance(error, LeaseExpired) and held.open and now < held.earliest - GRAIN_S:
            self._fail("lease-cut", held.at, f"refused at {now}, lease lasts to {held.earliest}")
        if isinstance(error, Fenced):
            self._fail("lease-cut", held.at, "fenced without a reset")
        if isinstance(error, AlreadySettled) and held.open:
            self._fail("lease-cut", held.at, f"{error}")
        held.open = False

    def reads(self, topic: str) -> bool:
        """Whether the group reads a topic."""
        return matches(self.group.pattern, topic)

    def flushing(self) -> list[Track]:
        """Acks that the flush about to be made covers."""
        unflushed, self._unflushed = self._unflushed, []
        return unflushed

    def returned(self, holds: list[Held]) -> None:
        """A consumer left; what it held goes back."""
        for held in holds:
            held.open = False

    # -- what changes everything -----------------------------------------------------------------

    def began(self, life: int) -> None:
        """The process started again."""
        self.life = life
        self.full = False
        self.members.clear()
        self._unflushed = []
        if self.moving:  # a reset with an unknown outcome: only what comes now can be judged
            self.forget()
            self.unplaced = True
        self.moving = 0

    def recovered(self) -> None:
        """What the log holds was read: a reset of unknown outcome was to some place before its end."""
        if self.unplaced:
            self.floors = dict(self._oracle.ends)
            self.unplaced = False

    def ended(self, *, polite: bool) -> None:
        """A life is over: after a crash, settles of the last moment may be lost, older ones not."""
        now = self._oracle.now()
        for track in self._unflushed:
            old = polite or now - track.settled_at > ACK_WINDOW_S
            if track.state == ACKED and old and not self.full:
                track.durable = True

    def forget(self) -> None:
        """A reset: everything is open again, and all handles are void."""
        self.version += 1
        self.tracks.clear()
        self._flying.clear()
        self._firsts.clear()
        self._unflushed = []

    def revive(self, at: At) -> None:
        """An operator gave a dead letter back: a new budget, and out of its old order."""
        old = self.tracks.get(at)
        track = self.tracks[at] = Track(old.key if old is not None else None)
        track.revived = True
        if old is not None and old.key is not None:
            self._flying.get((at[0], at[1], old.key), {}).pop(at[2], None)

    def withdrawn(self, at: At) -> None:
        """An operator takes an event away: whoever holds it may find that it no longer counts."""
        track = self.tracks[at]
        track.revived = True
        if track.key is not None:
            self._flying.get((at[0], at[1], track.key), {}).pop(at[2], None)
        self.touched.add(at)

    def unsettled(self) -> Iterator[At]:
        """Events that were delivered and neither acked nor given up."""
        return (at for at, track in self.tracks.items() if track.state == OPEN)

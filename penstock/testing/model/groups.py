"""What the members of a group were promised: half of the model, written from the documents alone.

The model is told what was called, when, and what came of it. It raises `Contradiction` when the
documents do not permit that. Where they leave a choice (which member of a group gets an event, which
of two partitions comes first) every permitted outcome is accepted and the model goes on from it.

Time is a window everywhere: a call began at `t0` and had returned at `t1`, so what it started is due
between the two. An event is never too early before its window, and never late before `slack_s` after.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FOREVER = float("inf")

Place = tuple[str, int, int]
"""Topic, partition, offset."""


class Contradiction(Exception):
    """The bus did what its documents do not permit."""

    def __init__(self, promise: str, expected: Any, got: Any) -> None:
        super().__init__(f"{promise}\n  expected: {expected}\n  got:      {got}")
        self.promise = promise
        self.expected = expected
        self.got = got


class NotYet(Contradiction):
    """What operators see is not yet what it should be; on a busy machine it may become so."""


class Window(NamedTuple):
    """The earliest and the latest moment at which something happens."""

    first: float
    last: float

    def later(self, seconds: float, slack_s: float = 0.0) -> Window:
        """The same, so much later."""
        return Window(self.first + seconds, self.last + seconds + slack_s)


AT_ONCE = Window(0.0, 0.0)


@dataclass(eq=False)
class Sent:
    """One event as its publisher gave it, and where it was stored."""

    topic: str
    payload: bytes
    key: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    codec: str = "raw"
    priority: int = 0
    time_us: int | None = None
    token: uuid.UUID | None = None
    name: str | None = None
    """Its idempotency key."""
    partition: int | None = None
    expires: Window | None = None
    due: Window = AT_ONCE
    """When it is stored: at once, or at the time it was delayed to."""
    delayed: bool = False
    tenant: str = "default"
    offset: int = -1
    ready: Window = AT_ONCE
    """When consumers could have it."""
    unsure: bool = False
    """Its publish failed without saying whether it was stored."""

    @property
    def place(self) -> Place:
        """Where it lies."""
        assert self.partition is not None
        return self.topic, self.partition, self.offset

    def expired(self, moment: float) -> bool:
        """Whether its time to live is over for certain."""
        return self.expires is not None and moment > self.expires.last

    def expiring(self, moment: float) -> bool:
        """Whether its time to live may be over."""
        return self.expires is not None and moment >= self.expires.first


@dataclass(eq=False)
class Hand:
    """One delivery in the hands of one member."""

    owed: Owed
    member: str
    attempt: int
    deadline: Window
    doubtful: bool = False
    """It was on its way over a wire when an operator took it back: whether it counts is not known."""
    state: str = "live"
    """live, settled, expired, fenced or left; closed when its bus is gone."""

    def answers(self, t0: float, t1: float) -> set[str | None]:
        """What settling it now may raise: delivery.md, leases and fences."""
        if self.doubtful:
            return {None, "Fenced", "LeaseExpired", "AlreadySettled"}
        if self.state == "live":
            if t1 < self.deadline.first:
                return {None}
            return {"LeaseExpired"} if t0 > self.deadline.last else {None, "LeaseExpired"}
        if self.state == "settled":
            return {"AlreadySettled"}
        if self.state in ("expired", "left"):
            return {"LeaseExpired"}
        return {"Fenced", "AlreadySettled", "LeaseExpired", "BusClosed"}


@dataclass(eq=False)
class Owed:
    """One event as one group sees it."""

    event: Sent
    state: str = "waiting"
    """waiting, out, done, dead; `unsure` when a crash may have undone what was settled."""
    made: tuple[int, int] = (0, 0)
    """Least and most attempts that were counted so far."""
    due: Window = AT_ONCE
    hand: Hand | None = None
    settled_at: float = 0.0
    on_its_way: bool = False
    """An operator took it back while a wire may have carried it to a member."""
    revived: bool = False
    """It was a dead letter that was given back: its key had gone on without it."""

    @property
    def fresh(self) -> bool:
        """Whether nobody had it yet."""
        return self.made == (0, 0)


@dataclass(eq=False)
class Letter:
    """One dead letter."""

    event: Sent
    group: str
    attempts: tuple[int, int]
    reason: str | None
    """None: the documents do not say which words it has."""
    born: float
    """By when it is listed."""
    status: str = "dead"
    replays: int = 0
    by_hand: bool = False
    certain: bool = True
    """False while the documents do not say whether it is listed."""

    listed_as: str = ""
    """The id that the list gave it, once it was listed."""

    @property
    def id(self) -> str:
        """Token and group; events that share a token are numbered."""
        return self.listed_as or f"{self.event.token}@{self.group}"


@dataclass(eq=False)
class Member:
    """One subscription of a group."""

    name: str
    max_inflight: int
    bare_at: float
    """The last moment at which nothing was on its way to it: when it joined, or held all it may."""
    hands: list[Hand] = field(default_factory=list)
    gone_until: float | None = None
    """It was dropped without closing, or vanished: until then it may be taken for a member."""

    def holding(self, moment: float) -> int:
        """Deliveries it may still hold."""
        return sum(h.state == "live" and moment <= h.deadline.last for h in self.hands)

    def surely_holding(self, moment: float) -> int:
        """Deliveries it holds for certain."""
        return sum(h.state == "live" and moment < h.deadline.first for h in self.hands)


@dataclass
class GroupOptions:
    """What a group was made with."""

    pattern: str
    mode: str = "queue"
    order: str = "any"
    ladder_s: tuple[float, ...] = (0.1, 1.0, 10.0, 60.0)
    max_attempts: int = 5
    lease_s: float = 30.0
    filter: Mapping[str, str] = field(default_factory=dict)
    start: str | int = "earliest"


class Group:
    """What one group is owed, and who of it has what."""

    def __init__(
        self,
        name: str,
        options: GroupOptions,
        slack_s: float,
        excused: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.options = options
        self.slack_s = slack_s
        self.excused = excused
        """Findings of `known.py` that are not held against the engine."""
        self.wire = False
        """Whether events travel to members, who may be handed what was taken back meanwhile."""
        self.deleted: set[Place] = set()
        """What was in topics that are gone."""
        self.restarted = False
        self.members: dict[str, Member] = {}
        self.owed: dict[Place, Owed] = {}
        self.letters: dict[Place, Letter] = {}
        self.company_at = -FOREVER
        """The last moment at which it had two members or more."""
        self.flushed_at = -FOREVER
        """What was settled before is safe."""
        self.active: str | None = None
        """With `order="single"`: who received something and has not left."""

    # -- what changes ----------------------------------------------------------------------------

    def offer(self, event: Sent) -> None:
        """An event was stored in a topic of the pattern."""
        if event.place not in self.owed:
            filtered = not self.options.filter.items() <= event.headers.items()
            state = "filtered" if filtered else "waiting"
            self.owed[event.place] = Owed(event, state, due=event.ready)

    def step_s(self, attempt: int) -> float:
        """The wait after an attempt failed."""
        ladder = self.options.ladder_s
        return ladder[min(attempt, len(ladder)) - 1] if ladder else 0.0

    def pass_time(self, moment: float) -> None:
        """Leases run out that certainly have; members that hold all they may have nothing coming."""
        for owed in self.owed.values():
            hand = owed.hand
            if owed.state == "out" and hand is not None and moment > hand.deadline.last:
                hand.state = "expired"
                self.fail(owed, hand.attempt, hand.deadline, None, None)
        if len(self.members) > 1:
            self.company_at = moment
        for name, member in list(self.members.items()):
            if member.gone_until is not None and moment > member.gone_until:
                del self.members[name]
        for member in self.members.values():
            if member.surely_holding(moment) >= member.max_inflight:
                member.bare_at = moment

    def fail(
        self, owed: Owed, attempt: int, when: Window, delay_s: float | None, reason: str | None
    ) -> None:
        """An attempt failed: the next one after its wait, or a dead letter."""
        owed.made, owed.hand = (attempt, attempt), None
        if attempt >= self.options.max_attempts:
            self.bury(owed, reason, when.last)
        else:
            owed.state = "waiting"
            wait = self.step_s(attempt) if delay_s is None else delay_s
            owed.due = when.later(wait, self.slack_s)

    def bury(
        self,
        owed: Owed,
        reason: str | None,
        when: float,
        *,
        attempts: tuple[int, int] | None = None,
    ) -> None:
        """It becomes a dead letter."""
        owed.state, owed.hand, owed.settled_at = "dead", None, when
        letter = Letter(owed.event, self.name, attempts or owed.made, reason, when + self.slack_s)
        before = self.letters.get(letter.event.place)
        if before is not None:
            letter.replays = before.replays
        self.letters[letter.event.place] = letter

    def join(self, name: str, max_inflight: int, t0: float, t1: float) -> None:
        """A member comes."""
        if name in self.members:
            self.leave(name, t0, t1)
        self.members[name] = Member(name, max_inflight, t0)
        if len(self.members) > 1:
            self.company_at = t1

    def leave(self, name: str, t0: float, t1: float) -> None:
        """A member closes, or is found dead: what it held goes to the next one, as an attempt."""
        member = self.members.pop(name)
        if self.active == name:
            self.active = None
        for hand in member.hands:
            if hand.state == "live":
                hand.state = "left"
                if hand.owed.hand is hand:
                    self.fail(hand.owed, hand.attempt, Window(t0, t1 + self.slack_s), 0.0, None)

    # -- what a member is handed -------------------------------------------------------------------

    def handed(self, name: str, event: Any, t0: float, t1: float) -> Hand:
        """A member received an event."""
        member, place = self.members[name], (event.topic, event.partition, event.offset)
        owed = self.owed.get(place)
        taken_back = self.wire and owed is None and place in self.deleted
        if taken_back or (owed is not None and owed.on_its_way and owed.state in ("dead", "done")):
            gone = owed or Owed(Sent(event.topic, event.payload), "done")
            return Hand(gone, name, event.attempt, Window(t0, t1), doubtful=True)
        if owed is None:
            raise Contradiction(
                f"topics.md, consuming.md: group {self.name} receives what its pattern "
                f"{self.options.pattern} selects from where it began",
                "an event of the group", f"{place}, attempt {event.attempt}",
            )  # fmt: skip
        same(owed.event, event)
        self._permitted(owed, event, name, t0, t1)
        self._in_order(owed, member, t1)
        excused = "M5" in self.excused and self.restarted
        if (
            not excused
            and member.holding(t0) >= member.max_inflight
            and member.surely_holding(t1) >= member.max_inflight
        ):
            raise Contradiction(
                "delivery.md: a member never holds more than max_inflight unsettled events",
                f"at most {member.max_inflight}", f"{place} on top of them",
            )  # fmt: skip
        if owed.hand is not None:
            owed.hand.state = "expired"
        hand = Hand(owed, name, event.attempt,
                    Window(t0, t1).later(self.options.lease_s, self.slack_s),
                    doubtful=owed.on_its_way)  # fmt: skip
        owed.on_its_way = False
        owed.state, owed.hand, owed.made = "out", hand, (event.attempt, event.attempt)
        member.hands = [h for h in member.hands if h.state == "live"] + [hand]
        if self.options.order == "single":
            self.active = name
        return hand

    def _permitted(self, owed: Owed, event: Any, name: str, t0: float, t1: float) -> None:
        place, attempt, least, most = owed.event.place, event.attempt, owed.made[0], owed.made[1]
        if owed.state == "out":
            hand = owed.hand
            assert hand is not None
            if t1 < hand.deadline.first:
                raise Contradiction(
                    "consuming.md: a leased event goes to another delivery when its time ran out",
                    f"{place} stays with {hand.member} for {hand.deadline.first - t1:.3f} s more",
                    f"{name} was handed it as attempt {attempt}",
                )
            if hand.attempt >= self.options.max_attempts:
                raise Contradiction(
                    "delivery.md: a dead letter when the last attempt failed",
                    f"{place} is dead after attempt {hand.attempt}", f"attempt {attempt}",
                )  # fmt: skip
            least = most = hand.attempt
            earliest = hand.deadline.first + self.step_s(hand.attempt)
        else:
            earliest = owed.due.first
        if owed.state in ("done", "dead", "filtered"):
            raise Contradiction(
                f"delivery.md: what is {owed.state} for a group is not delivered to it",
                f"no delivery of {place}", f"{name} was handed it as attempt {attempt}",
            )  # fmt: skip
        if t1 < earliest:
            raise Contradiction(
                "delivery.md: a retry is dispatched at its time, a delayed event at its own",
                f"{place} not for {earliest - t1:.3f} s", f"attempt {attempt} now",
            )  # fmt: skip
        if owed.event.expired(t0) and "B16" not in self.excused:
            raise Contradiction(
                "scheduling.md: after its ttl_s a queue does not hand an event out any more",
                f"{place} expired {t0 - owed.event.expires.last:.3f} s ago",  # type: ignore[union-attr]
                f"{name} was handed it",
            )
        if not least + 1 <= attempt <= most + 1:
            raise Contradiction(
                "delivery.md: attempts count from 1, one for each delivery, and survive restarts",
                f"attempt {least + 1}"
                + (f" to {most + 1}" if most > least else "")
                + f" of {place}",
                f"attempt {attempt}",
            )
        if attempt > self.options.max_attempts:
            raise Contradiction(
                "delivery.md: at most max_attempts deliveries", self.options.max_attempts, attempt
            )
        if self.options.order == "single" and self.active not in (None, name):
            raise Contradiction(
                'consuming.md: order="single": one member gets everything; the others stand by',
                f"{self.active} gets it", f"{name} got {place}",
            )  # fmt: skip

    def _in_order(self, owed: Owed, member: Member, t1: float) -> None:
        event = owed.event
        for other in self.owed.values():
            if other is owed or other.state not in ("waiting", "out"):
                continue
            held = other.event
            same_lane = held.topic == event.topic and held.partition == event.partition
            earlier = same_lane and held.offset < event.offset
            if self.options.order == "key":
                revived = other.revived or owed.revived
                if (
                    earlier
                    and held.key == event.key is not None
                    and not held.expiring(t1)
                    and not revived
                ):
                    raise Contradiction(
                        'delivery.md: order="key" holds a key back until its event is settled',
                        f"{held.place} ({other.state}) before {event.place}", event.place,
                    )  # fmt: skip
                continue
            waits = other.state == "waiting" and other.due.last <= member.bare_at
            alone = self.options.order == "single" or self.company_at < held.ready.first
            if not (waits and alone and other.fresh and owed.fresh) or held.expiring(t1):
                continue
            if self.options.order == "any" and held.priority > event.priority:
                raise Contradiction(
                    "capabilities.md: waiting events of higher priority are delivered first",
                    f"{held.place} of priority {held.priority}",
                    f"{event.place} of priority {event.priority}",
                )
            if other.revived or owed.revived:
                continue  # it comes again like a retry, in no order
            if earlier and (self.options.order == "single" or held.priority == event.priority):
                if self.options.order == "single" and held.priority != event.priority:
                    continue
                raise Contradiction(
                    "delivery.md: offsets of a partition are handed out in order",
                    held.place, event.place,
                )  # fmt: skip

    def must_hand(self, name: str, moment: float, patience_s: float = 0.0) -> Owed | None:
        """An event that this member must receive if it asks now; None when nothing is certain."""
        member = self.members[name]
        if self.options.order == "single" and (self.active or next(iter(self.members))) != name:
            return None
        if member.holding(moment) >= member.max_inflight:
            return None
        free = [
            owed for owed in self._certain(moment) if not owed.event.expiring(moment + patience_s)
        ]
        elsewhere = 0
        if self.options.order != "single":
            elsewhere = sum(
                other.max_inflight - other.surely_holding(moment)
                for other in self.members.values()
                if other is not member
            )
        return free[elsewhere] if len(free) > elsewhere else None

    def _certain(self, moment: float) -> Iterator[Owed]:
        blocked: set[tuple[str, int | None, bytes]] = set()
        for _, owed in sorted(self.owed.items()):
            key = owed.event.key
            if self.options.order == "key" and key is not None:
                lane = (owed.event.topic, owed.event.partition, key)
                if lane in blocked:
                    continue
                if owed.state in ("waiting", "out", "unsure"):
                    blocked.add(lane)
            if owed.state == "waiting" and owed.due.last <= moment:
                yield owed

    # -- settling ----------------------------------------------------------------------------------

    def settled(
        self, hand: Hand, call: str, error: str | None, t0: float, t1: float, *,
        delay_s: float | None = None, reason: str | None = None,
    ) -> None:  # fmt: skip
        """A settle call returned, or raised."""
        permitted = hand.answers(t0, t1)
        if error not in permitted:
            raise Contradiction(
                f"delivery.md: what {call} raises for a delivery that is {hand.state}",
                " or ".join(sorted(each or "it is taken" for each in permitted)),
                error or "it was taken",
            )
        owed = hand.owed
        if hand.doubtful:
            if (
                owed.state == "out"
                and owed.hand is hand
                and (error is not None or call != "extend")
            ):
                owed.state, owed.hand, owed.due = "unsure", None, Window(t0, FOREVER)
            hand.state = "closed"
            return
        if error is not None:
            if error == "LeaseExpired" and hand.state == "live":
                hand.state = "expired"
                self.fail(owed, hand.attempt, Window(hand.deadline.first, t1), None, None)
            return
        if call == "extend":
            seconds = self.options.lease_s if delay_s is None else delay_s
            hand.deadline = Window(t0, t1).later(seconds, self.slack_s)
            return
        hand.state, owed.settled_at = "settled", t1
        if call == "ack":
            owed.state, owed.hand = "done", None
        elif call == "nack":
            self.fail(owed, hand.attempt, Window(t0, t1), delay_s, reason)
        else:
            owed.made = (hand.attempt, hand.attempt)
            self.bury(owed, reason, t1)

    # -- what operators see and do -----------------------------------------------------------------

    def lag(self, moment: float) -> tuple[int, int]:
        """The least and the most events that it has to settle."""
        least = most = 0
        for owed in self.owed.values():
            if owed.state in ("waiting", "out"):
                most += 1
                hand = owed.hand
                dying = hand is not None and moment >= hand.deadline.first
                dying = dying and hand.attempt >= self.options.max_attempts  # type: ignore[union-attr]
                taken = hand is not None and moment < hand.deadline.first
                dying = dying or owed.made[1] >= self.options.max_attempts  # finding B21
                least += not (dying or (owed.event.expiring(moment) and not taken))
            elif owed.state in ("unsure", "filtered"):
                most += 1
        return least, most

    def overdue(self, moment: float) -> Iterator[Owed]:
        """Events that may be dead letters by now: expired, or failed for the last time."""
        for owed in self.owed.values():
            hand = owed.hand
            if owed.state == "out" and hand is not None and moment >= hand.deadline.first:
                if hand.attempt >= self.options.max_attempts or owed.event.expiring(moment):
                    yield owed
            elif owed.state == "unsure" or (
                owed.state == "waiting" and owed.event.expiring(moment)
            ):
                yield owed
            elif owed.state == "waiting" and owed.made[1] >= self.options.max_attempts:
                yield owed  # finding B21

    def listed(self, letters: Iterable[Any], moment: float) -> None:
        """What the list of its dead letters says."""
        found = {(each.topic, each.partition, each.offset): each for each in letters}
        for owed in list(self.overdue(moment)):
            before = self.letters.get(owed.event.place)
            if before is not None and before.status == "dead":
                continue  # it is that one, perhaps
            if owed.event.place in found:
                if owed.hand is not None:
                    owed.hand.state = "expired"
                    owed.made = (owed.hand.attempt, owed.hand.attempt)
                self.bury(owed, None, moment)
        known = {at: letter for at, letter in self.letters.items() if letter.status == "dead"}
        missing = [
            at for at, letter in known.items()
            if letter.certain and letter.born < moment and at not in found
        ]  # fmt: skip
        if missing:
            letter = known[missing[0]]
            raise NotYet(
                "dead-letters.md: what was given up is kept with its reason until a person decides",
                f"a dead letter of {letter.event.place} of group {self.name}", "none is listed",
            )  # fmt: skip
        for place, got in found.items():
            expected = known.get(place)
            if expected is None:
                seen = place in self.owed
                kind = Contradiction if seen else NotYet  # it was stored after the topics were read
                raise kind(
                    "dead-letters.md: only what failed too often, was rejected or expired is one",
                    f"no dead letter of {place} of group {self.name}",
                    f"{got.id}: {got.reason}, attempts {got.attempts}",
                )
            expected.listed_as = got.id
            if not expected.certain:
                continue
            compare("dead-letters.md: a dead letter says what failed", {
                "topic": (expected.event.topic, got.topic),
                "consumer": (self.name, got.consumer),
                "replay_count": (expected.replays, got.replay_count),
                "reason": (expected.reason or got.reason, got.reason or "some reason"),
            })  # fmt: skip
            least, most = expected.attempts
            if "B16" in self.excused and expected.event.expires is not None:
                most += 1
            if not least <= got.attempts <= most:
                raise Contradiction("dead-letters.md: a dead letter says how many attempts there were",
                                    expected.attempts, f"{got.attempts} for {got.id}")  # fmt: skip

    def withdraw(self, place: Place, reason: str, when: float) -> None:
        """An operator made a dead letter of an event by hand."""
        owed = self.owed[place]
        owed.on_its_way = self.wire
        if owed.hand is not None:
            owed.hand.state = "fenced"
        self.bury(owed, reason, when, attempts=(0, owed.made[1]))
        self.letters[owed.event.place].by_hand = True

    def revive(self, letter: Letter, t0: float, t1: float) -> None:
        """An operator gave a dead letter back, with a new budget."""
        letter.status, letter.replays = "replayed", letter.replays + 1
        owed = self.owed[letter.event.place]
        owed.state, owed.made, owed.revived = "waiting", (0, 0), True
        owed.due = Window(t0, t1 + self.slack_s)
        owed.settled_at = t1

    def reset(self, events: Iterable[Sent], cursors: Mapping[tuple[str, int], int], t0: float,
              t1: float) -> None:  # fmt: skip
        """The group was sent to a place in each of these partitions."""
        for place, owed in self.owed.items():
            if place[:2] not in cursors:
                continue
            owed.on_its_way = self.wire and owed.state == "waiting"
            if owed.hand is not None:
                owed.hand.state = "fenced"
            if place[2] < cursors[place[:2]] and owed.state in ("waiting", "out", "unsure"):
                owed.state, owed.hand = "done", None
        for event in events:
            if event.place[:2] in cursors and event.offset >= cursors[event.place[:2]]:
                before = self.owed.get(event.place)
                if before is not None and before.state == "filtered":
                    continue
                made = before.made[1] if before is not None else 0
                self.owed.pop(event.place, None)
                self.offer(event)
                owed = self.owed[event.place]
                owed.on_its_way = self.wire
                owed.made, owed.due = (0, made), Window(t0, t1 + self.slack_s)
        for letter in self.letters.values():
            if letter.event.place[:2] in cursors:
                letter.certain = False

    def forget_topic(self, topic: str) -> None:
        """A topic was deleted with its events."""
        for place, owed in list(self.owed.items()):
            if place[0] == topic:
                if owed.hand is not None:
                    owed.hand.state = "closed"
                self.deleted.add(place)
                del self.owed[place]
        for letter in self.letters.values():
            if letter.event.topic == topic:
                letter.certain = False

    # -- a process that ends -----------------------------------------------------------------------

    def process_closed(self, t0: float, t1: float) -> None:
        """The bus of all members was closed, and is open again."""
        for name in list(self.members):
            hands = self.members[name].hands
            self.leave(name, t0, t1)
            for hand in hands:
                hand.state = "closed"
        self._timers_start_again(t0, t1)

    def process_killed(self, t0: float, t1: float, unwritten_s: float) -> None:
        """The process of bus and members died, and another one opened the folder."""
        for name in list(self.members):
            member = self.members.pop(name)
            spare = member.max_inflight > member.surely_holding(t0)
            for hand in member.hands:
                hand.state = "closed"
            for owed in self.owed.values() if spare else ():
                last = self.options.max_attempts - ("B21" not in self.excused)
                if owed.state == "waiting" and owed.made[1] < last:
                    owed.made = (owed.made[0], owed.made[1] + 1)  # leased, perhaps, and on its way
        self.active = None
        for owed in self.owed.values():
            if owed.state == "out" and owed.hand is not None:
                attempt = owed.hand.attempt
                self.fail(owed, attempt, Window(t0, t1 + self.options.lease_s), 0.0, None)
                owed.due = owed.due.later(0.0, self.step_s(attempt))
            elif owed.settled_at > max(t0 - unwritten_s, self.flushed_at):
                self._perhaps_unwritten(owed, t0)
        self._timers_start_again(t0, t1)

    def engine_restarted(self, t0: float, t1: float, unwritten_s: float) -> None:
        """The engine stopped and started, and its clients came back: they go on with what they hold."""
        for owed in self.owed.values():
            hand = owed.hand
            if owed.state == "out" and hand is not None:
                if self.options.order == "key":
                    hand.state = "closed"
                    self.fail(owed, hand.attempt, Window(t0, t1 + self.slack_s), 0.0, None)
                else:
                    again = t1 + self.options.lease_s + self.slack_s
                    hand.deadline = Window(hand.deadline.first, max(hand.deadline.last, again))
            elif owed.settled_at > max(t0 - unwritten_s, self.flushed_at):
                self._perhaps_unwritten(owed, t0)
        self._timers_start_again(t0, t1)

    def vanish(self, name: str, t0: float, until: float) -> None:
        """A member's process is gone; until then the engine may wait for it to come back."""
        member = self.members[name]
        member.gone_until, hands, member.hands = until, member.hands, []
        if self.active == name:
            self.active = None
        for hand in hands:
            if hand.state == "live":
                hand.state = "closed"
                if hand.owed.hand is hand:
                    self.fail(hand.owed, hand.attempt, Window(t0, until), 0.0, None)

    def _perhaps_unwritten(self, owed: Owed, t0: float) -> None:
        """It was settled just before a crash: acks and nacks are safe with the next commit only."""
        if owed.state == "dead":
            for letter in self.letters.values():
                if letter.event is owed.event:
                    letter.certain = False
        if owed.state in ("done", "dead"):
            owed.state, owed.due = "unsure", Window(t0, FOREVER)
        elif owed.state == "waiting":
            owed.due = Window(t0, owed.due.last)

    def _timers_start_again(self, t0: float, t1: float) -> None:
        """Durations are stored: a wait that was under way may begin again, but is not cut short."""
        self.restarted = True
        for owed in self.owed.values():
            if "M6" in self.excused and owed.state == "waiting" and not owed.fresh:
                owed.due = Window(owed.due.first, max(owed.due.last, t1 + self._longest_wait()))
            if owed.state == "waiting" and owed.due.last > t0:
                left = owed.due.last - t0
                owed.due = Window(owed.due.first, t1 + left + self._longest_wait() + self.slack_s)

    def _longest_wait(self) -> float:
        return max((3.0, *self.options.ladder_s))


def compare(promise: str, fields: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise for the first field that is not as expected."""
    for name, (expected, got) in fields.items():
        if expected != got:
            raise Contradiction(promise, f"{name} = {expected!r}", f"{name} = {got!r}")


def same(sent: Sent, event: Any) -> None:
    """An event arrives as it was published, wherever it is seen."""
    compare("conformance.md: what was published arrives byte for byte", {
        "payload": (sent.payload, event.payload),
        "key": (sent.key, event.key),
        "headers": (dict(sent.headers), dict(event.headers)),
        "codec": (sent.codec, event.codec),
        "priority": (sent.priority, event.priority),
        "token": (sent.token or event.token, event.token),
        "event time": (event.time_us if sent.time_us is None else sent.time_us, event.time_us),
        "tenant": (sent.tenant, event.tenant),
        "time to live": (sent.expires is not None, event.expires_us is not None),
    })  # fmt: skip


class LogGroup:
    """A group with `mode="log"`: a place in each partition, and how far its members have read."""

    def __init__(self, name: str, pattern: str) -> None:
        self.name = name
        self.pattern = pattern
        self.committed: dict[tuple[str, int], set[int]] = {}
        """Where it may stand; more than one place while the documents leave that open."""
        self.before: dict[tuple[str, int], set[int]] = {}
        """Where it stood before it was reset."""
        self.members: dict[str, dict[tuple[str, int], int]] = {}
        self.shifted: set[str] = set()
        """Members that may have lost partitions, or were reset, since they read."""

    def join(self, name: str) -> None:
        """A member comes, and partitions are shared out anew."""
        self.members[name] = {}
        self.shifted = {*self.members} if len(self.members) > 1 else set()

    def leave(self, name: str) -> None:
        """A member goes."""
        self.members.pop(name, None)
        self.shifted = {*self.members}

    def read(self, name: str, event: Any, sent: Sent | None, first: int) -> None:
        """A member received an event."""
        lane = (event.topic, event.partition)
        if sent is None:
            raise Contradiction("consuming.md: a log subscription gives what is stored", "nothing",
                                f"{lane}/{event.offset}")  # fmt: skip
        same(sent, event)
        place = self.members[name].get(lane)
        starts = {max(first, each) for each in self.committed.get(lane, {0})}
        permitted = starts if place is None else {max(first, place)}
        if name in self.shifted:
            permitted = permitted | starts | self.before.get(lane, set())  # what was on its way
        if event.offset not in permitted:
            raise Contradiction(
                f"consuming.md: log group {self.name} reads on in order, from its last commit",
                f"offset {sorted(permitted)} of {lane}", event.offset,
            )  # fmt: skip
        self.members[name][lane] = event.offset + 1

    def commit(self, name: str, error: str | None) -> None:
        """A member committed, or was refused."""
        if error is not None:
            if error != "Fenced" or name not in self.shifted:
                raise Contradiction("consuming.md: commit() makes what was read the group's place",
                                    "it is taken", error)  # fmt: skip
            return
        for lane, place in self.members[name].items():
            if name in self.shifted:
                self.committed[lane] = self.committed.get(lane, {0}) | {place}
            else:
                self.committed[lane] = {place}

    def reset(self, cursors: Mapping[tuple[str, int], int]) -> None:
        """It was sent to a place; who reads goes on from there."""
        for lane, cursor in cursors.items():
            self.before[lane] = self.committed.get(lane, {0})
            self.committed[lane] = {cursor}
        self.shifted = {*self.members}

    def stopped(self) -> None:
        """All members are gone with their process."""
        self.members.clear()
        self.shifted.clear()


def selects(pattern: str, topic: str) -> bool:
    """Whether a pattern selects a topic: topics.md.

    >>> selects("orders.#.acme", "orders.acme"), selects("#", "_audit.events")
    (True, False)
    """
    if topic.startswith("_") and pattern.split(".")[0] != topic.split(".")[0]:
        return False

    def match(words: list[str], names: list[str]) -> bool:
        if not words:
            return not names
        if words[0] == "#":
            return match(words[1:], names) or bool(names and match(words, names[1:]))
        return bool(names) and words[0] in ("*", names[0]) and match(words[1:], names[1:])

    return match(pattern.split("."), topic.split("."))


def specific(pattern: str) -> tuple[list[int], str]:
    """Sorts patterns as topics.md does: a literal, then `*`, then the end, then `#`.

    >>> sorted(["#", "a.#", "a", "*"], key=specific)
    ['a', 'a.#', '*', '#']
    """
    kinds = [{"*": 1, "#": 3}.get(word, 0) for word in pattern.split(".")]
    return [*kinds, 2], pattern

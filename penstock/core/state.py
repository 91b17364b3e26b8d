"""The state: everything the bus knows beside the events, as the sum of the entries in the journal.

Topics, groups, cursors, dead letters and schedules change only through `State.apply`. Recovery
applies the entries of the journal; the running engine applies the entries it is about to write.

A `Ledger` says which events of one partition a queue group has not settled: everything before
`high` was leased once, and of that the open intervals are not settled yet. In a running engine the
delivery machines know the unsettled events; recovery, read-only readers and snapshots use ledgers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from penstock.core.entry import (
    FIRST_FENCE,
    Acked,
    AnyEntry,
    Audited,
    Committed,
    Dead,
    DeadPurged,
    DeadReplayed,
    Delayed,
    Fired,
    GroupGone,
    GroupPut,
    GroupSpec,
    LaneSet,
    Leased,
    Produced,
    RecurringGone,
    RecurringPut,
    Retried,
    SessionGone,
    SessionPut,
    TopicGone,
    TopicPut,
    TopicSpec,
)
from penstock.core.schedule import Definition, Schedule, ScheduleState
from penstock.model.errors import Corrupted

AT_ONCE_MS = 1
"""The delay of an event that is delivered again at once; 0 is the delay of one that a member holds."""

Place = tuple[str, int]
# Reply inboxes: each name is made up for one connection, and never used again.
INBOX = "_inbox."
# Deleted topics whose ends are remembered; one that was deleted before these begins at 0 again.
MAX_DELETED = 10_000
# Publishes of one session that are recognised when they are repeated after a crash.
REMEMBERED_PUBLISHES = 256

# Operators see these entries when they are durable, not when they are about to be.
DeadLetterEntry = Dead | DeadReplayed | DeadPurged


# -- the state ------------------------------------------------------------------------------------


class State:
    """The state, and how each entry changes it.

    >>> state = State()
    >>> state.apply(TopicPut("orders", TopicSpec(partitions=2)))
    >>> state.topics["orders"].partitions
    2
    """

    def __init__(self) -> None:
        self.topics: dict[str, TopicSpec] = {}
        self.deleted: dict[str, tuple[int, ...]] = {}
        """Where the last topics to be deleted ended, so that offsets are not given out twice."""
        self.groups: dict[str, GroupState] = {}
        self.dead: dict[str, DeadLetter] = {}
        self.schedule = Schedule()
        self.sessions: dict[str, SessionState] = {}
        self._appliers = {
            TopicPut: self._topic_put,
            TopicGone: self._topic_gone,
            GroupPut: self._group_put,
            GroupGone: self._group_gone,
            LaneSet: self._lane_set,
            Leased: self._leased,
            Acked: self._acked,
            Retried: self._retried,
            Dead: self._dead,
            DeadReplayed: self._dead_replayed,
            DeadPurged: self._dead_purged,
            Committed: self._committed,
            Delayed: self._delayed,
            Fired: self._fired,
            RecurringPut: self._recurring_put,
            RecurringGone: self._recurring_gone,
            Audited: self._audited,
            SessionPut: self._session_put,
            SessionGone: self._session_gone,
            Produced: self._produced,
        }

    def apply(self, entry: AnyEntry) -> None:
        """Make one change."""
        self._appliers[type(entry)](entry)  # type: ignore[operator]

    def apply_live(self, entry: AnyEntry) -> None:
        """Make one change in a running engine, whose machines know of deliveries and ticks before."""
        if isinstance(entry, Leased | Acked | Retried | GroupPut | RecurringPut | DeadLetterEntry):
            return
        if isinstance(entry, LaneSet):
            group = self.groups.get(entry.group)
            if group is not None and group.spec.mode == "queue":
                return
        self.apply(entry)

    def _topic_put(self, entry: TopicPut) -> None:
        self.topics[entry.topic] = entry.spec
        self.deleted.pop(entry.topic, None)

    def _topic_gone(self, entry: TopicGone) -> None:
        self.topics.pop(entry.topic, None)
        self._forget(entry.topic, entry.ends)
        gone = [(entry.topic, partition) for partition in range(len(entry.ends))]
        for group in self.groups.values():
            for place in gone:
                group.ledgers.pop(place, None)
                group.cursors.pop(place, None)
                group.epochs.pop(place, None)

    def _forget(self, topic: str, ends: tuple[int, ...]) -> None:
        """Remember where a deleted topic ended, unless its name never comes again."""
        self.deleted.pop(topic, None)
        if not topic.startswith(INBOX):
            self.deleted[topic] = ends
            if len(self.deleted) > MAX_DELETED:
                del self.deleted[next(iter(self.deleted))]

    def _group_put(self, entry: GroupPut) -> None:
        group = self.groups.get(entry.group)
        if group is None:
            self.groups[entry.group] = GroupState(entry.spec)
        else:
            group.spec = entry.spec

    def _group_gone(self, entry: GroupGone) -> None:
        self.groups.pop(entry.group, None)

    def _lane_set(self, entry: LaneSet) -> None:
        group = self.groups.get(entry.group)
        place = (entry.topic, entry.partition)
        if group is None:
            return  # deleted before it
        if group.spec.mode == "log":
            group.cursors[place] = entry.offset
            group.epochs[place] = group.epochs.get(place, 0) + 1
        else:
            group.ledgers[place] = Ledger(entry.offset)

    def _ledger(self, entry: Leased | Acked | Retried) -> Ledger | None:
        """The ledger an entry is about; None when its group or topic was deleted before it."""
        group = self.groups.get(entry.group)
        return None if group is None else group.ledgers.get((entry.topic, entry.partition))

    def _leased(self, entry: Leased) -> None:
        group = self.groups.get(entry.group)
        if group is not None:
            group.fence = max(group.fence, entry.fence + 1)
        ledger = self._ledger(entry)
        if ledger is not None:
            ledger.leased(entry.start, entry.count, entry.attempt, entry.member)

    def _acked(self, entry: Acked) -> None:
        ledger = self._ledger(entry)
        if ledger is not None:
            runs = entry.runs
            for at in range(0, len(runs), 2):
                ledger.acked(runs[at], runs[at + 1])

    def _retried(self, entry: Retried) -> None:
        ledger = self._ledger(entry)
        if ledger is not None:
            ledger.retried(entry.start, entry.count, entry.made, entry.delay_ms)

    def _dead(self, entry: Dead) -> None:
        before = self.dead.get(entry.id)
        self.dead[entry.id] = DeadLetter(
            entry.id, entry.group, entry.topic, entry.partition, entry.offset, entry.tenant,
            entry.attempts, entry.reason, entry.at_us, entry.stored,
            0 if before is None else before.replay_count,
        )  # fmt: skip
        group = self.groups.get(entry.group)
        ledger = group.ledgers.get((entry.topic, entry.partition)) if group is not None else None
        if ledger is not None and entry.offset >= 0:
            ledger.acked(entry.offset, 1)

    def _dead_replayed(self, entry: DeadReplayed) -> None:
        letter = self.dead.get(entry.id)
        if letter is not None:  # else it was purged meanwhile
            letter.replay_count += 1
            letter.status = "replayed"

    def _dead_purged(self, entry: DeadPurged) -> None:
        self.dead.pop(entry.id, None)

    def _committed(self, entry: Committed) -> None:
        group = self.groups.get(entry.group)
        place = (entry.topic, entry.partition)
        if group is None or place not in group.cursors:
            return
        if entry.epoch == group.epochs.get(place, 0):
            # One that was given up may be written after the next: only a reset goes back.
            group.cursors[place] = max(group.cursors[place], entry.offset)
        elif entry.epoch == -1:  # of a journal from before there were epochs
            group.cursors[place] = entry.offset
        else:
            return
        group.generation = max(group.generation, entry.generation)

    def _delayed(self, entry: Delayed) -> None:
        pairs = entry.pairs
        for at in range(0, len(pairs), 2):
            self.schedule.delayed.add(pairs[at], pairs[at + 1])

    def _fired(self, entry: Fired) -> None:
        self.schedule.delayed.fired(entry.offsets)

    def _recurring_put(self, entry: RecurringPut) -> None:
        definition = msgspec.msgpack.decode(entry.definition, type=Definition)
        self.schedule.recurring.hold(definition)

    def _recurring_gone(self, entry: RecurringGone) -> None:
        self.schedule.recurring.remove(entry.id)

    def _audited(self, entry: Audited) -> None:
        """The audit chain is a log of its own; here it changes nothing."""

    def _session_put(self, entry: SessionPut) -> None:
        self.sessions[entry.session] = SessionState(entry)

    def _session_gone(self, entry: SessionGone) -> None:
        self.sessions.pop(entry.session, None)

    def _produced(self, entry: Produced) -> None:
        session = self.sessions.get(entry.session)
        if session is not None:
            session.remember(entry.sequence, entry.places)


class GroupState:
    """One consumer group: its specification and how far it is in each partition."""

    __slots__ = ("cursors", "epochs", "fence", "generation", "ledgers", "spec")

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.fence = FIRST_FENCE
        self.generation = 0
        self.ledgers: dict[Place, Ledger] = {}
        """Queue mode."""
        self.cursors: dict[Place, int] = {}
        """Log mode: the next offset to read."""
        self.epochs: dict[Place, int] = {}
        """Log mode: how often the group was set to a place. Commits of earlier reading are void."""


class SessionState:
    """One session: who it is, and where its last publishes went."""

    __slots__ = ("produced", "spec")

    def __init__(self, spec: SessionPut) -> None:
        self.spec = spec
        self.produced: dict[int, list[int]] = {}
        """Places by sequence, the last `REMEMBERED_PUBLISHES`: a client has fewer under way."""

    def remember(self, sequence: int, places: list[int]) -> None:
        """Keep what became of a publish, or of more of it, forgetting the oldest."""
        self.produced[sequence] = [*self.produced.get(sequence, ()), *places]
        if len(self.produced) > REMEMBERED_PUBLISHES:
            del self.produced[next(iter(self.produced))]

    def may_have_forgotten(self, sequence: int) -> bool:
        """Whether a publish that is not known may have been: it is older than all that are."""
        full = len(self.produced) >= REMEMBERED_PUBLISHES
        return full and sequence < next(iter(self.produced))


class DeadLetter(msgspec.Struct):
    """An event that ran out of attempts or was rejected, and where its copy lies.

    >>> DeadLetter("orders/0/7", "billing", "orders", 0, 7, "default", 5, "no", 0, 0).status
    'dead'
    """

    id: str
    consumer: str
    topic: str
    partition: int
    offset: int
    tenant: str
    attempts: int
    reason: str
    dead_lettered_at_us: int
    stored: int
    """Offset of the copy in the tenant's dead-letter topic."""
    replay_count: int = 0
    status: str = "dead"
    """"dead", or "replayed" while it is back with its group."""


# -- ledgers --------------------------------------------------------------------------------------


class Open(NamedTuple):
    """A run of unsettled events with the same history."""

    start: int
    stop: int
    made: int
    """Attempts that count against the budget."""
    delay_ms: int
    """What is left to wait before the next one."""
    holder: str = ""
    """The member that has them; snapshots do not say."""


class Ledger:
    """Unsettled events of one partition for one group.

    >>> ledger = Ledger(0)
    >>> ledger.leased(0, 10, attempt=1)
    >>> ledger.acked(2, 3)
    >>> [(run.start, run.stop) for run in ledger.open()]
    [(0, 2), (5, 10)]
    """

    __slots__ = ("_runs", "_starts", "high")

    def __init__(self, start: int) -> None:
        self.high = start
        """Everything from here on was never leased."""
        self._starts: list[int] = []
        self._runs: list[Open] = []

    def leased(self, start: int, count: int, attempt: int, holder: str = "") -> None:
        """Events were handed out; events skipped on the way (held back by key or priority) stay open."""
        if start > self.high:
            self._put(Open(self.high, start, 0, 0))
        self.high = max(self.high, start + count)
        self._put(Open(start, start + count, attempt, 0, holder))

    def acked(self, start: int, count: int) -> None:
        """Events are settled."""
        self._cut(start, start + count)

    def retried(self, start: int, count: int, made: int, delay_ms: int) -> None:
        """Events wait for their next attempt."""
        if start > self.high:
            self._put(Open(self.high, start, 0, 0))
        self.high = max(self.high, start + count)
        self._put(Open(start, start + count, made, delay_ms))

    def open(self) -> list[Open]:
        """The unsettled runs, in order."""
        return self._runs

    def outstanding(self) -> int:
        """How many events were handed out and are not settled."""
        return sum(run.stop - run.start for run in self._runs)

    def floor(self) -> int:
        """Everything before this is settled."""
        return self._starts[0] if self._starts else self.high

    def _put(self, run: Open) -> None:
        if self._starts and run.start < self._runs[-1].stop:
            self._cut(run.start, run.stop)
        at = bisect_left(self._starts, run.start)
        if at and self._runs[at - 1].stop == run.start and self._runs[at - 1][2:] == run[2:]:
            run = self._runs[at - 1]._replace(stop=run.stop)
            self._runs[at - 1] = run
            return
        self._starts.insert(at, run.start)
        self._runs.insert(at, run)

    def _cut(self, start: int, stop: int) -> None:
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._runs[first].stop <= start:
            first += 1
        last = first
        kept: list[Open] = []
        while last < len(self._runs) and self._runs[last].start < stop:
            run = self._runs[last]
            if run.start < start:
                kept.append(run._replace(stop=start))
            if run.stop > stop:
                kept.append(run._replace(start=stop))
            last += 1
        self._runs[first:last] = kept
        self._starts[first:last] = [run.start for run in kept]

    def dump(self) -> list[int]:
        """The ledger as plain numbers, for a snapshot."""
        numbers = [self.high]
        for run in self._runs:
            numbers += run[:4]
        return numbers

    @classmethod
    def load(cls, numbers: list[int]) -> Ledger:
        """The opposite of `dump`."""
        ledger = cls(numbers[0])
        ledger._runs = [Open._make([*numbers[at : at + 4], ""]) for at in range(1, len(numbers), 4)]
        ledger._starts = [run.start for run in ledger._runs]
        return ledger

    def __iter__(self) -> Iterator[Open]:
        return iter(self._runs)


# -- snapshots: the state in pieces, each small enough to write between two commits ---------------

TOPICS = "topics"

GROUP = "group"

LANE = "lane"

DEAD = "dead"

SCHEDULE = "schedule"

SESSION = "session"

DEAD_CHUNK = 4_096  # dead letters in one piece: about a megabyte


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of the state as of one position of the journal."""

    kind: str
    key: str
    partition: int
    as_of: int
    body: bytes


def pieces_of(state: State, as_of: int) -> list[Piece]:
    """The state as pieces; `load` puts them together again."""
    pieces = [Piece(TOPICS, "", 0, as_of, _encode((state.topics, state.deleted)))]
    for name, group in state.groups.items():
        head = (group.spec, group.fence, group.generation)
        cursors = [(*place, at, group.epochs.get(place, 0)) for place, at in group.cursors.items()]
        pieces.append(Piece(GROUP, name, 0, as_of, _encode((head, cursors))))
        for (topic, partition), ledger in group.ledgers.items():
            body = _encode((topic, ledger.dump()))
            pieces.append(Piece(LANE, name, partition, as_of, body))
    letters = list(state.dead.values())
    pieces += [
        Piece(DEAD, "", 0, as_of, _encode(letters[at : at + DEAD_CHUNK]))
        for at in range(0, len(letters), DEAD_CHUNK)
    ]
    pieces.append(Piece(SCHEDULE, "", 0, as_of, _encode(state.schedule.snapshot())))
    for name, session in state.sessions.items():
        pieces.append(Piece(SESSION, name, 0, as_of, _encode((session.spec, session.produced))))
    return pieces


def load_pieces(pieces: list[Piece]) -> State:
    """A state from its pieces."""
    state = State()
    try:
        for piece in pieces:
            _load(state, piece)
    except (msgspec.DecodeError, KeyError, IndexError) as error:
        raise Corrupted(
            f"a state snapshot cannot be read ({error}); nothing was deleted. Remove that snapshot "
            "file to recover from the one before",
        ) from error
    return state


def _load(state: State, piece: Piece) -> None:
    decode = msgspec.msgpack.decode
    if piece.kind == TOPICS:
        state.topics, deleted = decode(
            piece.body, type=tuple[dict[str, TopicSpec], dict[str, tuple[int, ...]]]
        )
        for topic, ends in deleted.items():  # older snapshots have all there ever were
            state._forget(topic, ends)
    elif piece.kind == GROUP:
        (spec, fence, generation), cursors = decode(
            piece.body, type=tuple[tuple[GroupSpec, int, int], list[list[Any]]]
        )
        group = state.groups[piece.key] = GroupState(spec)
        group.fence, group.generation = fence, generation
        for topic, partition, at, *epoch in cursors:  # older snapshots have no epochs
            group.cursors[topic, partition] = at
            group.epochs[topic, partition] = epoch[0] if epoch else 0
    elif piece.kind == LANE:
        topic, numbers = decode(piece.body, type=tuple[str, list[int]])
        state.groups[piece.key].ledgers[topic, piece.partition] = Ledger.load(numbers)
    elif piece.kind == DEAD:
        for letter in decode(piece.body, type=list[DeadLetter]):
            state.dead[letter.id] = letter
    elif piece.kind == SCHEDULE:
        state.schedule.restore(decode(piece.body, type=ScheduleState))
    elif piece.kind == SESSION:
        put, produced = decode(piece.body, type=tuple[SessionPut, dict[int, list[int]]])
        state.sessions[piece.key] = SessionState(put)
        state.sessions[piece.key].produced = produced


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)

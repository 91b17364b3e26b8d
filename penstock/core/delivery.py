"""The delivery machine of a queue group: who gets which event, and when again, until it is acked or dead.

Pure: offsets, members and the time come in; leases, journal entries and dead events come out.
Nothing here reads an event, a file or a clock. The owner writes `drain()` to the journal and only
then hands the leases to the members, so an attempt is counted before the consumer sees the event.

Operators change a group while consumers are at work: `withdraw`, `revive`, `reset`, `end`.

After a crash, `restore` builds a machine that owes what `ledgers` said. What was leased then waits
for its holders: `reclaim` gives a holder that is back what it held, `expire_unclaimed` ends the wait.
`return_unheld` is for a member that lost only its connection.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)

from penstock.core.entry import FIRST_FENCE, Acked, Entry, GroupSpec, Leased, Retried
from penstock.core.lease import (
    ACKED,
    EXPIRED,
    FENCED,
    NACKED,
    OUT,
    REJECTED,
    RETURNED,
    Doomed,
    Lane,
    Lease,
    Member,
    Run,
    check_span,
    cut,
    runs,
)
from penstock.core.ordering import MAX_HELD_EVENTS, PRIORITY_WINDOW_EVENTS, KeyGate, Priorities
from penstock.core.state import AT_ONCE_MS, Ledger, Open

# Largest run under one lease: big enough that leases are rare, small enough to share among members.
MAX_LEASE_EVENTS = 1_024
# What an entry may take in the journal: three names of 128 bytes and some numbers; and a run of acks.
ENTRY_BYTES = 512
RUN_BYTES = 20
# The reason of an attempt that ended because the consumer is back and does not have the event.
BACK_WITHOUT = "its consumer came back without it"

Peek = Callable[[Lane, int, int], Sequence[bytes | None] | Sequence[int] | None]
"""Keys or priorities of `count` events from an offset on; None when they must be loaded first."""
Handed = Callable[[int, int, int], Sequence[tuple[int, int]] | None]
"""Of the events from start to stop that were leased for this attempt, the stretches that a consumer
was handed; None when that is not known."""


class QueueGroup:
    """The machine of one group in queue mode.

    >>> group = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    >>> lane = group.lane("orders", 0, cursor=0, end=2)
    >>> member = group.join("worker-1", max_inflight=10)
    >>> lease, = group.dispatch(now=0.0)
    >>> lease.hand(0, 30.0); lease.hand(1, 30.0)
    >>> group.ack(lease, 0, now=1.0)
    >>> group.nack(lease, 1, now=1.0)
    >>> [type(entry).__name__ for entry in group.drain()]
    ['Leased', 'Retried', 'Acked']
    >>> group.next_due()
    1.1
    """

    def __init__(self, name: str, spec: GroupSpec, *, fence: int = FIRST_FENCE) -> None:
        self.name = name
        self.spec = spec
        self.fence = fence
        """The number of the next lease."""
        self.lanes: dict[tuple[str, int], Lane] = {}
        self.members: dict[str, Member] = {}
        self.leases: dict[int, Lease] = {}
        self.unread = 0
        """Events of all lanes that were never handed out."""
        self.doomed: list[Doomed] = []
        """Events rejected or out of attempts; the owner stores them as dead letters and calls `buried`."""
        self.failures = [0] * (FENCED + 1)
        """Failures by state; a dispatcher gives all its groups one list."""
        self.peek_keys: Peek = lambda lane, start, count: None
        self.peek_priorities: Peek = lambda lane, start, count: None
        self.starved: Run | None = None
        """A run whose keys or priorities must be loaded before dispatch can go on."""
        self.mark: Callable[[Lease], MutableSequence[int]] = lambda lease: [0]
        """Gives a lease the place where its owner notes how far it was handed out."""
        self._entries: list[Entry] = []
        """Entries for the journal, except acks."""
        self._dirty: dict[int, Lease] = {}
        """Leases with acks that are not in the journal yet."""
        self._rotation: deque[Member] = deque()
        """Members in the order in which they get the next lease."""
        self._plain_lanes: deque[Lane] = deque()
        self._urgent_lanes: deque[Lane] = deque()
        """Lanes in line whose priorities are compared first."""
        self._ready: deque[Run] = deque()
        """Runs that may go out now."""
        self._unexamined: deque[Run] = deque()
        """Runs whose keys or priorities must be looked at first."""
        self._retries: list[tuple[float, int, Run]] = []
        """A heap of runs that wait for their time; the number keeps those of one time in order."""
        self._retry_number = 0
        self._checks: list[tuple[float, int]] = []
        """A heap of times when the lease of a fence may run out."""
        self._dead: dict[tuple[Lane, int], int] = {}
        """Dead events that are not stored as dead letters yet, with their attempts."""
        self._gate = KeyGate() if spec.order == "key" else None
        self._priorities = Priorities()
        self._not_before: dict[tuple[Lane, int], float] = {}
        """The time of the next attempt of events whose keys are not known yet."""
        self._leased_before: deque[Run] = deque()
        """Leased when the process died, and kept for their holders: their keys must be known first."""
        self._unknown_keys: dict[tuple[Lane, int], bool] = {}
        """Of these, each whose key is not known yet, and whether other events must wait for it."""
        self._absent: dict[str, Member] = {}
        """Holders of leases from before a crash, until they are back or the time of the leases is up."""

    @property
    def blind(self) -> bool:
        """Whether events are handed out as they come, without a look at keys and priorities."""
        return self._gate is None and not self._prioritised

    # -- lanes and members --------------------------------------------------------------------------

    def lane(
        self, topic: str, partition: int, *, cursor: int, end: int, urgent_to: int = 0
    ) -> Lane:
        """Start serving a partition from `cursor`; none from `urgent_to` on has a priority."""
        lane = self.lanes[topic, partition] = Lane(topic, partition, cursor, end, urgent_to)
        self._queue(lane)
        return lane

    def arrived(self, lane: Lane, end: int, *, prioritised: bool = False) -> None:
        """Events up to `end` may be handed out."""
        lane.end = max(lane.end, end)
        if prioritised:
            lane.urgent_to = max(lane.urgent_to, end)
        self._queue(lane)

    def join(self, member_id: str, max_inflight: int, now: float = 0.0) -> Member:
        """Add a consumer that holds up to `max_inflight` events; a former one of its name leaves."""
        if member_id in self.members:
            self.leave(member_id, now)
        member = self.members[member_id] = Member(member_id, max_inflight)
        self._rotation.append(member)
        return member

    def leave(self, member_id: str, now: float) -> None:
        """Remove a consumer; its events return. Only those that it was handed cost an attempt."""
        member = self.members.pop(member_id)
        self._rotation.remove(member)
        for lease in sorted(member.leases.values(), key=_first):
            for index in range(lease.count):
                if lease.states[index] == OUT and lease.handed(index):
                    self._fail(lease, index, RETURNED, now, 0.0, "the consumer left")
            self._return_unhanded(lease, now)

    # -- settling -----------------------------------------------------------------------------------

    def ack(self, lease: Lease, index: int, now: float) -> None:
        """An event is done."""
        self.check(lease, index, now)
        lease.dirty.append(index)
        self._dirty[lease.fence] = lease
        self._close(lease, index, ACKED)
        self._settled(lease.lane, lease.start + index)

    def ack_run(self, lease: Lease, start: int, stop: int, now: float) -> bool:
        """Ack neighbours of one lease at once; False, and nothing done, when one needs a closer look."""
        count = stop - start
        plain = self._gate is None and lease.states.count(OUT, start, stop) == count
        if not plain or min(lease.deadlines[start:stop], default=now + 1) <= now:
            return False
        lease.dirty += range(start, stop)
        self._dirty[lease.fence] = lease
        lease.states[start:stop] = bytes((ACKED,)) * count
        lease.open -= count
        lease.member.gave(count)
        if not lease.open:
            self._drop(lease)
        return True

    def ack_now(self, lease: Lease, index: int, now: float) -> Acked:
        """Ack in a transaction: returns the entry instead of leaving it to `drain`."""
        self.check(lease, index, now)
        self._close(lease, index, ACKED)
        self._settled(lease.lane, lease.start + index)
        return Acked(self.name, lease.lane.topic, lease.lane.partition, [lease.start + index, 1])

    def nack(
        self,
        lease: Lease,
        index: int,
        now: float,
        delay_s: float | None = None,
        reason: str = "nacked",
    ) -> None:
        """An event failed: again after `delay_s` or the ladder's step, or dead when out of attempts."""
        check_span("delay_s", delay_s)
        self.check(lease, index, now)
        self._fail(lease, index, NACKED, now, delay_s, reason)

    def give_back(self, lease: Lease, index: int, now: float) -> None:
        """The member did not finish work on an event: again at once, no attempt counted."""
        self.check(lease, index, now)
        self._return(lease, index, 1, now)

    def reject(self, lease: Lease, index: int, now: float, reason: str = "rejected") -> None:
        """An event is dead without further attempts."""
        self.check(lease, index, now)
        self._close(lease, index, REJECTED)
        self.failures[REJECTED] += 1
        self._doom(lease.lane, lease.start + index, lease.attempt, reason, lease.handed(index))

    def extend(self, lease: Lease, index: int, now: float, seconds: float | None = None) -> bool:
        """The member is still at work on an event; True when its lease ends sooner than before."""
        check_span("seconds", seconds)
        self.check(lease, index, now)
        if index >= len(lease.deadlines):
            return False
        deadline = now + (self.spec.lease_s if seconds is None else seconds)
        sooner = deadline < lease.deadlines[index]
        if sooner:
            self.look_at(lease, deadline)
        lease.deadlines[index] = deadline
        return sooner

    def look_at(self, lease: Lease, due: float) -> None:
        """A lease may run out at `due`, earlier than the time noted when it was made."""
        heapq.heappush(self._checks, (due, lease.fence))

    def check(self, lease: Lease, index: int, now: float) -> None:
        """Raise the error that settling this event now would raise."""
        if lease.states[index] == OUT:
            if index >= len(lease.deadlines) or now < lease.deadlines[index]:
                return
            self._fail(lease, index, EXPIRED, now, None, "the lease ran out")
        raise lease.refusal(index)

    def buried(self, lane: Lane, offset: int) -> None:
        """A dead event is stored as a dead letter."""
        # After a reset it may be out again, and its key must then wait for the new delivery.
        if self._dead.pop((lane, offset), None) is not None:
            self._settled(lane, offset)

    # -- leasing ------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Lease]:
        """Leases for the members that have credit; hand them over after `drain()` is durable."""
        self._tick(now)
        leases: list[Lease] = []
        while (member := self._next_member()) is not None:
            run = self._next_run(member.room(self, self._share(member)))
            if run is None:
                break
            leases.append(self._lease(run, member, now))
        return leases

    def next_due(self) -> float | None:
        """When `dispatch` should be called even if nothing happens."""
        times = [heap[0][0] for heap in (self._retries, self._checks) if heap]
        return min(times) if times else None

    def loaded(self) -> None:
        """The keys or priorities of `starved` are there now."""
        run, self.starved = self.starved, None
        if run is None:
            return
        if self._gate is not None:
            self._through_gate(run)
        else:
            self._compare(run)

    def drain(self) -> list[Entry]:
        """Entries about everything since the last call, for the journal."""
        entries = self._entries
        for lease in self._dirty.values():
            lane = lease.lane
            entries.append(Acked(self.name, lane.topic, lane.partition, lease.acked_runs()))
        self._entries, self._dirty = [], {}
        return entries

    def has_news(self) -> bool:
        """Whether `drain` would return anything."""
        return bool(self._entries or self._dirty)

    def news_bytes(self) -> int:
        """An upper bound on the size of what `drain` would return, encoded."""
        runs = sum(len(lease.dirty) for lease in self._dirty.values())
        return ENTRY_BYTES * (len(self._entries) + len(self._dirty)) + RUN_BYTES * runs

    def outstanding(self) -> int:
        """Events handed out or waiting for another attempt."""
        return sum(run.count for run in self.unsettled())

    def unsettled(self) -> Iterable[Run]:
        """Every event handed out or waiting for another attempt, as runs."""
        for lease in self.leases.values():
            for index in range(lease.count):
                if lease.states[index] == OUT:
                    yield Run(lease.lane, lease.start + index, 1, lease.attempt)
        yield from self.waiting()

    def waiting(self) -> Iterable[Run]:
        """Every event begun that no member holds: it waits for an attempt, a key or its turn."""
        for (lane, offset), attempts in self._dead.items():
            yield Run(lane, offset, 1, attempts)
        yield from self._ready
        yield from self._unexamined
        yield from self._priorities.waiting()
        if self._gate is not None:
            yield from self._gate.waiting()
        if self.starved is not None and not self._wants_keys_only(self.starved):
            yield self.starved
        yield from (run for _, _, run in self._retries)

    # -- operators ----------------------------------------------------------------------------------

    def withdraw(self, lane: Lane, offset: int) -> None:
        """An operator settles an event: its holder may no longer settle it."""
        # The event may never have been leased; then only this entry tells a replay that it was begun.
        self._entries.append(
            Retried(self.name, lane.topic, lane.partition, offset, 1, 0, AT_ONCE_MS)
        )
        if offset >= lane.cursor:
            self._set_apart(lane, offset)
        for lease in list(self.leases.values()):
            index = offset - lease.start
            if lease.lane is lane and 0 <= index < lease.count and lease.states[index] == OUT:
                self._close(lease, index, REJECTED)
        waiting, self._retries = self._retries, []
        for due, _, run in sorted(waiting, key=lambda item: item[:2]):
            for part in run.without(lane, offset):  # after a restart it may be one of several
                self._wait(part, due)
        self._ready = deque(part for run in self._ready for part in run.without(lane, offset))
        self._unexamined = deque(
            part for run in self._unexamined for part in run.without(lane, offset)
        )
        self._priorities.withdraw(lane, offset)
        self._dead.pop((lane, offset), None)
        self._not_before.pop((lane, offset), None)
        self.doomed = [each for each in self.doomed if (each.lane, each.offset) != (lane, offset)]
        if self.starved is not None and self.starved.holds(lane, offset):
            self._unexamined.extendleft(reversed(self.starved.without(lane, offset)))
            self.starved = None
        if self._gate is None or not self._gate.withdraw(lane, offset):
            self._settled(lane, offset)

    def revive(self, lane: Lane, offset: int, now: float) -> None:
        """Deliver a dead letter again, with all attempts."""
        if offset >= lane.cursor or any(run.holds(lane, offset) for run in self.unsettled()):
            return  # a reset has brought it back already
        lane.known = max(lane.known, lane.cursor)
        run = Run(lane, offset, 1, 0)
        if self._gate is None:
            self._again(run, now, 0.0)
            return
        # Its key was freed when it was stored as a dead letter: it waits for its turn like any other.
        self._entries.append(Retried(self.name, lane.topic, lane.partition, offset, 1, 0, 0))
        self._unexamined.append(run)

    def reset(self, lane: Lane, offset: int) -> None:
        """Read a lane from another offset; leases on it are void."""
        for lease in [lease for lease in self.leases.values() if lease.lane is lane]:
            self._fence(lease)
            self._dirty.pop(lease.fence, None)
        self._retries = [item for item in self._retries if item[2].lane is not lane]
        heapq.heapify(self._retries)
        self._ready = deque(run for run in self._ready if run.lane is not lane)
        self._unexamined = deque(run for run in self._unexamined if run.lane is not lane)
        self._leased_before = deque(run for run in self._leased_before if run.lane is not lane)
        for places in (self._unknown_keys, self._not_before):
            for place in [place for place in places if place[0] is lane]:
                del places[place]
        self._dead = {place: made for place, made in self._dead.items() if place[0] is not lane}
        self.doomed = [doomed for doomed in self.doomed if doomed.lane is not lane]
        if self.starved is not None and self.starved.lane is lane:
            self.starved = None
        self._priorities.forget(lane)
        if self._gate is not None:
            self._gate.forget(lane)
        lane.known = max(lane.known, lane.cursor)
        lane.looked_to = 0
        lane.cursor = offset
        self._queue(lane)

    def end(self) -> None:
        """The group is deleted: its leased events can no longer be settled."""
        for lease in list(self.leases.values()):
            self._fence(lease)
        self.doomed.clear()

    # -- restarts and lost connections --------------------------------------------------------------

    def ledgers(self, now: float) -> dict[tuple[str, int], Ledger]:
        """Unsettled events of each lane; the same as replaying every entry would give."""
        waits = {id(run): due - now for due, _, run in self._retries}
        ledgers = {place: Ledger(lane.cursor) for place, lane in self.lanes.items()}
        for run in sorted(self.unsettled(), key=lambda run: run.start):
            ledger = ledgers[run.lane.topic, run.lane.partition]
            delay_ms = max(0, round(waits.get(id(run), 0.0) * 1_000))
            ledger.retried(run.start, run.count, run.made, delay_ms)
            for offset in range(run.start, run.start + run.count if self._not_before else 0):
                due = self._not_before.get((run.lane, offset), now)
                if due > now:
                    ledger.retried(offset, 1, run.made, round((due - now) * 1_000))
        return ledgers

    def restore(
        self,
        topic: str,
        partition: int,
        ledger: Ledger,
        end: int,
        now: float,
        hold_s: float = 0.0,
        handed: Handed = lambda start, stop, attempt: None,
        urgent_to: int = 0,
    ) -> Lane:
        """Start serving a lane from where a ledger says it stood.

        Events leased when the process died are delivered again at once, or after `hold_s`: until then
        their holder may `reclaim` them. An attempt is counted for those that a consumer was `handed`.
        """
        lane = self.lane(
            topic, partition, cursor=ledger.high, end=max(end, ledger.high), urgent_to=urgent_to
        )
        for run in ledger.open():
            if run.delay_ms or not run.made:
                self._resume(
                    Run(lane, run.start, run.stop - run.start, run.made), run.delay_ms, now
                )
                continue
            for start, stop, given in _parts(run, handed(run.start, run.stop, run.made)):
                leased = Run(lane, start, stop - start, run.made - 1)
                if hold_s:
                    self._hold_for(leased, run.holder, now + hold_s, given=given)
                    continue
                again = leased._replace(made=run.made) if given else leased
                self._entries.append(
                    Retried(self.name, topic, partition, start, again.count, again.made, AT_ONCE_MS)
                )
                self._resume(again, AT_ONCE_MS, now)
        return lane

    def reclaim(
        self, lane: Lane, start: int, count: int, attempt: int, member: Member, now: float
    ) -> Lease | None:
        """A holder is back after a crash: it gets a new lease on those events that no other member got."""
        lease = Lease(self.fence, Run(lane, start, count, attempt - 1), member)
        lease.states = bytearray([RETURNED]) * count
        lease.open = 0
        for parked in self._waiting_for(self._absent):
            if parked.lane is not lane or parked.attempt != attempt:
                continue
            first, last = max(start, parked.start), min(start + count, parked.start + parked.count)
            for offset in range(first, last):
                if parked.states[offset - parked.start] == OUT:
                    self._close(parked, offset - parked.start, RETURNED)
                    lease.states[offset - start] = OUT
                    lease.open += 1
        if not lease.open:
            return None
        self.fence += 1
        self.leases[lease.fence] = member.leases[lease.fence] = lease
        member.took(lease.open)
        heapq.heappush(self._checks, (now + self.spec.lease_s, lease.fence))
        return lease

    def expire_unclaimed(self, now: float, holder: str | None = None) -> None:
        """This holder, or all, are back: deliver at once again what they did not reclaim.

        It counts as an attempt where it was handed out, or where that is not known.
        """
        for parked in self._waiting_for(self._absent if holder is None else (holder,)):
            for index in range(parked.count if parked.counted else 0):
                if parked.states[index] == OUT:
                    self._fail(parked, index, RETURNED, now, 0.0, BACK_WITHOUT)
            self._return_unhanded(parked, now)

    def return_unheld(
        self,
        member: Member,
        kept: Mapping[int, Collection[int]],
        now: float,
        reason: str = BACK_WITHOUT,
    ) -> None:
        """A member has only these events, by lease: the rest of its leases is delivered again at once.

        That includes events on their way to it, so that none overtakes a lost one. An attempt is
        counted only for events that it said it had.
        """
        for lease in list(member.leases.values()):
            lane, has = lease.lane, kept.get(lease.fence, ())
            lost = [at for at in range(lease.count) if lease.states[at] == OUT and at not in has]
            if lost:
                lane.known = max(lane.known, lane.cursor)
            for index in filter(lease.handed, lost):
                self._fail(lease, index, RETURNED, now, 0.0, reason)
            self._return_each(lease, [index for index in lost if not lease.handed(index)], now)

    def _hold_for(self, run: Run, holder: str, until: float, *, given: bool) -> None:
        """Keep events for the member that had them when the process died."""
        absent = self._absent.setdefault(holder, Member(holder, 0))
        for start in range(run.start, run.start + run.count, MAX_LEASE_EVENTS):
            count = min(MAX_LEASE_EVENTS, run.start + run.count - start)
            lease = Lease(self.fence, run._replace(start=start, count=count), absent)
            self.fence += 1
            lease.deadlines = [until] * count
            lease.counted = given
            if given:
                self.mark(lease)[0] = start + count
            self.leases[lease.fence] = absent.leases[lease.fence] = lease
            heapq.heappush(self._checks, (until, lease.fence))
        if self._gate is not None:
            self._leased_before.append(run)
            self._unknown_keys.update(
                ((run.lane, offset), True) for offset in range(run.start, run.start + run.count)
            )

    def _waiting_for(self, holders: Iterable[str]) -> list[Lease]:
        """The leases kept for these holders."""
        absent = (self._absent[holder] for holder in holders if holder in self._absent)
        return [lease for member in absent for lease in member.leases.values()]

    def _resume(self, run: Run, delay_ms: int, now: float) -> None:
        """Let events wait for their next attempt, if they have one left."""
        offsets = range(run.start, run.start + run.count)
        due = now + delay_ms / 1_000 if delay_ms > AT_ONCE_MS else None
        if self.spec.retry.exhausted(run.made):
            for offset in offsets:
                self._doom(run.lane, offset, run.made, "out of attempts when the bus stopped")
        elif self._gate is not None:
            self._unexamined.append(run)  # in offset order, so that keys keep theirs
            if due is not None:
                self._not_before.update(((run.lane, offset), due) for offset in offsets)
        elif due is not None:
            self._wait(run, due)
        else:
            self._again_now(run)

    # -- lanes in line ------------------------------------------------------------------------------

    def _queue(self, lane: Lane) -> None:
        """Put a lane in its line if it has unread events; call it whenever its cursor or end moved."""
        unread = max(0, lane.end - lane.cursor)
        self.unread += unread - lane.unread
        lane.unread = unread
        line = self._line_of(lane) if unread else None
        if lane.line is line:
            return
        if lane.line is not None:
            lane.line.remove(lane)
        lane.line = line
        if line is not None:
            line.append(lane)

    def _line_of(self, lane: Lane) -> deque[Lane]:
        # With an order by key, keys come before priorities.
        return self._urgent_lanes if lane.urgent and self._gate is None else self._plain_lanes

    def _pull(self, limit: int) -> Run | None:
        """The next events that were never handed out (or came back from recovery)."""
        if self._gate is not None and self._unexamined:
            return cut(self._unexamined, limit)
        # Urgent lanes wait in `_priorities`, or for their priorities to be loaded.
        return self._advance(self._plain_lanes, limit) if self._plain_lanes else None

    def _advance(self, line: deque[Lane], limit: int) -> Run:
        lane = line.popleft()
        lane.line = None
        run = Run(lane, lane.cursor, min(limit, lane.end - lane.cursor), 0)
        lane.cursor += run.count
        self._queue(lane)  # at the back: lanes take turns
        return run

    # -- choosing what goes out ---------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Release retries that are due, and end leases that ran out."""
        while self._retries and self._retries[0][0] <= now:
            self._again_now(heapq.heappop(self._retries)[2])
        while self._checks and self._checks[0][0] <= now:
            fence = heapq.heappop(self._checks)[1]
            lease = self.leases.get(fence)
            if lease is None:
                continue
            self._expire(lease, now)
            if lease.open:
                due = lease.next_deadline()
                heapq.heappush(
                    self._checks, (now + self.spec.lease_s if due is None else due, fence)
                )

    def _expire(self, lease: Lease, now: float) -> None:
        for index in lease.expiring(now):
            if lease.counted:
                self._fail(lease, index, EXPIRED, now, None, "the lease ran out")
            else:
                self._return(lease, index, 1, now)

    def _next_member(self) -> Member | None:
        if self.spec.order == "single":
            first = next((each for each in self.members.values() if not each.away), None)
            return first if first is not None and first.ready(self) else None
        for _ in range(len(self._rotation)):
            member = self._rotation[0]
            self._rotation.rotate(-1)
            if member.ready(self):
                return member
        return None

    def _share(self, member: Member) -> int:
        """How many events one member takes at a time: its credit, less when there are other members."""
        credit = min(member.max_inflight - member.inflight, MAX_LEASE_EVENTS)
        if len(self.members) <= 1 or self.spec.order == "single":
            return credit
        return max(1, min(credit, self.unread // len(self.members)))

    def _next_run(self, limit: int) -> Run | None:
        if self._gate is not None:
            self._fill_gate(limit)
        elif self._prioritised:
            self._unexamined += self._ready  # repeated events are compared with the rest
            self._ready.clear()
            run = self._next_urgent(limit)
            if run is not None or self.starved is not None:
                return run
        if self._ready:
            return cut(self._ready, limit)
        # With a gate, all other events wait for their key, or for keys to be loaded.
        return self._pull(limit) if self._gate is None else None

    @property
    def _prioritised(self) -> bool:
        """Whether events that wait may have a priority."""
        return bool(self._urgent_lanes or self._unexamined or self._priorities or self.starved)

    def _next_urgent(self, limit: int) -> Run | None:
        """The events of the highest priority within the window; None while priorities must be loaded."""
        while self.starved is None and len(self._priorities) < PRIORITY_WINDOW_EVENTS:
            if self._unexamined:
                run = cut(self._unexamined, PRIORITY_WINDOW_EVENTS)
            elif self._urgent_lanes:
                ahead = self._urgent_lanes[0].urgent_to - self._urgent_lanes[0].cursor
                run = self._advance(self._urgent_lanes, min(PRIORITY_WINDOW_EVENTS, ahead))
            else:
                break
            if not self._compare(run):
                break
        # Events whose priorities must be loaded may be more urgent than all those examined.
        return self._priorities.pop(limit) if self.starved is None else None

    def _compare(self, run: Run) -> bool:
        """Put a run in line by priority; False when its priorities must be loaded first."""
        lane = run.lane
        if run.start < lane.urgent_to:
            priorities = self.peek_priorities(lane, run.start, run.count)
        else:
            priorities = [0] * run.count
        if priorities is None:
            self.starved = run
            return False
        again = run.made > 0 or run.start < lane.looked_to
        lane.looked_to = max(lane.looked_to, run.start + run.count)
        self._priorities.offer(lane, run.start, run.made, priorities, again=again)  # type: ignore[arg-type]
        return True

    def _fill_gate(self, wanted: int) -> None:
        assert self._gate is not None
        ready = sum(run.count for run in self._ready)
        while ready < wanted and self._gate.held < MAX_HELD_EVENTS and self.starved is None:
            if self._leased_before:
                run: Run | None = cut(self._leased_before, MAX_LEASE_EVENTS)
            else:
                run = self._pull(MAX_LEASE_EVENTS)
            if run is None:
                return
            ready += self._through_gate(run)

    def _through_gate(self, run: Run) -> int:
        """Offer a run to the gate; returns how many events may go out now."""
        assert self._gate is not None
        lane = run.lane
        keys = self.peek_keys(lane, run.start, run.count)
        if keys is None:
            self.starved = run
            return 0
        if self._wants_keys_only(run):
            for offset, key in enumerate(keys, run.start):
                if self._unknown_keys.pop((lane, offset), False):
                    self._gate.occupy(lane, offset, key)  # type: ignore[arg-type]
            return 0
        free = self._gate.offer(lane, run.start, run.made, keys)  # type: ignore[arg-type]
        return sum(map(self._free, free))

    def _wants_keys_only(self, run: Run) -> bool:
        """Whether a run is still leased out since before a crash, so that only its keys are needed."""
        return (run.lane, run.start) in self._unknown_keys

    def _free(self, run: Run) -> int:
        """The keys of these events are free; returns how many may go out now."""
        if not self._not_before:
            self._ready.append(run)
            return run.count
        ready = 0
        for offset in range(run.start, run.start + run.count):
            due = self._not_before.pop((run.lane, offset), None)
            one = run._replace(start=offset, count=1)
            if due is None:
                self._ready.append(one)
                ready += 1
            else:
                self._wait(one, due)
        return ready

    def _lease(self, run: Run, member: Member, now: float) -> Lease:
        lease = Lease(self.fence, run, member)
        self.fence += 1
        self.leases[lease.fence] = member.leases[lease.fence] = lease
        member.took(run.count)
        heapq.heappush(self._checks, (now + self.spec.lease_s, lease.fence))
        lane = run.lane
        self._entries.append(
            Leased(self.name, lane.topic, lane.partition, run.start, run.count, lease.attempt,
                   lease.fence, member.id)
        )  # fmt: skip
        return lease

    # -- ending leases ------------------------------------------------------------------------------

    def _close(self, lease: Lease, index: int, state: int) -> None:
        lease.states[index] = state
        lease.open -= 1
        lease.member.gave(1)
        if not lease.open:
            self._drop(lease)

    def _fence(self, lease: Lease) -> None:
        """Void what is out of a lease."""
        for index in range(lease.count):
            if lease.states[index] == OUT:
                self._close(lease, index, FENCED)

    def _drop(self, lease: Lease) -> None:
        del self.leases[lease.fence]
        lease.member.leases.pop(lease.fence, None)

    def _fail(
        self, lease: Lease, index: int, state: int, now: float, delay_s: float | None, reason: str
    ) -> None:
        exhausted = self.spec.retry.exhausted(lease.attempt)
        if delay_s is None:
            delay_s = 0.0 if exhausted else self.spec.retry.delay_s(lease.attempt)
        offset = lease.start + index
        self._close(lease, index, state)
        self.failures[state] += 1
        if exhausted:
            self._doom(lease.lane, offset, lease.attempt, reason)
        else:
            self._again(Run(lease.lane, offset, 1, lease.attempt), now, delay_s)

    def _return_unhanded(self, lease: Lease, now: float) -> None:
        """Return what is out of a lease; its consumer was never given it."""
        out = [index for index in range(lease.count) if lease.states[index] == OUT]
        self._return_each(lease, out, now)

    def _return_each(self, lease: Lease, indices: list[int], now: float) -> None:
        found = runs(indices)
        for first, count in zip(found[::2], found[1::2], strict=True):
            self._return(lease, first, count, now)

    def _return(self, lease: Lease, first: int, count: int, now: float) -> None:
        """Deliver neighbours of a lease again at once; no attempt is counted."""
        for index in range(first, first + count):
            self._close(lease, index, RETURNED)
        self._again(Run(lease.lane, lease.start + first, count, lease.attempt - 1), now, 0.0)

    def _again(self, run: Run, now: float, delay_s: float) -> None:
        lane = run.lane
        delay_ms = max(AT_ONCE_MS, round(delay_s * 1_000))
        self._entries.append(
            Retried(self.name, lane.topic, lane.partition, run.start, run.count, run.made, delay_ms)
        )
        self._wait(run, now + delay_s)

    def _again_now(self, run: Run) -> None:
        """A run may go out again, after more urgent ones."""
        others = self._urgent_lanes or self._unexamined or self._priorities or self.starved
        urgent = self._gate is None and bool(others or run.start < run.lane.urgent_to)
        (self._unexamined if urgent else self._ready).append(run)

    def _wait(self, run: Run, due: float) -> None:
        self._retry_number += 1
        heapq.heappush(self._retries, (due, self._retry_number, run))

    def _doom(
        self, lane: Lane, offset: int, attempt: int, reason: str, handed: bool = True
    ) -> None:
        self._dead[lane, offset] = attempt
        # The journal holds valid text only; a reason from a file name or a program may hold anything.
        reason = str(reason).encode("utf-8", "backslashreplace").decode()
        self.doomed.append(Doomed(lane, offset, attempt if handed else attempt - 1, reason))

    def _settled(self, lane: Lane, offset: int) -> None:
        if self._gate is None:
            return
        if (lane, offset) in self._unknown_keys:
            self._unknown_keys[lane, offset] = False
        following = self._gate.settled(lane, offset)
        if following is not None:
            self._free(following)

    def _set_apart(self, lane: Lane, offset: int) -> None:
        """An event that was never handed out leaves its lane; those before it keep their order."""
        before = Run(lane, lane.cursor, offset - lane.cursor, 0)
        lane.end = max(lane.end, offset + 1)
        lane.cursor = offset + 1
        self._queue(lane)
        if before.count:
            plain = self._gate is None and before.start >= lane.urgent_to
            (self._ready if plain else self._unexamined).append(before)


def _first(lease: Lease) -> int:
    return lease.start


def _parts(run: Open, handed: Sequence[tuple[int, int]] | None) -> Iterator[tuple[int, int, bool]]:
    """The stretches of a run, and whether each was handed out; all of it when that is not known."""
    if handed is None:
        handed = [(run.start, run.stop)]
    at = run.start
    for start, stop in handed:
        if at < start:
            yield at, start, False
        yield start, stop, True
        at = stop
    if at < run.stop:
        yield at, run.stop, False

"""Delivery to queue groups: runs their delivery machines and hands leased events to their members.

`Dispatcher` holds the machine (`core.delivery.QueueGroup`) of each queue group. New events, settlements
and timers go to the machine; the leases that it makes go into the next commit. When they are durable,
the events are put into the `Inbox` of the member, as one `LeasedBatch` for each stored batch. The
dispatcher also remembers which groups read a topic.

`FileReads` reads leased events that are not in memory. A member gets its leases in the order in which
they were made, so a lease whose events are in memory waits behind one whose events must be read. Each
lease is read on its own, the first two of a member at the same time, and in pieces; the next piece is
put into the inbox when the member has taken the last one. So little of what a member is leased lies in
memory, however much that is. Members do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from penstock.core.admission import AdmissionLimits, TenantCredit
from penstock.core.delivery import BACK_WITHOUT, MAX_LEASE_EVENTS, QueueGroup
from penstock.core.entry import Entry, GroupSpec
from penstock.core.lease import OUT, STATES, Lane, Lease, Member, Run, check_span
from penstock.core.routes import DIRECT
from penstock.engines.embedded.log_groups import LogGroup
from penstock.engines.embedded.reader import load
from penstock.engines.embedded.runtime import Runtime
from penstock.log.event_log import EventLog, InMemory
from penstock.log.handovers import Handovers
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, Fenced, OffsetExpired, PenstockError
from penstock.model.event import Event

T = TypeVar("T")

TIME_TO_LIVE = "its time to live was over"
"""Why an expired event is a dead letter."""
MAX_TOPICS_WITH_READERS = 100_000
"""A bound on the remembered answers to "which groups read it", not on topics."""
READ_AHEAD = 2
"""Leases of one member that are read at the same time: the second while the first is sent."""


class Dispatcher:
    """Runs the queue groups of one engine."""

    def __init__(
        self,
        log: EventLog,
        runtime: Runtime,
        handovers: Handovers,
        limits: AdmissionLimits,
        *,
        commit_now: Callable[[], None],
        commit_soon: Callable[[], None],
        store_failed: Callable[[QueueGroup], None],
        find_readers: Callable[[str], list[QueueGroup | LogGroup]],
    ) -> None:
        self.groups: dict[str, QueueGroup] = {}
        self.readers: dict[str, list[QueueGroup | LogGroup]] = {}
        """The groups that read a topic, remembered from `readers_of`."""
        self.failures = [0] * len(STATES)
        """Failed deliveries by state, of all groups, deleted ones included."""
        self.windows = TenantCredit(limits, self.touched)
        self.paused = False
        """True when the process is about to end: nothing more is leased."""
        self._log = log
        self._runtime = runtime
        self._handovers = handovers
        self._commit_now = commit_now
        self._commit_soon = commit_soon
        self._store_failed = store_failed
        self._find_readers = find_readers
        self._inboxes: dict[tuple[str, str], Inbox] = {}
        self._new_leases: list[Lease] = []
        """Leases for the next commit."""
        self._news: dict[str, QueueGroup] = {}
        """Groups with entries for the next commit."""
        self._pump_scheduled: set[str] = set()
        """Groups that are pumped at the end of this turn of the loop."""
        self._loading: dict[str, Run] = {}
        """By group: the run whose keys and priorities are being read, because its machine asks for them."""
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        """When each machine is due again; timer handles of uvloop do not tell their time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._file_reads = FileReads(log, runtime, self._put, self.touched)
        self._owner: dict[int, QueueGroup] = {}
        """The group of each new lease, by the lease's `id`."""

    # -- groups and members --------------------------------------------------------------------

    def add(self, name: str, spec: GroupSpec, fence: int) -> QueueGroup:
        """Run the machine of a group."""
        group = self.groups[name] = QueueGroup(name, spec, fence=fence)
        group.peek_keys = self._peek_keys
        group.peek_priorities = self._peek_priorities
        group.failures = self.failures
        group.mark = partial(self._handovers.mark, name)
        return group

    def readers_of(self, topic: str) -> list[QueueGroup | LogGroup]:
        """The groups that read a topic."""
        readers = self.readers.get(topic)
        if readers is None:
            if len(self.readers) > MAX_TOPICS_WITH_READERS:
                self.readers.clear()
            readers = self.readers[topic] = self._find_readers(topic)
        return readers

    def direct_readers(self, topic: str) -> list[QueueGroup]:
        """Direct consumers that read a topic."""
        return [
            group
            for group in self.readers_of(topic)
            if group.name.startswith(DIRECT) and isinstance(group, QueueGroup)
        ]

    def forget_readers(self, topic: str) -> None:
        """Find out again which groups read a topic when that is asked next."""
        self.readers.pop(topic, None)

    def forget_handed(self, group: QueueGroup, only: tuple[str, int] | None = None) -> None:
        """A group was moved: offsets that consumers were handed before do not count any more."""
        self._handovers.forget(group.name, only)

    def remove(self, name: str, error: PenstockError) -> None:
        """A group is deleted: its members get the error, and their leases end.

        If they did not, a later ack would count for the next group of this name.
        """
        gone = self.groups.pop(name, None)
        self._news.pop(name, None)
        self._pump_scheduled.discard(name)
        if gone is None:
            return
        self.forget_handed(gone)
        gone.end()
        if name in self._timers:
            self._timers.pop(name)[1].cancel()
        for member in gone.members:
            inbox = self._inboxes.pop((name, member), None)
            if inbox is not None:
                inbox.stop(error)
                self.windows.left(inbox.member)

    def join(self, name: str, member_id: str, max_inflight: int, tenant: str) -> Inbox:
        """A consumer of a tenant joins; a consumer with the same member id is stopped."""
        group = self.groups[name]
        former = self._inboxes.get((name, member_id))
        if former is not None:
            words = f"another consumer joined {name!r} as {member_id!r}"
            former.stop(Fenced(f"{words}; this one gets no more"))
            self.windows.left(former.member)
        member = group.join(member_id, max_inflight, self._runtime.now())
        self.windows.joined(member, tenant, max_inflight)
        inbox = self._inboxes[name, member_id] = Inbox(group, member, self._leave)
        self.pump(group)
        return inbox

    def adopt(
        self, inbox: Inbox, place: tuple[str, int], start: int, count: int, attempt: int
    ) -> LeasedRange | None:
        """A member is back after a crash of this process: lease it again what it held, if possible."""
        group, now = inbox.group, self._runtime.now
        lane = group.lanes.get(place)
        if lane is None or not 0 < count <= MAX_LEASE_EVENTS:
            return None
        lease = group.reclaim(lane, start, count, attempt, inbox.member, now())
        return None if lease is None else LeasedRange(group, lease, 0, count, now, self.touched)

    def release(self, inbox: Inbox, *, alone: bool) -> None:
        """A member that is back holds only what it adopted; `alone`: other members hold nothing."""
        group, member = inbox.group, inbox.member
        if self._inboxes.get((group.name, member.id)) is inbox:  # or it was replaced meanwhile
            group.expire_unclaimed(self._runtime.now(), None if alone else member.id)
            self.touched(group)

    def take_back(
        self,
        inbox: Inbox,
        kept: Iterable[LeasedRange],
        reason: str = BACK_WITHOUT,
        *,
        away: bool = False,
    ) -> None:
        """A member keeps only this of its leases; `away`: other members are served before it now."""
        group, member = inbox.group, inbox.member
        indices_kept: dict[int, set[int]] = {}
        for each in kept:
            indices = range(each.shift, each.shift + each.count)
            indices_kept.setdefault(each.lease.fence, set()).update(indices)
        group.return_unheld(member, indices_kept, self._runtime.now(), reason)
        member.away = member.away or away
        self.touched(group)

    def back(self, inbox: Inbox) -> None:
        """A member that was away takes events again, after the members that took over from it."""
        group, member = inbox.group, inbox.member
        if member.away and group.members.get(member.id) is member:
            group.members[member.id] = group.members.pop(member.id)
            member.away = False
            self.touched(group)

    def _leave(self, inbox: Inbox) -> None:
        # By now another group or member may have the same name; that one stays.
        group, member = inbox.group, inbox.member
        if self._inboxes.get((group.name, member.id)) is inbox:
            del self._inboxes[group.name, member.id]
        if self.groups.get(group.name) is group and group.members.get(member.id) is member:
            group.leave(member.id, self._runtime.now())
            self.touched(group)
        self.windows.left(inbox.member)

    def limit(self, limits: AdmissionLimits) -> None:
        """New limits are in force: members may get more than before."""
        self.windows.reload(limits)
        for group in self.groups.values():
            self.touched(group)

    def members(self, name: str) -> list[str]:
        """The members of a group, by their ids."""
        return sorted(self.groups[name].members)

    # -- leasing -------------------------------------------------------------------------------

    def arrived(
        self, group: QueueGroup, place: tuple[str, int], end: int, prioritised: bool
    ) -> None:
        """Events of a partition, up to `end`, may be leased; `pump` must follow."""
        lane = group.lanes.get(place)
        if lane is not None:
            group.arrived(lane, end, prioritised=prioritised)

    def touched(self, group: QueueGroup) -> None:
        """A member settled something or left: pump the group once in this turn of the loop."""
        name = group.name
        if name not in self._pump_scheduled and self.groups.get(name) is group:
            self._pump_scheduled.add(name)
            self._news[name] = group
            self._commit_soon()
            asyncio.get_running_loop().call_soon(self._scheduled_pump, group)

    def _scheduled_pump(self, group: QueueGroup) -> None:
        self._pump_scheduled.discard(group.name)
        self.pump(group)

    def pump(self, group: QueueGroup) -> None:
        """Lease events out to members with credit, and store events that failed."""
        if self.groups.get(group.name) is not group:
            return
        leases = [] if self.paused else group.dispatch(self._runtime.now())
        if group.doomed:
            self._store_failed(group)
        if leases:
            for lease in leases:
                self._owner[id(lease)] = group
            self._new_leases += leases
            self._news[group.name] = group
            self._commit_now()
        elif group.has_news():
            self._news[group.name] = group
            self._commit_soon()
        run = group.starved
        if run is not None and self._loading.get(group.name) is not run:
            self._loading[group.name] = run
            self._spawn(self._load_for(group, run))
        due = group.next_due()
        if due is not None:
            self._set_timer(group, due)

    def _set_timer(self, group: QueueGroup, due: float) -> None:
        if group.name in self._timers:
            earlier, timer = self._timers[group.name]
            if earlier <= due:
                return
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[group.name] = (due, loop.call_at(due, self._timer_fired, group))

    def _timer_fired(self, group: QueueGroup) -> None:
        self._timers.pop(group.name, None)
        self.pump(group)

    # -- for the commit loop -------------------------------------------------------------------

    def news_bytes(self) -> int:
        """An upper bound on what the entries of `drain` would take in the journal."""
        return sum(group.news_bytes() for group in self._news.values())

    def drain(self) -> tuple[list[Entry], list[Lease]]:
        """Entries of all machines, and the leases to deliver when these are durable."""
        entries: list[Entry] = []
        for group in self._news.values():
            entries += group.drain()
        leases, self._new_leases, self._news = self._new_leases, [], {}
        return entries, leases

    def deliver(self, leases: Sequence[Lease]) -> None:
        """The leases are durable: hand the events to the members."""
        for lease in leases:
            group = self._owner.pop(id(lease))
            inbox = self._inboxes.get((group.name, lease.member.id))
            if inbox is None or not lease.open:
                continue
            if inbox.unread:  # it must not overtake leases that are being read from files
                self._file_reads.add(group, inbox, lease)
                continue
            lane = lease.lane
            try:
                sources = self._log.plan(lane.topic, lane.partition, lease.start, lease.count)
            except OffsetExpired:
                self._file_reads.add(group, inbox, lease)  # it finds what retention left
                continue
            if all(isinstance(source, InMemory) for source in sources):
                self._put(group, inbox, lease, self._log.load(sources, lease.start, lease.count))
            else:
                self._file_reads.add(group, inbox, lease)

    def _put(
        self, group: QueueGroup, inbox: Inbox, lease: Lease, batches: Sequence[EventBatch]
    ) -> None:
        for batch in batches:
            if batch.expires is not None:
                self._drop_expired(group, lease, batch)
            if group.spec.filter:
                self._filter(group, lease, batch)
            runtime = self._runtime
            inbox.put(LeasedBatch(group, lease, batch, runtime.now, self.touched, runtime.wall_us))

    def _drop_expired(self, group: QueueGroup, lease: Lease, batch: EventBatch) -> None:
        now_us, now = self._runtime.wall_us(), self._runtime.now()
        assert batch.expires is not None
        for index, expires in enumerate(batch.expires.tolist()):
            at = batch.base_offset + index - lease.start
            if 0 < expires <= now_us and lease.states[at] == OUT:
                group.reject(lease, at, now, TIME_TO_LIVE)
                self.touched(group)

    def _filter(self, group: QueueGroup, lease: Lease, batch: EventBatch) -> None:
        now = self._runtime.now()
        for index, headers in enumerate(batch.headers()):
            at = batch.base_offset + index - lease.start
            if lease.states[at] == OUT and not group.spec.wants(headers):
                group.ack(lease, at, now)
        self.touched(group)

    # -- looking ahead -------------------------------------------------------------------------

    def _in_memory(self, lane: Lane, start: int, count: int) -> list[EventBatch] | None:
        try:
            sources = self._log.plan(lane.topic, lane.partition, start, count)
        except OffsetExpired:
            return None  # `_load` finds what retention left
        if not all(isinstance(source, InMemory) for source in sources):
            return None
        batches = self._log.load(sources, start, count)
        return batches if sum(map(len, batches)) == count else None

    def _peek_keys(self, lane: Lane, start: int, count: int) -> Sequence[bytes | None] | None:
        batches = self._in_memory(lane, start, count)
        if batches is None:
            return None
        return list(chain.from_iterable(batch.keys() for batch in batches))

    def _peek_priorities(self, lane: Lane, start: int, count: int) -> Sequence[int] | None:
        batches = self._in_memory(lane, start, count)
        if batches is None:
            return None
        return list(chain.from_iterable(map(_priorities, batches)))

    async def _load_for(self, group: QueueGroup, run: Run) -> None:
        try:
            await self._load(group, run)
        finally:
            if self._loading.get(group.name) is run:
                del self._loading[group.name]

    async def _load(self, group: QueueGroup, run: Run) -> None:
        """Read the keys and priorities that a machine asks for, then let it go on."""
        keys: list[bytes | None] = []
        priorities: list[int] = []
        offset, stop = run.start, run.start + run.count
        while offset < stop:
            try:
                lane = run.lane
                batches = await load(
                    self._log, self._runtime, lane.topic, lane.partition, offset, stop - offset
                )
            except (
                OffsetExpired
            ) as error:  # retention overtook the group: `FileReads` will skip them
                gone = min(stop, max(error.first_offset, offset + 1)) - offset
                keys += [None] * gone
                priorities += [0] * gone
                offset += gone
                continue
            except PenstockError as error:
                self._stop_all(group, error)
                return
            if not batches:
                return  # the topic was deleted meanwhile
            for batch in batches:
                keys += batch.keys()
                priorities += _priorities(batch)
            offset = batches[-1].end_offset
        if group.starved is not run:
            return
        group.peek_keys = lambda lane, start, count: keys
        group.peek_priorities = lambda lane, start, count: priorities
        group.loaded()
        group.peek_keys, group.peek_priorities = self._peek_keys, self._peek_priorities
        self.pump(group)

    def _stop_all(self, group: QueueGroup, error: PenstockError) -> None:
        for (name, _), inbox in self._inboxes.items():
            if name == group.name:
                inbox.stop(error)

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, error: PenstockError) -> None:
        """Stop all members and machines."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for inbox in list(self._inboxes.values()):
            inbox.stop(error)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._file_reads.close()


def _priorities(batch: EventBatch) -> list[int]:
    if batch.priority is None:
        return [0] * batch.count
    found: list[int] = batch.priority.tolist()
    return found


class Inbox:
    """Leased events that one member has not received yet."""

    def __init__(self, group: QueueGroup, member: Member, leave: Callable[[Inbox], None]) -> None:
        self.group = group
        self.member = member
        self.taker: Callable[[LeasedBatch], bool] | None = None
        """Takes a batch when it arrives and returns True; when it returns False `receive` gets it."""
        self.unread: deque[LeaseRead] = deque()
        """Leases whose events are being read from files, and those behind them: put in this order."""
        self._leave = leave
        self._waiting: deque[LeasedBatch] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._stopped: PenstockError | None = None
        self._left = False

    @property
    def empty(self) -> bool:
        """Whether nothing waits for `receive`."""
        return not self._waiting

    def put(self, delivery: LeasedBatch) -> None:
        """A batch arrived."""
        if self._stopped is not None:
            return  # events before it may be missing; all return to the group when the member leaves
        if self.taker is not None and not self._waiting and self.taker(delivery):
            return
        self._waiting.append(delivery)
        _wake(self._arrival)

    def stop(self, error: PenstockError) -> None:
        """Take no more batches; `receive` raises the error when it has returned the last one."""
        self._stopped = error
        _wake(self._arrival)
        _wake(self._drained)

    async def receive(self) -> LeasedBatch:
        """Wait for the next batch of events."""
        while not self._waiting:
            if self._stopped is not None:
                raise self._stopped
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        delivery = self._waiting.popleft()
        if not self._waiting:
            _wake(self._drained)
        return delivery

    async def emptied(self) -> None:
        """Wait until nothing waits for `receive`, or the inbox is stopped."""
        while self._waiting and self._stopped is None:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    async def close(self) -> None:
        """Leave the group."""
        self.leave()

    def leave(self) -> None:
        """Leave the group; what was not settled returns to it."""
        if self._left:
            return
        self._left = True
        if self._stopped is None:
            self._stopped = BusClosed("the subscription is closed; subscribe again")
        self._leave(self)
        _wake(self._arrival)
        _wake(self._drained)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class LeasedRange:
    """Consecutive offsets of one lease that a consumer holds; `index` counts from the first of them.

    It has no events: those of a broker's client lie in the client's memory.
    """

    __slots__ = ("_touched", "attempt", "count", "group", "lease", "now", "shift")

    def __init__(
        self,
        group: QueueGroup,
        lease: Lease,
        shift: int,
        count: int,
        now: Callable[[], float],
        touched: Callable[[QueueGroup], None],
    ) -> None:
        self.group = group
        self.lease = lease
        self.attempt = lease.attempt
        self.shift = shift
        """Where it begins in the lease."""
        self.count = count
        self.now = now
        self._touched = touched

    @property
    def open(self) -> int:
        """How many of its events are not settled."""
        return self.lease.states.count(OUT, self.shift, self.shift + self.count)

    def ack(self, index: int) -> None:
        """The event is done."""
        self.group.ack(self.lease, index + self.shift, self.now())
        self._touched(self.group)

    def ack_run(self, run: range) -> bool:
        """Consecutive events are done; False, and no change, when each must be acked by itself."""
        start = run.start + self.shift
        acked = self.group.ack_run(self.lease, start, start + len(run), self.now())
        if acked:
            self._touched(self.group)
        return acked

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """The event is to be delivered again, later."""
        self.group.nack(self.lease, index + self.shift, self.now(), delay_s, reason)
        self._touched(self.group)

    def extend(self, index: int, seconds: float | None) -> None:
        """The consumer needs more time for the event."""
        if self.group.extend(self.lease, index + self.shift, self.now(), seconds):
            self._touched(self.group)

    def give_back(self, index: int) -> None:
        """The event is to be delivered again, at once; the attempt was not finished and is not counted."""
        lease, at = self.lease, index + self.shift
        self.group.give_back(lease, at, self.now())
        if lease.mark is not None and lease.states.count(OUT, 0, len(lease.deadlines)) == 0:
            lease.mark[0] = 0
        self._touched(self.group)

    def handed(self, start: int, stop: int, left_s: float | None = None) -> None:
        """The consumer is given these events: their leases run from now, or for `left_s`."""
        check_span("left_s", left_s)
        lease, shift = self.lease, self.shift
        deadline = self.now() + (self.group.spec.lease_s if left_s is None else left_s)
        if start >= stop:
            return
        if left_s is not None:
            self.group.look_at(lease, deadline)
        first, last = max(shift + start, len(lease.deadlines)), shift + stop
        if first < last:
            lease.hand(first, deadline)
            lease.deadlines += [deadline] * (last - first - 1)
        elif not lease.handed(last - 1):  # later events of the lease were handed out before
            for index in range(shift + start, last):
                if not lease.handed(index):
                    lease.deadlines[index] = deadline
        self._note(last)

    def _note(self, stop: int) -> None:
        """Note how far the lease was handed out: after a crash only such events cost an attempt."""
        lease = self.lease
        mark = lease.mark
        if mark is None:
            mark = lease.mark = self.group.mark(lease)
        if mark[0] < lease.start + stop:
            mark[0] = lease.start + stop

    def reject(self, index: int, reason: str) -> None:
        """The event becomes a dead letter."""
        self.group.reject(self.lease, index + self.shift, self.now(), reason)
        self._touched(self.group)


class LeasedBatch(LeasedRange):
    """The part of one lease that lies in one stored batch, with its events."""

    __slots__ = ("_events", "_next", "_wall_us", "batch")

    def __init__(
        self,
        group: QueueGroup,
        lease: Lease,
        batch: EventBatch,
        now: Callable[[], float],
        touched: Callable[[QueueGroup], None],
        wall_us: Callable[[], int],
    ) -> None:
        super().__init__(group, lease, batch.base_offset - lease.start, batch.count, now, touched)
        self.batch = batch
        self._wall_us = wall_us
        self._next = 0
        self._events: list[Event] | None = None

    def hand(self) -> Event | None:
        """The next event, whose lease runs from now; None when all were handed out."""
        events = self._events
        if events is None:
            attempt, batch = self.attempt, self.batch
            events = self._events = [
                Event(batch, index, key, payload, headers, attempt, self)
                for index, (key, payload, headers) in enumerate(
                    zip(batch.keys(), batch.payloads(), batch.headers(), strict=True)
                )
            ]
        lease = self.lease
        while self._next < len(events):
            event = events[self._next]
            index = self._next + self.shift
            self._next += 1
            # The others were filtered out, or have expired or returned before they were handed out.
            if lease.states[index] != OUT or self._expired(event):
                continue
            lease.hand(index, self.now() + self.group.spec.lease_s)
            self._note(index + 1)
            return event
        self._events = None
        return None

    def _expired(self, event: Event) -> bool:
        """Whether the time to live of an event has passed; if so, reject it."""
        expires = self.batch.expires
        if expires is None or not 0 < expires[event.index] <= self._wall_us():
            return False
        self.reject(event.index, TIME_TO_LIVE)
        return True

    def fresh(self, skip: Sequence[int]) -> int:
        """How many of its events, those at the indices in `skip` left out, the group never got before."""
        if self.attempt != 1:
            return 0
        known = self.lease.lane.known - self.batch.base_offset
        if known <= 0:
            return self.batch.count - len(skip)
        return max(0, self.batch.count - known - sum(index >= known for index in skip))

    def without_events(self) -> LeasedRange:
        """The same offsets without events, to be kept when the events were sent."""
        return LeasedRange(self.group, self.lease, self.shift, self.count, self.now, self._touched)


class LeaseRead:
    """A lease whose events must be read from files before they reach its member."""

    __slots__ = ("lease", "reading")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.reading: asyncio.Task[list[EventBatch]] | None = None
        """None until it is among the first READ_AHEAD of its member."""


Put = Callable[[QueueGroup, Inbox, Lease, Sequence[EventBatch]], None]


class FileReads:
    """Reads leased events from files, for all members of one engine.

    The leases of a member that are still to be read are in its inbox (`unread`).
    """

    def __init__(
        self, log: EventLog, runtime: Runtime, put: Put, touched: Callable[[QueueGroup], None]
    ) -> None:
        self._log = log
        self._runtime = runtime
        self._put = put
        self._touched = touched
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, group: QueueGroup, inbox: Inbox, lease: Lease) -> None:
        """Read a lease's events and put them behind what the member was leased before."""
        inbox.unread.append(LeaseRead(lease))
        self._begin(inbox)
        if len(inbox.unread) == 1:
            self._spawn(self._serve(group, inbox))

    def _begin(self, inbox: Inbox) -> None:
        for each in islice(inbox.unread, READ_AHEAD):
            if each.reading is None:
                each.reading = self._spawn(self._read(each.lease, each.lease.start))

    async def _serve(self, group: QueueGroup, inbox: Inbox) -> None:
        unread = inbox.unread
        try:
            while unread:
                await self._deliver(group, inbox, unread[0])
                unread.popleft()
                self._begin(inbox)
        except Exception as error:
            if not isinstance(error, PenstockError):
                error = PenstockError(
                    f"leased events could not be read: {error!r}. They return to the group"
                )
            inbox.stop(error)
        finally:
            for each in unread:
                if each.reading is not None:
                    each.reading.cancel()
            unread.clear()

    async def _deliver(self, group: QueueGroup, inbox: Inbox, first: LeaseRead) -> None:
        lease = first.lease
        offset = lease.start
        while True:
            assert first.reading is not None  # `_begin` starts the first ones
            try:
                batches = await first.reading
            except OffsetExpired as error:
                offset = self._skip(group, lease, offset, error)
            else:
                if not batches:
                    return  # the topic was deleted meanwhile, or the member is gone
                await inbox.emptied()
                self._put(group, inbox, lease, batches)
                offset = batches[-1].end_offset
                del batches  # they may be large, and the next ones are read now
            following = lease.states.find(OUT, offset - lease.start)
            if following < 0:
                return  # all events were put, or the others were taken back meanwhile
            offset = lease.start + following
            first.reading = self._spawn(self._read(lease, offset))

    def _skip(self, group: QueueGroup, lease: Lease, offset: int, error: OffsetExpired) -> int:
        """Ack the events that retention deleted before they were delivered; return where to go on."""
        first: int = min(lease.start + lease.count, max(error.first_offset, offset + 1))
        for index in range(offset - lease.start, first - lease.start):
            if lease.states[index] == OUT:
                group.ack(lease, index, self._runtime.now())
        self._touched(group)
        return first

    async def _read(self, lease: Lease, offset: int) -> list[EventBatch]:
        if not lease.open:
            return []
        lane, limit = lease.lane, lease.start + lease.count - offset
        return await load(self._log, self._runtime, lane.topic, lane.partition, offset, limit)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # `_serve` has reported it, or has ended before it awaited the task

    async def close(self) -> None:
        """Stop reading."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

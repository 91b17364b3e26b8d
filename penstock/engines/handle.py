"""Deliveries of the embedded engine: leased events in the hands of a consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from penstock.core.delivery import QueueGroup
from penstock.core.lease import OUT, Lease, Member, check_span
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, PenstockError
from penstock.model.event import Event

TIME_TO_LIVE = "its time to live was over"


class Stretch:
    """Neighbours of one lease in the hands of a consumer; `index` counts from the first of them.

    Offsets and no events: those of a client lie in its memory, and need not lie in the broker's.
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
        """Where in the lease it begins."""
        self.count = count
        self.now = now
        self._touched = touched

    @property
    def open(self) -> int:
        """How many of its events are not settled."""
        return self.lease.states.count(OUT, self.shift, self.shift + self.count)

    def ack(self, index: int) -> None:
        """Done."""
        self.group.ack(self.lease, index + self.shift, self.now())
        self._touched(self.group)

    def ack_run(self, run: range) -> bool:
        """Neighbours are done; False, and nothing done, when each needs a look of its own."""
        start = run.start + self.shift
        acked = self.group.ack_run(self.lease, start, start + len(run), self.now())
        if acked:
            self._touched(self.group)
        return acked

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """Again, later."""
        self.group.nack(self.lease, index + self.shift, self.now(), delay_s, reason)
        self._touched(self.group)

    def extend(self, index: int, seconds: float | None) -> None:
        """More time."""
        if self.group.extend(self.lease, index + self.shift, self.now(), seconds):
            self._touched(self.group)

    def give_back(self, index: int) -> None:
        """Again, at once: it was not worked on, or not to an end, and no attempt is counted."""
        lease, at = self.lease, index + self.shift
        self.group.give_back(lease, at, self.now())
        if lease.mark is not None and lease.states.count(OUT, 0, len(lease.deadlines)) == 0:
            lease.mark[0] = 0
        self._touched(self.group)

    def handed(self, start: int, stop: int, left_s: float | None = None) -> None:
        """The consumer is given these events: their leases run from now, or for what is left of them."""
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
        elif not lease.handed(last - 1):  # later events of the lease came before
            for index in range(shift + start, last):
                if not lease.handed(index):
                    lease.deadlines[index] = deadline
        self._note(last)

    def _note(self, stop: int) -> None:
        """Keep for the time after a crash how far the lease was handed out."""
        lease = self.lease
        mark = lease.mark
        if mark is None:
            mark = lease.mark = self.group.mark(lease)
        if mark[0] < lease.start + stop:
            mark[0] = lease.start + stop

    def reject(self, index: int, reason: str) -> None:
        """Dead."""
        self.group.reject(self.lease, index + self.shift, self.now(), reason)
        self._touched(self.group)


class LeasedBatch(Stretch):
    """A stretch of one lease that lies in one batch, with its events."""

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
        """The next event, its lease running from now."""
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
            # Others were filtered out, expired or returned before they could be handed over.
            if lease.states[index] != OUT or self._is_over(event):
                continue
            lease.hand(index, self.now() + self.group.spec.lease_s)
            self._note(index + 1)
            return event
        self._events = None
        return None

    def _is_over(self, event: Event) -> bool:
        """Whether the time to live of an event has passed; it is a dead letter then."""
        expires = self.batch.expires
        if expires is None or not 0 < expires[event.index] <= self._wall_us():
            return False
        self.reject(event.index, TIME_TO_LIVE)
        return True

    def fresh(self, skip: Sequence[int]) -> int:
        """How many of its events, without some, the group gets for the first time."""
        if self.attempt != 1:
            return 0
        known = self.lease.lane.known - self.batch.base_offset
        if known <= 0:
            return self.batch.count - len(skip)
        return max(0, self.batch.count - known - sum(index >= known for index in skip))

    def without_events(self) -> Stretch:
        """What is left to keep when the events were sent."""
        return Stretch(self.group, self.lease, self.shift, self.count, self.now, self._touched)


class Unread:
    """A lease whose events must be read from files before they reach its member."""

    __slots__ = ("lease", "reading")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.reading: asyncio.Task[list[EventBatch]] | None = None
        """None until its turn is near."""


class Inbox:
    """What one member was given and has not looked at yet."""

    def __init__(self, group: QueueGroup, member: Member, leave: Callable[[Inbox], None]) -> None:
        self.group = group
        self.member = member
        self.taker: Callable[[LeasedBatch], bool] | None = None
        """Takes what arrives at once, if it can; what it does not take waits for `receive`."""
        self.line: deque[Unread] = deque()
        """Leases whose events are being read from files, and those behind them: put in this order."""
        self._leave = leave
        self._waiting: deque[LeasedBatch] = deque()
        self._getter: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._stopped: PenstockError | None = None
        self._left = False

    @property
    def empty(self) -> bool:
        """Whether nothing waits for `receive`."""
        return not self._waiting

    def put(self, delivery: LeasedBatch) -> None:
        """Something arrived."""
        if self._stopped is not None:
            return  # what lies before it may be missing; all of it returns when the member leaves
        if self.taker is not None and not self._waiting and self.taker(delivery):
            return
        self._waiting.append(delivery)
        _wake(self._getter)

    def stop(self, error: PenstockError) -> None:
        """Nothing will arrive any more."""
        self._stopped = error
        _wake(self._getter)
        _wake(self._emptied)

    async def receive(self) -> LeasedBatch:
        """Wait for the next stretch of events."""
        while not self._waiting:
            if self._stopped is not None:
                raise self._stopped
            self._getter = asyncio.get_running_loop().create_future()
            await self._getter
        delivery = self._waiting.popleft()
        if not self._waiting:
            _wake(self._emptied)
        return delivery

    async def emptied(self) -> None:
        """Wait until nothing waits for `receive`, or nothing will arrive any more."""
        while self._waiting and self._stopped is None:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

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
        _wake(self._getter)
        _wake(self._emptied)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)

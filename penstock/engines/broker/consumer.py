"""Feeds of a broker in the consumer's process: leased events of a queue, batches of a log.

`RemoteDelivery` checks each ack, nack and reject against the lease as this process knows it, and the
engine reports them once for each turn of the loop. A lease never ends later here than at the broker: its
clock starts when the event is handed out, and the broker hears of that afterwards.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from penstock.core.lease import (
    ACKED,
    EXPIRED,
    FENCED,
    NACKED,
    OUT,
    REJECTED,
    RETURNED,
    Lane,
    Lease,
    Member,
    Run,
    check_span,
    runs,
)
from penstock.engines.broker.channel import Channel
from penstock.engines.embedded.delivery import TIME_TO_LIVE
from penstock.engines.engine import Handed, ReadRange, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, Fenced, PenstockError
from penstock.model.event import Event
from penstock.wire.frame import Kind
from penstock.wire.message import (
    MAX_LOG_HELD,
    MAX_REASON_CHARACTERS,
    Commit,
    Deliver,
    Feed,
    Fetched,
    Held,
    LogHeld,
    Refused,
    Settlement,
    decode,
)

# The member of a lease: only the broker knows members.
NO_MEMBER = Member("", 0)
SAID_BEFORE = "said before the broker was restarted"
# Below this many held deliveries none is searched for ended leases: most are settled long before.
SWEEP_LEAST = 16
# The size of one read range in a message is below this, whatever its topic is called.
LOG_HELD_BYTES = 1_024
# Positions in one commit, well below MAX_SMALL_BYTES; the size of each is below MARK_BYTES.
MOST_MARKS, MARK_BYTES = 2_048, 512


class RemoteQueue:
    """A queue feed of a broker."""

    def __init__(
        self,
        number: int,
        wanted: Subscribe,
        touched: Callable[[RemoteDelivery], None],
        handed: Callable[[RemoteDelivery, float], None],
        report: Callable[[], None],
        leave: Callable[[RemoteQueue, bool], Awaitable[None]],
    ) -> None:
        self.number = number
        self.wanted = wanted
        self.lease_s = wanted.spec.lease_s
        self.held: dict[int, RemoteDelivery] = {}
        """Deliveries with events to settle, and some whose leases ended since the last sweep."""
        self._sweep_above = SWEEP_LEAST
        self.paused = False
        """The broker is draining: events that are not handed out yet wait until it runs again."""
        self.now = asyncio.get_running_loop().time
        self.touched = touched
        """Called when something happened to a delivery that must be reported."""
        self.handed = handed
        """Called when an event is about to be handed out, with the time."""
        self.report = report
        self._leave = leave
        self._waiting: deque[RemoteDelivery] = deque()
        self._getter: asyncio.Future[None] | None = None
        self._stopped: PenstockError | None = None

    def delivered(self, deliver: Deliver, batch: EventBatch) -> None:
        """A delivery arrived."""
        if len(self.held) > self._sweep_above:
            self._sweep()
        delivery = RemoteDelivery(self, deliver, batch)
        self.held[deliver.delivery] = delivery
        self._waiting.append(delivery)
        self._wake()

    def _sweep(self) -> None:
        """Drop deliveries whose leases ended: a consumer that never settles does not say so.

        The broker does the same. The next sweep comes when twice as many are held, so that the search
        costs little for each delivery.
        """
        now = self.now()
        for delivery in list(self.held.values()):
            for index in delivery.lease.expiring(now):
                delivery.end(index, EXPIRED)
        self._sweep_above = max(SWEEP_LEAST, 2 * len(self.held))

    @property
    def stopped(self) -> bool:
        """Whether nothing will arrive any more."""
        return self._stopped is not None

    def refused(self, refused: Refused, error: PenstockError) -> bool:
        """The broker refused a settlement; returns whether the event was not settled here yet."""
        delivery = self.held.get(refused.delivery)
        if delivery is None or not 0 <= refused.index < delivery.batch.count:
            return False
        unsettled = delivery.lease.states[refused.index] == OUT
        if unsettled:
            delivery.end(refused.index, FENCED if isinstance(error, Fenced) else EXPIRED)
        return unsettled

    def lost(self, numbers: list[int]) -> None:
        """The broker no longer holds these deliveries; it delivers their events again."""
        for number in numbers:
            delivery = self.held.get(number)
            if delivery is not None:
                delivery.end_all(EXPIRED)
                self.held.pop(number, None)
        self._waiting = deque(each for each in self._waiting if each.lease.open)

    def taken_up(self, delivery: RemoteDelivery, indices: list[int]) -> list[tuple[int, int]]:
        """A restarted broker leases these events of a delivery to this member again.

        What they were settled with is reported again; the broker delivers the other events again. Returns
        the events that were settled meanwhile and are not leased to this member any more.
        """
        again, unreported = set(indices), delivery.settlement()
        delivery.extends = [each for each in unreported.extends if each[0] in again]
        for index in range(delivery.batch.count):
            state = delivery.lease.states[index]
            if index not in again:
                if state == OUT:
                    delivery.end(index, EXPIRED)
            elif state == ACKED:  # the broker lost the ack, or never received it
                delivery.acks.append(index)
            elif state == NACKED:
                delivery.nacks.append((index, None, SAID_BEFORE))
            elif state == REJECTED:
                delivery.rejects.append((index, SAID_BEFORE))
            elif state == RETURNED:
                delivery.returns.append(index)
        self.touched(delivery)
        self._waiting = deque(each for each in self._waiting if each.lease.open)
        return [event for event in settled_events(unreported) if event[1] not in again]

    def put_back(self, delivery: RemoteDelivery) -> None:
        """Hand out the rest of a delivery first when the feed goes on."""
        if not self._waiting or self._waiting[0] is not delivery:
            self._waiting.appendleft(delivery)

    def resume(self) -> None:
        """Go on after a restart of the broker, when the feed has joined its group again."""
        self.paused = False
        self._wake()

    def done(self, delivery: RemoteDelivery) -> None:
        """Everything of a delivery is settled."""
        self.held.pop(delivery.number, None)

    def stop(self, error: PenstockError) -> None:
        """Nothing will arrive any more, and the held events now belong to other members."""
        self._stopped = self._stopped or error
        for delivery in list(self.held.values()):
            delivery.end_all(RETURNED)
        self._waiting.clear()
        self._wake()

    def _wake(self) -> None:
        if self._getter is not None and not self._getter.done():
            self._getter.set_result(None)

    async def receive(self) -> RemoteDelivery:
        """Wait for the next delivery."""
        while self.paused or not self._waiting:
            if self._stopped is not None:
                raise self._stopped
            self._getter = asyncio.get_running_loop().create_future()
            await self._getter
        return self._waiting.popleft()

    async def close(self) -> None:
        """Leave the group; events that are not settled return to it."""
        ended = self.stopped
        self.stop(BusClosed("the subscription is closed; subscribe again"))
        await self._leave(self, ended)


class RemoteDelivery:
    """A leased run of events, handed out one by one and settled here."""

    __slots__ = (
        "_events", "_next", "acks", "attempt", "batch", "extends", "feed", "handed", "lease", "nacks",
        "number", "rejects", "returns",
    )  # fmt: skip

    def __init__(self, feed: RemoteQueue, deliver: Deliver, batch: EventBatch) -> None:
        self.number = deliver.delivery
        self.batch = batch
        self.attempt = deliver.attempt
        self.handed = 0
        self.acks: list[int] = []
        self.nacks: list[tuple[int, float | None, str]] = []
        self.rejects: list[tuple[int, str]] = []
        self.extends: list[tuple[int, float | None]] = []
        self.returns: list[int] = []
        lane = Lane(batch.topic, batch.partition, 0, 0)
        run = Run(lane, batch.base_offset, batch.count, deliver.attempt - 1)
        self.lease = Lease(deliver.delivery, run, NO_MEMBER)
        for index in deliver.skip:
            self.lease.states[index] = ACKED
            self.lease.open -= 1
        self.feed = feed
        self._next = 0
        self._events: list[Event] | None = None

    def hand(self) -> Event | None:
        """The next event, its lease running from now."""
        if self.feed.paused:
            self.feed.put_back(self)
            return None
        events = self._events
        if events is None:
            attempt, batch = self.attempt, self.batch
            events = self._events = [
                Event(batch, index, key, payload, headers, attempt, self)
                for index, (key, payload, headers) in enumerate(
                    zip(batch.keys(), batch.payloads(), batch.headers(), strict=True)
                )
            ]
        while self._next < len(events):
            index = self._next
            self._next += 1
            if self.lease.states[index] != OUT or self._is_over(index):
                continue
            now = self.feed.now()
            self.lease.hand(index, now + self.feed.lease_s)
            if self.rejects:
                self.feed.report()  # events whose time to live ended before their turn
            self.handed = index + 1
            self.feed.handed(self, now)
            return events[index]
        self._events = None
        return None

    def _is_over(self, index: int) -> bool:
        """Whether the time to live of an event has passed; it is rejected then."""
        expires = self.batch.expires
        if expires is None or not 0 < expires[index] <= time.time_ns() // 1_000:
            return False
        self.reject(index, TIME_TO_LIVE)
        return True

    def ack(self, index: int) -> None:
        """The event is processed."""
        self._close(index, ACKED)
        self.acks.append(index)

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """Deliver the event again, later."""
        check_span("delay_s", delay_s)
        self._close(index, NACKED)
        self.nacks.append((index, delay_s, reason[:MAX_REASON_CHARACTERS]))

    def give_back(self, index: int) -> None:
        """Deliver the event again at once, without counting an attempt: its work was not finished."""
        self._close(index, RETURNED)
        self.returns.append(index)

    def reject(self, index: int, reason: str) -> None:
        """The event becomes a dead letter."""
        self._close(index, REJECTED)
        self.rejects.append((index, reason[:MAX_REASON_CHARACTERS]))

    def extend(self, index: int, seconds: float | None) -> None:
        """Extend the lease of an event."""
        check_span("seconds", seconds)
        self.check(index)
        lease_s = self.feed.lease_s if seconds is None else seconds
        self.lease.deadlines[index] = self.feed.now() + lease_s
        self.extends.append((index, seconds))
        self.feed.touched(self)

    def check(self, index: int) -> None:
        """Raise what settling this event now would raise."""
        lease = self.lease
        if lease.states[index] == OUT:
            if index >= len(lease.deadlines) or self.feed.now() < lease.deadlines[index]:
                return
            self.end(index, EXPIRED)
        raise lease.refusal(index)

    def _close(self, index: int, state: int) -> None:
        self.check(index)
        self.end(index, state)
        self.feed.touched(self)

    def end(self, index: int, state: int) -> None:
        """An event of this delivery can no longer be settled."""
        if self.lease.states[index] == OUT:
            self.lease.open -= 1
            if not self.lease.open:
                self.feed.done(self)
        self.lease.states[index] = state

    def end_all(self, state: int) -> None:
        """No event of this delivery can be settled any more."""
        for index in range(self.batch.count):
            if self.lease.states[index] == OUT:
                self.end(index, state)

    def in_hand(self) -> Held:
        """This delivery, named to a restarted broker, which may lease it to this member again."""
        batch, lease = self.batch, self.lease
        given = [
            deadline
            for index, deadline in enumerate(lease.deadlines)
            if lease.states[index] == OUT and deadline < math.inf
        ]
        left_s = max(0.0, max(given) - self.feed.now()) if given else None
        return Held(
            self.number, batch.topic, batch.partition, batch.base_offset, batch.count, self.attempt,
            self.handed, left_s,
        )  # fmt: skip

    def settlement(self) -> Settlement:
        """Report what happened since the last call."""
        report = Settlement(
            self.number, self.handed, runs(self.acks), self.nacks, self.rejects, self.extends,
            self.returns,
        )  # fmt: skip
        self.acks, self.nacks, self.rejects, self.extends, self.returns = [], [], [], [], []
        return report


def settled_events(settlement: Settlement) -> Iterator[tuple[int, int]]:
    """The events that a settlement settles: delivery and index of each."""
    acks = settlement.acks
    for at in range(0, len(acks), 2):
        for index in range(acks[at], acks[at] + acks[at + 1]):
            yield settlement.delivery, index
    for nack in settlement.nacks:
        yield settlement.delivery, nack[0]
    for reject in settlement.rejects:
        yield settlement.delivery, reject[0]
    for index in settlement.returns:
        yield settlement.delivery, index


class RemoteLog:
    """A log feed of a broker: it requests one batch at a time."""

    def __init__(
        self,
        number: int,
        wanted: Subscribe,
        channel: Channel,
        leave: Callable[[RemoteLog, bool], Awaitable[None]],
    ) -> None:
        self.number = number
        self.wanted = wanted
        self._channel = channel
        self._leave = leave
        self._marked: dict[tuple[str, int], tuple[int, int]] = {}
        self._has: dict[tuple[str, int], ReadRange] = {}
        """Offsets that were handed out and are not committed, by partition; the latest is last."""
        self._stopped: PenstockError | None = None

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        if self._stopped is not None:
            raise self._stopped
        # Without a deadline: an empty topic is no error.
        answer = await self._channel.call(Kind.FETCH, Feed(self.number), again=True, deadline_s=0)
        handed = Handed(EventBatch.decode(answer.parts[0]), decode(answer.meta, Fetched).epoch)
        self._note(*handed)
        return handed

    def _note(self, batch: EventBatch, epoch: int) -> None:
        place, start = (batch.topic, batch.partition), batch.base_offset
        before = self._has.pop(place, None)
        if before and before.epoch == epoch and before.start <= start <= before.stop:
            start = before.start
        self._has[place] = ReadRange(start, batch.end_offset, epoch)

    def in_hand(self) -> list[LogHeld]:
        """Ranges that a restarted broker need not hand out again; the latest when there are too many."""
        most = min(MAX_LOG_HELD, self._channel.frame_bytes // LOG_HELD_BYTES)
        return [LogHeld(*place, *has) for place, has in [*self._has.items()][-most:]]

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer has processed everything before `offset`, as handed out in an epoch."""
        self._marked[topic, partition] = (offset, epoch)

    def pending(self) -> Commit:
        """The marks that are not committed, as a message."""
        marks = [(*place, offset) for place, (offset, _) in self._marked.items()]
        return Commit(self.number, marks, [epoch for _, epoch in self._marked.values()])

    def committed(self, commit: Commit) -> None:
        """The broker committed these marks; later marks of the same partitions stay."""
        for (topic, partition, offset), epoch in zip(commit.marks, commit.epochs, strict=True):
            if self._marked.get((topic, partition)) == (offset, epoch):
                del self._marked[topic, partition]
            has = self._has.get((topic, partition))
            if has is not None and has.epoch == epoch and has.stop <= offset:
                del self._has[topic, partition]

    def fenced(self, commit: Commit) -> None:
        """The broker refused these marks: their events are handed out again, here or to others."""
        for topic, partition, _ in commit.marks:
            self._has.pop((topic, partition), None)

    async def commit(self) -> None:
        """Make the marks the group's position, durably; each partition separately."""
        pending, most = self.pending(), min(MOST_MARKS, self._channel.frame_bytes // MARK_BYTES)
        for at in range(0, len(pending.marks), most):
            span = slice(at, at + most)
            commit = Commit(self.number, pending.marks[span], pending.epochs[span])
            try:
                await self._channel.call(Kind.COMMIT, commit, again=True)
            except Fenced:
                self.fenced(commit)
                raise
            self.committed(commit)

    @property
    def stopped(self) -> bool:
        """Whether nothing will arrive any more."""
        return self._stopped is not None

    def stop(self, error: PenstockError) -> None:
        """Nothing will arrive any more."""
        self._stopped = self._stopped or error

    async def close(self) -> None:
        """Leave the group."""
        ended = self.stopped
        self.stop(BusClosed("the subscription is closed; subscribe again"))
        await self._leave(self, ended)

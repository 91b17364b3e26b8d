"""Remote deliveries: leased events in the hands of a consumer that is not in the broker's process.

Calls are checked here, against the lease as this process knows it, and reported to the broker once
for each turn of the loop. A lease ends here no later than there: its clock starts when the event is
handed over, and only then does the broker hear of it.

Remote log feeds: batches in order from a broker, and the cursor that goes with them.
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

# -- remote_delivery ------------------------------------------------------------------------------


NOBODY = Member("", 0)
SAID_BEFORE = "said before the broker was restarted"
# Deliveries held before those that ran out are looked for: most are settled long before.
SWEEP_LEAST = 16


class RemoteDelivery:
    """A stretch of leased events."""

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
        self.lease = Lease(deliver.delivery, run, NOBODY)
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
                self.feed.report()  # of what was over before it could be handed out
            self.handed = index + 1
            self.feed.handed(self, now)
            return events[index]
        self._events = None
        return None

    def _is_over(self, index: int) -> bool:
        """Whether the time to live of an event has passed; it is a dead letter then."""
        expires = self.batch.expires
        if expires is None or not 0 < expires[index] <= time.time_ns() // 1_000:
            return False
        self.reject(index, TIME_TO_LIVE)
        return True

    def ack(self, index: int) -> None:
        """Done."""
        self._close(index, ACKED)
        self.acks.append(index)

    def nack(self, index: int, delay_s: float | None, reason: str) -> None:
        """Again, later."""
        check_span("delay_s", delay_s)
        self._close(index, NACKED)
        self.nacks.append((index, delay_s, reason[:MAX_REASON_CHARACTERS]))

    def give_back(self, index: int) -> None:
        """Again, at once: it was not worked on, or not to an end, and no attempt is counted."""
        self._close(index, RETURNED)
        self.returns.append(index)

    def reject(self, index: int, reason: str) -> None:
        """Dead."""
        self._close(index, REJECTED)
        self.rejects.append((index, reason[:MAX_REASON_CHARACTERS]))

    def extend(self, index: int, seconds: float | None) -> None:
        """More time."""
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
        """None of it can be settled any more."""
        for index in range(self.batch.count):
            if self.lease.states[index] == OUT:
                self.end(index, state)

    def in_hand(self) -> Held:
        """This delivery for a broker that was restarted, which may give it back to us."""
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
        """What happened since the last call."""
        report = Settlement(
            self.number, self.handed, runs(self.acks), self.nacks, self.rejects, self.extends,
            self.returns,
        )  # fmt: skip
        self.acks, self.nacks, self.rejects, self.extends, self.returns = [], [], [], [], []
        return report


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
        """Deliveries with something to settle, and some that ran out since the last sweep."""
        self._sweep_above = SWEEP_LEAST
        self.paused = False
        """The broker stops: events that nobody was handed yet are left to its next life."""
        self.now = asyncio.get_running_loop().time
        self.touched = touched
        """Something happened to a delivery, and must be reported."""
        self.handed = handed
        """An event is about to be handed out, at this time."""
        self.report = report
        self._leave = leave
        self._waiting: deque[RemoteDelivery] = deque()
        self._getter: asyncio.Future[None] | None = None
        self._stopped: PenstockError | None = None

    def delivered(self, deliver: Deliver, batch: EventBatch) -> None:
        """Events came."""
        if len(self.held) > self._sweep_above:
            self._sweep()
        delivery = RemoteDelivery(self, deliver, batch)
        self.held[deliver.delivery] = delivery
        self._waiting.append(delivery)
        self._ring()

    def _sweep(self) -> None:
        """Let go of what ran out: whoever took it and does not settle it would never say so.

        The broker does the same there. Only what has doubled since the last time is looked through.
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
        """An event is not ours any more; returns whether it was still to be settled here."""
        delivery = self.held.get(refused.delivery)
        if delivery is None or not 0 <= refused.index < delivery.batch.count:
            return False
        unsettled = delivery.lease.states[refused.index] == OUT
        if unsettled:
            delivery.end(refused.index, FENCED if isinstance(error, Fenced) else EXPIRED)
        return unsettled

    def lost(self, numbers: list[int]) -> None:
        """The broker holds these deliveries no more; what is in them comes again."""
        for number in numbers:
            delivery = self.held.get(number)
            if delivery is not None:
                delivery.end_all(EXPIRED)
                self.held.pop(number, None)
        self._waiting = deque(each for each in self._waiting if each.lease.open)

    def taken_up(self, delivery: RemoteDelivery, indices: list[int]) -> list[tuple[int, int]]:
        """After a restart the broker leases these to us as before; the rest of it comes again.

        Returns what was settled meanwhile, and is not ours any more.
        """
        again, said = set(indices), delivery.settlement()
        delivery.extends = [each for each in said.extends if each[0] in again]
        for index in range(delivery.batch.count):
            state = delivery.lease.states[index]
            if index not in again:
                if state == OUT:
                    delivery.end(index, EXPIRED)
            elif state == ACKED:  # it did not survive there, or was never sent
                delivery.acks.append(index)
            elif state == NACKED:
                delivery.nacks.append((index, None, SAID_BEFORE))
            elif state == REJECTED:
                delivery.rejects.append((index, SAID_BEFORE))
            elif state == RETURNED:
                delivery.returns.append(index)
        self.touched(delivery)
        self._waiting = deque(each for each in self._waiting if each.lease.open)
        return [event for event in settled_events(said) if event[1] not in again]

    def put_back(self, delivery: RemoteDelivery) -> None:
        """What is left of a delivery comes first when the feed goes on."""
        if not self._waiting or self._waiting[0] is not delivery:
            self._waiting.appendleft(delivery)

    def resume(self) -> None:
        """A broker is there again, and what it does not lease to us any more is gone from here."""
        self.paused = False
        self._ring()

    def done(self, delivery: RemoteDelivery) -> None:
        """Everything of a delivery is settled."""
        self.held.pop(delivery.number, None)

    def stop(self, error: PenstockError) -> None:
        """Nothing will arrive any more, and what is here is somebody else's by now."""
        self._stopped = self._stopped or error
        for delivery in list(self.held.values()):
            delivery.end_all(RETURNED)
        self._waiting.clear()
        self._ring()

    def _ring(self) -> None:
        if self._getter is not None and not self._getter.done():
            self._getter.set_result(None)

    async def receive(self) -> RemoteDelivery:
        """Wait for the next stretch of events."""
        while self.paused or not self._waiting:
            if self._stopped is not None:
                raise self._stopped
            self._getter = asyncio.get_running_loop().create_future()
            await self._getter
        return self._waiting.popleft()

    async def close(self) -> None:
        """Leave the group; what is not settled returns to it."""
        ended = self.stopped
        self.stop(BusClosed("the subscription is closed; subscribe again"))
        await self._leave(self, ended)


def settled_events(settlement: Settlement) -> Iterator[tuple[int, int]]:
    """The events that a settlement closes: delivery and index of each."""
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


# -- remote_log -----------------------------------------------------------------------------------


LOG_HELD_BYTES = 1_024  # more than one takes in a message, whatever its topic is called
# Places in one commit, well below MAX_SMALL_BYTES, and more bytes than one of them takes.
MOST_MARKS, MARK_BYTES = 2_048, 512


class RemoteLog:
    """A log feed of a broker: one batch is asked for at a time."""

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
        """What was handed out and is not committed, by partition; the latest comes last."""
        self._stopped: PenstockError | None = None

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        if self._stopped is not None:
            raise self._stopped
        # No deadline: an empty topic is no fault.
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
        """What a broker that was restarted need not hand out again; of too many, the latest."""
        most = min(MAX_LOG_HELD, self._channel.frame_bytes // LOG_HELD_BYTES)
        return [LogHeld(*place, *has) for place, has in [*self._has.items()][-most:]]

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer is through with everything before `offset`, as handed out in an epoch."""
        self._marked[topic, partition] = (offset, epoch)

    def pending(self) -> Commit:
        """What was marked and is not committed, as a message."""
        marks = [(*place, offset) for place, (offset, _) in self._marked.items()]
        return Commit(self.number, marks, [epoch for _, epoch in self._marked.values()])

    def committed(self, commit: Commit) -> None:
        """These are committed; what was marked meanwhile is not."""
        for (topic, partition, offset), epoch in zip(commit.marks, commit.epochs, strict=True):
            if self._marked.get((topic, partition)) == (offset, epoch):
                del self._marked[topic, partition]
            has = self._has.get((topic, partition))
            if has is not None and has.epoch == epoch and has.stop <= offset:
                del self._has[topic, partition]

    def fenced(self, commit: Commit) -> None:
        """These were refused: whoever was told so counts on them to come again, here or elsewhere."""
        for topic, partition, _ in commit.marks:
            self._has.pop((topic, partition), None)

    async def commit(self) -> None:
        """Make what was marked the group's place, durably: each partition by itself."""
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
        """Whether nothing will come any more."""
        return self._stopped is not None

    def stop(self, error: PenstockError) -> None:
        """Nothing will come any more."""
        self._stopped = self._stopped or error

    async def close(self) -> None:
        """Leave the group."""
        ended = self.stopped
        self.stop(BusClosed("the subscription is closed; subscribe again"))
        await self._leave(self, ended)

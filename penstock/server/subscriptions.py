"""The subscriptions of one session, from Subscribe to their end.

`Subscriptions` opens and closes them by the number that the client gave each. A queue group pushes leased
events to the client and takes its settlements (`QueueSubscription`); a log group answers fetches, one
batch at a time (`LogSubscription`). A client that registers topics in its Hello is a direct consumer, with
a queue group of its own, known by the client's name.

A client that reconnects keeps its deliveries; after a restart of the broker it names those that it holds,
and they are leased to it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from penstock.bus import tracing
from penstock.core.admission import MAX_HELD_EVENTS
from penstock.core.delivery import MAX_LEASE_EVENTS
from penstock.core.entry import GroupSpec
from penstock.core.lease import OUT
from penstock.core.retry import Retry
from penstock.core.routes import DIRECT
from penstock.engines.embedded.delivery import Inbox, LeasedBatch, LeasedRange
from penstock.engines.embedded.log_groups import LogReader
from penstock.engines.engine import Handed, Subscribe
from penstock.model.errors import (
    BusClosed,
    DeliveryError,
    InvalidInput,
    LeaseExpired,
    PenstockError,
)
from penstock.model.event import Identity
from penstock.model.settings import Delivery
from penstock.server.validation import check_subscribe, to_engine
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import (
    MAX_REASON_CHARACTERS,
    Commit,
    Deliver,
    Feed,
    Held,
    Hello,
    Refused,
    Settlement,
    decode,
    encode,
    to_error,
    to_fault,
)

if TYPE_CHECKING:
    from penstock.server.broker import Broker
    from penstock.server.session import Session

log = logging.getLogger("penstock.server")

CONNECTION_CLOSED = "its consumer closed the connection, and did not come back in time"
# Open feeds of one session.
MAX_FEEDS = 1_024
# The feed of a direct consumer; clients number their own feeds from 1.
DIRECT_FEED = 0
# Calls for each event in one settlement: a client settles an event once, and extends it now and then.
MOST_CALLS = 16
# Refused settlements of a delivery that is gone; one would tell the client as much.
MOST_REFUSALS = 100
# Deliveries held before the expired ones are looked for: most are settled long before.
SWEEP_LEAST = 16


class QueueSubscription:
    """Pushes leased events to a client, as far as its credit and its connection go."""

    def __init__(self, session: Session, feed: int, wanted: Subscribe, inbox: Inbox) -> None:
        self.wanted = wanted
        self.held: dict[int, LeasedRange] = {}
        """Deliveries with unsettled events, and some that expired since the last sweep."""
        self._sweep_above = SWEEP_LEAST
        self._session = session
        self._feed = feed
        self._inbox = inbox
        self._waits = False
        """The task holds a delivery and waits for room in the send buffer."""
        inbox.taker = self._take
        self._task = asyncio.create_task(self._run(), name=f"penstock-subscription-{wanted.group}")

    async def _run(self) -> None:
        try:
            while True:
                leased = await self._inbox.receive()
                self._waits = True
                await self._session.room()
                self._waits = False
                self._deliver(leased)
                del leased  # the client has its events now
                self._go_on()
        except Exception as error:
            self._failed(error)

    def _take(self, leased: LeasedBatch) -> bool:
        """Send a delivery at once: waiting for the task's turn would take as long as sending it."""
        try:
            if self._waits or not self._session.has_room:
                # The delivery that waits lies in memory, whatever its size; the rest can wait in the log.
                self._inbox.member.paused = True
                return False
            self._deliver(leased)
        except Exception as error:
            # The caller is the commit loop, which must go on for all other members.
            self._inbox.taker = None
            self._task.cancel()
            asyncio.get_running_loop().call_soon(self._failed, error)
        return True

    def _go_on(self) -> None:
        """Allow more leases: all deliveries have been sent."""
        if self._inbox.member.paused and self._inbox.empty:
            self._inbox.member.paused = False
            self._session.dispatcher().touched(self._inbox.group)

    def _deliver(self, leased: LeasedBatch) -> None:
        if len(self.held) > self._sweep_above:
            self._sweep()
        self.send(leased)

    def _sweep(self) -> None:
        """Forget deliveries that expired without being settled.

        It runs when the number held has doubled, so each delivery is looked at about once or twice.
        """
        for number in list(self.held):
            self.drop_settled(number)
        self._sweep_above = max(SWEEP_LEAST, 2 * len(self.held))

    def _failed(self, error: Exception) -> None:
        self._inbox.taker = None
        self._inbox.leave()
        self.held.clear()
        if not isinstance(error, PenstockError):
            log.error("a feed failed", exc_info=error, extra={"group": self.wanted.group})
            error = PenstockError(f"the broker failed: {error!r}")
        if self._session.feeds.get(self._feed) is self:  # and not one opened meanwhile
            self._session.feeds.stopped(self._feed, error)

    async def adopt(self, held: list[Held], *, alone: bool = False) -> dict[int, list[int]]:
        """Lease again what the client held before the broker restarted; other events are delivered again.

        `alone`: the group has no other members, so no other member can hold an event.
        """
        for each in held:
            leased = self._session.dispatcher().adopt(
                self._inbox, (each.topic, each.partition), each.start, each.count, each.attempt
            )
            if leased is not None:
                self.held[each.delivery] = leased
                leased.handed(0, min(each.handed, each.count), each.left_s)
            await asyncio.sleep(0)  # there may be many, and other tasks need the loop
        self._session.dispatcher().release(self._inbox, alone=alone)
        return self.in_hand(held)

    def in_hand(self, held: list[Held]) -> dict[int, list[int]]:
        """The indices still leased to the client, for each of these deliveries that has any."""
        adopted: dict[int, list[int]] = {}
        for each in held:
            leased = self.held.get(each.delivery)
            if leased is not None:
                states, shift = leased.lease.states, leased.shift
                indices = range(leased.count)
                adopted[each.delivery] = [at for at in indices if states[at + shift] == OUT]
        return adopted

    def resume(self, known: Collection[int]) -> None:
        """The client is back and has these deliveries; deliver others again that it was sent."""
        self._sweep()
        lost = [number for number in self.held if number not in known]
        for number in lost:
            del self.held[number]
        if lost:
            self._session.dispatcher().take_back(self._inbox, self.held.values())
        self._session.dispatcher().back(self._inbox)
        self._go_on()

    def pause(self) -> None:
        """The client is away: new events go to other members."""
        self._inbox.member.paused = True

    def give_up(self) -> None:
        """The client did not reconnect in time: return its leases to the group, and keep the feed."""
        self.held.clear()
        self._session.dispatcher().take_back(self._inbox, (), CONNECTION_CLOSED, away=True)

    async def suspend(self) -> None:
        """Stop without leaving the group: leases outlive the broker."""
        self._task.cancel()
        self._inbox.taker = None
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, leased: LeasedBatch) -> None:
        """Send a delivery; the broker keeps its lease, and not its events."""
        batch, states, shift = leased.batch, leased.lease.states, leased.shift
        if leased.open == batch.count:
            skip: list[int] = []
        else:
            skip = [index for index in range(batch.count) if states[index + shift] != OUT]
            if len(skip) == batch.count:
                return
        number = self._session.next_delivery()
        self.held[number] = leased.without_events()
        if tracing.tracer is not None:
            tracing.delivering(batch, self.wanted.group, leased.attempt)
        meta = Deliver(self._feed, number, leased.attempt, skip)
        self._session.send(Frame(Kind.DELIVER, 0, encode(meta), (batch.encode(),)))
        self._session.delivered(batch, batch.count - len(skip), leased.fresh(skip))
        if not self._session.hello.supports_ack:
            leased.handed(0, batch.count)
            for index in range(batch.count):
                if states[index + shift] == OUT:
                    leased.ack(index)
            self.drop_settled(number)

    def settle(self, settlement: Settlement) -> None:
        """Apply the acks, nacks, rejects, extensions and returns of a delivery."""
        number = settlement.delivery
        leased = self.held[number]
        leased.handed(0, min(settlement.handed, leased.count))
        acked = nacked = rejected = extended = 0
        for run in _runs(settlement.acks, leased.count):
            if 0 <= run.start < run.stop <= leased.count and leased.ack_run(run):
                acked += len(run)
                continue
            for index in run:
                acked += self._try(number, leased, index, leased.ack, index)
        most = MOST_CALLS * leased.count
        for index, delay_s, reason in settlement.nacks[:most]:
            words = reason[:MAX_REASON_CHARACTERS]
            nacked += self._try(number, leased, index, leased.nack, index, delay_s, words)
        for index, reason in settlement.rejects[:most]:
            words = reason[:MAX_REASON_CHARACTERS]
            rejected += self._try(number, leased, index, leased.reject, index, words)
        for index, seconds in settlement.extends[:most]:
            extended += self._try(number, leased, index, leased.extend, index, seconds)
        for index in settlement.returns[:most]:
            self._try(number, leased, index, leased.give_back, index)
        count = self._session.count_settled
        count("ack", acked)
        count("nack", nacked)
        count("reject", rejected)
        count("extend", extended)
        self.drop_settled(number)

    def at_work(self) -> bool:
        """Whether the client's consumer was handed events that it has not settled."""
        for leased in self.held.values():
            handed = min(len(leased.lease.deadlines), leased.shift + leased.count)
            if leased.lease.states.count(OUT, leased.shift, handed):
                return True
        return False

    def drop_settled(self, number: int) -> None:
        """Forget a delivery once nothing of it is open."""
        leased = self.held.get(number)
        if leased is not None and not leased.open:
            del self.held[number]

    def _try(self, number: int, leased: LeasedRange, index: int, call: Any, *args: Any) -> bool:
        if not 0 <= index < leased.count:
            error: PenstockError = DeliveryError(f"delivery {number} has no event {index}")
        else:
            try:
                call(*args)
            except PenstockError as raised:
                error = raised
            else:
                return True
        self._session.count_settled("late", 1)
        self._session.send(Frame(Kind.REFUSED, 0, encode(Refused(number, index, to_fault(error)))))
        return False

    async def leave(self) -> None:
        """Leave the group, in this turn of the loop; unsettled events return to the group."""
        self._task.cancel()
        self._inbox.taker = None
        await self._inbox.close()
        self.held.clear()

    async def close(self) -> None:
        """The same, and wait until nothing is under way."""
        await self.leave()
        await asyncio.gather(self._task, return_exceptions=True)


class LogSubscription:
    """Answers a client's fetches, one batch at a time, so that the client sets the pace."""

    def __init__(self, wanted: Subscribe, reader: LogReader) -> None:
        self.wanted = wanted
        self.reader = reader
        self._fetching: asyncio.Task[Handed] | None = None
        self._last: Handed | None = None
        """The last batch handed out: the reader is past it, and the answer may never have arrived."""
        self._askers: set[int] = set()
        """The requests that were answered with it."""
        self._newest = 0
        """The latest request that was answered."""

    async def fetch(self, request: int) -> Handed:
        """The next batch, or the same batch for a repeated request.

        When a request is cancelled, its fetch goes on, and the next request gets the batch.
        """
        again = self._again(request)
        if again is not None:
            return again
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._receive())
        try:
            handed = await asyncio.shield(self._fetching)
        finally:
            if self._fetching is not None and self._fetching.done():
                self._fetching = None
        self._newest = max(self._newest, request)
        if handed is self._last:
            self._askers.add(request)
        if tracing.tracer is not None:
            tracing.delivering(handed.batch, self.wanted.group, 1)
        return handed

    async def _receive(self) -> Handed:
        self._last = None  # a request for the next batch confirms that the client has this one
        self._askers.clear()
        self._last = await self.reader.receive()
        return self._last

    def _again(self, request: int) -> Handed | None:
        """The earlier answer to a repeated request, unless the group was reset since."""
        if self._last is not None and request in self._askers:
            batch, epoch = self._last
            return self._last if epoch == self.reader.epoch(batch.topic, batch.partition) else None
        if request <= self._newest:
            # Answering with the next batch would hide that the client misses the earlier one.
            raise DeliveryError(
                f"fetch {request} came again after a later one, or after its answer was confirmed; "
                "nothing was handed out. Fetch one batch at a time; subscribe again, and all that is "
                "not committed comes again"
            )
        return None

    def forget_before(self, request: int) -> None:
        """Drop the last batch when the client has all answers to requests before this one."""
        if self._newest < request:
            self.forget()

    def forget(self) -> None:
        """Drop the last batch, whether its answer arrived or not."""
        self._last = None

    @property
    def kept_bytes(self) -> int:
        """The bytes of the last batch, kept because the client may repeat its request."""
        return 0 if self._last is None else self._last.batch.size_bytes

    def mark(self, commit: Commit) -> None:
        """The client has processed everything before these offsets."""
        epochs = commit.epochs or [
            self.reader.epoch(topic, partition) for topic, partition, _ in commit.marks
        ]
        if len(epochs) != len(commit.marks):
            raise InvalidInput(
                f"a commit has {len(epochs)} epochs for {len(commit.marks)} marks; nothing happened"
            )
        for (topic, partition, offset), epoch in zip(commit.marks, epochs, strict=True):
            self.reader.mark(topic, partition, offset, epoch)

    async def leave(self) -> None:
        """Leave the group, in this turn of the loop."""
        await self.reader.close()

    async def close(self) -> None:
        """The same, and wait until nothing is under way."""
        await self.leave()
        if self._fetching is not None:
            await asyncio.gather(self._fetching, return_exceptions=True)


class Subscriptions(dict[int, QueueSubscription | LogSubscription]):
    """The open subscriptions of one session, by the feed number that the client gave each."""

    def __init__(self, broker: Broker, session: Session) -> None:
        self.ended: dict[int, Frame] = {}
        """The frames that tell the client of feeds that ended by themselves."""
        self._broker = broker
        self._session = session
        self._opening: dict[int, asyncio.Future[None]] = {}

    # -- opened and closed by the client -------------------------------------------------------

    async def subscribe(self, frame: Frame) -> Frame:
        """Open a feed."""
        request = decode(frame.meta, say.Subscribe)
        check_subscribe(request)
        taken = {*self, *self._opening}
        if request.feed in taken or request.feed == DIRECT_FEED or len(taken) >= MAX_FEEDS:
            raise InvalidInput(f"feed {request.feed} is open already, or {MAX_FEEDS} are")
        wanted = to_engine(request, self._session.identity)
        self._session.may_read(request.spec.patterns)
        self.ended.pop(request.feed, None)
        opening = self._opening[request.feed] = asyncio.get_running_loop().create_future()
        adopted: dict[int, list[int]] = {}
        try:
            feed = await self._broker.join(wanted)
            if isinstance(feed, Inbox):
                subscription = QueueSubscription(self._session, request.feed, wanted, feed)
                adopted = await self._open_held(subscription, request.feed, request.held)
            else:
                self[request.feed] = LogSubscription(wanted, feed)  # type: ignore[arg-type]
        finally:
            del self._opening[request.feed]
            opening.set_result(None)
        return Frame(Kind.RESULT, frame.request, encode(say.Joined(adopted)))

    async def _open_held(
        self,
        subscription: QueueSubscription,
        feed: int,
        held: list[say.Held],
        *,
        alone: bool = False,
    ) -> dict[int, list[int]]:
        """Open a feed with the deliveries that the client held; after an error there is no feed."""
        self[feed] = subscription
        try:
            return await subscription.adopt(held, alone=alone)
        except BaseException:
            if self.get(feed) is subscription:
                del self[feed]
            await subscription.leave()
            raise

    async def open_direct(self) -> dict[int, list[int]]:
        """Open the group of a direct consumer, for the topics in its Hello.

        Returns the events that it holds from before a restart of the broker, as Joined does.
        """
        session, subscription = self._session, self.get(DIRECT_FEED)
        hello = session.hello
        if (
            isinstance(subscription, QueueSubscription) and session.restored
        ):  # that Welcome did not arrive
            return subscription.in_hand(hello.held)
        # A direct feed that ended stays ended: its client was told, and another may have its name now.
        if not hello.subscriptions or subscription is not None or DIRECT_FEED in self.ended:
            return {}
        session.may_read(hello.subscriptions)
        wanted = direct_subscription(hello, session.identity, self._broker.engine.settings.delivery)
        inbox = await self._broker.join(wanted)
        assert isinstance(inbox, Inbox)
        subscription = QueueSubscription(session, DIRECT_FEED, wanted, inbox)
        return await self._open_held(subscription, DIRECT_FEED, hello.held, alone=True)

    async def unsubscribe(self, frame: Frame) -> Frame:
        """Close a feed, if it is open."""
        feed = decode(frame.meta, say.Feed).feed
        await self.opened(feed)  # the client may unsubscribe while the feed is still being opened
        if (subscription := self.pop(feed, None)) is not None:
            await subscription.close()
        return Frame(Kind.RESULT, frame.request, b"")

    async def opened(self, *feeds: int) -> None:
        """Wait until these feeds are open; without arguments, until all that are being opened are."""
        for feed in feeds or tuple(self._opening):
            if feed in self._opening:
                await asyncio.shield(self._opening[feed])

    async def close(self) -> list[str]:
        """Leave all groups; returns the ephemeral ones, which belong to this session alone."""
        for subscription in list(self.values()):
            await subscription.close()
        groups = [each.wanted.group for each in self.values() if each.wanted.spec.ephemeral]
        self.clear()
        return groups

    async def suspend(self) -> None:
        """Stop all feeds with the broker; leases of queue groups stay."""
        for subscription in list(self.values()):
            if isinstance(subscription, QueueSubscription):
                await subscription.suspend()
            else:
                await subscription.close()
        self.clear()

    # -- looked up by the session --------------------------------------------------------------

    def queues(self) -> list[QueueSubscription]:
        """The subscriptions to queue groups."""
        return [
            subscription
            for subscription in self.values()
            if isinstance(subscription, QueueSubscription)
        ]

    def leased(self, delivery: int) -> LeasedRange | None:
        """A delivery with unsettled events, by its number."""
        for subscription in self.queues():
            if delivery in subscription.held:
                return subscription.held[delivery]
        return None

    def drop_settled(self, deliveries: set[int]) -> None:
        """Forget these deliveries where they are settled."""
        for subscription in self.queues():
            for number in deliveries:
                subscription.drop_settled(number)

    def log(self, feed: int) -> LogSubscription:
        """An open log feed; raises when it is not open."""
        subscription = self.get(feed)
        if not isinstance(subscription, LogSubscription):
            if feed in self.ended:
                raise to_error(decode(self.ended[feed].meta, say.Feed).fault)
            raise BusClosed("the subscription is closed; subscribe again")
        return subscription

    def stopped(self, feed: int, error: PenstockError) -> None:
        """End a feed whose group is gone or whose data cannot be read, and tell the client."""
        self.pop(feed, None)
        self.ended[feed] = stopped_frame(feed, error)
        while len(self.ended) > MAX_FEEDS:
            del self.ended[next(iter(self.ended))]
        self._session.send(self.ended[feed])


def direct_subscription(hello: Hello, identity: Identity, settings: Delivery) -> Subscribe:
    """The subscription of a direct consumer, from its Hello; the group has the client's name."""
    spec = GroupSpec(
        tuple(hello.subscriptions),
        retry=Retry(settings.ladder_ms, settings.max_attempts),
        lease_s=settings.lease_s,
        start="latest",
    )
    inflight = hello.max_inflight or MAX_HELD_EVENTS  # the limits in force decide what it gets
    return Subscribe(f"{DIRECT}{hello.client}", spec, hello.client, inflight, identity)


def _runs(acks: list[int], count: int) -> list[range]:
    """The runs of a settlement within a batch; parts outside become one index outside the batch."""
    runs = []
    for at in range(0, min(len(acks) - 1, 2 * count), 2):
        start, stop = acks[at], acks[at] + acks[at + 1]
        runs.append(range(min(max(-1, start), count), min(stop, count + 1)))
    return runs


def refuse(session: Session, settlement: Settlement) -> None:
    """Refuse a settlement of a delivery that is no longer held, in whichever feed it was."""
    late = LeaseExpired("the lease ended before the call; the event is or will come again")
    indices = [nack[0] for nack in settlement.nacks[:MOST_REFUSALS]]
    indices += [reject[0] for reject in settlement.rejects[:MOST_REFUSALS]]
    # Returned events need no answer: they are already back in their group.
    for run in _runs(settlement.acks[:MOST_REFUSALS], MAX_LEASE_EVENTS):
        indices += run
    session.count_settled("late", len(indices))
    for index in indices[:MOST_REFUSALS]:
        meta = Refused(settlement.delivery, index, to_fault(late))
        session.send(Frame(Kind.REFUSED, 0, encode(meta)))


def stopped_frame(feed: int, error: PenstockError) -> Frame:
    """The frame that tells a client that a feed has ended."""
    return Frame(Kind.STOPPED, 0, encode(Feed(feed, to_fault(error))))

"""Direct consumers: a client that registers with subscriptions has a group of its own (row T4).

Outlets: the broker's end of a subscription, one for each feed of a session.

Feeds: the subscriptions of one session, from Subscribe to their end.
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
from penstock.engines.engine import Subscribe as Wanted
from penstock.model.errors import (
    BusClosed,
    DeliveryError,
    InvalidInput,
    LeaseExpired,
    PenstockError,
)
from penstock.model.event import Identity
from penstock.model.settings import Delivery
from penstock.server.validation import check_subscribe, wanted_by
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

# -- direct ---------------------------------------------------------------------------------------


def direct_wish(hello: Hello, identity: Identity, settings: Delivery) -> Subscribe:
    """The subscription that a client's Hello stands for; it is known by the client's name."""
    spec = GroupSpec(
        tuple(hello.subscriptions),
        retry=Retry(settings.ladder_ms, settings.max_attempts),
        lease_s=settings.lease_s,
        start="latest",
    )
    inflight = hello.max_inflight or MAX_HELD_EVENTS  # the limits in force say what it gets
    return Subscribe(f"{DIRECT}{hello.client}", spec, hello.client, inflight, identity)


# -- outlet ---------------------------------------------------------------------------------------


log = logging.getLogger("penstock.server")

CONNECTION_CLOSED = "its consumer closed the connection, and did not come back in time"
# An honest client settles an event once and extends it now and then between two reports.
MOST_CALLS = 16
MOST_REFUSALS = 100  # of one delivery that is gone; one would tell the client as much
# Deliveries held before those that ran out are looked for: most are settled long before.
SWEEP_LEAST = 16


class QueueSubscription:
    """Pushes leased events to a client, as far as its credit and its connection go."""

    def __init__(self, session: Session, feed: int, wanted: Wanted, inbox: Inbox) -> None:
        self.wanted = wanted
        self.held: dict[int, LeasedRange] = {}
        """Deliveries of which something is not settled yet, and some that ran out since the last sweep."""
        self._sweep_above = SWEEP_LEAST
        self._session = session
        self._feed = feed
        self._inbox = inbox
        self._waits = False
        """The task has something in hand for which there is no room."""
        inbox.taker = self._take
        self._task = asyncio.create_task(self._run(), name=f"penstock-outlet-{wanted.group}")

    async def _run(self) -> None:
        try:
            while True:
                leased = await self._inbox.receive()
                self._waits = True
                await self._session.room()
                self._waits = False
                self._deliver(leased)
                del leased  # its events are the client's
                self._go_on()
        except Exception as error:
            self._failed(error)

    def _take(self, leased: LeasedBatch) -> bool:
        """Send what arrived at once: waiting for the task's turn would take as long as all of this."""
        try:
            if self._waits or not self._session.has_room:
                # What waits for it lies in memory, of whatever size; the rest can wait in the log.
                self._inbox.member.paused = True
                return False
            self._deliver(leased)
        except Exception as error:
            # The commit loop called, which serves all the others.
            self._inbox.taker = None
            self._task.cancel()
            asyncio.get_running_loop().call_soon(self._failed, error)
        return True

    def _go_on(self) -> None:
        """All that it was leased is on its way: it may be leased more."""
        if self._inbox.member.paused and self._inbox.empty:
            self._inbox.member.paused = False
            self._session.dispatcher().touched(self._inbox.group)

    def _deliver(self, leased: LeasedBatch) -> None:
        if len(self.held) > self._sweep_above:
            self._sweep()
        self.send(leased)

    def _sweep(self) -> None:
        """Forget what ran out: nobody settles it any more.

        Only what has doubled since the last time is looked through, so each delivery pays for one look
        or two.
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
        if self._session.feeds.get(self._feed) is self:  # not one that was opened meanwhile
            self._session.feeds.stopped(self._feed, error)

    async def adopt(self, held: list[Held], *, alone: bool = False) -> dict[int, list[int]]:
        """Take up what the client held before the broker was restarted; the rest of it comes again.

        `alone`: nobody else consumes for the group, so nothing is in other hands.
        """
        for each in held:
            leased = self._session.dispatcher().adopt(
                self._inbox, (each.topic, each.partition), each.start, each.count, each.attempt
            )
            if leased is not None:
                self.held[each.delivery] = leased
                leased.handed(0, min(each.handed, each.count), each.left_s)
            await asyncio.sleep(0)  # there may be many, and others wait for the loop
        self._session.dispatcher().release(self._inbox, alone=alone)
        return self.in_hand(held)

    def in_hand(self, held: list[Held]) -> dict[int, list[int]]:
        """Of each of these deliveries that is leased to the client, the indices that are."""
        adopted: dict[int, list[int]] = {}
        for each in held:
            leased = self.held.get(each.delivery)
            if leased is not None:
                states, shift = leased.lease.states, leased.shift
                indices = range(leased.count)
                adopted[each.delivery] = [at for at in indices if states[at + shift] == OUT]
        return adopted

    def resume(self, known: Collection[int]) -> None:
        """Its client is back and has these deliveries; what it was sent besides comes again."""
        self._sweep()
        lost = [number for number in self.held if number not in known]
        for number in lost:
            del self.held[number]
        if lost:
            self._session.dispatcher().take_back(self._inbox, self.held.values())
        self._session.dispatcher().back(self._inbox)
        self._go_on()

    def pause(self) -> None:
        """Its client is away: what comes now is for others."""
        self._inbox.member.paused = True

    def give_up(self) -> None:
        """Its client did not come back in time: what it was leased goes to others, the feed stays."""
        self.held.clear()
        self._session.dispatcher().take_back(self._inbox, (), CONNECTION_CLOSED, away=True)

    async def suspend(self) -> None:
        """Stop without leaving the group: leases outlive the broker."""
        self._task.cancel()
        self._inbox.taker = None
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, leased: LeasedBatch) -> None:
        """Send a delivery; from then on its events are the client's, and not kept here."""
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
        """Take over what the client says became of a delivery."""
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
        """Whether the consumer was handed events that it has not settled."""
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
        """Leave the group, in this turn of the loop; what is not settled returns to it."""
        self._task.cancel()
        self._inbox.taker = None
        await self._inbox.close()
        self.held.clear()

    async def close(self) -> None:
        """The same, and wait until nothing is under way."""
        await self.leave()
        await asyncio.gather(self._task, return_exceptions=True)


class LogSubscription:
    """Answers a client's fetches, one batch at a time, so that it alone sets the pace."""

    def __init__(self, wanted: Wanted, reader: LogReader) -> None:
        self.wanted = wanted
        self.reader = reader
        self._fetching: asyncio.Task[Handed] | None = None
        self._last: Handed | None = None
        """What was handed out last: the reader is past it, and its answer may never have arrived."""
        self._askers: set[int] = set()
        """The requests that were answered with it."""
        self._newest = 0
        """The last request that was answered at all."""

    async def fetch(self, request: int) -> Handed:
        """The next batch, or the same again for a request that comes again.

        A fetch that was given up is taken up by the next one.
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
        self._last = None  # whoever asks for the next one has it
        self._askers.clear()
        self._last = await self.reader.receive()
        return self._last

    def _again(self, request: int) -> Handed | None:
        """What a request was answered with before, unless the group was set elsewhere since."""
        if self._last is not None and request in self._askers:
            batch, epoch = self._last
            return self._last if epoch == self.reader.epoch(batch.topic, batch.partition) else None
        if request <= self._newest:
            # The next batch in place of one that is not here any more would hide that it is missing.
            raise DeliveryError(
                f"fetch {request} came again after a later one, or after its answer was confirmed; "
                "nothing was handed out. Fetch one batch at a time; subscribe again, and all that is "
                "not committed comes again"
            )
        return None

    def forget_before(self, request: int) -> None:
        """The client has all answers to requests before this one."""
        if self._newest < request:
            self.forget()

    def forget(self) -> None:
        """Keep the last batch no longer, whether its answer arrived or not."""
        self._last = None

    @property
    def kept_bytes(self) -> int:
        """What the last batch takes that is kept for a client that may ask again."""
        return 0 if self._last is None else self._last.batch.size_bytes

    def mark(self, commit: Commit) -> None:
        """The client is through with everything before these offsets."""
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


def _runs(acks: list[int], count: int) -> list[range]:
    """The runs of a settlement within a batch; what lies outside is one index that is not there."""
    runs = []
    for at in range(0, min(len(acks) - 1, 2 * count), 2):
        start, stop = acks[at], acks[at] + acks[at + 1]
        runs.append(range(min(max(-1, start), count), min(stop, count + 1)))
    return runs


def refuse(session: Session, settlement: Settlement) -> None:
    """A settlement of a delivery that is not held any more, in whichever feed it was."""
    late = LeaseExpired("the lease ended before the call; the event is or will come again")
    indices = [nack[0] for nack in settlement.nacks[:MOST_REFUSALS]]
    indices += [reject[0] for reject in settlement.rejects[:MOST_REFUSALS]]
    # What is given back is not ours any more, as was wanted.
    for run in _runs(settlement.acks[:MOST_REFUSALS], MAX_LEASE_EVENTS):
        indices += run
    session.count_settled("late", len(indices))
    for index in indices[:MOST_REFUSALS]:
        meta = Refused(settlement.delivery, index, to_fault(late))
        session.send(Frame(Kind.REFUSED, 0, encode(meta)))


def stopped_frame(feed: int, error: PenstockError) -> Frame:
    """Tells a client that a feed has ended."""
    return Frame(Kind.STOPPED, 0, encode(Feed(feed, to_fault(error))))


# -- feeds ----------------------------------------------------------------------------------------


MAX_FEEDS = 1_024  # of one session
DIRECT_FEED = 0  # clients number their own feeds from 1


class Subscriptions(dict[int, QueueSubscription | LogSubscription]):
    """Those that are open, by the number the client gave them."""

    def __init__(self, broker: Broker, session: Session) -> None:
        self.ended: dict[int, Frame] = {}
        """What the client is told of those that ended by themselves."""
        self._broker = broker
        self._session = session
        self._opening: dict[int, asyncio.Future[None]] = {}

    # -- opened and closed by the client -------------------------------------------------------

    async def subscribe(self, frame: Frame) -> Frame:
        """Open a feed."""
        wish = decode(frame.meta, say.Subscribe)
        check_subscribe(wish)
        taken = {*self, *self._opening}
        if wish.feed in taken or wish.feed == DIRECT_FEED or len(taken) >= MAX_FEEDS:
            raise InvalidInput(f"feed {wish.feed} is open already, or {MAX_FEEDS} are")
        wanted = wanted_by(wish, self._session.identity)
        self._session.may_read(wish.spec.patterns)
        self.ended.pop(wish.feed, None)
        opening = self._opening[wish.feed] = asyncio.get_running_loop().create_future()
        adopted: dict[int, list[int]] = {}
        try:
            feed = await self._broker.join(wanted)
            if isinstance(feed, Inbox):
                outlet = QueueSubscription(self._session, wish.feed, wanted, feed)
                adopted = await self._taken_up(outlet, wish.feed, wish.held)
            else:
                self[wish.feed] = LogSubscription(wanted, feed)  # type: ignore[arg-type]
        finally:
            del self._opening[wish.feed]
            opening.set_result(None)
        return Frame(Kind.RESULT, frame.request, encode(say.Joined(adopted)))

    async def _taken_up(
        self, outlet: QueueSubscription, feed: int, held: list[say.Held], *, alone: bool = False
    ) -> dict[int, list[int]]:
        """Open a feed with what its client held; a client that hears of an error has none."""
        self[feed] = outlet
        try:
            return await outlet.adopt(held, alone=alone)
        except BaseException:
            if self.get(feed) is outlet:
                del self[feed]
            await outlet.leave()
            raise

    async def open_direct(self) -> dict[int, list[int]]:
        """Serve what the client registered for: a group of its own, known by its name (row T4).

        Returns what it holds from before a restart of the broker, as Joined does.
        """
        session, outlet = self._session, self.get(DIRECT_FEED)
        hello = session.hello
        if (
            isinstance(outlet, QueueSubscription) and session.restored
        ):  # that Welcome did not arrive
            return outlet.in_hand(hello.held)
        # One that has ended stays so: its client was told, and another may have its name by now.
        if not hello.subscriptions or outlet is not None or DIRECT_FEED in self.ended:
            return {}
        session.may_read(hello.subscriptions)
        wanted = direct_wish(hello, session.identity, self._broker.engine.settings.delivery)
        inbox = await self._broker.join(wanted)
        assert isinstance(inbox, Inbox)
        outlet = QueueSubscription(session, DIRECT_FEED, wanted, inbox)
        return await self._taken_up(outlet, DIRECT_FEED, hello.held, alone=True)

    async def unsubscribe(self, frame: Frame) -> Frame:
        """Close a feed, if it is open."""
        feed = decode(frame.meta, say.Feed).feed
        await self.opened(feed)  # its client may have given up meanwhile
        if (outlet := self.pop(feed, None)) is not None:
            await outlet.close()
        return Frame(Kind.RESULT, frame.request, b"")

    async def opened(self, *feeds: int) -> None:
        """Wait for a subscribe that came just before; without a feed for all of them."""
        for feed in feeds or tuple(self._opening):
            if feed in self._opening:
                await asyncio.shield(self._opening[feed])

    async def close(self) -> list[str]:
        """Leave all groups; returns those that were only this session's."""
        for outlet in list(self.values()):
            await outlet.close()
        groups = [each.wanted.group for each in self.values() if each.wanted.spec.ephemeral]
        self.clear()
        return groups

    async def suspend(self) -> None:
        """Stop all, as the broker does; what queues have leased stays leased."""
        for outlet in list(self.values()):
            if isinstance(outlet, QueueSubscription):
                await outlet.suspend()
            else:
                await outlet.close()
        self.clear()

    # -- what is in them -----------------------------------------------------------------------

    def queues(self) -> list[QueueSubscription]:
        """Its feeds of leased events."""
        return [outlet for outlet in self.values() if isinstance(outlet, QueueSubscription)]

    def leased(self, delivery: int) -> LeasedRange | None:
        """A delivery of which something is not settled."""
        for outlet in self.queues():
            if delivery in outlet.held:
                return outlet.held[delivery]
        return None

    def drop_settled(self, deliveries: set[int]) -> None:
        """Forget those of these deliveries that are settled."""
        for outlet in self.queues():
            for number in deliveries:
                outlet.drop_settled(number)

    def log(self, feed: int) -> LogSubscription:
        """A log feed that is open."""
        outlet = self.get(feed)
        if not isinstance(outlet, LogSubscription):
            if feed in self.ended:
                raise to_error(decode(self.ended[feed].meta, say.Feed).fault)
            raise BusClosed("the subscription is closed; subscribe again")
        return outlet

    def stopped(self, feed: int, error: PenstockError) -> None:
        """A feed ended by itself: its group is gone, or the data cannot be read."""
        self.pop(feed, None)
        self.ended[feed] = stopped_frame(feed, error)
        while len(self.ended) > MAX_FEEDS:
            del self.ended[next(iter(self.ended))]
        self._session.send(self.ended[feed])

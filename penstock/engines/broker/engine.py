"""BrokerEngine: a bus in another process or on another host, reached through a broker (`penstock://`).

It passes publishes to `RemotePublisher` and keeps the feeds: it hands them what the broker delivers,
reports settlements once for each turn of the loop, and joins their groups again after a restart of the
broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from penstock.engines.broker.channel import Call, Channel
from penstock.engines.broker.consumer import RemoteDelivery, RemoteLog, RemoteQueue, settled_events
from penstock.engines.broker.publisher import SPREAD, RemotePublisher, bundled
from penstock.engines.broker.tcp import MAX_FRAME_BYTES, ClientLink
from penstock.engines.credential import Credential
from penstock.engines.embedded.engine import CAPABILITIES
from penstock.engines.engine import LogFeed, QueueFeed, Request, Subscribe, Transaction
from penstock.engines.requests import ANSWERS, READ_ONLY, AdmitReplay, DeleteGroup
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.errors import (
    AlreadySettled,
    BrokerUnreachable,
    BusClosed,
    ConnectionLost,
    Fenced,
    LeaseExpired,
    PenstockError,
    Unsupported,
)
from penstock.model.event import Identity, Receipt
from penstock.model.settings import Settings
from penstock.wire import message as say
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.message import decode, to_error

log = logging.getLogger("penstock.client")

AGENT = "penstock-python"
# Transactions without an answer. With the publisher's frames they are fewer than a broker remembers of
# a session: after a crash it would execute again a repeated request that it has forgotten.
MAX_TRANSACTIONS = 128
# Refused settlements kept until the next flush; a program that never flushes must not collect more.
MAX_REFUSALS = 1_000
# Bytes of events that one answer to `read` holds: large enough to make requests rare.
CHUNK_BYTES = 4 << 20
# Handed-out events that are reported one by one, before the consumer has them: at first, and more each
# second. Beyond that they are reported once for each turn of the loop. At first it is the number that a
# member holds by default, so that a restarted process reports the very event that crashes it.
REPORTS_AT_ONCE = 1_024
REPORTS_PER_S = 1_000
# After these ends of a call the broker may have done what it asks, or may do it yet.
UNANSWERED = (asyncio.CancelledError, BrokerUnreachable, ConnectionLost)
# The size of one held delivery in a message is below this, whatever its topic is called.
HELD_BYTES = 512


class BrokerEngine:
    """The engine of a bus behind a broker: the methods of `Engine`."""

    capabilities = CAPABILITIES

    def __init__(
        self,
        make_link: Callable[[], ClientLink],
        settings: Settings,
        identity: Identity,
        client: str,
        credential: Credential | None = None,
    ) -> None:
        if credential is None:
            credential = Credential(settings.client, None)
        # Defaults are not sent: without a tenant or subject of its own, the client is who its token or
        # the broker says.
        default = Identity()
        hello = say.Hello(
            client,
            tenant="" if identity.tenant == default.tenant else identity.tenant,
            subject="" if identity.subject == default.subject else identity.subject,
            agent=AGENT, heartbeat_s=settings.client.heartbeat_s,
        )  # fmt: skip
        self._subject = identity.subject
        self.channel = Channel(make_link, settings.client, hello, credential)
        self.channel.on_push = self._pushed
        self.channel.held = self._held
        self.channel.lost = self._lost
        self.channel.renewed = self._renewed
        self.channel.ended = self._stop_feeds
        self._publisher = RemotePublisher(
            self.channel, settings.client.linger_ms, settings.client.deadline_s
        )
        self._transactions = asyncio.Semaphore(MAX_TRANSACTIONS)
        self._feeds: dict[int, RemoteQueue | RemoteLog] = {}
        self._feed = 0
        self._unreported: dict[RemoteDelivery, None] = {}
        """Deliveries of which something happened since the last report, in order."""
        self._scheduled = False
        self._reports_left, self._reported_at = float(REPORTS_AT_ONCE), 0.0
        """A token bucket of reports before the end of a turn: REPORTS_AT_ONCE, REPORTS_PER_S."""
        self._deadline_s = settings.client.deadline_s
        self._token_names_subject = credential.given
        self._joining: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._asked: set[int] = set()
        """Feeds whose Subscribe has no answer yet; the channel repeats it after a reconnect."""
        self._renewals = 0
        """How often the broker has forgotten this session."""
        self._doubtful: set[tuple[int, int]] = set()
        """Settled events, by delivery and index, that a restarted broker may not know of."""
        self._refusals: deque[PenstockError] = deque(maxlen=MAX_REFUSALS)
        """Why the broker refused settlements, since the last flush."""

    async def open(self) -> None:
        """Connect; raises when no broker answers in time."""
        await self.channel.open()

    async def close(self) -> None:
        """Report what is settled, then disconnect."""
        self._report()
        await self.channel.close()
        self._stop_feeds(BusClosed("the bus is closed; connect again"))

    def _stop_feeds(self, error: PenstockError) -> None:
        for feed in self._feeds.values():
            feed.stop(error)

    @property
    def bus_id(self) -> str:
        """Which log the broker serves; empty when it is too old to say."""
        welcome = self.channel.welcome
        return "" if welcome is None else welcome.bus

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; they are durable at the broker when it returns."""
        return await self._publisher.publish(draft)

    async def transact(self, transaction: Transaction) -> list[Receipt] | None:
        """Execute all of it or nothing; None, and nothing happens, when an earlier one had its key."""
        if transaction.key is not None:
            self._check_keys()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._deadline_s
        try:
            async with asyncio.timeout_at(until_s - SPREAD * self._deadline_s):
                await self._transactions.acquire()
        except TimeoutError:
            raise self.channel.unsent("no answer to the transactions sent before this") from None
        try:
            return await self._transact(transaction, until_s - loop.time())
        finally:
            self._transactions.release()

    async def _transact(self, transaction: Transaction, deadline_s: float) -> list[Receipt] | None:
        parts: list[Bytes] = []
        drafts = bundled(transaction.drafts, parts)
        await self._rejoined()
        for settle in transaction.acks:
            settle.delivery.check(settle.index)
        cursors: list[tuple[RemoteLog, say.Commit]] = [
            (feed, feed.pending()) for feed in transaction.cursors if isinstance(feed, RemoteLog)
        ]
        self._report()  # the broker must know that the events were handed out
        message = say.Transact(
            self._publisher.next_sequence(), drafts,
            [(settle.delivery.number, settle.index) for settle in transaction.acks],
            [commit for _, commit in cursors], transaction.key,
        )  # fmt: skip
        try:
            answer = await self.channel.call(Kind.TRANSACT, message, parts, deadline_s=deadline_s)
        except Fenced:
            for feed, commit in cursors:
                feed.fenced(commit)
            raise
        published: say.Published = decode(answer.meta, say.Published)
        if published.key_known:
            return None
        for settle in transaction.acks:
            settle.delivery.end(settle.index, 1)
        for feed, commit in cursors:
            feed.committed(commit)
        return [receipt for receipt in published.receipts if receipt is not None]

    def _check_keys(self) -> None:
        """Refuse a key that an older broker would ignore, executing the transaction again."""
        welcome = self.channel.welcome
        if welcome is not None and say.TRANSACTION_KEYS not in welcome.capabilities:
            raise Unsupported(
                "this broker is too old for transactions with an idempotency key; nothing happened. "
                "Upgrade it, or give each publish a key of its own",
                capability=say.TRANSACTION_KEYS,
            )

    async def flush(self) -> None:
        """Return when everything settled so far is durable.

        Raises LeaseExpired when the broker refused settlements since the last flush, and ConnectionLost
        when a restarted broker may not know of some.
        """
        renewals = -1
        while renewals != self._renewals:  # report again to a broker that was restarted meanwhile
            await self._rejoined()
            renewals = self._renewals
            self._report()
            await self.channel.flush()
        if self._refusals:
            why, count = self._refusals[0].message, len(self._refusals)
            self._refusals.clear()
            raise LeaseExpired(
                f"the broker did not take {count} settlements since the last flush, the first because "
                f"{why}. These events are or will be delivered again; the others are safe"
            )
        if self._doubtful:
            self._doubtful.clear()
            raise ConnectionLost(
                "the broker was restarted, or has forgotten this session, before all that was settled "
                "was durable: what it does not know of comes again",
                outcome="unknown",
            )

    async def _rejoined(self) -> None:
        """Wait until a restarted broker has leased the held events to this client again."""
        if self._joining:
            await asyncio.wait(self._joining, timeout=self._deadline_s)

    # -- consuming -----------------------------------------------------------------------------

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Join a group; the broker makes it when it is new."""
        self._feed += 1
        feed: RemoteQueue | RemoteLog
        if subscribe.spec.mode == "log":
            feed = RemoteLog(self._feed, subscribe, self.channel, self._leave)
        else:
            feed = RemoteQueue(
                self._feed, subscribe, self._touched, self._handed, self._report, self._leave
            )
        self._feeds[feed.number] = feed
        self._asked.add(feed.number)
        try:
            await self.channel.call(Kind.SUBSCRIBE, subscribe_message(feed), again=True)
        except BaseException as error:
            del self._feeds[feed.number]
            self._leave_later(feed, error)
            raise
        finally:
            self._asked.discard(feed.number)
        return feed

    def _touched(self, delivery: RemoteDelivery) -> None:
        """Report a delivery at the end of this turn of the loop, once for all that happens in it."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._report)
        self._unreported[delivery] = None

    def _handed(self, delivery: RemoteDelivery, now: float) -> None:
        """Report an event before the consumer has it: the event may crash this process."""
        self._touched(delivery)
        earned = (now - self._reported_at) * REPORTS_PER_S
        left = min(REPORTS_AT_ONCE, self._reports_left + earned)
        self._reports_left, self._reported_at = left, now
        if self._reports_left >= 1.0:
            self._reports_left -= 1.0
            self._report()
            self.channel.push()

    def _report(self) -> None:
        self._scheduled = False
        deliveries, self._unreported = self._unreported, {}
        if (
            self._asked
        ):  # a restarted broker does not know these deliveries before their feed has joined
            early = [each for each in deliveries if each.feed.number in self._asked]
            self._unreported = dict.fromkeys(early)
            deliveries = {each: None for each in deliveries if each not in self._unreported}
        if deliveries:
            self.channel.settle([delivery.settlement() for delivery in deliveries])

    async def _leave(self, feed: RemoteQueue | RemoteLog, ended: bool) -> None:
        self._report()
        self._feeds.pop(feed.number, None)
        if ended:
            return  # the broker has closed the feed already
        try:
            await self.channel.call(Kind.UNSUBSCRIBE, say.Feed(feed.number), again=True)
        except BaseException as error:
            self._leave_later(feed, error)
            raise

    def _leave_later(self, feed: RemoteQueue | RemoteLog, error: BaseException) -> None:
        """Close a feed that may be open at the broker: it would hold events without a consumer."""
        if isinstance(error, UNANSWERED):
            task = asyncio.create_task(self._unsubscribe(feed))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _unsubscribe(self, feed: RemoteQueue | RemoteLog) -> None:
        with contextlib.suppress(PenstockError):  # the channel is closed, and the session with it
            number = say.Feed(feed.number)
            await self.channel.call(Kind.UNSUBSCRIBE, number, again=True, deadline_s=0)
            if feed.wanted.spec.ephemeral:
                await self.ask(DeleteGroup(feed.wanted.group))

    def _pushed(self, frame: Frame) -> None:
        if frame.kind == Kind.DELIVER:
            deliver: say.Deliver = decode(frame.meta, say.Deliver)
            feed = self._feeds.get(deliver.feed)
            if isinstance(feed, RemoteQueue):
                feed.delivered(deliver, EventBatch.decode(frame.parts[0]))
        elif frame.kind == Kind.REFUSED:
            refused: say.Refused = decode(frame.meta, say.Refused)
            error = to_error(refused.fault)
            queues = [each for each in self._feeds.values() if isinstance(each, RemoteQueue)]
            unsettled = [feed for feed in queues if feed.refused(refused, error)]
            # An event that was settled before is not delivered again. And when a group is reset, the
            # broker fences events that are not settled here, which refuses no settlement.
            only_fenced = bool(unsettled) and isinstance(error, Fenced)
            if not only_fenced and not isinstance(error, AlreadySettled):
                log.warning("a settlement was refused: %s", error)
                self._refusals.append(error)
        elif frame.kind == Kind.STOPPED:
            stopped: say.Feed = decode(frame.meta, say.Feed)
            ended = self._feeds.get(stopped.feed)
            if ended is not None and stopped.fault is not None:
                ended.stop(to_error(stopped.fault))
        elif frame.kind == Kind.DRAIN:
            for feed in self._feeds.values():
                if isinstance(feed, RemoteQueue):
                    feed.paused = True

    def _held(self) -> list[int]:
        """Deliveries that the broker must not send again: held, or settled and not confirmed yet."""
        known = {settlement.delivery for settlement in self.channel.unconfirmed()}
        known.update(delivery.number for delivery in self._unreported)
        for feed in self._feeds.values():
            if isinstance(feed, RemoteQueue):
                known.update(feed.held)
        numbers = sorted(known)
        self._lost(numbers[say.MAX_NAMED :])  # the broker delivers again what is not named
        return numbers[: say.MAX_NAMED]

    def _lost(self, numbers: list[int]) -> None:
        for feed in self._feeds.values():
            if isinstance(feed, RemoteQueue):
                feed.lost(numbers)

    def _renewed(self) -> None:
        """Join again, naming the held deliveries: the broker was restarted, or forgot this session."""
        self._renewals += 1
        deliveries, self._unreported = self._unreported, {}
        unreported = [each.settlement() for each in deliveries]
        for settlement in (*self.channel.unconfirmed(), *unreported):
            self._doubtful.update(settled_events(settlement))
        for feed in self._feeds.values():
            if feed.number in self._asked:
                if isinstance(feed, RemoteQueue):
                    feed.resume()
                continue
            if feed.stopped:
                continue  # joining again would replace a newer member of the same name
            self._asked.add(feed.number)
            held = list(feed.held.values()) if isinstance(feed, RemoteQueue) else []
            message = subscribe_message(feed, held, self.channel.frame_bytes)
            call = self.channel.begin(Kind.SUBSCRIBE, message, again=True)
            task = asyncio.create_task(self._joined(feed, call, held))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _joined(
        self, feed: RemoteQueue | RemoteLog, call: Call, held: list[RemoteDelivery]
    ) -> None:
        try:
            answer = await self.channel.finish(call, deadline_s=0)
        except PenstockError as error:
            feed.stop(error)
            return
        finally:
            self._asked.discard(feed.number)
        if isinstance(feed, RemoteQueue):
            joined: say.Joined = decode(answer.meta, say.Joined)
            for delivery in held:
                indices = joined.adopted.get(delivery.number, [])
                self._doubtful.difference_update((delivery.number, index) for index in indices)
                self._doubtful.update(feed.taken_up(delivery, indices))
            feed.resume()
        self._report()

    # -- reading and administration ------------------------------------------------------------

    async def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches; the next chunk is requested before the caller gets this one."""
        coming = asyncio.ensure_future(self._chunk(topic, partition, start, stop))
        try:
            while True:
                end, batches = await coming
                if batches:
                    start = batches[-1].end_offset
                if not end:
                    coming = asyncio.ensure_future(self._chunk(topic, partition, start, stop))
                for batch in batches:
                    yield batch
                if end:
                    return
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _chunk(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> tuple[bool, list[EventBatch]]:
        wanted = say.Read(topic, partition, start, stop, CHUNK_BYTES)
        answer = await self.channel.call(Kind.READ, wanted, again=True)
        chunk: say.Chunk = decode(answer.meta, say.Chunk)
        return chunk.end, [EventBatch.decode(part) for part in answer.parts]

    async def ask(self, request: Request) -> Any:
        """Let the broker answer an administrative request."""
        kind = type(request)
        welcome = self.channel.welcome
        if self._token_names_subject and getattr(request, "actor", "") == self._subject:
            # The broker takes the actor from the token; the subject in the settings may differ.
            request = msgspec.structs.replace(request, actor="")
        if isinstance(request, AdmitReplay) and not self.channel.hello.tenant and welcome:
            # This client named no tenant, so the broker's Welcome names it.
            request = AdmitReplay(welcome.tenant or request.tenant)
        self._report()  # the broker executes earlier settlements before the request
        message = say.Ask(kind.__name__, msgspec.to_builtins(request, builtin_types=(bytes,)))
        answer = await self.channel.call(Kind.ASK, message, again=kind in READ_ONLY)
        return decode(answer.meta, ANSWERS[kind])


def subscribe_message(
    feed: RemoteQueue | RemoteLog,
    held: Sequence[RemoteDelivery] = (),
    frame_bytes: int = MAX_FRAME_BYTES,
) -> say.Subscribe:
    """The message that opens a feed; after a restart of the broker it names the deliveries held here.

    It names as many as fit, the earliest ones. The broker delivers the others again.
    """
    wanted = feed.wanted
    most = min(say.MAX_HELD, frame_bytes // HELD_BYTES)
    return say.Subscribe(
        feed.number, wanted.group, wanted.spec, wanted.member, wanted.max_inflight,
        [delivery.in_hand() for delivery in held[:most]],
        feed.in_hand() if isinstance(feed, RemoteLog) else [],
    )  # fmt: skip

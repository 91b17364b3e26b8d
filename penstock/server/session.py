"""One client of the broker, over all its connections.

`Session` outlives a connection: its requests go on while the client reconnects. It passes each request
to the part that answers it (`PublishHandler`, `Subscriptions`, `ReadHandler`), and keeps the answer until
the client confirms it, so that a repeated request is answered and not done again (`AnswerCache`).

It takes settlements and confirms those that are durable. `Broker` makes sessions, and ends them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.core.entry import SessionPut
from penstock.engines import requests
from penstock.engines.embedded.delivery import Dispatcher
from penstock.engines.requests import REQUESTS
from penstock.model.batch import EventBatch
from penstock.model.errors import Deferred, InvalidInput, PenstockError, ProtocolViolation
from penstock.model.event import Identity
from penstock.model.parameter import wrong_type
from penstock.server.client_bytes import EXPANDED, KEPT
from penstock.server.publish import PublishHandler
from penstock.server.subscriptions import LogSubscription, Subscriptions, refuse
from penstock.server.validation import check_read
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Frame, Kind
from penstock.wire.message import decode, encode, to_fault

if TYPE_CHECKING:
    from penstock.server.broker import Broker
    from penstock.server.transports.link import Link

log = logging.getLogger("penstock.server")

# Of one answer, whatever the client asks for: the broker holds it in memory.
MAX_CHUNK_BYTES = 16 << 20
# Answers kept for a client that may have missed them: as many as it can have requests open.
MAX_KEPT_ANSWERS = 4_096
MAX_KEPT_BYTES = 32 << 20
# Answers that are not kept: a repeated Read reads again, and a log feed keeps its last batch.
ASKED_AGAIN = (Kind.READ, Kind.FETCH)
# Settlements between two confirmations, so that a busy client has to keep few of them.
CONFIRM_EVERY = 256
# How often `room` looks whether the client has read enough.
LOOK_AGAIN_S = 0.005
# JSON clients can count no further, and no session gets there.
MAX_DELIVERY = 1 << 53
# A client sends a heartbeat every few seconds; more than this is a flood.
MAX_BEATS_PER_S = 100


class Session:
    """One client of the broker, over all its connections."""

    def __init__(self, broker: Broker, id: str, hello: say.Hello, identity: Identity) -> None:
        self.id = id
        self.hello = hello
        self.identity = identity
        self.link: Link | None = None
        self.heard_at = broker.now()
        self.restored = False
        """Known from the journal only: the broker was restarted, and the client may not know it yet."""
        self.greeting_lock = asyncio.Lock()
        """One greeting at a time."""
        self.settled = self._durable = 0
        """The last Settle that arrived, and the last that is durable."""
        self._syncing: asyncio.Task[None] | None = None
        self._beats, self._beats_since_s = 0, 0.0
        self.feeds = Subscriptions(broker, self)
        self._broker = broker
        publisher = PublishHandler(
            broker.engine, self, broker.counters, broker.fastpath, broker.courtesy
        )
        reads = ReadHandler(broker, self)
        self.account = broker.client_bytes.account(cut=self._exceeded)
        self._batches: dict[int, int] = {}
        """Bytes of the last batch of each log feed, kept because the client may ask for it again."""
        self._batch_bytes = 0
        self._attached = asyncio.Event()
        self._delivery = 0
        self._answers = AnswerCache(MAX_KEPT_ANSWERS, MAX_KEPT_BYTES)
        self._working: dict[int, asyncio.Task[None]] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self.own_topics: set[str] = set()
        self._handlers: dict[int, Callable[[Frame], Awaitable[Frame]]] = {
            Kind.PUBLISH: publisher.publish,
            Kind.TRANSACT: publisher.transact,
            Kind.SUBSCRIBE: self.feeds.subscribe,
            Kind.UNSUBSCRIBE: self.feeds.unsubscribe,
            Kind.FETCH: reads.fetch,
            Kind.COMMIT: reads.commit,
            Kind.READ: reads.read,
            Kind.ASK: reads.ask,
            Kind.FLUSH: reads.flush,
        }

    def entry(self) -> SessionPut:
        """The session as the journal keeps it."""
        hello, who = self.hello, self.identity
        return SessionPut(
            self.id, hello.client, who.tenant, who.subject, who.roles,
            tuple(hello.subscriptions), hello.max_inflight, hello.supports_ack,
        )  # fmt: skip

    # -- the connection ------------------------------------------------------------------------

    def attach(self, link: Link, hello: say.Hello, welcome: say.Welcome) -> None:
        """Take a connection: the first one, or a new one after the last broke."""
        if self.link is not None and self.link is not link:
            self.link.close()
        self.link = link
        self.heard_at = self._broker.now()
        held = {number for subscription in self.feeds.queues() for number in subscription.held}
        known = {*hello.deliveries, *(each.delivery for each in hello.held)}
        said = [each for each in known if each < MAX_DELIVERY]
        self._delivery = max(self._delivery, *said, 0)
        unknown = [each for each in hello.pending if not self._knows(each)]
        lost = [each for each in hello.deliveries if each not in held]
        welcome = msgspec.structs.replace(
            welcome, settled=self._durable, unknown=unknown, lost=lost
        )
        self.send(Frame(Kind.WELCOME, 0, encode(welcome)))
        for request in hello.pending:
            if request in self._answers:
                self.send(self._answers[request])
        for subscription in self.feeds.queues():
            subscription.resume(known)
        for frame in self.feeds.ended.values():  # the client may have missed them while it was away
            self.send(frame)
        self._attached.set()

    def _knows(self, request: int) -> bool:
        return request in self._answers or request in self._working

    def detach(self) -> None:
        """The connection is gone; feeds wait for another connection, or for the end of the session."""
        self.link = None
        for subscription in self.feeds.queues():
            subscription.pause()
        self._attached.clear()
        self.heard_at = self._broker.now()

    def send(self, frame: Frame) -> None:
        """Send a frame, if there is a connection."""
        if self.link is not None:
            self.link.send(frame)

    def rest(self, seconds: float) -> None:
        """Read nothing from the client for a while, if there is a connection."""
        if self.link is not None:
            self.link.rest(seconds)

    @property
    def has_room(self) -> bool:
        """Whether there is a connection, and its send buffer has room."""
        return self.link is not None and self.link.pending_bytes() <= self._broker.send_buffer_bytes

    async def room(self) -> None:
        """Wait until there is a connection whose send buffer has room."""
        if self.link is not None and not self.has_room:
            self._broker.counters.backpressure("send-buffer")
        while not self.has_room:
            if self.link is None:
                await self._attached.wait()
            else:
                await asyncio.sleep(LOOK_AGAIN_S)

    # -- frames from the client ----------------------------------------------------------------

    def received(self, frame: Frame) -> None:
        """Take a frame from the client."""
        self.heard_at = self._broker.now()
        self.restored = False  # the client has the Welcome
        if frame.kind == Kind.SETTLE:
            self._settle(decode(frame.meta, say.Settle))
        elif frame.kind == Kind.HEARTBEAT:
            self._beat(decode(frame.meta, say.Beat))
        elif frame.request in self._answers:
            self.send(self._answers[frame.request])
        elif frame.request not in self._working:
            handler = self._handlers.get(frame.kind)
            if handler is None:
                raise ProtocolViolation(f"a client does not send frames of kind {frame.kind}")
            if len(self._working) >= MAX_KEPT_ANSWERS:
                raise ProtocolViolation(f"more than {MAX_KEPT_ANSWERS} requests without an answer")
            work = asyncio.create_task(self._work(handler, [frame], frame.size_bytes))
            self._working[frame.request] = work
            if frame.kind == Kind.FETCH:
                self._fetching.add(work)
                work.add_done_callback(self._fetching.discard)

    async def _work(
        self, handler: Callable[[Frame], Awaitable[Frame]], held: list[Frame], size_bytes: int
    ) -> None:
        frame = held[0]
        kind, request = frame.kind, frame.request
        try:
            answer = await handler(frame)
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("request failed", extra={"session": self.id, "kind": kind})
            answer = Frame(Kind.FAULT, request, encode(to_fault(error)))
            self._broker.failed(error)
        self._working.pop(request, None)
        if kind not in ASKED_AGAIN and self.hello.resumable:
            self._answers.keep(answer)
            self._count_kept()
        self.send(answer)
        del frame
        self._broker.fastpath.drop(held, size_bytes)

    def _beat(self, beat: say.Beat) -> None:
        if self.heard_at - self._beats_since_s > 1.0:
            self._beats, self._beats_since_s = 0, self.heard_at
        self._beats += 1
        if self._beats > MAX_BEATS_PER_S:
            raise ProtocolViolation(f"more than {MAX_BEATS_PER_S} heartbeats in a second")
        self._answers.forget_before(beat.answered)
        for subscription in self.feeds.values():
            if isinstance(subscription, LogSubscription):
                subscription.forget_before(beat.answered)
        self._count_batches()
        self._confirm()

    def keeps_batch(self, feed: int, size: int) -> None:
        """A log feed answers with this batch, and keeps it until the client confirms the answer."""
        self._batch_bytes += size - self._batches.get(feed, 0)
        self._batches[feed] = size
        self._count_kept()

    def _count_batches(self) -> None:
        logs = {
            feed: subscription.kept_bytes
            for feed, subscription in self.feeds.items()
            if isinstance(subscription, LogSubscription)
        }
        self._batches, self._batch_bytes = logs, sum(logs.values())
        self._count_kept()

    def _count_kept(self) -> None:
        self.account.hold(KEPT, self._answers.bytes + self._batch_bytes)

    def _exceeded(self, error: Deferred) -> None:
        """The client holds most of the bytes that all clients may hold: drop its answers and its connection."""
        self.account = self._broker.client_bytes.account(cut=self._exceeded)
        self._answers.clear()
        for subscription in self.feeds.values():
            if isinstance(subscription, LogSubscription):
                subscription.forget()
        self._count_batches()
        if self.link is not None:
            self._broker.refused(error)
            self.send(Frame(Kind.FAULT, 0, encode(to_fault(error))))
            self.link.close()

    def _confirm(self) -> None:
        """Tell the client which settlements are durable, now and again when the others are."""
        self.send(Frame(Kind.BEAT, 0, encode(say.Beat(settled=self._durable))))
        if self.settled > self._durable and self._syncing is None:
            self._syncing = self._broker.engine.spawn(self._make_durable(self.settled))

    async def _make_durable(self, settled: int) -> None:
        try:
            await self._broker.engine.flush()  # rejected events are stored as dead letters first
            self._durable = max(self._durable, settled)
        finally:
            self._syncing = None
        self.send(Frame(Kind.BEAT, 0, encode(say.Beat(settled=self._durable))))

    def _settle(self, settle: say.Settle) -> None:
        if settle.sequence <= self.settled:
            return  # a repetition, by a client that had no confirmation
        self.settled = settle.sequence
        for settlement in settle.settlements:
            for subscription in self.feeds.queues():
                if settlement.delivery in subscription.held:
                    subscription.settle(settlement)
                    break
            else:
                refuse(self, settlement)
        if not self.settled % CONFIRM_EVERY:
            self._confirm()

    # -- for its feeds -------------------------------------------------------------------------

    def next_delivery(self) -> int:
        """A number for a delivery, unused in this session."""
        self._delivery += 1
        return self._delivery

    def dispatcher(self) -> Dispatcher:
        """The dispatcher that makes leases."""
        return self._broker.engine.dispatcher

    def delivered(self, batch: EventBatch, events: int, fresh: int) -> None:
        """Count events sent to the client."""
        self._broker.delivered(batch, events, fresh)

    def count_settled(self, kind: str, events: int) -> None:
        """Count events that the client settled."""
        if events:
            self._broker.counters.settled(kind, events)

    def may_read(self, patterns: Sequence[str]) -> None:
        """Raise AccessDenied when the client may not read all that these patterns select."""
        check_read(self._broker.engine, self.identity, patterns)

    # -- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session: leave all groups, delete the groups and topics that were only its own."""
        link = self.link
        self.detach()
        self.account.close()
        if link is not None:
            link.close()
        for task in list(self._working.values()):  # first, because one may be about to open a feed
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)
        for request in (
            *map(requests.DeleteGroup, await self.feeds.close()),
            *map(requests.DeleteTopic, self.own_topics),
        ):
            try:
                await self._broker.engine.ask(request)
            except PenstockError as error:
                log.debug("nothing left to drop", extra={"session": self.id, "code": error.code})

    def give_up(self) -> None:
        """The client closed its connection and did not reconnect: return its leases to their groups."""
        for subscription in self.feeds.queues():
            subscription.give_up()

    async def suspend(self) -> None:
        """Stop with the broker; leases and the session continue after the broker's next start."""
        link = self.link
        self.detach()
        if link is not None:
            link.close()
        for task in list(self._working.values()):
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)
        await self.feeds.suspend()

    async def make_durable(self) -> None:
        """Make all settlements durable, and tell the client."""
        if self.settled > self._durable:
            await self._make_durable(self.settled)

    async def finish(self, seconds: float) -> None:
        """Wait until no request is being worked on, at most so long; fetches may wait without end."""
        busy = set(self._working.values()) - self._fetching
        if busy and seconds > 0:
            await asyncio.wait(busy, timeout=seconds)


class ReadHandler:
    """Answers reads, fetches, commits and administrative requests of one session."""

    def __init__(self, broker: Broker, session: Session) -> None:
        self._broker = broker
        self._session = session

    async def read(self, frame: Frame) -> Frame:
        """Stored batches, as many as fit into one answer."""
        asked = decode(frame.meta, say.Read)
        self._session.may_read((asked.topic,))
        most_bytes = max(0, min(asked.max_bytes, MAX_CHUNK_BYTES))
        account = self._session.account
        await account.room(EXPANDED, most_bytes)
        try:
            return await self._read(frame.request, asked, most_bytes)
        finally:
            account.add(EXPANDED, -most_bytes)

    async def _read(self, request: int, asked: say.Read, most_bytes: int) -> Frame:
        parts: list[bytes] = []
        size = 0
        end = True
        batches = self._broker.engine.read(asked.topic, asked.partition, asked.start, asked.stop)
        async for batch in batches:
            parts.append(batch.encode())
            self._broker.counters.replayed(batch.tenant, batch.topic, batch.count)
            size += len(parts[-1])
            if size >= most_bytes or len(parts) >= MAX_PARTS:
                end = False
                break
        await batches.aclose()  # type: ignore[attr-defined]
        return Frame(Kind.RESULT, request, encode(say.Chunk(end)), parts)

    async def fetch(self, frame: Frame) -> Frame:
        """The next batch of a log feed; a repeated request gets the same batch again."""
        feed = decode(frame.meta, say.Feed).feed
        await self._session.feeds.opened(feed)
        subscription = self._session.feeds.log(feed)
        batch, epoch = await subscription.fetch(frame.request)
        self._session.keeps_batch(feed, batch.size_bytes)
        self._broker.delivered(batch, batch.count, subscription.reader.fresh(batch))
        return Frame(Kind.RESULT, frame.request, encode(say.Fetched(epoch)), (batch.encode(),))

    async def commit(self, frame: Frame) -> Frame:
        """Commit the cursors of a client in a log feed."""
        commit = decode(frame.meta, say.Commit)
        await self._session.feeds.opened(commit.feed)
        subscription = self._session.feeds.log(commit.feed)
        subscription.mark(commit)
        await subscription.reader.commit()
        return Frame(Kind.RESULT, frame.request, b"")

    async def ask(self, frame: Frame) -> Frame:
        """Administration, within the rights of the client."""
        asked = decode(frame.meta, say.Ask)
        kind = REQUESTS.get(asked.request)
        if kind is None:
            raise InvalidInput(f"no request is called {asked.request!r}", request=asked.request)
        try:
            request = msgspec.convert(asked.fields, kind)
        except msgspec.ValidationError as error:
            raise wrong_type(error) from None
        answer = await self._broker.gate.ask(self._session.identity, request)
        if isinstance(request, requests.CreateTopic) and request.spec.ephemeral:
            self._session.own_topics.add(request.topic)
        return Frame(Kind.RESULT, frame.request, msgspec.msgpack.encode(answer))

    async def flush(self, frame: Frame) -> Frame:
        """Answer when everything settled so far is durable."""
        await self._broker.engine.flush()
        return Frame(Kind.RESULT, frame.request, b"")


class AnswerCache:
    """The last answers of one session, by request; limited in number and in bytes.

    >>> answers = AnswerCache(100, 1 << 20)
    >>> answers.keep(Frame(0x52, 7, b"")); 7 in answers
    True
    >>> answers.forget_before(8); 7 in answers
    False
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[int, Frame] = {}
        self.bytes = 0

    def __contains__(self, request: int) -> bool:
        return request in self._kept

    def __getitem__(self, request: int) -> Frame:
        return self._kept[request]

    def keep(self, answer: Frame) -> None:
        """Keep an answer; drop the oldest when there are too many."""
        self._kept[answer.request] = answer
        self.bytes += answer.size_bytes
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def forget_before(self, request: int) -> None:
        """Drop answers to requests before this one: the client has them."""
        for each in [each for each in self._kept if each < request]:
            self._drop(each)

    def clear(self) -> None:
        """Drop all answers."""
        self._kept.clear()
        self.bytes = 0

    def _drop(self, request: int) -> None:
        self.bytes -= self._kept.pop(request).size_bytes

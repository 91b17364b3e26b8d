"""Stores what a session publishes: each publish and transaction once, however often it is sent.

`PublishHandler` belongs to one session. For each frame it does this, in order:

1. `RequestWindow` limits the publishes without an answer to what deduplication remembers after a crash.
2. `TopicOrder` keeps the order in which the client published to each topic: a publish that takes long to
   prepare (a large one, a new topic) holds up later ones to the same topic, and no others.
3. Drafts are checked and compressed, large ones in a thread.
4. The embedded engine stores them together with the numbers of the session, so that a repetition of the
   frame gets the receipts of the first.

Tenants over their rate wait while other tenants' publishes are being stored (`Courtesy`), and their large
frames are stored in chunks of `HELPING_BYTES`, prepared `BITE_BYTES` at a time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.bus import tracing
from penstock.core.admission import ADMITTED
from penstock.core.entry import Entry, Produced
from penstock.core.state import REMEMBERED_PUBLISHES, SessionState
from penstock.engines.broker.publisher import MOST_TENANTS, RATES
from penstock.engines.embedded.batching import draft_payload_bytes
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.publisher import Bundle, combined, pieces_of
from penstock.engines.embedded.schedules import SCHEDULED
from penstock.engines.engine import Settle, Transaction
from penstock.model.batch import BatchHead, expanded_bytes
from penstock.model.draft import Draft
from penstock.model.errors import (
    ConnectionLost,
    Deferred,
    InvalidInput,
    LeaseExpired,
    OffsetExpired,
    PenstockError,
    ProtocolViolation,
    Rejected,
    Throttled,
)
from penstock.model.event import Identity, Receipt
from penstock.model.role import ADMIN
from penstock.model.settings import Limits
from penstock.model.topic import tenant_of
from penstock.server.client_bytes import EXPANDED, Account
from penstock.server.fastpath import FastPath
from penstock.server.metrics.counters import Counters, duplicates_in
from penstock.server.validation import check_transaction_key, owner, to_draft
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Bytes, Frame, Kind
from penstock.wire.message import DraftMeta, Fault, decode, encode, to_fault

if TYPE_CHECKING:
    from penstock.server.session import Session

# Reading from a client over its rate pauses for at most this long: every refusal costs the broker time
# that other tenants wait for, and refusals of one large frame cost less than those of many small ones.
MAX_REST_S = 0.05
# Batches of one frame that are prepared in one turn of the loop.
TURN_BATCHES = 4
# And drafts that lie in its message.
TURN_DRAFTS = 256
# In one Publish: as many as it could have parts, and four times what our client sends.
MAX_DRAFTS = MAX_PARTS
# A publish beyond the window is tried again after this: about as long as a slow commit takes.
RETRY_S = 0.05


class PublishHandler:
    """Stores the publishes and transactions of one session."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        session: Session,
        counters: Counters,
        fastpath: FastPath,
        courtesy: Courtesy,
    ) -> None:
        self._courtesy = courtesy
        self._engine = engine
        self._fastpath = fastpath
        self._counters = counters
        self._session = session
        self._bundle = Bundle(engine)
        self._order = TopicOrder()
        self._window = RequestWindow()

    async def publish(self, frame: Frame) -> Frame:
        """Store the drafts of a frame, or answer with their receipts when they are stored already."""
        request: say.Publish = decode(frame.meta, say.Publish)
        if len(request.drafts) > MAX_DRAFTS:
            raise InvalidInput(
                f"{len(request.drafts)} drafts in one Publish; {MAX_DRAFTS} are allowed, and nothing was "
                "stored. Send them in several"
            )
        self._begin(request.sequence)
        try:
            return await self._publish_in_order(frame, request)
        finally:
            self._window.end()

    def _begin(self, sequence: int) -> None:
        """Check the sequence number before anything waits. Only a resumable session repeats a publish."""
        known = self._known() if self._session.hello.resumable else None
        try:
            self._window.begin(sequence, known)
        except Rejected as error:
            self._note_refusal(error)
            raise

    def _known(self) -> SessionState | None:
        return self._engine.state.sessions.get(self._session.id)

    async def _publish_in_order(self, frame: Frame, request: say.Publish) -> Frame:
        """Every publish takes its turn: new topics, files and threads can delay any of them."""
        with self._order.join({draft.topic for draft in request.drafts}) as place:
            if self._ahead(request):
                return await self._publish(frame, request, place, patient=True)
            if self._fastpath.wants(frame.size_bytes):
                # It takes too long for tenants over their rate to wait until it ends.
                return await self._publish(frame, request, place)
            await place.turn()
            self._courtesy.begin()
            try:
                return await self._publish(frame, request, place)
            finally:
                self._courtesy.end()

    def _ahead(self, request: say.Publish) -> bool:
        """Whether the tenant is over its rate: the tenant of the first draft, as a rule of all drafts."""
        if not request.drafts:
            return False
        tenant = tenant_of(request.drafts[0].topic) or self._session.identity.tenant
        return self._engine.admission.ahead(tenant, self._engine.runtime.now())

    async def _let_others_go_first(self, request: say.Publish) -> None:
        """Looks each time whether the tenant is still over its rate: waiting must not cost it its rate."""
        if self._ahead(request):
            await self._courtesy.turn()

    async def _publish(
        self,
        frame: Frame,
        request: say.Publish,
        place: Turn,
        *,
        patient: bool = False,
    ) -> Frame:
        stored = self._earlier(request.sequence)
        if request.withheld and not stored:
            self._count_withheld(request.withheld)
        found = Answers(len(request.drafts))
        account = self._session.account
        expanded = await self._room(account, request.drafts, frame.parts)
        try:
            return await self._publish_some(frame, request, place, stored, found, patient)
        finally:
            account.add(EXPANDED, -expanded)

    @staticmethod
    async def _room(
        account: Account, drafts: Sequence[say.DraftMeta], parts: Sequence[Bytes]
    ) -> int:
        """Wait until the broker has room for compressed batches when expanded; returns their bytes."""
        size = sum(
            expanded_bytes(parts[meta.part]) for meta in drafts if 0 <= meta.part < len(parts)
        )
        if size:
            await account.room(EXPANDED, size)
        return size

    async def _publish_some(
        self,
        frame: Frame,
        request: say.Publish,
        place: Turn,
        stored: dict[int, list[tuple[int, int, int]]],
        found: Answers,
        patient: bool,
    ) -> Frame:
        sizes = [size_of(meta, frame.parts) for meta in request.drafts]
        helpings = helpings_of(sizes) if patient else [range(len(sizes))]
        for numbers in helpings:
            drafts = await self._prepare_some(
                numbers, frame, request, sizes, stored, found, patient
            )
            if not drafts:
                continue
            await place.turn()
            leave = place.leave if numbers is helpings[-1] else _keep_place
            patience_s = self._courtesy.company_s() if patient and self._ahead(request) else 0.0
            await self._store(drafts, request.sequence, leave, found, patience_s)
        if patient:
            await self._let_others_go_first(request)
        answer = say.Published(found.receipts, found.faults)
        return Frame(Kind.RESULT, frame.request, encode(answer))

    async def _prepare_some(
        self,
        numbers: range,
        frame: Frame,
        request: say.Publish,
        sizes: Sequence[int],
        stored: dict[int, list[tuple[int, int, int]]],
        found: Answers,
        patient: bool,
    ) -> dict[int, Draft]:
        """Prepare drafts, by number; those refused or stored before get their answer in `found`."""
        drafts: dict[int, Draft] = {}
        bite = BITE_BYTES
        for number in numbers:
            meta, size = request.drafts[number], sizes[number]
            if number in stored:
                found.receipts[number] = await self._repeated_receipt(meta, stored[number])
                continue
            if patient and bite >= BITE_BYTES:
                await self._let_others_go_first(request)
                bite = 0
            bite += DRAFT_BYTES + size
            await _pause(number, meta)
            try:
                if size and (meta.part >= 0 or self._fastpath.wants(size)):
                    self._check_rate(meta, frame.parts)
                drafts[number] = await self._prepare(meta, frame.parts, size)
            except PenstockError as error:
                found.faults[number] = to_fault(error)
                if isinstance(error, Rejected) or "limit" in error.data:
                    self._note_refusal(error)
        return drafts

    async def _store(
        self,
        drafts: dict[int, Draft],
        sequence: int,
        ready: Callable[[], None],
        found: Answers,
        patience_s: float,
    ) -> None:
        numbers = list(drafts)

        def note(places: list[int]) -> Entry:
            for at in range(0, len(places), 4):
                places[at] = numbers[places[at]]
            return Produced(self._session.id, sequence, places)

        started = time.perf_counter()
        with tracing.receiving(list(drafts.values())):
            answers = await self._bundle.publish(list(drafts.values()), note, ready, patience_s)
        seconds = time.perf_counter() - started
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Receipt):
                found.receipts[number] = answer
                self._count(drafts[number], answer, seconds)
            else:
                found.faults[number] = to_fault(answer)
                self._note_refusal(answer)

    def _prepare(self, meta: say.DraftMeta, parts: Sequence[Bytes], size: int) -> Awaitable[Draft]:
        """Prepare a draft for the engine, in a thread when it is large."""
        limits, identity = self._engine.settings.limits, self._session.identity
        large = self._fastpath.wants(size)
        return self._fastpath.run(size, self._check, meta, parts, identity, limits, large)

    def _check(
        self,
        meta: say.DraftMeta,
        parts: Sequence[Bytes],
        identity: Identity,
        limits: Limits,
        large: bool,
    ) -> Draft:
        """Check a draft, and compress it unless its payload goes to a side file."""
        draft = to_draft(meta, parts, identity, limits)
        delayed = draft.deliver_at_us is not None
        if large and draft.batch is None and not delayed:
            draft.batch = draft.build()  # small lists stay lists, and share a batch with others
        batch = draft.batch
        aside = draft.count == 1 and draft.tokens is None and not delayed
        if batch is not None and not (
            aside
            and batch.payload_column.largest() >= self._engine.settings.journal.side_file_bytes
        ):
            self._engine.layout.compress(batch)
            batch.stored_body()
            draft.final = True
        return draft

    def _check_rate(self, meta: say.DraftMeta, parts: Sequence[Bytes]) -> None:
        """Refuse a draft over the tenant's rate by its number of events, before any other work."""
        tenant, count = owner(meta, self._session.identity), len(meta.payloads)
        if meta.part >= 0:
            count = BatchHead.parse(memoryview(parts[meta.part])).count
        now = self._engine.runtime.now()
        decision = self._engine.admission.peek(tenant, meta.topic, count, now)
        if decision is not ADMITTED:
            raise decision.error()

    def _count_withheld(self, found: dict[str, int]) -> None:
        """Count the publishes that the client itself held back, each for the tenant it belongs to."""
        who = self._session.identity
        for key, times in islice(found.items(), len(RATES) * MOST_TENANTS):
            limit, _, tenant = key.partition(" ")
            if limit in RATES and times > 0:
                own = not tenant or ADMIN not in who.roles
                self._counters.refused("throttled", limit, who.tenant if own else tenant, times)

    def _note_refusal(self, error: PenstockError) -> None:
        self._counters.rejected(error, self._session.identity.tenant)
        if isinstance(error, Throttled):
            self._session.rest(min(error.retry_after_s, MAX_REST_S))

    def _count(self, draft: Draft, receipt: Receipt, seconds: float) -> None:
        again = duplicates_in(receipt)
        if again:
            self._counters.duplicates(draft.tenant, draft.topic, again)
        size = draft_payload_bytes(draft)
        new = draft.count - again
        # The receipt does not say which events were duplicates: each counts an equal share of the bytes.
        self._counters.published(draft.tenant, draft.topic, new, size * new // draft.count, seconds)

    def _earlier(self, sequence: int) -> dict[int, list[tuple[int, int, int]]]:
        """Where the drafts of an earlier publish went: partition, offset and count, by draft."""
        known = self._known()
        places = known.produced.get(sequence) if known is not None else None
        found: dict[int, list[tuple[int, int, int]]] = {}
        for at in range(0, len(places or ()), 4):
            draft, partition, offset, count = places[at : at + 4]  # type: ignore[index]
            found.setdefault(draft, []).append((partition, offset, count))
        return found

    async def _repeated_receipt(
        self, meta: say.DraftMeta, places: Sequence[tuple[int, int, int]]
    ) -> Receipt:
        scheduled = meta.deliver_at_us is not None
        topic = SCHEDULED if scheduled else meta.topic
        receipts = []
        for partition, offset, count in places:
            try:
                token = (await self._engine.event_at(topic, partition, offset)).token.bytes
            except (
                OffsetExpired
            ):  # it was stored; retention or the deletion of its topic removed it
                token = bytes(16)
            where = (0, -1) if scheduled else (partition, offset)
            receipts.append(
                Receipt(meta.topic, *where, count, token, duplicate=True, scheduled=scheduled)
            )
        whole = Draft(meta.topic, (), tenant="", codec=meta.codec)
        whole.count = sum(count for _, _, count in places)
        return combined(whole, receipts)

    async def transact(self, frame: Frame) -> Frame:
        """Store publishes, acks and cursors together: all of them or none."""
        request: say.Transact = decode(frame.meta, say.Transact)
        self._begin(request.sequence)
        try:
            return await self._transact(frame, request)
        except Rejected as error:
            self._note_refusal(error)
            raise
        finally:
            self._window.end()

    async def _transact(self, frame: Frame, request: say.Transact) -> Frame:
        stored = self._earlier(request.sequence)
        known = self._known()
        if known is not None and request.sequence in known.produced:
            if not stored.keys() >= set(range(len(request.drafts))):
                raise ProtocolViolation(
                    f"the transaction of sequence {request.sequence} had {len(stored)} drafts, not "
                    f"{len(request.drafts)}; nothing happened. Give each transaction a sequence of its own"
                )
            receipts = [
                await self._repeated_receipt(meta, stored[number])
                for number, meta in enumerate(request.drafts)
            ]
            return Frame(Kind.RESULT, frame.request, encode(say.Published(list(receipts))))
        account = self._session.account
        expanded = await self._room(account, request.drafts, frame.parts)
        try:
            return await self._transact_new(frame, request)
        finally:
            account.add(EXPANDED, -expanded)

    async def _transact_new(self, frame: Frame, request: say.Transact) -> Frame:
        parts = frame.parts
        drafts = []
        for number, meta in enumerate(request.drafts):
            await _pause(number, meta)
            drafts.append(await self._prepare(meta, parts, size_of(meta, parts)))
        identity = self._session.identity
        if request.key is not None:
            check_transaction_key(request.key)
            if await self._engine.transaction_keys.knows(identity.tenant, request.key):
                return self._all_repeated(frame, drafts)  # even when its leases have ended
        transaction = Transaction(
            drafts=drafts,
            acks=[await self._leased(delivery, index) for delivery, index in request.acks],
            cursors=[],
            key=request.key,
            tenant=identity.tenant,
        )
        for cursor in request.cursors:
            await self._session.feeds.opened(cursor.feed)
            subscription = self._session.feeds.log(cursor.feed)
            subscription.mark(cursor)
            transaction.cursors.append(subscription.reader)

        def note(taken: list[Receipt]) -> Entry:
            places: list[int] = []
            for number, receipt in enumerate(taken):
                for part in pieces_of(receipt):
                    places += (number, part.partition, part.offset, part.count)
            return Produced(self._session.id, request.sequence, places)

        started = time.perf_counter()
        with tracing.receiving(drafts):
            done = await self._engine.publisher.transact(transaction, note)
        if done is None:
            return self._all_repeated(frame, drafts)
        for draft, receipt in zip(drafts, done, strict=True):
            self._count(draft, receipt, time.perf_counter() - started)
        self._session.feeds.drop_settled({delivery for delivery, _ in request.acks})
        return Frame(Kind.RESULT, frame.request, encode(say.Published(list(done))))

    def _all_repeated(self, frame: Frame, drafts: Sequence[Draft]) -> Frame:
        for draft in drafts:
            self._counters.duplicates(draft.tenant, draft.topic, draft.count)
        return Frame(Kind.RESULT, frame.request, encode(say.Published([], key_known=True)))

    async def _leased(self, delivery: int, index: int) -> Settle:
        leased = self._session.feeds.leased(delivery)
        if leased is None:  # a client that reconnected may be subscribing again at this moment
            await self._session.feeds.opened()
            leased = self._session.feeds.leased(delivery)
        if leased is None or not 0 <= index < leased.count:
            raise LeaseExpired("an event of the transaction is leased no more; nothing happened")
        return Settle(leased, index)


async def _pause(number: int, meta: say.DraftMeta) -> None:
    """Let other tasks run between the drafts of a large frame."""
    turn = TURN_DRAFTS if meta.part < 0 else TURN_BATCHES
    if number % turn == turn - 1:
        await asyncio.sleep(0)


def _keep_place() -> None:
    """For a chunk with more of the frame behind it: the publish keeps its turn."""


class Answers:
    """The receipts and faults of the drafts of one frame, by number."""

    def __init__(self, count: int) -> None:
        self.receipts: list[Receipt | None] = [None] * count
        self.faults: dict[int, Fault] = {}


def size_of(meta: DraftMeta, parts: Sequence[Bytes]) -> int:
    """The bytes of a draft, in its part or in its lists; 0 when the frame lacks its part."""
    if meta.part < 0:
        return sum(map(len, meta.payloads))
    return len(parts[meta.part]) if meta.part < len(parts) else 0


class TopicOrder:
    """The publishes of one client that are being prepared, by topic."""

    def __init__(self) -> None:
        self.last: dict[str, asyncio.Future[None]] = {}

    def join(self, topics: Collection[str]) -> Turn:
        """Take a place behind all publishes to these topics; a `with` block leaves it."""
        return Turn(self, topics)


class Turn:
    """The place of one publish in the order of its topics."""

    def __init__(self, order: TopicOrder, topics: Collection[str]) -> None:
        self._order = order
        self._topics = topics
        self._earlier = {order.last[topic] for topic in topics if topic in order.last}
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            order.last[topic] = self._left

    async def turn(self) -> None:
        """Wait until all earlier publishes have left."""
        if self._earlier:
            await asyncio.wait(self._earlier)

    def leave(self) -> None:
        """Release this publish's place; later publishes still wait for earlier ones."""
        for each in self._earlier:
            if not each.done():
                each.add_done_callback(lambda _: self.leave())
                return
        if self._left.done():
            return
        self._left.set_result(None)
        last = self._order.last
        for topic in self._topics:
            if last.get(topic) is self._left:
                del last[topic]

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class RequestWindow:
    """Limits the unanswered publishes and transactions of one session.

    There are no more than the journal remembers: a client may repeat each of them after a crash, and
    the broker must recognise it.

    >>> window = RequestWindow()
    >>> window.begin(7, None)
    >>> window.end()
    """

    def __init__(self) -> None:
        self._open = 0

    def begin(self, sequence: int, known: SessionState | None) -> None:
        """Count one, new or repeated; raises when it could be stored twice, now or after a crash.

        Call it in the order of arrival: a new sequence is higher than all known ones.
        """
        if known is not None and sequence not in known.produced:
            if known.may_have_forgotten(sequence):
                raise ConnectionLost(
                    f"the broker remembers the last {REMEMBERED_PUBLISHES} publishes and transactions of "
                    f"a session, and {sequence} came before them: it may have been stored. Look before "
                    f"you repeat it, and have fewer than {REMEMBERED_PUBLISHES} without an answer",
                    outcome="unknown",
                )
            if self._open >= REMEMBERED_PUBLISHES:
                raise Deferred(
                    f"{REMEMBERED_PUBLISHES} publishes and transactions of this session have no answer "
                    "yet, and a broker recognises no more after a crash; nothing of this one was "
                    "stored. Send it again, with a sequence of its own, when some are answered",
                    retry_after_s=RETRY_S,
                    limit="session_publishes",
                )
        self._open += 1

    def end(self) -> None:
        """One was answered."""
        self._open -= 1


# -- waiting for other tenants ------------------------------------------------------------------------

# The longest that work of a tenant over its rate waits for a moment without publishes of other tenants.
# Where there is no such moment, it still gets some hundred turns a second.
PATIENCE_S = 0.005
# The longest that it waits to share a commit, and how recent the last publish must be to expect another.
COMPANY_S = 0.005
LATELY_S = 2 * COMPANY_S
# A thread cannot be notified, so it looks this often; a publish takes about as long.
LOOK_S = 0.001


class Courtesy:
    """Delays work of tenants over their rate while other tenants' publishes are being stored.

    One loop runs everything, and a batch or a greeting takes it a good part of a millisecond: a publish
    that arrives meanwhile waits that long. So tenants over their rate, the pieces of large payloads, and
    clients that connect or leave wait for a moment without other publishes, `PATIENCE_S` at most.

    >>> async def order() -> list[str]:
    ...     courtesy, seen = Courtesy(), []
    ...     async def hasty() -> None:
    ...         await courtesy.turn()
    ...         seen.append("hasty")
    ...     courtesy.begin()
    ...     task = asyncio.ensure_future(hasty())
    ...     await asyncio.sleep(0)
    ...     seen.append("patient")
    ...     courtesy.end()
    ...     await task
    ...     return seen
    >>> asyncio.run(order())
    ['patient', 'hasty']
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._latest_s = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def begin(self) -> None:
        """A publish of a tenant within its rate has begun."""
        self._under_way += 1
        self._latest_s = time.monotonic()

    def company_s(self) -> float:
        """How long to wait for a commit of a tenant within its rate, which needs the sync anyway."""
        soon = self._under_way or time.monotonic() < self._latest_s + LATELY_S
        return COMPANY_S if soon else 0.0

    def end(self) -> None:
        """The publish of `begin` is answered."""
        self._under_way -= 1
        self._call_next()

    def pause(self) -> None:
        """The same as `turn`, blocking, for a thread."""
        until = time.monotonic() + PATIENCE_S
        while self._under_way and time.monotonic() < until:
            time.sleep(LOOK_S)

    async def turn(self) -> None:
        """Wait until no publish is under way, one waiter after another, `PATIENCE_S` at most."""
        # The first turn of the loop reads what other clients have sent, the second begins it.
        for _ in range(2):
            await asyncio.sleep(0)
        if self._under_way or self._waiting:
            await self._called()
        os.sched_yield()  # the client that was answered last may share our processor

    async def _called(self) -> None:
        loop = asyncio.get_running_loop()
        free = loop.create_future()
        self._waiting.append(free)
        timer = loop.call_later(PATIENCE_S, _resolve, free)
        try:
            await free
        finally:
            timer.cancel()
            if free in self._waiting:
                self._waiting.remove(free)
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._under_way:
            # In a later turn of the loop: the answers of this turn go out before.
            asyncio.get_running_loop().call_soon(self._free_first)

    def _free_first(self) -> None:
        if self._waiting and not self._under_way:
            _resolve(self._waiting[0])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# -- large frames in chunks ---------------------------------------------------------------------------

# Other tenants' work goes first before each step of `BITE_BYTES`. A chunk is small enough to share a
# commit with other tenants (`COMPANY_BYTES` of the commit queue), and no smaller, because each chunk
# costs them about the same.
HELPING_BYTES = 80 << 10
# The bytes prepared in one turn of the loop, and the cost of a draft beside its bytes.
BITE_BYTES, DRAFT_BYTES = 8 << 10, 128
# Chunks of a large frame grow so that there are at most about twice as many, and the frame ends soon.
FEW_HELPINGS = 8


def helpings_of(sizes: Sequence[int]) -> list[range]:
    """The numbers of the drafts that are stored together.

    >>> helpings_of([70_000, 5_000, 40_000, 100]), helpings_of([1 << 20] * 16)[:2]
    ([range(0, 2), range(2, 4)], [range(0, 2), range(2, 4)])
    """
    most = max(HELPING_BYTES, -(-sum(sizes) // FEW_HELPINGS))
    helpings, begin, size = [], 0, 0
    for number, each in enumerate(sizes):
        if number > begin and size + each > most:
            helpings.append(range(begin, number))
            begin, size = number, 0
        size += each
    return [*helpings, range(begin, len(sizes))]

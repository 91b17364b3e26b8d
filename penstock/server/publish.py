"""Courtesy: who can wait is served when nobody's publish is under way.

One loop serves everybody, and a batch or a greeting takes it a good part of a millisecond. A publisher
that would come meanwhile waits that long; one that has come already need not. Tenants ahead of their
rates, the pieces of large payloads, newcomers and those who leave let others go first.

Helping: a frame of a tenant ahead of its rate is stored in small helpings, each made ready in bites.

Others may go first before each bite, and a helping is small enough to go with a commit of theirs. It is
no smaller, because each costs them about the same. Of a large frame there are few, so that it does not
take for ever.

Line: what one client publishes to one topic is stored in the order it came.

Some publishes take long to prepare: large ones go to a thread, long ones make pauses, new topics are
made first, those of a tenant ahead of its rate let others go first. Whatever the same client sent behind one of them to the
same topic waits until it is on its way to the journal.

Recall: how many publishes of a session may be under way, and which are too old to vouch for.

Storing: publishes and transactions of a session, each exactly once however often it is sent.
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
from penstock.model.event import ADMIN, Identity, Receipt
from penstock.model.settings import Limits
from penstock.model.topic import tenant_of
from penstock.server.client_bytes import EXPANDED, Account
from penstock.server.fastpath import FastPath
from penstock.server.metrics.counters import Counters, duplicates_in
from penstock.server.validation import check_transaction_key, inbound, owner
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Bytes, Frame, Kind
from penstock.wire.message import DraftMeta, Fault, decode, encode, to_fault

if TYPE_CHECKING:
    from penstock.server.session import Session

# -- courtesy -------------------------------------------------------------------------------------


# How long a batch waits at most for a moment in which nobody else publishes. Where there is none,
# a tenant ahead of its rate gets some hundred turns a second.
PATIENCE_S = 0.005
# And for a commit of somebody else, if there was a publish so lately that there is another one soon.
COMPANY_S = 0.005
LATELY_S = 2 * COMPANY_S
# How often a thread looks, which cannot be told; a publish takes about this long.
LOOK_S = 0.001


class Courtesy:
    """Publishes of tenants within their rates, and whoever lets them go first.

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
        """A publish of a tenant within its rate came."""
        self._under_way += 1
        self._latest_s = time.monotonic()

    def company_s(self) -> float:
        """How long to wait for a commit of somebody within its rate, who pays for the sync anyway."""
        soon = self._under_way or time.monotonic() < self._latest_s + LATELY_S
        return COMPANY_S if soon else 0.0

    def end(self) -> None:
        """It is answered."""
        self._under_way -= 1
        self._call_next()

    def pause(self) -> None:
        """The same as `turn` for a thread."""
        until = time.monotonic() + PATIENCE_S
        while self._under_way and time.monotonic() < until:
            time.sleep(LOOK_S)

    async def turn(self) -> None:
        """Wait until nobody else's publish is under way, one after another, and not for ever."""
        # What others have sent already is read in the first turn of the loop, and begun in the second.
        for _ in range(2):
            await asyncio.sleep(0)
        if self._under_way or self._waiting:
            await self._called()
        os.sched_yield()  # who was answered last may share our processor

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
            # In a later turn of the loop: what was answered in this one goes out before.
            asyncio.get_running_loop().call_soon(self._free_first)

    def _free_first(self) -> None:
        if self._waiting and not self._under_way:
            _resolve(self._waiting[0])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# -- helping --------------------------------------------------------------------------------------


# With what others commit it is below what is written in one go (`COMPANY_BYTES` of the pending).
HELPING_BYTES = 80 << 10
# What is made ready in one turn of the loop, and what a draft takes beside its bytes.
BITE_BYTES, DRAFT_BYTES = 8 << 10, 128
# Helpings are so large that there are no more than about twice as many.
FEW_HELPINGS = 8


class Answers:
    """What became of the drafts of a frame, by number."""

    def __init__(self, count: int) -> None:
        self.receipts: list[Receipt | None] = [None] * count
        self.faults: dict[int, Fault] = {}


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


def size_of(meta: DraftMeta, parts: Sequence[Bytes]) -> int:
    """The bytes of a draft, in its part or in its lists; a part that is not there has none."""
    if meta.part < 0:
        return sum(map(len, meta.payloads))
    return len(parts[meta.part]) if meta.part < len(parts) else 0


# -- line -----------------------------------------------------------------------------------------


class TopicOrder:
    """The publishes of one client that are being prepared, by topic."""

    def __init__(self) -> None:
        self.last: dict[str, asyncio.Future[None]] = {}

    def join(self, topics: Collection[str]) -> Turn:
        """Stand behind everybody who is there; leave it by `with`."""
        return Turn(self, topics)


class Turn:
    """One publish in line."""

    def __init__(self, line: TopicOrder, topics: Collection[str]) -> None:
        self._line = line
        self._topics = topics
        self._before = {line.last[topic] for topic in topics if topic in line.last}
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            line.last[topic] = self._left

    async def turn(self) -> None:
        """Wait until all who were there have left."""
        if self._before:
            await asyncio.wait(self._before)

    def leave(self) -> None:
        """It is on its way, or will never be; whoever stands behind still waits for those before it."""
        for each in self._before:
            if not each.done():
                each.add_done_callback(lambda _: self.leave())
                return
        if self._left.done():
            return
        self._left.set_result(None)
        last = self._line.last
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


# -- recall ---------------------------------------------------------------------------------------


RETRY_S = 0.05  # about as long as a slow commit takes


class RequestWindow:
    """Publishes and transactions of one session that came and have no answer.

    No more than the journal remembers: each may come again after a crash, and must be recognised.

    >>> recall = RequestWindow()
    >>> recall.begin(7, None)
    >>> recall.end()
    """

    def __init__(self) -> None:
        self._open = 0

    def begin(self, sequence: int, known: SessionState | None) -> None:
        """One came, new or again; raises when it could happen twice, now or after a crash.

        To be called in the order in which they came: a new one is newer than all that are known.
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
        """One has its answer."""
        self._open -= 1


# -- storing --------------------------------------------------------------------------------------


# A client over its quota is read again after this long at most: every refusal costs the broker time
# that other tenants wait for, and refusals in one frame cost less than one by one.
MAX_REST_S = 0.05
# Batches of one frame that are looked at in one turn of the loop.
TURN_BATCHES = 4
# And drafts in its message.
TURN_DRAFTS = 256
# In one Publish: as many as it could have parts, and four times what ours sends.
MAX_DRAFTS = MAX_PARTS


class PublishHandler:
    """Takes the drafts of one session in."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        session: Session,
        tally: Counters,
        fastpath: FastPath,
        courtesy: Courtesy,
    ) -> None:
        self._courtesy = courtesy
        self._engine = engine
        self._fastpath = fastpath
        self._tally = tally
        self._session = session
        self._bundle = Bundle(engine)
        self._line = TopicOrder()
        self._recall = RequestWindow()

    async def publish(self, frame: Frame) -> Frame:
        """Store the drafts of a frame, or say where they went when it came before."""
        wish: say.Publish = decode(frame.meta, say.Publish)
        if len(wish.drafts) > MAX_DRAFTS:
            raise InvalidInput(
                f"{len(wish.drafts)} drafts in one Publish; {MAX_DRAFTS} are allowed, and nothing was "
                "stored. Send them in several"
            )
        self._begin(wish.sequence)
        try:
            return await self._publish_in_order(frame, wish)
        finally:
            self._recall.end()

    def _begin(self, sequence: int) -> None:
        """Before anything waits; who cannot come back does not repeat anything."""
        known = self._known() if self._session.hello.resumable else None
        try:
            self._recall.begin(sequence, known)
        except Rejected as error:
            self._refused(error)
            raise

    def _known(self) -> SessionState | None:
        return self._engine.state.sessions.get(self._session.id)

    async def _publish_in_order(self, frame: Frame, wish: say.Publish) -> Frame:
        """Everything stands in line: new topics, files and threads make some wait, nobody knows which."""
        with self._line.join({draft.topic for draft in wish.drafts}) as place:
            if self._ahead(wish):
                return await self._publish(frame, wish, place, patient=True)
            if self._fastpath.wants(frame.size_bytes):  # nobody waits for something large to end
                return await self._publish(frame, wish, place)
            await place.turn()
            self._courtesy.begin()
            try:
                return await self._publish(frame, wish, place)
            finally:
                self._courtesy.end()

    def _ahead(self, wish: say.Publish) -> bool:
        """Whether a frame is of a tenant ahead of its rate: as a rule all of it is of one tenant."""
        if not wish.drafts:
            return False
        tenant = tenant_of(wish.drafts[0].topic) or self._session.identity.tenant
        return self._engine.admission.ahead(tenant, self._engine.runtime.now())

    async def _let_others_go_first(self, wish: say.Publish) -> None:
        """Asked each time whether it still is ahead: to wait must not cost a tenant its rate."""
        if self._ahead(wish):
            await self._courtesy.turn()

    async def _publish(
        self,
        frame: Frame,
        wish: say.Publish,
        place: Turn,
        *,
        patient: bool = False,
    ) -> Frame:
        stored = self._before(wish.sequence)
        if wish.withheld and not stored:
            self._withheld(wish.withheld)
        found = Answers(len(wish.drafts))
        account = self._session.account
        expanded = await self._room(account, wish.drafts, frame.parts)
        try:
            return await self._publish_some(frame, wish, place, stored, found, patient)
        finally:
            account.add(EXPANDED, -expanded)

    @staticmethod
    async def _room(
        account: Account, drafts: Sequence[say.DraftMeta], parts: Sequence[Bytes]
    ) -> int:
        """Wait until the broker may hold what compressed batches expand to; returns how much it is."""
        size = sum(
            expanded_bytes(parts[meta.part]) for meta in drafts if 0 <= meta.part < len(parts)
        )
        if size:
            await account.room(EXPANDED, size)
        return size

    async def _publish_some(
        self,
        frame: Frame,
        wish: say.Publish,
        place: Turn,
        stored: dict[int, list[tuple[int, int, int]]],
        found: Answers,
        patient: bool,
    ) -> Frame:
        sizes = [size_of(meta, frame.parts) for meta in wish.drafts]
        helpings = helpings_of(sizes) if patient else [range(len(sizes))]
        for numbers in helpings:
            drafts = await self._take_in_some(numbers, frame, wish, sizes, stored, found, patient)
            if not drafts:
                continue
            await place.turn()
            leave = place.leave if numbers is helpings[-1] else _stay
            patience_s = self._courtesy.company_s() if patient and self._ahead(wish) else 0.0
            await self._store(drafts, wish.sequence, leave, found, patience_s)
        if patient:
            await self._let_others_go_first(wish)
        answer = say.Published(found.receipts, found.faults)
        return Frame(Kind.RESULT, frame.request, encode(answer))

    async def _take_in_some(
        self,
        numbers: range,
        frame: Frame,
        wish: say.Publish,
        sizes: Sequence[int],
        stored: dict[int, list[tuple[int, int, int]]],
        found: Answers,
        patient: bool,
    ) -> dict[int, Draft]:
        """Make drafts ready, by their numbers; what is refused or was stored before has its answer."""
        drafts: dict[int, Draft] = {}
        bite = BITE_BYTES
        for number in numbers:
            meta, size = wish.drafts[number], sizes[number]
            if number in stored:
                found.receipts[number] = await self._again(meta, stored[number])
                continue
            if patient and bite >= BITE_BYTES:
                await self._let_others_go_first(wish)
                bite = 0
            bite += DRAFT_BYTES + size
            await _pause(number, meta)
            try:
                if size and (meta.part >= 0 or self._fastpath.wants(size)):
                    self._check_rate(meta, frame.parts)
                drafts[number] = await self._take_in(meta, frame.parts, size)
            except PenstockError as error:
                found.faults[number] = to_fault(error)
                if isinstance(error, Rejected) or "limit" in error.data:
                    self._refused(error)
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
                self._refused(answer)

    def _take_in(self, meta: say.DraftMeta, parts: Sequence[Bytes], size: int) -> Awaitable[Draft]:
        """Make a draft ready for the engine, in a thread when it is large (row T13)."""
        limits, identity = self._engine.settings.limits, self._session.identity
        large = self._fastpath.wants(size)
        return self._fastpath.run(size, self._taken_in, meta, parts, identity, limits, large)

    def _taken_in(
        self,
        meta: say.DraftMeta,
        parts: Sequence[Bytes],
        identity: Identity,
        limits: Limits,
        large: bool,
    ) -> Draft:
        """Check a draft, and compress it if that pays and it will lie in the journal."""
        draft = inbound(meta, parts, identity, limits)
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
        """Refuse what a tenant may not publish now by its number of events, before any other work."""
        tenant, count = owner(meta, self._session.identity), len(meta.payloads)
        if meta.part >= 0:
            count = BatchHead.parse(memoryview(parts[meta.part])).count
        now = self._engine.runtime.now()
        decision = self._engine.admission.peek(tenant, meta.topic, count, now)
        if decision is not ADMITTED:
            raise decision.error()

    def _withheld(self, found: dict[str, int]) -> None:
        """Count what the client refused itself, each for the tenant that it would have counted for."""
        who = self._session.identity
        for key, times in islice(found.items(), len(RATES) * MOST_TENANTS):
            limit, _, tenant = key.partition(" ")
            if limit in RATES and times > 0:
                own = not tenant or ADMIN not in who.roles
                self._tally.refused("throttled", limit, who.tenant if own else tenant, times)

    def _refused(self, error: PenstockError) -> None:
        self._tally.rejected(error, self._session.identity.tenant)
        if isinstance(error, Throttled):
            self._session.rest(min(error.retry_after_s, MAX_REST_S))

    def _count(self, draft: Draft, receipt: Receipt, seconds: float) -> None:
        again = duplicates_in(receipt)
        if again:
            self._tally.duplicates(draft.tenant, draft.topic, again)
        size = draft_payload_bytes(draft)
        new = draft.count - again
        # Which of them were duplicates is not known here: an equal share of the bytes stands for each.
        self._tally.published(draft.tenant, draft.topic, new, size * new // draft.count, seconds)

    def _before(self, sequence: int) -> dict[int, list[tuple[int, int, int]]]:
        """Where the drafts of an earlier publish went: partition, offset and count, by draft."""
        known = self._known()
        places = known.produced.get(sequence) if known is not None else None
        found: dict[int, list[tuple[int, int, int]]] = {}
        for at in range(0, len(places or ()), 4):
            draft, partition, offset, count = places[at : at + 4]  # type: ignore[index]
            found.setdefault(draft, []).append((partition, offset, count))
        return found

    async def _again(self, meta: say.DraftMeta, places: Sequence[tuple[int, int, int]]) -> Receipt:
        scheduled = meta.deliver_at_us is not None
        topic = SCHEDULED if scheduled else meta.topic
        receipts = []
        for partition, offset, count in places:
            try:
                token = (await self._engine.event_at(topic, partition, offset)).token.bytes
            except OffsetExpired:  # stored, and gone since: by retention, or with its topic
                token = bytes(16)
            where = (0, -1) if scheduled else (partition, offset)
            receipts.append(
                Receipt(meta.topic, *where, count, token, duplicate=True, scheduled=scheduled)
            )
        whole = Draft(meta.topic, (), tenant="", codec=meta.codec)
        whole.count = sum(count for _, _, count in places)
        return combined(whole, receipts)

    async def transact(self, frame: Frame) -> Frame:
        """Publishes, acks and cursors together."""
        wish: say.Transact = decode(frame.meta, say.Transact)
        self._begin(wish.sequence)
        try:
            return await self._transact(frame, wish)
        except Rejected as error:
            self._refused(error)
            raise
        finally:
            self._recall.end()

    async def _transact(self, frame: Frame, wish: say.Transact) -> Frame:
        stored = self._before(wish.sequence)
        known = self._known()
        if known is not None and wish.sequence in known.produced:
            if not stored.keys() >= set(range(len(wish.drafts))):
                raise ProtocolViolation(
                    f"the transaction of sequence {wish.sequence} had {len(stored)} drafts, not "
                    f"{len(wish.drafts)}; nothing happened. Give each transaction a sequence of its own"
                )
            receipts = [
                await self._again(meta, stored[number]) for number, meta in enumerate(wish.drafts)
            ]
            return Frame(Kind.RESULT, frame.request, encode(say.Published(list(receipts))))
        account = self._session.account
        expanded = await self._room(account, wish.drafts, frame.parts)
        try:
            return await self._transact_new(frame, wish)
        finally:
            account.add(EXPANDED, -expanded)

    async def _transact_new(self, frame: Frame, wish: say.Transact) -> Frame:
        parts = frame.parts
        drafts = []
        for number, meta in enumerate(wish.drafts):
            await _pause(number, meta)
            drafts.append(await self._take_in(meta, parts, size_of(meta, parts)))
        identity = self._session.identity
        if wish.key is not None:
            check_transaction_key(wish.key)
            if await self._engine.transaction_keys.knows(identity.tenant, wish.key):
                return self._repeated(frame, drafts)  # whatever became of its leases
        transaction = Transaction(
            drafts=drafts,
            acks=[await self._leased(delivery, index) for delivery, index in wish.acks],
            cursors=[],
            key=wish.key,
            tenant=identity.tenant,
        )
        for cursor in wish.cursors:
            await self._session.feeds.opened(cursor.feed)
            outlet = self._session.feeds.log(cursor.feed)
            outlet.mark(cursor)
            transaction.cursors.append(outlet.reader)

        def note(taken: list[Receipt]) -> Entry:
            places: list[int] = []
            for number, receipt in enumerate(taken):
                for part in pieces_of(receipt):
                    places += (number, part.partition, part.offset, part.count)
            return Produced(self._session.id, wish.sequence, places)

        started = time.perf_counter()
        with tracing.receiving(drafts):
            done = await self._engine.publisher.transact(transaction, note)
        if done is None:
            return self._repeated(frame, drafts)
        for draft, receipt in zip(drafts, done, strict=True):
            self._count(draft, receipt, time.perf_counter() - started)
        self._session.feeds.drop_settled({delivery for delivery, _ in wish.acks})
        return Frame(Kind.RESULT, frame.request, encode(say.Published(list(done))))

    def _repeated(self, frame: Frame, drafts: Sequence[Draft]) -> Frame:
        for draft in drafts:
            self._tally.duplicates(draft.tenant, draft.topic, draft.count)
        return Frame(Kind.RESULT, frame.request, encode(say.Published([], key_known=True)))

    async def _leased(self, delivery: int, index: int) -> Settle:
        leased = self._session.feeds.leased(delivery)
        if leased is None:  # a client that is back may be about to take it up
            await self._session.feeds.opened()
            leased = self._session.feeds.leased(delivery)
        if leased is None or not 0 <= index < leased.count:
            raise LeaseExpired("an event of the transaction is leased no more; nothing happened")
        return Settle(leased, index)


async def _pause(number: int, meta: say.DraftMeta) -> None:
    """Others may have a word between the drafts of a frame."""
    turn = TURN_DRAFTS if meta.part < 0 else TURN_BATCHES
    if number % turn == turn - 1:
        await asyncio.sleep(0)


def _stay() -> None:
    """More of the frame follows."""

"""Storing: publishes and transactions of a session, each exactly once however often it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from penstock.bus import tracing
from penstock.core.admission import ADMITTED
from penstock.core.entry import Entry, Produced
from penstock.core.respite import MOST_TENANTS, RATES
from penstock.core.state import SessionState
from penstock.engines.bundle import Bundle, combined, pieces_of
from penstock.engines.embedded import EmbeddedEngine
from penstock.engines.engine import Draft, Settle, Transaction
from penstock.engines.layout import draft_payload_bytes
from penstock.engines.timekeeper import SCHEDULED
from penstock.model.batch_head import BatchHead, expanded_bytes
from penstock.model.errors import (
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
from penstock.server.courtesy import Courtesy
from penstock.server.fastpath import FastPath
from penstock.server.helping import BITE_BYTES, DRAFT_BYTES, Answers, helpings_of, size_of
from penstock.server.inbound import check_transaction_key, inbound, owner
from penstock.server.line import Line, Place
from penstock.server.metrics_counters import Counters, duplicates_in
from penstock.server.recall import Recall
from penstock.wire import message as say
from penstock.wire.fault import to_fault
from penstock.wire.frame import MAX_PARTS, Bytes, Frame, Kind
from penstock.wire.message import decode, encode

if TYPE_CHECKING:
    from penstock.server.session import Session

# A client over its quota is read again after this long at most: every refusal costs the broker time
# that other tenants wait for, and refusals in one frame cost less than one by one.
MAX_REST_S = 0.05
# Batches of one frame that are looked at in one turn of the loop.
TURN_BATCHES = 4
# And drafts in its message.
TURN_DRAFTS = 256
# In one Publish: as many as it could have parts, and four times what ours sends.
MAX_DRAFTS = MAX_PARTS


class Storing:
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
        self._line = Line()
        self._recall = Recall()

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
        place: Place,
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
        place: Place,
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
            if await self._engine.keyring.knows(identity.tenant, wish.key):
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
            done = await self._engine.intake.transact(transaction, note)
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

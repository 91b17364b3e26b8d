"""Bundle: several publishes that arrived together, stored as one, each with an answer of its own.

A broker gets what a client published within one turn of its loop as one frame. What is one tenant's
goes into the journal in one entry, together with the note that lets the broker recognise the same
frame when it is sent again; a draft that is refused takes no other one with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.core.entry import Entry
from penstock.engines.engine import Draft
from penstock.engines.layout import joined, merges
from penstock.engines.timekeeper import SCHEDULED, Timekeeper
from penstock.model.errors import PenstockError
from penstock.model.event import Receipt
from penstock.model.token import token_at

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine

Answer = Receipt | PenstockError


class Piece(NamedTuple):
    """The events of one draft that go to one partition."""

    draft: int
    events: Draft
    partition: int
    due_us: int | None = None


class Stretch(NamedTuple):
    """What a piece became: where its events lie."""

    draft: int
    receipt: Receipt
    due_us: int | None


class Bundle:
    """Stores drafts together."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def publish(
        self,
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        ready: Callable[[], None] = lambda: None,
        patience_s: float = 0.0,
    ) -> list[Answer]:
        """Store what can be stored; `note` makes the entry that says where it went, for each tenant.

        `ready` is called when it is on its way to the journal, before whatever is stored from then on.
        With patience it waits so long for a commit of somebody else.
        """
        answers: dict[int, Answer] = {}
        admitted: list[tuple[Draft, int]] = []
        tenants: dict[str, list[Piece]] = {}
        try:
            for number, draft in enumerate(drafts):
                try:
                    pieces = await self._prepare(number, draft, admitted)
                except PenstockError as error:
                    answers[number] = error
                else:
                    tenants.setdefault(draft.tenant, []).extend(pieces)
            if tenants:
                answers |= await self._store_each(
                    [*tenants.values()], drafts, note, ready, patience_s
                )
        finally:
            for draft, kept in admitted:
                self._engine.admission.ingress_done(draft.tenant, draft.count, kept)
        return [answers[number] for number in range(len(drafts))]

    async def _store_each(
        self,
        tenants: list[list[Piece]],
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        ready: Callable[[], None],
        patience_s: float,
    ) -> dict[int, Answer]:
        """Each tenant has a queue of its own: in another's its events would be overtaken."""

        async def stored(pieces: list[Piece]) -> dict[int, Answer]:
            if pieces is tenants[-1]:  # they begin one after another: all others are on their way
                ready()
            try:
                return dict(await self._store(pieces, drafts, note, patience_s))
            except PenstockError as error:
                return {piece.draft: error for piece in pieces}

        if len(tenants) == 1:
            return await stored(tenants[0])
        answers = await asyncio.gather(*map(stored, tenants))
        return {number: answer for each in answers for number, answer in each.items()}

    async def _prepare(
        self, number: int, draft: Draft, admitted: list[tuple[Draft, int]]
    ) -> list[Piece]:
        engine, intake = self._engine, self._engine.intake
        if not engine.topics.ready(draft.topic):
            await engine.topics.ensure(draft.topic)
        payload, kept, _ = await intake.prepare(draft)
        intake.admit(draft, payload, kept)
        admitted.append((draft, kept))
        if draft.deliver_at_us is not None:
            await engine.topics.ensure(SCHEDULED)
            stored, due_us = engine.timekeeper.hold_back(draft)
            return [Piece(number, stored, 0, due_us)]
        return [Piece(number, part, at) for part, at in intake.split(draft)]

    async def _store(
        self,
        pieces: list[Piece],
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        patience_s: float,
    ) -> dict[int, Receipt]:
        stacks = _stacked(pieces)
        stretches: list[Stretch] = []

        def when_taken(receipts: list[Receipt]) -> list[Entry]:
            for stack, receipt in zip(stacks, receipts, strict=True):
                stretches.extend(_stretches(stack, receipt))
            entries: list[Entry] = []
            places: list[int] = []
            for draft, receipt, due_us in stretches:
                if due_us is not None:
                    entries += self._engine.timekeeper.entries([receipt], due_us)
                for part in receipt.parts or (receipt,):
                    places += (draft, part.partition, part.offset, part.count)
            return [*entries, note(places)]

        await self._engine.intake.submit_parts(
            [(joined([piece.events for piece in stack]) if len(stack) > 1 else stack[0].events,
              stack[0].partition) for stack in stacks],
            when_taken,
            patience_s,
        )  # fmt: skip
        if any(piece.due_us is not None for piece in pieces):
            self._engine.timekeeper.wake()
        return _receipts(drafts, stretches)


def _stacked(pieces: list[Piece]) -> list[list[Piece]]:
    """Small pieces of the same partition share a batch, unless another one came in between."""
    stacks: list[list[Piece]] = []
    last: dict[tuple[str, int], tuple[tuple[str, str] | None, list[Piece]]] = {}
    for piece in pieces:
        events = piece.events
        place = (events.topic, piece.partition)
        kind = (events.tenant, events.codec) if piece.due_us is None and merges(events) else None
        if kind is not None and place in last and last[place][0] == kind:
            last[place][1].append(piece)
            continue
        stacks.append([piece])
        last[place] = (kind, stacks[-1])
    return stacks


def _stretches(stack: list[Piece], receipt: Receipt) -> list[Stretch]:
    if len(stack) == 1:
        piece = stack[0]
        if piece.due_us is not None:
            token = Timekeeper.first_token(piece.events, receipt.token)
            receipt = msgspec.structs.replace(receipt, token=token)
        return [Stretch(piece.draft, receipt, piece.due_us)]
    found, index = [], 0
    for piece in stack:
        count = piece.events.count
        token = token_at(receipt.token, index)
        own = Receipt(receipt.topic, receipt.partition, receipt.offset + index, count, token)
        found.append(Stretch(piece.draft, own, None))
        index += count
    return found


def _receipts(drafts: Sequence[Draft], stretches: Sequence[Stretch]) -> dict[int, Receipt]:
    found: dict[int, list[Receipt]] = {}
    for draft, receipt, due_us in stretches:
        if due_us is not None:
            topic, count = drafts[draft].topic, drafts[draft].count
            receipt = Receipt(topic, 0, -1, count, receipt.token, receipt.duplicate, scheduled=True)
        found.setdefault(draft, []).append(receipt)
    return {draft: combined(drafts[draft], receipts) for draft, receipts in found.items()}


def combined(draft: Draft, receipts: Sequence[Receipt]) -> Receipt:
    """One receipt for a draft whose events went to several partitions."""
    first = receipts[0]
    if len(receipts) == 1:
        return first
    return Receipt(
        draft.topic, first.partition, first.offset, draft.count, first.token,
        all(receipt.duplicate for receipt in receipts), parts=tuple(receipts),
    )  # fmt: skip


def pieces_of(receipt: Receipt) -> Iterator[Receipt]:
    """The receipts of stretches that lie one behind another, all the way down."""
    if not receipt.parts:
        yield receipt
    for part in receipt.parts:
        yield from pieces_of(part)

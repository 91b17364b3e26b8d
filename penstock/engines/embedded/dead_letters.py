"""Dead letters: stores the events that a group gave up, and does what operators ask about them.

A dead letter is a record in the state and a copy of the event in its tenant's topic of dead letters,
written in one submission. Operators inspect dead letters, replay them to the group they failed at,
purge them, or quarantine a message by hand. Each of these changes is in the audit chain, with its
actor and reason.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from penstock.core.audit import State
from penstock.core.delivery import QueueGroup
from penstock.core.entry import Acked, Audited, Dead, DeadPurged, DeadReplayed, Entry, as_recovered
from penstock.core.lease import Doomed, Lane
from penstock.core.state import DeadLetter
from penstock.engines.embedded.runtime import BackgroundTasks
from penstock.engines.requests import (
    DeadLetterDetail,
    ListDead,
    Outcome,
    check_consumer,
    check_content,
    check_id,
    confirmed,
    known_partition,
    signed,
)
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.errors import (
    AlreadyExists,
    AlreadyReplayed,
    OffsetExpired,
    PenstockError,
    Rejected,
    TargetMismatch,
    UnknownDeadLetter,
    UnknownGroup,
    UnknownMessage,
    UnknownTopic,
)
from penstock.model.event import CORRELATION, REJECTED, REPLY_TO, Event, MessageId, Receipt
from penstock.model.topic import check_topic, is_inbox

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger("penstock.engines")

# Failed events stored in one journal entry: their payloads are in memory at the same time.
STORE_CHUNK = 256
FORGET_CHUNK = 1_024  # records that are forgotten in one journal entry
QUARANTINE = -1  # offset of a dead letter that was never an event of the log
DEAD_LETTERS = "_dlq."
"""Topics of dead letters begin with this; the tenant follows."""


def dead_letter_topic(tenant: str) -> str:
    """The topic of a tenant's dead letters.

    >>> dead_letter_topic("acme")
    '_dlq.acme'
    """
    return f"{DEAD_LETTERS}{tenant}"


class RequestVerdict(msgspec.Struct):
    """The answer to a requester whose request became a dead letter."""

    consumer: str
    attempts: int
    reason: str


def newest_letters(letters: Iterable[DeadLetter], wanted: ListDead) -> list[DeadLetter]:
    """The dead letters a request asks for, newest first."""
    found = [
        letter
        for letter in letters
        if (wanted.consumer is None or letter.consumer == wanted.consumer)
        and (wanted.topic is None or letter.topic == wanted.topic)
        and (wanted.tenant is None or letter.tenant == wanted.tenant)
        and (wanted.everything or letter.status == "dead")
    ]
    found.sort(key=lambda letter: letter.dead_lettered_at_us, reverse=True)
    return found[wanted.offset : wanted.offset + wanted.limit]


async def detail_of(
    letter: DeadLetter, event_at: Callable[[str, int, int], Awaitable[Event]]
) -> DeadLetterDetail:
    """A dead letter with its payload, read from the tenant's dead-letter topic."""
    event = await event_at(dead_letter_topic(letter.tenant), 0, letter.stored)
    headers = {
        name: text for name, text in event.headers.items() if not name.startswith("penstock-")
    }
    token = event.headers.get("penstock-token", str(event.token))
    return DeadLetterDetail(letter, event.payload, event.key, headers, event.codec, token)


def _place_of(found: Event | DeadLetter) -> tuple[str, int, int]:
    return found.topic, found.partition, found.offset


class DeadLetterStore:
    """Stores failed events as dead letters, and answers operators' requests about them."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.buried: Callable[[str, str], None] = lambda tenant, topic: None
        """Called with tenant and topic of every event that became a dead letter."""
        self.revived: Callable[[str, str], None] = lambda tenant, topic: None
        """Called with tenant and topic of every dead letter that was replayed."""
        self._engine = engine
        self._storing = BackgroundTasks()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By id: held while an operator's action on a record is under way."""
        self._given: dict[str, tuple[str, int, int]] = {}
        """Ids of dead letters that are being stored, and the place of each event."""

    # -- storing -------------------------------------------------------------------------------

    def store_failed(self, group: QueueGroup) -> None:
        """Take the events that a group gave up and store them among the dead letters."""
        failed, group.doomed = group.doomed, []
        for start in range(0, len(failed), STORE_CHUNK):
            chunk = failed[start : start + STORE_CHUNK]
            self._storing.add(self._engine.spawn(self._store(group, chunk)))

    async def settled(self) -> None:
        """Wait until the events given up so far are stored; raises DiskRefused when the disk is full."""
        await self._storing.settled()

    async def _store(self, group: QueueGroup, failed: Sequence[Doomed]) -> None:
        found: list[tuple[Doomed, Event]] = []
        gone: list[Doomed] = []
        for each in failed:
            lane = each.lane
            try:
                event = await self._engine.event_at(lane.topic, lane.partition, each.offset)
            except OffsetExpired:
                gone.append(each)
                continue
            # Crashes may have used up the attempts of an event that the group does not want at all.
            if group.spec.wants(event.headers):
                found.append((each, event))
            else:
                gone.append(each)
        drafts = [
            self._draft(group.name, event, each.attempts, each.reason) for each, event in found
        ]
        at_us = self._engine.runtime.wall_us()
        ids: list[str] = []

        def entries(receipts: list[Receipt]) -> list[Entry]:
            written: list[Entry] = []
            for (each, event), receipt in zip(found, receipts, strict=True):
                ids.append(id := self._id_for(group.name, event))
                self._given[id] = _place_of(event)
                written.append(
                    self._entry(id, group.name, event, each.attempts, each.reason, at_us, receipt)
                )
                group.buried(each.lane, each.offset)
            for each in gone:
                runs = [each.offset, 1]
                written.append(Acked(group.name, each.lane.topic, each.lane.partition, runs))
                group.buried(each.lane, each.offset)
            return written

        while True:
            try:
                await self._engine.publisher.submit(drafts, when_taken=entries)
                self._storing.full = None
                break
            except Rejected as error:  # the disk is full: they are stored when there is room
                await self._storing.waits(error)
        for id in ids:
            self._given.pop(id, None)
        for _, event in found:
            self.buried(event.tenant, event.topic)
        self._engine.dispatcher.touched(group)
        await self._tell_requesters(group.name, found)

    async def _tell_requesters(self, consumer: str, dead: Sequence[tuple[Doomed, Event]]) -> None:
        """Tell the requesters that still wait for replies to these events why none will come."""
        drafts: list[Draft] = []
        for each, event in dead:
            inbox, correlation = event.headers.get(REPLY_TO, ""), event.headers.get(CORRELATION, "")
            expires_us = event.expires_us
            late = expires_us is not None and expires_us <= self._engine.runtime.wall_us()
            if late or not is_inbox(inbox) or inbox not in self._engine.state.topics:
                continue
            verdict = RequestVerdict(consumer, each.attempts, each.reason)
            draft = Draft(inbox, [msgspec.json.encode(verdict)], tenant=event.tenant, codec="json")
            draft.headers = [{REJECTED: correlation}]
            drafts.append(draft)
        try:
            await self._engine.publisher.submit(drafts)
        except Rejected as error:  # the disk is full: their requests time out
            log.warning("%d requesters were not told of dead letters: %s", len(drafts), error)

    def _draft(self, consumer: str, event: Event, attempts: int, reason: str) -> Draft:
        draft = Draft(
            dead_letter_topic(event.tenant), [event.payload], tenant=event.tenant, codec=event.codec
        )
        draft.keys = [event.key]
        # A copy is no request: the return value of a handler of dead letters is no reply.
        own = {k: v for k, v in event.headers.items() if k not in (REPLY_TO, CORRELATION)}
        draft.headers = [
            {
                **own,
                "penstock-consumer": consumer,
                "penstock-topic": event.topic,
                "penstock-partition": str(event.partition),
                "penstock-offset": str(event.offset),
                "penstock-attempts": str(attempts),
                "penstock-reason": reason,
                "penstock-token": str(event.token),
            }
        ]
        draft.times_us = [event.time_us]
        return draft

    def _id_for(self, consumer: str, event: Event) -> str:
        """The id of an event's dead letter; a number tells events apart that have the same token."""
        place = _place_of(event)
        for number in count(1):
            id = f"{event.token}{f'.{number}' if number > 1 else ''}@{consumer}"
            letter = self._engine.state.dead.get(id)
            there = self._given.get(id) if letter is None else _place_of(letter)
            if there in (None, place):
                return id
        raise AssertionError("unreachable")

    @staticmethod
    def _entry(
        id: str,
        consumer: str,
        event: Event,
        attempts: int,
        reason: str,
        at_us: int,
        receipt: Receipt,
    ) -> Dead:
        return Dead(
            id, consumer, event.topic, event.partition, event.offset,
            event.tenant, attempts, reason, at_us, receipt.offset,
        )  # fmt: skip

    # -- retention -----------------------------------------------------------------------------

    async def forget_expired(self, tenants: Iterable[str]) -> None:
        """Drop records whose copies retention deleted: a record is kept as long as its copy."""
        log = self._engine.log
        firsts = {name: log.bounds(dead_letter_topic(name), 0)[0] for name in tenants}
        gone = [
            letter.id
            for letter in self._engine.state.dead.values()
            if letter.stored < firsts.get(letter.tenant, 0)
        ]
        for start in range(0, len(gone), FORGET_CHUNK):
            chunk = gone[start : start + FORGET_CHUNK]
            await self._engine.publisher.write_entries([DeadPurged(id) for id in chunk])

    # -- operators -----------------------------------------------------------------------------

    def find(self, id: str) -> DeadLetter:
        """One dead letter."""
        letter = self._engine.state.dead.get(id)
        if letter is None:
            raise UnknownDeadLetter(
                f"no dead letter {id!r}; `penstock dlq list` shows their ids", id=id
            )
        return letter

    async def inspect(self, id: str) -> DeadLetterDetail:
        """One dead letter with its payload."""
        return await detail_of(self.find(id), self._engine.event_at)

    async def replay(
        self,
        ids: Sequence[str],
        target_consumer: str,
        target_topic: str,
        actor: str,
        reason: str,
        confirm: str,
        dry_run: bool = False,
    ) -> Outcome:
        """Give dead letters back to the group they failed at, each with all its attempts."""
        if not dry_run:
            reason = confirmed("REPLAY", confirm, actor, reason)
        outcome = Outcome(len(ids))
        for id in ids:
            try:
                async with self._lock(id):
                    letter, group, lane = await self._target(id, target_consumer, target_topic)
                    if not dry_run:
                        await self._replay(letter, group, lane, actor, reason)
                outcome.done += 1
            except PenstockError as error:
                outcome.failed(id, error)
        return outcome

    def _lock(self, id: str) -> asyncio.Lock:
        """Lets one operator at a time act on a record: the next one sees what the first did."""
        return self._locks.setdefault(id, asyncio.Lock())

    async def _target(
        self, id: str, consumer: str, topic: str
    ) -> tuple[DeadLetter, QueueGroup, Lane]:
        """The dead letter and where it goes back to, or why it cannot."""
        letter = self.find(id)
        if letter.consumer != consumer or letter.topic != topic:
            raise TargetMismatch(
                f"{id} belongs to consumer {letter.consumer!r} and topic {letter.topic!r}, not to "
                f"{consumer!r} and {topic!r}. Restate the original target exactly",
                id=id,
                consumer=letter.consumer,
                topic=letter.topic,
            )
        group = self._engine.dispatcher.groups.get(letter.consumer)
        lane = group.lanes.get((letter.topic, letter.partition)) if group is not None else None
        if letter.status != "dead":
            raise AlreadyReplayed(
                f"{id} is already back with {consumer!r}; nothing was changed", id=id
            )
        if group is None or lane is None or letter.offset == QUARANTINE:
            raise UnknownGroup(
                f"{id} has no group to go back to: {letter.consumer!r} does not read "
                f"{letter.topic!r}. Publish its payload again instead",
                id=id,
                consumer=letter.consumer,
            )
        await self._engine.event_at(letter.topic, letter.partition, letter.offset)
        return letter, group, lane

    async def _replay(
        self, letter: DeadLetter, group: QueueGroup, lane: Lane, actor: str, reason: str
    ) -> None:
        audit = self._audit(actor, "dlq.replay", letter, reason, "replayed")

        def entries(_: list[Receipt]) -> list[Entry]:
            group.revive(lane, letter.offset, self._engine.runtime.now())
            # Its return to the group is in the same entry: a crash between two entries would lose it.
            return [*group.drain(), DeadReplayed(letter.id), audit]

        await self._engine.publisher.submit([], when_taken=entries, brings_news=True)
        self.revived(letter.tenant, letter.topic)
        self._engine.dispatcher.touched(group)

    async def purge(
        self, ids: Sequence[str], actor: str, reason: str, confirm: str, dry_run: bool = False
    ) -> Outcome:
        """Remove the records of dead letters; the log keeps the events."""
        if not dry_run:
            reason = confirmed("PURGE", confirm, actor, reason)
        outcome = Outcome(len(ids))
        for id in ids:
            try:
                async with self._lock(id):
                    letter = self.find(id)
                    audit = self._audit(actor, "dlq.purge", letter, reason, "purged")
                    if not dry_run:
                        await self._engine.publisher.submit([], entries=[DeadPurged(id), audit])
                outcome.done += 1
            except PenstockError as error:
                outcome.failed(id, error)
        return outcome

    async def quarantine(
        self, id: str, consumer: str, topic: str, payload: bytes | None, actor: str, reason: str
    ) -> DeadLetter:
        """Make a dead letter by hand, of an event of the log or of the payload given."""
        reason = signed(actor, reason)
        check_topic(topic)
        check_id(id)
        check_content(payload or b"", {}, self._engine.settings.limits)
        if consumer not in self._engine.state.groups:
            check_consumer(consumer)
        event = await self._event_of(id, topic, payload)
        offset = event.offset if payload is None else QUARANTINE
        name = self._id_for(consumer, event) if payload is None else f"{id}@{consumer}"
        async with self._lock(name):
            self._check_free(name)
            await self._quarantine(name, consumer, event, offset, actor, reason)
        return self.find(name)

    def _check_free(self, id: str) -> None:
        """Raise AlreadyExists when the id has a record: it is evidence, and goes only by a purge."""
        letter = self._engine.state.dead.get(id)
        if letter is not None:
            state = "dead already" if letter.status == "dead" else "there already, and was replayed"
            raise AlreadyExists(
                f"{id} is {state}; it was kept as it was. `penstock dlq inspect` shows it; purge it "
                "first to make another one",
                id=id,
                status=letter.status,
            )

    async def _quarantine(
        self, id: str, consumer: str, event: Event, offset: int, actor: str, reason: str
    ) -> None:
        at_us, topic = self._engine.runtime.wall_us(), event.topic
        group = self._engine.dispatcher.groups.get(consumer) if offset != QUARANTINE else None
        lane = group.lanes.get((topic, event.partition)) if group is not None else None

        wanted = as_recovered(
            Dead(id, consumer, topic, event.partition, offset, event.tenant, 0, reason, at_us, 0)
        )
        result: State = {"status": "dead", "consumer": consumer, "topic": topic}
        signed_by = as_recovered(
            Audited(at_us, actor, "dlq.dead-letter", [id], reason, {"status": None}, result)
        )

        def entries(receipts: list[Receipt]) -> list[Entry]:
            status = None  # it was never an event of that group
            if group is not None and lane is not None:
                ahead = offset >= lane.cursor
                unsettled = ahead or any(run.holds(lane, offset) for run in group.unsettled())
                status = "unsettled" if unsettled else "settled"
                group.withdraw(lane, offset)
            replace = msgspec.structs.replace
            return [
                *([] if group is None else group.drain()),
                replace(wanted, stored=receipts[0].offset),
                replace(signed_by, prior={"status": status}),
            ]

        draft = self._draft(consumer, event, 0, reason)
        await self._engine.publisher.submit([draft], when_taken=entries, brings_news=True)
        self.buried(event.tenant, topic)
        if group is not None:
            self._engine.dispatcher.touched(group)  # later events of its key may be delivered now

    async def _event_of(self, id: str, topic: str, payload: bytes | None) -> Event:
        if payload is not None:
            batch = EventBatch.build(topic, [payload], tenant=self._engine.topics.tenant_for(topic))
            batch.token_base = uuid.uuid5(uuid.NAMESPACE_OID, id).bytes
            return batch.event(0)
        place = MessageId.parse(id)
        if place.topic != topic:
            raise TargetMismatch(
                f"message {id} is not of topic {topic!r}", id=id, topic=place.topic
            )
        try:
            known_partition(self._engine.state, place.topic, place.partition)
            return await self._engine.event_at(*place)
        except (OffsetExpired, UnknownTopic) as error:
            raise UnknownMessage(f"no event {id}: {error.message}", id=id) from None

    def _audit(
        self, actor: str, operation: str, letter: DeadLetter, reason: str, status: str
    ) -> Audited:
        prior: State = {
            "status": letter.status, "replay_count": letter.replay_count,
            "consumer": letter.consumer, "topic": letter.topic,
        }  # fmt: skip
        at_us = self._engine.runtime.wall_us()
        return as_recovered(
            Audited(at_us, actor, operation, [letter.id], reason, prior, {"status": status})
        )

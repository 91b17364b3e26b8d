"""Publishing into an embedded engine: drafts come in, receipts go out once the events are durable.

`Publisher` raises every objection before anything is stored: the topic is made on first use, sizes
are checked, huge payloads are written to side files, admission decides, each event gets a partition.
Then drafts and entries are submitted to the commit loop as one. A transaction goes the same way, with
its acks and cursors in the same journal entry.

`TopicMaker` makes topics and drops deleted ones; the offsets of a deleted topic are never reused.

`TransactionKeys` lets each transaction with an idempotency key happen at most once. Such a transaction
publishes one more event, a marker, to a system topic of its tenant. The marker's token is the key, so
the table that notices repeated publishes notices repeated transactions too, and remembers them in the
same journal entry that makes the transaction happen.

`Bundle` stores the drafts that a broker received in one frame: those of one tenant in one journal
entry, together with the note that lets the broker recognise the same frame when it is sent again. Each
draft has its own answer; a refused draft affects no other draft.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.core.admission import ADMITTED, Incoming, Waiting
from penstock.core.entry import Entry, TopicPut, TopicSpec, as_recovered
from penstock.core.partition import partition_of, partitions_of
from penstock.engines.embedded.batching import (
    MERGE_EVENTS,
    Submission,
    draft_bytes,
    draft_sizes,
    joined,
    merges,
)
from penstock.engines.embedded.runtime import FairGate
from penstock.engines.embedded.schedules import SCHEDULED, Scheduler
from penstock.engines.engine import Transaction
from penstock.engines.requests import known_partition
from penstock.log.disk import refused
from penstock.log.side_files import put_aside
from penstock.model.draft import Draft
from penstock.model.errors import (
    BusClosed,
    DiskRefused,
    InvalidInput,
    PayloadTooLarge,
    PenstockError,
    RetentionFull,
    UnknownTopic,
)
from penstock.model.event import Receipt
from penstock.model.token import token_at
from penstock.model.topic import is_inbox, is_system, tenant_of

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

RETENTION_RETRY_S = 60.0
"""When to try again with a write-once topic at its limit: only age frees what it keeps."""


class Publisher:
    """Takes drafts and entries in, and answers when they are durable."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.aside_bytes = 0
        """Bytes of payloads that were written to side files."""
        self._engine = engine
        self._last_partition: dict[str, int] = {}
        """By topic: the partition that events without a key went to last; they take turns."""
        self._side_file_gates: dict[str, FairGate] = {}
        """By topic: publishes that wait in order while a payload is written to a side file."""

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; durable when it returns."""
        if not self._engine.topics.ready(draft.topic):
            await self._engine.topics.ensure(draft.topic)
        payload, kept, size = await self._prepare_in_order(draft)
        self.admit(draft, payload, kept)
        try:
            if draft.deliver_at_us is not None:
                return await self._delay(draft)
            parts = self.split(draft)
            receipts: list[Receipt] = await self._submit(
                [part for part, _ in parts], [at for _, at in parts], size, draft.tenant
            )
        finally:
            self._engine.admission.ingress_done(draft.tenant, draft.count, kept)
        return combined(draft, receipts)

    async def _prepare_in_order(self, draft: Draft) -> tuple[int, int, int]:
        """Prepare a draft; publishes to its topic that arrive during a side file's write wait for it."""
        fair_gate = self._side_file_gates.get(draft.topic)
        if fair_gate is None and not self._needs_side_file(draft):
            return await self.prepare(draft)
        fair_gate = self._side_file_gates.setdefault(draft.topic, FairGate())
        try:
            async with fair_gate:
                return await self.prepare(draft)
        finally:
            if not fair_gate:
                del self._side_file_gates[draft.topic]

    def _needs_side_file(self, draft: Draft) -> bool:
        if draft.count != 1 or draft.tokens is not None or draft.deliver_at_us is not None:
            return False
        batch = draft.batch
        size = len(draft.payloads[0]) if batch is None else batch.payload_column.largest()
        return size >= self._engine.settings.journal.side_file_bytes

    async def prepare(self, draft: Draft) -> tuple[int, int, int]:
        """Check sizes, build batches of large drafts, write side files; returns `draft_sizes`."""
        if not self._engine.is_open:
            raise BusClosed("the bus is closed; nothing was stored. Connect again")
        limit = self._engine.settings.limits.max_payload_bytes
        if draft.count >= MERGE_EVENTS and draft.batch is None and draft.deliver_at_us is None:
            draft.batch = draft.build()
        if draft.batch is not None:
            largest = draft.batch.payload_column.largest()
        else:
            largest = len(draft.payloads[0]) if draft.count == 1 else max(map(len, draft.payloads))
        if largest > limit:
            raise PayloadTooLarge(
                f"a payload of {largest} bytes is over the limit of {limit}; nothing was stored. "
                "Store it elsewhere and publish a reference, or raise limits.max_payload_bytes",
                size_bytes=largest,
                limit_bytes=limit,
                limit="max_payload_bytes",
                setting="limits.max_payload_bytes",
                value=limit,
            )
        if self._needs_side_file(draft):
            await self._put_aside(draft)
        elif draft.batch is not None and not draft.final:
            self._engine.layout.compress(draft.batch)
        return draft_sizes(draft)

    async def _put_aside(self, draft: Draft) -> None:
        batch = self._engine.layout.build_for_side_file(draft)
        try:
            size = await self._engine.runtime.read(
                put_aside, self._engine.disk, batch, self._engine.pause_aside
            )
        except OSError as error:
            size = batch.payload_column.largest()
            raise refused(error, f"a payload of {size} bytes") from None
        self.aside_bytes += size
        draft.batch = batch

    def admit(self, draft: Draft, payload: int, kept: int) -> None:
        """Count a draft as coming in, or raise why not, by its payload bytes and its event bytes."""
        self._check_room(draft)
        decision = self._engine.admission.admit(
            draft.tenant, draft.topic, draft.count, payload, self._engine.runtime.now(),
            self._waiting(draft), kept,
        )  # fmt: skip
        if decision is not ADMITTED:
            raise decision.error()

    def _admit_together(
        self, drafts: Sequence[Draft], sizes: Sequence[tuple[int, int, int]]
    ) -> None:
        """Count the drafts of a transaction as coming in, or raise why none of them is."""
        for draft in drafts:
            self._check_room(draft)
        decision = self._engine.admission.admit_together(
            [
                Incoming(
                    draft.tenant, draft.topic, draft.count, payload, self._waiting(draft), kept
                )
                for draft, (payload, kept, _) in zip(drafts, sizes, strict=True)
            ],
            self._engine.runtime.now(),
        )
        if decision is not ADMITTED:
            raise decision.error()

    def _waiting(self, draft: Draft) -> Waiting | None:
        if (
            draft.deliver_at_us is not None
        ):  # it reaches the topic later and waits for no consumer now
            return None
        direct = self._engine.dispatcher.direct_readers(draft.topic)
        return self._engine.groups.waiting(direct, draft.topic, draft.tenant) if direct else None

    def _check_room(self, draft: Draft) -> None:
        if draft.deliver_at_us is not None:
            if draft.partition is not None:  # later the publisher is gone and cannot be told
                known_partition(self._engine.state, draft.topic, draft.partition)
            self._engine.state.schedule.delayed.check_room(draft.count)
        maintenance = self._engine.maintenance
        if draft.topic in maintenance.full_topics or maintenance.shortage_bytes:
            self._check_retention(draft)

    def _check_retention(self, draft: Draft) -> None:
        """Raise RetentionFull for a write-once topic that may neither grow nor lose events."""
        topic, settings = draft.topic, self._engine.settings
        maintenance = self._engine.maintenance
        retention = maintenance.retention_of(topic)
        if not retention.write_once:
            return
        limit, value = "max_bytes", settings.retention.max_bytes
        setting = "retention.max_bytes"
        if topic in maintenance.full_topics:
            limit, value = "topic_max_bytes", retention.topic_max_bytes
            own = self._engine.state.topics[topic].retention_bytes
            setting = "retention.topic_max_bytes" if own is None else "retention_bytes of the topic"
        raise RetentionFull(
            f"{topic!r} is write-once, and a size limit is reached: {setting} = {value} bytes. Nothing "
            "was stored; other topics go on. Raise the limit (`penstock topic configure "
            "--retention-bytes` for one topic), or wait for events to pass their retention age",
            limit=limit, setting=setting, value=value, topic=topic, tenant=draft.tenant,
            retry_after_s=RETENTION_RETRY_S,
        )  # fmt: skip

    def split(self, draft: Draft) -> list[tuple[Draft, int]]:
        """One draft for each partition its keys fall into."""
        if draft.partition is not None:
            known_partition(self._engine.state, draft.topic, draft.partition)
            return [(draft, draft.partition)]
        count = self._engine.state.topics[draft.topic].partitions
        if count == 1:
            return [(draft, 0)]
        fallback = self._last_partition[draft.topic] = (
            self._last_partition.get(draft.topic, -1) + 1
        ) % count
        keys = draft.keys if draft.batch is None else draft.batch.keys()
        if keys is None or (draft.batch is not None and draft.batch.key_column is None):
            return [(draft, fallback)]
        if draft.count == 1:
            return [(draft, fallback if keys[0] is None else partition_of(keys[0], count))]
        return _by_partition(draft, partitions_of(keys, count, fallback).tolist())

    async def _delay(self, draft: Draft) -> Receipt:
        await self._engine.topics.ensure(SCHEDULED)
        stored, due_us = self._engine.scheduler.as_delayed(draft)
        receipts: list[Receipt] = await self.submit(
            [stored], when_taken=lambda receipts: self._engine.scheduler.entries(receipts, due_us)
        )
        self._engine.scheduler.wake()
        first = receipts[0]
        token = self._engine.scheduler.first_token(stored, first.token)
        return Receipt(draft.topic, 0, -1, draft.count, token, first.duplicate, scheduled=True)

    async def submit(
        self,
        drafts: Sequence[Draft],
        *,
        entries: Sequence[Entry] = (),
        when_taken: Callable[[list[Receipt]], list[Entry]] | None = None,
        check: Callable[[], None] | None = None,
        brings_news: bool = False,
        for_publish: bool = False,
    ) -> list[Receipt]:
        """Write drafts and entries as one: all of it is durable when it returns, or none of it is.

        Returns one receipt for each draft, however many partitions its events go to. `when_taken`
        makes more entries from the receipts when a commit takes the submission; `check` may still
        raise then, and nothing is written. `brings_news` says that `when_taken` drains a group,
        `for_publish` that a publish needs these entries.
        """
        if not drafts and not entries and when_taken is None:
            return []
        parts: list[tuple[Draft, int]] = []
        shares: list[int] = []
        for draft in drafts:
            await self._engine.topics.ensure(draft.topic)
            pieces = self.split(draft)
            shares.append(len(pieces))
            parts += pieces

        def with_places(taken: list[Receipt]) -> list[Entry]:
            assert when_taken is not None
            return when_taken(_by_draft(drafts, shares, taken))

        size = sum(draft_bytes(draft) for draft, _ in parts) + 1_024 * (1 + len(entries))
        receipts = await self._submit(
            [part for part, _ in parts],
            [at for _, at in parts],
            size,
            drafts[0].tenant if drafts else "",
            entries=list(entries),
            when_taken=with_places if when_taken is not None else None,
            check=check,
            brings_news=brings_news,
            for_publish=for_publish,
        )
        return _by_draft(drafts, shares, receipts)

    async def submit_parts(
        self,
        parts: Sequence[tuple[Draft, int]],
        when_taken: Callable[[list[Receipt]], list[Entry]],
        patience_s: float = 0.0,
    ) -> list[Receipt]:
        """Write drafts that are prepared and have their partitions, with entries about them.

        They wait up to `patience_s` to join a commit that other submissions cause.
        """
        size = sum(draft_bytes(draft) for draft, _ in parts) + 1_024
        drafts = [draft for draft, _ in parts]
        partitions = [partition for _, partition in parts]
        return await self._submit(
            drafts, partitions, size, drafts[0].tenant,
            when_taken=when_taken, patience_s=patience_s,
        )  # fmt: skip

    async def _submit(
        self,
        drafts: list[Draft],
        partitions: list[int],
        size: int,
        tenant: str,
        *,
        entries: list[Entry] | None = None,
        when_taken: Callable[[list[Receipt]], list[Entry]] | None = None,
        check: Callable[[], None] | None = None,
        brings_news: bool = False,
        for_publish: bool = False,
        patience_s: float = 0.0,
    ) -> list[Receipt]:
        backlog = self._engine.sealing_backlog
        if drafts and (backlog.backlog_bytes > backlog.free_bytes or backlog.waiting):
            await backlog.wait(size)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submission = Submission(tenant, drafts, partitions, size, future)
        if entries:
            submission.entries = [as_recovered(entry) for entry in entries]
        submission.when_taken = when_taken
        submission.check = check
        submission.brings_news = brings_news
        submission.for_publish |= for_publish
        submission.patience_s = patience_s
        receipts: list[Receipt] = await self._engine.commits.submit(submission)
        return receipts

    async def write_entries(self, entries: list[Entry]) -> None:
        """Make entries durable."""
        await self.submit([], entries=entries)

    async def transact(
        self, transaction: Transaction, note: Callable[[list[Receipt]], Entry] | None = None
    ) -> list[Receipt] | None:
        """Publishes, acks and cursors in one journal entry, with a note about where they went.

        Returns None when a transaction with its key has happened: nothing of this one happens then.
        """
        keys, tenant, key = self._engine.transaction_keys, transaction.tenant, transaction.key
        if key is not None and await keys.knows(tenant, key):
            return None
        # Cursors are read now: a partition may be taken away while this waits.
        cursors: list[tuple[Any, list[Entry]]] = [
            (feed, feed.pending_commit())  # type: ignore[attr-defined]
            for feed in transaction.cursors
        ]
        sizes: list[tuple[int, int, int]] = []
        for draft in transaction.drafts:
            await self._engine.topics.ensure(draft.topic)
            sizes.append(await self.prepare(draft))

        def check() -> None:
            if key is not None:
                keys.check(tenant, key)
            now = self._engine.runtime.now()
            for each in transaction.acks:
                leased = each.delivery
                leased.group.check(leased.lease, each.index + leased.shift, now)
            for feed, places in cursors:
                feed.check_commit(places)

        def entries(receipts: list[Receipt]) -> list[Entry]:
            now = self._engine.runtime.now()
            written: list[Entry] = [] if note is None else [note(receipts[:count])]
            for each in transaction.acks:
                leased = each.delivery
                written.append(leased.group.ack_now(leased.lease, each.index + leased.shift, now))
                self._engine.dispatcher.touched(leased.group)
            for feed, places in cursors:
                feed.committed(places)
                written += places
            return written

        acked = {(id(a.delivery.lease), a.index + a.delivery.shift) for a in transaction.acks}
        if len(acked) < len(transaction.acks):
            raise InvalidInput("an event is acked twice in one transaction; nothing happened")
        drafts, count = transaction.drafts, len(transaction.drafts)
        if key is not None:
            drafts = [*drafts, keys.marker(tenant, key)]
        try:
            check()
            self._admit_together(transaction.drafts, sizes)
            try:
                return (await self.submit(drafts, when_taken=entries, check=check))[:count]
            finally:
                for draft, (_, kept, _) in zip(transaction.drafts, sizes, strict=True):
                    self._engine.admission.ingress_done(draft.tenant, draft.count, kept)
        except KeySeen:  # another transaction with this key was faster
            assert key is not None
            await keys.knows(tenant, key)  # waits until that one is durable
            return None


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
    """The receipts of ranges without gaps that a receipt is made of, at any depth."""
    if not receipt.parts:
        yield receipt
    for part in receipt.parts:
        yield from pieces_of(part)


def _by_draft(
    drafts: Sequence[Draft], shares: Sequence[int], receipts: Sequence[Receipt]
) -> list[Receipt]:
    """The receipts of parts as those of the drafts they were cut from."""
    rest = iter(receipts)
    return [
        combined(draft, list(islice(rest, share)))
        for draft, share in zip(drafts, shares, strict=True)
    ]


def _by_partition(draft: Draft, partitions: list[int]) -> list[tuple[Draft, int]]:
    """Cut a draft into one for each partition, in order."""
    groups: dict[int, list[int]] = {}
    for index, partition in enumerate(partitions):
        groups.setdefault(partition, []).append(index)
    return [(draft.subset(indices), partition) for partition, indices in groups.items()]


# -- topics ---------------------------------------------------------------------------------------


class TopicMaker:
    """Makes topics on first use and drops deleted ones."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._making: dict[str, FairGate] = {}
        """Publishes that wait for a topic that is being made; the first of them makes it."""

    def ready(self, topic: str) -> bool:
        """Whether a topic exists and no publish waits for it, which this one would overtake."""
        return topic in self._engine.state.topics and topic not in self._making

    async def ensure(self, topic: str, spec: TopicSpec | None = None) -> None:
        """Make a topic that does not exist; waiting callers go on in the order they arrived."""
        if self.ready(topic):
            return
        absent = topic not in self._engine.state.topics
        if absent and spec is None and is_inbox(topic):
            if not self._engine.dispatcher.readers_of(topic):
                raise UnknownTopic(
                    f"nothing listens at {topic!r} any more: the requester has gone. Drop the reply",
                    topic=topic,
                )
            spec = TopicSpec(ephemeral=True)  # its requester was listening before a restart
        auto = self._engine.settings.topics.auto_create or is_system(topic)
        if absent and spec is None and not auto:
            raise UnknownTopic(
                f"no topic {topic!r}, and topics.auto_create is off; create it first", topic=topic
            )
        chosen = spec or TopicSpec(
            partitions=1 if is_system(topic) else self._engine.settings.topics.partitions
        )
        chosen = as_recovered(TopicPut(topic, chosen)).spec
        fair_gate = self._making.setdefault(topic, FairGate())
        try:
            async with fair_gate:
                if (
                    topic not in self._engine.state.topics
                ):  # a caller before this one may have made it
                    await self._engine.publisher.submit(
                        [], when_taken=lambda _: self._make(topic, chosen), for_publish=spec is None
                    )
        finally:
            if not fair_gate:
                del self._making[topic]

    def _make(self, topic: str, spec: TopicSpec) -> list[Entry]:
        if topic in self._engine.state.topics:
            return []
        ends = self._engine.state.deleted.get(topic, ())
        spec = msgspec.structs.replace(spec, floors=ends)
        self._engine.state.topics[topic] = spec
        self.set_floors(topic, spec)
        return [TopicPut(topic, spec), *self._engine.groups.topic_made(topic, 0, spec.partitions)]

    def set_floors(self, topic: str, spec: TopicSpec) -> None:
        """Start behind the offsets of a deleted topic of the same name."""
        for partition, floor in enumerate(spec.floors):
            log = self._engine.log.partition(topic, partition)
            log.floor = floor
            log.end, log.next = max(log.end, floor), max(log.next, floor)

    def places(self, topic: str) -> Iterator[tuple[str, int]]:
        """A topic with each of its partitions."""
        return zip(repeat(topic), range(self._engine.state.topics[topic].partitions), strict=False)

    def ends(self, topic: str) -> list[int]:
        """The next offset of each partition."""
        count = self._engine.state.topics[topic].partitions
        return [self._engine.log.partition(topic, partition).next for partition in range(count)]

    def forget(self, topic: str) -> None:
        """Drop a topic that is being deleted: no group reads it any more."""
        for partition in range(self._engine.state.topics[topic].partitions):
            for group in self._engine.dispatcher.groups.values():
                lane = group.lanes.get((topic, partition))
                if lane is not None:
                    group.reset(lane, lane.end)
                    del group.lanes[topic, partition]
                    self._engine.dispatcher.touched(group)  # its members may have room now
        self._engine.log.drop(self.places(topic))
        self._engine.fold.dedup.pop(topic, None)
        self._engine.groups.topic_gone(topic)

    def tenant_for(self, topic: str) -> str:
        """The tenant of an event that is published without an identity."""
        return tenant_of(topic) or self._engine.settings.identity.tenant


# -- keys of transactions -------------------------------------------------------------------------


class KeySeen(PenstockError):
    """A transaction with this key has happened; stays inside the engine, which answers None."""

    code = "key-known"


def marker_topic(tenant: str) -> str:
    """The topic with the markers of a tenant's transactions.

    Each tenant has its own: equal keys of two tenants are different keys, and many keys of one
    tenant push no key of another tenant out of the table.

    >>> marker_topic("acme")
    '_transactions.acme'
    """
    return f"_transactions.{tenant}"


class TransactionKeys:
    """Which transactions with a key have happened."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    @staticmethod
    def marker(tenant: str, key: bytes) -> Draft:
        """The event that makes a key known together with the transaction it is part of."""
        marker = Draft(marker_topic(tenant), [b""], tenant=tenant, codec="raw")
        marker.tokens, marker.partition = [key], 0
        return marker

    def check(self, tenant: str, key: bytes) -> None:
        """Raise KeySeen when a transaction of this key lies in the journal, or in the next commit."""
        if self._find(tenant, key) is not None:
            raise KeySeen("a transaction with this idempotency key has happened already")

    async def knows(self, tenant: str, key: bytes) -> bool:
        """Whether a transaction of this key has happened; when it returns True, that is durable."""
        offset = self._find(tenant, key)
        if offset is None:
            return False
        if offset >= self._engine.log.partition(marker_topic(tenant), 0).end:
            # The first one is still being written: wait until it is durable before saying so. Its
            # commit becomes durable even when the disk has no room for the acks settled since.
            with contextlib.suppress(DiskRefused):
                await self._engine.commits.flush()
        return True

    def _find(self, tenant: str, key: bytes) -> int | None:
        table = self._engine.fold.dedup.get(marker_topic(tenant))
        return table.find(key) if table is not None else None  # of partition 0: just the offset


# -- drafts of one frame --------------------------------------------------------------------------


Answer = Receipt | PenstockError


class DraftPart(NamedTuple):
    """The events of one draft that go to one partition."""

    draft: int
    events: Draft
    partition: int
    due_us: int | None = None


class StoredRange(NamedTuple):
    """Where the events of a part lie."""

    draft: int
    receipt: Receipt
    due_us: int | None


class Bundle:
    """Stores the drafts of one frame together, each with an answer of its own."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def publish(
        self,
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        ready: Callable[[], None] = lambda: None,
        patience_s: float = 0.0,
    ) -> list[Answer]:
        """Store the drafts that can be stored; the others are answered with their errors.

        `note` makes the entry, one for each tenant, that says where its drafts went. `ready` is called
        when all of them have their place before anything that is published from then on. They wait up
        to `patience_s` to join a commit that other submissions cause.
        """
        answers: dict[int, Answer] = {}
        admitted: list[tuple[Draft, int]] = []
        tenants: dict[str, list[DraftPart]] = {}
        try:
            for number, draft in enumerate(drafts):
                try:
                    parts = await self._prepare(number, draft, admitted)
                except PenstockError as error:
                    answers[number] = error
                else:
                    tenants.setdefault(draft.tenant, []).extend(parts)
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
        tenants: list[list[DraftPart]],
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        ready: Callable[[], None],
        patience_s: float,
    ) -> dict[int, Answer]:
        """Submit the parts of each tenant to its own queue: in another's they would be overtaken."""

        async def stored(parts: list[DraftPart]) -> dict[int, Answer]:
            if parts is tenants[-1]:  # tenants begin one after another: all others are submitted
                ready()
            try:
                return dict(await self._store(parts, drafts, note, patience_s))
            except PenstockError as error:
                return {part.draft: error for part in parts}

        if len(tenants) == 1:
            return await stored(tenants[0])
        answers = await asyncio.gather(*map(stored, tenants))
        return {number: answer for found in answers for number, answer in found.items()}

    async def _prepare(
        self, number: int, draft: Draft, admitted: list[tuple[Draft, int]]
    ) -> list[DraftPart]:
        engine, publisher = self._engine, self._engine.publisher
        if not engine.topics.ready(draft.topic):
            await engine.topics.ensure(draft.topic)
        payload, kept, _ = await publisher.prepare(draft)
        publisher.admit(draft, payload, kept)
        admitted.append((draft, kept))
        if draft.deliver_at_us is not None:
            await engine.topics.ensure(SCHEDULED)
            stored, due_us = engine.scheduler.as_delayed(draft)
            return [DraftPart(number, stored, 0, due_us)]
        return [DraftPart(number, part, at) for part, at in publisher.split(draft)]

    async def _store(
        self,
        parts: list[DraftPart],
        drafts: Sequence[Draft],
        note: Callable[[list[int]], Entry],
        patience_s: float,
    ) -> dict[int, Receipt]:
        batches = _by_batch(parts)
        ranges: list[StoredRange] = []

        def when_taken(receipts: list[Receipt]) -> list[Entry]:
            for batch, receipt in zip(batches, receipts, strict=True):
                ranges.extend(_ranges(batch, receipt))
            entries: list[Entry] = []
            places: list[int] = []
            for draft, receipt, due_us in ranges:
                if due_us is not None:
                    entries += self._engine.scheduler.entries([receipt], due_us)
                for each in receipt.parts or (receipt,):
                    places += (draft, each.partition, each.offset, each.count)
            return [*entries, note(places)]

        await self._engine.publisher.submit_parts(
            [(joined([part.events for part in batch]) if len(batch) > 1 else batch[0].events,
              batch[0].partition) for batch in batches],
            when_taken,
            patience_s,
        )  # fmt: skip
        if any(part.due_us is not None for part in parts):
            self._engine.scheduler.wake()
        return _receipts(drafts, ranges)


def _by_batch(parts: list[DraftPart]) -> list[list[DraftPart]]:
    """Parts, batch by batch: small ones of a partition share one, unless another lies between them."""
    batches: list[list[DraftPart]] = []
    last: dict[tuple[str, int], tuple[tuple[str, str] | None, list[DraftPart]]] = {}
    for part in parts:
        events = part.events
        place = (events.topic, part.partition)
        kind = (events.tenant, events.codec) if part.due_us is None and merges(events) else None
        if kind is not None and place in last and last[place][0] == kind:
            last[place][1].append(part)
            continue
        batches.append([part])
        last[place] = (kind, batches[-1])
    return batches


def _ranges(batch: list[DraftPart], receipt: Receipt) -> list[StoredRange]:
    """Where each part of a batch lies, by the receipt of the batch."""
    if len(batch) == 1:
        part = batch[0]
        if part.due_us is not None:
            token = Scheduler.first_token(part.events, receipt.token)
            receipt = msgspec.structs.replace(receipt, token=token)
        return [StoredRange(part.draft, receipt, part.due_us)]
    found, index = [], 0
    for part in batch:
        count = part.events.count
        token = token_at(receipt.token, index)
        own = Receipt(receipt.topic, receipt.partition, receipt.offset + index, count, token)
        found.append(StoredRange(part.draft, own, None))
        index += count
    return found


def _receipts(drafts: Sequence[Draft], ranges: Sequence[StoredRange]) -> dict[int, Receipt]:
    """One receipt for each draft that was stored."""
    found: dict[int, list[Receipt]] = {}
    for draft, receipt, due_us in ranges:
        if due_us is not None:
            topic, count = drafts[draft].topic, drafts[draft].count
            receipt = Receipt(topic, 0, -1, count, receipt.token, receipt.duplicate, scheduled=True)
        found.setdefault(draft, []).append(receipt)
    return {draft: combined(drafts[draft], receipts) for draft, receipts in found.items()}

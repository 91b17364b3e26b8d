"""Intake: from a draft to a submission, with every objection raised before anything is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.core.admission import ADMITTED, Incoming, Waiting
from penstock.core.entry import Entry, as_recovered
from penstock.core.partition import partition_of, partitions_of
from penstock.engines.bundle import combined
from penstock.engines.engine import Draft, Transaction
from penstock.engines.keyring import KeyKnown
from penstock.engines.layout import MERGE_EVENTS, draft_bytes, draft_sizes
from penstock.engines.pending import Submission
from penstock.engines.timekeeper import SCHEDULED
from penstock.engines.turnstile import Turnstile
from penstock.engines.views import known_partition
from penstock.log.disk import refused
from penstock.log.side import put_aside
from penstock.model.errors import (
    BusClosed,
    InvalidInput,
    PayloadTooLarge,
    RetentionFull,
)
from penstock.model.event import Receipt

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine


RETENTION_RETRY_S = 60.0
"""When to try again with a write-once topic at its limit: only age frees what it keeps."""


class Intake:
    """Takes drafts and entries in, and answers when they are durable."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.aside_bytes = 0
        """Payloads written to side files."""
        self._engine = engine
        self._rounds: dict[str, int] = {}
        self._aside: dict[str, Turnstile] = {}
        """Who waits for a payload that is being put aside, by topic."""

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
        """Prepare a draft; who publishes to the topic while a payload is put aside stays behind it."""
        turnstile = self._aside.get(draft.topic)
        if turnstile is None and not self._goes_aside(draft):
            return await self.prepare(draft)
        turnstile = self._aside.setdefault(draft.topic, Turnstile())
        try:
            async with turnstile:
                return await self.prepare(draft)
        finally:
            if not turnstile:
                del self._aside[draft.topic]

    def _goes_aside(self, draft: Draft) -> bool:
        if draft.count != 1 or draft.tokens is not None or draft.deliver_at_us is not None:
            return False
        batch = draft.batch
        size = len(draft.payloads[0]) if batch is None else batch.payload_column.largest()
        return size >= self._engine.settings.journal.side_file_bytes

    async def prepare(self, draft: Draft) -> tuple[int, int, int]:
        """Check sizes, lay large drafts out now, move huge payloads aside; returns `draft_sizes`."""
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
        if self._goes_aside(draft):
            await self._put_aside(draft)
        elif draft.batch is not None and not draft.final:
            self._engine.layout.compress(draft.batch)
        return draft_sizes(draft)

    async def _put_aside(self, draft: Draft) -> None:
        batch = self._engine.layout.build_aside(draft)
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
        if draft.deliver_at_us is not None:  # what comes later waits for nobody now
            return None
        return self._engine.groups.waiting_directly(draft.topic, draft.tenant)

    def _check_room(self, draft: Draft) -> None:
        if draft.deliver_at_us is not None:
            if draft.partition is not None:  # now: later there is nobody to be told
                known_partition(self._engine.state, draft.topic, draft.partition)
            self._engine.state.schedule.delayed.check_room(draft.count)
        keeper = self._engine.housekeeper
        if draft.topic in keeper.full_topics or keeper.shortage_bytes:
            self._check_retention(draft)

    def _check_retention(self, draft: Draft) -> None:
        """Raise RetentionFull for a write-once topic that may neither grow nor lose events."""
        topic, keeper, settings = draft.topic, self._engine.housekeeper, self._engine.settings
        retention = keeper.retention_of(topic)
        if not retention.write_once:
            return
        limit, value = "max_bytes", settings.retention.max_bytes
        setting = "retention.max_bytes"
        if topic in keeper.full_topics:
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
        fallback = self._rounds[draft.topic] = (self._rounds.get(draft.topic, -1) + 1) % count
        keys = draft.keys if draft.batch is None else draft.batch.keys()
        if keys is None or (draft.batch is not None and draft.batch.key_column is None):
            return [(draft, fallback)]
        if draft.count == 1:
            return [(draft, fallback if keys[0] is None else partition_of(keys[0], count))]
        return _by_partition(draft, partitions_of(keys, count, fallback).tolist())

    async def _delay(self, draft: Draft) -> Receipt:
        await self._engine.topics.ensure(SCHEDULED)
        stored, due_us = self._engine.timekeeper.hold_back(draft)
        receipts: list[Receipt] = await self.submit(
            [stored], when_taken=lambda receipts: self._engine.timekeeper.entries(receipts, due_us)
        )
        self._engine.timekeeper.wake()
        first = receipts[0]
        token = self._engine.timekeeper.first_token(stored, first.token)
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

        Receipts are one for each draft, however many partitions its events go to. `brings_news` says
        that `when_taken` drains a group, `for_publish` that a publish needs these entries.
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
            list(entries),
            with_places if when_taken is not None else None,
            check,
            brings_news,
            for_publish,
        )
        return _by_draft(drafts, shares, receipts)

    async def submit_parts(
        self,
        parts: Sequence[tuple[Draft, int]],
        when_taken: Callable[[list[Receipt]], list[Entry]],
        patience_s: float = 0.0,
    ) -> list[Receipt]:
        """Write drafts that are prepared and have their partitions, with entries about them.

        With patience they wait so long for a commit of somebody else.
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
        entries: list[Entry] | None = None,
        when_taken: Callable[[list[Receipt]], list[Entry]] | None = None,
        check: Callable[[], None] | None = None,
        brings_news: bool = False,
        for_publish: bool = False,
        patience_s: float = 0.0,
    ) -> list[Receipt]:
        if drafts:
            await self._engine.brake.wait(size)
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

        None when its key is known: nothing of it happens then.
        """
        keyring, owner, key = self._engine.keyring, transaction.tenant, transaction.key
        if key is not None and await keyring.knows(owner, key):
            return None
        # What is to be committed is settled now: a partition may be taken away while this waits.
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
                keyring.check(owner, key)
            now = self._engine.runtime.now()
            for each in transaction.acks:
                handle = each.delivery
                handle.group.check(handle.lease, each.index + handle.shift, now)
            for feed, places in cursors:
                feed.check_commit(places)

        def entries(receipts: list[Receipt]) -> list[Entry]:
            now = self._engine.runtime.now()
            written: list[Entry] = [] if note is None else [note(receipts[:count])]
            for each in transaction.acks:
                handle = each.delivery
                written.append(handle.group.ack_now(handle.lease, each.index + handle.shift, now))
                self._engine.dispatcher.touched(handle.group)
            for feed, places in cursors:
                feed.committed(places)
                written += places
            return written

        held = {(id(a.delivery.lease), a.index + a.delivery.shift) for a in transaction.acks}
        if len(held) < len(transaction.acks):
            raise InvalidInput("an event is acked twice in one transaction; nothing happened")
        drafts, count = transaction.drafts, len(transaction.drafts)
        if key is not None:
            drafts = [*drafts, keyring.marker(owner, key)]
        try:
            check()
            self._admit_together(transaction.drafts, sizes)
            try:
                return (await self.submit(drafts, when_taken=entries, check=check))[:count]
            finally:
                for draft, (_, kept, _) in zip(transaction.drafts, sizes, strict=True):
                    self._engine.admission.ingress_done(draft.tenant, draft.count, kept)
        except KeyKnown:  # another one with this key was faster
            assert key is not None
            await keyring.knows(owner, key)
            return None


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

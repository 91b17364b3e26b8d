"""The embedded engine: the whole bus in one process, on a folder (or, for `mem:`, in memory).

One task owns all state; a thread writes commits; another process seals. The parts:

    pending, layout, commitloop    from a draft to a durable batch
    dispatcher, handle             queue groups and their members
    logreader, groups              log groups, and who reads what
    deadletters, timekeeper        what failed, what waits
    housekeeping                   sealing, retention, reclaiming
    administration                 everything operators ask for
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from penstock.core.admission import ADMITTED, Admission
from penstock.core.audit import AuditEntry
from penstock.core.catalogue import RouteCatalogue
from penstock.core.entry import Audited, Entry, TopicGone, TopicPut, TopicSpec
from penstock.core.partition import partition_of, partitions_of
from penstock.core.quota import AdmissionLimits
from penstock.core.state import DeadLetterEntry
from penstock.engines.administration import Administration
from penstock.engines.brake import Brake
from penstock.engines.commitloop import CommitLoop, Taken
from penstock.engines.deadletters import Graveyard
from penstock.engines.dispatcher import Dispatcher
from penstock.engines.engine import Draft, LogFeed, QueueFeed, Request, Subscribe, Transaction
from penstock.engines.groups import Groups
from penstock.engines.housekeeping import Housekeeper
from penstock.engines.layout import MERGE_EVENTS, Layout, draft_bytes
from penstock.engines.logreader import LogGroup
from penstock.engines.pending import Submission
from penstock.engines.reading import event_at, stored_batches
from penstock.engines.runtime import Runtime
from penstock.engines.timekeeper import SCHEDULED, Timekeeper
from penstock.engines.views import known_topic
from penstock.log.auditlog import AuditLog
from penstock.log.disk import Disk, Lock, read_file, write_file
from penstock.log.gather import event_bytes
from penstock.log.journal import Journal
from penstock.log.recovery import Recovered, open_for_writing
from penstock.log.segment import SegmentInfo
from penstock.log.side import detach, write_side
from penstock.model.batch import EventBatch
from penstock.model.errors import (
    BusClosed,
    DiskFull,
    PayloadTooLarge,
    PenstockError,
    UnknownTopic,
)
from penstock.model.event import Event, Receipt
from penstock.model.settings import Settings
from penstock.model.token import TokenSource
from penstock.model.topic import is_system, tenant_of

ROUTES = "routes.json"
CAPABILITIES = frozenset(
    {
        "audit", "dead-letter-replay", "delayed", "durable", "filters", "group-reset",
        "grow-partitions", "idempotency", "key-order", "priority", "request-reply", "routes",
        "schedules", "single-active", "time-replay", "transactions", "ttl", "write-once",
    }
)  # fmt: skip


class EmbeddedEngine:
    """A bus on a disk, in this process."""

    capabilities = CAPABILITIES

    def __init__(self, disk: Disk, settings: Settings, runtime: Runtime | None = None) -> None:
        self.disk = disk
        self.settings = settings
        self.runtime = runtime or Runtime()
        self.admission = Admission(
            msgspec.convert(settings.admission, AdmissionLimits, from_attributes=True)
        )
        self.routes = RouteCatalogue()
        self._lock: Lock | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rounds: dict[str, int] = {}
        self._making: dict[str, asyncio.Future[None]] = {}
        self._audit_position = 0
        self._auditing = asyncio.Lock()
        self._audit_failed = False
        self._open = False

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Lock, recover, and go on where the last life ended."""
        self.runtime.attach(asyncio.get_running_loop())
        self._lock = await self.runtime.read(self._take_lock)
        try:
            self.recovered: Recovered = await self.runtime.read(
                open_for_writing, self.disk, self.settings
            )
            await self._start()
        except BaseException:
            self._lock.release()
            raise
        self._open = True

    def _take_lock(self) -> Lock:
        self.disk.make_dir("")
        return self.disk.lock()

    async def _start(self) -> None:
        found = self.recovered
        self.log, self.fold, self.state = found.log, found.fold, found.fold.state
        self.journal = Journal(
            self.disk, self.settings.journal, position=found.position, epoch=found.epoch + 1
        )
        for topic, spec in self.state.topics.items():
            self._set_floors(topic, spec)
        for tenant, size in found.tenant_bytes.items():
            self.admission.stored(tenant, size)
        for info in self.log.manifest.segments():
            self.count_stored(info, 1)
        entropy = self.runtime.entropy(32)
        self.audit = await self.runtime.read(self._open_audit, entropy)
        if self.disk.exists(ROUTES):
            self.routes = RouteCatalogue.decode(
                await self.runtime.read(read_file, self.disk, ROUTES)
            )
        tokens = TokenSource(self.runtime.entropy(8))
        layout = Layout(self.log, self.fold, tokens, self.settings.media, self.runtime.wall_us)
        self.layout = layout
        self.graveyard = Graveyard(self)
        self.dispatcher = Dispatcher(
            self.log,
            self.runtime,
            hurry=self._hurry,
            mention=self._mention,
            bury=self.graveyard.bury,
        )
        self.commits = CommitLoop(
            self.journal, layout, self.dispatcher, self.runtime, self.settings, self._committed
        )
        self.brake = Brake(self.runtime, self.settings.sealing)
        self.groups = Groups(self)
        self.timekeeper = Timekeeper(self)
        self.administration = Administration(self)
        self.housekeeper = Housekeeper(self)
        self.commits.start()
        ended = self.groups.restore()
        ended += [
            TopicGone(topic, tuple(self._ends(topic)))
            for topic, spec in self.state.topics.items()
            if spec.ephemeral
        ]
        await self.submit([], entries=ended)
        for group in list(self.dispatcher.groups.values()):
            self.dispatcher.pump(group)
        # Before anybody publishes: a side file is written before the entry that names it.
        await self.runtime.read(self.housekeeper.sweep_orphans)
        self.spawn(self.timekeeper.run())
        self.spawn(self.housekeeper.run())

    def _open_audit(self, entropy: bytes) -> AuditLog:
        audit = AuditLog.open(self.disk, now_us=self.runtime.wall_us(), entropy=entropy)
        audit.append_missing(_audit_entry(entry, ref) for ref, entry in self.recovered.audited)
        self._audit_position = self.recovered.position
        return audit

    async def close(self) -> None:
        """Commit what waits, stop everything, give the folder back."""
        if not self._open:
            return
        self._open = False
        closed = BusClosed("the bus is closed; connect again")
        for group in self.dispatcher.groups.values():
            for member in list(group.members):
                group.leave(member, self.runtime.now())
            self.dispatcher.pump(group)
        try:
            await self.graveyard.settled()
            await self.commits.close()
        finally:
            for log in self.groups.logs.values():
                log.stop(closed)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.dispatcher.close(closed)
            await self.housekeeper.close()
            await self.runtime.read(self._release)
            self.runtime.close()

    def _release(self) -> None:
        try:
            self.journal.close()
            self.audit.close()
        finally:
            self.log.close()
            self.log.manifest.close()
            if self._lock is not None:
                self._lock.release()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside; a typed failure there is the engine's to report, not to die of."""
        task = asyncio.get_running_loop().create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PenstockError as error:
            if self._open:
                self.housekeeper.problem = str(error)

    def _hurry(self) -> None:
        self.commits.hurry()

    def _mention(self) -> None:
        self.commits.mention()

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; durable when it returns."""
        if draft.topic not in self.state.topics:
            await self.ensure_topic(draft.topic)
        size = await self._prepare(draft)
        if draft.deliver_at_us is not None:
            return await self._delay(draft, size)
        self._admit(draft, size)
        try:
            parts = self._split(draft)
            receipts: list[Receipt] = await self._submit(
                [part for part, _ in parts], [at for _, at in parts], size, draft.tenant
            )
        finally:
            self.admission.ingress_done(draft.tenant, draft.count, size)
        return receipts[0] if len(receipts) == 1 else _combined(draft, receipts)

    async def _prepare(self, draft: Draft) -> int:
        """Check sizes, lay large drafts out now, move huge payloads aside; returns the bytes."""
        if not self._open:
            raise BusClosed("the bus is closed; nothing was stored. Connect again")
        limit = self.settings.limits.max_payload_bytes
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
            )
        single = draft.count == 1 and draft.tokens is None
        if (
            single
            and largest >= self.settings.journal.side_file_bytes
            and draft.deliver_at_us is None
        ):
            await self._put_aside(draft)
        elif draft.batch is not None:
            self.layout.compress(draft.batch)
        return draft_bytes(draft)

    async def _put_aside(self, draft: Draft) -> None:
        batch = self.layout.build_aside(draft)
        path, payload = detach(batch)
        try:
            await self.runtime.read(write_side, self.disk, path, payload)
        except OSError as error:
            raise DiskFull(
                f"no room for a payload of {len(payload)} bytes ({error.strerror}); nothing was "
                "stored. Free some space; publishing resumes by itself",
                retry_after_s=1.0,
            ) from None
        draft.batch = batch

    def _admit(self, draft: Draft, size: int) -> None:
        decision = self.admission.admit(
            draft.tenant, draft.topic, draft.count, size, self.runtime.now(), "log"
        )
        if decision is not ADMITTED:
            raise decision.error()
        if self.housekeeper.shortage_bytes:
            self.admission.ingress_done(draft.tenant, draft.count, size)
            raise DiskFull(
                "retention may not delete anything (write-once) and the size limit is reached; "
                "nothing was stored. Raise retention.max_bytes or wait for events to age",
                retry_after_s=60.0,
            )

    def _split(self, draft: Draft) -> list[tuple[Draft, int]]:
        """One draft for each partition its keys fall into."""
        count = self.state.topics[draft.topic].partitions
        if draft.partition is not None:
            if not 0 <= draft.partition < count:
                raise UnknownTopic(
                    f"{draft.topic!r} has partitions 0 to {count - 1}, not {draft.partition}",
                    topic=draft.topic,
                )
            return [(draft, draft.partition)]
        if count == 1:
            return [(draft, 0)]
        fallback = self._rounds[draft.topic] = (self._rounds.get(draft.topic, -1) + 1) % count
        keys = draft.keys if draft.batch is None else draft.batch.keys()
        if keys is None or (draft.batch is not None and draft.batch.key_column is None):
            return [(draft, fallback)]
        if draft.count == 1:
            return [(draft, fallback if keys[0] is None else partition_of(keys[0], count))]
        return _by_partition(draft, partitions_of(keys, count, fallback).tolist())

    async def _delay(self, draft: Draft, size: int) -> Receipt:
        self.state.schedule.delayed.check_room(draft.count)
        await self.ensure_topic(SCHEDULED)
        stored, due_us = self.timekeeper.hold_back(draft)
        receipts: list[Receipt] = await self.submit(
            [stored], when_taken=lambda receipts: self.timekeeper.entries(receipts, due_us)
        )
        self.timekeeper.wake()
        first = receipts[0]
        return Receipt(
            draft.topic, 0, -1, draft.count, first.token, first.duplicate, scheduled=True
        )

    async def submit(
        self,
        drafts: Sequence[Draft],
        *,
        entries: Sequence[Entry] = (),
        when_taken: Callable[[list[Receipt]], list[Entry]] | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Receipt]:
        """Write drafts and entries as one: all of it is durable when it returns, or none of it is."""
        if not drafts and not entries and when_taken is None:
            return []
        parts: list[tuple[Draft, int]] = []
        for draft in drafts:
            await self.ensure_topic(draft.topic)
            parts += self._split(draft)
        size = sum(draft_bytes(draft) for draft, _ in parts) + 1_024 * (1 + len(entries))
        return await self._submit(
            [part for part, _ in parts],
            [at for _, at in parts],
            size,
            drafts[0].tenant if drafts else "",
            list(entries),
            when_taken,
            check,
        )

    async def _submit(
        self,
        drafts: list[Draft],
        partitions: list[int],
        size: int,
        tenant: str,
        entries: list[Entry] | None = None,
        when_taken: Callable[[list[Receipt]], list[Entry]] | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Receipt]:
        if drafts:
            await self.brake.wait(size)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submission = Submission(tenant, drafts, partitions, size, future)
        if entries:
            submission.entries = entries
        submission.when_taken = when_taken
        submission.check = check
        receipts: list[Receipt] = await self.commits.submit(submission)
        return receipts

    async def write_entries(self, entries: list[Entry]) -> None:
        """Make entries durable."""
        await self.submit([], entries=entries)

    async def transact(self, transaction: Transaction) -> list[Receipt]:
        """Publishes, acks and cursors in one journal entry."""
        for draft in transaction.drafts:
            await self.ensure_topic(draft.topic)
            await self._prepare(draft)

        def check() -> None:
            now = self.runtime.now()
            for each in transaction.acks:
                handle = each.delivery
                handle.group.check(handle.lease, each.index + handle.shift, now)
            for feed in transaction.cursors:
                feed.pending_commit()  # type: ignore[attr-defined]

        def entries(_: list[Receipt]) -> list[Entry]:
            now = self.runtime.now()
            written: list[Entry] = []
            for each in transaction.acks:
                handle = each.delivery
                written.append(handle.group.ack_now(handle.lease, each.index + handle.shift, now))
                self.dispatcher.touched(handle.group)
            for feed in transaction.cursors:
                cursors = feed.pending_commit()  # type: ignore[attr-defined]
                feed.committed(cursors)  # type: ignore[attr-defined]
                written += cursors
            return written

        check()
        return await self.submit(transaction.drafts, when_taken=entries, check=check)

    def _committed(self, taken: Taken) -> None:
        """A commit is durable: let readers see it and members have it."""
        touched: dict[int, Any] = {}
        base = self.journal.base
        for batch, log, position, inner in taken.placed:
            log.add(batch, base, position, inner)
            if batch.side_bytes:
                self.housekeeper.side_written(batch.token_base, position)
            else:
                self.log.remember(batch, log)
            self.admission.stored(batch.tenant, event_bytes(batch))
            place = (batch.topic, batch.partition)
            for reader in self.groups.readers_of(batch.topic):
                touched[id(reader)] = reader
                if not isinstance(reader, LogGroup):
                    self.dispatcher.arrived(reader, place, log.end, batch.priority is not None)
        for reader in touched.values():
            if isinstance(reader, LogGroup):
                reader.arrived()
            else:
                self.dispatcher.pump(reader)
        self.dispatcher.deliver(taken.leases)
        if taken.commit.roll is not None:
            self.brake.backlog_bytes += self.settings.journal.file_bytes
            self.housekeeper.wake()
        for submission in taken.submissions:
            for entry in submission.written:
                if isinstance(entry, DeadLetterEntry):
                    self.state.apply(entry)
        audited = [
            _audit_entry(entry, submission.position + number)
            for submission in taken.submissions
            for number, entry in enumerate(
                entry for entry in submission.written if isinstance(entry, Audited)
            )
        ]
        if audited:
            self.spawn(self._append_audit(audited, taken.commit.end))
        elif not self._auditing.locked() and not self._audit_failed:
            self._audit_position = taken.commit.end

    def count_stored(self, info: SegmentInfo, sign: int) -> None:
        """Count a segment towards its tenants' storage, or, with -1, no longer.

        Where tenants share a range each is charged for all of it: quotas err on the safe side.
        """
        for each in info.ranges:
            for tenant in each.tenants:
                self.admission.stored(tenant, sign * each.event_bytes)

    # -- audit ---------------------------------------------------------------------------------

    async def _append_audit(self, entries: list[AuditEntry], end: int) -> None:
        async with self._auditing:
            # While it is not in the chain it must stay in the journal: nothing is sealed past it.
            while not self._audit_failed:
                try:
                    await self.runtime.read(self.audit.append_missing, entries)
                    break
                except DiskFull as error:
                    await asyncio.sleep(error.retry_after_s)
                except PenstockError:
                    self._audit_failed = True  # the next life catches up from the journal
                    raise
        if not self._audit_failed:
            self._audit_position = max(self._audit_position, end)

    async def audit_settled(self) -> None:
        """Return when everything committed so far is in the audit chain."""
        async with self._auditing:
            return

    def audited_to(self) -> int:
        """Everything before this journal position is in the audit chain."""
        return self._audit_position

    # -- topics --------------------------------------------------------------------------------

    async def ensure_topic(self, topic: str, spec: TopicSpec | None = None) -> None:
        """Make a topic on first use."""
        if topic in self.state.topics:
            return
        if spec is None and not self.settings.topics.auto_create and not is_system(topic):
            raise UnknownTopic(
                f"no topic {topic!r}, and topics.auto_create is off; create it first", topic=topic
            )
        while (others := self._making.get(topic)) is not None:
            await asyncio.shield(others)
            if topic in self.state.topics:
                return  # else whoever made it was cancelled or refused: it is our turn
        making = self._making[topic] = asyncio.get_running_loop().create_future()
        chosen = spec or TopicSpec(
            partitions=1 if is_system(topic) else self.settings.topics.partitions
        )
        try:
            await self.submit([], when_taken=lambda _: self._make_topic(topic, chosen))
        finally:
            del self._making[topic]
            making.set_result(None)

    def _make_topic(self, topic: str, spec: TopicSpec) -> list[Entry]:
        if topic in self.state.topics:
            return []
        ends = self.state.deleted.get(topic, ())
        spec = msgspec.structs.replace(spec, floors=ends)
        self.state.topics[topic] = spec
        self._set_floors(topic, spec)
        return [TopicPut(topic, spec), *self.groups.topic_made(topic, 0, spec.partitions)]

    def _set_floors(self, topic: str, spec: TopicSpec) -> None:
        for partition, floor in enumerate(spec.floors):
            log = self.log.partition(topic, partition)
            log.floor = floor
            log.end, log.next = max(log.end, floor), max(log.next, floor)

    def _ends(self, topic: str) -> list[int]:
        count = self.state.topics[topic].partitions
        return [self.log.partition(topic, partition).next for partition in range(count)]

    def forget_topic(self, topic: str) -> None:
        """A topic is being deleted: nobody reads it any more."""
        for partition in range(self.state.topics[topic].partitions):
            for group in self.dispatcher.groups.values():
                lane = group.lanes.get((topic, partition))
                if lane is not None:
                    group.reset(lane, lane.end)
                    del group.lanes[topic, partition]
        self.log.drop_topic(topic)
        self.fold.dedup.pop(topic, None)
        self.groups.topic_gone(topic)

    def tenant_for(self, topic: str) -> str:
        """The tenant of an event that no identity speaks for."""
        return tenant_of(topic) or self.settings.identity.tenant

    # -- reading -------------------------------------------------------------------------------

    async def event_at(self, topic: str, partition: int, offset: int) -> Event:
        """One stored event."""
        return await event_at(self.log, self.runtime, topic, partition, offset)

    def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches in order."""
        known_topic(self.state, topic)
        return stored_batches(self.log, self.runtime, topic, partition, start, stop)

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Join a group, making it on first sight."""
        name = subscribe.group
        await self.groups.ensure(name, subscribe.spec)
        if subscribe.spec.mode == "log":
            return self.groups.logs[name].join(subscribe.member)
        return self.dispatcher.join(name, subscribe.member, subscribe.max_inflight)

    async def ask(self, request: Request) -> Any:
        """Administer."""
        return await self.administration.answer(request)

    async def save_routes(self) -> None:
        """Write the route catalogue, atomically."""
        await self.runtime.read(write_file, self.disk, ROUTES, [self.routes.encode()])

    async def flush(self) -> None:
        """Everything settled so far is durable when it returns."""
        await self.commits.flush()


def _audit_entry(entry: Audited, ref: int) -> AuditEntry:
    return AuditEntry(
        at_us=entry.at_us, actor=entry.actor, operation=entry.operation, targets=entry.targets,
        reason=entry.reason, prior=entry.prior, result=entry.result, ref=ref,
    )  # fmt: skip


def _by_partition(draft: Draft, partitions: list[int]) -> list[tuple[Draft, int]]:
    """Cut a draft into one for each partition, in order."""
    groups: dict[int, list[int]] = {}
    for index, partition in enumerate(partitions):
        groups.setdefault(partition, []).append(index)
    return [(draft.subset(indices), partition) for partition, indices in groups.items()]


def _combined(draft: Draft, receipts: list[Receipt]) -> Receipt:
    first = receipts[0]
    everything = all(receipt.duplicate for receipt in receipts)
    return Receipt(
        draft.topic, first.partition, first.offset, draft.count, first.token, everything,
        parts=tuple(receipts),
    )  # fmt: skip

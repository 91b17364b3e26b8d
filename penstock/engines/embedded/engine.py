"""The embedded engine: the whole bus in one process, on a folder (or, for `mem:`, in memory).

`EmbeddedEngine` opens the folder, recovers its state, makes the parts and connects them, and closes
all of it. One task owns all state and writes commits; another process seals. The parts:

    publisher, batching, commit, runtime     from a draft to a durable batch
    groups, delivery, log_groups, reader     who reads what, and events in consumers' hands
    dead_letters, schedules                  events that failed, events that are not due yet
    maintenance                              sealing, retention, reclaiming; it slows publishers down
    lost_events                              events that retention deleted before they were read
    audit, admin                             what operators did, and answers to their requests
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from penstock.core.admission import Admission, AdmissionLimits
from penstock.core.delivery import QueueGroup
from penstock.core.entry import Audited, TopicGone, check_name
from penstock.core.routes import RouteCatalogue
from penstock.core.state import DeadLetterEntry
from penstock.engines.embedded.admin import Administration
from penstock.engines.embedded.audit import AuditTrail
from penstock.engines.embedded.batching import Batcher, Placed
from penstock.engines.embedded.commit import CommitLoop, OpenCommit, StoredBytes
from penstock.engines.embedded.dead_letters import DeadLetterStore
from penstock.engines.embedded.delivery import Dispatcher
from penstock.engines.embedded.groups import Groups
from penstock.engines.embedded.log_groups import LogGroup
from penstock.engines.embedded.lost_events import LostEvents
from penstock.engines.embedded.maintenance import Maintenance, SealingBacklog
from penstock.engines.embedded.publisher import Publisher, TopicMaker, TransactionKeys
from penstock.engines.embedded.reader import event_at, stored_batches
from penstock.engines.embedded.runtime import Runtime
from penstock.engines.embedded.schedules import Scheduler
from penstock.engines.engine import LogFeed, QueueFeed, Request, Subscribe, Transaction
from penstock.engines.requests import known_partition
from penstock.log.disk import Disk, Lock, no_folder, read_file, refused, unusable, write_file
from penstock.log.handovers import Handovers
from penstock.log.journal import Journal
from penstock.log.recovery import Recovered, open_for_writing, refuse_foreign
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.errors import BusClosed, DiskRefused, PenstockError, Rejected
from penstock.model.event import Event, Receipt
from penstock.model.settings import Settings
from penstock.model.token import TokenSource

log = logging.getLogger("penstock.engines")

ROUTES = "routes.json"
CAPABILITIES = frozenset(
    {
        "audit", "dead-letter-replay", "delayed", "durable", "filters", "group-reset",
        "grow-partitions", "idempotency", "key-order", "priority", "request-reply", "routes",
        "schedules", "single-active", "time-replay", "transactions", "ttl", "write-once",
    }
)  # fmt: skip


class EmbeddedEngine:
    """A bus in this process, on a disk."""

    capabilities = CAPABILITIES

    def __init__(self, disk: Disk, settings: Settings, runtime: Runtime | None = None) -> None:
        self.disk = disk
        self.settings = settings
        self.runtime = runtime or Runtime(settings.durability.quick_sync_us / 1e6)
        self.admission = Admission(
            msgspec.convert(settings.admission, AdmissionLimits, from_attributes=True)
        )
        self.routes = RouteCatalogue()
        self.on_commit: Callable[[Sequence[EventBatch]], None] | None = None
        """Called with the batches of each commit, once they are durable."""
        self.pause_aside: Callable[[], None] | None = None
        """Called in a thread before each piece of a large payload is written, to let others write."""
        self.lease_hold_s = 0.0
        """After a start, how long events that were leased wait for a holder that may come back."""
        self._lock: Lock | None = None
        self._saving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_open = False

    # -- opening and closing -------------------------------------------------------------------

    async def open(self) -> None:
        """Lock the folder, recover, and go on where the journal ends."""
        self.runtime.attach(asyncio.get_running_loop())
        try:
            self._lock = await self.runtime.read(self._take_lock)
            self.recovered: Recovered = await self.runtime.read(
                open_for_writing, self.disk, self.settings
            )
            await self._start()
        except BaseException as error:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._lock is not None:
                self._lock.release()
            self.runtime.close()
            if isinstance(error, OSError):
                raise unusable(error) from error
            raise
        self.is_open = True

    def _take_lock(self) -> Lock:
        try:
            self.disk.make_dir("")
            refuse_foreign(self.disk)
            return self.disk.lock()
        except OSError as error:
            raise no_folder(error) from None

    async def _start(self) -> None:
        found = self.recovered
        self.log, self.fold, self.state = found.log, found.fold, found.fold.state
        self.state.schedule.delayed.max_scheduled = self.settings.limits.max_scheduled
        self.journal = Journal(
            self.disk, self.settings.journal, position=found.position, epoch=found.epoch + 1
        )
        self.topics = TopicMaker(self)
        self.publisher = Publisher(self)
        self.transaction_keys = TransactionKeys(self)
        for topic, spec in self.state.topics.items():
            self.topics.set_floors(topic, spec)
        segments = self.log.manifest.segments()
        self.stored = StoredBytes(self.admission, found.unsealed, segments)
        entropy = self.runtime.entropy(32)
        self.committed_to = found.position
        """The journal is durable up to here."""
        self.audit = await self.runtime.read(AuditTrail, self, entropy)
        if self.disk.exists(ROUTES):
            self.routes = RouteCatalogue.decode(
                await self.runtime.read(read_file, self.disk, ROUTES)
            )
        tokens = TokenSource(self.runtime.entropy(8))
        self.layout = Batcher(
            self.log, self.fold, tokens, self.settings.media, self.runtime.wall_us
        )
        self.dead_letter_store = DeadLetterStore(self)
        self.handovers = Handovers(self.disk, found.epoch)
        self.dispatcher = Dispatcher(
            self.log,
            self.runtime,
            self.handovers,
            self.admission.limits,
            commit_now=self._commit_now,
            commit_soon=self._commit_soon,
            store_failed=self.dead_letter_store.store_failed,
            find_readers=lambda topic: self.groups.find_readers(topic),  # noqa: PLW0108 - made below
        )
        self.admission.on_reload = self.dispatcher.limit
        self.commits = CommitLoop(
            self.journal, self.layout, self.dispatcher, self.runtime, self.settings,
            self._laid, self._committed,
        )  # fmt: skip
        self.sealing_backlog = SealingBacklog(self.runtime, self.settings)
        self.groups = Groups(self)
        self.scheduler = Scheduler(self)
        self.administration = Administration(self)
        self.maintenance = Maintenance(self)
        self.unread = LostEvents(self)
        self.audit.start()
        self.commits.start()
        ended = self.groups.restore()
        ended += [
            TopicGone(topic, tuple(self.topics.ends(topic)))
            for topic, spec in self.state.topics.items()
            if spec.ephemeral
        ]
        with contextlib.suppress(DiskRefused):  # then they end after the next start
            await self.publisher.submit([], entries=ended)
            self.handovers.begin(found.epoch + 1)
        for group in list(self.dispatcher.groups.values()):
            self.dispatcher.pump(group)
        # Before the first publish: a side file is written before the entry that names it.
        await self.runtime.read(self.maintenance.sweep_orphans)
        self.spawn(self.scheduler.run())
        self.spawn(self.maintenance.run())

    async def close(self) -> None:
        """Commit what waits, stop everything, unlock the folder."""
        if not self.is_open:
            return
        self.is_open = False
        closed = BusClosed("the bus is closed; connect again")
        for group in self.dispatcher.groups.values():
            for member in list(group.members if not self.lease_hold_s else ()):
                group.leave(member, self.runtime.now())
            self.dispatcher.pump(group)
        try:
            # On a full disk the journal keeps failed events and audit entries for the next start.
            with contextlib.suppress(DiskRefused):
                await self.dead_letter_store.settled()
            await self.commits.close()
            await self.audit.end()
        finally:
            for log in self.groups.logs.values():
                log.stop(closed)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.dispatcher.close(closed)
            await self.maintenance.close()
            try:
                # After everything that the writer still does: the journal is cut to its length here.
                await self.runtime.write(self._release)
            finally:
                self.runtime.close()

    def _release(self) -> None:
        try:
            self.journal.close()
            self.audit.close()
            self.maintenance.note_audit()
        finally:
            self.log.close()
            self.log.manifest.close()
            if self._lock is not None:
                self._lock.release()

    # -- what the bus asks for -----------------------------------------------------------------

    async def publish(self, draft: Draft) -> Receipt:
        """Store events; durable when it returns."""
        return await self.publisher.publish(draft)

    async def transact(self, transaction: Transaction) -> list[Receipt] | None:
        """Publishes, acks and cursors in one journal entry."""
        return await self.publisher.transact(transaction)

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Join a group, which is made when it does not exist."""
        name = subscribe.group
        check_name(subscribe.member)
        await self.groups.ensure(name, subscribe.spec)
        if subscribe.spec.mode == "log":
            return self.groups.logs[name].join(subscribe.member, subscribe.handed)
        return self.dispatcher.join(
            name, subscribe.member, subscribe.max_inflight, subscribe.identity.tenant
        )

    def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches in order."""
        known_partition(self.state, topic, partition)
        return stored_batches(self.log, self.runtime, topic, partition, start, stop)

    async def event_at(self, topic: str, partition: int, offset: int) -> Event:
        """One stored event."""
        return await event_at(self.log, self.runtime, topic, partition, offset)

    async def ask(self, request: Request) -> Any:
        """Answer an administrative request."""
        return await self.administration.answer(request)

    async def flush(self) -> None:
        """Make everything settled so far durable, dead letters included."""
        for group in list(self.dispatcher.groups.values()):
            if group.doomed:
                self.dead_letter_store.store_failed(group)
        await self.dead_letter_store.settled()
        await self.commits.flush()

    async def save_routes(self) -> None:
        """Write the route catalogue, atomically."""
        async with self._saving:  # two writes at once would share a temporary file
            data = self.routes.encode()
            try:
                await self.runtime.read(write_file, self.disk, ROUTES, [data])
            except OSError as error:
                raise refused(error, "the route catalogue") from error

    # -- commits -------------------------------------------------------------------------------

    def _commit_now(self) -> None:
        self.commits.hurry()

    def _commit_soon(self) -> None:
        self.commits.mention()

    def _laid(self, placed: list[Placed]) -> None:
        """Events have their offsets: groups that need not look into events may lease them now."""
        early: dict[str, QueueGroup] = {}
        for batch, _, _, _ in placed:
            if batch.priority is not None:
                continue
            for reader in self.dispatcher.readers_of(batch.topic):
                if isinstance(reader, QueueGroup) and reader.blind:
                    place = (batch.topic, batch.partition)
                    self.dispatcher.arrived(reader, place, batch.end_offset, False)
                    early[reader.name] = reader
        for group in early.values():
            self.dispatcher.pump(group)

    def _committed(self, taken: OpenCommit) -> None:
        """A commit is durable: readers see its events, members get them, the parts are told."""
        touched: dict[int, Any] = {}
        base = self.journal.base
        for batch, log, position, inner in taken.placed:
            log.add(batch, base, position, inner)
            if batch.side_bytes:
                self.maintenance.side_written(batch.token_base, position)
            else:
                self.log.remember(batch, log)
            self.stored.committed(batch, base)
            place = (batch.topic, batch.partition)
            for reader in self.dispatcher.readers_of(batch.topic):
                touched[id(reader)] = reader
                if not isinstance(reader, LogGroup):
                    self.dispatcher.arrived(reader, place, log.end, batch.priority is not None)
        for reader in touched.values():
            if isinstance(reader, LogGroup):
                reader.arrived()
            elif not reader.blind:  # the others were served when the commit was taken
                self.dispatcher.pump(reader)
        self.dispatcher.deliver(taken.leases)
        if taken.commit.roll is not None:
            self.sealing_backlog.backlog_bytes += self.settings.journal.file_bytes
            self.maintenance.wake()
        actions = False
        for submission in taken.submissions:
            for entry in submission.written:
                if isinstance(entry, DeadLetterEntry):
                    self.state.apply(entry)
                elif isinstance(entry, Audited):
                    actions = True
        if actions:
            self.audit.committed(taken.submissions, taken.commit.end)
        self.committed_to = taken.commit.end
        if self.on_commit is not None:
            self.on_commit([placed.batch for placed in taken.placed])

    # -- background tasks ----------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background; the engine reports a PenstockError of it and goes on."""
        task = asyncio.get_running_loop().create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PenstockError as error:
            if self.is_open:
                self.maintenance.problem = str(error)
                if not isinstance(error, Rejected):  # those are tried again
                    log.error("something behind the bus failed: %s", error)

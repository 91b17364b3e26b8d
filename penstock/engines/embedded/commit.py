"""Group commit: takes what waits, writes it in one go, syncs it once, and answers the callers.

While one commit is written the loop collects the next, so commits grow under load and one fdatasync
pays for everything that arrived meanwhile. A tenant that has nothing in the commit under way does not
wait for it: its own commit is written and synced beside it, and becomes durable behind it.

`OpenCommit` is one commit between the moment it is laid out and the moment its callers are answered.
`StoredBytes` counts what each tenant keeps, from what lies in the folder alone: the batches of unsealed
journal files and the ranges of segments. So a restart changes no quota.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.core.entry import encode_entries
from penstock.core.lease import Lease
from penstock.engines.embedded.batching import Batcher, CommitQueue, Placed, Source, Submission
from penstock.engines.embedded.runtime import SIDE_BY_SIDE, FairGate, Runtime, Writer, Writing
from penstock.log.journal import CONTROL, Commit, Journal, frame_bytes
from penstock.model.batch import event_bytes
from penstock.model.errors import BusClosed, DiskRefused, PenstockError, WriterFailed
from penstock.model.settings import Settings

if TYPE_CHECKING:
    from penstock.core.admission import Admission
    from penstock.log.segment import SegmentInfo
    from penstock.model.batch import EventBatch


class OpenCommit:
    """One commit and what to do when it is durable."""

    __slots__ = ("commit", "drained", "flushes", "leases", "placed", "submissions")

    def __init__(self, commit: Commit) -> None:
        self.commit = commit
        self.drained = True
        """Whether everything settled so far is in it; not when there was no room."""
        self.submissions: list[Submission] = []
        self.placed: list[Placed] = []
        self.leases: list[Lease] = []
        self.flushes: list[asyncio.Future[None]] = []

    def fits(
        self, journal: Journal, submission: Submission, size: int, news_bytes: Callable[[], int]
    ) -> bool:
        """Whether there is room for a submission with which `size` bytes more are in the commit."""
        size += frame_bytes(0)
        if submission.for_publish:
            # Without room for what was settled there is none for new events either.
            return self.drained and journal.fits(self.commit, size)
        if submission.brings_news and not self.drained:
            size += news_bytes()
        return journal.fits(self.commit, size, last=True)

    def answer(self, full: PenstockError | None) -> None:
        """Answer the callers of a durable commit; flushes learn when it did not hold everything."""
        for submission in self.submissions:
            if not submission.future.done():
                submission.future.set_result(submission.receipts)
        for done in self.flushes:
            if done.done():
                continue
            if full is not None and not self.drained:
                done.set_exception(full)
            else:
                done.set_result(None)


def refuse(submissions: Iterable[Submission], error: BaseException) -> None:
    """Tell callers that what they wait for did not happen, or may not have."""
    for submission in submissions:
        if not submission.future.done():
            submission.future.set_exception(error)


# Acks alone do not hurry: they ride the next commit, and get one of their own after this long.
ACK_LINGER_S = 0.005
# After a full disk, ask for room again no more often than this.
FULL_RETRY_S = 1.0
# Room that must be left in the journal before settled events are written down.
CONTROL_ROOM_BYTES = 256 * 1024


class CommitLoop:
    """Group commit."""

    def __init__(
        self,
        journal: Journal,
        layout: Batcher,
        source: Source,
        runtime: Runtime,
        settings: Settings,
        laid: Callable[[list[Placed]], None],
        committed: Callable[[OpenCommit], None],
    ) -> None:
        self.failed: PenstockError | None = None
        self.commits = 0
        self.write_s = 0.0
        """Time all commits took to write and sync."""
        self._journal = journal
        self._layout = layout
        self._source = source
        self._runtime = runtime
        self._writer = Writer(journal, runtime, settings.durability)
        self._settings = settings
        self._laid = laid
        self._committed = committed
        self._pending = CommitQueue()
        self._wake = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._due = False
        """Whether what the machines have to write is worth a commit of its own by now."""
        self._way_in = FairGate()
        self._room: asyncio.Future[None] | None = None
        self._flushes: list[asyncio.Future[None]] = []
        self._under_way: deque[tuple[Writing | None, OpenCommit]] = deque()
        """Taken and not known to be durable, oldest first; None where there was nothing to write."""
        self._task: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._full: DiskRefused | None = None
        self._full_until = 0.0
        self._closing = False

    def start(self) -> None:
        """Begin committing."""
        self._task = asyncio.create_task(self._run(), name="penstock-commit")
        if self._settings.durability.fsync == "interval":
            self._syncer = asyncio.create_task(self._sync_often(), name="penstock-sync")

    # -- what callers do -----------------------------------------------------------------------

    async def submit(self, submission: Submission) -> Any:
        """Wait until a submission is durable; returns its receipts."""
        if self._crowded() or self._way_in:
            async with self._way_in:
                while self._crowded():
                    await self._wait_for_room()
                self._enter(submission)
        else:
            self._enter(submission)
        return await submission.future

    def _crowded(self) -> bool:
        return self._pending.bytes > self._settings.journal.pending_max_bytes

    def _enter(self, submission: Submission) -> None:
        self._refuse_when_stopped()
        self._pending.add(submission)
        self._wake.set()
        if submission.patience_s:
            loop = asyncio.get_running_loop()
            loop.call_later(submission.patience_s, self._lose_patience, submission)

    def _lose_patience(self, submission: Submission) -> None:
        """Nobody else committed anything meanwhile, or not with so much room."""
        submission.patience_s = 0.0
        self._wake.set()

    def _refuse_when_stopped(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._closing:
            raise BusClosed("the bus is closed; nothing was stored. Connect again")

    async def _wait_for_room(self) -> None:
        self._refuse_when_stopped()
        self._room = asyncio.get_running_loop().create_future()
        await self._room

    def hurry(self) -> None:
        """There are leases to write down: commit now."""
        self._due = True
        self._wake.set()

    def mention(self) -> None:
        """There are acks to write down: commit soon."""
        if self._linger is None and not self._due:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(ACK_LINGER_S, self._lingered)

    def _lingered(self) -> None:
        self._linger = None
        self.hurry()

    async def flush(self) -> None:
        """Return when everything settled so far is durable."""
        self._refuse_when_stopped()
        await self._flushed()

    def _flushed(self) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append(done)
        self._wake.set()
        return done

    async def close(self) -> None:
        """Take no more, commit what waits, then stop; raises when it could not be written.

        The loop ends by itself: cancelled, it would leave a commit to a thread or to the kernel.
        """
        self._closing = True
        done = None
        try:
            if self._task is not None and self.failed is None:
                done = self._flushed()
                await asyncio.wait([self._task])
        finally:
            for task in (self._task, self._syncer):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if self._linger is not None:
                self._linger.cancel()
            self._stop(BusClosed("the bus is closed; this was not stored. Connect again"))
        if done is not None:
            with contextlib.suppress(DiskRefused):  # what was settled last is delivered again
                await done

    # -- the loop ------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.failed is None:
                await self._wake.wait()
                self._wake.clear()
                while self._work_waits():
                    if not await self._step():
                        break
                if self._closing and not self._under_way:
                    return
        except PenstockError as error:
            self._stop(error)
        except Exception as error:
            self._stop(_broken(error))
            raise

    def _work_waits(self) -> bool:
        """Whether a commit should begin now.

        While one is under way others begin only for tenants that have none in it: a tenant waits
        for its own commits and no one else's, and what arrives meanwhile still shares the next.
        """
        if self.failed is not None or len(self._under_way) >= SIDE_BY_SIDE:
            return False
        if self._under_way:
            return self._pending.presses(self._busy())
        if self._closing:  # nothing new is begun, or a busy bus would not end
            return bool(self._pending or self._flushes)
        return bool(self._flushes or self._due or self._pending.presses())

    def _busy(self) -> set[str]:
        return {each.tenant for _, taken in self._under_way for each in taken.submissions}

    async def _step(self) -> bool:
        """Begin one commit; False when there is no room for what waits."""
        await self._find_room()
        now_us = self._runtime.wall_us()
        if self._under_way and self._journal.rolls(now_us, self._first_bytes()):
            await self._nothing_under_way()  # a file that is left is whole
            now_us = self._runtime.wall_us()  # what came meanwhile did not come before
        taken = self._take(now_us)
        taken.flushes, self._flushes = self._flushes, []
        if not taken.commit.entries:  # nothing to write: no work, no room, or only duplicates
            self._under_way.append((None, taken))
            self._end_commits()
            return bool(taken.submissions)
        self._journal.place(taken.commit)
        try:
            if self._under_way and not self._writer.beside(taken.commit):
                await self._nothing_under_way()
            if self._writer.beside(taken.commit):
                writing = self._writer.begin(taken.commit)
                self._under_way.append((writing, taken))
                writing.synced.add_done_callback(self._synced)
                return True
            began = self._runtime.now()
            await self._writer.write(taken.commit)
        except BaseException as error:
            cause = (
                error
                if isinstance(error, PenstockError)
                else WriterFailed(f"commit failed: {error!r}")
            )
            refuse(taken.submissions, cause)
            self._flushes += taken.flushes
            raise
        self._finish(taken, self._runtime.now() - began)
        return True

    async def _nothing_under_way(self) -> None:
        while self._under_way:
            await self._wake.wait()
            self._wake.clear()
        if self.failed is not None:
            raise self.failed

    def _synced(self, synced: asyncio.Future[None]) -> None:
        if not synced.cancelled():
            synced.exception()  # one behind a failed one is not asked any more
        try:
            self._end_commits()
        except PenstockError as error:
            self._stop(error)
        except Exception as error:
            self._stop(_broken(error))
            raise
        finally:
            self._wake.set()

    def _end_commits(self) -> None:
        """Let those become true that are durable, in their order: none before one that is not."""
        while self._under_way and self.failed is None:
            writing, taken = self._under_way[0]
            took_s = 0.0
            if writing is not None:
                if not writing.synced.done():
                    return
                took_s = self._writer.end(writing)
            self._under_way.popleft()
            self._finish(taken, took_s)

    def _finish(self, taken: OpenCommit, took_s: float) -> None:
        if taken.commit.entries:
            self.commits += 1
            self.write_s += took_s
        try:
            if taken.commit.entries or taken.leases:
                self._committed(taken)
        finally:  # it is durable, whatever happens now
            taken.answer(self._full)
        self._give_room()

    async def _find_room(self) -> None:
        """Have a spare journal file ready, or know that the disk is full."""
        wanted = self._journal.spare_wanted(self._first_bytes())
        if not wanted or self._runtime.now() < self._full_until:
            return
        try:
            await self._runtime.write(self._journal.prepare, wanted)
            self._full = None
        except DiskRefused as error:
            self._full = error
            self._full_until = self._runtime.now() + FULL_RETRY_S
            asyncio.get_running_loop().call_later(FULL_RETRY_S, self.hurry)

    def _first_bytes(self) -> int:
        """Room that the next commit needs at the least."""
        return self._pending.first_size(self._busy()) + max(
            CONTROL_ROOM_BYTES, self._source.news_bytes()
        )

    def _take(self, now_us: int) -> OpenCommit:
        commit = self._journal.begin(now_us, self._first_bytes())
        taken = OpenCommit(commit)
        taken.drained = self._journal.fits(commit, self._source.news_bytes(), reserve=True)
        if taken.drained:
            self._drain(taken)
        if self._pending:
            before = len(commit)
            chosen = self._pending.take(
                self._settings.journal.commit_max_bytes,
                self._settings.journal.tenant_quantum_bytes,
                lambda each, size: taken.fits(self._journal, each, size, self._source.news_bytes),
                self._busy(),
            )
            if not chosen and len(commit) == before and self._full is not None:
                refuse(self._pending.drop(), self._full)
                self._give_room()
            taken.submissions = chosen
            try:
                taken.placed = self._layout.lay(self._checked(chosen), commit, now_us)
                self._lease_at_once(taken)
            except Exception as error:
                # Some have their offsets already: nothing after them can be true any more.
                refuse(chosen, WriterFailed(f"a commit could not be laid out: {error!r}"))
                raise
        return taken

    def _lease_at_once(self, taken: OpenCommit) -> None:
        """Members that wait get leases in the commit of the events themselves, where there is room."""
        self._laid(taken.placed)
        if self._due and self._journal.fits(taken.commit, self._source.news_bytes(), reserve=True):
            self._drain(taken)

    def _drain(self, taken: OpenCommit) -> None:
        self._due = False
        if self._linger is not None:  # what it waited for goes now
            self._linger.cancel()
            self._linger = None
        entries, leases = self._source.drain()
        taken.leases += leases
        if entries:  # made of numbers by the machines: not read back, for there are very many
            taken.commit.add(CONTROL, [encode_entries(entries)])

    def _checked(self, submissions: list[Submission]) -> Iterator[Submission]:
        """Leave out transactions that lost their leases: while they waited, or to one before them."""
        for submission in submissions:
            try:
                if submission.check is not None:
                    submission.check()
            except Exception as error:
                refuse([submission], error)
            else:
                yield submission

    def _give_room(self) -> None:
        if self._room is not None and not self._room.done() and not self._crowded():
            self._room.set_result(None)

    async def _sync_often(self) -> None:
        """`fsync = interval`: acknowledge after the write, sync a little later."""
        interval_s = self._settings.durability.fsync_interval_ms / 1_000
        synced = self._journal.durable
        try:
            while True:
                await asyncio.sleep(interval_s)
                if self._journal.position != synced:
                    synced = self._journal.position
                    await self._runtime.write(self._journal.sync)
        except PenstockError as error:
            self._stop(error)

    # -- the end -------------------------------------------------------------------------------

    def _stop(self, error: PenstockError) -> None:
        if self.failed is None:
            self.failed = error
        refuse(self._pending.drop(), error)
        for _, taken in self._under_way:
            refuse(taken.submissions, error)
            self._flushes += taken.flushes
        self._under_way.clear()
        for waiting in (self._room, *self._flushes):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # its caller sees it, if one still waits
        self._flushes.clear()


def _broken(error: Exception) -> WriterFailed:
    return WriterFailed(f"the commit loop failed: {error!r}. Open the folder again")


class StoredBytes:
    """Keeps the storage gauges of admission.

    >>> from penstock.core.admission import Admission
    >>> from penstock.core.admission import AdmissionLimits
    >>> admission = Admission(AdmissionLimits())
    >>> stored = StoredBytes(admission, {0: {"acme": 500}, 4096: {"acme": 100}}, [])
    >>> stored.rewritten([], [], sealed_to=4096)
    >>> admission.use()["acme"]
    (100, 0)
    """

    def __init__(
        self,
        admission: Admission,
        unsealed: dict[int, dict[str, int]],
        segments: Iterable[SegmentInfo],
    ) -> None:
        self._admission = admission
        self._unsealed = unsealed
        for tenants in unsealed.values():
            for tenant, size in tenants.items():
                admission.stored(tenant, size)
        self._count(segments, 1)

    def committed(self, batch: EventBatch, base: int) -> None:
        """A batch is in the journal file that begins at `base`."""
        size = event_bytes(batch)
        tenants = self._unsealed.get(base)
        if tenants is None:
            tenants = self._unsealed[base] = {}
        tenants[batch.tenant] = tenants.get(batch.tenant, 0) + size
        self._admission.stored(batch.tenant, size)

    def rewritten(
        self, added: Iterable[SegmentInfo], removed: Iterable[SegmentInfo], sealed_to: int | None
    ) -> None:
        """Segments came and went; with `sealed_to`, the journal before it is in those that came."""
        for base in [base for base in self._unsealed if base < (sealed_to or 0)]:
            for tenant, size in self._unsealed.pop(base).items():
                self._admission.stored(tenant, -size)
        self._count(removed, -1)
        self._count(added, 1)

    def _count(self, segments: Iterable[SegmentInfo], sign: int) -> None:
        """Where tenants share a range each is charged for all of it: quotas err on the safe side."""
        for info in segments:
            for each in info.ranges:
                for tenant in each.tenants:
                    self._admission.stored(tenant, sign * each.event_bytes)

"""Maintenance of the folder: seals journal files, merges segments, applies retention, frees space.

`Maintenance` works in the background, one round after another. No caller waits for it; a failure is
kept for `penstock doctor` and tried again. A file that was replaced or expired stays on disk for a
grace time, for readers that have planned with it. Over `retention.max_bytes`, or when the disk is
nearly full, it is removed at once, and such readers look again where the events are.

`SealingBacklog` slows publishers down, gently, when sealing cannot keep up. Below half of
`backlog_max_bytes` nothing happens: bursts run at full speed. From there on publishes are paced
towards the measured rate of the sealer, and at the limit they run at that rate.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.state import INBOX
from penstock.engines.embedded.dead_letters import DEAD_LETTERS
from penstock.engines.embedded.runtime import FairGate, Runtime
from penstock.engines.embedded.schedules import SCHEDULED
from penstock.engines.requests import retention_of
from penstock.log.disk import RealDisk, advice_for
from penstock.log.journal import file_bases, file_name, frames, sealed_batches
from penstock.log.retention import RetentionClock, expired
from penstock.log.sealing import (
    InlineSealer,
    Job,
    JournalInput,
    Sealer,
    SealerProcess,
    SealingResult,
    plan_merge,
)
from penstock.log.segment import SegmentInfo
from penstock.log.side_files import side_path
from penstock.log.snapshot import Fold
from penstock.model.errors import Corrupted, PenstockError, Rejected
from penstock.model.settings import Retention, Settings

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger("penstock.engines")

# At most so many journal bytes in one sealing job, but a whole file at least: the sealer maps them
# into memory.
JOB_BYTES = 256 << 20
# With a bound on the folder, a job takes at most 1 / JOB_SHARE of it, but a journal file at least:
# while the job runs, both the journal and the new segments lie in the folder.
JOB_SHARE = 4
# Between two rounds when nothing wakes it.
ROUND_S = 5.0
# The same while discarded files wait to be removed or a job runs: space may become short meanwhile.
RECLAIM_S = 0.5
# A disk without room for this many journal files is nearly full: the next one and the one behind it.
SHORT_FILES = 2
# After a failure, most often a full disk, wait this long: each attempt reads and packs a whole file.
RETRY_S = 1.0
# Share of the backlog limit that a burst may use before publishers are slowed down.
FREE_SHARE = 0.5
# Assumed until a job was measured, and the least assumed later: a slower sealer is stuck, not slow.
SLOWEST_BYTES_PER_S = 8 << 20
# Shorter waits are added up before a publisher waits: a timer is not finer than this.
LEAST_WAIT_S = 0.005


class Discarded(NamedTuple):
    """A file that only readers may still need that have planned with it."""

    due_s: float
    path: str
    size_bytes: int
    before: Callable[[], None]
    """Called before the file is removed."""


class Maintenance:
    """Seals, merges, applies retention and removes files, in the background."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.problem: str | None = None
        """The last failure; None after a round that succeeds."""
        self.full_topics: dict[str, int] = {}
        """Write-once topics over their own size limit, in bytes: publishes to them are refused."""
        self.shortage_bytes = 0
        """Bytes over the folder's limit that write-once keeps: publishes to such topics are refused."""
        self.bytes_in = 0
        """Bytes that sealing and merging have read."""
        self.bytes_out = 0
        """Bytes that sealing and merging have written."""
        self._engine = engine
        self._settings = engine.settings.sealing
        self._sealer: Sealer | None = None
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # `settle` may be called while `run` is at work
        self._discarded: deque[Discarded] = deque()
        self._discarded_bytes = 0
        self._working_bytes = 0
        """At most so much is being written by the job that runs."""
        self._side = engine.recovered.side
        """Side files by token, with the journal position up to which they are needed."""
        self._clock = RetentionClock(engine.log.manifest.at_us)
        self._looked_at = engine.runtime.now()
        self._letters_expired = {letter.tenant for letter in engine.state.dead.values()}
        """Tenants whose dead letters retention may have deleted; at the start all of them."""

    def _make_sealer(self) -> Sealer:
        disk, runtime = self._engine.disk, self._engine.runtime
        if self._settings.process and isinstance(disk, RealDisk):
            return SealerProcess(disk)
        return InlineSealer(disk, sealed_batches, runtime.read)

    def wake(self) -> None:
        """A journal file was closed."""
        self._wake.set()

    def side_written(self, token: bytes, position: int) -> None:
        """A payload lies in a side file until the journal up to `position` is sealed."""
        self._side[token] = position

    async def run(self) -> None:
        """Work, for as long as the engine lives."""
        while True:
            try:
                busy = await self.round()
                self.problem = None
                pause_s = self._pause_s()
            except (PenstockError, OSError) as error:
                self.problem, busy, pause_s = str(error), False, RETRY_S
                if isinstance(error, OSError):
                    self.problem += f": {advice_for(error)}"
            if not busy:
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                    self._wake.clear()
                except TimeoutError:
                    continue

    def _pause_s(self) -> float:
        if not self._discarded:
            return ROUND_S
        return min(RECLAIM_S, max(0.0, self._discarded[0].due_s - self._engine.runtime.now()))

    async def round(self) -> bool:
        """One piece of work; True when there may be more."""
        async with self._turn:
            return await self._round()

    async def _round(self) -> bool:
        # First the steps that need no room and free some: on a full disk the others fail.
        await self._remove_discarded()
        await self._retain()
        if self._engine.audit.mark() is not None:
            await self._engine.runtime.read(self._apply, [], [], None)
        if not self._settings.enabled:
            return False
        return await self._seal() or await self._merge()

    async def settle(self) -> None:
        """Seal everything that is closed and apply retention; for tests and `penstock doctor`."""
        while await self.round():
            pass

    # -- sealing -------------------------------------------------------------------------------

    def _closed_files(self) -> list[JournalInput]:
        engine = self._engine
        bases = [base for base in file_bases(engine.disk) if base <= engine.journal.base]
        ends = [*bases[1:], engine.journal.base]
        sealed_to = engine.log.manifest.sealed_to
        closed = [
            JournalInput(base, end)
            for base, end in zip(bases, ends, strict=False)
            if sealed_to <= base < end <= engine.audit.position
        ]
        engine.sealing_backlog.backlog_bytes = sum(each.end - each.base for each in closed)
        return closed

    async def _seal(self) -> bool:
        chosen: list[JournalInput] = []
        size = 0
        for each in self._closed_files():
            if chosen and size + each.end - each.base > self._job_bytes:
                break
            chosen.append(each)
            size += each.end - each.base
        if not chosen:
            return False
        engine = self._engine
        began = engine.runtime.now()
        for each in chosen:
            await engine.runtime.read(self._fold, each.base, each.end)
        job = Job(first_id=engine.log.manifest.next_id, settings=self._settings, journal=chosen)
        self._working_bytes = size
        try:
            await self._rewrite(job)
        finally:
            self._working_bytes = 0
        sealed_to = chosen[-1].end
        engine.log.sealed(sealed_to)
        engine.sealing_backlog.sealed(size, engine.runtime.now() - began)
        for each in chosen:
            forget = partial(engine.log.journal.forget, each.base)
            self._discard(file_name(each.base), each.end - each.base, forget)
        for token in [token for token, position in self._side.items() if position < sealed_to]:
            del self._side[token]
            self._discard(side_path(token), 0)
        return True

    def _fold(self, base: int, end: int) -> None:
        """Advance the state snapshot over one closed journal file."""
        engine = self._engine
        fold = Fold.load(engine.disk, engine.settings.dedup)
        if fold.position >= end:
            return
        file = engine.disk.open(file_name(base))
        try:
            view = file.read(0, end - base)
            for frame in frames(view, base, base, end):
                if frame.position >= fold.position:
                    fold.take(frame)
        finally:
            file.close()
        if fold.position != end:
            raise Corrupted(
                f"{file_name(base)} cannot be read at {fold.position}; it was not sealed and nothing "
                "was deleted. Restore it from a copy",
                path=file_name(base),
                position=fold.position,
            )
        fold.save(engine.disk)

    async def _merge(self) -> bool:
        job = plan_merge(self._engine.log.manifest, self._settings)
        if job is None:
            return False
        await self._rewrite(job)
        return True

    async def _rewrite(self, job: Job) -> None:
        engine = self._engine
        if self._sealer is None:
            self._sealer = self._make_sealer()
        result = await self._beside(self._sealer.run(job), reclaim=bool(job.journal))
        manifest = engine.log.manifest
        replaced = [info for info in manifest.segments() if info.id in set(result.removed)]
        await engine.runtime.read(self._apply, result.added, result.removed, result.sealed_to)
        engine.stored.rewritten(result.added, replaced, result.sealed_to)
        self.bytes_in += result.bytes_in
        self.bytes_out += result.bytes_out
        for info in replaced:
            self._discard_segment(info)

    async def _beside(
        self, work: Coroutine[Any, Any, SealingResult], *, reclaim: bool
    ) -> SealingResult:
        """Wait for a job, and keep the folder within its bound meanwhile.

        Retention stops while segments are merged: it would delete the ones that are being read.
        """
        job = asyncio.ensure_future(work)
        try:
            while reclaim and not job.done():
                await self._woken_or(job)
                if not job.done():
                    await self._remove_discarded()
                    await self._retain()
            return await job
        finally:
            job.cancel()
            await asyncio.wait({job})  # it has a process to stop

    async def _woken_or(self, job: asyncio.Future[SealingResult]) -> None:
        """Wait until a journal file was closed, the job is done, or RECLAIM_S have passed."""
        woken = asyncio.ensure_future(self._wake.wait())
        either: set[asyncio.Future[Any]] = {job, woken}
        try:
            await asyncio.wait(either, timeout=RECLAIM_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        self._wake.clear()

    def _apply(self, added: list[SegmentInfo], removed: list[int], sealed_to: int | None) -> None:
        self._engine.log.manifest.apply(
            added,
            removed,
            sealed_to=sealed_to,
            at_us=self._clock.now_us,
            audit=self._engine.audit.mark(),
        )

    def note_audit(self) -> None:
        """Write to the manifest how far the audit chain reaches, before the folder is unlocked."""
        if self._engine.audit.mark() is None:
            return
        try:
            self._apply([], [], None)
        except (OSError, PenstockError) as error:  # it is written after the next start
            log.warning("how far the audit chain reaches could not be noted: %s", error)

    # -- retention -----------------------------------------------------------------------------

    def retention_of(self, topic: str) -> Retention:
        """The retention of one topic: its own settings, else the general ones."""
        general = self._engine.settings.retention
        spec = self._engine.state.topics.get(topic)
        if spec is None:
            gone = topic in self._engine.state.deleted or topic.startswith(INBOX)
            return Retention(age_s=0.0) if gone else general
        return retention_of(spec, general)

    async def _retain(self) -> None:
        engine = self._engine
        now = engine.runtime.now()
        now_us = self._clock.advance(engine.runtime.wall_us(), now - self._looked_at)
        self._looked_at = now
        verdict = expired(
            engine.log.manifest.segments(),
            self.retention_of,
            folder=engine.settings.retention,
            now_us=now_us,
            protected=self._waiting_segments(),
            other_bytes=self._unsealed_bytes() + self._working_bytes,
        )
        self.full_topics = verdict.full_topics
        if not self._working_bytes:  # new segments of a job soon take the place of journal files
            self.shortage_bytes = verdict.shortage_bytes
        if verdict.segments:
            ids = [info.id for info in verdict.segments]
            firsts = {place: engine.log.bounds(*place)[0] for place in verdict.starts}
            await engine.runtime.read(self._apply, [], ids, None)
            engine.unread.retained(firsts)
            engine.stored.rewritten([], verdict.segments, None)
            for info in verdict.segments:
                self._discard_segment(info)
            await self._remove_discarded()
            self._letters_expired |= {
                topic.removeprefix(DEAD_LETTERS)
                for topic, _ in verdict.starts
                if topic.startswith(DEAD_LETTERS)
            }
        if self._letters_expired:
            with suppress(Rejected):  # the disk is full: the next round tries again
                await engine.dead_letter_store.forget_expired(self._letters_expired)
                self._letters_expired.clear()

    def _waiting_segments(self) -> set[int]:
        """Segments with delayed events that are not due yet: retention must keep them."""
        sealed = self._engine.log.manifest.ranges(SCHEDULED, 0)
        lowest = self._engine.state.schedule.delayed.lowest() if sealed else None
        if lowest is None:
            return set()
        return {info.id for info, each in sealed if each.last_offset >= lowest}

    # -- removing files ------------------------------------------------------------------------

    def _discard(
        self, path: str, size_bytes: int, before: Callable[[], None] = lambda: None
    ) -> None:
        due = self._engine.runtime.now() + self._settings.grace_s
        self._discarded.append(Discarded(due, path, size_bytes, before))
        self._discarded_bytes += size_bytes

    def _discard_segment(self, info: SegmentInfo) -> None:
        forget = partial(self._engine.log.forget_segment, info.id)
        self._discard(info.path, info.size_bytes, forget)

    def _unsealed_bytes(self) -> int:
        return self._engine.journal.position - self._engine.log.manifest.sealed_to

    @property
    def _job_bytes(self) -> int:
        most = self._engine.settings.retention.max_bytes
        if most is None:
            return JOB_BYTES
        return max(self._engine.settings.journal.file_bytes, min(JOB_BYTES, most // JOB_SHARE))

    def _short_of_space(self) -> bool:
        """Whether the folder is over its bound, or the disk is about to be full."""
        engine, most = self._engine, self._engine.settings.retention.max_bytes
        used = engine.log.manifest.total_bytes + self._unsealed_bytes() + self._discarded_bytes
        if most is not None and used + self._working_bytes > most:
            return True
        return engine.disk.free_bytes() < SHORT_FILES * engine.settings.journal.file_bytes

    async def _remove_discarded(self) -> None:
        """Remove files whose grace time is over, or all discarded files when space is short.

        A reader whose file is gone finds out where the events are now, and reads them there.
        """
        if not self._discarded:
            return
        now = self._engine.runtime.now()
        at_once = self._short_of_space()
        due: list[Discarded] = []
        while self._discarded and (at_once or self._discarded[0].due_s <= now):
            due.append(self._discarded.popleft())
            self._discarded_bytes -= due[-1].size_bytes
        if due:
            await self._engine.runtime.read(self._remove, due)

    def _remove(self, due: list[Discarded]) -> None:
        disk = self._engine.disk
        paths = [each.path for each in due]
        for each in due:
            each.before()
        for path in paths:
            if disk.exists(path):
                disk.remove(path)
        for folder in {path.rpartition("/")[0] for path in paths}:
            disk.sync_dir(folder)

    def sweep_orphans(self) -> None:
        """Remove files that a crash left: none holds acknowledged events that are not elsewhere."""
        engine = self._engine
        engine.log.manifest.remove_orphans()
        kept = {token.hex() for token in self._side}
        for name in engine.disk.list("side"):
            if name not in kept and bytes.fromhex(name.partition(".")[0]) not in self._side:
                engine.disk.remove(f"side/{name}")
        sealed_to = min(engine.log.manifest.sealed_to, engine.recovered.snapshot_at)
        bases = file_bases(engine.disk)
        for base, following in pairwise(bases):
            if following <= sealed_to:
                engine.disk.remove(file_name(base))

    async def close(self) -> None:
        """Stop the sealing process."""
        if self._sealer is not None:
            await self._sealer.close()


def _limit_of(settings: Settings) -> int | None:
    """Most bytes that may wait to be sealed: half of what the folder may hold, where that is bounded."""
    sealing, most = settings.sealing, settings.retention.max_bytes
    if not sealing.enabled:
        return None
    if most is None:
        return sealing.backlog_max_bytes
    return min(sealing.backlog_max_bytes, max(2 * settings.journal.file_bytes, most // 2))


class SealingBacklog:
    """How far sealing is behind, and how long publishers wait for it."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self.backlog_bytes = 0
        """Closed journal files that are not sealed yet."""
        self._runtime = runtime
        self._limit = _limit_of(settings)
        self.free_bytes = math.inf if self._limit is None else FREE_SHARE * self._limit
        """The backlog at which publishers begin to be slowed down."""
        self._bytes_per_s = float(SLOWEST_BYTES_PER_S)
        self._paced_to = 0.0
        self.waiting = FairGate()
        """Publishers that are slowed down go on in the order they arrived."""

    def sealed(self, size: int, seconds: float) -> None:
        """A job is done: the backlog shrinks, and the sealer's speed is known better."""
        self.backlog_bytes = max(0, self.backlog_bytes - size)
        if seconds > 0:
            self._bytes_per_s = max(size / seconds, SLOWEST_BYTES_PER_S)

    def pressure(self) -> float:
        """0 while there is room for a burst, 1 at the limit, more beyond it."""
        if self._limit is None:
            return 0.0
        return max(0.0, (self.backlog_bytes / self._limit - FREE_SHARE) / (1 - FREE_SHARE))

    async def wait(self, size: int) -> None:
        """Wait as long as publishing `size` bytes costs; called by publishers while sealing is behind."""
        async with self.waiting:
            now = self._runtime.now()
            self._paced_to = max(self._paced_to, now) + self.pressure() * size / self._bytes_per_s
            if self._paced_to - now > LEAST_WAIT_S:
                await asyncio.sleep(self._paced_to - now)

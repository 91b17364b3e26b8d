"""Mutants: the production code with one guarantee broken on purpose, to see the simulator notice.

Each mutant replaces a function of the engine while a seed runs. A mutant that survives its seeds
means that an invariant, or the fault that would show it, is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

import penstock.log.frame as frame_module
import penstock.log.side as side_module
from penstock.core.delivery import QueueGroup
from penstock.core.entry import Retried
from penstock.core.holdback import KeyGate
from penstock.core.lease import EXPIRED, FENCED, Lane, Lease, Run
from penstock.core.schedule import Delayed
from penstock.engines import housekeeping
from penstock.engines.audittrail import AuditTrail
from penstock.engines.commitloop import CommitLoop, Taken
from penstock.engines.layout import Layout, Placed
from penstock.engines.logreader import LogReader
from penstock.log.journal import Commit, Journal, file_bases, file_name
from penstock.log.manifest import Manifest
from penstock.log.recovery import Recovery
from penstock.log.snapshot import DEDUP, Fold

Broken = Callable[[Any], Any]


class Mutant(NamedTuple):
    """One broken guarantee."""

    name: str
    promise: str
    owner: Any
    attribute: str
    broken: Broken
    """From the original function to the broken one."""
    within: int = 10
    """Seeds in which it must be found."""

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Break the guarantee, for the length of a block."""
        original = self.owner.__dict__[self.attribute]
        function = (
            original.__func__ if isinstance(original, staticmethod | classmethod) else original
        )
        setattr(self.owner, self.attribute, self.broken(function))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


class _Deaf:
    """A file or disk that forgets to sync, and otherwise does what the real one does."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def sync(self) -> None:
        """Nothing becomes durable."""

    def sync_dir(self, folder: str) -> None:
        """No name becomes durable."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _skip_fsync(original: Any) -> Any:
    def write(self: Journal, commit: Commit, *, sync: bool) -> None:
        original(self, commit, sync=False)
        self.durable = commit.end
        self._watermark.publish(commit.end, self.epoch)

    return write


def _early_watermark(original: Any) -> Any:
    def write(self: Journal, commit: Commit, *, sync: bool) -> None:
        self._watermark.publish(commit.end, self.epoch)
        original(self, commit, sync=sync)

    return write


def _deaf_roll(original: Any) -> Any:
    def roll(self: Journal, base: int) -> None:
        disk, self._disk = self._disk, _Deaf(self._disk)
        try:
            original(self, base)
        finally:
            self._disk = disk

    return roll


def _ignore_failed_fsync(original: Any) -> Any:
    def write(self: Journal, commit: Commit, *, sync: bool) -> None:
        try:
            original(self, commit, sync=sync)
        except Exception:
            self.failed = None

    return write


def _deaf_manifest(original: Any) -> Any:
    def append(self: Manifest, frame: bytes) -> None:
        file = self._file
        self._file = _Deaf(file)
        try:
            original(self, frame)
        finally:
            self._file = file

    return append


def _early_ack(original: Any) -> Any:
    def take(self: CommitLoop) -> Taken:
        taken: Taken = original(self)
        self._answer(taken.submissions)
        return taken

    return take


def _early_delivery(original: Any) -> Any:
    def take(self: CommitLoop) -> Taken:
        taken: Taken = original(self)
        leases, taken.leases = taken.leases, []
        self._source.deliver(leases)  # type: ignore[attr-defined]
        return taken

    return take


def _drop_dedup(original: Any) -> Any:
    def pieces(self: Fold) -> Iterator[Any]:
        return (piece for piece in original(self) if piece.kind != DEDUP)

    return pieces


def _forget_attempt(original: Any) -> Any:
    def lease(self: QueueGroup, run: Run, member: Any, now: float) -> Lease:
        made: Lease = original(self, run, member, now)
        entry = self._entries.pop()
        # The place is kept, or nothing would be recovered at all; only the count is lost.
        lane = run.lane
        self._entries.append(
            Retried(self.name, lane.topic, lane.partition, run.start, run.count, run.made, 0)
        )
        del entry
        return made

    return lease


def _accept(state: int) -> Broken:
    def broken(original: Any) -> Any:
        def ack(self: QueueGroup, lease: Lease, index: int, now: float) -> None:
            if lease.states[index] != state:
                original(self, lease, index, now)

        return ack

    return broken


def _filler(base: int) -> bytes:
    header = {"format": 1, "epoch": 0, "base": base, "created_us": 0, "filler": bytes(16 * 1024)}
    return msgspec.msgpack.encode(header)


def _half_transaction(original: Any) -> Any:
    def add(
        self: Layout,
        bodies: list[Any],
        laid: list[Any],
        entries: list[Any],
        commit: Commit,
        placed: list[Placed],
    ) -> int:
        position = commit.end
        halves = len(bodies) + bool(entries) > 1
        for body, pair in zip(bodies, laid, strict=True):
            position = original(self, [body], [pair], [], commit, placed)
            if halves:
                # Room between the halves, as a second commit would put there: a crash that tears
                # the write leaves one of them.
                commit.add(frame_module.FILE_HEADER, [_filler(commit.end)])
        if entries:
            position = original(self, [], [], entries, commit, placed)
        return position

    return add


def _open_gate(original: Any) -> Any:
    def offer(self: KeyGate, lane: Lane, start: int, made: int, keys: Sequence[Any]) -> list[Run]:
        return [Run(lane, start, len(keys), made)]

    return offer


def _at_once(original: Any) -> Any:
    def again(self: QueueGroup, run: Run, now: float, delay_s: float) -> None:
        original(self, run, now, 0.0)

    return again


def _lose_returned(original: Any) -> Any:
    def leave(self: QueueGroup, member_id: str, now: float) -> None:
        original(self, member_id, now)
        self._retries.clear()

    return leave


def _seal_drops_last(original: Any) -> Any:
    def batches(disk: Any, base: int, end: int) -> Iterator[Any]:
        previous = None
        for batch in original(disk, base, end):
            if previous is not None:
                yield previous
            previous = batch
        if previous is not None and previous.count > 1:
            yield previous.slice(0, previous.count - 1)

    return batches


def _reclaim_early(original: Any) -> Any:
    def discard(self: Any, path: str, *rest: Any) -> None:
        original(self, path, *rest)
        if path.startswith("journal/") and self._engine.disk.exists(path):
            following = file_bases(self._engine.disk)
            if len(following) > 1:
                self._engine.disk.remove(file_name(following[1]))

    return discard


def _no_checksum(original: Any) -> Any:
    def read_frame(view: memoryview, base: int, position: int) -> Any:
        at = position - base
        if at < 0 or at + frame_module.HEAD.size > len(view):
            return None
        length, _, stated, durable, epoch, kind = frame_module.HEAD.unpack_from(view, at)
        if stated != position or kind not in frame_module.KINDS:
            return None
        body = view[at + frame_module.HEAD.size : at + frame_module.HEAD.size + length]
        return frame_module.Frame(position, kind, body, durable, epoch)

    return read_frame


def _nothing(original: Any) -> Any:
    def nothing(self: Any, *rest: Any) -> None:
        return None

    return nothing


def _later(original: Any) -> Any:
    async def nothing(self: Any, *rest: Any) -> None:
        return None

    return nothing


def _unsynced_side(original: Any) -> Any:
    def write_file(disk: Any, path: str, parts: Any) -> None:
        file = disk.open(path, create=True)
        file.append(parts)
        file.close()
        disk.sync_dir(path.rpartition("/")[0])

    return write_file


def _too_early(original: Any) -> Any:
    def due(self: Delayed, now_us: int, limit: int | None = None) -> list[int]:
        found: list[int] = original(self, now_us + 300_000, limit)
        return found

    return due


MUTANTS = (
    Mutant("skip-fsync", "what was acknowledged is durable", Journal, "write", _skip_fsync),
    Mutant("early-ack", "a publish returns after the commit", CommitLoop, "_take", _early_ack),
    Mutant("early-watermark", "readers see durable events only", Journal, "write", _early_watermark),
    Mutant("drop-dedup", "a token is remembered over restarts", Fold, "_pieces", _drop_dedup),
    Mutant("forget-attempt", "an attempt is counted before it is made", QueueGroup, "_lease", _forget_attempt),
    Mutant("accept-expired", "an expired lease settles nothing", QueueGroup, "ack", _accept(EXPIRED)),
    Mutant("accept-fenced", "a lease from before a reset settles nothing", QueueGroup, "ack", _accept(FENCED), 20),
    Mutant("half-transaction", "a transaction is all or nothing", Layout, "_add", _half_transaction),
    Mutant("skip-name-sync", "a new journal file's name is durable", Journal, "_roll", _deaf_roll),
    Mutant("skip-manifest-sync", "a seal is durable before the journal goes", Manifest, "_append", _deaf_manifest),
    Mutant("skip-side-sync", "a large payload is durable before its entry", side_module, "write_file", _unsynced_side),
    Mutant("ignore-failed-fsync", "a failed fsync is fatal to the writer", Journal, "write", _ignore_failed_fsync),
    Mutant("early-delivery", "a lease is durable before the event goes out", CommitLoop, "_take", _early_delivery),
    Mutant("open-gate", "a key's events go out one at a time", KeyGate, "offer", _open_gate),
    Mutant("retry-at-once", "a retry waits for its step", QueueGroup, "_again", _at_once),
    Mutant("lose-returned", "what a consumer leaves behind comes again", QueueGroup, "leave", _lose_returned),
    Mutant("seal-drops-last", "sealing keeps every event", housekeeping, "sealed_batches", _seal_drops_last),
    Mutant("reclaim-too-much", "only sealed journal files are removed", housekeeping.Housekeeper, "_discard", _reclaim_early),
    Mutant("no-checksum", "a damaged frame is not served", frame_module, "read_frame", _no_checksum),
    Mutant("ignore-hole", "a hole is refused", Recovery, "_check_tail", _nothing, 20),
    Mutant("skip-audit", "every action is in the audit chain", AuditTrail, "committed", _nothing),
    Mutant("lose-commit", "a committed cursor is durable", LogReader, "commit", _later),
    Mutant("too-early", "a delayed event waits for its time", Delayed, "due", _too_early),
)  # fmt: skip
"""All mutants; issue 2 names the first seven."""


def named(name: str) -> Mutant:
    """The mutant of a name."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)

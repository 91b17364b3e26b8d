"""Mutants of the log: files that are not synced, sealed or checked as they should be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import penstock.log.journal as frame_module
import penstock.log.side_files as side_module
from penstock.engines.embedded import maintenance as housekeeping
from penstock.engines.embedded.commit import CommitLoop
from penstock.engines.embedded.runtime import Runtime, Writer, Writing
from penstock.log.disk import File
from penstock.log.journal import Commit, Journal, file_bases, file_name
from penstock.log.manifest import Manifest
from penstock.log.recovery import Recovery
from penstock.log.snapshot import DEDUP, Fold
from penstock.testing.simulation.mutant import Deaf, Mutant
from penstock.testing.simulation.world import SimRuntime


def _skip_fsync(original: Any) -> Any:
    def write(self: Journal, commit: Commit, *, sync: bool) -> None:
        original(self, commit, sync=False)
        self.durable = commit.end
        self._watermark.publish(commit.end, self.epoch)

    return write


def _skip_kernel_sync(original: Any) -> Any:
    def begin(self: Writer, commit: Commit) -> Writing:
        self._journal.write(commit, sync=False)
        synced = asyncio.get_running_loop().create_future()
        synced.set_result(None)
        descriptor = self._idle()
        assert descriptor is not None
        self._syncing.add(descriptor)
        return Writing(commit, descriptor, synced, self._runtime.stopwatch(), 0.0)

    return begin


def _ignore_failed_kernel_sync(original: Any) -> Any:
    async def sync(self: Runtime, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            await original(self, descriptor)

    return sync


def _overtake(original: Any) -> Any:
    def end_commits(self: CommitLoop) -> None:
        for each in list(self._under_way):
            writing, taken = each
            if writing is None or writing.synced.done():
                self._under_way.remove(each)
                self._finish(taken, self._writer.end(writing) if writing is not None else 0.0)

    return end_commits


def _early_watermark(original: Any) -> Any:
    def write(self: Journal, commit: Commit, *, sync: bool) -> None:
        self._watermark.publish(commit.end, self.epoch)
        original(self, commit, sync=sync)

    return write


def _deaf_roll(original: Any) -> Any:
    def roll(self: Journal, base: int) -> None:
        disk, self._disk = self._disk, Deaf(self._disk)
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
        self._file = Deaf(file)
        try:
            original(self, frame)
        finally:
            self._file = file

    return append


def _drop_dedup(original: Any) -> Any:
    def pieces(self: Fold) -> Iterator[Any]:
        return (piece for piece in original(self) if piece.kind != DEDUP)

    return pieces


def _seal_drops_last(original: Any) -> Any:
    def batches(disk: Any, base: int, end: int) -> Iterator[Any]:
        previous = None
        for batch in original(disk, base, end):
            if previous is not None:
                yield previous
            previous = batch
        if previous is not None and previous.events > 1:
            kept = previous.read().slice(0, previous.events - 1)
            yield previous._replace(events=kept.count, decode=lambda at: kept)

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
        return frame_module.JournalFrame(position, kind, body, durable, epoch)

    return read_frame


def _unsynced_side(original: Any) -> Any:
    def write_file(disk: Any, path: str, parts: Any, *, paced: bool = False) -> None:
        file = disk.open(path, create=True)
        file.append(list(parts))
        file.close()
        disk.sync_dir(path.rpartition("/")[0])

    return write_file


def _ignore_hole(original: Any) -> Any:
    def check_tail(self: Recovery, base: int, file: File, end: int) -> None:
        self.watermark = self._promised = 0

    return check_tail


STORAGE_MUTANTS = (
    Mutant("skip-fsync", "what was acknowledged is durable", Journal, "write", _skip_fsync),
    Mutant("skip-kernel-sync", "what the kernel syncs is acknowledged when it has", Writer, "begin", _skip_kernel_sync),
    Mutant("ignore-failed-kernel-sync", "a failed sync of the kernel's is fatal too", SimRuntime, "sync", _ignore_failed_kernel_sync),
    Mutant("overtake", "a commit becomes true behind those before it", CommitLoop, "_end_commits", _overtake),
    Mutant("early-watermark", "readers see durable events only", Journal, "write", _early_watermark),
    Mutant("drop-dedup", "a token is remembered over restarts", Fold, "_pieces", _drop_dedup),
    Mutant("skip-name-sync", "a new journal file's name is durable", Journal, "_roll", _deaf_roll),
    Mutant("skip-manifest-sync", "a seal is durable before the journal goes", Manifest, "_append", _deaf_manifest),
    Mutant("skip-side-sync", "a large payload is durable before its entry", side_module, "write_file", _unsynced_side),
    Mutant("ignore-failed-fsync", "a failed fsync is fatal to the writer", Journal, "write", _ignore_failed_fsync),
    Mutant("seal-drops-last", "sealing keeps every event", housekeeping, "sealed_batches", _seal_drops_last),
    Mutant("reclaim-too-much", "only sealed journal files are removed", housekeeping.Maintenance, "_discard", _reclaim_early),
    Mutant("no-checksum", "a damaged frame is not served", frame_module, "read_frame", _no_checksum),
    Mutant("ignore-hole", "a hole is refused", Recovery, "_check_tail", _ignore_hole, 20),
)  # fmt: skip

"""Checks of a data folder and the disk below it; part of penstock.cli.checkup."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.checkup import Check
from penstock.cli.output import moment
from penstock.model.errors import FolderLocked, NotADataFolder, StorageError, UnreadableEntry
from penstock.model.quantity import show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.log.recovery import Recovered
    from penstock.model.settings import Settings

SYNCS = 200  # enough for a p99, over in a blink on any disk worth using
SYNC_TIME_S = 3.0  # a slow disk gets fewer: the doctor is not there to wear it out
LEAST_SYNCS = 5
SYNC_BYTES = 4096  # about one small commit
SLOW_SYNC_MS = 20.0  # 50 commits a second: a spinning disk, or one shared with somebody busy
SLOW_TAIL_MS = 200.0  # one publish in a hundred waits this long
FAST_SYNC_MS = 0.02  # no storage acknowledges in 20 us: memory, or a disk that promises too much
LOW_SPACE = 0.05  # of the device
LOW_FILES = 1_000  # names left on the device: journal files and segments take one each
CLOCK_SLACK_US = 1_000_000  # between two machines or after a small correction


def check_place(folder: Path) -> Check:
    """Whether a broker could have its data here; nothing is left behind."""
    if not folder.exists():
        parent = next(each for each in folder.absolute().parents if each.exists())
        _require_folder(parent)
        _require_access(parent)
        _require_room_for_files(parent)
        return Check("folder", "ok", f"{folder} will be made")
    _require_folder(folder)
    _require_access(folder)
    return Check("folder", "ok", str(folder.resolve()))


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADataFolder(f"{folder} is no folder. Name another place", path=str(folder))


def _require_access(folder: Path) -> None:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(
            f"{folder} cannot be written by user {os.getuid()}. Change its owner or its permissions, "
            "or name another folder; nothing was changed",
            path=str(folder),
        )


def _require_room_for_files(folder: Path) -> None:
    """Some places, such as /proc, look writable and take no file; only trying one tells."""
    try:
        tempfile.TemporaryFile(dir=folder).close()  # it never has a name
    except OSError as error:
        raise StorageError(
            f"nothing can be made in {folder}: {error.strerror}. Name a folder on a disk; nothing "
            "was changed",
            path=str(folder),
        ) from None


def check_free(folder: Path) -> Check:
    """Whether nobody else writes the folder."""
    from penstock.server.ports import writer_of

    holder = writer_of(folder)
    if holder is not None:
        raise FolderLocked(
            f"{folder} is being written by {holder}. Stop that process, or choose another folder",
            path=str(folder),
            holder=holder,
        )
    return Check("lock", "ok", "no writer")


def check_lock(folder: Path) -> Check:
    """Who writes the folder; having a writer is in order."""
    from penstock.server.ports import writer_of

    holder = writer_of(folder)
    if holder is None:
        return Check("lock", "ok", "no writer")
    return Check("lock", "ok", f"written by {holder}", "commands that change something must wait for it; reading works")  # fmt: skip


def check_space(folder: Path, settings: Settings) -> Check:
    """Room for more events."""
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
    needed = settings.journal.file_bytes + settings.journal.reserve_bytes
    if usage.free < needed:
        return Check("space", "fail", found, f"a journal file needs {show(settings.journal.file_bytes, 'bytes')}: make room, or lower retention or journal.file_bytes", "rejected.disk-full")  # fmt: skip
    if files.f_files and files.f_favail < LOW_FILES:
        return Check("space", "warn", f"{found}; room for {files.f_favail} more files", "remove small files from this device: it has run out of inodes, not of bytes")  # fmt: skip
    if usage.free < usage.total * LOW_SPACE:
        return Check("space", "warn", found, "make room, or lower retention.max_bytes")
    return Check("space", "ok", found)


def check_sync(folder: Path) -> Check:
    """Whether the folder can be written, and how fast its disk makes things durable."""
    try:
        times_ms = measure_syncs(folder)
    except OSError as error:
        return Check("disk", "fail", f"cannot write: {error}", "check owner and permissions of the folder, and that the disk is not full or read-only", "storage")  # fmt: skip
    return judge_syncs(times_ms)


def measure_syncs(folder: Path) -> list[float]:
    """How long fdatasync of one small write takes, in milliseconds, several times."""
    times_ms: list[float] = []
    until = time.perf_counter() + SYNC_TIME_S
    with tempfile.TemporaryFile(dir=folder) as file:
        while len(times_ms) < LEAST_SYNCS or (
            len(times_ms) < SYNCS and time.perf_counter() < until
        ):
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times_ms.append((time.perf_counter() - began) * 1000)
    return times_ms


def judge_syncs(times_ms: list[float]) -> Check:
    """What the measured times mean for publishing."""
    ordered = sorted(times_ms)
    middle, tail = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    found = f"writable; fdatasync {middle:.3f} ms (median of {len(ordered)}), p99 {tail:.3f} ms"
    if middle > SLOW_SYNC_MS:
        return Check("disk", "warn", found, "each commit waits this long: use a faster disk, publish in batches, or see durability.fsync")  # fmt: skip
    if tail > SLOW_TAIL_MS:
        return Check("disk", "warn", found, "one commit in a hundred stalls: look for others who use this disk, or for one that is failing (its log, SMART)")  # fmt: skip
    if middle < FAST_SYNC_MS:
        return Check("disk", "ok", found, "note: too fast to be storage. Events do not survive a power failure on a memory file system or behind a write cache without a battery")  # fmt: skip
    return Check("disk", "ok", found)


def check_format(folder: Path, *, may_be_new: bool = False) -> Check:
    """Whether the folder is one of ours, in a format we read; `may_be_new` takes an empty one too."""
    from penstock.log.disk import RealDisk
    from penstock.log.journal import FORMAT
    from penstock.log.recovery import ABOUT, FOLDERS, STAGING, check_folder

    if may_be_new and (
        not folder.exists() or set(os.listdir(folder)) <= {"lock", STAGING, *FOLDERS}
    ):
        return Check("format", "ok", f"new: format {FORMAT} will be written")
    check_folder(RealDisk(folder), write=False)
    text = (folder / ABOUT).read_text().strip()
    if int(json.loads(text)["format"]) < FORMAT:
        return Check("format", "warn", f"{text}, older than format {FORMAT} of this Penstock", "copy the folder before this Penstock writes to it: an older one may not read it then")  # fmt: skip
    return Check("format", "ok", text)


def check_segments(folder: Path, *, deep: bool) -> Check:
    """The manifest against the files: there and of the right size; `deep` hashes every byte."""
    from penstock.log.disk import RealDisk
    from penstock.log.manifest import Manifest
    from penstock.log.segment_reader import verify_content, verify_segment

    disk = RealDisk(folder)
    manifest = Manifest.load(disk)
    try:
        segments = list(manifest.segments())
        for info in segments:
            if deep:
                verify_segment(disk, info)
                verify_content(disk, info)
                continue
            path = folder / info.path
            if not path.exists() or path.stat().st_size != info.size_bytes:
                verify_segment(disk, info)  # says exactly what is wrong
    finally:
        manifest.close()
    how = "every byte hashed" if deep else "present, sizes right; --deep hashes every byte"
    return Check("segments", "ok", f"{len(segments)} files, {manifest.total_bytes:,} bytes, {how}")


def check_audit_end(folder: Path) -> Check:
    """Whether the audit log can be gone on with: its key, its head and its newest file."""
    from penstock.log.auditrecovery import rehearse
    from penstock.log.disk import RealDisk

    found = rehearse(RealDisk(folder))
    return Check("audit", "ok", f"{found.chain.sequence} records, key and head fit")


def check_routes(folder: Path) -> Check:
    """Whether the route catalogue can be read."""
    from penstock.core.catalogue import RouteCatalogue
    from penstock.engines.embedded import ROUTES
    from penstock.log.disk import RealDisk, read_file

    disk = RealDisk(folder)
    routes = RouteCatalogue()
    if disk.exists(ROUTES):
        routes = RouteCatalogue.decode(read_file(disk, ROUTES))
    return Check("routes", "ok", f"{len(routes)} routes")


def check_audit(folder: Path) -> Check:
    """The audit chain, link by link, and whether a writer can go on with it."""
    from penstock.log.auditreader import AuditReader
    from penstock.log.disk import RealDisk

    verdict = AuditReader(RealDisk(folder)).verify()
    if verdict.ok:
        check_audit_end(folder)
        return Check("audit", "ok", f"{verdict.records} records, chain whole")
    broken = verdict.broken
    found = "the chain is broken" if broken is None else f"broken at record {broken.sequence} in {broken.file or 'the chain'}: {broken.explanation}"  # fmt: skip
    return Check("audit", "fail", found, "compare with an export (`penstock audit export`) and find out who changed it")  # fmt: skip


def unreadable(folder: Path, settings: Settings) -> Iterator[Check]:
    """Every journal entry that a start could not read, and what a repair would do with it."""
    from penstock.log.disk import RealDisk
    from penstock.log.repair import unreadable_entries

    for each in unreadable_entries(RealDisk(folder), settings):
        error = each.error()
        yield Check("log", "fail", error.message, f"penstock doctor {folder} --repair: it {each.plan()}", error.code)  # fmt: skip


def check_set_aside(folder: Path) -> Iterator[Check]:
    """What a repair set aside, if there was one."""
    from penstock.log.disk import RealDisk
    from penstock.log.unreadable import SET_ASIDE, load_set_aside

    aside = load_set_aside(RealDisk(folder))
    if aside:
        yield Check("set aside", "ok", f"{len(aside)} entries, kept in {SET_ASIDE}")


def check_log(folder: Path, settings: Settings) -> Iterator[Check]:
    """Reads the journal as a start would, and compares the clock with what is in it."""
    from penstock.log.disk import RealDisk
    from penstock.log.recovery import Recovery

    try:
        recovered = Recovery(RealDisk(folder), settings, write=False).run()
    except UnreadableEntry:  # the first of them
        yield from unreadable(folder, settings)
        return
    log = recovered.log
    try:
        for topic, partition in log.manifest.topics():
            log.partition(topic, partition)
        newest_us = max((each.last_time_us for each in log.partitions.values()), default=0)
        partitions = len(log.partitions)
        backlog = check_backlog(folder, settings, recovered)
    finally:
        log.close()
        log.manifest.close()
    yield Check("log", "ok", f"{partitions} partitions, journal up to {recovered.position:,}")
    yield from check_set_aside(folder)
    yield backlog
    ahead_us = newest_us - time.time_ns() // 1_000
    if ahead_us > CLOCK_SLACK_US:
        yield Check("clock", "warn", f"the newest event is from {moment(newest_us)}, {ahead_us / 1e6:.0f} s ahead of this machine's clock", "set the clock (NTP): times of new events will not move on until it has caught up")  # fmt: skip
    else:
        yield Check("clock", "ok", f"newest event {moment(newest_us) or 'none yet'}")


def check_backlog(folder: Path, settings: Settings, recovered: Recovered) -> Check:
    """How much of the journal waits to be sealed, and so cannot be reclaimed."""
    from penstock.server.ports import writer_of

    waiting = max(0, recovered.position - recovered.log.manifest.sealed_to)
    allowed = settings.sealing.backlog_max_bytes
    found = (
        f"{waiting / 2**20:,.1f} MiB not sealed, publishing is slowed at {show(allowed, 'bytes')}"
    )
    if not settings.sealing.enabled:
        return Check("backlog", "warn", f"{found}; sealing is off", "turn sealing.enabled on: nothing is reclaimed without it")  # fmt: skip
    if waiting < max(allowed // 2, 2 * settings.journal.file_bytes):
        return Check("backlog", "ok", found)
    if writer_of(folder) is None:
        return Check("backlog", "warn", found, "start a writer (`penstock up`): sealing goes on where it stopped")  # fmt: skip
    return Check("backlog", "warn", found, "sealing does not keep up: look in the writer's log for its reason, give it another core or a faster disk, or keep sealing.process on")  # fmt: skip

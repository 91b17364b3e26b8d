"""What a benchmark measures: rate, latency, CPU and memory of one timed window.

A `Meter` is opened around the work and told of each call; it gives a `Sample`. Nothing in it
grows with the length of the run: latencies are thinned evenly when they fill their room.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.process import cpu_s_of, forget_peak, memory_mb, parents, session_of, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

# 131,072 latencies are 1 MB and leave more than 1,300 beyond the 99th percentile.
MAX_LATENCIES = 1 << 17
# One sector-sized write is what a commit of a single small event costs at least.
PROBE_WRITE_BYTES = 4096
PROBE_MAX_WRITES = 500
PROBE_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one side (Penstock or a peer) in one timed window.

    `cpu` is cores used by this process and its children; a peer's server stands apart in
    `server_cpu` and `server_rss_mb`, because Penstock embedded has no server to hide work in.

    >>> Sample(per_s=1000.0, p50_ms=1.0, p95_ms=2.0, p99_ms=3.0, cpu=0.5, rss_mb=40.0).as_dict()
    {'per_s': 1000.0, 'p50_ms': 1.0, 'p95_ms': 2.0, 'p99_ms': 3.0, 'cpu': 0.5, 'rss_mb': 40.0}
    """

    per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu: float
    rss_mb: float
    mb_per_s: float | None = None
    server_cpu: float | None = None
    server_rss_mb: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready; figures that were not measured are left out."""
        found: dict[str, object] = {}
        for name in FIGURES:
            value = getattr(self, name)
            if value is not None:
                found[name] = rounded(value)
        if self.extra:
            found["extra"] = {name: rounded(value) for name, value in self.extra.items()}
        return found


FIGURES = tuple(entry.name for entry in fields(Sample) if entry.name != "extra")


def rounded(value: float) -> float:
    """A figure without false precision: five significant digits.

    >>> rounded(1234567.8), rounded(0.000123456)
    (1234600.0, 0.00012346)
    """
    return float(f"{value:.5g}")


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The median of each figure on its own, over the rounds of a case."""
    found: dict[str, float | None] = {}
    for name in FIGURES:
        values = [getattr(sample, name) for sample in samples]
        found[name] = None if None in values else statistics.median(values)
    shared = set.intersection(*(set(sample.extra) for sample in samples))
    extra = {
        name: statistics.median(sample.extra[name] for sample in samples)
        for name in samples[0].extra
        if name in shared
    }
    return Sample(**found, extra=extra)  # type: ignore[arg-type]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of values in ascending order; 0.0 when there are none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([], 0.99)
    (2.0, 0.0)
    """
    if not ordered:
        return 0.0
    rank = -int(-share * len(ordered) // 1)  # ceiling
    return ordered[min(max(rank, 1), len(ordered)) - 1]


class Meter:
    """Collects one window: opened with `with`, asked `running`, told of each call with `add`.

    >>> with Meter(seconds=0.01) as meter:
    ...     while meter.running:
    ...         meter.add(0.002, events=10)
    >>> sample = meter.sample()
    >>> sample.per_s > 0, sample.p50_ms
    (True, 2.0)
    """

    def __init__(
        self,
        seconds: float,
        *,
        server_pid: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = seconds
        self.events = 0
        self.size_bytes = 0
        self.wall_s = 0.0
        self._server_pid = server_pid
        self._clock = clock
        self._kept: list[float] = []
        self._stride = 1
        self._until_kept = 1
        self._before: _Usage | None = None
        self._after: _Usage | None = None
        self._start = self._end = 0.0

    def __enter__(self) -> Meter:
        gc.collect()  # one side's garbage is not another side's time
        forget_peak(os.getpid())
        self._before = _Usage.now(self._server_pid)
        self._start = self._clock()
        self._end = self._start + self.seconds
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wall_s = self._clock() - self._start
        self._after = _Usage.now(self._server_pid)

    @property
    def running(self) -> bool:
        """Whether the window still has time: the condition of the measured loop."""
        return self._clock() < self._end

    @property
    def remaining_s(self) -> float:
        """Seconds left in the window, never negative."""
        return max(0.0, self._end - self._clock())

    def add(self, latency_s: float, events: int = 1, size_bytes: int = 0) -> None:
        """Count one call that took `latency_s` and carried `events` events."""
        self.events += events
        self.size_bytes += size_bytes
        self._until_kept -= 1
        if self._until_kept:
            return
        self._until_kept = self._stride
        self._kept.append(latency_s)
        if len(self._kept) == MAX_LATENCIES:
            # Every second one goes, and from now on every second one is skipped: what is kept
            # stays spread evenly over the whole window.
            del self._kept[1::2]
            self._stride *= 2

    @property
    def latencies_s(self) -> list[float]:
        """What calls took, in the order they ended; evenly thinned where there were very many."""
        return self._kept

    def sample(self, **extra: float) -> Sample:
        """The figures, once the window is closed."""
        assert self._before is not None, "sample() needs a closed window"
        assert self._after is not None, "sample() needs a closed window"
        wall_s = max(self.wall_s, 1e-9)
        ordered = sorted(self._kept)
        served = self._server_pid is not None
        return Sample(
            per_s=(self.events or self.size_bytes) / wall_s,
            p50_ms=percentile(ordered, 0.50) * 1000,
            p95_ms=percentile(ordered, 0.95) * 1000,
            p99_ms=percentile(ordered, 0.99) * 1000,
            cpu=max(0.0, self._after.cpu_s - self._before.cpu_s) / wall_s,
            rss_mb=self._after.rss_mb,
            mb_per_s=self.size_bytes / wall_s / 1e6 if self.size_bytes else None,
            server_cpu=(
                max(0.0, self._after.servercpu_s_of - self._before.servercpu_s_of) / wall_s
                if served
                else None
            ),
            server_rss_mb=self._after.server_rss_mb if served else None,
            extra=extra,
        )


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU seconds so far and peak memory, of this process tree and of a peer's server tree."""

    cpu_s: float
    rss_mb: float
    servercpu_s_of: float
    server_rss_mb: float

    @classmethod
    def now(cls, server_pid: int | None) -> _Usage:
        everyone = parents()
        server = tree(server_pid, everyone) if server_pid is not None else set()
        ours = tree(os.getpid(), everyone)
        # Another peer's server is a child of ours too, but its work is not this side's.
        ours -= {pid for pid in ours if os.getsid(0) != session_of(pid)}
        ours.add(os.getpid())
        return cls(
            cpu_s=sum(map(cpu_s_of, ours)),
            rss_mb=sum(map(memory_mb, ours)),
            servercpu_s_of=sum(map(cpu_s_of, server)),
            server_rss_mb=sum(map(memory_mb, server)),
        )


def disk_sync_s(
    folder: Path, *, writes: int = PROBE_MAX_WRITES, max_s: float = PROBE_MAX_S
) -> list[float]:
    """How long the disk below `folder` takes for one small write and fdatasync, many times.

    The file is allocated first, as a journal is, so that growing it is not part of the time.
    """
    path = folder / "fdatasync.probe"
    block = b"\xa5" * PROBE_WRITE_BYTES
    found: list[float] = []
    handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(handle, 0, writes * PROBE_WRITE_BYTES)
        os.fsync(handle)
        end = time.perf_counter() + max_s
        while len(found) < writes and (now := time.perf_counter()) < end:
            os.write(handle, block)
            os.fdatasync(handle)
            found.append(time.perf_counter() - now)
    finally:
        os.close(handle)
        path.unlink()
    return found

"""What the simulator found, and how it is told: one seed, many seeds, all mutants."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import Pool

import pyarrow

from penstock.testing.simulation.mutant import Mutant
from penstock.testing.simulation.mutants import MUTANTS, named
from penstock.testing.simulation.oracle import Finding
from penstock.testing.simulation.plan import Plan
from penstock.testing.simulation.world import World

FRESH_AFTER_SEEDS = 10


@dataclass
class Report:
    """The outcome of one seed."""

    seed: int
    operations: int
    crashes: int
    trace: str
    """A hash of everything that happened: the same for the same seed, always."""
    seconds: float
    invariant: str | None = None
    detail: str = ""
    recent: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        if self.invariant is None:
            return (
                f"seed {self.seed}: {self.operations:,} operations, {self.crashes} crashes, "
                f"{self.seconds:.1f} s, trace {self.trace[:12]}"
            )
        last = "\n".join(f"    {line}" for line in self.recent[-30:])
        return (
            f"FINDING seed {self.seed}, step {self.operations}, invariant {self.invariant}: "
            f"{self.detail}\n  the last operations:\n{last}\n"
            f"  replay: python -m penstock.testing.simulation --seed {self.seed}"
        )


def run(
    seed: int, *, plan: Plan | None = None, verbose: Callable[[str], None] | None = None
) -> Report:
    """Simulate one seed.

    >>> from penstock.testing.simulation.plan import shrunk
    >>> report = run(3, plan=shrunk(Plan.draw(3), operations=200, crashes=1))
    >>> report.invariant is None, report.operations >= 200
    (True, True)
    """
    started = time.process_time()
    pyarrow.set_cpu_count(1)  # threads of its own cost more than they bring, on files this small
    world = World(plan or Plan.draw(seed), verbose)
    invariant, detail = None, ""
    try:
        world.run()
    except Finding as finding:
        invariant, detail = finding.invariant, finding.detail
    counts = Counter(world.oracle.counts)
    counts.update({f"disk {kind}": count for kind, count in world.disk.counts.items()})
    return Report(
        seed, world.oracle.steps, world.crashes, world.oracle.trace(),
        time.process_time() - started, invariant, detail, list(world.oracle.recent), counts,
    )  # fmt: skip


def hunt(name: str) -> tuple[str, Report | None, int]:
    """Run seeds with one mutant alive until it is found; says by what and after how many seeds."""
    mutant = named(name)
    for seed in range(1, mutant.within + 1):
        with mutant.alive():
            report = run(seed)
        if report.invariant is not None and _innocent(seed):
            return name, report, seed
    return name, None, mutant.within


@functools.cache
def _innocent(seed: int) -> bool:
    """Whether a seed finds nothing by itself: otherwise it proves nothing about a mutant."""
    return run(seed).invariant is None


def _pool(jobs: int) -> Pool:
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # A fresh process now and then: abandoned event loops are not collected quickly enough. (The
    # executor of concurrent.futures has that option too, and in Python 3.11 hangs with it.)
    return multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=FRESH_AFTER_SEEDS)


def run_many(first: int, count: int, jobs: int) -> Iterator[Report]:
    """Simulate many seeds, each in one of `jobs` processes."""
    with _pool(jobs) as pool:
        yield from pool.imap(run, range(first, first + count))


def hunt_all(jobs: int, only: str | None = None) -> Iterator[tuple[Mutant, Report | None, int]]:
    """Hunt every mutant."""
    chosen = [mutant.name for mutant in MUTANTS if only in (None, mutant.name)]
    with _pool(jobs) as pool:
        for name, report, seeds in pool.imap(hunt, chosen):
            yield named(name), report, seeds

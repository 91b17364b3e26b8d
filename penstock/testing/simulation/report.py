"""What a run found, and how it is told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow

from penstock.testing.simulation.oracle import Finding
from penstock.testing.simulation.plan import Plan
from penstock.testing.simulation.world import World


@dataclass
class Report:
    """The outcome of one seed."""

    seed: int
    operations: int
    crashes: int
    trace: str
    seconds: float
    invariant: str | None = None
    detail: str = ""
    recent: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def run(
    seed: int, *, plan: Plan | None = None, verbose: Callable[[str], None] | None = None
) -> Report:
    """Simulate one seed; the same seed gives the same trace, always."""
    started = time.perf_counter()
    pyarrow.set_cpu_count(1)  # threads of its own cost more than they bring, on files this small
    world = World(plan or Plan.draw(seed), verbose)
    invariant, detail = None, ""
    try:
        world.run()
    except Finding as finding:
        invariant, detail = finding.invariant, finding.detail
    counts = Counter(world.oracle.counts)
    counts.update({f"disk_{kind}": count for kind, count in world.disk.counts.items()})
    return Report(
        seed, world.oracle.steps, world.crashes, world.oracle.trace(),
        time.perf_counter() - started, invariant, detail, list(world.oracle.recent), counts,
    )  # fmt: skip

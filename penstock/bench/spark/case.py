"""A Spark case: what is prepared once, and what each side does in its turn."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.bench.measure import Sample, median_sample, rounded
from penstock.bench.spark.stage import Stage

OURS = "penstock"

Side = Callable[[int], Sample]
"""One measured turn; told its number, the warm-up's being -1."""


@dataclass(frozen=True, slots=True)
class SparkCase:
    """One thing that is measured; `prepare` gives the sides by name, Penstock's first."""

    name: str
    title: str
    rows: int
    prepare: Callable[[Stage, int], Mapping[str, Side]]
    """Told where it runs and how many rows there shall be."""
    rounds: int = 5


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], figure: Callable[[Sample], float] = lambda each: each.per_s) -> float:  # fmt: skip
    """The median of the ratios, round by round."""
    return rounded(
        statistics.median(figure(a) / figure(b) for a, b in zip(ours, theirs, strict=True))
    )


def result(
    case: str, title: str, samples: Mapping[str, Sequence[Sample]], *, load_1m: float, **more: Any
) -> dict[str, Any]:
    """What was measured, in the shape docs/guide/benchmarks.md describes."""
    medians = {side: median_sample(found).as_dict() for side, found in samples.items()}
    ours = samples[OURS]
    return {
        "case": case,
        "title": title,
        "unit": "events",
        "penstock": medians.pop(OURS),
        "peers": medians,
        "ratio": {side: ratio(ours, samples[side]) for side in medians},
        "left_out": {},
        "rounds": len(ours),
        "seconds": rounded(statistics.median(each.p50_ms / 1000 for each in ours)),
        **more,
        "machine": machine(load_1m),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "samples": {side: [each.as_dict() for each in found] for side, found in samples.items()},
    }


def machine(load_1m: float) -> dict[str, object]:
    """Where it was measured."""
    import pyspark

    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "spark": pyspark.__version__,
        "load_1m": rounded(load_1m),
    }

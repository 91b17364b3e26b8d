"""A Spark case: what is prepared once, and what each side does in its turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.bench.measure import Sample
from penstock.bench.result import OURS, Turns, result
from penstock.bench.spark.stage import Stage

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


def spark_result(case: str, title: str, samples: Mapping[str, Turns], *, load_1m: float, **more: Any) -> dict[str, Any]:  # fmt: skip
    """What was measured; every turn is one call, so its time is that of the turn."""
    import pyspark

    ours = samples[OURS]
    return result(
        case,
        title,
        samples,
        rounds=len(ours),
        seconds=statistics.median(each.p50_ms / 1000 for each in ours.values()),
        load_1m=load_1m,
        machine={"spark": pyspark.__version__},
        **more,
    )

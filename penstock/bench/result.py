"""The result of a case as JSON-ready data, in the shape docs/guide/benchmarks.md describes."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.bench.measure import Sample, median_sample, rounded

OURS = "penstock"

Turns = Mapping[int, Sample]
"""What one side measured, by the number of the round."""


def result(
    case: str,
    title: str,
    samples: Mapping[str, Turns],
    *,
    unit: str = "events",
    rounds: int,
    seconds: float,
    load_1m: float,
    machine: Mapping[str, object],
    left_out: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """All that was measured; `machine` and `more` are what only this kind of case knows."""
    medians = {side: median_sample(list(turns.values())).as_dict() for side, turns in samples.items()}  # fmt: skip
    return {
        "case": case,
        "title": title,
        "unit": unit,
        "penstock": medians.pop(OURS),
        "peers": medians,
        "ratio": {side: ratio(samples[OURS], samples[side]) for side in medians},
        "left_out": dict(left_out or {}),
        "rounds": rounds,
        "seconds": rounded(seconds),
        **more,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            **machine,
            "load_1m": rounded(load_1m),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "samples": {
            side: [turns[number].as_dict() for number in sorted(turns)]
            for side, turns in samples.items()
        },
    }


def _rate(sample: Sample) -> float:
    return sample.per_s


def ratio(ours: Turns, theirs: Turns, figure: Callable[[Sample], float] = _rate) -> float:
    """The median of the ratios, round by round.

    >>> def turn(per_s): return Sample(per_s, 1.0, 1.0, 1.0, 1.0, 1.0)
    >>> ratio({0: turn(20.0), 1: turn(30.0)}, {1: turn(10.0)})
    3.0
    """
    both = [number for number in theirs if number in ours]
    return rounded(statistics.median(figure(ours[at]) / figure(theirs[at]) for at in both))

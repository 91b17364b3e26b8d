"""Shows benchmark results to people: one run as a table, two runs as what changed.

A change counts only when it is larger than the noise: the spread between the rounds of either
run. Fewer than three rounds have no spread to speak of, and the comparison says so.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from penstock.model.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Two runs of the same code on a quiet machine differ by about this much.
MIN_NOISE = 0.03
LARGER_IS_BETTER = ("per_s", "mb_per_s")
COMPARED = ("per_s", "mb_per_s", "p50_ms", "p95_ms", "p99_ms", "cpu", "rss_mb")

# Two rounds that happen to agree would pass for a quiet machine.
FEWEST_ROUNDS = 3
UNKNOWN = "not enough rounds to tell"

Verdict = Literal["better", "worse", "within noise", "not enough rounds to tell"]


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What changed from result `a` to result `b` of the same case, metric by metric.

    >>> def run(*rounds):
    ...     samples = {"penstock": [{"per_s": each} for each in rounds]}
    ...     return {"case": "c", "penstock": {"per_s": rounds[0]}, "peers": {}, "ratio": {}, "samples": samples}
    >>> compare(run(100, 101, 99), run(150, 151, 149))["metrics"][0]["verdict"]
    'better'
    >>> compare(run(100), run(150))["metrics"][0]["verdict"]
    'not enough rounds to tell'
    """
    if a["case"] != b["case"]:
        raise InvalidInput(
            f"cannot compare the case {a['case']!r} with {b['case']!r}; run the same case twice",
            a=a["case"],
            b=b["case"],
        )
    metrics = []
    for name, old, new, rounds in _pairs(a, b):
        noise = max(MIN_NOISE, *(spread(values) for values in rounds))
        told = min(map(len, rounds)) >= FEWEST_ROUNDS
        metrics.append(
            {
                "metric": name,
                "a": old,
                "b": new,
                "change": round(new / old - 1, 4) if old else None,
                "noise": round(noise, 4) if told else None,
                "verdict": _verdict(name, old, new, noise) if told else UNKNOWN,
            }
        )
    return {"case": a["case"], "metrics": metrics}


def spread(values: Sequence[float]) -> float:
    """How far the rounds of one run lie apart, as a share of their median.

    >>> spread([90.0, 100.0, 110.0]), spread([5.0])
    (0.2, 0.0)
    """
    middle = statistics.median(values) if values else 0.0
    return (max(values) - min(values)) / middle if middle else 0.0


def _pairs(
    a: dict[str, Any], b: dict[str, Any]
) -> Iterator[tuple[str, float, float, list[list[float]]]]:
    """Each metric both results have: name, two values, and the rounds behind them."""
    for metric in COMPARED:
        if metric in a["penstock"] and metric in b["penstock"]:
            rounds = [_rounds(result, "penstock", metric) for result in (a, b)]
            yield metric, a["penstock"][metric], b["penstock"][metric], rounds
    for peer, ratio in a["ratio"].items():
        if peer in b["ratio"]:
            rounds = [_ratios(result, peer) for result in (a, b)]
            yield f"ratio.{peer}", ratio, b["ratio"][peer], rounds
    for peer, figures in a["peers"].items():
        if peer in b["peers"]:
            rounds = [_rounds(result, peer, "per_s") for result in (a, b)]
            yield f"{peer}.per_s", figures["per_s"], b["peers"][peer]["per_s"], rounds


def _rounds(result: dict[str, Any], side: str, metric: str) -> list[float]:
    return [sample[metric] for sample in result["samples"].get(side, []) if metric in sample]


def _ratios(result: dict[str, Any], peer: str) -> list[float]:
    ours, theirs = _rounds(result, "penstock", "per_s"), _rounds(result, peer, "per_s")
    return [mine / other for mine, other in zip(ours, theirs, strict=False) if other]


def _verdict(name: str, old: float, new: float, noise: float) -> Verdict:
    if not old or abs(new / old - 1) <= noise:
        return "within noise"
    metric = name.rpartition(".")[2]
    larger_is_better = name.startswith("ratio.") or metric in LARGER_IS_BETTER
    return "better" if (new > old) == larger_is_better else "worse"


def result_table(result: dict[str, Any]) -> Table:
    """One result for the terminal: a row for Penstock and one for each peer."""
    machine = result["machine"]
    table = Table(
        title=f"{result['case']}: {result['title']}",
        caption=(
            f"{result['rounds']} rounds of {result['seconds']:g} s, medians; "
            f"{machine['cores']} cores, fdatasync p50 {machine['fdatasync_p50_ms']:g} ms "
            f"p99 {machine['fdatasync_p99_ms']:g} ms, {machine['loop']}"
        ),
        caption_justify="left",
    )
    bytes_measured = "mb_per_s" in result["penstock"]
    table.add_column("")
    headings = [f"{result['unit']}/s", "p50 ms", "p95 ms", "p99 ms", "cores", "server cores", "MB"]
    if bytes_measured:
        headings.insert(1, "MB/s")
    for heading in [*headings, "Penstock is"]:
        table.add_column(heading, justify="right")
    for side, figures in {"penstock": result["penstock"], **result["peers"]}.items():
        cells = [f"{figures['per_s']:,.0f}"]
        if bytes_measured:
            cells.append(_cell(figures, "mb_per_s"))
        cells += [_cell(figures, name) for name in ("p50_ms", "p95_ms", "p99_ms", "cpu")]
        cells += [_cell(figures, "server_cpu"), _cell(figures, "rss_mb")]
        ratio = result["ratio"].get(side)
        table.add_row(side, *cells, f"{ratio:.1f}x" if ratio is not None else "")
    for side, reason in result["left_out"].items():
        table.add_row(side, "left out", *[""] * (len(headings) - 1), reason)
    return table


def _cell(figures: dict[str, Any], name: str) -> str:
    value = figures.get(name)
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def compare_table(change: dict[str, Any]) -> Table:
    """What changed in one case, for the terminal."""
    table = Table(title=change["case"])
    table.add_column("metric")
    for heading in ("a", "b", "change", "noise"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    colours = {"better": "green", "worse": "red"}
    for row in change["metrics"]:
        moved = "" if row["change"] is None else f"{row['change']:+.1%}"
        table.add_row(
            row["metric"],
            f"{row['a']:,.5g}",
            f"{row['b']:,.5g}",
            moved,
            "" if row["noise"] is None else f"{row['noise']:.1%}",
            f"[{colours.get(row['verdict'], 'dim')}]{row['verdict']}[/]",
        )
    return table

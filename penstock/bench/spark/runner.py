"""Runs Spark cases: one session for all, a warm-up and then turns of every side, medians."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.measure import Sample
from penstock.bench.progress import Progress, silent
from penstock.bench.spark import reading, replaying, writing
from penstock.bench.spark.case import SparkCase, spark_result
from penstock.bench.spark.stage import Stage
from penstock.model.errors import InvalidInput, NotFound
from penstock.model.registry import did_you_mean
from penstock.pipelines.session import check_requirements

if TYPE_CHECKING:
    from rich.table import Table

MILLION = 1_000_000
MAX_ROUNDS = 20
CASES = {
    case.name: case
    for case in (
        SparkCase("source", "a stream of every column to nowhere", 6 * MILLION, reading.source),
        SparkCase("source-event", "a stream of offset, event time, key and payload", 6 * MILLION, reading.source_event),
        SparkCase("window-count", "a stream of one column, counted by minute", 6 * MILLION, reading.window_count),
        SparkCase("source-once", "every column to nowhere in one batch", 6 * MILLION, reading.source_once),
        SparkCase("window-count-once", "one column, counted in one batch", 6 * MILLION, reading.window_count_once),
        SparkCase("sink", "rows of 100 bytes onto a folder's bus", 2 * MILLION, writing.sink),
        SparkCase("sink-broker", "rows of 100 bytes through a broker", MILLION, writing.sink_broker),
        SparkCase("topic-to-table", "a log into an Iceberg table", 6 * MILLION, writing.table, 3),
        SparkCase("join", "a log's segments join a table by file", 6 * MILLION, writing.join, 3),
        SparkCase("one-event", "through a stateless pipeline and a broker", 50, writing.one_event, 3),
        SparkCase("replay-compare", "SHA-256 of a log, again", 5 * MILLION, replaying.replay_compare, 3),
        SparkCase("worker-memory", "peak of a worker, events of 1 kB", 10 * MILLION, reading.worker_memory, 1),
    )
}  # fmt: skip


def run_spark(
    cases: Sequence[str] = (),
    *,
    folder: Path,
    rows: int | None = None,
    rounds: int | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """Run these cases, or all, and give a result for each, as JSON-ready data.

    `folder` gets logs and tables, gigabytes of them: give one that is deleted afterwards.
    """
    check_requirements()
    chosen = [_case(name) for name in cases] or list(CASES.values())
    if (rows is not None and rows < 1) or (rounds is not None and not 1 <= rounds <= MAX_ROUNDS):
        raise InvalidInput(f"rows are 1 or more and rounds 1 to {MAX_ROUNDS}")
    stage = Stage(folder.resolve(), progress or silent)
    return (_run(case, stage, rows or case.rows, rounds or case.rounds, progress or silent) for case in chosen)  # fmt: skip


def _case(name: str) -> SparkCase:
    if name not in CASES:
        raise NotFound(
            f"there is no Spark case {name!r}. {did_you_mean(name, CASES)}There is {', '.join(CASES)}"
        )
    return CASES[name]


def _run(case: SparkCase, stage: Stage, rows: int, rounds: int, progress: Progress) -> dict[str, Any]:  # fmt: skip
    load_1m = os.getloadavg()[0]
    sides = case.prepare(stage, rows)
    names = list(sides)
    samples: dict[str, dict[int, Sample]] = {name: {} for name in names}
    for turn in range(-1, rounds):  # the first starts workers and fills caches, and is not counted
        begin = turn % len(names)
        for name in names[begin:] + names[:begin]:
            progress(f"{case.name}: {name}", turn + 1, rounds + 1)
            sample = sides[name](turn)
            if turn >= 0:
                samples[name][turn] = sample
    return spark_result(f"spark-{case.name}", case.title, samples, load_1m=load_1m, rows=rows)


def spark_table(results: Sequence[dict[str, Any]]) -> Table:
    """All cases for the terminal."""
    from rich.table import Table

    machine = results[0]["machine"]
    table = Table(
        title="pipelines on Spark",
        caption=(
            f"turns of each side, medians; {machine['cores']} cores, load {machine['load_1m']:g}, "
            f"Spark {machine['spark']}"
        ),
        caption_justify="left",
    )
    for heading in ("case", "side", "rows", "rows/s", "p50 ms", "to Penstock", "more"):
        table.add_column(
            heading, justify="left" if heading in ("case", "side", "more") else "right"
        )
    for found in results:
        sides = {"penstock": found["penstock"], **found["peers"]}
        for side, figures in sides.items():
            against = found["ratio"].get(side)
            extra = figures.get("extra", {})
            table.add_row(
                f"{found['case'].removeprefix('spark-')}: {found['title']}" if side == "penstock" else "",
                side,
                f"{found['rows']:,}",
                f"{figures['per_s']:,.0f}",
                f"{figures['p50_ms']:,.0f}",
                f"{against:.2f}x" if against else "",
                ", ".join(f"{name} {value:g}" for name, value in extra.items()),
            )  # fmt: skip
    return table

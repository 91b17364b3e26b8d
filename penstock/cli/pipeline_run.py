"""The parts of `penstock pipeline` that need Spark: run a pipeline, show and compare its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import output
from penstock.cli.invocation import FAILED
from penstock.model.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.cli.invocation import Invocation
    from penstock.pipelines.pipeline import Pipeline
    from penstock.pipelines.run import Route

MAX_SHOWN = 1_000
"""Rows of a batch pipeline that are printed; more belong into a table."""


def run_stream(
    made: Pipeline,
    spark: SparkSession,
    route: Route,
    params: Mapping[str, Any],
    *,
    checkpoint: Path,
    once: bool,
    every_s: float | None,
    metrics_port: int | None,
    until: Callable[[], bool],
    quiet: bool,
) -> dict[str, Any]:
    """Run a stream until it ends or is asked to; returns what it did."""
    from penstock.pipelines.failure import explain_failure
    from penstock.pipelines.progress import PipelineMetrics, serve_metrics, watch
    from penstock.pipelines.run import start

    with ExitStack() as stack:
        metrics = PipelineMetrics()
        if metrics_port is not None:
            server = stack.enter_context(serve_metrics(metrics, metrics_port))
            output.note(f"metrics: {server.url}")
        try:
            query = start(
                made, spark, route, checkpoint=checkpoint, params=params, once=once, every_s=every_s
            )
        except Exception as error:
            raise explain_failure(error, made.name) from error
        try:
            meters = watch({made.name: query}, until=until, quiet=quiet, looked=metrics.take)
        finally:
            query.stop()
    meter = meters[made.name]
    return {
        "pipeline": made.name,
        "batches": meter.batches,
        "rows_in": meter.rows_in,
        "rows_out": meter.rows_out or None,
        "lag": meter.last.lag_events if meter.last is not None else None,
        "dropped": meter.dropped_rows,
        "skipped": meter.skipped_events,
        "checkpoint": str(checkpoint),
    }


def run_table(
    invocation: Invocation,
    made: Pipeline,
    spark: SparkSession,
    route: Route,
    params: Mapping[str, Any],
) -> None:
    """Run a batch pipeline and print its rows."""
    from pyspark.errors import PySparkException

    from penstock.pipelines.failure import explain_failure
    from penstock.pipelines.run import run_batch

    try:
        result = run_batch(made, spark, route, params)
        rows = [row.asDict(recursive=True) for row in result.limit(MAX_SHOWN + 1).collect()]
    except PySparkException as error:
        raise explain_failure(error, made.name) from error
    output.show_rows(invocation, rows[:MAX_SHOWN], result.columns)
    if len(rows) > MAX_SHOWN:
        output.note(f"the first {MAX_SHOWN} rows; there are more")


def run_test(
    made: Pipeline,
    spark: SparkSession,
    rows: Path,
    expected: Path | None,
    params: Mapping[str, Any],
) -> None:
    """Run a pipeline on rows of a file; print what comes out, or what differs from what should."""
    from penstock.pipelines.testkit import run_on_rows

    given: dict[str, list[dict[str, Any]]] = {name: [] for name in made.reads}
    for number, row in enumerate(_lines(rows), 1):
        argument = row.pop("input", next(iter(made.reads), ""))
        if argument not in given:
            raise InvalidInput(f"{rows}:{number}: {made.name!r} has no input {argument!r}")
        given[argument].append(row)
    found = [msgspec.json.encode(output.plain(row), order="sorted") for row in run_on_rows(made, spark, given, params)]  # fmt: skip
    if expected is None:
        for line in found:
            output.print_text(line.decode())
        return
    wanted = [msgspec.json.encode(row, order="sorted") for row in _lines(expected)]
    missing, extra = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    for sign, lines in (("-", missing), ("+", extra)):
        for line in lines.elements():
            output.print_text(f"{sign} {line.decode()}")
    output.note(f"{len(found)} rows, {missing.total()} missing, {extra.total()} not expected")
    if missing or extra:
        raise click.exceptions.Exit(FAILED)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"{path}:{number} is no JSON object: {error}") from None
    return found

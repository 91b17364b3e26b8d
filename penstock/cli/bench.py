"""`penstock bench`: measure this machine, side by side with other systems."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli import output
from penstock.cli.arguments import Duration
from penstock.cli.invocation import FAILED, Invocation, Noun

if TYPE_CHECKING:
    from rich.table import Table

MIN_PIPED_COLUMNS = 160  # a table in a pipe is not folded to the width of a terminal
T = TypeVar("T")

folder_option = click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where data is for the time of the run, so which disk is measured. Default: the current folder.",
)


@click.group("bench", cls=Noun)
def command() -> None:
    """Run benchmarks and compare their results."""


def _complete_case(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # fmt: skip
    from penstock.bench.runner import list_cases

    return [str(row["case"]) for row in list_cases() if str(row["case"]).startswith(incomplete)]


@command.command("list")
@click.pass_obj
def list_(invocation: Invocation) -> None:
    """List the cases and the peers each can be held against."""
    from penstock.bench.runner import list_cases

    output.show_rows(invocation, list_cases(), ["case", "title", "unit", "peers"])


@command.command("run")
@click.argument("case", shell_complete=_complete_case)
@click.option(
    "--vs",
    default="",
    metavar="PEER,...",
    help="Peers to run in the same run, such as jetstream,redis.",
)
@click.option(
    "--seconds", type=Duration(least=0.01), default=None, help="Length of one measured window."
)
@click.option(
    "--rounds", type=int, default=None, help="Windows for each side; medians are reported."
)
@click.option(
    "--within",
    type=Duration(least=0.01),
    default=None,
    help="Time for all of it: more for longer windows.",
)
@folder_option
@click.pass_obj
def run(invocation: Invocation, case: str, vs: str, seconds: float | None, rounds: int | None, within: float | None, folder: Path | None) -> None:  # fmt: skip
    """Run one case; most end within 40 s, those that compare a p99 in four minutes.

    Ends with 1 when a peer that was asked for could not run.
    """
    from penstock.bench.report import result_table
    from penstock.bench.runner import complete, run_case

    peers = [name.strip() for name in vs.split(",") if name.strip()]
    options = _given(seconds=seconds, rounds=rounds, budget_s=within)
    with _place(folder) as place:
        result = run_case(case, peers, folder=place, progress=_progress, **options)
    _show(invocation, result, result_table)
    if not complete(result, peers):
        raise click.exceptions.Exit(FAILED)


@command.command("nexmark")
@click.option("--events", type=int, default=None, help="Events to make. Default: 1,000,000.")
@click.option(
    "--query", "queries", default="", metavar="Q,...", help="Queries to run, such as q0,q5. All."
)
@click.option(
    "--rounds", type=int, default=None, help="Runs of each query on each side; medians count."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which events to make.")
@folder_option
@click.pass_obj
def nexmark(invocation: Invocation, events: int | None, queries: str, rounds: int | None, seed: int, folder: Path | None) -> None:  # fmt: skip
    """Run the Nexmark queries with Spark over a bus and over Parquet files, and check the results."""
    from penstock.bench.nexmark import nexmark_table, run_nexmark

    names = [name.strip() for name in queries.split(",") if name.strip()]
    options = _given(events=events, rounds=rounds)
    with _place(folder) as place:
        results = run_nexmark(names, folder=place, seed=seed, progress=_progress, **options)
    _show(invocation, results, nexmark_table)


@command.command("spark")
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@click.option("--rows", type=int, default=None, help="Rows of each case. Default: the case's own.")
@click.option("--rounds", type=int, default=None, help="Turns of each side; medians count.")
@folder_option
@click.pass_obj
def spark(invocation: Invocation, cases: tuple[str, ...], rows: int | None, rounds: int | None, folder: Path | None) -> None:  # fmt: skip
    """Measure source, sink, tables and latency of pipelines on Spark, beside Spark over Parquet."""
    from penstock.bench.spark.runner import run_spark, spark_table

    with _place(folder) as place:
        found = run_spark(cases, folder=place, rows=rows, rounds=rounds, progress=_progress)
        results = list(found)
    _show(invocation, results, spark_table)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given: the others have their defaults below."""
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """A folder for the time of the run."""
    with tempfile.TemporaryDirectory(prefix=".penstock-bench-", dir=folder or Path()) as place:
        yield Path(place)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _progress(text: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} {text}\x1b[K", end="", file=sys.stderr, flush=True)


def _show(invocation: Invocation, found: T, table: Callable[[T], Table]) -> None:
    if invocation.json:
        output.print_json(found)
    else:
        _print_table(table(found))


@command.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.pass_obj
def compare(invocation: Invocation, a: Path, b: Path) -> None:
    """Show what changed from the results in file A to those in file B, written with --json."""
    from penstock.bench.report import compare_table
    from penstock.bench.runner import compare_files

    change = compare_files(a, b)
    if invocation.json:
        output.print_json(change)
        return
    for case in change["cases"]:
        _print_table(compare_table(case))
    if change["only_in_one"]:
        output.note(f"only in one of the files: {', '.join(change['only_in_one'])}")


def _print_table(table: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, MIN_PIPED_COLUMNS))
    console.print(table)

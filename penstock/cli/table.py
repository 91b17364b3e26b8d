"""`penstock table`: topics as tables of a warehouse, by their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import output
from penstock.cli.invocation import Invocation, Noun, folder_of
from penstock.cli.stopping import asked_to_stop
from penstock.cli.when import DURATION

if TYPE_CHECKING:
    from penstock.pipelines.lakehouse.warehouse import Warehouse

warehouse_option = click.option(
    "--warehouse", "place", required=True, help="Folder or URI of the tables."
)


@click.group("table", cls=Noun)
def command() -> None:
    """Let topics be tables, and find the files of tables."""


@command.command("sync")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@warehouse_option
@click.option("--every", "every_s", type=DURATION, help="Do it again and again, until Ctrl-C.")
@click.pass_obj
def sync(invocation: Invocation, patterns: tuple[str, ...], place: str, every_s: float | None) -> None:  # fmt: skip
    """Bring the Iceberg tables of topics up to the log's sealed segments; all topics by default.

    Segments join as they are; nothing is written again. Needs the folder of the log, which may be in use.
    """
    from penstock.pipelines.lakehouse.topics import sync_topics

    folder = _folder(invocation)
    with _warehouse(place) as warehouse, asked_to_stop() as stopped:
        while True:
            report = sync_topics(folder, warehouse, patterns or "#")
            output.show_record(invocation, msgspec.structs.asdict(report))
            if every_s is None or stopped.wait(every_s):
                return


@command.command("files")
@click.argument("name")
@warehouse_option
@click.pass_obj
def files(invocation: Invocation, name: str, place: str) -> None:
    """List the Parquet files that a table consists of now, for Spark, DuckDB or pyarrow."""
    from penstock.pipelines.lakehouse.table import unknown_table
    from penstock.pipelines.lakehouse.warehouse import table_files

    with _warehouse(place) as warehouse:
        if warehouse.table(name).schema() is None:
            raise unknown_table(name, place)
        rows: list[dict[str, Any]] = [{"file": each} for each in table_files(warehouse, name)]
    output.show_rows(invocation, rows, ["file"])


def _folder(invocation: Invocation) -> Path:
    folder = folder_of(invocation.url)
    if folder is None:
        raise click.UsageError(
            f"{invocation.url} is no folder: tables are made of the log's own files, so run this "
            "where the folder is, and give its path as --url"
        )
    return folder


def _warehouse(place: str) -> Warehouse:
    from penstock.pipelines.lakehouse.warehouse import Warehouse

    return Warehouse(place)

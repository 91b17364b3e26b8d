"""`penstock table`: topics as tables of a warehouse, by their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from penstock.cli import output
from penstock.cli.arguments import DURATION, open_warehouse, warehouse_options
from penstock.cli.invocation import Invocation, Noun, asked_to_stop, folder_of
from penstock.model.errors import PenstockError

every_option = click.option(
    "--every", "every_s", type=DURATION, help="Do it again and again, until Ctrl-C."
)


@click.group("table", cls=Noun)
def command() -> None:
    """Let topics be tables, find the files of tables, keep tables small."""


@command.command("sync")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@warehouse_options
@every_option
@click.pass_obj
def sync(invocation: Invocation, /, patterns: tuple[str, ...], every_s: float | None, **said: Any) -> None:  # fmt: skip
    """Bring the Iceberg tables of topics up to the log's sealed segments; all topics by default.

    Segments join as they are; nothing is written again. Needs the folder of the log, which may be in use.
    """
    from penstock.pipelines.lakehouse.topics import sync_topics

    folder = _folder(invocation)
    with open_warehouse(said) as warehouse, asked_to_stop() as stopped:
        while True:
            report = sync_topics(folder, warehouse, patterns or "#")
            output.show_record(invocation, msgspec.structs.asdict(report))
            if report.waiting:
                output.note(
                    f"{report.waiting:,} events are still in the journal and not in the tables: they join when "
                    "they are sealed. `penstock topic seal` seals them now; give it the broker's URL where one "
                    "is running"
                )
            if every_s is None or stopped.wait(every_s):
                return


@command.command("files")
@click.argument("name")
@warehouse_options
@click.pass_obj
def files(invocation: Invocation, /, name: str, **said: Any) -> None:
    """List the Parquet files that a table consists of now, for Spark, DuckDB or pyarrow."""
    from penstock.pipelines.lakehouse.table import unknown_table
    from penstock.pipelines.lakehouse.warehouse import table_files

    with open_warehouse(said, create=False) as warehouse:
        if warehouse.table(name).schema() is None:
            error = unknown_table(name, said["warehouse"])
            _tell_other_format(said["warehouse"], name)
            raise error
        rows: list[dict[str, Any]] = [{"file": each} for each in table_files(warehouse, name)]
    output.show_rows(invocation, rows, ["file"])


def _tell_other_format(place: str, name: str) -> None:
    """A table of another format is there under that name: the option is what is wrong."""
    for mark, format_ in (("_delta_log", "delta"), ("_table.json", "parquet")):
        if (Path(place) / name / mark).exists():
            output.note(f"{place} has {name!r} as a {format_} table: add --format {format_}")


@command.command("compact")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@warehouse_options
@click.option("--mb", type=click.IntRange(1), default=128, show_default=True, help="Size of a file to aim at.")  # fmt: skip
@click.option("--keep", "keep_s", type=DURATION, default="7d", show_default=True, help="How long what was replaced, and old snapshots, can still be read.")  # fmt: skip
@every_option
@click.pass_obj
def compact(invocation: Invocation, /, names: tuple[str, ...], mb: int, keep_s: float, every_s: float | None, **said: Any) -> None:  # fmt: skip
    """Put the small files of tables of results together, and delete what no snapshot needs.

    Queries may write to them meanwhile. Tables of topics are left to the log, which merges their files.
    """
    from penstock.model.settings import MIB
    from penstock.pipelines.lakehouse.compaction import compact as compact_table

    with open_warehouse(said, create=False) as warehouse, asked_to_stop() as stopped:
        while True:
            for name in names:
                try:
                    report = compact_table(warehouse, name, target_bytes=mb * MIB, keep_s=keep_s)
                    output.show_record(invocation, msgspec.structs.asdict(report))
                except PenstockError as error:
                    if every_s is None:
                        raise
                    output.note(f"{name}: {error}")  # a writer was faster: the next turn may do it
            if every_s is None or stopped.wait(every_s):
                return


def _folder(invocation: Invocation) -> Path:
    folder = folder_of(invocation.url)
    if folder is None:
        raise click.UsageError(
            f"{invocation.url} is no folder: tables are made of the log's own files, so run this "
            "where the folder is, and give its path as --url"
        )
    return folder

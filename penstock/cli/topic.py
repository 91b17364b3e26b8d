"""`penstock topic`: the topics of a bus and what is configured for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import DURATION, SIZE
from penstock.cli.invocation import (
    Invocation,
    Noun,
    change,
    complete_topic,
    confirm_options,
    destroy,
    look,
    show_effect,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock

F = Any


@click.group("topic", cls=Noun)
def command() -> None:
    """List, inspect, create and change topics."""


def _retention(function: F) -> F:
    options: list[Callable[[F], F]] = [
        click.option("--retention-age", "retention_age_s", type=DURATION, help="Keep events this long."),
        click.option("--retention-bytes", type=SIZE, help="Keep this many bytes of the topic."),
        click.option("--write-once/--no-write-once", default=None, help="Refuse to delete events inside retention."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def _row(info: Any) -> dict[str, Any]:
    record: dict[str, Any] = output.plain(info)
    return record | {"events": info.events, "sealed_bytes": info.sealed_bytes}


@command.command("list")
@click.option("--system", is_flag=True, help="Also the bus's own topics, such as _dlq.default.")
@click.pass_obj
def list_(invocation: Invocation, system: bool) -> None:
    """List the topics."""

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.topics.list(system=system))

    rows = [_row(info) for info in look(invocation, work)]
    if not invocation.json:
        rows = [row | {"partitions": len(row["partitions"])} for row in rows]
    output.show_rows(invocation, rows, ["name", "tenant", "partitions", "events", "sealed_bytes"])


@command.command("info")
@click.argument("name", shell_complete=complete_topic)
@click.pass_obj
def info(invocation: Invocation, name: str) -> None:
    """Show a topic and its partitions."""

    async def work(bus: penstock.Bus) -> Any:
        return await bus.topics.info(name)

    _show(invocation, look(invocation, work))


def _show(invocation: Invocation, info: Any) -> None:
    record = _row(info)
    if invocation.json:
        output.print_json(record)
        return
    parts = record.pop("partitions")
    output.show_record(invocation, record)
    output.print_text("")
    output.show_rows(invocation, parts, list(parts[0]) if parts else [])


@command.command("create")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1, 1_024), default=1, show_default=True, help="Parts that can be consumed side by side.")  # fmt: skip
@_retention
@click.pass_obj
def create(invocation: Invocation, /, name: str, **options: Any) -> None:
    """Create a topic, and the data folder if there is none."""

    async def work(bus: penstock.Bus) -> Any:
        await bus.topics.create(name, **options)
        return await bus.topics.info(name)

    _show(invocation, change(invocation, work, creates=True))


@command.command("grow")
@click.argument("name", shell_complete=complete_topic)
@click.argument("partitions", type=click.IntRange(1, 1_024))
@click.pass_obj
def grow(invocation: Invocation, name: str, partitions: int) -> None:
    """Give a topic more partitions; keys may land elsewhere from then on."""

    async def work(bus: penstock.Bus) -> Any:
        await bus.topics.grow(name, partitions)
        return await bus.topics.info(name)

    _show(invocation, change(invocation, work))


@command.command("seal")
@click.pass_obj
def seal(invocation: Invocation) -> None:
    """Bring all events from the journal into Parquet segments now, for `penstock table sync` and others.

    The log does so by itself when a journal file is full, or after `journal.roll_after_s`.
    """

    async def work(bus: penstock.Bus) -> None:
        await bus.topics.seal()

    change(invocation, work)
    output.note("sealed: every event that was in the journal is in a segment")


@command.command("configure")
@click.argument("name", shell_complete=complete_topic)
@_retention
@click.pass_obj
def configure(invocation: Invocation, /, name: str, **options: Any) -> None:
    """Change what is configured for a topic; what is not named stays as it is."""
    chosen = {key: value for key, value in options.items() if value is not None}
    if not chosen:
        raise click.UsageError("name at least one thing to change, such as --retention-age 7d")

    async def work(bus: penstock.Bus) -> Any:
        await bus.topics.configure(name, **chosen)
        return await bus.topics.info(name)

    _show(invocation, change(invocation, work))


@command.command("delete")
@click.argument("name", shell_complete=complete_topic)
@confirm_options("DELETE")
@click.pass_obj
def delete(invocation: Invocation, name: str, confirm: str, dry_run: bool) -> None:
    """Delete a topic and its events; refused inside write-once retention."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        return await bus.topics.delete(name, confirm=confirm, dry_run=dry_run)

    what = f"deletes the topic {name} and every event in it"
    destroy(invocation, "DELETE", confirm, dry_run, what, work, show_effect(invocation, "deleted"))

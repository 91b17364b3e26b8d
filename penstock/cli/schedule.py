"""`penstock schedule`: events that are published repeatedly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import (
    Invocation,
    Noun,
    change,
    confirm_options,
    destroy,
    look,
    show_effect,
)

if TYPE_CHECKING:
    import penstock

COLUMNS = ["id", "topic", "cron", "every", "next_us", "missed"]


@click.group("schedule", cls=Noun)
def command() -> None:
    """List, add and remove recurring events.

    They are published by whichever process has the bus open for writing at that time.
    """


@command.command("list")
@click.pass_obj
def list_(invocation: Invocation) -> None:
    """List the recurring events."""

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.schedules.list())

    rows = [output.plain(found) for found in look(invocation, work)]
    if not invocation.json:
        rows = [row | {"every": _every(row.get("every_us"))} for row in rows]
    output.show_rows(invocation, rows, COLUMNS)


def _every(every_us: int | None) -> str | None:
    return None if every_us is None else f"{every_us / 1_000_000:g} s"


@command.command("add")
@click.argument("schedule_id", metavar="ID")
@click.argument("topic")
@click.argument("value")
@click.option("--cron", help="When, as a cron expression such as '0 9 * * 1-5' (UTC).")
@click.option("--every", help="How often, such as 90s or 5m.")
@click.option(
    "--header", "pairs", multiple=True, metavar="NAME=VALUE", help="A header; repeat for several."
)
@click.pass_obj
def add(invocation: Invocation, schedule_id: str, topic: str, value: str, cron: str | None, every: str | None, pairs: tuple[str, ...]) -> None:  # fmt: skip
    """Publish VALUE to TOPIC again and again; replaces the schedule of that ID.

    VALUE is published as JSON where it is JSON, as raw text otherwise.
    """
    from penstock.cli.publish import parse_headers, parse_value

    if (cron is None) == (every is None):
        raise click.UsageError("give --cron or --every, one of them")
    headers = parse_headers(pairs)

    async def work(bus: penstock.Bus) -> None:
        await bus.schedules.put(
            schedule_id, topic, parse_value(value), cron=cron, every=every, headers=headers or None
        )

    change(invocation, work, creates=True)
    output.show_record(invocation, {"added": schedule_id, "topic": topic})


@command.command("remove")
@click.argument("schedule_id", metavar="ID")
@confirm_options("REMOVE")
@click.pass_obj
def remove(invocation: Invocation, schedule_id: str, confirm: str, dry_run: bool) -> None:
    """Remove a recurring event."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        return await bus.schedules.remove(schedule_id, confirm=confirm, dry_run=dry_run)

    what = f"removes the recurring event {schedule_id}, and what it publishes with it"
    destroy(invocation, "REMOVE", confirm, dry_run, what, work, show_effect(invocation, "removed"))

"""`penstock group`: consumer groups, how far they are, and moving them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import POSITION
from penstock.cli.invocation import (
    Invocation,
    Noun,
    complete_group,
    complete_topic,
    confirm_options,
    destroy,
    look,
    show_effect,
)

if TYPE_CHECKING:
    import penstock


@click.group("group", cls=Noun)
def command() -> None:
    """List, inspect, move and delete consumer groups."""


@command.command("list")
@click.pass_obj
def list_(invocation: Invocation) -> None:
    """List the groups and how far each lags behind."""

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.groups.list())

    rows = [output.plain(group) for group in look(invocation, work)]
    if not invocation.json:
        rows = [row | {"members": _count(row.get("members"))} for row in rows]
    output.show_rows(invocation, rows, ["name", "mode", "patterns", "members", "lag", "lost"])


def _count(members: Any) -> Any:
    return len(members) if isinstance(members, list) else members


@command.command("info")
@click.argument("name", shell_complete=complete_group)
@click.pass_obj
def info(invocation: Invocation, name: str) -> None:
    """Show a group and where it stands in each partition."""

    async def work(bus: penstock.Bus) -> Any:
        return await bus.groups.info(name)

    _show(invocation, look(invocation, work))


def _show(invocation: Invocation, found: Any, **more: Any) -> None:
    record = output.plain(found) | more
    if invocation.json:
        output.print_json(record)
        return
    lanes = record.pop("lanes", [])
    output.show_record(invocation, record)
    output.print_text("")
    output.show_rows(invocation, lanes, list(lanes[0]) if lanes else [])


@command.command("reset")
@click.argument("name", shell_complete=complete_group)
@click.option("--to", "position", type=POSITION, required=True, help="earliest, latest, offset:42, a time or 2h ago.")  # fmt: skip
@click.option("--topic", shell_complete=complete_topic, help="Only in this topic.")
@confirm_options("RESET")
@click.pass_obj
def reset(invocation: Invocation, name: str, position: Any, topic: str | None, confirm: str, dry_run: bool) -> None:  # fmt: skip
    """Move a group to another place; it goes on from there.

    With --dry-run, and before it asks, it shows where the group would be, and the lag it has now.
    """

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> tuple[Any, Any]:
        before = await bus.groups.info(name)
        how: dict[str, Any] = {"topic": topic, "confirm": confirm, "dry_run": dry_run}
        return before, await bus.groups.reset(name, position, **how)

    def show(found: tuple[Any, Any]) -> None:
        before, after = found
        _show(invocation, after, lag_before=before.lag)

    what = f"moves the group {name}: events are delivered again, or never"
    destroy(invocation, "RESET", confirm, dry_run, what, work, show)


@command.command("delete")
@click.argument("name", shell_complete=complete_group)
@confirm_options("DELETE")
@click.pass_obj
def delete(invocation: Invocation, name: str, confirm: str, dry_run: bool) -> None:
    """Delete a group: its place is forgotten, the events stay."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        return await bus.groups.delete(name, confirm=confirm, dry_run=dry_run)

    what = f"makes the group {name} forget its place"
    destroy(invocation, "DELETE", confirm, dry_run, what, work, show_effect(invocation, "deleted"))

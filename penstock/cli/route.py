"""`penstock route`: the catalogue that says which destinations a topic goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
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
    import penstock

TYPES = ("fanout", "direct", "group")
COLUMNS = ["pattern", "destination", "type", "priority", "enabled", "tenant"]


@click.group("route", cls=Noun)
def command() -> None:
    """List and change routes, and ask where a topic goes."""


@command.command("list")
@click.pass_obj
def list_(invocation: Invocation) -> None:
    """List the routes."""

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.routes.list())

    output.show_rows(invocation, map(output.plain, look(invocation, work)), COLUMNS)


@command.command("add")
@click.argument("pattern")
@click.argument("destination")
@click.option(
    "--type",
    "type_",
    type=click.Choice(TYPES),
    default="fanout",
    show_default=True,
    help="How the destination receives.",
)
@click.option("--priority", type=int, default=0, show_default=True, help="Higher is served first.")
@click.option("--tenant", help="Only for this tenant.")
@click.option("--disabled", is_flag=True, help="Put it down without using it yet.")
@click.pass_obj
def add(invocation: Invocation, pattern: str, destination: str, type_: Any, priority: int, tenant: str | None, disabled: bool) -> None:  # fmt: skip
    """Add or replace the route from PATTERN to DESTINATION."""

    async def work(bus: penstock.Bus) -> None:
        import penstock

        await bus.routes.put(
            penstock.Route(
                pattern=pattern,
                destination=destination,
                type=type_,
                priority=priority,
                tenant=tenant,
                enabled=not disabled,
            )
        )

    change(invocation, work, creates=True)
    output.show_record(invocation, {"added": pattern, "destination": destination})


def _pair(verb: str, done: str, help: str) -> None:
    """Commands that take a route by its pattern and destination."""

    @command.command(verb, help=help)
    @click.argument("pattern")
    @click.argument("destination")
    @click.pass_obj
    def run(invocation: Invocation, pattern: str, destination: str) -> None:
        async def work(bus: penstock.Bus) -> None:
            await getattr(bus.routes, verb)(pattern, destination)

        change(invocation, work)
        output.show_record(invocation, {done: pattern, "destination": destination})


@command.command("remove")
@click.argument("pattern")
@click.argument("destination")
@confirm_options("REMOVE")
@click.pass_obj
def remove(
    invocation: Invocation, pattern: str, destination: str, confirm: str, dry_run: bool
) -> None:
    """Remove a route."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        return await bus.routes.remove(pattern, destination, confirm=confirm, dry_run=dry_run)

    what = f"removes the route from {pattern} to {destination}"
    destroy(invocation, "REMOVE", confirm, dry_run, what, work, show_effect(invocation, "removed"))


_pair("enable", "enabled", "Use a route again.")
_pair("disable", "disabled", "Keep a route without using it.")


@command.command("resolve")
@click.argument("topic", shell_complete=complete_topic)
@click.option("--tenant", help="As seen by this tenant.")
@click.pass_obj
def resolve(invocation: Invocation, topic: str, tenant: str | None) -> None:
    """Show where an event of TOPIC goes, in order."""

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.routes.resolve(topic, tenant=tenant))

    output.show_rows(invocation, map(output.plain, look(invocation, work)), COLUMNS)

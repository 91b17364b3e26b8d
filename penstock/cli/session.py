"""`penstock session`: the connected clients of a broker, and the events that each holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import Invocation, Noun, look, require_broker
from penstock.cli.output import note_rest, page_options

if TYPE_CHECKING:
    import penstock

COLUMNS = ["id", "client", "tenant", "subject", "peer", "connected", "silent_s", "held", "groups"]


@click.group("session", cls=Noun)
def command() -> None:
    """Look at the sessions of a broker's clients."""


@command.command("list")
@page_options(limit=1_000)
@click.pass_obj
def list_(invocation: Invocation, limit: int, offset: int) -> None:
    """List the sessions of clients: those of your tenant, all for an admin; says when there are more.

    A session outlives its connection: one without a connection waits for its client to come back.
    """
    require_broker(invocation.url, "sessions")

    async def work(bus: penstock.Bus) -> list[Any]:
        from penstock.engines.requests import ListSessions

        return list(await bus.ask(ListSessions()))

    found = look(invocation, work)
    rows = found[offset : offset + limit]
    output.show_rows(invocation, map(output.plain, rows), COLUMNS)
    note_rest(len(found), limit, offset)

"""`penstock tenant`: limits and usage of each tenant of a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import Invocation, Noun, look, require_broker
from penstock.cli.output import note_rest, page_options

if TYPE_CHECKING:
    import penstock

COLUMNS = ["tenant", "stored_bytes", "ingress_events", "limits", "refusals"]


@click.group("tenant", cls=Noun)
def command() -> None:
    """Look at the tenants of a broker."""


@command.command("list")
@page_options(limit=1_000)
@click.pass_obj
def list_(invocation: Invocation, limit: int, offset: int) -> None:
    """List tenants, their limits in force and their use: your own, all for an admin."""
    require_broker(invocation.url, "tenants")

    async def work(bus: penstock.Bus) -> list[Any]:
        from penstock.engines.requests import ListTenants

        return list(await bus.ask(ListTenants()))

    found = look(invocation, work)
    rows = [output.plain(row) for row in found[offset : offset + limit]]
    if not invocation.json:  # only what is set and what happened
        rows = [row | {"limits": _limits(row), "refusals": _short(row["refusals"])} for row in rows]
    output.show_rows(invocation, rows, COLUMNS)
    note_rest(len(found), limit, offset)


def _limits(row: dict[str, Any]) -> str | None:
    limits: dict[str, Any] = row["limits"]
    if limits["events_per_s"] is None and limits["bytes_per_s"] is None:
        limits = limits | {"burst_s": None}  # it says something of a rate, and there is none
    return _short(limits)


def _short(table: dict[str, Any]) -> str | None:
    words = [f"{name} {value}" for name, value in table.items() if value is not None]
    return ", ".join(words) or None

"""`penstock tail`: follow topics as events are committed, while another process writes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import MOMENT, POSITION
from penstock.cli.invocation import INTERRUPTED, Invocation, complete_topic, leaf, look
from penstock.cli.output import FORMAT_HELP, renderer

if TYPE_CHECKING:
    import penstock

LOOK_UP_S = 1.0  # how often a quiet tail checks whether its output still has a reader


@leaf("tail")
@click.argument("pattern", shell_complete=complete_topic)
@click.option(
    "--from",
    "start",
    type=POSITION,
    help="Begin at earliest, latest (the default), offset:42, a time or 2h ago.",
)
@click.option("--since", type=MOMENT, help="Begin at a time, or 2h ago.")
@click.option("--limit", type=click.IntRange(min=1), help="End after so many events.")
@click.option("--format", "format_", default="line", metavar="FORMAT", help=FORMAT_HELP)
@click.pass_obj
def command(invocation: Invocation, pattern: str, start: Any, since: Any, limit: int | None, format_: str) -> None:  # fmt: skip
    """Follow the events of PATTERN until Ctrl-C.

    Reads only: it needs no lock, leaves no trace, and sees what is committed.
    """
    if start is not None and since is not None:
        raise click.UsageError("--from and --since exclude each other")
    render = renderer(format_, json=invocation.json)
    begin = since if since is not None else start if start is not None else "latest"

    async def work(bus: penstock.Bus) -> None:
        left = limit
        async with bus.subscribe(pattern, mode="log", start=begin) as subscription:
            while left is None or left > 0:
                event = await subscription.get(timeout_s=LOOK_UP_S)
                if event is None:
                    if output.reader_gone():
                        return
                    continue
                output.print_bytes(render(event))
                sys.stdout.flush()
                left = None if left is None else left - 1

    try:
        look(invocation, work)
    except KeyboardInterrupt:  # how a tail usually ends: nothing to complain about
        raise click.exceptions.Exit(INTERRUPTED) from None

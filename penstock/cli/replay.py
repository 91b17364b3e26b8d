"""`penstock replay`: print stored events of a period or of a range of offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import MOMENT
from penstock.cli.invocation import Invocation, complete_topic, leaf, look
from penstock.cli.output import FORMAT_HELP, renderer

if TYPE_CHECKING:
    import penstock


@leaf("replay")
@click.argument("pattern", shell_complete=complete_topic)
@click.option("--since", type=MOMENT, help="From this time on, or 2h ago.")
@click.option("--until", type=MOMENT, help="Up to this time, which is not included.")
@click.option(
    "--from-offset", type=click.IntRange(min=0), help="From this offset of each partition on."
)
@click.option(
    "--to-offset", type=click.IntRange(min=0), help="Up to this offset, which is not included."
)
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option("--limit", type=click.IntRange(min=1), help="End after so many events.")
@click.option("--format", "format_", default="line", metavar="FORMAT", help=FORMAT_HELP)
@click.pass_obj
def command(invocation: Invocation, /, pattern: str, limit: int | None, format_: str, **span: Any) -> None:  # fmt: skip
    """Print the stored events of PATTERN, oldest first, and end.

    Reads only; nothing is delivered again to anybody. A topic that does not exist is an error; a
    pattern that matches nothing prints nothing.
    """
    render = renderer(format_, json=invocation.json)

    async def work(bus: penstock.Bus) -> None:
        left = limit
        async for event in bus.replay(pattern, **span):
            output.print_bytes(render(event))
            if left is not None:
                left -= 1
                if left == 0:
                    return

    look(invocation, work)

"""`penstock request`: publish a question and print what a handler answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import output
from penstock.cli.invocation import Invocation, change, complete_topic, leaf
from penstock.cli.publish import parse_headers, parse_value

if TYPE_CHECKING:
    import penstock

DEFAULT_S = 5.0


@leaf("request")
@click.argument("topic", shell_complete=complete_topic)
@click.argument("value")
@click.option("--key", help="Key of the request.")
@click.option("--header", "pairs", multiple=True, metavar="NAME=VALUE", help="A header; repeat for several.")  # fmt: skip
@click.pass_obj
def command(invocation: Invocation, topic: str, value: str, key: str | None, pairs: tuple[str, ...]) -> None:  # fmt: skip
    """Publish VALUE to TOPIC as a request, and print the answer of its handler.

    The answer has five seconds, or what --timeout says; without one by then the command ends with 7.
    """
    timeout_s = DEFAULT_S if invocation.timeout_s is None else invocation.timeout_s

    async def work(bus: penstock.Bus) -> Any:
        return await bus.request(topic, parse_value(value), timeout_s=timeout_s, key=key, headers=parse_headers(pairs))  # fmt: skip

    answer = change(invocation, work)
    if invocation.json:
        output.print_json({"answer": answer})
    elif isinstance(answer, bytes):
        output.print_bytes(answer)
    elif isinstance(answer, str):
        output.print_text(answer)
    else:
        output.print_bytes(msgspec.json.encode(output.plain(answer)) + b"\n")

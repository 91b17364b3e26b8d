"""`penstock reply`: answer requests with a value or with what a program writes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import click

from penstock.cli import output
from penstock.cli.invocation import (
    INTERRUPTED,
    TERMINATED,
    Invocation,
    change,
    complete_topic,
    leaf,
)
from penstock.cli.program import EXEC_HELP, HOPELESS, run_program
from penstock.cli.publish import parse_value
from penstock.model.errors import DeliveryError, InvalidInput

if TYPE_CHECKING:
    import penstock


@leaf("reply")
@click.argument("pattern", shell_complete=complete_topic)
@click.argument("value", required=False)
@click.option("--group", default="reply", show_default=True, help="The group that answers; its members share the requests.")  # fmt: skip
@click.option("--exec", "program", metavar="COMMAND", help=EXEC_HELP + " What it writes is the answer.")  # fmt: skip
@click.option("--max", "most", type=click.IntRange(min=1), help="End after so many requests.")
@click.pass_obj
def command(invocation: Invocation, pattern: str, value: str | None, group: str, program: str | None, most: int | None) -> None:  # fmt: skip
    """Answer the requests on PATTERN: with VALUE, or with what a program writes.

    Runs until Ctrl-C. JSON that the program writes is sent as JSON, anything else as its bytes.
    """
    if (value is None) == (program is None):
        raise click.UsageError("give a VALUE or --exec COMMAND")
    stopping = asyncio.Event()
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        stopping.set()

    async def work(bus: penstock.Bus) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        answered = 0
        async with bus.subscribe(pattern, group=group, start="latest", max_inflight=1) as events:
            output.note(f"answering requests on {pattern}; end with Ctrl-C")
            while not stopping.is_set() and (most is None or answered < most):
                event = await events.get(timeout_s=0.5)
                if event is not None:
                    answered += await _settled(bus, event, value, program, stopping)
            await bus.flush()
        return answered

    answered = change(invocation, work, creates=True)
    output.note(f"{answered} requests answered")
    if signals:
        raise click.exceptions.Exit(INTERRUPTED if signals[0] == signal.SIGINT else TERMINATED)


async def _settled(bus: penstock.Bus, event: penstock.Event, value: str | None, program: str | None, stopping: asyncio.Event) -> bool:  # fmt: skip
    """Answer one request and settle it; what is wrong with it is told, and ends nothing else."""
    try:
        return await _answer(bus, event, value, program, stopping)
    except InvalidInput as error:
        output.note(f"{event.id} attempt {event.attempt}: {error.message}, rejected")
        await event.reject(error.message)
    except DeliveryError as error:
        output.note(f"{event.id} attempt {event.attempt}: {error.message}")
    return False


async def _answer(bus: penstock.Bus, event: penstock.Event, value: str | None, program: str | None, stopping: asyncio.Event) -> bool:  # fmt: skip
    if program is None:
        await bus.reply(event, parse_value(value or ""))
    else:
        lease_s = bus.settings.delivery.lease_s
        ended = await run_program(program, event, lease_s=lease_s, capture=True, stopping=stopping)
        if ended.status:
            output.note(f"{event.id} attempt {event.attempt}: {ended.reason}")
            settle = event.reject if ended.status == HOPELESS else event.nack
            await settle(reason=ended.reason)
            return False
        await bus.reply(event, parse_value(ended.stdout.rstrip(b"\n").decode(errors="surrogateescape")))  # fmt: skip
    await event.ack()
    return True

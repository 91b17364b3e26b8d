"""`penstock consume`: take events of a group, print them or run a program for each, and settle them."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import DURATION, POSITION
from penstock.cli.invocation import (
    INTERRUPTED,
    TERMINATED,
    Invocation,
    change,
    complete_group,
    complete_topic,
    leaf,
)
from penstock.cli.output import FORMAT_HELP, renderer
from penstock.cli.program import EXEC_HELP, HOPELESS, run_program
from penstock.cli.publish import parse_headers
from penstock.model.errors import DeliveryError

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock

LOOK_UP_S = 0.5
"""How often a quiet consumer looks whether it was asked to stop or its reader is gone."""


@dataclass
class Consumption:
    """What a run of `consume` takes, what it does with it, and how far it is."""

    most: int | None
    idle_s: float | None
    lease_s: float
    program: str | None
    render: Callable[[penstock.Event], bytes]
    json: bool
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    signal: int = 0
    taken: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def work(self, events: penstock.Subscription) -> None:
        """Take and settle one event after another until it is time to end."""
        while (event := await self._next(events)) is not None:
            try:
                outcome = await self._settle(event)
            except DeliveryError as error:  # it was reset, deleted or given to another meanwhile
                outcome = "lost"
                output.note(f"{event.id} attempt {event.attempt}: {error.message}, {outcome}")
            self.counts[outcome] = self.counts.get(outcome, 0) + 1

    async def _next(self, events: penstock.Subscription) -> penstock.Event | None:
        async with self._turn:
            idle_s = 0.0
            while not self.stopping.is_set() and (self.most is None or self.taken < self.most):
                event = await events.get(timeout_s=LOOK_UP_S)
                if event is not None:
                    self.taken += 1
                    return event
                idle_s += LOOK_UP_S
                if output.reader_gone() or (self.idle_s is not None and idle_s >= self.idle_s):
                    break
        return None

    async def _settle(self, event: penstock.Event) -> str:
        if self.program is None:
            output.print_bytes(self.render(event))
            sys.stdout.flush()
            await event.ack()
            return "acked"
        ended = await run_program(
            self.program, event, lease_s=self.lease_s, capture=False, stopping=self.stopping
        )
        if ended.status == 0:
            await event.ack()
            outcome = "acked"
        elif ended.status == HOPELESS:
            await event.reject(ended.reason)
            outcome = "rejected"
        else:
            await event.nack(reason=ended.reason)
            outcome = "nacked"
        if self.json:
            row = {"id": str(event.id), "attempt": event.attempt, "status": ended.status}
            output.print_json(row | {"outcome": outcome})
            sys.stdout.flush()
        elif ended.status:
            output.note(f"{event.id} attempt {event.attempt}: {ended.reason}, {outcome}")
        return outcome

    def stop(self, number: int) -> None:
        """Asked to end: what is at work is finished first."""
        self.signal = number
        self.stopping.set()


@leaf("consume")
@click.argument("pattern", shell_complete=complete_topic)
@click.option("--group", required=True, shell_complete=complete_group, help="The group whose events these are; it is made when it is new.")  # fmt: skip
@click.option("--max", "most", type=click.IntRange(min=1), help="End after so many events.")
@click.option("--idle", "idle_s", type=DURATION, help="End when no event came for this long. Default: wait until Ctrl-C.")  # fmt: skip
@click.option("--exec", "program", metavar="COMMAND", help=EXEC_HELP)
@click.option("--concurrency", type=click.IntRange(1, 1_000), default=1, show_default=True, help="Programs at a time, with --exec.")  # fmt: skip
@click.option("--start", type=POSITION, help="Where a new group begins: earliest (the default), latest, an offset, a time or 2h ago.")  # fmt: skip
@click.option("--order", type=click.Choice(["any", "key", "single"]), default="any", show_default=True, help="key: events of a key one at a time; single: one consumer at a time.")  # fmt: skip
@click.option("--filter", "pairs", multiple=True, metavar="NAME=VALUE", help="Only events with this header; repeat for several.")  # fmt: skip
@click.option("--lease", "lease_s", type=DURATION, help="How long an event is this consumer's; extended while its program runs.")  # fmt: skip
@click.option("--format", "format_", default="line", metavar="FORMAT", help=FORMAT_HELP)
@click.pass_obj
def command(
    invocation: Invocation,
    /,
    pattern: str,
    group: str,
    concurrency: int,
    start: Any,
    order: str,
    pairs: tuple[str, ...],
    lease_s: float | None,
    format_: str,
    most: int | None,
    idle_s: float | None,
    program: str | None,
) -> None:
    """Take the events of PATTERN as a member of a group, and settle each.

    Without --exec each event is printed and then acked. Ctrl-C ends after the events at work; what
    was not settled goes back to the group. `tail` looks without taking.
    """
    if program is None and concurrency > 1:
        raise click.UsageError("--concurrency goes with --exec")
    render = renderer(format_, json=invocation.json)
    lease = invocation.settings().delivery.lease_s if lease_s is None else lease_s
    runs: list[Consumption] = []

    async def work(bus: penstock.Bus) -> None:
        run = Consumption(most, idle_s, lease, program, render, invocation.json)
        runs.append(run)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, run.stop, number)
        inflight = concurrency if program else min(most or 256, 256)
        async with bus.subscribe(
            pattern, group=group, start=start, order=order, filter=parse_headers(pairs), lease_s=lease,
            max_inflight=inflight,
        ) as events:  # fmt: skip
            await asyncio.gather(*(run.work(events) for _ in range(concurrency)))
            await bus.flush()

    change(invocation, work, creates=True)
    run = runs[0]
    parts = [f"{count} {outcome}" for outcome, count in sorted(run.counts.items())]
    output.note(f"{run.taken} events{': ' if parts else ''}{', '.join(parts)}")
    if run.signal:
        stopped = INTERRUPTED if run.signal == signal.SIGINT else TERMINATED
        raise click.exceptions.Exit(stopped)

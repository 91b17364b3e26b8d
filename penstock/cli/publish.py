"""`penstock publish`: events from the command line, from files or from a pipe into a topic."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import exits, output
from penstock.cli.complete import complete_topic
from penstock.cli.intake import STDIN, Stretch, check_sources
from penstock.cli.invocation import Invocation, leaf
from penstock.cli.publisher import Plan, Publisher, Tally, publish_all
from penstock.cli.visit import change
from penstock.cli.when import DURATION, FUTURE
from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock

DEFAULT_BATCH = 1_000  # lines in one commit: enough to be fast, few enough to report progress
MAX_BATCH = 100_000  # a commit takes them at once


def parse_headers(pairs: Sequence[str]) -> dict[str, str]:
    """Headers given as NAME=VALUE.

    >>> parse_headers(["source=shop", "query=a=b"])
    {'source': 'shop', 'query': 'a=b'}
    """
    headers = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--header {text}: write it as NAME=VALUE")
        headers[name] = value
    return headers


@leaf("publish")
@click.argument("topic", shell_complete=complete_topic)
@click.argument("values", metavar="[VALUE]", nargs=-1)
@click.option(
    "--file", "files", multiple=True, metavar="FILE", help="Publish this file; repeat for several."
)
@click.option("--lines", is_flag=True, help="Each line is an event; VALUE is then a file to read.")
@click.option(
    "--ndjson", is_flag=True, help="Each line is a JSON document; VALUE is then a file to read."
)
@click.option("--key", help="Key of the events: equal keys stay in order.")
@click.option(
    "--header", "pairs", multiple=True, metavar="NAME=VALUE", help="A header; repeat for several."
)
@click.option(
    "--codec",
    help="json, msgpack, raw or a registered one. Default: json for what is JSON, else raw; raw with --lines.",
)
@click.option("--delay", "delay_s", type=DURATION, help="Deliver this much later.")
@click.option("--at", "deliver_at", type=FUTURE, help="Deliver at this time.")
@click.option("--ttl", "ttl_s", type=DURATION, help="Do not deliver after this much time.")
@click.option(
    "--priority", type=click.IntRange(0, 9), default=0, help="0 to 9; higher goes first in a queue."
)
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="Publishing again under this key stores nothing; with --lines or --ndjson the number of the line is added to it.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MAX_BATCH),
    default=DEFAULT_BATCH,
    show_default=True,
    help="Most lines in one commit.",
)
@click.pass_obj
def command(
    invocation: Invocation,
    /,
    values: tuple[str, ...],
    files: tuple[str, ...],
    pairs: tuple[str, ...],
    **options: Any,
) -> None:
    """Publish events to TOPIC; they are durable when the command ends.

    The event is VALUE, or each --file, or stdin. With --lines or --ndjson each line of the files
    named (or of stdin) is one. Ctrl-C in between ends after the commit under way and says exactly
    how many events were acknowledged.
    """
    plan = Plan(headers=parse_headers(pairs), **options)
    _check_usage(plan, values, files)
    paths = [*files, *values] if plan.many else list(files)
    if values == ("-",) and not plan.many and plan.codec is None:
        raise click.UsageError(
            "'-' is no way to name stdin: leave VALUE out to publish what comes in there, or publish this text "
            "with --codec raw"
        )
    if len(values) == 1 and not plan.many and plan.codec is None and os.path.isfile(values[0]):
        raise click.UsageError(
            f"{values[0]!r} is a file here. Publish what is in it with --file {shlex.quote(values[0])}, or "
            "this text with --codec raw"
        )
    direct = None if plan.many or not values else values[0].encode(errors="surrogateescape")
    check_sources(paths)
    if direct is None and not paths:
        paths = [STDIN]
        if sys.stdin.isatty():
            output.note("reading events from the terminal; end with Ctrl-D")
    _publish(invocation, plan, direct, paths)


def _check_usage(plan: Plan, values: Sequence[str], files: Sequence[str]) -> None:
    if plan.lines and plan.ndjson:
        raise click.UsageError("--lines and --ndjson exclude each other")
    if plan.delay_s is not None and plan.deliver_at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    if not plan.many and (len(values) > 1 or (values and files)):
        raise click.UsageError("give one VALUE, or files with --file, or use --lines or --ndjson")
    if plan.idempotency_key is not None and not plan.many and len(files) > 1:
        raise click.UsageError("--idempotency-key names one event; publish the files one by one")


def _publish(invocation: Invocation, plan: Plan, direct: bytes | None, paths: list[str]) -> None:
    max_bytes = invocation.settings().limits.max_payload_bytes
    publishers: list[Publisher] = []

    async def work(bus: penstock.Bus) -> signal.Signals | None:
        publisher = Publisher(bus, plan)
        publishers.append(publisher)
        if direct is not None:
            await publisher.send_one(Stretch("the value", 1, [direct]))
            return None
        return await publish_all(publisher, paths, max_bytes)

    try:
        received = change(invocation, work, creates=True)
    except PenstockError as error:
        if plan.many and publishers:
            _add_count(error, publishers[0].tally)
        raise
    publisher = publishers[0]
    if received is not None:
        _report_interrupt(invocation, publisher)
        raise click.exceptions.Exit(exits.INTERRUPTED if received == signal.SIGINT else exits.TERMINATED)  # fmt: skip
    _report(invocation, publisher)


def _add_count(error: PenstockError, tally: Tally) -> None:
    """An error in the middle must say what is stored all the same."""
    error.data["acknowledged"] = tally.acknowledged
    error.message += f". {tally.acknowledged} events were acknowledged before"


def _report_interrupt(invocation: Invocation, publisher: Publisher) -> None:
    tally = publisher.tally
    if invocation.json:
        record = tally.record(publisher.plan.topic)
        output.print_json(record | {"interrupted": True, "unknown": tally.pending})
        return
    text = f"interrupted: {tally.acknowledged} events were acknowledged"
    if tally.pending:
        text += f"; {tally.pending} more were on their way and may or may not be stored"
    output.note(text)


def _report(invocation: Invocation, publisher: Publisher) -> None:
    tally, plan, receipt = publisher.tally, publisher.plan, publisher.receipt
    if plan.many or tally.acknowledged != 1 or receipt is None:
        if invocation.json:
            output.print_json(tally.record(plan.topic))
        else:
            again = f", {tally.duplicates} of them stored before" if tally.duplicates else ""
            output.print_text(f"{tally.acknowledged} events acknowledged{again}")
        return
    where = str(receipt.ids()[0]) if not receipt.scheduled else f"{receipt.topic}, scheduled"
    if not invocation.json:
        output.print_text(where + (" (stored before)" if receipt.duplicate else ""))
        return
    output.print_json(
        {
            "id": None if receipt.scheduled else where,
            "topic": receipt.topic,
            "partition": receipt.partition,
            "offset": receipt.offset,
            "count": receipt.count,
            "token": receipt.token.hex(),
            "duplicate": receipt.duplicate,
            "scheduled": receipt.scheduled,
        }
    )

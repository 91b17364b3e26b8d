"""`penstock dlq`: list, inspect, replay, make and purge dead letters.

Every change has an actor and a reason for the audit trail; a broker that is shown a token knows the
actor, and without a token the actor is the user who runs the command. Replay wants the original consumer and
topic restated and `--confirm REPLAY`; purge wants `--confirm PURGE`.
"""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import (
    FAILED,
    Invocation,
    Noun,
    change,
    complete_group,
    complete_topic,
    confirm_options,
    destroy,
    is_broker,
    look,
)
from penstock.cli.output import key_text, page_options, payload_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import penstock

F = Any
COLUMNS = ["id", "consumer", "topic", "partition", "offset", "attempts", "replay_count", "dead_lettered_at_us", "reason"]  # fmt: skip


@click.group("dlq", cls=Noun)
def command() -> None:
    """List, inspect, replay, make and purge dead letters."""


def _audited(function: F) -> F:
    options: list[Callable[[F], F]] = [
        click.option("--actor", default="", callback=_actor, help="Who does it, for the audit trail. With a token (client.token) the broker knows; else `local:` and your name on this machine."),
        click.option("--reason", "--mutation-reason", "reason", required=True, help="Why, for the audit trail."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def _actor(context: click.Context, option: click.Parameter, stated: str) -> str:
    """The actor of a change; empty when the broker knows it from the token.

    The prefix `local:` marks a name that only this machine claims, without proof.
    """
    invocation = context.ensure_object(Invocation)
    client = invocation.settings().client if is_broker(invocation.url) else None
    known = client is not None and (client.token or client.token_file)
    return stated or ("" if known else f"local:{system_user()}")


def system_user() -> str:
    """Who runs this, as the system knows it; the environment could say anything."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container that was given a number only
        return str(number)


def _ids(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Several ids: repeated, or separated by commas; each once."""
    found = [name.strip() for text in values for name in text.split(",")]
    ids = list(dict.fromkeys(name for name in found if name))
    if not ids:
        raise click.BadParameter("give at least one id", ctx=context, param=option)
    return ids


def _ids_option() -> Callable[[F], F]:
    return click.option("--ids", "--id", "ids", multiple=True, required=True, callback=_ids, metavar="ID,...", help="Ids as `dlq list` shows them; separate by commas or repeat.")  # fmt: skip


def _detail(letter: Any) -> dict[str, Any]:
    """A dead letter with the event itself, as one flat record."""
    record: dict[str, Any] = output.plain(letter.record)
    record |= {
        "token": letter.token,
        "key": key_text(letter.key),
        "headers": letter.headers,
        "codec": letter.codec,
    }
    return record | payload_fields(letter.payload, letter.codec)


@command.command("list")
@click.option("--consumer", shell_complete=complete_group, help="Only of this consumer group.")
@click.option("--topic", shell_complete=complete_topic, help="Only of this topic.")
@click.option("--tenant", help="Only of this tenant.")
@click.option("--everything", is_flag=True, help="Those that were replayed, too.")
@page_options(limit=100)
@click.pass_obj
def list_(invocation: Invocation, /, **selection: Any) -> None:
    """List dead letters, newest first; says on stderr when there are more."""
    limit, offset = selection["limit"], selection["offset"]

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.dead_letters.list(**selection | {"limit": limit + 1}))

    found = look(invocation, work)
    columns = [*COLUMNS, "status"] if selection["everything"] else COLUMNS
    output.show_rows(invocation, map(output.plain, found[:limit]), columns)
    if len(found) > limit:
        output.note(f"there are more: go on with --offset {offset + limit}, or raise --limit")


@command.command("inspect")
@click.option(
    "--id", "letter_id", required=True, metavar="ID", help="The id as `dlq list` shows it."
)
@click.pass_obj
def inspect(invocation: Invocation, letter_id: str) -> None:
    """Show everything about one dead letter, its payload included."""

    async def work(bus: penstock.Bus) -> Any:
        return await bus.dead_letters.inspect(letter_id)

    output.show_record(invocation, _detail(look(invocation, work)))


@command.command("replay")
@_ids_option()
@click.option("--target-consumer", required=True, help="The consumer group they died in, restated.")
@click.option("--target-topic", required=True, help="The topic they came from, restated.")
@_audited
@confirm_options("REPLAY")
@click.pass_obj
def replay(
    invocation: Invocation, /, ids: list[str], confirm: str, dry_run: bool, **how: Any
) -> None:
    """Deliver dead letters again, to the consumer they died in."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        outcome = await bus.dead_letters.replay(ids, confirm=confirm, dry_run=dry_run, **how)
        return "possible" if dry_run else "replayed", outcome

    _change(invocation, "REPLAY", confirm, dry_run, f"delivers {len(ids)} dead letters again", ids, work)  # fmt: skip


@command.command("dead-letter")
@click.option(
    "--id",
    "message_id",
    required=True,
    metavar="ID",
    help="The message as topic/partition/offset; with --payload any id.",
)
@click.option("--consumer", required=True, help="The consumer group that shall not get it.")
@click.option("--topic", required=True, help="The topic it is in.")
@click.option("--payload", help="The message itself, when it is not in the log.")
@_audited
@click.pass_obj
def dead_letter(
    invocation: Invocation, /, message_id: str, payload: str | None, **how: Any
) -> None:
    """Make a dead letter of a message by hand."""
    data = None if payload is None else payload.encode(errors="surrogateescape")

    async def work(bus: penstock.Bus) -> Any:
        return await bus.dead_letters.dead_letter(message_id, payload=data, **how)

    letter = change(invocation, work)
    record = {"requested": 1, "done": 1, "failed": 0, "id": letter.id}
    output.show_record(invocation, record)


@command.command("purge")
@_ids_option()
@_audited
@confirm_options("PURGE")
@click.pass_obj
def purge(
    invocation: Invocation, /, ids: list[str], confirm: str, dry_run: bool, **how: Any
) -> None:
    """Remove dead letters from the dead-letter view; the log keeps its events."""

    async def work(bus: penstock.Bus, confirm: str, dry_run: bool) -> Any:
        outcome = await bus.dead_letters.purge(ids, confirm=confirm, dry_run=dry_run, **how)
        return "possible" if dry_run else "purged", outcome

    _change(invocation, "PURGE", confirm, dry_run, f"purges {len(ids)} dead letters", ids, work)


def _change(invocation: Invocation, word: str, confirm: str, dry_run: bool, what: str, ids: list[str], work: Callable[[penstock.Bus, str, bool], Awaitable[tuple[str, Any]]]) -> None:  # fmt: skip
    failed = False

    def show(found: tuple[str, Any]) -> None:
        nonlocal failed
        failed = _report(invocation, found[0], ids, found[1])

    destroy(invocation, word, confirm, dry_run, what, work, show)
    if failed:
        raise click.exceptions.Exit(FAILED)


def _report(invocation: Invocation, done: str, ids: list[str], outcome: Any) -> bool:
    """One result for each record, then the counts; returns whether any failed."""
    failures = {each["id"]: each for each in output.plain(outcome.failures)}
    results = [
        {"id": name, "result": "failed" if name in failures else done}
        | {key: failures.get(name, {}).get(key) for key in ("code", "message")}
        for name in ids
    ]
    counts = {"requested": outcome.requested, "done": outcome.done, "failed": len(failures)}
    if invocation.json:
        output.print_json(counts | {"results": results, "failures": list(failures.values())})
    else:
        output.show_rows(invocation, results, ["id", "result", "code", "message"])
        output.print_text(f"{outcome.done} of {outcome.requested} {done}, {len(failures)} failed")
    return bool(failures)

"""Confirmation of what destroys something: a word on the command line, or asked for on a terminal.

The word is the verb of the command in capitals. `--dry-run` shows what would happen and changes
nothing. On a terminal a command without the word shows the same and asks for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.visit import T, change
from penstock.model.errors import ConfirmationNeeded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import penstock
    from penstock.cli.invocation import Invocation


def confirm_options(word: str) -> Callable[[Any], Any]:
    """The options `--confirm WORD` and `--dry-run` of a command."""
    confirm = click.option("--confirm", default="", metavar=word, help=f"Must be {word}; on a terminal it is asked for, elsewhere nothing happens without it.")  # fmt: skip
    dry_run = click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")  # fmt: skip
    return lambda function: confirm(dry_run(function))


def destroy(
    invocation: Invocation,
    word: str,
    given: str,
    dry_run: bool,
    what: str,
    work: Callable[[penstock.Bus, str, bool], Awaitable[T]],
    show: Callable[[T], None],
) -> None:
    """Do `work(bus, confirm, dry_run)` when the word was given, or else is given now; `what` says what it does."""

    def run(confirm: str, dry: bool) -> T:
        return change(invocation, lambda bus: work(bus, confirm, dry))

    asks = not given and not invocation.json and sys.stdin.isatty() and sys.stderr.isatty()
    if dry_run or asks:
        show(run("", True))
        output.note("dry run: nothing was changed" if dry_run else f"this {what}")
    if dry_run:
        return
    if asks:
        given = click.prompt(f"type {word} to go on", default="", show_default=False, err=True)
    if given != word:
        raise ConfirmationNeeded(
            f"this {what}. Nothing was changed; repeat with --confirm {word}, or with --dry-run to "
            "see what would happen",
            confirm=word,
        )
    show(run(word, False))


def show_effect(invocation: Invocation, done: str) -> Callable[[Any], None]:
    """Prints an effect: `done` is the word for what happened to its target."""

    def show(effect: Any) -> None:
        record = output.plain(effect)
        head = {done if effect.done else f"would be {done}": effect.target}
        if invocation.json:
            output.print_json({done: effect.target if effect.done else None} | record)
            return
        groups = record.pop("groups")
        rest = {name: record[name] for name in ("events", "sealed_bytes", "topics") if record[name]}
        output.show_record(invocation, head | rest)
        if groups:
            output.print_text("")
            output.show_rows(invocation, groups, list(groups[0]))

    return show

"""The root command: finds commands by name, and turns every error into a message and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import (
    FAILED,
    INTERRUPTED,
    INVALID,
    OK,
    STORAGE,
    Invocation,
    exit_code,
    global_options,
    unknown_command,
)
from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (
    "publish", "consume", "tail", "replay", "request", "reply", "topic", "group", "route", "schedule", "dlq", "audit",
    "session", "tenant", "pipeline", "table", "config", "doctor", "docs", "bench", "demo", "showcase", "completion", "up", "token", "key",
)  # fmt: skip
"""Each is a module of this package with a `command` in it, imported when it is asked for."""

PROGRAM = "penstock"
COMPLETION_VARIABLE = "_PENSTOCK_COMPLETE"


class _ReaderGone(Exception):
    """The reader of stdout is gone."""


class Root(click.Group):
    """`penstock` itself; a command's module is imported only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            raise unknown_command(ctx, cmd_name, COMMANDS)
        module = importlib.import_module(f"penstock.cli.{cmd_name}")
        found: click.Command = module.command
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a closed pipe is an end, not an error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error


def _print_version(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from penstock import __version__

        click.echo(f"penstock {__version__}")
        context.exit()


root = Root(
    name=PROGRAM,
    help="A durable event bus: publish, follow, replay and administer.",
    epilog="Options of all commands may also stand behind the command. `penstock docs cli` has "
    "every command and what the exit codes mean.",
    params=[
        *global_options(at_root=True),
        click.Option(
            ["--version"], is_flag=True, expose_value=False, is_eager=True,
            callback=_print_version, help="Print the version.",
        ),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def run(words: Sequence[str]) -> int:
    """Run one command line and return its exit code; nothing escapes but the code.

    >>> run(["--url", "mem:", "topic", "list"])
    0
    """
    invocation = Invocation()
    try:
        code = _run(list(words), invocation)
        sys.stdout.flush()
    except (_ReaderGone, BrokenPipeError):
        _silence_stdout()
        return OK
    return code


def _run(words: list[str], invocation: Invocation) -> int:
    try:
        result = root.main(
            args=words,
            prog_name=PROGRAM,
            complete_var=COMPLETION_VARIABLE,
            standalone_mode=False,
            obj=invocation,
        )
        return result if isinstance(result, int) else OK
    except click.ClickException as error:
        _complain_usage(error, invocation.json or "--json" in words)
        return INVALID
    except click.Abort:
        output.complain("interrupted", "interrupted", json=invocation.json)
        return INTERRUPTED
    except PenstockError as error:
        _trace(invocation)
        output.complain(error.message, error.code, data=error.data, json=invocation.json)
        return exit_code(error.code)
    except (_ReaderGone, BrokenPipeError):
        raise
    except OSError as error:
        _trace(invocation)
        output.complain(f"{error}. Check the path and its permissions", "storage", json=invocation.json)  # fmt: skip
        return STORAGE
    except Exception as error:
        _trace(invocation)
        what = f"{type(error).__name__}: {error}. This is a defect of Penstock; -v shows where"
        output.complain(what, "internal", json=invocation.json)
        return FAILED


def _complain_usage(error: click.ClickException, json: bool) -> None:
    if not json:
        error.show()
        return
    output.complain(error.format_message(), "invalid.usage", json=True)


def _trace(invocation: Invocation) -> None:
    if invocation.verbose:
        traceback.print_exc()


def _silence_stdout() -> None:
    """Keep the interpreter from complaining about the same closed pipe while it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""One run of the command: its global options, its bus, how it ends.

`Invocation` holds the options that every command takes. `look` and `change` open the bus, do the work and
close it. Exit codes follow from error codes. A command that destroys something does it only with
`--confirm` and the word, the verb in capitals; on a terminal it asks for the word and shows the effect
first. `--dry-run` shows the effect and changes nothing.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli import output
from penstock.cli.arguments import DURATION
from penstock.model.errors import ConfirmationNeeded, NotADataFolder, Unsupported
from penstock.model.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import penstock
    from penstock.model.settings import Settings

T = TypeVar("T")

DEFAULT_URL = "./data"
CONNECT_S = 2.0
"""How long a command waits for a broker that does not answer; a person waits for the command."""
NOTICE_S = 1.0
"""A command says that it waits for a broker after this long; most answer in milliseconds."""
COMPLETION_S = 2.0
"""Longest wait for completions: better none than a shell that hangs on Tab."""
ABOUT_FILE = "penstock.json"
"""The file that makes a folder a data folder (penstock.log.recovery)."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


@dataclass
class Invocation:
    """The values of the global options; every command gets it as its first argument."""

    url: str = DEFAULT_URL
    config: str | None = None
    sets: list[str] = field(default_factory=list)
    json: bool = False
    verbose: bool = False
    timeout_s: float | None = None

    @property
    def flags(self) -> dict[str, str]:
        """The `--set` options as the loader wants them."""
        flags = {}
        for text in self.sets:
            key, equals, value = text.partition("=")
            if not equals or not key:
                raise click.UsageError(f"--set {text}: write it as group.field=value")
            flags[key.strip()] = value
        return flags

    def settings(self) -> Settings:
        """File, environment and flags put together; InvalidSettings when one of them is wrong."""
        from msgspec.structs import replace

        from penstock.model.settings_loader import load

        settings = load(self.config, os.environ, self.flags)
        client = settings.client
        if self.timeout_s is not None:
            client = replace(client, connect_s=self.timeout_s, deadline_s=self.timeout_s)
        elif client.connect_s == 0:
            client = replace(client, connect_s=CONNECT_S)
        return replace(settings, client=client)


def folder_of(url: str) -> Path | None:
    """The data folder a URL names; None when it is no path.

    >>> folder_of("./data?mode=ro"), folder_of("file:/data"), folder_of("mem:")
    (PosixPath('data'), PosixPath('/data'), None)
    """
    path = url.partition("?")[0]
    if path.startswith("file:") and (path[5:7] != "//" or path[7:8] == "/"):
        return Path(path[5:].removeprefix("//"))
    return None if _SCHEME.match(url) else Path(path)


def is_broker(url: str) -> bool:
    """Whether a URL leads to a broker.

    >>> is_broker("penstock+zmq://host:5555"), is_broker("./penstock"), is_broker("mem:")
    (True, False, False)
    """
    return bool(_SCHEME.match(url)) and url.lower().startswith("penstock")


def read_only(url: str) -> str:
    """The URL that opens the same folder without becoming its writer.

    >>> read_only("./data"), read_only("./data?mode=ro"), read_only("mem:")
    ('./data?mode=ro', './data?mode=ro', 'mem:')
    """
    if folder_of(url) is None or "mode=" in url.partition("?")[2]:
        return url
    return f"{url}{'&' if '?' in url else '?'}mode=ro"


def _note(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Keep the value of an option from any place on the line; the last one counts."""
    invocation = context.ensure_object(Invocation)
    if option.name == "sets":
        invocation.sets.extend(value)
    elif value is not None and value is not False:
        setattr(invocation, str(option.name), value)
    return value


def global_options(*, at_root: bool) -> list[click.Option]:
    """The options every command takes; below the root only `--json` is shown in the help."""

    def option(*names: str, help: str, envvar: str | None = None, **more: Any) -> click.Option:
        hidden = not at_root and "--json" not in names
        return click.Option(
            names,
            help=help,
            hidden=hidden,
            expose_value=False,
            callback=_note,
            is_eager=True,
            envvar=envvar if at_root else None,
            show_envvar=True,
            **more,
        )

    return [
        option("--url", metavar="URL", envvar="PENSTOCK_URL", help="The bus: a data folder, a broker (penstock://host:5557), or `mem:`. Default: ./data."),
        option("--config", metavar="FILE", envvar="PENSTOCK_CONFIG", help="Settings file in TOML."),
        option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="One setting, such as durability.fsync=never; repeat as needed."),
        option("--timeout", "timeout_s", type=DURATION, help="How long to wait for a broker and for its answers. Default: 2s for a connection, 10s for an answer."),
        option("--json", is_flag=True, help="Print JSON, one object per line."),
        option("-v", "--verbose", is_flag=True, help="Show the traceback of an error."),
    ]  # fmt: skip


class Leaf(click.Command):
    """A command without subcommands; it takes the global options behind its name, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(global_options(at_root=False))


class Noun(click.Group):
    """A group of commands about one kind of thing."""

    command_class = Leaf

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; the error for an unknown name suggests the nearest one."""
        found = super().get_command(ctx, cmd_name)
        if found is None:
            raise unknown_command(ctx, cmd_name, self.list_commands(ctx))
        return found


# Names of commands in other tools.
_ELSEWHERE = {"show": "info", "describe": "info", "get": "info", "rm": "delete", "remove": "delete", "ls": "list", "subscribe": "consume", "pub": "publish", "sub": "consume", "add": "put"}  # fmt: skip


def unknown_command(ctx: click.Context, name: str, known: Sequence[str]) -> click.UsageError:
    """The error for an unknown command, with a suggestion."""
    elsewhere = _ELSEWHERE.get(name, "")
    hint = (
        f"Did you mean {elsewhere!r}? " if elsewhere in known else did_you_mean(name, known)
    ).strip()
    return click.UsageError(f"No such command {name!r}. {hint or ''}".rstrip(), ctx)


def leaf(name: str, **more: Any) -> Callable[[Callable[..., Any]], Leaf]:
    """Declare a command directly below `penstock`."""
    return click.command(name, cls=Leaf, **more)


# -- a command and its bus ------------------------------------------------------------------------


def look(invocation: Invocation, work: Callable[[penstock.Bus], Awaitable[T]]) -> T:
    """Do something that only reads; it works while another process writes the folder."""
    _require_folder(invocation.url)
    return _run(invocation, read_only(invocation.url), work)


def change(
    invocation: Invocation, work: Callable[[penstock.Bus], Awaitable[T]], *, creates: bool = False
) -> T:
    """Do something that writes; with `creates`, a missing folder is made."""
    if not creates:
        _require_folder(invocation.url)
    return _run(invocation, invocation.url, work)


def _run(invocation: Invocation, url: str, work: Callable[[penstock.Bus], Awaitable[T]]) -> T:
    import asyncio  # here, since `--version` must be quick

    return asyncio.run(_with_bus(invocation, url, work))


async def _with_bus(
    invocation: Invocation, url: str, work: Callable[[penstock.Bus], Awaitable[T]]
) -> T:
    import asyncio

    import penstock
    from penstock.model.settings_loader import unknown

    settings = invocation.settings()
    for problem in unknown(os.environ):
        output.note(f"{problem}; it is not heeded")
    notice = asyncio.get_running_loop().call_later(NOTICE_S, _tell_of_silence, url, settings)
    try:
        async with penstock.connect(url, settings=settings) as bus:
            notice.cancel()
            return await work(bus)
    finally:
        notice.cancel()


def _tell_of_silence(url: str, settings: Settings) -> None:
    if is_broker(url):
        limit_s = settings.client.connect_s or settings.client.deadline_s
        output.note(f"no broker has answered at {url} yet; trying for {limit_s:g} s (--timeout)")


def _require_folder(url: str) -> None:
    """Refuse a path without data: a typing error must not make a folder or look like an empty bus."""
    folder = folder_of(url)
    if folder is not None and not (folder / ABOUT_FILE).exists():
        what = "holds no Penstock data" if folder.is_dir() else "does not exist"
        raise NotADataFolder(
            f"the folder {folder} {what}. Name the data folder with --url or PENSTOCK_URL, or make "
            "one with `penstock publish` or `penstock topic create`",
            path=str(folder),
        )


def require_broker(url: str, what: str) -> None:
    """Refuse a bus that is no broker: only a broker has this."""
    if not is_broker(url):
        raise Unsupported(
            f"{url} is no broker, and only a broker has {what}. Name one with --url "
            "penstock://host:5557 or PENSTOCK_URL",
            capability=what,
        )


# -- exit codes -----------------------------------------------------------------------------------


OK = 0
FAILED = 1
INVALID = 2
NOT_FOUND = 3
REFUSED = 4
REJECTED = 5
STORAGE = 6
TIMEOUT = 7
INTERRUPTED = 130
TERMINATED = 143

MEANINGS: dict[int, str] = {
    OK: "It worked. Also when the reader of a pipe went away early, as `head` does.",
    FAILED: "The operation failed, or a check found problems; any error code not named below.",
    INVALID: "Wrong usage or invalid input (`invalid.*`), or a part that is not installed (`missing.*`).",
    NOT_FOUND: "The name or id does not exist (`notfound.*`).",
    REFUSED: "Understood, and not allowed: a missing confirmation, write-once data (`refused.*`), a token that is missing or does not suffice (`access.*`).",
    REJECTED: "A limit was reached (`rejected.*`); try again later.",
    STORAGE: "The data folder or the disk (`storage.*`): locked, damaged, not there.",
    TIMEOUT: "No answer in time (`timeout.*`).",
    INTERRUPTED: "Interrupted with Ctrl-C. `publish` says how many events were acknowledged.",
    TERMINATED: "Ended by SIGTERM; the same promise as for Ctrl-C.",
}

_BY_FAMILY = {
    "invalid": INVALID,
    "missing": INVALID,
    "notfound": NOT_FOUND,
    "refused": REFUSED,
    "access": REFUSED,
    "rejected": REJECTED,
    "storage": STORAGE,
    "timeout": TIMEOUT,
}


def exit_code(error_code: str) -> int:
    """The exit code for an error code of docs/reference/errors.md.

    >>> exit_code("notfound.topic"), exit_code("delivery.fenced")
    (3, 1)
    """
    return _BY_FAMILY.get(error_code.partition(".")[0], FAILED)


# -- signals --------------------------------------------------------------------------------------


@contextmanager
def asked_to_stop(after_s: float | None = None) -> Iterator[threading.Event]:
    """An event, set by the first SIGINT or SIGTERM or after a time; a second has its usual effect."""
    event = threading.Event()
    before: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[number])

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, stop)
    timer = threading.Timer(after_s or 0, event.set)
    timer.daemon = True
    if after_s is not None:
        timer.start()
    try:
        yield event
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


# -- confirmation ---------------------------------------------------------------------------------


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
    """Do `work(bus, confirm, dry_run)` if the word is given, or typed now; `what` describes the work."""

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
    """A function that prints an effect; `done` is the participle for its target, such as "deleted"."""

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


# -- completion of names --------------------------------------------------------------------------


def complete_topic(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Topics that begin with what was typed."""
    return _names(context, "topics", incomplete)


def complete_group(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Groups that begin with what was typed."""
    return _names(context, "groups", incomplete)


def _names(context: click.Context, kind: str, incomplete: str) -> list[str]:
    invocation = context.ensure_object(Invocation)
    folder = folder_of(invocation.url)
    if folder is None or not folder.is_dir():
        return []

    import asyncio

    async def ask() -> list[str]:
        from penstock import connect  # before the timeout begins: the import takes its time

        async with (
            asyncio.timeout(COMPLETION_S),
            connect(read_only(invocation.url), settings=invocation.settings()) as bus,
        ):
            catalogue: Any = getattr(bus, kind)
            return [each.name for each in await catalogue.list()]

    try:
        names = asyncio.run(ask())
    except Exception:  # no error may disturb a person who is typing
        return []
    return [name for name in names if name.startswith(incomplete)]

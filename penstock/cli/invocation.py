"""One run of the command: where the bus is, which settings hold, how output looks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.when import DURATION
from penstock.model.nearest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model.settings import Settings

DEFAULT_URL = "./data"
CONNECT_S = 2.0
"""How long a command waits for a broker that does not answer: a person waits for it."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


@dataclass
class Invocation:
    """What the global options said; every command gets it as its first argument."""

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

        from penstock.model.loader import load

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
    """Keep what an option said, wherever on the line it stood; the later one wins."""
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
    """A command that does something; takes the global options behind its name too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(global_options(at_root=False))


class Noun(click.Group):
    """A group of commands about one kind of thing."""

    command_class = Leaf

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; a name that does not exist is answered with the nearest one."""
        found = super().get_command(ctx, cmd_name)
        if found is None:
            raise unknown_command(ctx, cmd_name, self.list_commands(ctx))
        return found


# What other tools call a thing.
_ELSEWHERE = {"show": "info", "describe": "info", "get": "info", "rm": "delete", "remove": "delete", "ls": "list", "subscribe": "consume", "pub": "publish", "sub": "consume", "add": "put"}  # fmt: skip


def unknown_command(ctx: click.Context, name: str, known: Sequence[str]) -> click.UsageError:
    """What to say about a command that does not exist."""
    elsewhere = _ELSEWHERE.get(name, "")
    hint = (
        f"Did you mean {elsewhere!r}? " if elsewhere in known else did_you_mean(name, known)
    ).strip()
    return click.UsageError(f"No such command {name!r}. {hint or ''}".rstrip(), ctx)


def leaf(name: str, **more: Any) -> Callable[[Callable[..., Any]], Leaf]:
    """Declare a command that stands directly below `penstock`."""
    return click.command(name, cls=Leaf, **more)

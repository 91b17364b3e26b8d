"""The command line in words: docs/reference/cli.md."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click

from penstock.cli.app import PROGRAM, root
from penstock.cli.invocation import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFACE = """# Command line

One command, `penstock`, with everything below it. Results go to stdout; progress, notes and errors
to stderr. On a terminal lists are tables; in a pipe they are aligned columns; with `--json` every
command prints JSON, one object per line, and an error is an object with the field `error` on stdout.

Commands that only look (`tail`, `replay`, every `list`, `info`, `inspect`, `query`, `verify` and
`resolve`) open the folder read-only: they work while another process writes it, and see what is
committed. Commands that change something need the folder for themselves; when another process has
it, they end with exit code 6 and name that process. At a broker (`--url penstock://host:5557`) both
kinds of commands work beside its clients; a token goes into `client.token`
(`PENSTOCK_CLIENT_TOKEN`).

Times are ISO 8601 (`2026-01-31T09:00:00Z`, `2026-01-31`; in UTC without a zone), seconds since 1970
(`@1767225600`), or how long ago (`2h`, `1h30m`). An offset is `offset:42`. Durations are `250ms`, `90s`, `5m`, `1h30m`, `2d`; sizes are `64MiB`, `1GB`.

In lists and lines, control characters of the data are shown escaped, so that an event cannot take
over a terminal; `--format value` prints payloads as they are.

This page is printed from `penstock/cli` by `make reference`; change it there.
"""

METAVARS = {"integer": "N", "integer range": "N", "float": "N", "text": "TEXT", "directory": "DIR"}

OUTPUT_FIELDS = """## Events in JSON

`tail --json` and `replay --json` print one object per event: `id` (`topic/partition/offset`),
`topic`, `tenant`, `partition`, `offset`, `token`, `time_us`, `append_time_us`, `key`, `headers`,
`codec`, `priority`, `expires_us`, and either `value` (payloads of the codecs json and msgpack, and
raw payloads that are UTF-8 text) or `base64`.

`dlq replay` and `dlq purge` print `requested`, `done`, `failed`, `results` (one for each record) and
`failures` (`id`, `code`, `message`); `dlq dead-letter` prints the counts and the `id` it made.

An error is `{"error": {"code": "notfound.topic", "message": "...", "data": {...}}}`.
"""


def page() -> str:
    """The Markdown of the page."""
    context = click.Context(root, info_name=PROGRAM)
    pages = [PREFACE, _exit_codes(), OUTPUT_FIELDS, _section(root, context, 2)]
    pages += _below(root, context, 2)
    return "\n".join(pages)


def _exit_codes() -> str:
    lines = ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    return (
        "\n".join(lines + [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]) + "\n"
    )


def _below(group: click.Group, context: click.Context, level: int) -> Iterator[str]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None, "a listed command is there"
        inner = click.Context(found, info_name=name, parent=context)
        yield _section(found, inner, level)
        if isinstance(found, click.Group):
            yield from _below(found, inner, level + 1)


def _section(command: click.Command, context: click.Context, level: int) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    lines = [f"{'#' * level} {context.command_path}", "", text, "", "```", usage, "```", ""]
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        lines += ["| option | what it is for |", "|---|---|"]
        lines += [f"| `{_names(each)}` | {_purpose(each)} |" for each in options if not each.hidden]
        lines.append("")
    return "\n".join(lines)


def _names(option: click.Option) -> str:
    """The option as it is typed. Not click's own wording, which changes from version to version."""
    names = " / ".join(", ".join(each) for each in (option.opts, option.secondary_opts) if each)
    if option.is_flag:
        return names
    if isinstance(option.type, click.Choice):
        return f"{names} {'|'.join(map(str, option.type.choices))}".replace("|", "\\|")
    kind = option.metavar or METAVARS.get(option.type.name, option.type.name)
    return f"{names} {kind}"


def _purpose(option: click.Option) -> str:
    text = option.help or ""
    if option.required:
        text += " Required."
    if option.show_default:
        text += f" Default: {option.default}."
    if option.envvar:
        text += f" Also `{option.envvar}` in the environment."
    return text.replace("|", "\\|")

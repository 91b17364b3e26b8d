"""Commands that documents show: their words are words of the program, and pipelines get what they need (Y13)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import penstock
from penstock.cli.app import PROGRAM, root
from penstock.cli.arguments import read_toml
from penstock.pipelines import builtin
from penstock.pipelines.pipeline import registered
from penstock.pipelines.run import Route, check_goes_somewhere, parameters
from penstock.server.ports import addresses

ROOT = Path(penstock.__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Words that end a command in a shell; what stands behind them is no argument of it.
ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands_of(text: str) -> Iterator[list[str]]:
    """The words behind `penstock`, of every line of a block that begins with it."""
    for block in BLOCK.findall(text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith(f"{PROGRAM} "):
                yield words_of(line)


def words_of(line: str) -> list[str]:
    found = shlex.split(line, comments=True)[1:]
    ends = (place for place, word in enumerate(found) if word in ENDS)
    return found[: next(ends, len(found))]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's path and what its options and arguments say; nothing runs, no file is opened."""
    command: click.Command = root
    context = click.Context(root, info_name=PROGRAM)
    path = ""
    while isinstance(command, click.Group):
        _, words, _ = command.make_parser(context).parse_args(words)
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            raise click.UsageError(f"no command {' '.join(words[:1])!r} in {path or PROGRAM!r}")
        command, path = found, f"{path} {words[0]}".strip()
        context, words = click.Context(command, context, words[0]), words[1:]
    said, rest, _ = command.make_parser(context).parse_args(words)
    if rest:
        raise click.UsageError(f"{path} has no place for {rest}")
    for each in command.params:
        value = said.get(str(each.name))
        given = isinstance(value, str | tuple | list | bool | int)
        if each.required and not given:
            raise click.MissingParameter(ctx=context, param=each)
        if isinstance(value, str) and not isinstance(each.type, click.Path | click.File):
            each.type.convert(value, each, context)
    return path, said


def check_pipeline(said: dict[str, Any]) -> None:
    """A pipeline of ours that a page runs has these parameters and somewhere to write."""
    builtin.load()
    made = registered.get(said["name"])
    if made is None:
        return  # one of the reader's own
    known = made.params.__struct_fields__ if made.params is not None else ()
    for pair in said.get("params") or ():
        assert pair.partition("=")[0] in known, pair
    if made.mode == "stream":
        lake: Any = said.get("warehouse")
        check_goes_somewhere(made, Route(url="data", warehouse=lake))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_one(page: Path) -> None:
    """Row Y13: known commands and options, all that is needed, values that the options take."""
    for words in commands_of(page.read_text()):
        path, said = parsed(words)
        if path == "pipeline run":
            check_pipeline(said)


def test_the_pages_that_show_commands_are_looked_at() -> None:
    shown = {name_of(page): len(list(commands_of(page.read_text()))) for page in PAGES}
    pipelines = [name for name in shown if name.startswith("docs/guide/pipelines/")]
    assert len(pipelines) == 6
    assert all(shown[name] for name in [*pipelines, "README.md", "docs/guide/broker.md"])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("penstock pipelines list", "No such command"),
        ("penstock pipeline", "no command"),
        ("penstock pipeline run usage --paramz quotas.toml", "No such option"),
        ("penstock pipeline run usage other", "no place for"),
        ("penstock pipeline run --once", "Missing argument"),
        ("penstock pipeline run usage --format orc", "'orc' is not one of"),
        ("penstock pipeline run usage --for soon", "soon"),
    ],
)
def test_a_command_that_is_none_is_noticed(line: str, why: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parsed(words_of(line))
    assert why in caught.value.format_message()


def test_a_pipeline_that_would_not_run_is_noticed() -> None:
    with pytest.raises(penstock.InvalidInput, match="--warehouse"):
        check_pipeline(parsed(words_of("penstock pipeline run topic-to-table --url data"))[1])
    with pytest.raises(AssertionError, match="colour"):
        check_pipeline(parsed(words_of("penstock pipeline run audit -p colour=red"))[1])


def test_the_quotas_on_the_page_are_parameters(tmp_path: Path) -> None:
    """S5: the file that docs/guide/pipelines/usage.md shows is one that the loader takes."""
    page = (ROOT / "docs/guide/pipelines/usage.md").read_text()
    [shown] = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "quotas.toml"
    file.write_text(shown)
    builtin.load()
    made = parameters(registered["usage"], read_toml(str(file)))
    assert made is not None
    assert msgspec.to_builtins(made) == {
        "quotas": {
            "acme": {"events": 1_000_000, "bytes": 2_000_000_000},
            "*": {"events": 100_000, "bytes": None},
        }
    }


def test_brokers_in_the_pages_have_the_port_of_a_broker() -> None:
    tcp = addresses(penstock.Settings().server)["tcp"].port
    for page in PAGES:
        ports = re.findall(r"penstock://[\w.]+:(\d+)", page.read_text())
        assert {int(port) for port in ports} <= {tcp}, name_of(page)

"""The command as a whole: help, errors, exit codes, JSON, completion, its reference."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import COMMANDS, root
from penstock.cli.invocation import _BY_FAMILY, MEANINGS, exit_code
from penstock.cli.reference import reference
from penstock.model import errors

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "cli.md"


def test_the_reference_page_is_the_command_tree():
    assert PAGE.read_text() == reference(), "write it with penstock.cli.reference.reference()"


def test_every_command_is_documented_and_helps_itself(cli):
    assert cli.ok("publish", "--help").text.startswith("Usage: penstock publish")
    page = PAGE.read_text()
    for name in COMMANDS:
        assert f"## penstock {name}\n" in page
        assert root.get_command(None, name) is not None  # type: ignore[arg-type]


def test_version_and_help_load_nothing_heavy(cli):
    for words, heavy in (
        (["--version"], ["pyarrow", "numpy", "rich", "asyncio"]),
        (["--help"], ["pyarrow", "numpy", "rich"]),
    ):
        code = f"import sys; from penstock.cli.app import run; run({words}); print([n for n in {heavy} if n in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", code], env=cli.env, capture_output=True, check=True
        )
        assert done.stdout.decode().splitlines()[-1] == "[]", words
    assert cli.ok("--version").text.startswith("penstock ")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, make_cli):
    """One folder for all commands that must not change it."""
    cli = make_cli(tmp_path_factory.mktemp("shared"))
    cli.ok("publish", "orders", "first")
    return cli


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nonsense"], 2),
        (["topic", "lst"], 2),
        (["topic", "info"], 2),
        (["publish", "orders", "x", "--priority", "12"], 2),
        (["publish", "orders", "x", "--delay", "soon"], 2),
        (["publish", "orders", "x", "--header", "novalue"], 2),
        (["publish", "orders", "x", "y"], 2),
        (["publish", "orders..created", "x"], 2),
        (["publish", "orders", "--file", "missing.json"], 2),
        (["publish", "orders", "x", "--codec", "morse"], 2),
        (["--set", "durability.fsync=sometimes", "publish", "orders", "x"], 2),
        (["--set", "nonsense", "publish", "orders", "x"], 2),
        (["--config", "missing.toml", "publish", "orders", "x"], 2),
        (["--url", "gopher://here", "publish", "orders", "x"], 2),
        (["replay", "a..b"], 2),
        (["replay", "orders", "--since", "yesterday"], 2),
        (["replay", "orders", "--format", "{payload.__class__}"], 2),
        (
            [
                "--set",
                f"auth.jwt_secret={'x' * 32}",
                "token",
                "create",
                "--tenant",
                "",
                "--subject",
                "a",
                "--role",
                "admin",
            ],
            2,
        ),
        (["topic", "info", "nosuch"], 3),
        (["replay", "nosuch"], 3),
        (["group", "info", "nosuch"], 3),
        (["schedule", "remove", "nosuch", "--confirm", "REMOVE"], 3),
        (["dlq", "inspect", "--id", "nosuch@group"], 3),
        (["bench", "run", "nosuch"], 3),
        (["topic", "delete", "orders"], 4),
        (["topic", "create", "orders"], 4),
        (["--url", "./elsewhere", "topic", "list"], 6),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_codes(shared, words: list[str], code: int):
    result = shared("--json", *words)
    assert result.code == code, result
    assert "Traceback" not in result.stderr
    assert result.row["error"]["message"]
    family = {2: ("invalid", "missing"), 3: "notfound", 4: "refused", 6: "storage"}[code]
    assert result.row["error"]["code"].startswith(family)


def test_refused_commands_changed_nothing(shared):
    assert shared.values("orders") == [b"first"]
    assert not (shared.folder / "elsewhere").exists()


def _all_errors(kind: type[errors.PenstockError]) -> list[type[errors.PenstockError]]:
    return [kind, *(found for each in kind.__subclasses__() for found in _all_errors(each))]


def test_every_error_code_has_a_documented_exit_code():
    for kind in _all_errors(errors.PenstockError):
        assert exit_code(kind.code) in MEANINGS
        assert exit_code(kind.code) != 0


def test_the_meaning_of_an_exit_code_names_its_families():
    """T16: a script that gets 4 finds both refused.* and access.* in the table."""
    for family, code in _BY_FAMILY.items():
        assert f"`{family}.*`" in MEANINGS[code]


def test_an_error_for_people_goes_to_stderr(cli):
    cli.ok("publish", "orders", "x")
    result = cli("topic", "info", "nosuch")
    assert result.stdout == b""
    assert result.stderr.startswith("error: ")
    assert "[notfound.topic]" in result.stderr
    assert "Traceback" in cli("-v", "topic", "info", "nosuch").stderr


def test_global_options_stand_anywhere(cli):
    cli.ok("publish", "orders", "x")
    url = str(cli.data)
    no_url = {"PENSTOCK_URL": ""}
    for words in (
        ["--url", url, "--json", "topic", "list"],
        ["topic", "list", "--json", "--url", url],
    ):
        result = cli(*words, env=no_url)
        assert result.code == 0
        assert [row["name"] for row in result.rows] == ["orders"]


def test_the_default_folder_is_data(cli):
    cli.env.pop("PENSTOCK_URL")
    cli.ok("publish", "orders", "x")
    assert (cli.folder / "data" / "penstock.json").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(cli, shell):
    assert "_PENSTOCK_COMPLETE" in cli.ok("completion", shell).text


def test_completion_of_commands_and_topics(cli):
    cli.ok("publish", "orders.created", "x")
    cli.ok("publish", "payments.made", "x")

    def completed(*typed: str) -> str:
        words = " ".join(("penstock", *typed))
        env = {
            "_PENSTOCK_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(typed)),
        }
        return cli(env=env).text

    assert "publish" in completed("pub")
    assert "orders.created" in completed("topic", "info", "ord")
    assert "payments" not in completed("topic", "info", "ord")


def test_columns_in_a_pipe_have_no_tabs_and_no_boxes(cli):
    cli.ok("publish", "orders", "x")
    text = cli.ok("topic", "list").text
    assert text.splitlines()[0].split() == [
        "name",
        "tenant",
        "partitions",
        "events",
        "sealed",
        "bytes",
    ]
    assert "\t" not in text
    assert text.isascii()


def run_on_terminal(cli: Any, *words: str) -> str:
    """The output of a command whose stdout is a terminal."""
    import os
    import pty

    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*cli.words, *words], stdout=follower, stderr=follower, stdin=follower,
        env=cli.env | {"TERM": "xterm", "COLUMNS": "120"}, cwd=cli.folder,
    ) as process:  # fmt: skip
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        os.close(leader)
        assert process.wait(30) == 0
    return b"".join(parts).decode()


def test_a_terminal_gets_a_table(cli):
    cli.ok("publish", "orders", "x")
    text = run_on_terminal(cli, "topic", "list")
    assert "orders" in text
    assert "─" in text


def test_data_cannot_take_over_the_terminal(cli):
    cli.ok("publish", "orders", "--codec", "raw", input=b"\x1b[2J\x1b]0;owned\x07[red]x[/red]")
    text = run_on_terminal(cli, "replay", "orders")
    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text
    assert "[red]x[/red]" in text


def test_docs_come_along_and_can_be_searched(cli: Any) -> None:
    """Y13: who installed by pip has the pages that error texts name."""
    listed = {row["page"] for row in cli.ok("docs", "--json").rows}
    assert {"getting-started", "errors", "capabilities", "settings", "risk-tags"} <= listed
    found = cli.ok("docs", "errors", "refused.unsupported").text
    assert "`refused.unsupported`" in found
    assert "refused.write-once" not in found
    assert "Did you mean 'errors'?" in cli("docs", "erors").stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert shipped == {f"docs/{name}": f"penstock/docs/{name}" for name in ("guide", "reference")}


def test_texts_for_users_name_no_file_of_the_source_tree() -> None:
    """Y13: `penstock docs PAGE` shows it everywhere; docs/reference/PAGE.md is only in a checkout."""
    wrong = []
    for path in (ROOT / "penstock").rglob("*.py"):
        tree = ast.parse(path.read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        attribute_docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"docs/(?:guide|reference)/[a-z-]+\.md", node.value)
                if named and id(node) not in documented | attribute_docs:
                    wrong.append((path.name, node.lineno, named))
    assert [each for each in wrong if each[0] not in PRINTERS] == []


PRINTERS = {"protobuf.py"}
"""What they print is itself a file of docs/reference."""


def test_a_misspelt_variable_is_told_by_each_command(cli):
    """A11: it stops nothing, and what Kubernetes sets is not told."""
    cli.env["PENSTOCK_DURABILITY_FSNC"] = "never"
    cli.env["PENSTOCK_SERVICE_HOST"] = "10.0.0.7"
    told = cli.ok("publish", "t", "x").stderr
    assert told.count("not heeded") == 1
    assert "PENSTOCK_DURABILITY_FSNC: durability.fsnc: there is no such setting" in told

"""Documents that cannot lie: their programs run, their tables match the code, their links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock.log import journal
from penstock.model import batch, errors
from penstock.model.settings import Settings
from penstock.testing.broker_process import BrokerProcess

ROOT = Path(penstock.__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((DOCS / "guide").rglob("*.md"))]
EVERY_PAGE = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
DEADLINE_S = 60
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Methods of Bus for engines, the admin API and transactions rather than for callers.
INNER = {"ask", "draft", "draft_many", "need", "place", "wall_us"}


class Block(NamedTuple):
    """A program in a document, and what the document says it prints."""

    kind: str
    code: str
    expected: str | None
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    blocks = []
    for number, match in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and not text[match.end() : after.start()].strip()
        expected = after[2] if follows and after[1] == "text" else None
        blocks.append(Block(match[1], match[2], expected, text[: match.start()].count("\n") + 2))
    return blocks


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_fragment(code: str) -> bool:
    """Whether a block goes on where the page is: a program of its own begins with its imports."""
    return not re.search(r"^(import|from) .*penstock", code, re.MULTILINE)


def environment(folder: Path) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    return clean | {"PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def put_command(folder: Path) -> None:
    """The real command, under the name that documents call it by."""
    shim = folder / "bin" / "penstock"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock.cli "$@"\n')
    shim.chmod(0o755)


def run_program(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        words, cwd=folder, env=environment(folder), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def run_fragment(code: str, space: dict[str, object], page: Path, line: int) -> str:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compiled = compile("\n" * (line - 1) + code, str(page), "exec", flags, dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        waiting = eval(compiled, space)  # the documents are ours
        if waiting is not None:
            await waiting
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
async def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """Row Y13: every Python block of README and the guide runs and prints what the page says."""
    blocks = [each for each in blocks_of(page) if each.kind == "python"]
    async with penstock.connect(tmp_path / "bus") as bus:
        space = {"__name__": "page", "asyncio": asyncio, "penstock": penstock, "bus": bus}
        for block in blocks:
            if is_fragment(block.code):
                printed = await run_fragment(block.code, space, page, block.line)
            else:
                words = [sys.executable, "-W", "error", "-c", block.code]
                printed = await asyncio.to_thread(run_program, words, tmp_path)
            if block.expected is not None:
                assert printed == block.expected, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_bash_blocks_run(page: Path, tmp_path: Path) -> None:
    """Bash blocks marked `# test` run through the real command."""
    blocks = [each for each in blocks_of(page) if each.kind == "bash"]
    put_command(tmp_path)
    for block in blocks:
        if block.code.startswith("# test\n"):
            printed = run_program(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)
            if block.expected is not None:
                assert printed == block.expected, f"{page.name}:{block.line}"


async def test_the_broker_tour_of_the_readme(tmp_path: Path) -> None:
    """Row Y13: its commands, on free ports; the handler fails, so that there is a dead letter."""
    [tour] = [each.code for each in blocks_of(ROOT / "README.md") if "penstock up" in each.code]
    up, handle, publish, *looks = [line.partition("  #")[0].strip() for line in tour.splitlines()]
    assert up == "penstock up ./shop"
    where = tour.splitlines()[0].partition("#")[2]
    for name in ("tcp", "zmq", "pub", "http"):
        assert getattr(Settings().server, name).rpartition(":")[2] in where, name
    put_command(tmp_path)

    with BrokerProcess(tmp_path / "shop").start() as broker:

        def at_the_broker(line: str) -> str:
            there = line.replace("penstock://127.0.0.1", broker.url())
            there = there.replace(Settings().server.http, f"127.0.0.1:{broker.ports['http']}")
            assert there != line, "it names the broker"
            return there

        async def run(line: str) -> str:
            words = ["bash", "-euc", at_the_broker(line)]
            return await asyncio.to_thread(run_program, words, tmp_path)

        python, *words = at_the_broker(handle).split()
        assert python == "python"
        handler = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert handler.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            assert await handler.stdout.readline() == b"waiting for orders\n"
            assert await run(publish) == "orders.created.web/0/0\n"
            async with penstock.connect(broker.url()) as bus:
                while not await bus.dead_letters.list():
                    await asyncio.sleep(0.02)
            letters, verdict, metrics = [await run(look) for look in looks]
            handler.send_signal(signal.SIGINT)
            assert await handler.stdout.read() == b"bye\n"
            assert await handler.wait() == 0
    assert "billing" in letters
    assert "no paper for order 9" in letters
    assert "the chain is whole" in verdict
    assert re.search(r"^penstock_dead_letters_kept 1\b", metrics, re.MULTILINE)


def test_the_runner_notices(tmp_path: Path) -> None:
    """The checks above can fail."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport penstock\n```\n\n```text\n2\n```\n\n```python\nawait bus\n```\n"
    )
    first, _, second = blocks_of(page)
    assert (first.expected, second.expected) == ("2\n", None)
    assert not is_fragment(first.code)
    assert is_fragment(second.code)
    with pytest.raises(AssertionError):
        run_program([sys.executable, "-c", "raise SystemExit(1)"], tmp_path)


def module_names() -> list[str]:
    found = pkgutil.walk_packages(penstock.__path__, "penstock.")
    names = [each.name for each in found if not each.name.endswith("__main__")]
    return ["penstock", "tools.reference.ask", *names]


# These need an optional server or package to be imported.
NEEDS_EXTRAS = re.compile(r"penstock\.bench\.peers\.")


@pytest.mark.parametrize("name", module_names())
def test_doctests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `>>>` in every module is true."""
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ImportError:
        if NEEDS_EXTRAS.match(name):
            pytest.skip(f"{name} needs an extra that is not installed")
        raise
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


# -- pages against code ----------------------------------------------------------------------------


def error_classes() -> dict[str, type[penstock.PenstockError]]:
    return {name: getattr(errors, name) for name in errors.__all__}


def test_every_error_has_an_entry() -> None:
    """Row Y13: docs/reference/errors.md has code, meaning and advice for each error, and no other."""
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w.*-]+)` \| (.+?) \| (.+?) \|$",
        (DOCS / "reference" / "errors.md").read_text(),
        re.MULTILINE,
    )
    documented = {name: code for name, code, _, _ in rows}
    assert documented == {name: kind.code for name, kind in error_classes().items()}
    assert all(len(meaning) > 10 and len(advice) > 5 for _, _, meaning, advice in rows)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """The drawing at the top of errors.py shows each class below its parent."""
    drawn: dict[str, str | None] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+)  +[a-z]", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = above[depth - 1] if depth else None
    real = {name: kind.__base__.__name__ for name, kind in error_classes().items()}
    real["PenstockError"] = None
    assert drawn == real


def test_every_public_name_is_listed() -> None:
    """docs/reference/api.md lists every name of penstock.__all__ and only those."""
    names, _, bus = (DOCS / "reference" / "api.md").read_text().partition("## Bus")
    listed = re.findall(r"^\| `(\w+)`", names, re.MULTILINE)
    assert sorted(listed) == sorted(set(penstock.__all__) - set(errors.__all__))
    public = {name for name in vars(penstock.Bus) if not name.startswith("_")} - INNER
    assert {name for name in public if not re.search(rf"`[^`]*\b{name}\b", bus)} == set()


@pytest.mark.parametrize(
    ("page", "size"), [("batch.md", batch.HEAD.size), ("journal.md", journal.HEAD.size)]
)
def test_head_tables_add_up(page: str, size: int) -> None:
    """The fields that the format pages list take as many bytes as the heads that are written."""
    text = (DOCS / "reference" / page).read_text()
    table = text.partition("| bytes | field |")[2].partition("\n\n")[0]
    widths = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert sum(int(width) for row in widths for width in row.split(",")) == size
    assert f"{size} bytes" in text


# -- links -----------------------------------------------------------------------------------------

LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(re.sub(FENCE, "", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_pages_are_found(page: Path) -> None:
    """Every document can be reached from the index, the README or the list of results."""
    if page.name in ("README.md", "index.md"):
        return
    entrances = (ROOT / "README.md", DOCS / "index.md", DOCS / "results" / "README.md")
    reached = {
        (entrance.parent / target.partition("#")[0]).resolve()
        for entrance in entrances
        for target in LINK.findall(entrance.read_text())
    }
    assert page.resolve() in reached

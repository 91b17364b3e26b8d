"""`penstock docs`: the guide and the reference, as they were installed with this version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli import output
from penstock.cli.invocation import Invocation, leaf
from penstock.model.errors import NotFound
from penstock.model.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(penstock.__file__).resolve().parent
FOLDERS = ("guide", "reference")


def pages() -> dict[str, Path]:
    """Every page by its name, the guide first; a checkout has them beside the package."""
    installed = PACKAGE / "docs"
    root = installed if installed.is_dir() else PACKAGE.parent / "docs"
    found = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.md")))
    return {path.stem: path for path in found}


def complete_page(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Pages that begin with what was typed."""
    return [name for name in pages() if name.startswith(incomplete)]


@leaf("docs")
@click.argument("page", required=False, shell_complete=complete_page)
@click.argument("word", required=False)
@click.pass_obj
def command(invocation: Invocation, page: str | None, word: str | None) -> None:
    """Show a PAGE of the documents, or the list of them; with WORD only the parts that name it.

    `penstock docs errors refused.quota` says what an error means and what to do about it.
    """
    known = pages()
    if page is None:
        rows = [{"page": name, "title": _title(path)} for name, path in known.items()]
        output.show_rows(invocation, rows, ["page", "title"])
        return
    path = known.get(page.removesuffix(".md"))
    if path is None:
        raise NotFound(f"there is no page {page!r}. {did_you_mean(page, known)}`penstock docs` lists them")  # fmt: skip
    text = path.read_text()
    if word is not None:
        parts = list(_parts_with(text, word))
        if not parts:
            raise NotFound(f"the page {path.stem} does not name {word!r}")
        text = "\n\n".join(parts)
    if invocation.json:
        output.print_json({"page": path.stem, "text": text})
    else:
        click.echo_via_pager(text.rstrip("\n") + "\n")


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")


def _parts_with(text: str, word: str) -> Iterator[str]:
    """Paragraphs with a word, each under its heading; of tables and listings only the lines with the word."""
    heading = ""
    for part in text.split("\n\n"):
        lines = part.split("\n")
        if lines[0].startswith("#"):
            heading = part
        elif word.lower() in part.lower():
            if lines[0].startswith(("|", "```")):
                kept = 1 if lines[0].startswith("`") else 2
                rows = [line for line in lines[kept:] if word.lower() in line.lower()]
                part = "\n".join([*lines[:kept], *rows, *["```"] * (kept == 1)])
            if heading:
                yield heading
            heading = ""
            yield part

"""Paging: which part of a list a command shows, within the limits of the admin API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.model.page import MAX_PAGE, MAX_SKIP

if TYPE_CHECKING:
    from collections.abc import Callable


def note_rest(there: int, limit: int, offset: int) -> None:
    """Say how much of a list a page leaves out."""
    rest = there - offset - limit
    if rest > 0:
        output.note(f"{rest} more: go on with --offset {offset + limit}, or raise --limit")


def page_options(limit: int) -> Callable[[Any], Any]:
    """The `--limit` and `--offset` options of a command."""

    def decorate(function: Any) -> Any:
        most = click.IntRange(1, MAX_PAGE)
        function = click.option("--offset", type=click.IntRange(0, MAX_SKIP), default=0, show_default=True, help="After so many.")(function)  # fmt: skip
        return click.option("--limit", type=most, default=limit, show_default=True, help=f"At most so many, up to {MAX_PAGE}.")(function)  # fmt: skip

    return decorate

"""Confirmation words: what destroys something wants to be asked for twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.model.errors import ConfirmationNeeded

if TYPE_CHECKING:
    from collections.abc import Callable


def confirm_option(word: str) -> Callable[[Any], Any]:
    """The `--confirm WORD` option of a command."""
    return click.option("--confirm", default="", metavar=word, help=f"Must be {word}; without it nothing happens.")  # fmt: skip


def require(word: str, given: str, what: str) -> None:
    """Refuse unless the word was given to the letter."""
    if given != word:
        raise ConfirmationNeeded(
            f"this {what}. Nothing was changed; repeat with --confirm {word}", confirm=word
        )

"""Telling how far a benchmark is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many turns are over."""


def silent(text: str, done: int, total: int) -> None:
    """Progress that nobody watches."""

"""The nearest known name, for errors that answer a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest name and a space after it; nothing when none is near.

    >>> did_you_mean("topcis", ["topics", "start"])
    "Did you mean 'topics'? "
    >>> did_you_mean("zebra", ["topics", "start"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f"Did you mean {near[0]!r}? " if near else ""

"""What an engine does not keep yet: each contradiction that is known, with its finding and its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.testing.model.groups import Contradiction


class Known(NamedTuple):
    """One contradiction that is known: a sequence ends there, and counts as one of it."""

    finding: str
    engines: frozenset[str]
    reason: str
    matches: Callable[[Contradiction], bool]


KNOWN: tuple[Known, ...] = ()
"""Take each out when it is mended: a sequence that runs into it fails then."""


def known(engine: str, contradiction: Contradiction) -> Known | None:
    """The entry that a contradiction belongs to."""
    return next((k for k in KNOWN if engine in k.engines and k.matches(contradiction)), None)

"""What a mutant is: the production code with one function replaced by a broken one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Broken = Callable[[Any], Any]


class Mutant(NamedTuple):
    """One broken guarantee."""

    name: str
    promise: str
    owner: Any
    attribute: str
    broken: Broken
    """From the original function to the broken one."""
    within: int = 10
    """Seeds in which it must be found."""

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Break the guarantee, for the length of a block."""
        original = self.owner.__dict__[self.attribute]
        function = (
            original.__func__ if isinstance(original, staticmethod | classmethod) else original
        )
        setattr(self.owner, self.attribute, self.broken(function))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


class Deaf:
    """A file or disk that forgets to sync, and otherwise does what the real one does."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def sync(self) -> None:
        """Nothing becomes durable."""

    def sync_dir(self, folder: str) -> None:
        """No name becomes durable."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def nothing(original: Any) -> Any:
    """Do nothing at all."""

    def broken(self: Any, *rest: Any) -> None:
        return None

    return broken


def nothing_async(original: Any) -> Any:
    """Do nothing at all, awaited."""

    async def broken(self: Any, *rest: Any) -> None:
        return None

    return broken

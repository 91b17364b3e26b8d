"""Parts found by name: built-in ones at once, others through entry points when first asked for.

Codecs and compressors both live in a `Registry`. A package adds one by declaring an entry point
in the group (`penstock.codecs` or `penstock.compressors`); nothing is imported, and no installed
metadata is read, before an unknown name is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from penstock.model.errors import AlreadyExists, MissingPart

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


class Registry(Generic[T]):
    """Name to part, made once and kept.

    >>> class Plain:
    ...     name = "plain"
    >>> parts = Registry[Plain]("example.parts", {"plain": Plain})
    >>> parts.get("plain") is parts.get("plain")
    True
    >>> parts.get("fancy")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.MissingPart: no 'fancy' in example.parts; there is: plain. ...
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, type[Any]],
        unknown: type[MissingPart] = MissingPart,
    ) -> None:
        self.group = group
        self._built_in = dict(built_in)
        self._unknown = unknown
        self._made: dict[str, T] = {}

    def get(self, name: str) -> T:
        """The part of that name; a dict hit after the first time."""
        try:
            return self._made[name]
        except KeyError:
            return self._made.setdefault(name, self._find(name))

    def register(self, name: str, part: T, *, replace: bool = False) -> None:
        """Add a part by hand, for a program that is not an installed package.

        A taken name is refused unless `replace` says so: stored events are read by that name.
        """
        if not replace and name in self:
            raise AlreadyExists(
                f"{self.group} already has {name!r}; nothing changed. "
                "Choose another name, or pass replace=True if old events stay readable",
                name=name,
                group=self.group,
            )
        self._made[name] = self._checked(name, part, "register()")

    def names(self) -> list[str]:
        """Every name that `get` may answer to, sorted. Reads installed metadata."""
        return sorted({*self._built_in, *self._made, *self._declared()})

    def __contains__(self, name: str) -> bool:
        """Whether `get` would look no further; reads installed metadata for foreign names only."""
        return name in self._made or name in self._built_in or name in self._declared()

    def _declared(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _find(self, name: str) -> T:
        # Built-ins come first: an installed package cannot quietly change what "json" means.
        if kind := self._built_in.get(name):
            return cast("T", kind())
        point = self._declared().get(name)
        if point is None:
            raise self._unknown(
                f"no {name!r} in {self.group}; there is: {', '.join(self.names())}. "
                f"Install the package that declares it as a {self.group} entry point, "
                "or register() it",
                name=name,
                group=self.group,
                known=self.names(),
            )
        try:
            found = point.load()
        except Exception as error:
            raise self._unknown(
                f"{name!r} in {self.group} is declared as {point.value} but does not load: "
                f"{error}. Repair or remove the package that declares it",
                name=name,
                group=self.group,
            ) from error
        return self._checked(name, found() if isinstance(found, type) else found, point.value)

    def _checked(self, name: str, part: Any, origin: str) -> T:
        # The part's own name is what gets stored beside each payload, so the two must agree.
        if getattr(part, "name", None) != name:
            raise self._unknown(
                f"{origin} is listed as {name!r} in {self.group} but calls itself "
                f"{getattr(part, 'name', None)!r}. Give it name = {name!r}",
                name=name,
                group=self.group,
            )
        return cast("T", part)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known name, for the error about a misspelt one, or nothing.

    >>> did_you_mean("topcis", ["topics", "start"])
    "Did you mean 'topics'? "
    >>> did_you_mean("zebra", ["topics", "start"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), 1)
    return f"Did you mean {near[0]!r}? " if near else ""

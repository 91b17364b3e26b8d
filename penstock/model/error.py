"""The root of the error tree; penstock.model.errors holds the tree."""

from __future__ import annotations

from typing import Any, ClassVar


class PenstockError(Exception):
    """The root: catch this to catch everything Penstock raises on purpose.

    >>> error = PenstockError("no topic 'orders'", topic="orders")
    >>> error.code, error.topic
    ('error', 'orders')
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data = data

    def __getattr__(self, name: str) -> Any:
        data: dict[str, Any] = self.__dict__.get("data", {})
        try:
            return data[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.data))

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


def _rebuild(kind: type[PenstockError], message: str, data: dict[str, Any]) -> PenstockError:
    return kind(message, **data)

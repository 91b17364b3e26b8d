"""Retry: how often and after which waits a failed event is delivered again."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from penstock.model.parameter import converters, count, many, milliseconds, refused

# Quick for a short failure, a minute for an outage; after that an operator decides.
LADDER_MS = (100, 1_000, 10_000, 60_000)
MAX_ATTEMPTS = 5
MOST_ATTEMPTS = 1_000


class Retry(msgspec.Struct, frozen=True):
    """The waits between deliveries, and how many deliveries there are in all.

    A wait is a whole number of milliseconds, text such as "5s", or a timedelta.

    >>> retry = Retry.default()
    >>> [retry.delay_s(attempt) for attempt in (1, 2, 3, 4)]
    [0.1, 1.0, 10.0, 60.0]
    >>> retry.exhausted(5), Retry.none().exhausted(1)
    (True, True)
    """

    ladder_ms: Annotated[
        tuple[int, ...], partial(many, item=milliseconds, most=MOST_ATTEMPTS, make=tuple)
    ] = LADDER_MS
    max_attempts: Annotated[int, partial(count, least=1, most=MOST_ATTEMPTS)] = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        for name, convert in converters(type(self)).items():
            msgspec.structs.force_setattr(self, name, convert(name, getattr(self, name)))
        if self.max_attempts > 1 and not self.ladder_ms:
            raise refused("ladder_ms", "a wait at least for the second attempt", ())

    @classmethod
    def default(cls) -> Retry:
        """100 ms, 1 s, 10 s, 60 s; a dead letter after five attempts."""
        return cls()

    @classmethod
    def none(cls) -> Retry:
        """One attempt: what fails is a dead letter at once."""
        return cls(ladder_ms=(), max_attempts=1)

    def delay_s(self, attempt: int) -> float:
        """The wait after the given attempt failed."""
        return self.ladder_ms[min(attempt, len(self.ladder_ms)) - 1] / 1_000

    def exhausted(self, attempt: int) -> bool:
        """Whether the given attempt was the last one."""
        return attempt >= self.max_attempts

"""Retry: how often and after which waits a failed event is delivered again."""

from __future__ import annotations

import msgspec

from penstock.model.errors import InvalidInput

# The ladder of row X4: quick for a hiccup, a minute for an outage, then a person.
LADDER_MS = (100, 1_000, 10_000, 60_000)
MAX_ATTEMPTS = 5


class Retry(msgspec.Struct, frozen=True):
    """The waits between deliveries, and how many deliveries there are in all.

    >>> retry = Retry.default()
    >>> [retry.delay_s(attempt) for attempt in (1, 2, 3, 4)]
    [0.1, 1.0, 10.0, 60.0]
    >>> retry.exhausted(5), Retry.none().exhausted(1)
    (True, True)
    """

    ladder_ms: tuple[int, ...] = LADDER_MS
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.max_attempts > 1_000:
            raise InvalidInput("max_attempts is 1 to 1,000", max_attempts=self.max_attempts)
        if any(step < 0 for step in self.ladder_ms):
            raise InvalidInput("a ladder has no negative step", ladder_ms=self.ladder_ms)
        if self.max_attempts > 1 and not self.ladder_ms:
            raise InvalidInput("a ladder needs a step for the second attempt", ladder_ms=())

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

"""128-bit, time-ordered tokens: what makes two publishes of the same event the same event.

A token is a UUID of version 7: 48 bits of Unix milliseconds, then randomness. The tokens of one
batch are consecutive numbers, so a batch of a thousand events stores and hands over one token.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid

import numpy as np

from penstock.model.parameter import refused

TOKEN_BYTES = 16
# The lowest 40 bits of a fresh token are a counter that starts at zero: a batch would have to hold
# 2**40 events before it ran into the random part.
COUNTER_BITS = 40


def make_token(now_ms: int, entropy: bytes) -> bytes:
    """A fresh base token from the time and at least five random bytes.

    >>> token = make_token(1_700_000_000_000, b"12345")
    >>> uuid.UUID(bytes=token).version, len(token)
    (7, 16)
    """
    random = int.from_bytes(entropy[:5], "big")
    high = (now_ms & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | (random >> 28 & 0xFFF) << 64
    low = 0b10 << 62 | (random & 0x3F_FFFF) << COUNTER_BITS
    return (high | low).to_bytes(TOKEN_BYTES, "big")


class TokenSource:
    """Gives out ranges of unique tokens cheaply: one random read per process and time step.

    >>> source = TokenSource(b"0123456789")
    >>> first, second = source.take(1_000, 3), source.take(1_000, 1)
    >>> token_at(first, 3) == second
    True
    """

    def __init__(self, entropy: bytes) -> None:
        self._entropy = entropy[:8]
        self._steps = itertools.count()
        self._next = 0
        self._ms = -1
        self._left = 0

    def take(self, now_ms: int, count: int) -> bytes:
        """The base of `count` consecutive tokens."""
        if now_ms != self._ms or count > self._left:
            self._ms = now_ms
            step = next(self._steps).to_bytes(8, "big")
            entropy = hashlib.blake2b(step, key=self._entropy, digest_size=5).digest()
            self._next = int.from_bytes(make_token(now_ms, entropy), "big")
            self._left = 1 << COUNTER_BITS
        base = self._next
        self._next += count
        self._left -= count
        return base.to_bytes(TOKEN_BYTES, "big")


def token_at(base: bytes, index: int) -> bytes:
    """The token of the event at `index` in a batch whose first token is `base`."""
    return (int.from_bytes(base, "big") + index).to_bytes(TOKEN_BYTES, "big")


def expand(base: bytes, count: int) -> bytes:
    """All tokens of a batch, laid out one after another (Arrow's fixed-size binary).

    >>> expand(bytes(16), 2).hex()
    '0000000000000000000000000000000000000000000000000000000000000001'
    """
    high, low = int.from_bytes(base[:8], "big"), int.from_bytes(base[8:], "big")
    if low + count > 0xFFFF_FFFF_FFFF_FFFF:
        return b"".join(token_at(base, index) for index in range(count))
    columns = np.empty((count, 2), dtype=">u8")
    columns[:, 0] = high
    columns[:, 1] = np.arange(low, low + count, dtype=np.uint64)
    return columns.tobytes()


def token_of_key(idempotency_key: str) -> bytes:
    """The token that stands for a caller's idempotency key.

    >>> token_of_key("job-7") == token_of_key("job-7") != token_of_key("job-8")
    True
    """
    return hashlib.blake2b(idempotency_key.encode(), digest_size=TOKEN_BYTES).digest()


def parse_token(value: bytes | str | uuid.UUID, parameter: str = "token") -> bytes:
    """Accept a token as 16 bytes, as a UUID or as its text."""
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, bytes) and len(value) == TOKEN_BYTES:
        return value
    if isinstance(value, str):
        try:
            return uuid.UUID(value).bytes
        except ValueError:
            pass
    raise refused(
        parameter, "16 bytes, a UUID or its text (a key of your own is an idempotency_key)", value
    )

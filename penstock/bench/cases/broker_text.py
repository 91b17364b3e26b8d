"""Payloads that compress as real ones do: small JSON records, about three times."""

from __future__ import annotations

import functools
import json
import random

_WORDS = (
    "order", "invoice", "customer", "shipment", "created", "updated", "cancelled", "paid", "pending",
    "warehouse", "north", "south", "express", "standard", "currency", "amount", "quantity", "article",
)  # fmt: skip


# Payloads are cut out of one long text at random places: quick to make, and no two are alike.
POOL_BYTES = 1 << 20


def texts(size_bytes: int, count: int, seed: int) -> list[bytes]:
    """Distinct payloads of exactly that size; the same for the same seed.

    >>> first, second = texts(100, 2, seed=1)
    >>> len(first), len(second), first != second
    (100, 100, True)
    """
    source = random.Random(seed)
    pool = _pool(max(POOL_BYTES, size_bytes))
    found = []
    for number in range(count):
        at = source.randrange(len(pool) - size_bytes + 1)
        head = b"%08x%08x " % (seed, number)
        found.append((head + pool[at : at + size_bytes])[:size_bytes])
    return found


@functools.cache
def _pool(size_bytes: int) -> bytes:
    """At least that many bytes of records, one after another."""
    source = random.Random(size_bytes)
    parts: list[bytes] = []
    size = 0
    while size < size_bytes:
        record = {
            source.choice(_WORDS): source.choice(_WORDS),
            "id": source.getrandbits(32),
            "at": source.randrange(1 << 40),
            source.choice(_WORDS): round(source.uniform(0, 1_000), 2),
        }
        parts.append(json.dumps(record).encode())
        size += len(parts[-1])
    return b"".join(parts)

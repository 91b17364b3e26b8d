"""The keyring: the idempotency keys of transactions, so that each happens at most once.

A transaction with a key publishes one more event, a marker, to a system topic of its tenant. The
marker's token is the key, so the table that notices repeated publishes notices repeated
transactions too, and remembers them in the same journal entry that makes the transaction happen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.engines.engine import Draft
from penstock.model.errors import DiskRefused, PenstockError

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine


class KeyKnown(PenstockError):
    """A transaction has happened already; never leaves the engine, whose answer is None then."""

    code = "key-known"


def marker_topic(tenant: str) -> str:
    """Where the markers of a tenant's transactions lie.

    One for each tenant: a key says nothing about another tenant's, and many keys of one tenant
    push out none of another's.

    >>> marker_topic("acme")
    '_transactions.acme'
    """
    return f"_transactions.{tenant}"


class Keyring:
    """Which transactions with a key have happened."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    @staticmethod
    def marker(tenant: str, key: bytes) -> Draft:
        """The event that makes a key known together with the transaction it is part of."""
        marker = Draft(marker_topic(tenant), [b""], tenant=tenant, codec="raw")
        marker.tokens, marker.partition = [key], 0
        return marker

    def check(self, tenant: str, key: bytes) -> None:
        """Raise KeyKnown when a transaction of this key lies in the journal, or in the next commit."""
        if self._find(tenant, key) is not None:
            raise KeyKnown("a transaction with this idempotency key has happened already")

    async def knows(self, tenant: str, key: bytes) -> bool:
        """Whether a transaction of this key has happened; durable, when it says so."""
        offset = self._find(tenant, key)
        if offset is None:
            return False
        if offset >= self._engine.log.partition(marker_topic(tenant), 0).end:
            # The first one is being written: "it has happened" must not be said before it is true.
            # Without room for what was settled since, the commit it is in is durable all the same.
            with contextlib.suppress(DiskRefused):
                await self._engine.commits.flush()
        return True

    def _find(self, tenant: str, key: bytes) -> int | None:
        table = self._engine.fold.dedup.get(marker_topic(tenant))
        return table.find(key) if table is not None else None  # of partition 0: just the offset

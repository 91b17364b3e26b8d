"""Stores: where a reader finds topics, bounds and rows, from a folder or from a broker.

A Spark worker lives through many tasks and batches, so a store is opened once in a process and
moved on from then.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from penstock.pipelines.connection import is_broker
from penstock.pipelines.plan import Bounds, Split

# Rows handed to Spark at once: a row group of a segment, and never much memory.
PIECE_EVENTS = 65_536
PIECE_BYTES = 8 << 20


class Store(Protocol):
    """One place that holds events."""

    def identity(self) -> str:
        """What tells this bus from every other; empty when it does not say."""
        ...

    def bounds(self, pattern: str) -> Bounds:
        """First and end offset of every partition of the topics that match, as of now."""
        ...

    def find_time(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset appended at or after a time."""
        ...

    def rows(self, split: Split, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The log's columns of these names, in this order, as they are stored."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


_open: dict[tuple[str, str | None], Store] = {}


def store_at(url: str, token: str | None = None) -> Store:
    """The store of a URL, the same one for the life of this process."""
    key = (url, token)
    found = _open.get(key)
    if found is None:
        found = _open[key] = _opener(url)(url, token)
    return found


def _opener(url: str) -> Callable[[str, str | None], Store]:
    if is_broker(url):
        from penstock.pipelines.broker_store import BrokerStore

        return BrokerStore
    from penstock.pipelines.folder_store import FolderStore

    return FolderStore


@atexit.register
def close_stores() -> None:
    """Close every store of this process."""
    while _open:
        _open.popitem()[1].close()

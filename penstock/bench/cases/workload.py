"""What the cases share: a bus to measure, topics to spread over, and counts that must be right.

A case asks the bus at its end what it holds: a figure for events that cannot be read back would
mean nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.bus.bus import Bus
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.model.errors import PenstockError
from penstock.model.settings import MIB, Journal, Settings

if TYPE_CHECKING:
    from collections.abc import Coroutine

# Calls in flight: while one commit is on its way to the disk, the next is being filled.
PRODUCERS = 8
# A quarter of the default: files are closed and sealed within a window of 2 s, not only after it.
JOURNAL_FILE_BYTES = 64 * MIB
SEAL_TIMEOUT_S = 600.0  # ten gigabytes on a busy machine
SEALED_OFTEN = Settings(journal=Journal(file_bytes=JOURNAL_FILE_BYTES))


def open_bus(folder: Path, settings: Settings = SEALED_OFTEN) -> Bus:
    """A bus that keeps its events in `folder`, whatever this machine's configuration says."""
    return penstock.connect(folder, settings=settings)


async def make_topics(bus: Bus, count: int, name: str = "bench") -> list[str]:
    """Topics to publish to, made before the clock runs."""
    topics = [f"{name}.topic{number}" for number in range(count)]
    for topic in topics:
        await bus.topics.create(topic)
    return topics


async def together(*calls: Coroutine[Any, Any, None]) -> None:
    """Run all at once; when one fails the others are stopped, not left running."""
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(call)


async def stored(bus: Bus) -> int:
    """How many events the bus says it holds."""
    topics = await bus.topics.list()
    return sum(part.end_offset - part.first_offset for topic in topics for part in topic.partitions)


def expect(found: int, expected: int, what: str) -> None:
    """Refuse a figure that rests on a wrong count."""
    if found != expected:
        raise PenstockError(
            f"{found} events are {what} where {expected} were expected: the figure would mean "
            "nothing. Run the case again, and report it when it stays",
            found=found,
            expected=expected,
        )


def embedded(bus: Bus) -> EmbeddedEngine:
    """The engine below, for figures that the public API does not have."""
    assert isinstance(bus.engine, EmbeddedEngine)
    return bus.engine


async def sealed(bus: Bus) -> None:
    """Wait until every closed journal file is in Parquet segments."""
    engine = embedded(bus)
    async with asyncio.timeout(SEAL_TIMEOUT_S):
        while engine.log.manifest.sealed_to < engine.journal.base:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def sealed_share(bus: Bus) -> float:
    """Which part of the journal written so far is in Parquet segments."""
    engine = embedded(bus)
    return engine.log.manifest.sealed_to / max(engine.journal.position, 1)


class DiskWrites:
    """Counts what this process and its ended children hand to the disk, as the kernel sees it.

    >>> DiskWrites().per_byte(100) >= 0
    True
    """

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> int:
        try:
            text = Path("/proc/self/io").read_text()
        except OSError:
            return 0
        return int(dict(line.split(": ") for line in text.splitlines())["write_bytes"])

    def per_byte(self, payload_bytes: int) -> float:
        """Bytes written since for each byte of payload; 0 where the kernel does not say."""
        return (self._now() - self._before) / max(payload_bytes, 1)

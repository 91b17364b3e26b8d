"""Replaying: stored events of a pattern, between two points given as offsets or as times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.bus.publishing import When, when_us
from penstock.engines import request as administer
from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidInput
from penstock.model.topic import check_pattern, is_system, is_wildcard, matches

if TYPE_CHECKING:
    from penstock.bus.bus import Bus


class Window(NamedTuple):
    """Which part of each partition to read; the ends are the first that is left out."""

    since: When | None
    until: When | None
    from_offset: int | None
    to_offset: int | None
    partition: int | None


async def replay_batches(bus: Bus, pattern: str, window: Window) -> AsyncIterator[EventBatch]:
    """Batches of all topics of a pattern, one partition after the other."""
    check_pattern(pattern)
    since, until, first, last, partition = window
    if since is not None or until is not None:
        bus.need("time-replay")
    if (since is not None and first is not None) or (until is not None and last is not None):
        raise InvalidInput("give a time or an offset for each end, not both")
    await bus.ask(administer.AdmitReplay(bus.identity.tenant))
    for info in await _matching(bus, pattern):
        for part in info.partitions:
            if partition is None or part.partition == partition:
                start, stop = await _range(bus, info.name, part, window)
                async for batch in bus.engine.read(info.name, part.partition, start, stop):
                    yield batch


async def _matching(bus: Bus, pattern: str) -> list[Any]:
    if not is_wildcard(pattern):
        return [await bus.topics.info(pattern)]
    topics = await bus.topics.list(system=is_system(pattern))
    return [topic for topic in topics if matches(pattern, topic.name)]


async def _range(bus: Bus, topic: str, part: Any, window: Window) -> tuple[int, int]:
    start, stop = part.first_offset, part.end_offset
    if window.from_offset is not None:
        start = window.from_offset
    if window.to_offset is not None:
        stop = min(stop, window.to_offset)
    now_us = bus.wall_us()
    if window.since is not None:
        time_us = when_us(window.since, now_us)
        start = await bus.ask(administer.FindOffset(topic, part.partition, time_us))
    if window.until is not None:
        time_us = when_us(window.until, now_us)
        stop = await bus.ask(administer.FindOffset(topic, part.partition, time_us))
    return start, stop

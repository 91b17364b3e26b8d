"""Replaying: stored events of a pattern, between two points given as offsets or as times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

from penstock.engines import requests as administer
from penstock.engines.requests import PartitionInfo, TopicInfo
from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidInput
from penstock.model.parameter import Moment, count, moment_us
from penstock.model.topic import check_pattern, is_system, is_wildcard, matches

if TYPE_CHECKING:
    from penstock.bus.bus import Bus


class Window(NamedTuple):
    """Which part of each partition to read; the ends are the first that is left out."""

    since: Moment | None
    until: Moment | None
    from_offset: int | None
    to_offset: int | None
    partition: int | None


class Ends(NamedTuple):
    """A window as numbers: times in microseconds since 1970 UTC."""

    since_us: int | None
    until_us: int | None
    first: int | None
    stop: int | None
    partition: int | None


def _checked(window: Window, now_us: int) -> Ends:
    since, until, first, stop, partition = window
    return Ends(
        None if since is None else moment_us("since", since, now_us),
        None if until is None else moment_us("until", until, now_us),
        None if first is None else count("from_offset", first),
        None if stop is None else count("to_offset", stop),
        None if partition is None else count("partition", partition),
    )


async def replay_batches(bus: Bus, pattern: str, window: Window) -> AsyncIterator[EventBatch]:
    """Batches of all topics of a pattern, one partition after the other."""
    check_pattern(pattern)
    ends = _checked(window, bus.wall_us())
    if ends.since_us is not None or ends.until_us is not None:
        bus.need("time-replay")
    if None not in (ends.since_us, ends.first) or None not in (ends.until_us, ends.stop):
        raise InvalidInput("give a time or an offset for each end, not both")
    await bus.ask(administer.AdmitReplay(bus.identity.tenant))
    for info in await _matching(bus, pattern):
        for part in info.partitions:
            if ends.partition is None or part.partition == ends.partition:
                start, stop = await _range(bus, info.name, part, ends)
                async for batch in bus.engine.read(info.name, part.partition, start, stop):
                    yield batch


async def _matching(bus: Bus, pattern: str) -> list[TopicInfo]:
    if not is_wildcard(pattern):
        return [await bus.topics.info(pattern)]
    topics = await bus.topics.list(system=is_system(pattern))
    return [topic for topic in topics if matches(pattern, topic.name)]


async def _range(bus: Bus, topic: str, part: PartitionInfo, ends: Ends) -> tuple[int, int]:
    start, stop = part.first_offset, part.end_offset
    if ends.first is not None:
        start = ends.first
    if ends.stop is not None:
        stop = min(stop, ends.stop)
    if ends.since_us is not None:
        start = await bus.ask(administer.FindOffset(topic, part.partition, ends.since_us))
    if ends.until_us is not None:
        stop = await bus.ask(administer.FindOffset(topic, part.partition, ends.until_us))
    return start, stop

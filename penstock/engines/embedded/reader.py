"""Reads stored events back, for the embedded engine and the follower alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.engines.embedded.runtime import Runtime
from penstock.log.event_log import EventLog, InMemory
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, OffsetExpired
from penstock.model.event import Event

# The most events of one read, a row group of a segment: enough to outweigh the hand-over to a
# thread, small enough to stay in cache.
READ_EVENTS = 65_536
# A caller that waited less than this for the next batches is slower than the disk.
CALLER_WAITS_S = 0.002
# How often events may move to other files while one read looks for them: a folder that is over its
# bound drops replaced files at once.
MOST_MOVES = 8


async def load(
    log: EventLog,
    runtime: Runtime,
    topic: str,
    partition: int,
    offset: int,
    limit: int,
) -> list[EventBatch]:
    """Batches from `offset` on, at most `limit` events; read in a thread unless they are in memory."""
    sources = log.plan(topic, partition, offset, limit)
    if all(isinstance(source, InMemory) for source in sources):
        return log.load(sources, offset, limit)
    for _ in range(MOST_MOVES):
        try:
            return await runtime.read(log.load, sources, offset, limit)
        except (Corrupted, FileNotFoundError):
            # A file that was sealed and reclaimed since the plan was made is not damage.
            log.refresh()
            before, sources = sources, log.plan(topic, partition, offset, limit)
            if sources == before:
                raise
    return await runtime.read(log.load, sources, offset, limit)


async def stored_batches(
    log: EventLog, runtime: Runtime, topic: str, partition: int, start: int, stop: int | None
) -> AsyncIterator[EventBatch]:
    """Stored batches in order; the next ones are read while the caller works on the last."""
    end = log.partition(topic, partition).end
    stop = end if stop is None else min(stop, end)

    def fetch(offset: int, use_threads: bool) -> asyncio.Future[list[EventBatch]]:
        limit = min(READ_EVENTS, stop - offset)
        sources = log.plan(topic, partition, offset, limit)
        if all(isinstance(source, InMemory) for source in sources):
            done: asyncio.Future[list[EventBatch]] = asyncio.get_running_loop().create_future()
            done.set_result(log.load(sources, offset, limit))
            return done
        return runtime.begin_read(log.load, sources, offset, limit, use_threads)

    ahead = fetch(start, True) if start < stop else None
    try:
        while ahead is not None:
            asked_at = runtime.now()
            try:
                batches = await ahead
            except (Corrupted, FileNotFoundError):  # perhaps the files only moved
                limit = min(READ_EVENTS, stop - start)
                batches = await load(log, runtime, topic, partition, start, limit)
            # Decode on several cores only for a caller that waited: a slow one needs its core itself.
            caller_waits = runtime.now() - asked_at > CALLER_WAITS_S
            start = batches[-1].end_offset
            ahead = fetch(start, caller_waits) if start < stop else None
            for batch in batches:
                yield batch
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)


async def event_at(
    log: EventLog, runtime: Runtime, topic: str, partition: int, offset: int
) -> Event:
    """One stored event."""
    batches = await load(log, runtime, topic, partition, offset, 1)
    if not batches:
        first, end = log.bounds(topic, partition)
        raise OffsetExpired(
            f"{topic}/{partition}/{offset} does not exist; the log ends at {end}",
            topic=topic, partition=partition, first_offset=first, end_offset=end,
        )  # fmt: skip
    return batches[0].event(0)

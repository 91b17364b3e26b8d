"""The event log: every partition of every topic behind one offset space.

An offset is looked up in memory, then in the journal, then in the sealed segments, and read from
wherever it lies. Look-ups are arithmetic on the owner's loop; `load` does the reading and may run
in a thread, because a plan stays true until the files are reclaimed, a grace time later.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.log.disk import Disk
from penstock.log.journal import JournalReader
from penstock.log.manifest import Manifest
from penstock.log.segment import SegmentInfo
from penstock.log.segment_reader import GroupCache, SegmentReader
from penstock.log.side_files import attach
from penstock.model.batch import BatchHead, EventBatch
from penstock.model.errors import OffsetExpired

Place = tuple[str, int]
# Segments kept open: a file handle and a map each.
MAX_OPEN_SEGMENTS = 64
# One read takes about this much from files, one batch at least, however many events were asked for.
READ_BYTES = 16 << 20
# What a batch in the cache takes beside its columns: most batches of single events are this.
OBJECT_BYTES = 1_000


class InMemory(NamedTuple):
    """A batch that is still at hand."""

    batch: EventBatch


class InJournal(NamedTuple):
    """A batch in a journal file."""

    base: int
    position: int
    inner: int


class InSegment(NamedTuple):
    """A stretch of a sealed segment."""

    info: SegmentInfo
    topic: str
    partition: int
    offset: int
    limit: int


Source = InMemory | InJournal | InSegment


class PartitionLog:
    """Where the unsealed batches of one partition lie."""

    __slots__ = (
        "bases",
        "end",
        "files",
        "floor",
        "inners",
        "last_time_us",
        "next",
        "positions",
        "recent",
        "times",
        "urgent_to",
    )

    def __init__(self, end: int = 0) -> None:
        self.end = end
        """Behind the last committed event: what readers may see."""
        self.next = end
        """The offset the next event gets; ahead of `end` while a commit is under way."""
        self.floor = 0
        """Offsets below belong to a deleted topic of the same name."""
        self.last_time_us = 0
        self.urgent_to = 0
        """Behind the last event that may have a priority."""
        self.bases = array("q")
        self.times = array("q")
        self.files = array("Q")
        self.positions = array("Q")
        self.inners = array("I")
        self.recent: dict[int, EventBatch] = {}

    def add(self, head: BatchHead | EventBatch, base: int, position: int, inner: int) -> None:
        """A batch is committed at `position` of the journal file that begins at `base`."""
        self.bases.append(head.base_offset)
        self.times.append(head.append_time_us)
        self.files.append(base)
        self.positions.append(position)
        self.inners.append(inner)
        self.end = head.base_offset + head.count
        if head.urgent:
            self.urgent_to = self.end
        self.next = max(self.next, self.end)
        self.last_time_us = max(self.last_time_us, head.append_time_us)

    def forget_before(self, position: int) -> None:
        """The journal before `position` is sealed."""
        cut = bisect_left(self.positions, position)
        if cut:
            for column in (self.bases, self.times, self.files, self.positions, self.inners):
                del column[:cut]


class ReaderPool:
    """Open segment readers, the most recently used ones; one user of each at a time."""

    def __init__(self, disk: Disk, cache_bytes: int) -> None:
        self._disk = disk
        self._groups = GroupCache(cache_bytes)
        self._open: OrderedDict[int, tuple[SegmentReader, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, info: SegmentInfo) -> Iterator[SegmentReader]:
        """A reader of a segment, for as long as the block lasts."""
        with self._lock:
            found = self._open.pop(info.id, None)
            if found is None:
                found = (SegmentReader(self._disk, info, self._groups), threading.Lock())
            self._open[info.id] = found
            if len(self._open) > MAX_OPEN_SEGMENTS:
                self._open.popitem(last=False)
        reader, busy = found
        with busy:
            yield reader

    def forget(self, number: int) -> None:
        """Close a segment that is about to be removed, when its last reader is done."""
        with self._lock:
            found = self._open.pop(number, None)
        if found is not None:
            reader, busy = found
            with busy:
                reader.close()

    def close(self) -> None:
        """Close all of them."""
        for reader, _ in self._open.values():
            reader.close()
        self._open.clear()


class EventLog:
    """Finds and reads events."""

    def __init__(self, disk: Disk, manifest: Manifest, *, cache_bytes: int) -> None:
        self.disk = disk
        self.manifest = manifest
        self.journal = JournalReader(disk)
        self.partitions: dict[Place, PartitionLog] = {}
        self.refresh: Callable[[], None] = lambda: None
        """Learn what a writer in another process has sealed and reclaimed meanwhile."""
        self._recent: deque[tuple[PartitionLog, int, int]] = deque()
        self._recent_bytes = 0
        self._cache_bytes = cache_bytes
        self._readers = ReaderPool(disk, cache_bytes)

    def partition(self, topic: str, partition: int) -> PartitionLog:
        """The index of a partition, made from the manifest on first sight."""
        place = (topic, partition)
        log = self.partitions.get(place)
        if log is None:
            log = self.partitions[place] = PartitionLog()
            sealed = self.manifest.ranges(topic, partition)
            if sealed:
                log.end = log.next = sealed[-1][1].last_offset + 1
                log.last_time_us = sealed[-1][1].last_time_us
                urgent = (each.last_offset + 1 for _, each in sealed if each.urgent is not False)
                log.urgent_to = max(urgent, default=0)
        return log

    def remember(self, batch: EventBatch, log: PartitionLog) -> None:
        """Keep a committed batch at hand for the consumers that are about to ask for it."""
        size = batch.size_bytes + OBJECT_BYTES
        log.recent[batch.base_offset] = batch
        self._recent.append((log, batch.base_offset, size))
        self._recent_bytes += size
        while self._recent_bytes > self._cache_bytes:
            old, base, size = self._recent.popleft()
            old.recent.pop(base, None)
            self._recent_bytes -= size

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset still there, and the one behind the last."""
        log = self.partition(topic, partition)
        first = log.bases[0] if log.bases else log.end
        for _, stretch in reversed(self.manifest.ranges(topic, partition)):
            if stretch.last_offset + 1 < first:
                break  # retention took what was between; older events in a shared file are gone too
            first = min(first, stretch.first_offset)
        return max(first, log.floor), log.end

    def at_hand(self, topic: str, partition: int, offset: int) -> bool:
        """Whether an offset lies in the journal or is still to come, so that retention cannot have it."""
        log = self.partition(topic, partition)
        return offset >= (max(log.bases[0], log.floor) if log.bases else log.end)

    def plan(self, topic: str, partition: int, offset: int, limit: int) -> list[Source]:
        """Where the next events from `offset` on lie; about `limit` events, at least one batch."""
        log = self.partition(topic, partition)
        if offset >= log.end:
            return []
        if log.bases and offset >= max(log.bases[0], log.floor):
            return self._plan_journal(log, offset, limit)
        first, end = self.bounds(topic, partition)
        found = self.manifest.find(topic, partition, offset) if offset >= first else None
        if found is None:
            raise OffsetExpired(
                f"{topic}/{partition}/{offset} is gone: retention kept {first} to {end - 1}. Start "
                f"at {first}, or keep events longer",
                topic=topic,
                partition=partition,
                first_offset=first,
                end_offset=end,
            )
        info, stretch = found
        upto = stretch.last_offset + 1
        if log.bases:
            upto = min(upto, log.bases[0])
        return [InSegment(info, topic, partition, offset, min(limit, upto - offset))]

    def _plan_journal(self, log: PartitionLog, offset: int, limit: int) -> list[Source]:
        at = bisect_right(log.bases, offset) - 1
        sources: list[Source] = []
        while at < len(log.bases) and (not sources or log.bases[at] < offset + limit):
            batch = log.recent.get(log.bases[at])
            if batch is not None:
                sources.append(InMemory(batch))
            else:
                sources.append(InJournal(log.files[at], log.positions[at], log.inners[at]))
            at += 1
        return sources

    def load(
        self, sources: list[Source], offset: int, limit: int, use_threads: bool = True
    ) -> list[EventBatch]:
        """Read what was planned, cut to the events from `offset` on, at most `limit`.

        Of large events it may be fewer: read on behind the last of them.
        """
        batches: list[EventBatch] = []
        read_bytes = 0
        for source in sources:
            if read_bytes >= READ_BYTES:
                break
            if isinstance(source, InMemory):
                batches.append(source.batch)
            elif isinstance(source, InJournal):
                batch = self.journal.batch(source.base, source.position, source.inner)
                read_bytes += batch.size_bytes
                batches.append(attach(self.disk, batch))
            else:
                with self._readers.lend(source.info) as reader:
                    batches += reader.read(
                        source.topic,
                        source.partition,
                        source.offset,
                        limit_events=source.limit,
                        limit_bytes=READ_BYTES,
                        use_threads=use_threads,
                    )
        return [
            part
            for batch in batches
            if (part := _within(batch, offset, offset + limit)) is not None
        ]

    def read(self, topic: str, partition: int, offset: int, limit: int) -> list[EventBatch]:
        """Plan and load in one go."""
        return self.load(self.plan(topic, partition, offset, limit), offset, limit)

    def find_time(self, topic: str, partition: int, time_us: int) -> int:
        """The first offset appended at or after a time; the end when there is none."""
        log = self.partition(topic, partition)
        if not log.bases or time_us <= log.times[0]:
            for info, stretch in self.manifest.ranges(topic, partition):
                if stretch.last_time_us >= time_us and stretch.last_offset >= log.floor:
                    with self._readers.lend(info) as reader:
                        found = reader.find_time(topic, partition, time_us)
                    if found is not None:
                        return max(found, log.floor)
        at = bisect_left(log.times, time_us)
        return max(log.bases[at], log.floor) if at < len(log.bases) else log.end

    def forget_segment(self, number: int) -> None:
        """Let go of a segment that is about to be removed; may wait for a reader of it."""
        self._readers.forget(number)

    def sealed(self, position: int) -> None:
        """Everything in the journal before `position` is in segments now."""
        for log in self.partitions.values():
            log.forget_before(position)

    def drop(self, places: Iterable[Place]) -> None:
        """Forget the partitions of a deleted topic."""
        for place in places:
            self.partitions.pop(place, None)

    def close(self) -> None:
        """Release the files."""
        self.journal.close()
        self._readers.close()


def _within(batch: EventBatch, start: int, stop: int) -> EventBatch | None:
    first = max(start - batch.base_offset, 0)
    last = min(stop - batch.base_offset, batch.count)
    return batch.slice(first, last) if first < last else None

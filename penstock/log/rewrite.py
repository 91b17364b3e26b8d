"""Rewriting: journal files and segments in, fewer and better segments out, every event kept.

Sealing a journal file, folding shared segments and merging small ones are the same `run` with
different inputs. Events are laid in lanes (topic and partition), lanes are cut into runs (offsets
that follow each other within one UTC day). A run of at least `min_segment_bytes` becomes segments
of its own; the rest goes into shared segments. Before the inputs may go, the outputs are decoded
and compared with what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from penstock.log.content import ContentHash
from penstock.log.disk import Disk
from penstock.log.gather import Sized, gather_groups
from penstock.log.measure import event_bytes
from penstock.log.segment import DAY_US, Range, SegmentInfo, write_segment
from penstock.log.segment_reader import GroupCache, SegmentReader
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted
from penstock.model.settings import Sealing

# Reads one closed journal file: (disk, its first position, its end).
BatchesOf = Callable[[Disk, int, int], Iterator[EventBatch]]


class JournalInput(msgspec.Struct, frozen=True):
    """One closed journal file: from its first position to its end."""

    base: int
    end: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rewrite: what to read, what it replaces, how to write."""

    first_id: int
    settings: Sealing
    journal: list[JournalInput] = []
    segments: list[SegmentInfo] = []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewrite made: hand it to `Manifest.apply` as one change."""

    added: list[SegmentInfo]
    removed: list[int]
    sealed_to: int | None
    bytes_in: int
    bytes_out: int
    events: int


class Run(msgspec.Struct):
    """Batches, with their sizes, of one topic, partition and day whose offsets follow each other."""

    batches: list[Sized]
    size_bytes: int


def run(disk: Disk, job: Job, batches_of: BatchesOf) -> Result:
    """Do a rewrite. The inputs stay as they are; the outputs count once the manifest has them."""
    batches, bytes_in = _read_inputs(disk, job, batches_of)
    events = sum(batch.count for batch in batches)
    added: list[SegmentInfo] = []
    for shared, part in cut_files(list(runs_of(batches)), job.settings):
        groups = gather_groups(part, job.settings.row_group_events)
        number = job.first_id + len(added)
        added.append(
            write_segment(disk, number, groups, shared=shared, zstd_level=job.settings.zstd_level)
        )
    prove(disk, job, added)
    if sum(info.rows for info in added) != events:
        raise Corrupted(f"a rewrite of {events} events wrote another number; its inputs were kept")
    return Result(
        added=added,
        removed=[info.id for info in job.segments],
        sealed_to=job.journal[-1].end if job.journal else None,
        bytes_in=bytes_in,
        bytes_out=sum(info.size_bytes for info in added),
        events=events,
    )


def _read_inputs(disk: Disk, job: Job, batches_of: BatchesOf) -> tuple[list[EventBatch], int]:
    batches: list[EventBatch] = []
    for part in job.journal:
        batches += batches_of(disk, part.base, part.end)
    for info in job.segments:
        reader = SegmentReader(disk, info)
        try:
            batches += reader.batches()
        finally:
            reader.close()
    size = sum(part.end - part.base for part in job.journal)
    return batches, size + sum(info.size_bytes for info in job.segments)


def runs_of(batches: Sequence[EventBatch]) -> Iterator[Run]:
    """Sort batches by topic, partition and offset, and cut them into runs.

    >>> batches = [EventBatch.build("b", [b"1"]), EventBatch.build("a", [b"2"])]
    >>> [run.batches[0][0].topic for run in runs_of(batches)]
    ['a', 'b']
    """
    ordered = sorted(batches, key=lambda each: (each.topic, each.partition, each.base_offset))
    current: Run | None = None
    last: EventBatch | None = None
    for whole in ordered:
        if last is not None and _lane(last) == _lane(whole) and whole.base_offset < last.end_offset:
            raise Corrupted(
                f"{whole.topic!r} partition {whole.partition} has offset {whole.base_offset} twice; "
                "nothing was rewritten and nothing deleted: restore the folder from a backup",
                topic=whole.topic,
                partition=whole.partition,
                offset=whole.base_offset,
            )
        for batch in _split_days(whole):
            if current is None or last is None or not _follows(last, batch):
                if current is not None:
                    yield current
                current = Run([], 0)
            size = event_bytes(batch)
            current.batches.append((batch, size))
            current.size_bytes += size
            last = batch
    if current is not None:
        yield current


def _lane(batch: EventBatch) -> tuple[str, int]:
    return batch.topic, batch.partition


def _follows(last: EventBatch, batch: EventBatch) -> bool:
    return (
        last.end_offset == batch.base_offset
        and _lane(last) == _lane(batch)
        and last.append_time(last.count - 1) // DAY_US == batch.append_time_us // DAY_US
    )


def _split_days(batch: EventBatch) -> list[EventBatch]:
    """Cut at midnight UTC; nearly always there is nothing to cut."""
    if batch.append_times is None:
        return [batch]
    days = batch.append_times // DAY_US
    cuts = np.flatnonzero(days[1:] != days[:-1]) + 1
    if not len(cuts):
        return [batch]
    bounds = [0, *cuts.tolist(), batch.count]
    return [batch.slice(start, stop) for start, stop in pairwise(bounds)]


def cut_files(runs: Sequence[Run], settings: Sealing) -> Iterator[tuple[bool, list[Sized]]]:
    """Decide which file every batch goes to: yields (shared, batches) for each file.

    Files of one topic have at least `min_segment_bytes`, shared ones at least
    `target_segment_bytes` but for the last, so a rewrite leaves at most one small file.
    """
    shared: list[Sized] = []
    size = 0
    for each in runs:
        if each.size_bytes >= settings.min_segment_bytes:
            for part in _cut_run(each, settings):
                yield False, part
            continue
        shared += each.batches
        size += each.size_bytes
        if size >= settings.target_segment_bytes:
            yield True, shared
            shared, size = [], 0
    if shared:
        yield True, shared


def _cut_run(run: Run, settings: Sealing) -> Iterator[list[Sized]]:
    part: list[Sized] = []
    size = 0
    left = run.size_bytes
    for whole in run.batches:
        for each in _pieces(whole, settings.target_segment_bytes):
            part.append(each)
            size += each[1]
            left -= each[1]
            # A rest that is too small for a file of its own stays in this one.
            if size >= settings.target_segment_bytes and left >= settings.min_segment_bytes:
                yield part
                part, size = [], 0
    if part:
        yield part


def _pieces(whole: Sized, target_bytes: int) -> list[Sized]:
    """A batch larger than a file, in equal parts that are not."""
    batch, size = whole
    parts = min(batch.count, size // target_bytes)
    if parts <= 1:
        return [whole]
    bounds = [batch.count * index // parts for index in range(parts + 1)]
    slices = [batch.slice(start, stop) for start, stop in pairwise(bounds)]
    return [(each, event_bytes(each)) for each in slices]


def prove(disk: Disk, job: Job, added: Sequence[SegmentInfo]) -> None:
    """Read the outputs and compare: every event of the segments that went in is there, unchanged.

    The hashes are those the inputs got when they were written, so damage in between shows too.
    Events from the journal are compared by `write_segment`, which has them at hand.
    """
    homes: dict[tuple[str, int], list[tuple[Range, SegmentReader]]] = {}
    cache = GroupCache()
    readers = [SegmentReader(disk, info, cache) for info in added]
    for info, reader in zip(added, readers, strict=True):
        for each in info.ranges:
            homes.setdefault((each.topic, each.partition), []).append((each, reader))
    expected = [each for info in job.segments for each in info.ranges]
    expected.sort(key=lambda each: (each.topic, each.partition, each.first_offset))
    try:
        for each in expected:
            if _content(homes.get((each.topic, each.partition), []), each) != each.content:
                raise Corrupted(
                    f"a rewrite did not keep {each.topic!r} partition {each.partition} offsets "
                    f"{each.first_offset} to {each.last_offset} as they were; its output is not "
                    "used and its inputs were kept. Check the memory of this machine",
                    topic=each.topic,
                    partition=each.partition,
                    first_offset=each.first_offset,
                    last_offset=each.last_offset,
                )
    finally:
        for reader in readers:
            reader.close()


def _content(homes: list[tuple[Range, SegmentReader]], wanted: Range) -> bytes:
    """The hash of a range as it is in the outputs, which may have cut it over several files."""
    content = ContentHash()
    at = wanted.first_offset
    for each, reader in homes:
        if each.first_offset <= at <= each.last_offset:
            last = min(each.last_offset, wanted.last_offset)
            at += reader.hash_into(content, wanted.topic, wanted.partition, at, last)
    return content.digest()

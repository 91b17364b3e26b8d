"""Rewriting: journal files and segments in, fewer and better segments out, every event kept.

Sealing a journal file, folding shared segments and merging small ones are the same `run` with
different inputs. Events are laid in lanes (topic and partition), lanes are cut into runs (offsets
that follow each other within one UTC day). A run of at least `min_segment_bytes` becomes segments
of its own; the rest goes into shared segments. Before the inputs may go, the outputs are decoded
and compared with what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter

import msgspec
import numpy as np

from penstock.log.content import ContentHash
from penstock.log.disk import Disk
from penstock.log.gather import Sized, gather_groups
from penstock.log.journal import Packed
from penstock.log.measure import event_bytes
from penstock.log.segment import DAY_US, Range, SegmentInfo, write_segment
from penstock.log.segment_reader import GroupCache, SegmentReader
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted
from penstock.model.settings import Sealing


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


# Reads one closed journal file: (disk, its first position, its end).
BatchesOf = Callable[[Disk, int, int], Iterator[Packed]]


def packed(batches: Iterable[EventBatch]) -> Iterator[Packed]:
    """Batches that are decoded already, as `run` takes them."""
    known = list(batches)
    for at, each in enumerate(known):
        yield Packed(
            each.topic, each.partition, each.base_offset, each.count, at, known.__getitem__
        )


def run(disk: Disk, job: Job, batches_of: BatchesOf) -> Result:
    """Do a rewrite. The inputs stay as they are; the outputs count once the manifest has them.

    What is decoded at a time is a row group, what a file shares and the file itself: a journal file
    may expand to many times its size.
    """
    batches, bytes_in = _read_inputs(disk, job, batches_of)
    events = sum(each.events for each in batches)
    added: list[SegmentInfo] = []
    for shared, part in cut_files(runs_of(batches), job.settings):
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


def _read_inputs(disk: Disk, job: Job, batches_of: BatchesOf) -> tuple[list[Packed], int]:
    batches: list[Packed] = []
    for part in job.journal:
        batches += batches_of(disk, part.base, part.end)
    for info in job.segments:
        reader = SegmentReader(disk, info)
        try:
            batches += packed(reader.batches())
        finally:
            reader.close()
    size = sum(part.end - part.base for part in job.journal)
    return batches, size + sum(info.size_bytes for info in job.segments)


def runs_of(batches: Iterable[Packed]) -> Iterator[Iterator[Sized]]:
    """Sort batches by topic, partition and offset, and cut them into runs; take each before the next.

    >>> batches = [EventBatch.build("b", [b"1"]), EventBatch.build("a", [b"2"])]
    >>> [[batch.topic for batch, _ in run] for run in runs_of(packed(batches))]
    [['a'], ['b']]
    """
    ordered = sorted(batches, key=lambda each: each[:3])
    for one, other in pairwise(ordered):
        if _lane(one) == _lane(other) and other.base_offset < one.end_offset:
            raise Corrupted(
                f"{other.topic!r} partition {other.partition} has offset {other.base_offset} twice; "
                "nothing was rewritten and nothing deleted: restore the folder from a backup",
                topic=other.topic,
                partition=other.partition,
                offset=other.base_offset,
            )
    for _, run in groupby(_numbered(ordered), key=itemgetter(0)):
        yield (sized for _, sized in run)


def _numbered(ordered: Iterable[Packed]) -> Iterator[tuple[int, Sized]]:
    """Each batch, cut at midnight, with the number of its run."""
    number = 0
    last: EventBatch | None = None
    for each in ordered:
        for batch in _split_days(each.read()):
            if last is not None and not _follows(last, batch):
                number += 1
            yield number, (batch, event_bytes(batch))
            last = batch


def _lane(batch: EventBatch | Packed) -> tuple[str, int]:
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


def cut_files(
    runs: Iterable[Iterator[Sized]], settings: Sealing
) -> Iterator[tuple[bool, Iterator[Sized]]]:
    """Decide which file every batch goes to: yields (shared, batches) for each; take each before the next.

    Files of one topic have at least `min_segment_bytes`, shared ones at least
    `target_segment_bytes` but for the last, so a rewrite leaves at most one small file.
    """
    for (_, shared), part in groupby(_placed(runs, settings), key=itemgetter(0, 1)):
        yield shared, (sized for _, _, sized in part)


def _placed(
    runs: Iterable[Iterator[Sized]], settings: Sealing
) -> Iterator[tuple[int, bool, Sized]]:
    """Each batch with the number of its file, and whether topics share it."""
    number = 0
    shared: list[Sized] = []
    for run in runs:
        head = _up_to(run, settings.min_segment_bytes)
        if _size(head) >= settings.min_segment_bytes:
            for begins, sized in _cut_run(chain(head, run), settings):
                number += begins
                yield number, False, sized
            continue
        shared += head
        if _size(shared) >= settings.target_segment_bytes:
            number += 1
            yield from ((number, True, sized) for sized in shared)
            shared = []
    yield from ((number + 1, True, sized) for sized in shared)


def _cut_run(run: Iterable[Sized], settings: Sealing) -> Iterator[tuple[bool, Sized]]:
    """Each batch of a large run, and whether a file begins with it."""
    pieces = (each for whole in run for each in _pieces(whole, settings.target_segment_bytes))
    size = settings.target_segment_bytes  # as if a file before this run were full
    while held := _up_to(pieces, settings.min_segment_bytes):
        # A rest that is too small for a file of its own stays in the one before it.
        begins = _size(held) >= settings.min_segment_bytes
        if begins:
            size = 0
        for each in held:
            yield begins, each
            begins = False
            size += each[1]
        while size < settings.target_segment_bytes and (following := next(pieces, None)):
            yield False, following
            size += following[1]


def _up_to(batches: Iterator[Sized], least_bytes: int) -> list[Sized]:
    """The next batches, until they have so many bytes together or there are no more."""
    taken: list[Sized] = []
    size = 0
    while size < least_bytes and (each := next(batches, None)) is not None:
        taken.append(each)
        size += each[1]
    return taken


def _size(batches: Iterable[Sized]) -> int:
    return sum(size for _, size in batches)


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

"""Choosing what to rewrite next: few files at the price of few rewrites. Pure planning.

One rule bounds the work: a file is only rewritten together with others that are, in sum, at least
as large as itself. So each rewrite at least doubles the file an event lies in, and an event is
rewritten at most log2(target / min) times, six with the default settings, before its file is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.log.rewrite import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.log.manifest import Manifest
    from penstock.log.segment import SegmentInfo
    from penstock.model.settings import Sealing

# Two or three neighbours are left alone: they will have more soon.
MIN_NEIGHBOURS = 4


def plan_merge(manifest: Manifest, settings: Sealing) -> Job | None:
    """The most useful rewrite of existing segments, or None when the files are few enough."""
    infos = list(manifest.segments())
    chosen = plan_fold(infos, settings) or next(plan_neighbours(infos, settings), None)
    if chosen is None:
        return None
    return Job(first_id=manifest.next_id, settings=settings, segments=chosen)


def plan_fold(infos: Iterable[SegmentInfo], settings: Sealing) -> list[SegmentInfo] | None:
    """Shared segments to fold into one, when more than `shared_files_max` are not full."""
    small = sorted(
        (info.event_bytes, info.id, info)
        for info in infos
        if info.shared and info.event_bytes < settings.target_segment_bytes
    )
    if len(small) <= settings.shared_files_max:
        return None
    least = len(small) - settings.shared_files_max + 1
    chosen: list[SegmentInfo] = []
    size = 0
    for weight, _, info in small:
        # What does not fit the rule stays for later, and so does what would take much memory.
        full = size + weight > 2 * settings.target_segment_bytes
        if len(chosen) >= least and (weight > size or full):
            break
        chosen.append(info)
        size += weight
    return chosen


def plan_neighbours(infos: Iterable[SegmentInfo], settings: Sealing) -> Iterator[list[SegmentInfo]]:
    """Groups of small segments of one topic, partition and day that follow each other."""
    lanes: dict[tuple[str, int, int], list[SegmentInfo]] = {}
    for info in infos:
        if not info.shared:
            each = info.ranges[0]
            lanes.setdefault((each.topic, each.partition, each.day), []).append(info)
    for lane in lanes.values():
        lane.sort(key=lambda info: info.ranges[0].first_offset)
        for row in _adjacent(lane):
            chosen = _window(row, settings.target_segment_bytes)
            if chosen:
                yield chosen


def _adjacent(lane: list[SegmentInfo]) -> Iterator[list[SegmentInfo]]:
    row: list[SegmentInfo] = []
    for info in lane:
        if row and row[-1].ranges[0].last_offset + 1 != info.ranges[0].first_offset:
            yield row
            row = []
        row.append(info)
    yield row


def _window(row: list[SegmentInfo], target_bytes: int) -> list[SegmentInfo] | None:
    """The longest stretch that fits one file and whose largest is no larger than its rest."""
    best: list[SegmentInfo] = []
    sizes = [info.event_bytes for info in row]
    for start in range(len(row)):
        total = largest = 0
        for stop in range(start, len(row)):
            total += sizes[stop]
            largest = max(largest, sizes[stop])
            if total > target_bytes:
                break
            length = stop - start + 1
            if length >= MIN_NEIGHBOURS and length > len(best) and 2 * largest <= total:
                best = row[start : stop + 1]
    return best or None

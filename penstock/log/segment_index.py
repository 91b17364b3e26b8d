"""Which segments are live and which offsets each holds: the manifest's picture in memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from penstock.log.manifest_log import AuditMark, Change, encoded_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.log.segment import Range, SegmentInfo


class Placed(NamedTuple):
    """One range and the segment it is in, sorted by its first offset."""

    first_offset: int
    segment: SegmentInfo
    range: Range


class SegmentIndex:
    """Live segments by id, and their ranges by topic, partition and offset."""

    def __init__(self) -> None:
        self.sealed_to = 0
        self.at_us = 0
        self.next_id = 1
        self.audit: AuditMark | None = None
        """What the audit chain must reach: it lies in another folder, which may be lost."""
        self.total_bytes = 0
        self._live_bytes = 0
        self._segments: dict[int, SegmentInfo] = {}
        self._lanes: dict[tuple[str, int], list[Placed]] = {}

    def segments(self) -> Iterable[SegmentInfo]:
        """All live segments, in the order of their ids."""
        return [self._segments[number] for number in sorted(self._segments)]

    def ranges(self, topic: str, partition: int) -> list[tuple[SegmentInfo, Range]]:
        """Where the events of a partition are, by offset."""
        return [(each.segment, each.range) for each in self._lanes.get((topic, partition), ())]

    def find(self, topic: str, partition: int, offset: int) -> tuple[SegmentInfo, Range] | None:
        """The range with this offset, or the next one after it; None when all are before."""
        lane = self._lanes.get((topic, partition), [])
        index = bisect_right(lane, offset, key=_first) - 1
        if index >= 0 and lane[index].range.last_offset >= offset:
            return lane[index].segment, lane[index].range
        if index + 1 < len(lane):
            return lane[index + 1].segment, lane[index + 1].range
        return None

    def topics(self) -> list[tuple[str, int]]:
        """Every topic and partition with sealed events."""
        return sorted(self._lanes)

    def _take(self, change: Change) -> None:
        gone = set(change.remove)
        lanes = {
            (each.topic, each.partition)
            for number in gone
            for each in self._segments[number].ranges
        }
        for key in lanes:
            self._lanes[key] = [each for each in self._lanes[key] if each.segment.id not in gone]
        for number in gone:
            info = self._segments.pop(number)
            self.total_bytes -= info.size_bytes
            self._live_bytes -= encoded_size(info)
        for info in change.add:
            self._segments[info.id] = info
            self.total_bytes += info.size_bytes
            self._live_bytes += encoded_size(info)
            for each in info.ranges:
                self._place(info, each)
        for key in lanes:
            if not self._lanes[key]:
                del self._lanes[key]
        self.sealed_to, self.at_us, self.next_id = change.sealed_to, change.at_us, change.next_id
        self.audit = change.audit or self.audit

    def _overlap(self, change: Change) -> str | None:
        """Where two live ranges would claim one offset: a reader could not know whom to believe."""
        gone = set(change.remove)
        added: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for info in change.add:
            for each in info.ranges:
                added.setdefault((each.topic, each.partition), []).append(
                    (each.first_offset, each.last_offset)
                )
        for key, spans in added.items():
            spans += [
                (each.first_offset, each.range.last_offset)
                for each in self._lanes.get(key, ())
                if each.segment.id not in gone
            ]
            spans.sort()
            for (_, last), (first, _) in pairwise(spans):
                if first <= last:
                    return f"two segments claim offset {first} of {key[0]!r} partition {key[1]}"
        return None

    def _place(self, info: SegmentInfo, each: Range) -> None:
        lane = self._lanes.setdefault((each.topic, each.partition), [])
        insort(lane, Placed(each.first_offset, info, each), key=_first)

    def _clear(self) -> None:
        self._segments.clear()
        self._lanes.clear()
        self.total_bytes = self._live_bytes = 0


def _first(each: Placed) -> int:
    return each.first_offset

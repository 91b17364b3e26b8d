"""Retention: which segments may go, and which may not whatever happens. Pure.

Events leave in whole segment files, the oldest first: when they are older than `age_s`, when their
topic has more than `topic_max_bytes`, when the folder has more than `max_bytes`. In a write-once
topic nothing younger than `age_s` ever goes; when a size limit would need it to, the verdict names
the shortage, and publishes to that topic are refused instead.

A clock that jumps forward must not empty a log. `RetentionClock` is the time retention believes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from penstock.log.segment import Range, SegmentInfo
from penstock.model.errors import WriteOnce
from penstock.model.settings import Retention

SECOND_US = 1_000_000
# After a jump or a long stop, believed time runs this many times faster than real time until it has
# caught up. A week off is made good in under three hours; a clock a month ahead deletes nothing
# early for twelve hours, in which `behind_us` shows in metrics and the doctor.
CATCH_UP = 60

RetentionOf = Callable[[str], Retention]


class RetentionClock:
    """The time by which retention measures age: never ahead of the wall clock, never jumping with it.

    Start it with `Manifest.at_us`, and pass its `now_us` as `at_us` to each `Manifest.apply`, so
    that a restart does not make a wrong clock right.

    >>> clock = RetentionClock(start_us=1_000_000)
    >>> clock.advance(wall_us=9_000_000_000_000, elapsed_s=1.0)  # the clock jumped
    61000000
    """

    def __init__(self, start_us: int) -> None:
        self.now_us = start_us
        self.behind_us = 0

    def advance(self, wall_us: int, elapsed_s: float) -> int:
        """Move on by monotonic time; returns the time to judge age by."""
        if self.now_us == 0:  # an empty folder has nothing to lose
            self.now_us = wall_us
        self.now_us = min(wall_us, self.now_us + int(elapsed_s * CATCH_UP * SECOND_US))
        self.behind_us = wall_us - self.now_us
        return self.now_us


class RetentionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What retention allows to delete now, and what stands in its way."""

    segments: list[SegmentInfo]
    # Logical start of each partition that loses events: older ones may still lie in shared files.
    starts: dict[tuple[str, int], int]
    # Write-once topics over their own limit, and by how many bytes: publishes to them must be refused.
    full_topics: dict[str, int]
    # Bytes over the folder's limit that write-once forbids to delete: no write-once topic may grow.
    shortage_bytes: int
    # Bytes that would go, were they not in use by a reader.
    leased_bytes: int


class _Part(msgspec.Struct, eq=False):
    """One range on trial."""

    segment: SegmentInfo
    range: Range
    size_bytes: int
    held: bool
    gone: bool


def expired(
    segments: Iterable[SegmentInfo],
    retention_of: RetentionOf,
    *,
    folder: Retention,
    now_us: int,
    protected: Collection[int] = (),
    other_bytes: int = 0,
) -> RetentionPlan:
    """Which segments may be deleted now.

    `retention_of` gives the settings of a topic; of `folder` only `max_bytes` counts, and
    `other_bytes` (the journal) counts towards it. `protected` are ids of segments in use.
    """
    infos = list(segments)
    parts = {info.id: _parts(info, retention_of, now_us) for info in infos}
    full_topics = _over_topic_limits(parts.values(), retention_of)
    shortage = 0
    going = [info for info in infos if all(part.gone for part in parts[info.id])]
    chosen = {info.id: info for info in going}
    total = other_bytes + sum(info.size_bytes for info in infos)
    left = total - sum(info.size_bytes for info in going)
    if folder.max_bytes is not None:
        for info in sorted(infos, key=lambda each: (each.last_time_us, each.id)):
            if left <= folder.max_bytes:
                break
            if info.id not in chosen and not any(part.held for part in parts[info.id]):
                chosen[info.id] = info
                left -= info.size_bytes
        held = sum(info.size_bytes for info in infos if any(part.held for part in parts[info.id]))
        shortage = max(0, min(left - folder.max_bytes, held))
    kept = [info for number, info in chosen.items() if number in protected]
    freed = [info for number, info in sorted(chosen.items()) if number not in protected]
    return RetentionPlan(
        segments=freed,
        starts=_starts(freed),
        full_topics=full_topics,
        shortage_bytes=shortage,
        leased_bytes=sum(info.size_bytes for info in kept),
    )


def _parts(info: SegmentInfo, retention_of: RetentionOf, now_us: int) -> list[_Part]:
    weight = max(info.event_bytes, 1)
    found = []
    for each in info.ranges:
        retention = retention_of(each.topic)
        old = retention.age_s is not None and (
            each.last_time_us < now_us - int(retention.age_s * SECOND_US)
        )
        size = info.size_bytes * each.event_bytes // weight
        found.append(_Part(info, each, size, retention.write_once and not old, old))
    return found


def _over_topic_limits(parts: Iterable[list[_Part]], retention_of: RetentionOf) -> dict[str, int]:
    """Mark the oldest ranges of topics with too much; returns how much more write-once keeps of each."""
    topics: dict[str, list[_Part]] = {}
    for each in parts:
        for part in each:
            topics.setdefault(part.range.topic, []).append(part)
    full: dict[str, int] = {}
    for topic, members in topics.items():
        limit = retention_of(topic).topic_max_bytes
        if limit is None:
            continue
        members.sort(key=lambda part: (part.range.last_time_us, part.range.first_offset))
        over = sum(part.size_bytes for part in members if not part.gone) - limit
        for part in members:
            if over <= 0:
                break
            if not part.gone and not part.held:
                part.gone = True
                over -= part.size_bytes
        if over > 0:
            full[topic] = over
    return full


def _starts(freed: Iterable[SegmentInfo]) -> dict[tuple[str, int], int]:
    starts: dict[tuple[str, int], int] = {}
    for info in freed:
        for each in info.ranges:
            lane = (each.topic, each.partition)
            starts[lane] = max(starts.get(lane, 0), each.last_offset + 1)
    return starts


def check_change(old: Retention, new: Retention, *, topic: str = "") -> None:
    """Raise WriteOnce when new settings would take away what the old ones promised to keep.

    >>> check_change(Retention(write_once=True), Retention(write_once=True, age_s=None))
    """
    if not old.write_once:
        return
    shorter = new.age_s is not None and (old.age_s is None or new.age_s < old.age_s)
    if shorter or not new.write_once:
        what = "shorten its retention" if shorter else "end its write-once mode"
        raise WriteOnce(
            f"{topic or 'this topic'!r} is write-once: nobody can {what}. Nothing was changed; "
            "publish to another topic with the retention you need",
            topic=topic,
            old_age_s=old.age_s,
            new_age_s=new.age_s,
        )

"""Retention deletes the oldest, never what write-once promised, and does not trust a jumping clock (X5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.retention import CATCH_UP, SECOND_US, RetentionClock, check_change, expired
from penstock.log.segment import Range, SegmentInfo, segment_path
from penstock.model.errors import WriteOnce
from penstock.model.settings import Retention

DAY = 86_400
FOREVER = Retention(age_s=None)


def info(number, *parts, size=100) -> SegmentInfo:
    """A segment with ranges given as (topic, day of its newest event)."""
    shared = len(parts) > 1
    ranges = [
        Range(
            topic,
            0,
            number * 10,
            number * 10 + 9,
            0,
            int(day * DAY * SECOND_US),
            0,
            [],
            50,
            50,
            b"",
        )
        for topic, day in parts
    ]
    return SegmentInfo(
        number, segment_path(number, shared=shared), shared, "", size, 10, ranges, []
    )


def gone(
    segments, *, day=100, folder=FOREVER, protected=(), other_bytes=0, default=FOREVER, **topics
):
    verdict = expired(
        segments,
        lambda topic: topics.get(topic, default),
        folder=folder,
        now_us=int(day * DAY * SECOND_US),
        protected=protected,
        other_bytes=other_bytes,
    )
    return [each.id for each in verdict.segments], verdict


def test_age_takes_a_segment_when_its_newest_event_is_past_it():
    segments = [info(1, ("a", 69)), info(2, ("a", 70)), info(3, ("a", 71))]
    assert gone(segments, default=Retention(age_s=30 * DAY))[0] == [1]
    assert gone(segments, day=101.5, default=Retention(age_s=30 * DAY))[0] == [1, 2, 3]
    assert gone(segments)[0] == []


def test_a_shared_segment_goes_when_all_its_ranges_may():
    segments = [info(1, ("a", 10), ("b", 10))]
    short = Retention(age_s=DAY)
    assert gone(segments, a=short)[0] == []
    ids, verdict = gone(segments, a=short, b=short)
    assert ids == [1]
    assert verdict.starts == {("a", 0): 20, ("b", 0): 20}


def test_topic_limits_take_the_oldest_first():
    segments = [info(number, ("a", number)) for number in (3, 1, 2)] + [info(9, ("b", 0))]
    assert gone(segments, a=Retention(age_s=None, topic_max_bytes=200))[0] == [1]
    assert gone(segments, a=Retention(age_s=None, topic_max_bytes=199))[0] == [1, 2]
    assert gone(segments, a=Retention(age_s=None, topic_max_bytes=300))[0] == []


def test_the_folder_limit_takes_the_oldest_of_all_and_counts_the_journal():
    segments = [info(1, ("a", 5)), info(2, ("b", 1)), info(3, ("a", 9))]
    assert gone(segments, folder=Retention(max_bytes=200))[0] == [2]
    assert gone(segments, folder=Retention(max_bytes=200), other_bytes=50)[0] == [1, 2]
    assert gone(segments, folder=Retention(max_bytes=300))[1].shortage_bytes == 0


def test_write_once_keeps_what_is_young_whatever_the_limits_say():
    """X5: size limits never delete inside retention; the shortage is named instead."""
    keep = Retention(age_s=30 * DAY, topic_max_bytes=1, write_once=True)
    segments = [info(1, ("a", 60)), info(2, ("a", 80)), info(3, ("b", 90))]
    ids, verdict = gone(segments, a=keep, folder=Retention(max_bytes=50))
    assert ids == [1, 3]
    assert (verdict.full_topics, verdict.shortage_bytes) == ({"a": 99}, 50)
    forever = Retention(age_s=None, write_once=True)
    ids, verdict = gone(segments, default=forever, folder=Retention(max_bytes=50))
    assert ids == []
    assert verdict.shortage_bytes == 250


def test_a_shared_segment_with_one_write_once_range_stays():
    keep = Retention(age_s=30 * DAY, write_once=True)
    segments = [info(1, ("a", 80), ("b", 1))]
    assert gone(segments, a=keep, folder=Retention(max_bytes=1))[0] == []


def test_segments_in_use_wait():
    segments = [info(1, ("a", 1)), info(2, ("a", 2))]
    ids, verdict = gone(segments, default=Retention(age_s=DAY), protected={1})
    assert ids == [2]
    assert verdict.leased_bytes == 100


days = st.integers(0, 100)
some = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), days), min_size=1, max_size=3), max_size=12
)


@given(some, st.integers(1, 100), st.none() | st.integers(1, 1500), st.none() | st.integers(1, 500))
def test_nothing_inside_write_once_retention_is_ever_returned(parts, age, total, topic):
    """X5, for any folder and any limits."""
    segments = [info(number, *each) for number, each in enumerate(parts)]
    keep = Retention(age_s=age * DAY, topic_max_bytes=topic, write_once=True)
    loose = Retention(age_s=None, topic_max_bytes=topic)
    _, verdict = gone(segments, a=keep, default=loose, folder=Retention(max_bytes=total))
    for segment in verdict.segments:
        for each in segment.ranges:
            assert each.topic != "a" or each.last_time_us < (100 - age) * DAY * SECOND_US
    if total is not None:
        left = sum(each.size_bytes for each in segments) - sum(
            each.size_bytes for each in verdict.segments
        )
        assert left <= total + verdict.shortage_bytes


def test_a_jump_forward_is_believed_slowly_even_over_a_restart():
    start = 1_700_000_000 * SECOND_US
    jumped = start + 365 * DAY * SECOND_US
    clock = RetentionClock(start)
    assert clock.advance(jumped, 60.0) == start + 60 * CATCH_UP * SECOND_US
    again = RetentionClock(clock.now_us)
    assert again.advance(jumped, 0.0) == clock.now_us
    assert again.behind_us == jumped - clock.now_us


def test_a_normal_clock_is_followed_and_a_week_off_made_good():
    start = 1_700_000_000 * SECOND_US
    clock = RetentionClock(start)
    assert clock.advance(start + 10 * SECOND_US, 10.0) == start + 10 * SECOND_US
    assert clock.advance(start - 3600 * SECOND_US, 1.0) == start - 3600 * SECOND_US
    wall = start + 7 * DAY * SECOND_US
    assert RetentionClock(start).advance(wall, 3 * 3600.0) == wall
    assert RetentionClock(0).advance(wall, 0.0) == wall


def test_write_once_settings_only_get_stricter():
    old = Retention(age_s=30 * DAY, write_once=True)
    check_change(old, Retention(age_s=31 * DAY, write_once=True))
    check_change(old, Retention(age_s=None, write_once=True, max_bytes=1))
    check_change(Retention(age_s=30 * DAY), Retention(age_s=1))
    for new in (Retention(age_s=29 * DAY, write_once=True), Retention(age_s=30 * DAY)):
        with pytest.raises(WriteOnce, match="orders"):
            check_change(old, new, topic="orders")
    with pytest.raises(WriteOnce):
        check_change(Retention(age_s=None, write_once=True), Retention(age_s=1e9, write_once=True))

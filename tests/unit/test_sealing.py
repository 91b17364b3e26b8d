"""Sealing and merging keep every event and leave a bounded number of files (X5, T6, Q3)."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log import sealing
from penstock.log.manifest import Manifest
from penstock.log.memory_disk import MemoryDisk
from penstock.log.sealing import (
    MIN_NEIGHBOURS,
    Job,
    JournalInput,
    plan_fold,
    plan_merge,
    plan_neighbours,
)
from penstock.log.segment import DAY_US, Range, SegmentInfo, segment_path
from penstock.log.segment_reader import SegmentReader, verify_content
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted
from penstock.model.settings import Sealing

SMALL = Sealing(
    min_segment_bytes=2_000, target_segment_bytes=8_000, shared_files_max=3, row_group_events=16
)


def batch(topic, base, count=1, time_us=0, size=4) -> EventBatch:
    made = EventBatch.build(
        topic, [f"{base + index:0{size}d}".encode() for index in range(count)], token_base=bytes(16)
    )
    made.base_offset, made.append_time_us = base, time_us
    return made


def journal(*batches):
    return lambda disk, base, end: sealing.packed(batches)


def seal(disk, manifest, *batches, options=SMALL, end=1):
    job = Job(first_id=manifest.next_id, settings=options, journal=[JournalInput(0, end)])
    result = sealing.run(disk, job, journal(*batches))
    manifest.apply(result.added, result.removed, sealed_to=result.sealed_to, at_us=0)
    return result


def merge_all(disk, manifest, options=SMALL):
    rewritten = 0
    while job := plan_merge(manifest, options):
        result = sealing.run(disk, job, journal())
        manifest.apply(result.added, result.removed, at_us=0)
        for info in job.segments:
            disk.remove(info.path)
        rewritten += result.events
    return rewritten


def everything(disk, manifest):
    found = {}
    for info in manifest.segments():
        verify_content(disk, info)
        for each in SegmentReader(disk, info).batches():
            for event in each:
                place = (each.topic, each.partition, event.offset)
                assert place not in found
                found[place] = event.payload
    return found


@pytest.fixture
def disk():
    made = MemoryDisk()
    made.make_dir("segments")
    return made


@pytest.fixture
def manifest(disk):
    return Manifest.load(disk, write=True)


def test_large_topics_get_their_own_files_and_the_rest_shares_one(disk, manifest):
    result = seal(
        disk,
        manifest,
        batch("big", 0, 100),
        batch("b", 5),
        batch("a", 0, 3),
        batch("big", 100, 100),
    )
    kinds = [
        (info.shared, [(each.topic, each.first_offset, each.last_offset) for each in info.ranges])
        for info in result.added
    ]
    assert kinds == [(False, [("big", 0, 199)]), (True, [("a", 0, 2), ("b", 5, 5)])]
    assert result.sealed_to == 1
    assert result.events == 204
    assert len(everything(disk, manifest)) == 204


def test_own_files_are_cut_at_the_target_and_never_too_small(disk, manifest):
    result = seal(disk, manifest, batch("big", 0, 460))
    sizes = [info.event_bytes for info in result.added]
    assert len(sizes) == 3
    assert all(size >= SMALL.min_segment_bytes for size in sizes)
    assert result.added[0].ranges[0].first_offset == 0
    for one, other in pairwise(result.added):
        assert one.ranges[0].last_offset + 1 == other.ranges[0].first_offset


def test_a_rest_too_small_for_a_file_stays_in_the_last_one(disk, manifest):
    result = seal(disk, manifest, batch("big", 0, 120), batch("big", 120, 5))
    assert [info.rows for info in result.added] == [125]


def test_files_are_cut_at_midnight_utc(disk, manifest):
    late, early = batch("big", 0, 100, DAY_US - 1), batch("big", 100, 100, DAY_US)
    crossing = batch("big", 200, 2)
    crossing.append_times = np.array([2 * DAY_US - 1, 2 * DAY_US])
    crossing.append_time_us = 2 * DAY_US - 1
    result = seal(disk, manifest, late, early, crossing)
    assert [(info.shared, [(each.day, each.rows) for each in info.ranges]) for info in result.added] == [
        (False, [(0, 100)]), (False, [(1, 101)]), (True, [(2, 1)])
    ]  # fmt: skip


def test_a_gap_starts_a_new_range_and_an_overlap_is_refused(disk, manifest):
    result = seal(disk, manifest, batch("a", 0, 3), batch("a", 7, 3))
    assert [(each.first_offset, each.last_offset) for each in result.added[0].ranges] == [
        (0, 2),
        (7, 9),
    ]
    with pytest.raises(Corrupted, match="offset 2 twice"):
        seal(disk, manifest, batch("a", 0, 3), batch("a", 2, 3))


def test_folding_promotes_a_topic_that_has_grown(disk, manifest):
    for turn in range(4):
        seal(disk, manifest, batch("grows", turn * 20, 20), batch("quiet", turn))
    assert [info.shared for info in manifest.segments()] == [True] * 4
    merge_all(disk, manifest)
    assert [(info.shared, info.rows) for info in manifest.segments()] == [(False, 80), (True, 4)]
    assert len(everything(disk, manifest)) == 84


def test_neighbours_are_merged_and_keep_every_event(disk, manifest):
    for turn in range(MIN_NEIGHBOURS):
        seal(disk, manifest, batch("big", turn * 30, 30))
    assert len(list(manifest.segments())) == MIN_NEIGHBOURS
    before = everything(disk, manifest)
    merge_all(disk, manifest, msgspec.structs.replace(SMALL, target_segment_bytes=16_000))
    assert [info.rows for info in manifest.segments()] == [30 * MIN_NEIGHBOURS]
    assert everything(disk, manifest) == before


def test_a_rewrite_that_changes_an_event_is_found_before_its_inputs_go(disk, manifest, monkeypatch):
    """X5: the proof compares with the hash each range got when it was first written."""
    for turn in range(4):
        seal(disk, manifest, batch("a", turn))
    job = plan_merge(manifest, SMALL)
    real = sealing._read_inputs

    def tampered(*arguments):
        batches, size = real(*arguments)
        return [*batches[:-1], *sealing.packed([batch("a", batches[-1].base_offset, size=9)])], size

    monkeypatch.setattr(sealing, "_read_inputs", tampered)
    with pytest.raises(Corrupted, match="did not keep 'a' partition 0 offsets 3 to 3"):
        sealing.run(disk, job, journal())
    monkeypatch.setattr(sealing, "_read_inputs", lambda *arguments: (real(*arguments)[0][:-1], 0))
    with pytest.raises(Corrupted, match="did not keep"):
        sealing.run(disk, job, journal())
    assert all(disk.exists(info.path) for info in manifest.segments())


def test_jobs_and_results_travel_as_msgpack(disk, manifest):
    seal(disk, manifest, batch("a", 0))
    job = Job(
        first_id=2, settings=SMALL, journal=[JournalInput(1, 2)], segments=list(manifest.segments())
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job) == job


turns = st.lists(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(0, 2)), max_size=4),
    max_size=10,
)


@settings(max_examples=25, deadline=None)
@given(turns)
def test_any_sequence_of_seals_and_merges_keeps_everything_within_the_bound(rounds):
    """T6, X5: no event lost, changed or doubled; files stay below the stated bound."""
    disk = MemoryDisk()
    manifest = Manifest.load(disk, write=True)
    ends = dict.fromkeys("abcd", 0)
    expected = {}
    day = 0
    for parts in rounds:
        batches = []
        for topic, count, later in parts:
            day += later == 2
            batches.append(batch(topic, ends[topic], count, day * DAY_US))
            expected |= {
                (topic, 0, offset): f"{offset:04d}".encode()
                for offset in range(ends[topic], ends[topic] + count)
            }
            ends[topic] += count
        if batches:
            seal(disk, manifest, *batches)
        merge_all(disk, manifest)
        assert_bound(manifest, SMALL)
    assert everything(disk, manifest) == expected
    assert everything(disk, Manifest.load(disk, write=True)) == expected


def assert_bound(manifest_or_infos, options):
    infos = (
        manifest_or_infos
        if isinstance(manifest_or_infos, list)
        else list(manifest_or_infos.segments())
    )
    own = [info.event_bytes for info in infos if not info.shared]
    shared = [info.event_bytes for info in infos if info.shared]
    assert len(own) <= sum(own) / options.min_segment_bytes
    assert len(shared) <= sum(shared) / options.target_segment_bytes + options.shared_files_max


def test_thousands_of_quiet_topics_leave_few_files(disk, manifest):
    """T6: two thousand topics, an event each per seal, for 24 seals; real files, scaled sizes."""
    options = Sealing(min_segment_bytes=4_000, target_segment_bytes=1_000_000, shared_files_max=4)
    topics, seals, rewritten = 2_000, 24, 0
    for turn in range(seals):
        seal(
            disk,
            manifest,
            *(batch(f"t.{index:05d}", turn) for index in range(topics)),
            options=options,
            end=turn + 1,
        )
        rewritten += merge_all(disk, manifest, options)
        assert_bound(manifest, options)
    assert len(list(manifest.segments())) <= 7
    assert manifest.sealed_to == seals
    assert sum(info.rows for info in manifest.segments()) == topics * seals
    assert rewritten / (topics * seals) < 4


def planned(number, size, *, topic="t", first=0, shared=True):
    part = Range(topic, 0, first, first + 9, 0, 0, 0, [], size, size, b"")
    return SegmentInfo(
        number, segment_path(number, shared=shared), shared, "", size, 10, [part], []
    )


def test_ten_thousand_topics_for_a_day_leave_a_bounded_number_of_files():
    """T6: an event a minute each, a seal every ten minutes, default settings; the planner alone."""
    options = Sealing()
    per_seal = 10_000 * 10 * 164
    infos: list[SegmentInfo] = []
    number = moved = 0
    for _ in range(24 * 6):
        number += 1
        infos.append(planned(number, per_seal))
        while chosen := plan_fold(infos, options):
            ids = {info.id for info in chosen}
            size = sum(info.event_bytes for info in chosen)
            moved += size
            infos = [info for info in infos if info.id not in ids]
            while size > 0:
                number += 1
                infos.append(planned(number, min(size, options.target_segment_bytes)))
                size -= infos[-1].event_bytes
        assert_bound(infos, options)
    total = 24 * 6 * per_seal
    assert sum(info.event_bytes for info in infos) == total
    assert len(infos) <= total // options.target_segment_bytes + 1 + options.shared_files_max
    assert moved / total < 3


def test_an_event_is_merged_a_logarithmic_number_of_times():
    """One rule bounds write amplification: a file at least doubles when it is rewritten."""
    options = Sealing()
    infos: list[SegmentInfo] = []
    moved = 0
    for number in range(1, 513):
        infos.append(planned(number, options.min_segment_bytes, first=number * 10, shared=False))
        while chosen := next(plan_neighbours(infos, options), None):
            size = sum(info.event_bytes for info in chosen)
            assert (
                2 * max(info.event_bytes for info in chosen) <= size <= options.target_segment_bytes
            )
            moved += size
            first, last = chosen[0].ranges[0].first_offset, chosen[-1].ranges[0].last_offset
            ids = {info.id for info in chosen}
            merged = planned(10_000 + number, size, shared=False)
            part = msgspec.structs.replace(merged.ranges[0], first_offset=first, last_offset=last)
            infos = [info for info in infos if info.id not in ids] + [
                msgspec.structs.replace(merged, ranges=[part])
            ]
    assert len(infos) < 512 / 8
    assert moved / (512 * options.min_segment_bytes) <= 6

"""Segments keep every event, find any of them, and never serve a damaged byte (Q3, X5)."""

from __future__ import annotations

import io

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log.disk import read_file
from penstock.log.memory_disk import MemoryDisk
from penstock.log.segment import (
    DAY_US,
    SegmentInfo,
    chunk_of,
    content_of,
    row_groups,
    rows_of,
    write_segment,
)
from penstock.log.segment_reader import GroupCache, SegmentReader, verify_content, verify_segment
from penstock.model.arrow import to_arrow
from penstock.model.batch import EventBatch, event_bytes
from penstock.model.errors import Corrupted

BIG = 1 << 40


def batch(topic="orders", base=0, count=3, time_us=1_000, **options) -> EventBatch:
    payloads = options.pop(
        "payloads", [f"{topic}-{base + index}".encode() for index in range(count)]
    )
    partition = options.pop("partition", 0)
    made = EventBatch.build(topic, payloads, times_us=time_us, **options)
    made.base_offset, made.append_time_us, made.partition = base, time_us, partition
    return made


def sized(*batches):
    return [(each, event_bytes(each)) for each in batches]


def write(disk, *batches, number=1, shared=False, group_events=4) -> SegmentInfo:
    disk.make_dir("segments")
    groups = row_groups(sized(*batches), group_events)
    return write_segment(disk, number, groups, shared=shared, zstd_level=1)


def read_all(reader, topic="orders", partition=0, offset=0):
    found = reader.read(topic, partition, offset, limit_events=BIG, limit_bytes=BIG)
    return [(event.offset, event.payload) for each in found for event in each]


text = st.text(max_size=4)
events = st.lists(
    st.tuples(
        st.binary(max_size=12),
        st.none() | st.binary(max_size=4),
        st.none() | st.dictionaries(text, text, max_size=3),
        st.integers(0, 255),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def batch_lists(draw):
    base = draw(st.integers(0, 1 << 40))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(events)
        options = {}
        if draw(st.booleans()):
            options["keys"] = [row[1] for row in rows]
        if draw(st.booleans()):
            options["headers"] = [row[2] for row in rows]
        if draw(st.booleans()):
            options["priority"] = [row[3] for row in rows]
        if draw(st.booleans()):
            options["expires_us"] = [row[4] for row in rows]
        if draw(st.booleans()):
            options["tokens"] = [bytes([index]) * 16 for index in range(len(rows))]
        made = batch(
            base=base,
            payloads=[row[0] for row in rows],
            tenant=draw(st.sampled_from(["acme", "zeta"])),
            codec=draw(st.sampled_from(["raw", "json"])),
            schema_id=draw(st.integers(0, 2)),
            **options,
        )
        base += made.count
        found.append(made)
    return found


def facts(batches):
    return [
        (
            event.offset, event.payload, event.key, dict(event.headers), each.tenant, each.codec,
            each.schema_id, each.token(index), each.time(index), each.append_time(index),
            0 if each.expires is None else int(each.expires[index]),
            0 if each.priority is None else int(each.priority[index]),
        )
        for each in batches
        for index, event in enumerate(each)
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(batch_lists(), st.integers(1, 7))
def test_every_field_of_every_event_survives(batches, group_events):
    """X5: what was published is what is read back, whatever the cut into row groups."""
    disk = MemoryDisk()
    info = write(disk, *batches, group_events=group_events)
    reader = SegmentReader(disk, info)
    found = reader.read("orders", 0, 0, limit_events=BIG, limit_bytes=BIG)
    assert facts(found) == facts(batches)
    verify_content(disk, info)


@settings(max_examples=40, deadline=None)
@given(batch_lists(), st.integers(1, 7), st.integers(1, 7))
def test_the_content_hash_does_not_depend_on_the_layout(batches, one, other):
    first = write(MemoryDisk(), *batches, group_events=one)
    second = write(MemoryDisk(), *batches, group_events=other, shared=True)
    assert [each.content for each in first.ranges] == [each.content for each in second.ranges]


def test_the_content_hash_tells_apart_what_could_be_confused():
    variants = [
        batch(payloads=[b"ab", b"c"]),
        batch(payloads=[b"a", b"bc"]),
        batch(payloads=[b"ab", b"c"], keys=[b"", None]),
        batch(payloads=[b"ab", b"c"], keys=[None, b""]),
        batch(payloads=[b"ab", b"c"], headers=[{"x": "yz"}, {}]),
        batch(payloads=[b"ab", b"c"], headers=[{"xy": "z"}, {}]),
        batch(payloads=[b"ab", b"c"], headers=[{}, {"x": "yz"}]),
        batch(payloads=[b"ab", b"c"], tenant="t"),
        batch(payloads=[b"ab", b"c"], base=1),
        batch(payloads=[b"ab", b"c"], token_base=b"\1" * 16),
        batch(payloads=[b"ab", b"c"], time_us=2_000),
    ]
    assert len({content_of(to_arrow(each)) for each in variants}) == len(variants)


def test_gather_joins_what_to_arrow_makes_of_each():
    batches = [
        batch(headers=[{"a": "1"}, None, {"b": "2", "c": "3"}]),
        batch(base=3, keys=[b"k", None, b"l"]),
        batch(base=6, count=1),
        batch(base=7, count=40).slice(20, 30),
    ]
    joined = pa.Table.from_batches([to_arrow(each) for each in batches]).to_pylist()
    found = rows_of(batches).to_pylist()
    for row in (*joined, *found):
        row["headers"] = row["headers"] or []
    assert found == joined


def test_a_large_event_gets_a_row_group_of_its_own(monkeypatch):
    monkeypatch.setattr("penstock.log.segment.GROUP_MAX_BYTES", 1_000)
    groups = list(row_groups(sized(batch(payloads=[b"a", b"b" * 5_000, b"c", b"d"])), 100))
    assert [group.num_rows for group in groups] == [1, 1, 2]


def test_reads_stop_at_their_limits_and_return_at_least_one_event():
    reader = SegmentReader(
        MemoryDisk(), write(disk := MemoryDisk(), batch(count=20, payloads=[b"x" * 10] * 20))
    )
    reader._disk = disk

    def count(offset, events=BIG, size=BIG):
        found = reader.read("orders", 0, offset, limit_events=events, limit_bytes=size)
        return sum(each.count for each in found)

    assert count(0) == 20
    assert count(15) == 5
    assert count(20) == 0
    assert count(3, events=6) == 6
    assert count(3, size=65) == 6
    assert count(0, size=40) == 4
    assert count(0, size=1) == 1
    assert reader.read("other", 0, 0, limit_events=9, limit_bytes=9) == []


def test_only_the_needed_row_groups_are_decoded():
    disk = MemoryDisk()
    info = write(disk, batch(count=20), group_events=4)
    cache = GroupCache()
    SegmentReader(disk, info, cache).read("orders", 0, 9, limit_events=2, limit_bytes=BIG)
    assert cache.get((1, 2)) is not None
    assert [cache.get((1, index)) for index in (0, 1, 3, 4)] == [None] * 4


def test_the_cache_keeps_within_its_bytes():
    disk = MemoryDisk()
    info = write(disk, batch(count=200), group_events=10)
    cache = GroupCache(max_bytes=4_000)
    reader = SegmentReader(disk, info, cache)
    assert len(read_all(reader)) == 200
    assert 0 < cache.size_bytes <= 4_000


def test_shared_segments_find_each_topic_and_partition():
    disk = MemoryDisk()
    parts = [batch("a", 5), batch("a", 0, partition=1), batch("b", 7), batch("b", 20)]
    info = write(disk, *parts, shared=True)
    reader = SegmentReader(disk, info)
    assert [offset for offset, _ in read_all(reader, "a")] == [5, 6, 7]
    assert [offset for offset, _ in read_all(reader, "a", 1)] == [0, 1, 2]
    assert [offset for offset, _ in read_all(reader, "b", offset=9)] == [9, 20, 21, 22]
    assert [(each.topic, each.partition, each.first_offset, each.last_offset) for each in info.ranges] == [
        ("a", 0, 5, 7), ("a", 1, 0, 2), ("b", 0, 7, 9), ("b", 0, 20, 22)
    ]  # fmt: skip


def test_ranges_are_cut_at_midnight_and_times_are_found():
    disk = MemoryDisk()
    info = write(disk, batch(time_us=DAY_US - 5), batch(base=3, time_us=DAY_US + 5))
    assert [each.day for each in info.ranges] == [0, 1]
    reader = SegmentReader(disk, info)
    assert reader.find_time("orders", 0, 0) == 0
    assert reader.find_time("orders", 0, DAY_US - 4) == 3
    assert reader.find_time("orders", 0, DAY_US + 6) is None
    assert reader.find_time("other", 0, 0) is None


def test_time_lookup_when_the_clock_went_back():
    disk = MemoryDisk()
    info = write(disk, batch(time_us=900), batch(base=3, time_us=100), batch(base=6, time_us=950))
    assert SegmentReader(disk, info).find_time("orders", 0, 500) == 0
    assert SegmentReader(disk, info).find_time("orders", 0, 901) == 6


def test_any_flipped_byte_is_found_and_names_what_it_hit():
    """Corruption is detected, never served: pages, page headers, filters, index and footer."""
    disk = MemoryDisk()
    info = write(disk, batch(count=8), group_events=4)
    good = read_file(disk, info.path)
    for at in range(0, len(good), 3):
        file = disk.open(info.path, write=True)
        file.write_at(at, bytes([good[at] ^ 0x10]))
        with pytest.raises(Corrupted) as caught:
            read_all(SegmentReader(disk, info))
        assert info.path in str(caught.value)
        assert caught.value.affected == [("orders", 0, 0, 7)]
        with pytest.raises(Corrupted):
            verify_segment(disk, info)
        file.write_at(at, good[at : at + 1])
    verify_segment(disk, info)


def test_a_scan_checks_what_it_reads_and_leaves_the_rest_alone():
    """Damage in a column that is asked for is found to the last byte; elsewhere it hurts nobody."""
    disk = MemoryDisk()
    info = write(disk, batch(count=8, headers=[{"a": "b"}] * 8), group_events=4)
    good = read_file(disk, info.path)

    def scanned(column):
        return [rows for _, rows in SegmentReader(disk, info).scan("orders", 0, 0, 7, [column])]

    metadata = pq.ParquetFile(io.BytesIO(good)).metadata
    names = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    intact = {name: scanned(name) for name in ("event_time", "headers", "payload")}
    for index, path in enumerate(names):
        start, size = chunk_of(metadata, 1, index)
        for at in range(start, start + size):
            file = disk.open(info.path, write=True)
            file.write_at(at, bytes([good[at] ^ 0x10]))
            for name, expected in intact.items():
                if path.partition(".")[0] == name:
                    with pytest.raises(Corrupted, match=f"column '{name}' of row group 1"):
                        scanned(name)
                else:
                    assert scanned(name) == expected
            file.write_at(at, good[at : at + 1])


def test_a_scan_of_a_file_from_before_checks_whole_row_groups():
    """Segments whose manifest has no checksums of columns are checked as they were (Y10)."""
    disk = MemoryDisk()
    info = write(disk, batch(count=8), group_events=4)
    spans = [msgspec.structs.replace(span, columns=[]) for span in info.spans]
    old = msgspec.structs.replace(info, spans=spans)
    assert [span.columns for span in msgspec.json.decode(msgspec.json.encode(old), type=SegmentInfo).spans] == [[]] * 3  # fmt: skip
    assert sum(rows.num_rows for _, rows in SegmentReader(disk, old).scan("orders", 0, 0, 7, ["key"])) == 8  # fmt: skip
    data = read_file(disk, info.path)
    disk.open(info.path, write=True).write_at(8, bytes([data[8] ^ 0x10]))
    with pytest.raises(Corrupted, match="row group 0 fails its checksum"):
        list(SegmentReader(disk, old).scan("orders", 0, 0, 7, ["priority"]))


def test_missing_and_short_files_are_corruption():
    disk = MemoryDisk()
    info = write(disk, batch())
    disk.open(info.path, write=True).truncate(info.size_bytes - 1)
    for check in (lambda: read_all(SegmentReader(disk, info)), lambda: verify_segment(disk, info)):
        with pytest.raises(Corrupted, match="instead of"):
            check()
    disk.remove(info.path)
    for check in (lambda: read_all(SegmentReader(disk, info)), lambda: verify_segment(disk, info)):
        with pytest.raises(Corrupted, match="missing"):
            check()


def test_the_file_has_what_other_tools_use():
    """Q3: page index, Bloom filter, zstd, sorting columns and statistics come with the file."""
    disk = MemoryDisk()
    info = write(disk, batch(count=8, keys=[b"k"] * 8), group_events=8)
    parquet = pq.ParquetFile(
        io.BytesIO(read_file(disk, info.path)), page_checksum_verification=True
    )
    assert parquet.read().column("payload")[0].as_py() == b"orders-0"
    group = parquet.metadata.row_group(0)
    columns = {
        group.column(index).path_in_schema: group.column(index)
        for index in range(group.num_columns)
    }
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert columns["offset"].has_offset_index
    assert columns["offset"].has_column_index
    assert columns["key"].bloom_filter_offset
    assert columns["token"].bloom_filter_offset
    assert columns["offset"].statistics.max == 7
    assert [each.column_index for each in group.sorting_columns] == [0, 1, 2]


def test_a_file_that_decodes_to_something_else_is_not_written(monkeypatch):
    disk = MemoryDisk()
    wrong = rows_of([batch(payloads=[b"other"] * 3)])
    monkeypatch.setattr(
        "penstock.log.segment.pq.ParquetFile.read_row_group",
        lambda self, index: pa.Table.from_batches([wrong]),
    )
    with pytest.raises(Corrupted, match="payload"):
        write(disk, batch())
    assert disk.list("segments") == []

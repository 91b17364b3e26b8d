"""Batches as Arrow: the same events, the same memory, whatever the slices."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.arrow import SCHEMA, batch_of_columns, from_arrow, split_runs, to_arrow
from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidBatch

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
TIMES = st.integers(0, 2**52)


@st.composite
def batches(draw):
    count = draw(st.integers(1, 15))

    def column(values):
        return draw(st.none() | st.lists(values, min_size=count, max_size=count))

    batch = EventBatch.build(
        draw(st.sampled_from(["orders", "payments"])),
        draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count)),
        keys=column(st.none() | st.binary(max_size=8)),
        headers=column(st.none() | st.dictionaries(TEXT, TEXT, max_size=3)),
        tokens=column(st.binary(min_size=16, max_size=16)),
        times_us=draw(TIMES | st.lists(TIMES, min_size=count, max_size=count)),
        expires_us=column(TIMES),
        priority=column(st.integers(0, 9)),
        tenant=draw(st.sampled_from(["acme", "globex"])),
        codec=draw(st.sampled_from(["raw", "json"])),
    )
    batch.partition, batch.base_offset = draw(st.integers(0, 9)), draw(st.integers(0, 2**40))
    batch.append_time_us = draw(TIMES)
    return batch


def rows(batch: EventBatch) -> list[tuple]:
    return [
        (
            event.id, event.tenant, event.codec, event.key, event.payload, dict(event.headers),
            event.token, event.time_us, event.append_time_us, event.expires_us, event.priority,
        )
        for event in batch
    ]  # fmt: skip


@given(batches())
def test_there_and_back(batch: EventBatch) -> None:
    record = to_arrow(batch)
    record.validate(full=True)
    assert record.schema == SCHEMA
    assert rows(from_arrow(record)) == rows(batch)


@settings(max_examples=60)
@given(batches(), st.data())
def test_sliced_arrays_come_back_as_their_rows(batch: EventBatch, data) -> None:
    record, expected = to_arrow(batch), rows(batch)
    for _ in range(2):
        start = data.draw(st.integers(0, len(expected) - 1))
        length = data.draw(st.integers(1, len(expected) - start))
        record, expected = record.slice(start, length), expected[start : start + length]
        again = from_arrow(record)
        assert rows(again) == expected
        assert rows(EventBatch.decode(again.encode())) == expected


@settings(max_examples=60)
@given(batches(), st.data())
def test_a_sliced_batch_is_valid_arrow(batch: EventBatch, data) -> None:
    start = data.draw(st.integers(0, batch.count - 1))
    part = batch.slice(start, data.draw(st.integers(start + 1, batch.count)))
    record = to_arrow(part)
    record.validate(full=True)
    assert rows(from_arrow(record)) == rows(part)


@settings(max_examples=40)
@given(st.lists(batches(), min_size=1, max_size=4))
def test_runs_are_cut_where_anything_but_the_offset_changes(made: list[EventBatch]) -> None:
    table = pa.Table.from_batches([to_arrow(batch) for batch in made]).unify_dictionaries()
    record = table.combine_chunks().to_batches()[0]
    expected = [row for batch in made for row in rows(batch)]
    assert [row for batch in split_runs(record) for row in rows(batch)] == expected
    assert split_runs(record.slice(0, 0)) == []


def test_payloads_keys_and_headers_share_the_bytes_they_were_decoded_from() -> None:
    data = EventBatch.build(
        "orders", [b"a" * 100, b"b" * 100], keys=[b"k" * 50, b"l"], headers=[{"name": "text"}] * 2
    ).encode()
    first = pa.py_buffer(data).address
    record = to_arrow(EventBatch.decode(data))
    headers = record.column("headers")
    for array in (record.column("payload"), record.column("key"), headers.keys, headers.items):
        address = array.buffers()[2].address
        assert first <= address < first + len(data), "the column was copied"


def test_and_back_from_arrow_they_share_the_arrow_buffers() -> None:
    record = to_arrow(EventBatch.build("orders", [b"a" * 100, b"b" * 100]))
    buffer = record.column("payload").buffers()[2]
    batch = from_arrow(record)
    assert np.shares_memory(
        np.frombuffer(buffer, dtype=np.uint8),
        np.frombuffer(batch.payload_column.data, dtype=np.uint8),
    )


# -- a user's own columns -------------------------------------------------------------------------


def columns(table) -> EventBatch:
    return batch_of_columns("orders", table, tenant="acme", codec="raw")


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string(), pa.string_view()]
)
def test_payloads_of_every_binary_kind(kind) -> None:
    table = pa.table({"payload": pa.array(["a", "bc", ""], kind)})
    assert columns(table).payloads() == [b"a", b"bc", b""]


def test_chunked_and_sliced_tables_with_all_columns() -> None:
    times = pa.array([10, 20, 30], pa.timestamp("us", tz="UTC"))
    table = pa.table(
        {
            "payload": [b"a", b"b", b"c"],
            "key": pa.array([b"k", None, b"l"], pa.binary()),
            "headers": pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string())),
            "event_time": times,
        }
    )
    both = pa.concat_tables([table.slice(1, 2), table])
    batch = columns(both)
    assert batch.payloads() == [b"b", b"c", b"a", b"b", b"c"]
    assert list(batch.keys()) == [None, b"l", b"k", None, b"l"]
    assert [dict(each) for each in batch.headers()] == [{}, {}, {"a": "b"}, {}, {}]
    assert [batch.time(index) for index in range(5)] == [20, 30, 10, 20, 30]
    sliced = columns(table.to_batches()[0].slice(1, 1))
    assert sliced.payloads() == [b"b"]
    assert rows(EventBatch.decode(sliced.encode())) == rows(sliced)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (pa.table({"value": [b"a"]}), "payload"),
        (pa.table({"payload": [b"a"], "extra": [1]}), "extra"),
        (pa.table({"payload": pa.array([], pa.binary())}), "at least one"),
        (pa.table({"payload": pa.array([b"a", None])}), "nulls"),
        (pa.table({"payload": [1.5]}), "double"),
        (pa.table({"payload": [b"a"], "key": [7]}), "int64"),
    ],
)
def test_columns_that_make_no_batch_are_refused(table, says: str) -> None:
    with pytest.raises(InvalidBatch, match=says):
        columns(table)


def test_an_empty_record_batch_is_refused() -> None:
    with pytest.raises(InvalidBatch):
        columns(pa.record_batch({"payload": pa.array([], pa.binary())}))


def test_event_times_with_nulls_are_refused() -> None:
    times = pa.array([1, None], pa.timestamp("us", tz="UTC"))
    with pytest.raises(InvalidBatch, match="event_time"):
        columns(pa.table({"payload": [b"a", b"b"], "event_time": times}))


@pytest.mark.parametrize("column", [{"headers": [1]}, {"event_time": ["yesterday"]}])
def test_headers_and_times_of_a_wrong_type_are_refused(column) -> None:
    with pytest.raises(InvalidBatch):
        columns(pa.table({"payload": [b"a"], **column}))


def test_a_data_frame_goes_through_arrow() -> None:
    frame = pd.DataFrame({"payload": [b"a", b"b"], "key": ["x", "y"]})
    batch = columns(pa.Table.from_pandas(frame, preserve_index=False))
    assert list(batch.keys()) == [b"x", b"y"]

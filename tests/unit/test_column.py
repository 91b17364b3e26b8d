"""Columns of variable length: the Arrow layout, slices that share data, refusals."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import column as module
from penstock.model.column import (
    AFTER_VALUES,
    NO_HEADERS,
    ArrowValues,
    HeaderColumn,
    Strings,
    padding,
)
from penstock.model.errors import InvalidBatch, InvalidHeaders


@pytest.fixture(params=["sliced", "by Arrow"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Values are made in two ways: at first by slicing, later by Arrow."""
    module.arrow_values._start()
    monkeypatch.setattr(module.arrow_values, "_ready", request.param == "by Arrow")
    monkeypatch.setattr(module.arrow_values, "_left", 1 << 60)
    return str(request.param)


VALUES = st.lists(st.binary(max_size=20), min_size=1, max_size=80)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
HEADERS = st.lists(st.none() | st.dictionaries(TEXT, TEXT, max_size=4), min_size=1, max_size=50)


def bounds(data: st.DataObject, count: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, count - 1))
    return start, data.draw(st.integers(start + 1, count))


@given(VALUES)
def test_values_come_back(values: list[bytes]) -> None:
    column = Strings.of(values)
    assert column.values() == values
    assert [column.at(index) for index in range(len(values))] == values


@given(VALUES, st.data())
def test_a_slice_of_a_slice_reads_and_stores_the_same_values(values, data) -> None:
    column, expected = Strings.of(values), values
    for _ in range(3):
        start, stop = bounds(data, len(expected))
        column, expected = column.slice(start, stop), expected[start:stop]
        assert column.values() == expected
        offsets, joined = column.parts()
        again = Strings(len(expected), offsets, joined)
        assert again.values() == expected
        assert again.ends()[0] == 0
        assert bytes(joined) == b"".join(expected)


def test_a_slice_shares_the_bytes_of_its_column() -> None:
    column = Strings.of([b"abc", b"def", b"ghi"])
    assert column.slice(1, 3).data is column.data


@given(st.lists(TEXT, min_size=1, max_size=20))
def test_texts_are_the_decoded_values_ascii_or_not(texts: list[str]) -> None:
    assert Strings.of([text.encode() for text in texts]).texts() == texts


@given(HEADERS, st.data())
def test_headers_come_back_whole_and_sliced(headers, data) -> None:
    column, expected = HeaderColumn.of(headers), [dict(each or {}) for each in headers]
    for _ in range(3):
        assert [dict(each) for each in column.mappings()] == expected
        assert [dict(column.at(index)) for index in range(len(expected))] == expected
        parts = column.parts()
        entries = np.frombuffer(parts[0], dtype=np.int32)[-1]
        again = HeaderColumn(
            len(expected), parts[0], Strings(entries, *parts[1:3]), Strings(entries, *parts[3:5])
        )
        assert [dict(each) for each in again.mappings()] == expected
        start, stop = bounds(data, len(expected))
        column, expected = column.slice(start, stop), expected[start:stop]


def test_events_without_headers_share_one_mapping_that_cannot_be_changed() -> None:
    (first, second) = HeaderColumn.of([None, {}]).mappings()
    assert first is second is NO_HEADERS
    with pytest.raises(TypeError):
        first["a"] = "b"  # type: ignore[index]


@pytest.mark.parametrize("bad", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}])
def test_headers_that_are_not_text_are_refused_with_their_index(bad) -> None:
    with pytest.raises(InvalidHeaders) as caught:
        HeaderColumn.of([{"fine": "yes"}, bad])
    assert caught.value.index == 1


def test_headers_that_no_encoding_can_hold_are_refused() -> None:
    with pytest.raises((InvalidHeaders, UnicodeEncodeError)):
        HeaderColumn.of([{"a": "\ud800"}])


def test_a_column_over_its_bound_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_COLUMN_BYTES", 10)
    with pytest.raises(InvalidBatch, match="smaller batches"):
        Strings.of([b"123456", b"123456"])


@pytest.mark.parametrize("length", range(17))
def test_padding_reaches_the_next_multiple_of_eight(length: int) -> None:
    assert (length + len(padding(length))) % 8 == 0
    assert len(padding(length)) < 8


@given(
    st.lists(st.sampled_from(["", "a", "bc", "città"]), min_size=32, max_size=80),
    st.sampled_from([["kind"], ["kind", "art"]]),
)
def test_one_header_each_comes_back_shared_or_not(texts: list[str], names: list[str]) -> None:
    headers = [{names[index % len(names)]: text} for index, text in enumerate(texts)]
    column = HeaderColumn.of([{"x": "y"}, *headers])
    for part in (column, column.slice(1, len(headers) + 1)):
        assert part.mappings()[-len(headers) :] == headers


def test_events_that_say_the_same_share_a_mapping_that_cannot_be_changed(way: str) -> None:
    headers = HeaderColumn.of([{"kind": f"k{index % 2}"} for index in range(40)]).mappings()
    assert (headers[0] is headers[2]) == (way == "by Arrow")
    with pytest.raises(TypeError):
        headers[0]["a"] = "b"  # type: ignore[index]


def test_arrow_is_started_once_enough_was_read() -> None:
    arrow = ArrowValues()
    assert not arrow.worth(AFTER_VALUES - 1)
    assert not arrow._ready
    arrow.worth(1)
    for thread in threading.enumerate():
        if thread.name == "penstock-arrow":
            thread.join()
    assert arrow.worth(1)

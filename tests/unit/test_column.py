"""Columns of variable length: the Arrow layout, slices that share data, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import column as module
from penstock.model.column import NO_HEADERS, HeaderColumn, Strings, padding
from penstock.model.errors import InvalidBatch, InvalidHeaders

VALUES = st.lists(st.binary(max_size=20), min_size=1, max_size=40)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
HEADERS = st.lists(st.none() | st.dictionaries(TEXT, TEXT, max_size=4), min_size=1, max_size=20)


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

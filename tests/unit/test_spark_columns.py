"""Row S1: columns that have one value are made once, and are the same as decoded ones."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.pipelines.columns import REPEATED_VALUES, plain, repeated


@pytest.mark.parametrize("values", [["a"] * 5, ["a", "b", "a"], ["a", None], [None, None], []])
def test_dictionaries_become_the_values_they_stand_for(values: list[str | None]) -> None:
    found = plain(pa.array(values, pa.string()).dictionary_encode())
    assert found.type == pa.string()
    assert found.to_pylist() == values
    found.validate(full=True)


def test_a_value_is_repeated_out_of_the_same_memory() -> None:
    long, short = repeated("same", pa.string(), 100), repeated("same", pa.string(), 7)
    assert short.to_pylist() == ["same"] * 7
    assert short.buffers()[2].address == long.buffers()[2].address


def test_a_longer_column_than_before_is_made_anew() -> None:
    assert repeated(7, pa.int32(), 3).to_pylist() == [7] * 3
    assert repeated(7, pa.int32(), 9).to_pylist() == [7] * 9
    assert repeated(7, pa.int64(), 2).type == pa.int64()


def test_few_columns_are_kept() -> None:
    first = repeated("value 0", pa.string(), 10).buffers()[2]
    for number in range(REPEATED_VALUES + 1):
        repeated(f"value {number + 1}", pa.string(), 10)
    assert repeated("value 0", pa.string(), 10).buffers()[2].address != first.address

"""Maps of texts come through as they were."""

from __future__ import annotations

import pyarrow as pa

from penstock.pipelines.columns import plain
from penstock.pipelines.lakehouse.files import TEXTS, text_as_maps


def test_texts_become_the_maps_they_were() -> None:
    rows = pa.record_batch({"n": [1, 2, 3], "h": ['{"a":null,"ü":"\\"x"}', None, "{}"]})
    found = text_as_maps(rows, ["h"])
    assert found.column("h").to_pylist() == [[("a", None), ("ü", '"x')], None, []]
    assert found.schema.field("h").type == TEXTS
    empty = text_as_maps(pa.record_batch({"h": ["{}", "{}"]}), ["h"]).column("h")
    assert (empty.to_pylist(), empty.type) == ([[], []], TEXTS)


def test_null_maps_become_empty_ones_in_every_slice() -> None:
    maps = pa.array([None, [("a", "b")], None, [("c", "d"), ("e", "f")], None, []], TEXTS)
    for start in range(6):
        for count in range(7 - start):
            part = maps.slice(start, count)
            found = plain(part)
            found.validate(full=True)
            assert found.to_pylist() == [each or [] for each in part.to_pylist()]
            assert found.null_count == 0


def test_what_lies_below_a_null_map_does_not_come_back() -> None:
    maps = pa.array([[("a", "b")], [("c", "d")]], TEXTS)
    entries = pa.StructArray.from_arrays([maps.keys, maps.items], names=["key", "value"])
    hidden = pa.Array.from_buffers(
        TEXTS, 2, [pa.py_buffer(bytes([0b10])), maps.buffers()[1]], children=[entries]
    )
    assert plain(hidden).to_pylist() == [[], [("c", "d")]]

"""Maps on their way from Spark to Python: as JSON, because Spark measures maps anew for each row.

Of all columns, it asks Arrow after each row how large the batch has become, and for a map that
costs more than the rest of the row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TEXTS = pa.map_(pa.string(), pa.string())
_decoder = msgspec.json.Decoder(list[dict[str, str | None] | None])


def maps_as_text(frame: DataFrame) -> tuple[DataFrame, tuple[str, ...]]:
    """The same rows with every map of texts as JSON, and the names of those columns."""
    from pyspark.sql import functions as sql

    names = tuple(
        each.name for each in frame.schema if each.dataType.simpleString() == "map<string,string>"
    )
    for name in names:
        column = sql.col(f"`{name}`")
        text = sql.to_json(column, {"ignoreNullFields": "false"})
        # Most maps are empty, and to say so costs less than to write it down.
        frame = frame.withColumn(name, sql.when(sql.size(column) == 0, "{}").otherwise(text))
    return frame, names


def text_as_maps(rows: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Rows with these columns as maps again.

    >>> rows = pa.record_batch({"h": ['{"a":"1"}', "{}", None]})
    >>> text_as_maps(rows, ["h"]).column("h").to_pylist()
    [[('a', '1')], [], None]
    """
    for name in names:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, _maps(rows.column(at)))
    return rows


def _maps(texts: pa.Array) -> pa.Array:
    if not texts.null_count and pc.all(pc.equal(texts, "{}")).as_py():
        return pa.MapArray.from_arrays(
            np.zeros(len(texts) + 1, np.int32), pa.nulls(0, pa.string()), pa.nulls(0, pa.string())
        )
    parts = [text or "null" for text in texts.to_pylist()]
    found = _decoder.decode("[" + ",".join(parts) + "]")
    return pa.array([None if each is None else list(each.items()) for each in found], TEXTS)

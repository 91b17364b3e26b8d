"""The tables of the Nexmark queries as DataFrames: from a bus, or from Parquet files of log rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as f

from penstock.pipelines.nexmark.payload import EVENT_TIME, SCHEMAS, TOPICS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, DataFrameReader
    from pyspark.sql.streaming.readwriter import DataStreamReader


def payload_ddl(table: str, columns: Iterable[str]) -> str:
    """The payload of a table's events as DDL, with these columns only.

    >>> payload_ddl("auctions", ["id", "date_time", "expires"])
    'id BIGINT, expires BIGINT'
    """
    return ", ".join(
        f"{name} {'STRING' if pa.types.is_string(SCHEMAS[table].field(name).type) else 'BIGINT'}"
        for name in columns
        if name != EVENT_TIME
    )


def from_bus(
    reader: DataFrameReader | DataStreamReader, url: str, table: str, columns: Iterable[str]
) -> DataFrame:
    """A table of a bus, of which only these columns are decoded: a batch or a stream.

    `reader` is `spark.read` or `spark.readStream`, with whatever options are wanted besides.
    """
    columns = list(columns)
    rows = (
        reader.format("penstock")
        .option("url", url)
        .option("topics", TOPICS[table])
        .option("schema", payload_ddl(table, columns))
        .option("columns", "event_time,value" if EVENT_TIME in columns else "value")
        .load()
    )
    return rows.select(*_typed(table, columns))


def from_payloads(rows: DataFrame, table: str, columns: Iterable[str]) -> DataFrame:
    """A table of rows with `event_time` and `payload`, decoded by Spark's own JSON functions."""
    columns = list(columns)
    value = f.from_json(f.col("payload").cast("STRING"), payload_ddl(table, columns))
    return rows.select("event_time", value.alias("value")).select(*_typed(table, columns))


def _typed(table: str, columns: Iterable[str]) -> list[Column]:
    found = []
    for name in columns:
        if name == EVENT_TIME:
            column = f.col("event_time")
        elif pa.types.is_timestamp(SCHEMAS[table].field(name).type):
            column = f.timestamp_millis(f.col(f"value.{name}"))
        else:
            column = f.col(f"value.{name}")
        found.append(column.alias(name))
    return found

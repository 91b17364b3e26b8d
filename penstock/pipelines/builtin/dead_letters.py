"""Dead-letter triage: why things fail, grouped, with samples.

Error texts of one cause differ in numbers and ids. Those are replaced, and what is then equal is
one group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import functions as sql

from penstock.bus.sync import connect_sync
from penstock.model.arrow import TIME
from penstock.model.errors import InvalidSettings
from penstock.pipelines.pipeline import pipeline
from penstock.pipelines.stores import credentials, is_broker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame, SparkSession

MAX_LETTERS = 100_000  # the newest; about 40 MB on the driver
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("consumer", pa.string()),
        ("topic", pa.string()),
        ("tenant", pa.string()),
        ("attempts", pa.int32()),
        ("reason", pa.string()),
        ("at", TIME),
    ]
)
# Longest shapes first: a UUID is also hexadecimal, and a time is also numbers.
SHAPES = (
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<uuid>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b0x[0-9a-fA-F]+\b|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{12,}\b", "<hex>"),
    (r"\d+(\.\d+)*", "<n>"),
)


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of `dead-letters`."""

    consumer: str | None = None
    topic: str | None = None
    tenant: str | None = None
    everything: bool = False
    """Also those that were given back already."""
    samples: int = 3
    limit: int = MAX_LETTERS


@pipeline("dead-letters", mode="batch", params=Params)
def dead_letters(spark: SparkSession, url: str, token: str | None, params: Params) -> DataFrame:
    """Why events died: groups by consumer, topic and error, the largest first, with samples."""
    if params.samples < 0 or params.limit < 1:
        raise InvalidSettings("`samples` is 0 or more and `limit` 1 or more; nothing ran")
    with connect_sync(_read_only(url), **credentials(token)) as bus:
        letters = bus.dead_letters.list(
            consumer=params.consumer,
            topic=params.topic,
            tenant=params.tenant,
            limit=params.limit,
            everything=params.everything,
        )
    return triage(_frame(spark, letters), params.samples)


def triage(letters: DataFrame, samples: int) -> DataFrame:
    """Letters (id, consumer, topic, tenant, attempts, reason, at) in groups."""
    # Newest first, and by id among equals: the same letters give the same samples.
    newest = sql.sort_array(sql.collect_list(sql.struct("at", "id", "reason", "attempts")), False)
    return (
        letters.withColumn("error", normalised(sql.col("reason")))
        .groupBy("consumer", "topic", "error")
        .agg(
            sql.count("*").alias("letters"),
            sql.count_distinct("tenant").alias("tenants"),
            sql.max("attempts").alias("most_attempts"),
            sql.min("at").alias("first_seen"),
            sql.max("at").alias("last_seen"),
            sql.slice(newest, 1, samples).alias("samples"),
        )
        .orderBy(sql.desc("letters"), "consumer", "topic", "error")
    )


def normalised(text: Column) -> Column:
    """An error text with its numbers, ids and times replaced."""
    for shape, name in SHAPES:
        text = sql.regexp_replace(text, shape, name)
    return text


def _frame(spark: SparkSession, letters: Iterable[Any]) -> DataFrame:
    rows = [
        (each.id, each.consumer, each.topic, each.tenant, each.attempts, each.reason,
         each.dead_lettered_at_us)
        for each in letters
    ]  # fmt: skip
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    arrays = [pa.array(values, kind.type) for values, kind in zip(columns, COLUMNS, strict=True)]
    return spark.createDataFrame(pa.table(arrays, schema=COLUMNS))


def _read_only(url: str) -> str:
    """A folder is opened beside its writer."""
    if is_broker(url) or "?" in url:
        return url
    return f"{url}?mode=ro"

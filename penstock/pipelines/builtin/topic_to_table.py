"""Topic to table: the rows of a pattern as they are, to be kept as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipelines.pipeline import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE = "events"


@pipeline("topic-to-table", reads="#", table=TABLE)
def topic_to_table(events: DataFrame) -> DataFrame:
    """Every event of a pattern as a row of a table, with typed columns where a schema is named.

    `topic` is called `source_topic` in the table: a result row's `topic` is where it is to be
    published, and these are not to be published again.
    """
    return events.withColumnRenamed("topic", "source_topic")

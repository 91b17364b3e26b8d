"""A source that reads nothing: what Spark itself takes for rows that come from Python.

Its tasks are those of the real source. Each reads one batch and hands it over again and again, as
often as there are rows to read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from penstock.pipelines.options import source_options
from penstock.pipelines.source import BatchReader, PenstockSource, Task


class BareSource(PenstockSource):
    """`format("penstock-bare")`, with the options of `penstock`."""

    @classmethod
    def name(cls) -> str:
        """What follows `format(`."""
        return "penstock-bare"

    def reader(self, schema: StructType) -> BatchReader:
        """Read once."""
        return BareReader(source_options(self.options), schema)


class BareReader(BatchReader):
    """Gives the first batch of each task until there are as many rows as the task has."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, Task)
        left = sum(part.stop - part.start for part in partition.parts)
        batch = next(iter(super().read(partition)))
        while left > 0:
            part = batch.slice(0, min(left, batch.num_rows))
            left -= part.num_rows
            yield part

"""`write.format("penstock")` and `writeStream`: rows onto the bus, exactly once (row S2).

A broker takes each task's rows as one transaction whose key is query, batch and task. A folder has
one writer at a time, so tasks leave their rows in files there and the driver publishes them all as
one transaction whose key is query and batch. Either way a repetition is known and does nothing.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.log.recovery import STAGING
from penstock.model.errors import InvalidInput
from penstock.pipelines.connection import is_broker
from penstock.pipelines.failpoint import failpoint
from penstock.pipelines.options import SinkOptions, sink_options
from penstock.pipelines.outgoing import Outlet, check_columns, outlet_at

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    """What a task did: rows published, or left in a file for the driver."""

    name: str
    rows: int
    path: str | None


class Delivery:
    """How rows of one write get onto a bus."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_columns(schema.names, options.topic)
        self.options = options
        self.direct = is_broker(options.url)

    def put(self, name: str, task: int, rows: Iterator[pa.RecordBatch]) -> Written:
        """A task's rows, of the batch of this name."""
        some = [each for each in rows if each.num_rows]
        count = sum(each.num_rows for each in some)
        if not some:
            return Written(name, 0, None)
        failpoint("sink.task-begun")
        path = None
        if self.direct:
            outlet = outlet_at(self.options.url, self.options.token)
            outlet.publish(some, self.options.topic, f"{name}/{task}", self.options.codec)
        else:
            path = self._stage(some)
        failpoint("sink.task-done")
        return Written(name, count, path)

    def _stage(self, rows: Sequence[pa.RecordBatch]) -> str:
        folder = Path(self.options.url) / STAGING
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{uuid.uuid4()}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows[0].schema) as writer:
            for each in rows:
                writer.write_batch(each)
        return str(path)

    def finish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done: publish what they left."""
        done = [each for each in messages if isinstance(each, Written)]
        left = [each for each in done if each.path is not None]
        failpoint("sink.before-commit")
        if left:
            outlet = Outlet(self.options.url, self.options.token)
            try:
                outlet.publish(_staged(left), self.options.topic, left[0].name, self.options.codec)
            finally:
                outlet.close()
        failpoint("sink.after-commit")
        self.forget(messages)

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove the files of tasks."""
        for each in messages:
            if isinstance(each, Written) and each.path is not None:
                with contextlib.suppress(FileNotFoundError):
                    Path(each.path).unlink()


def _staged(left: Sequence[Written]) -> Iterator[pa.RecordBatch]:
    for each in left:
        with pa.memory_map(each.path) as file:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame once; named by `queryId` and `batchId`, or by itself."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        chosen = sink_options(options)
        if overwrite:
            raise InvalidInput("a topic is a log: use mode('append'), nothing is overwritten")
        if (chosen.query_id is None) != (chosen.batch_id is None):
            raise InvalidInput("give `queryId` and `batchId` together, or neither")
        self._delivery = Delivery(chosen, schema)
        if chosen.query_id is not None:
            self._name = f"{chosen.query_id}/{chosen.batch_id}"
        else:
            self._name = f"batch/{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """A task's rows."""
        return self._delivery.put(self._name, _task().partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task failed for good."""
        self._delivery.forget(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes every batch of a query once; named by query and batch."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput("a topic is a log: use outputMode('append')")
        self._delivery = Delivery(sink_options(options), schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """A task's rows of one batch."""
        task = _task()
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise InvalidInput(
                "Spark told neither query nor batch, so a repetition could not be known; "
                "nothing was published. Use Spark 4.1 or newer"
            )
        return self._delivery.put(f"{query}/{batch}", task.partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a batch are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A batch failed for good."""
        self._delivery.forget(messages)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task

"""`write.format("penstock")` and `writeStream`: rows onto the bus, exactly once.

Tasks stage their rows and publish nothing. When all tasks are done, the driver publishes the batch as
one transaction whose key is query and batch. So a failed attempt leaves nothing, and a repetition of a
batch that is published is known and does nothing, whatever its tasks were.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.log.recovery import ABOUT
from penstock.model.errors import InvalidInput, PayloadTooLarge
from penstock.pipelines.connection import is_broker
from penstock.pipelines.failpoint import failpoint
from penstock.pipelines.options import SinkOptions, sink_options
from penstock.pipelines.outgoing import Batch, Outlet, check_columns, checked, outlet_at
from penstock.pipelines.plain_errors import plain_errors
from penstock.pipelines.staging import Staged, Staging, rows_of

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


class Delivery:
    """How rows of one write get onto a bus."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_columns(schema, options.topic)
        self.options = options
        self.staging = Staging.of(options.url)

    def put(self, name: str, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows, of the batch of this name."""
        staged = self.staging.put(name, checked(rows, self.options.codec))
        failpoint("sink.task-done")
        return staged

    def finish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done: publish what they staged."""
        staged = [each for each in messages if isinstance(each, Staged)]
        if not staged:
            return
        failpoint("sink.before-commit")
        # Without rows too: an attempt that had some may have published a part of them.
        if any(each.rows for each in staged) or self._may_hold_a_part():
            self._publish(staged)
        failpoint("sink.after-commit")
        self.forget(messages)

    def _may_hold_a_part(self) -> bool:
        """Whether there is a bus at all; a batch without rows makes none."""
        return is_broker(self.options.url) or (Path(self.options.url) / ABOUT).exists()

    def _publish(self, staged: Sequence[Staged]) -> None:
        chosen = self.options
        batch = Batch(
            staged[0].name, chosen.topic, chosen.codec, chosen.max_transaction_bytes, chosen.plans
        )
        direct = is_broker(chosen.url)
        outlet = (outlet_at if direct else Outlet)(chosen.url, chosen.token)
        try:
            outlet.publish(lambda: rows_of(staged), batch)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(
                f"{error.message}. Give the sink a smaller `maxTransactionBytes` (now "
                f"{chosen.max_transaction_bytes}), or raise the limit",
                **error.data,
            ) from error
        finally:
            if not direct:
                outlet.close()

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what tasks staged."""
        for name in {each.name for each in messages if isinstance(each, Staged)}:
            self.staging.forget(name)


@plain_errors
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
            # Several writes of one batch, as foreachBatch allows them, are told apart by their topics.
            named = "" if chosen.topic is None else f"/{chosen.topic}"
            self._name = f"{chosen.query_id}/{chosen.batch_id}{named}"
        else:
            self._name = f"batch/{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows."""
        return self._delivery.put(self._name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task failed for good."""
        self._delivery.forget(messages)


@plain_errors
class StreamWriter(DataSourceStreamArrowWriter):
    """Writes every batch of a query once; named by query and batch.

    In complete mode a batch is the whole result so far, and each is published: a topic is a log.
    """

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._delivery = Delivery(sink_options(options), schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows of one batch."""
        task = TaskContext.get()
        assert task is not None
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise InvalidInput(
                "Spark told neither query nor batch, so a repetition could not be known; "
                "nothing was published. Use Spark 4.1 or newer"
            )
        return self._delivery.put(f"{query}/{batch}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a batch are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A batch failed for good."""
        self._delivery.forget(messages)

"""One micro-batch into a table, exactly once.

Tasks write Parquet files into a folder of their attempt; the driver commits the list of files in
one go, with the query and the batch beside it. A repeated batch is known by them and adds nothing.
A process that dies in between leaves files that no table lists; the attempt that succeeds removes
them, and only after its own commit: an older driver that still runs may commit first.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from penstock.model.errors import InvalidInput, SchemaMismatch
from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.files import maps_as_text, text_as_maps, write_rows
from penstock.pipelines.lakehouse.table import (
    AUTOMATIC,
    FAULT,
    REJECTED,
    REJECTED_SUFFIX,
    Cut,
    Layout,
    Step,
    Table,
    WrittenFile,
    adapt,
    total_rows,
)
from penstock.pipelines.lakehouse.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
# What a task hands back about each file it wrote.
FILE_COLUMNS = (
    "path STRING, rows BIGINT, size_bytes BIGINT, tenant STRING, day INT, rejected BOOLEAN"
)
_FILES = pa.schema(
    [("path", pa.string()), ("rows", pa.int64()), ("size_bytes", pa.int64()),
     ("tenant", pa.string()), ("day", pa.int32()), ("rejected", pa.bool_())]
)  # fmt: skip


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one batch: `rows + rejected` is what came in, unless it was repeated."""

    rows: int = 0
    rejected: int = 0
    files: int = 0
    size_bytes: int = 0
    repeated: bool = False
    cleaned: int = 0


def write_batch(
    frame: DataFrame,
    warehouse: Warehouse,
    table: str,
    *,
    query: str,
    batch: int,
    evolve: Collection[Step] = AUTOMATIC,
) -> BatchReport:
    """Add a batch's rows to a table once, however often the batch is run.

    `query` is the id of the streaming query, which its checkpoint keeps, not its name: batch
    numbers begin again with a new checkpoint. Rows that do not fit, and rows whose column `fault`
    says why, go to the table `<table>__rejected`. Columns that are new or wider change the table
    first; `evolve=()` leaves it as it is.
    """
    _check(query, batch)
    target, rejects = warehouse.table(table), warehouse.table(f"{table}{REJECTED_SUFFIX}")
    if target.has_batch(query, batch):
        cleaned = target.clean(query, batch)
        if rejects.schema() is not None:
            cleaned += rejects.clean(query, batch)
        return BatchReport(repeated=True, cleaned=cleaned)
    _prepare(target, _columns(frame, table), evolve)
    _prepare(rejects, REJECTED, ())
    attempt = uuid.uuid4().hex[:12]
    layouts = target.layout(query, batch, attempt), rejects.layout(query, batch, attempt)
    written = _run_tasks(frame, layouts, warehouse.properties)
    failpoint("lakehouse.files-written")
    bad = [each for each in written if each.rejected]
    good = [each for each in written if not each.rejected]
    # Dead letters first: once the table has the batch it is not written again. A batch without rows
    # leaves no mark: run again, it has none again.
    fresh = True
    if bad:
        fresh = rejects.commit(bad, query, batch)
        failpoint("lakehouse.rejected-committed")
    if good:
        fresh = target.commit(good, query, batch)
    failpoint("lakehouse.committed")
    cleaned = target.clean(query, batch) + rejects.clean(query, batch)
    if not fresh:
        return BatchReport(repeated=True, cleaned=cleaned)
    return BatchReport(
        rows=total_rows(good),
        rejected=total_rows(bad),
        files=len(good),
        size_bytes=sum(each.size_bytes for each in good),
        cleaned=cleaned,
    )


def _check(query: str, batch: int) -> None:
    if not _QUERY.fullmatch(query) or batch < 0:
        raise InvalidInput(
            f"query {query!r}, batch {batch} cannot mark a commit; nothing was written. Give the "
            "id of the streaming query (letters, digits, '_', '.', '-') and its batch number"
        )


def _prepare(table: Table, schema: pa.Schema, evolve: Collection[Step]) -> None:
    if table.schema() is None:
        table.create(schema, Cut.of(schema))
    else:
        adapt(table, schema, evolve)


def _columns(frame: DataFrame, table: str) -> pa.Schema:
    """The columns a table needs for a frame; any may be null, for Spark only guesses at that."""
    from pyspark.sql.pandas.types import to_arrow_schema

    fields = []
    for field in to_arrow_schema(frame.schema, timezone="UTC"):
        if pa.types.is_null(field.type):
            raise SchemaMismatch(
                f"column {field.name!r} for table {table!r} has no type; nothing was written. "
                f"Cast it, as in CAST({field.name} AS STRING)",
                table=table,
                column=field.name,
            )
        if field.name != FAULT:
            fields.append(pa.field(field.name, field.type))
    return pa.schema(fields)


def _run_tasks(
    frame: DataFrame, layouts: tuple[Layout, Layout], properties: dict[str, str]
) -> list[WrittenFile]:
    frame, maps = maps_as_text(frame)
    rows = frame.mapInArrow(_task(layouts, properties, maps), FILE_COLUMNS).collect()
    return [WrittenFile(*row) for row in rows]


def _task(
    layouts: tuple[Layout, Layout], properties: dict[str, str], maps: Collection[str]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        # Spark runs a task again, or twice at a time, under another attempt number.
        task = f"{context.partitionId():05d}-{context.taskAttemptId()}"
        rows = (text_as_maps(each, maps) for each in batches)
        files = [msgspec.structs.asdict(f) for f in write_rows(rows, *layouts, task, properties)]
        yield pa.RecordBatch.from_pylist(files, schema=_FILES)

    return write

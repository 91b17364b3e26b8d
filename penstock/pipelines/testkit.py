"""Testing pipelines without a cluster and without a bus: rows in memory in, rows out.

The rows look as the source gives them: the same columns, payloads decoded by the same code, late
rows marked by the same rule. Only `payload` (bytes, text, or a value that becomes JSON) is worth
writing down in most tests; everything else has a default.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.schedule import parse_duration
from penstock.model.arrow import TIME
from penstock.model.errors import InvalidInput, NotFound
from penstock.model.parameter import moment_us
from penstock.model.token import TOKEN_BYTES
from penstock.model.topic import ANY_WORDS, tenant_of
from penstock.pipelines import pipeline as discovery
from penstock.pipelines import rows as event_time
from penstock.pipelines.columns import EVENT_COLUMNS, FAULT, LATE, VALUE, check_payload
from penstock.pipelines.payload import Decoder
from penstock.pipelines.pipeline import Input, Pipeline, registered
from penstock.pipelines.plan import Topics
from penstock.pipelines.run import invoke

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = Mapping[str, Any]
NO_TOPIC = "test.rows"
TIMES = ("append_time", "event_time")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_APPEND = datetime(2026, 1, 1, tzinfo=UTC)
"""Append time of the first row that names none; each row after it is a millisecond younger. A row
whose event time is newer was appended then: it would count as one from the future otherwise."""


class _Filler:
    """Gives rows the columns they leave out; counts offsets over several batches."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}
        self._rows = 0

    def fill(self, row: Row) -> dict[str, Any]:
        """The row with every column of the source."""
        unknown = sorted(set(row) - {*EVENT_COLUMNS, LATE})
        if unknown:
            raise InvalidInput(
                f"a row has no column {unknown[0]!r}; it has {', '.join(EVENT_COLUMNS)} and late"
            )
        topic, partition = row.get("topic", NO_TOPIC), row.get("partition", 0)
        offset = row.get("offset", self._next.get((topic, partition), 0))
        self._next[topic, partition] = offset + 1
        row = {**row, **{name: _moment(name, row[name]) for name in TIMES if name in row}}
        appended = row.get("append_time", FIRST_APPEND + timedelta(milliseconds=self._rows))
        if "append_time" not in row and "event_time" in row:
            appended = max(appended, row["event_time"])
        self._rows += 1
        place = f"{topic}/{partition}/{offset}".encode()
        filled = {
            "topic": topic,
            "tenant": tenant_of(topic) or "default",
            "partition": partition,
            "offset": offset,
            "id": hashlib.blake2b(place, digest_size=TOKEN_BYTES).digest(),
            "append_time": appended,
            "event_time": appended,
            "key": None,
            "headers": {},
            "payload": b"",
            "codec": "json",
            LATE: False,
        }
        filled |= row
        filled["payload"] = _payload(filled["payload"])
        if not isinstance(filled["headers"] or {}, Mapping):
            raise InvalidInput(f"headers are an object of texts, not {filled['headers']!r}")
        filled["headers"] = list((filled["headers"] or {}).items())
        return filled


def _moment(name: str, value: Any) -> datetime:
    """A time as JSON can write it: ISO 8601 with its zone, or seconds since 1970."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"@{value:.6f}"
    return EPOCH + timedelta(microseconds=moment_us(name, value))


def _payload(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def _table(rows: Sequence[Mapping[str, Any]], source: Input) -> pa.Table:
    """Filled rows as the columns that an input has."""
    names = {name: kind for name, (_, kind, _) in EVENT_COLUMNS.items()}
    columns = {name: _column(name, kind, rows) for name, kind in names.items()}
    if source.schema is not None:
        value, fault = Decoder(_fields(source.schema)).decode(
            columns["payload"], [row["codec"] for row in rows]
        )
        columns |= {VALUE: value, FAULT: fault}
    if source.late_after is not None:
        columns[LATE] = pa.array([row[LATE] for row in rows], pa.bool_())
    return pa.table(columns)


def _column(name: str, kind: pa.DataType, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
    values = [row[name] for row in rows]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        for number, value in enumerate(values, 1):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise InvalidInput(
                    f"{name} of row {number} is {value!r}, and the column is {EVENT_COLUMNS[name][0]}: "
                    f"{error}. Correct the row",
                    column=name,
                    row=number,
                ) from None
        raise


def _fields(ddl: str) -> pa.StructType:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    check_payload(found, VALUE)
    return pa.struct(list(to_arrow_schema(found, prefers_large_types=False)))


def frame(
    spark: SparkSession,
    rows: Sequence[Row],
    *,
    schema: str | None = None,
    late_after: str | None = None,
) -> DataFrame:
    """Rows as a DataFrame with the columns of the source; `schema` gives value and fault."""
    filler = _Filler()
    source = Input("#", schema, late_after)
    return _as_frame(spark, _table([filler.fill(row) for row in rows], source))


def _read(rows: Sequence[Row], source: Input) -> list[Row]:
    """The rows that the source would give: none of a topic that is left out."""
    wanted = Topics.of(ANY_WORDS, source.exclude)
    return [row for row in rows if wanted.has(row.get("topic", NO_TOPIC))]


def _as_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    return spark.createDataFrame(table)


def run_on_rows(
    which: str | Pipeline | Callable[..., Any],
    spark: SparkSession,
    rows: Sequence[Row] | Mapping[str, Sequence[Row]] = (),
    params: Mapping[str, Any] | msgspec.Struct | None = None,
    *,
    url: str = "",
) -> list[dict[str, Any]]:
    """Run a pipeline once over rows, as a batch; rows by argument where it has several inputs.

    `url` is for pipelines that ask for one: those that read something else than topics.
    """
    made = find(which)
    given = rows if isinstance(rows, Mapping) else dict.fromkeys(made.reads, rows)
    frames = {
        argument: frame(
            spark,
            _read(given.get(argument, ()), source),
            schema=source.schema,
            late_after=source.late_after,
        )
        for argument, source in made.reads.items()
    }
    return _plain(invoke(made, spark, frames, params, url=url))


def stream_on_rows(
    which: str | Pipeline | Callable[..., Any],
    spark: SparkSession,
    batches: Sequence[Sequence[Row]],
    params: Mapping[str, Any] | msgspec.Struct | None = None,
) -> list[dict[str, Any]]:
    """Run a pipeline of one input as a stream, one micro-batch for each list of rows.

    Rows that are older than the newest event time of all batches before, less the input's allowed
    lateness, are marked late as the source does it, unless a row says itself whether it is.
    """
    made = find(which)
    ((argument, source),) = made.reads.items()
    with tempfile.TemporaryDirectory() as folder:
        for number, rows in enumerate(_marked(batches, source)):
            path = Path(folder) / f"{number:06d}.parquet"
            pq.write_table(_table(rows, source), path)
            os.utime(path, (number + 1, number + 1))  # Spark takes files by their age
        sample = spark.read.parquet(folder)
        events = (
            spark.readStream.schema(sample.schema).option("maxFilesPerTrigger", 1).parquet(folder)
        )
        name = f"testkit_{uuid.uuid4().hex}"
        query = (
            invoke(made, spark, {argument: events}, params)
            .writeStream.format("memory")
            .queryName(name)
            .outputMode(made.output_mode)
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
            return _plain(spark.table(name))
        finally:
            query.stop()
            spark.catalog.dropTempView(name)


def _marked(batches: Sequence[Sequence[Row]], source: Input) -> Iterator[list[dict[str, Any]]]:
    filler = _Filler()
    newest_us = 0
    delay_us = parse_duration(source.late_after) if source.late_after else 0
    for given in batches:
        batch = _read(given, source)
        rows = [filler.fill(row) for row in batch]
        events_us, appended_us = (
            pa.array([row[name] for row in rows], TIME).cast(pa.int64()).to_numpy()
            for name in ("event_time", "append_time")
        )
        for row, said, event_us in zip(rows, batch, events_us, strict=True):
            if LATE not in said:
                row[LATE] = bool(event_us < newest_us - delay_us)
        newest_us = event_time.newest_us(events_us, appended_us, newest_us)
        yield rows


def find(which: str | Pipeline | Callable[..., Any]) -> Pipeline:
    """A pipeline by its name, itself, or the function it was made from."""
    if isinstance(which, Pipeline):
        return which
    if isinstance(which, str):
        return registered[which] if which in registered else discovery.find(which)
    for made in registered.values():
        if made.function is which:
            return made
    raise NotFound(f"{which!r} is no pipeline: decorate it with @penstock.pipeline")


def _plain(result: DataFrame) -> list[dict[str, Any]]:
    return [_simple(row.asDict(recursive=True)) for row in result.collect()]


def _simple(value: Any) -> Any:
    """Bytes instead of byte arrays, at any depth."""
    if isinstance(value, dict):
        return {name: _simple(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_simple(each) for each in value]
    return bytes(value) if isinstance(value, bytearray) else value

"""Runs pipelines: inputs from a bus, the function, results onto a bus and into a table.

`start` runs a pipeline as a stream, `run_batch` once over what there is now. `read_checkpoint` tells
from Spark's checkpoint, without Spark, where a query is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.model.errors import InvalidInput, InvalidSettings, NotFound
from penstock.model.topic import pattern_regex
from penstock.pipelines.pipeline import Input, Pipeline
from penstock.pipelines.plan import Place
from penstock.pipelines.sink import ENVELOPE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.pipelines.lakehouse.warehouse import Warehouse


# -- running --------------------------------------------------------------------------------------

TOPIC, PAYLOAD = "topic", "payload"


@dataclass(frozen=True)
class Route:
    """Where a pipeline reads and writes."""

    url: str
    """The bus that is read: a folder or a broker."""
    to: str | None = None
    """The bus that is written; the same one by default."""
    warehouse: Warehouse | None = None
    """Where the pipeline's table is; without one there is no table."""
    token: str | None = None
    topics: str | None = None
    """Read these instead of what the pipeline says; for pipelines of one input."""
    options: Mapping[str, str] = field(default_factory=dict)
    """More options of the source: `start`, `maxEventsPerTrigger`, ..."""
    sink_options: Mapping[str, str] = field(default_factory=dict)
    """More options of the sink: `maxTransactionBytes`, ..."""


def start(
    made: Pipeline,
    spark: SparkSession,
    route: Route,
    *,
    checkpoint: str | Path,
    params: Mapping[str, Any] | None = None,
    once: bool = False,
    every_s: float | None = None,
) -> StreamingQuery:
    """Start a pipeline as a stream; with `once` it ends when it has read what there is now."""
    check_goes_somewhere(made, route)
    result = call(made, spark, route, params, streaming=True)
    if made.table is not None and route.warehouse is not None:
        writer = result.writeStream.foreachBatch(_both(made, route))
    else:
        writer = as_events(result, made).writeStream.format("penstock")
        writer = writer.options(**_sink_options(result, made, route))
    writer = writer.outputMode(made.output_mode).queryName(made.name)
    writer = writer.option("checkpointLocation", str(checkpoint))
    if once:
        writer = writer.trigger(availableNow=True)
    elif every_s is not None:
        writer = writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
    return writer.start()


def run_batch(
    made: Pipeline,
    spark: SparkSession,
    route: Route,
    params: Mapping[str, Any] | None = None,
) -> DataFrame:
    """Run a pipeline once over what there is now; the result is for the caller to use."""
    return call(made, spark, route, params, streaming=False)


def call(
    made: Pipeline,
    spark: SparkSession,
    route: Route,
    params: Mapping[str, Any] | None,
    *,
    streaming: bool,
) -> DataFrame:
    """The function on its inputs; nothing is read yet."""
    frames = {
        name: _read(spark, source, route, len(made.reads), streaming)
        for name, source in made.reads.items()
    }
    return invoke(made, spark, frames, params, url=route.url, token=route.token)


def invoke(
    made: Pipeline,
    spark: SparkSession,
    frames: Mapping[str, DataFrame],
    params: Mapping[str, Any] | msgspec.Struct | None,
    *,
    url: str = "",
    token: str | None = None,
) -> DataFrame:
    """The function on these frames, with those of `spark`, `url`, `token` and `params` it has as arguments."""
    wanted = inspect.signature(made.function).parameters
    offered = {"spark": spark, "url": url, "token": token}
    arguments: dict[str, Any] = {
        **frames, **{name: each for name, each in offered.items() if name in wanted}
    }  # fmt: skip
    if "params" in wanted:
        given = params if isinstance(params, msgspec.Struct) else parameters(made, params)
        arguments["params"] = given
    result: DataFrame = made.function(**arguments)
    return result


def parameters(made: Pipeline, given: Mapping[str, Any] | None) -> msgspec.Struct | None:
    """A pipeline's parameters from texts or values; an unknown or wrong one is named."""
    if made.params is None:
        if given:
            raise InvalidSettings(f"the pipeline {made.name!r} has no parameters; leave them out")
        return None
    known = made.params.__struct_fields__
    unknown = sorted(set(given or {}) - set(known))
    try:
        if unknown:
            raise msgspec.ValidationError(f"there is none named {unknown[0]!r}")
        return msgspec.convert(dict(given or {}), made.params, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidSettings(
            f"parameters of {made.name!r}: {error}. It has {', '.join(known)}", pipeline=made.name
        ) from None


def _read(
    spark: SparkSession, source: Input, route: Route, inputs: int, streaming: bool
) -> DataFrame:
    if route.topics is not None and inputs > 1:
        raise InvalidInput("topics can be given for a pipeline of one input only")
    options = {"url": route.url, "topics": route.topics or source.topics, **route.options}
    if source.schema is not None:
        options["schema"] = source.schema
    if source.columns is not None:
        options["columns"] = source.columns
    if source.exclude:
        options["exclude"] = source.exclude
    if source.late_after is not None and streaming:
        options["lateAfter"] = source.late_after
    if route.token is not None:
        options["token"] = route.token
    reader = spark.readStream if streaming else spark.read
    return reader.format("penstock").options(**options).load()


# -- results --------------------------------------------------------------------------------------


def as_events(result: DataFrame, made: Pipeline) -> DataFrame:
    """Rows as the sink takes them: columns outside the envelope become JSON, unless there is a payload."""
    from pyspark.sql import functions as sql

    names = result.columns
    envelope = [name for name in (TOPIC, *ENVELOPE) if name in names]
    if PAYLOAD in names:
        return result.select(*envelope, PAYLOAD)
    rest = [f"`{name}`" for name in names if name not in envelope]
    if not rest:
        raise InvalidInput(f"the results of {made.name!r} have no column beside the envelope")
    packed = sql.to_json(sql.struct(*rest), {"ignoreNullFields": "false"})
    return result.select(*envelope, packed.alias(PAYLOAD))


def as_table_rows(result: DataFrame, made: Pipeline) -> DataFrame:
    """The rows of a result that belong into the pipeline's table, in its columns."""
    from pyspark.sql import functions as sql

    if TOPIC in result.columns:
        is_result = sql.col(TOPIC).isNull()
        if made.results is not None:
            dotted = sql.concat(sql.lit("."), sql.col(TOPIC))
            is_result |= dotted.rlike(pattern_regex(made.results))
        result = result.where(is_result).drop(TOPIC)
    if made.table_schema is None:
        return result
    value = sql.from_json(sql.col(PAYLOAD).cast("STRING"), made.table_schema)
    times = [name for name in ("event_time",) if name in result.columns]
    return result.select(*times, value.alias("value")).select(*times, "value.*")


def _both(made: Pipeline, route: Route) -> Callable[[DataFrame, int], None]:
    """Every batch to the bus and to the table; each knows a repetition by query and batch."""
    from penstock.pipelines.lakehouse.writer import write_batch

    def write(batch: DataFrame, number: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None
        assert made.table is not None
        assert route.warehouse is not None
        publishes = TOPIC in batch.columns or made.writes is not None
        if publishes:
            batch.persist()  # read and computed once for both
        try:
            if publishes:
                options = _sink_options(batch, made, route) | {
                    "queryId": query,
                    "batchId": str(number),
                }
                writer = as_events(batch, made).write.format("penstock").options(**options)
                writer.mode("append").save()
            rows = as_table_rows(batch, made)
            write_batch(rows, route.warehouse, made.table, query=query, batch=number)
        finally:
            if publishes:
                batch.unpersist()

    return write


def _sink_options(result: DataFrame, made: Pipeline, route: Route) -> dict[str, str]:
    options = {"url": route.to or route.url, **route.sink_options}
    if PAYLOAD not in result.columns:
        options["codec"] = "json"
    if made.writes is not None:
        options[TOPIC] = made.writes
    if route.token is not None:
        options["token"] = route.token
    return options


def check_goes_somewhere(made: Pipeline, route: Route) -> None:
    """Refuse a stream whose results would be lost; needs no session, so callers check before starting one."""
    if made.mode == "batch":
        raise InvalidInput(f"{made.name!r} is a batch pipeline; run it once")
    if made.output_mode == "update" and not (
        made.table is not None and route.warehouse is not None
    ):
        raise InvalidInput(
            f"{made.name!r} has output_mode='update', which Spark refuses for sinks written in Python; nothing "
            "ran. Use 'complete' or 'append', or let it write a table and name a warehouse",
            pipeline=made.name,
        )
    only_a_table = made.table is not None and made.writes is None and made.results is None
    if only_a_table and route.warehouse is None:
        raise InvalidInput(
            f"{made.name!r} writes a table only, and nothing says where; nothing ran. Name a "
            "warehouse with --warehouse; a folder is enough"
        )


# -- checkpoints ----------------------------------------------------------------------------------


class Checkpoint(msgspec.Struct, frozen=True):
    """How far a query is."""

    query: str
    """Its id, the same in every run from this checkpoint."""
    batch: int
    """The last batch that was done; -1 before the first."""
    planned: int
    """The last batch that was begun."""
    places: list[Place]
    """Where each of its inputs is after the last batch that was done."""


def read_checkpoint(checkpoint: str | Path) -> Checkpoint:
    """How far the query of a checkpoint is; `NotFound` before its first run."""
    folder = Path(checkpoint)
    try:
        query = json.loads((folder / "metadata").read_text())["id"]
    except FileNotFoundError:
        raise NotFound(
            f"there is no checkpoint in {folder}: the pipeline has not run with it yet"
        ) from None
    except (ValueError, KeyError):
        raise InvalidInput(
            f"{folder / 'metadata'} is not what Spark writes into a checkpoint"
        ) from None
    done, planned = _newest(folder / "commits"), _newest(folder / "offsets")
    return Checkpoint(query, done, planned, _places(folder / "offsets" / str(done)))


def _newest(folder: Path) -> int:
    if not folder.is_dir():
        return -1
    return max((int(each.name) for each in folder.iterdir() if each.name.isdigit()), default=-1)


def _places(path: Path) -> list[Place]:
    """Spark writes a version, a line about the batch, and a line of offsets for each input."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()[2:]
    return [Place.from_json(json.loads(line)) for line in lines if line.strip() not in ("", "-")]

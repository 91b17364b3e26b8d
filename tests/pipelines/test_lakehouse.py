"""Batches of a streaming query become tables exactly once; every engine reads the same (S4, Q16)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import penstock
from penstock.model.errors import InvalidInput, SchemaMismatch
from penstock.pipelines.lakehouse.iceberg import IcebergTable
from penstock.pipelines.lakehouse.topics import sync_topics
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_files
from penstock.pipelines.lakehouse.writer import BatchReport, write_batch

COLUMNS = (
    "topic STRING, tenant STRING, partition INT, offset BIGINT, event_time TIMESTAMP, "
    "headers MAP<STRING, STRING>, payload BINARY, value STRUCT<host: STRING, score: DOUBLE>"
)


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    with Warehouse(tmp_path / "lake") as made:
        yield made


def events(spark: Any, count: int, first: int = 0) -> Any:
    return spark.range(first, first + count, 1, 2).selectExpr(
        "concat('risk.found.v1.', if(id % 2 = 0, 'acme', 'globex')) AS topic",
        "if(id % 2 = 0, 'acme', 'globex') AS tenant",
        "CAST(id % 3 AS INT) AS partition",
        "id AS offset",
        "timestamp_micros(1700000000000000 + id * 43200000000) AS event_time",
        "if(id % 5 = 0, NULL, map('trace', CAST(id AS STRING))) AS headers",
        "CAST(concat('payload ', id) AS BINARY) AS payload",
        "named_struct('host', concat('h', id), 'score', id / 8.0D) AS value",
    )


QUERY = (
    "SELECT offset, tenant, event_time, payload, value.host, value.score FROM {} ORDER BY offset"
)


def test_spark_duckdb_and_pyiceberg_read_the_same(spark: Any, warehouse: Warehouse) -> None:
    frame = events(spark, 16)
    report = write_batch(frame, warehouse, "risk.tags", query="q", batch=0)
    assert (report.rows, report.rejected, report.repeated) == (16, 0, False)
    paths = table_files(warehouse, "risk.tags")
    assert report.files == len(paths) >= 8
    spark.read.parquet(*paths).createOrReplaceTempView("found")
    frame.createOrReplaceTempView("given")
    by_spark = [tuple(row) for row in spark.sql(QUERY.format("found")).collect()]
    assert by_spark == [tuple(row) for row in spark.sql(QUERY.format("given")).collect()]
    scan = IcebergTable(warehouse, "risk.tags").load().scan().to_arrow().sort_by("offset")
    with duckdb.connect() as session:
        session.execute("SET TimeZone = 'UTC'")
        listed = str(list(paths))
        quoted = QUERY.replace("offset", '"offset"').format(f"read_parquet({listed})")
        by_duckdb = session.execute(quoted).fetchall()
    by_iceberg = [
        (r["offset"], r["tenant"], r["event_time"].replace(tzinfo=None), r["payload"],
         r["value"]["host"], r["value"]["score"])
        for r in scan.to_pylist()
    ]  # fmt: skip
    plain = [(*row[:2], row[2].replace(tzinfo=None), bytes(row[3]), *row[4:]) for row in by_spark]
    assert by_iceberg == plain
    assert [(*row[:2], row[2].replace(tzinfo=None), *row[3:]) for row in by_duckdb] == plain


def test_a_streaming_query_that_is_repeated_adds_nothing(
    spark: Any, warehouse: Warehouse, tmp_path: Path
) -> None:
    """The last batch is run again, as after a crash between the table's commit and Spark's."""
    source = tmp_path / "source"
    events(spark, 20).write.parquet(str(source))
    reports: list[BatchReport] = []

    def write(frame: Any, number: int) -> None:
        reports.append(write_batch(frame, warehouse, "risk.tags", query="q", batch=number))

    def run() -> None:
        stream = (
            spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(source))
        )
        query = (
            stream.writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    commits = sorted(
        (tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name)
    )
    last = commits[-1]
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    run()
    assert [each.repeated for each in reports] == [False] * len(commits) + [True]
    found = spark.read.parquet(*table_files(warehouse, "risk.tags"))
    assert sorted(row.offset for row in found.select("offset").collect()) == list(range(20))


def test_columns_follow_the_frame_and_misfits_are_dead_letters(
    spark: Any, warehouse: Warehouse
) -> None:
    """Row S4: add, widen, reject; what came in is in the table or among the rejected."""
    frame = events(spark, 4).selectExpr(
        "tenant", "topic", "partition", "offset", "CAST(1 AS INT) AS n"
    )
    write_batch(frame, warehouse, "risk.tags", query="q", batch=0)
    wider = events(spark, 4, 4).selectExpr(
        "tenant", "topic", "partition", "offset", "payload", "5000000000 AS n", "'x' AS more",
        "if(offset = 5, 'payload is no JSON', NULL) AS fault",
    )  # fmt: skip
    report = write_batch(wider, warehouse, "risk.tags", query="q", batch=1)
    assert (report.rows, report.rejected) == (3, 1)
    strange = events(spark, 2, 8).selectExpr(
        "tenant", "topic", "partition", "offset", "if(offset = 8, '12', 'many') AS n"
    )
    report = write_batch(strange, warehouse, "risk.tags", query="q", batch=2)
    assert (report.rows, report.rejected) == (1, 1)
    found = IcebergTable(warehouse, "risk.tags").load().scan().to_arrow().sort_by("offset")
    assert found.column("n").to_pylist() == [1] * 4 + [5_000_000_000] * 3 + [12]
    assert found.column("more").to_pylist() == [None] * 4 + ["x"] * 3 + [None]
    bad = IcebergTable(warehouse, "risk.tags__rejected").load().scan().to_arrow().sort_by("offset")
    assert bad.column("reason").to_pylist() == [
        "payload is no JSON",
        "column 'n': 'many' is no int64",
    ]
    assert bad.column("payload").to_pylist()[0] == b"payload 5"
    assert bad.column("topic").to_pylist() == ["risk.found.v1.globex"] * 2


def test_a_table_that_may_not_change_rejects_what_is_new(spark: Any, warehouse: Warehouse) -> None:
    write_batch(events(spark, 2).select("tenant", "offset"), warehouse, "t.x", query="q", batch=0)
    more = events(spark, 2, 2).selectExpr("tenant", "offset", "if(offset = 3, 1, NULL) AS extra")
    report = write_batch(more, warehouse, "t.x", query="q", batch=1, evolve=())
    assert (report.rows, report.rejected) == (1, 1)


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_other_formats_take_a_batch_once_too(spark: Any, tmp_path: Path, format: Any) -> None:
    warehouse = Warehouse(tmp_path / "lake", format=format)
    for _ in range(2):
        report = write_batch(events(spark, 10), warehouse, "risk.tags", query="q", batch=0)
    assert report.repeated
    paths = table_files(warehouse, "risk.tags")
    assert spark.read.parquet(*paths).select("offset", "tenant").distinct().count() == 10
    assert spark.read.parquet(*paths).count() == 10


def test_an_empty_batch_makes_no_snapshot(spark: Any, warehouse: Warehouse) -> None:
    report = write_batch(events(spark, 0), warehouse, "risk.tags", query="q", batch=0)
    assert report == BatchReport()
    assert IcebergTable(warehouse, "risk.tags").load().current_snapshot() is None


def test_wrong_calls_write_nothing(spark: Any, warehouse: Warehouse) -> None:
    with pytest.raises(InvalidInput, match="batch -1"):
        write_batch(events(spark, 1), warehouse, "risk.tags", query="q", batch=-1)
    with pytest.raises(InvalidInput, match=r"\.\./q"):
        write_batch(events(spark, 1), warehouse, "risk.tags", query="../q", batch=0)
    with pytest.raises(SchemaMismatch, match="CAST"):
        write_batch(spark.sql("SELECT NULL AS x"), warehouse, "risk.tags", query="q", batch=0)
    assert table_files(warehouse, "risk.tags") == []


def seal(folder: Path, least_bytes: int) -> None:
    """Put all events there are into segments: whoever opens the folder begins a new journal file."""
    small = {"sealing__process": False, "sealing__min_segment_bytes": least_bytes}
    with penstock.connect_sync(folder, **small) as bus:
        bus.publish("other", b"")
        engine = bus._target.engine
        assert engine.journal.base > engine.log.manifest.sealed_to
        while engine.log.manifest.sealed_to < engine.journal.base:  # the audit trail goes first
            bus._thread.wait(engine.maintenance.settle())
            time.sleep(0.02)


def test_topic_tables_are_the_same_to_spark_duckdb_and_pyiceberg(
    spark: Any, warehouse: Warehouse, tmp_path: Path
) -> None:
    """Row S4: segments that joined by file, and rows copied from shared ones, every column of interest."""
    data = tmp_path / "data"
    for least in (1, 1 << 20):  # first a file for each topic and tenant, then one for all
        with penstock.connect_sync(data, sealing__enabled=False) as bus:
            for tenant in ("acme", "globex"):
                topic = f"orders.created.v1.{tenant}"
                bus.publish_many(topic, [{"n": n} for n in range(20)], keys=["k"] * 20)
                bus.publish(topic, b"", headers={"trace": "t1"})
        seal(data, least)
    report = sync_topics(data, warehouse, ["orders.#"])
    assert report.joined
    assert report.copied
    paths = table_files(warehouse, "orders.created.v1")
    columns = ("topic", "tenant", "partition", "offset", "key", "payload", "headers")
    by_spark = sorted(
        tuple(bytes(each) if isinstance(each, bytearray) else each for each in row)
        for row in spark.read.parquet(*paths).selectExpr(*columns, "unix_micros(append_time)").collect()
    )  # fmt: skip
    assert len(by_spark) == 84
    scan = IcebergTable(warehouse, "orders.created.v1").load().scan().to_arrow()
    micros = scan["append_time"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    by_iceberg = [
        (*(row[name] for name in columns[:-1]), dict(row["headers"] or ()), us)
        for row, us in zip(scan.to_pylist(), micros, strict=True)
    ]
    named = ", ".join(f'"{name}"' for name in columns)
    with duckdb.connect() as session:
        by_duckdb = session.execute(f"SELECT {named}, epoch_us(append_time) FROM read_parquet(?)", [paths]).fetchall()  # fmt: skip
    plain = [(*row[:-2], dict(row[-2] or {}), row[-1]) for row in by_spark]
    assert sorted(by_iceberg, key=str) == sorted(plain, key=str)
    assert sorted(((*row[:-2], dict(row[-2] or {}), row[-1]) for row in by_duckdb), key=str) == (
        sorted(plain, key=str)
    )

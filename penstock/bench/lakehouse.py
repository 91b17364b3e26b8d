"""How fast batches become tables: `python -m penstock.bench.lakehouse --rows 1000000`.

Rows of 100 bytes of payload, in Spark's memory, go through `write_batch` batch by batch; the first
batch, which starts Python workers, is not counted. The figure is the median batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, get_args

from penstock.pipelines.lakehouse.topics import sync_topics
from penstock.pipelines.lakehouse.warehouse import Format, Warehouse
from penstock.pipelines.lakehouse.writer import write_batch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WARM_UP = 1


def measure_writes(
    spark: SparkSession, *, rows: int, batches: int = 3, format: Format = "iceberg"
) -> dict[str, Any]:
    """Write the same rows as several batches of one query; returns rows per second and sizes."""
    frame = spark.range(0, rows, 1, spark.sparkContext.defaultParallelism).selectExpr(
        "'orders.created.v1.acme' AS topic",
        "if(id % 2 = 0, 'acme', 'globex') AS tenant",
        "CAST(id % 4 AS INT) AS partition",
        "id AS offset",
        "timestamp_micros(1700000000000000 + id) AS append_time",
        "timestamp_micros(1700000000000000 + id) AS event_time",
        "CAST(CAST(id AS STRING) AS BINARY) AS key",
        "CAST(rpad(CAST(hash(id) AS STRING), 100, CAST(xxhash64(id) AS STRING)) AS BINARY) AS payload",
    )
    frame = frame.cache()
    frame.count()
    seconds = []
    with tempfile.TemporaryDirectory() as folder, Warehouse(folder, format=format) as warehouse:
        for number in range(WARM_UP + batches):
            start = time.perf_counter()
            report = write_batch(frame, warehouse, "bench.rows", query="bench", batch=number)
            seconds.append(time.perf_counter() - start)
            assert report.rows == rows
    frame.unpersist()
    middle = statistics.median(seconds[WARM_UP:])
    return {
        "format": format,
        "rows": rows,
        "rows_per_s": round(rows / middle),
        "seconds": [round(each, 3) for each in seconds],
        "files": report.files,
        "mb": round(report.size_bytes / 1e6, 1),
    }


def measure_joins(folder: str) -> dict[str, Any]:
    """Let the sealed segments of a log folder join a new warehouse; returns rows per second."""
    with tempfile.TemporaryDirectory() as place, Warehouse(place) as warehouse:
        start = time.perf_counter()
        report = sync_topics(folder, warehouse)
        spent = time.perf_counter() - start
    rows = report.rows_joined + report.rows_copied
    return {"rows": rows, "rows_per_s": round(rows / spent), "seconds": round(spent, 3)}


def main() -> None:
    """Print one JSON line for each format asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--format", action="append", choices=get_args(Format))
    parser.add_argument("--log", help="also: let the segments of this folder join a table")
    options = parser.parse_args()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    spark = builder.master("local[*]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for format in options.format or ["iceberg"]:
        found = measure_writes(spark, rows=options.rows, batches=options.batches, format=format)
        print(json.dumps(found), flush=True)
    if options.log:
        print(json.dumps(measure_joins(options.log)))
    spark.stop()


if __name__ == "__main__":
    main()

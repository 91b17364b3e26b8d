"""Where Spark cases run: a session, and logs of events that are made once and used by several."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import penstock
from penstock.bench.cases.workload import sealed
from penstock.bench.measure import Meter, Sample
from penstock.bench.progress import Progress
from penstock.model.settings import MIB, Journal, Settings
from penstock.pipelines.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPICS = tuple(
    f"orders.created.v1.{tenant}" for tenant in ("acme", "globex", "initech", "umbrella")
)
BATCH_EVENTS = 50_000
JOURNAL_FILE_BYTES = 128 * MIB
TWIN_FILES = 12  # what the source's own default makes of six million events
FIRST_US = 1_700_000_000_000_000
APART_US = 1_000  # event times go on for 100 minutes in six million events


class Stage:
    """A folder, one Spark session, and the logs that were asked for so far."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self._progress = progress
        self._logs: dict[tuple[int, int], Path] = {}

    @cached_property
    def spark(self) -> SparkSession:
        """The session, started when it is first asked for."""
        self._progress("start Spark", 0, 1)
        return spark_session(name="penstock-bench")

    def log(self, events: int, payload_bytes: int = 100) -> str:
        """A folder with so many events of four topics, nearly all sealed."""
        key = (events, payload_bytes)
        if key not in self._logs:
            place = self.folder / f"log-{events}-{payload_bytes}"
            asyncio.run(self._fill(place, events, payload_bytes))
            self._logs[key] = place
        return str(self._logs[key])

    async def _fill(self, place: Path, events: int, payload_bytes: int) -> None:
        settings = Settings(journal=Journal(file_bytes=JOURNAL_FILE_BYTES))
        async with penstock.connect(place, settings=settings) as bus:
            for first in range(0, events, BATCH_EVENTS):
                self._progress("publish", first, events)
                rows = rows_of(first, min(BATCH_EVENTS, events - first), payload_bytes)
                topic = TOPICS[first // BATCH_EVENTS % len(TOPICS)]
                await bus.publish_many(topic, rows)
            await sealed(bus)

    def read(self, events: int, **options: str) -> DataFrame:
        """The log of so many events through the source."""
        return self.spark.read.format("penstock").options(url=self.log(events), **options).load()

    def bare(self, events: int, **options: str) -> DataFrame:
        """As many rows as `read` gives, of the same columns, without reading them."""
        from penstock.bench.spark.bare import BareSource

        self.spark.dataSource.register(BareSource)
        return (
            self.spark.read.format("penstock-bare").options(url=self.log(events), **options).load()
        )

    def twin(self, events: int) -> str:
        """The same rows, all columns, as Parquet files that Spark wrote its own way."""
        place = self.folder / f"twin-{events}"
        if not place.exists():
            self._progress("copy to Parquet", 0, 1)
            each = -(-events // TWIN_FILES)
            self.read(events, eventsPerTask=str(each)).write.parquet(str(place))
        return str(place)

    def rows_in_memory(self, count: int) -> DataFrame:
        """Rows that the sink takes, cached, so that making them is not measured."""
        frame = self.spark.range(
            0, count, 1, self.spark.sparkContext.defaultParallelism
        ).selectExpr(
            "CAST(CAST(id AS STRING) AS BINARY) AS key",
            f"timestamp_micros({FIRST_US} + id * {APART_US}) AS event_time",
            "CAST(rpad(CAST(hash(id) AS STRING), 100, CAST(xxhash64(id) AS STRING)) AS BINARY) AS payload",
        )
        frame = frame.persist()
        frame.count()
        return frame


def rows_of(first: int, count: int, payload_bytes: int) -> pa.Table:
    """Events with keys, event times and payloads that no compressor makes small.

    >>> rows_of(0, 2, 100).num_rows
    2
    """
    numbers = np.arange(first, first + count)
    ends: Any = np.arange(count + 1, dtype=np.int32) * payload_bytes
    payloads = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(os.urandom(count * payload_bytes))]
    )  # fmt: skip
    times = pa.array(FIRST_US + numbers * APART_US).cast(pa.timestamp("us", "UTC"))
    keys = pa.array(numbers % 100_000).cast(pa.string()).cast(pa.binary())
    return pa.table({"payload": payloads, "key": keys, "event_time": times})


def timed(work: Callable[[], object], rows: int) -> Sample:
    """One piece of work that goes through so many rows."""
    with Meter(0) as meter:
        began = time.perf_counter()
        work()
        meter.add(time.perf_counter() - began, rows)
    return meter.sample()

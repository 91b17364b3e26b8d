"""How fast the source reads, beside Spark's own Parquet source on the same rows."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.cases.workload import expect
from penstock.bench.measure import Meter, Sample
from penstock.bench.process import command_of, forget_peak, memory_mb, parents, tree
from penstock.bench.result import OURS
from penstock.bench.spark.case import Side
from penstock.bench.spark.stage import Stage, timed
from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

PARQUET = "parquet"
BARE = "bare"  # the source, but for the reading
POLL_S = 0.05
BATCHES = 6
LARGE_BYTES = 1_000  # payloads of the memory case: as many bytes in fewer rows


def source(stage: Stage, rows: int) -> Mapping[str, Side]:
    """Every column of every row, as a stream that goes nowhere."""
    return _streams(stage, rows, "", lambda frame: frame)


def source_event(stage: Stage, rows: int) -> Mapping[str, Side]:
    """What most queries ask of an event: where it is, when it happened, its key and its payload."""
    names = ("offset", "event_time", "key", "payload")
    return _streams(stage, rows, ",".join(names), lambda frame: frame.select(*names))


def window_count(stage: Stage, rows: int) -> Mapping[str, Side]:
    """One column of eleven, counted by minute, as a stream with a watermark."""
    from pyspark.sql import functions as sql

    def counted(frame: DataFrame) -> DataFrame:
        timed = frame.select("event_time").withWatermark("event_time", "1 minute")
        return timed.groupBy(sql.window("event_time", "1 minute")).count()

    return _streams(stage, rows, "event_time", counted)


def source_once(stage: Stage, rows: int) -> Mapping[str, Side]:
    """Every column of every row, in one batch."""
    twin = stage.twin(rows)
    return {
        OURS: lambda turn: timed(lambda: _nowhere(stage.read(rows)), rows),
        BARE: lambda turn: timed(lambda: _nowhere(stage.bare(rows)), rows),
        PARQUET: lambda turn: timed(lambda: _nowhere(stage.spark.read.parquet(twin)), rows),
    }


def window_count_once(stage: Stage, rows: int) -> Mapping[str, Side]:
    """One column of eleven, counted by minute in one batch; both sides must count the same."""
    from pyspark.sql import functions as sql

    twin = stage.twin(rows)
    found: dict[object, int] = {}

    def bare(turn: int) -> Sample:
        minutes = sql.window("event_time", "1 minute")
        frame = stage.bare(rows, columns="event_time").groupBy(minutes).count()
        found: list[Row] = []
        sample = timed(lambda: found.extend(frame.collect()), rows)
        expect(sum(each["count"] for each in found), rows, "in windows")
        return sample

    def count(frame: DataFrame) -> None:
        minutes = frame.groupBy(sql.window("event_time", "1 minute")).count().collect()
        counted = {each["window"]["start"]: each["count"] for each in minutes}
        expect(sum(counted.values()), rows, "in windows")
        if found and counted != found:
            raise PenstockError("two sides count differently: the figure would mean nothing")
        found.update(counted)

    return {
        OURS: lambda turn: timed(lambda: count(stage.read(rows, columns="event_time")), rows),
        BARE: bare,
        PARQUET: lambda turn: timed(lambda: count(stage.spark.read.parquet(twin)), rows),
    }


def _streams(
    stage: Stage, rows: int, columns: str, query: Callable[[DataFrame], DataFrame]
) -> Mapping[str, Side]:
    """A query over the log and over its twin, both in so many batches of the same size."""
    twin, log, spark = stage.twin(rows), stage.log(rows), stage.spark
    files = len(list(Path(twin).glob("*.parquet")))

    def ours(turn: int) -> Sample:
        options = {"url": log, "columns": columns, "maxEventsPerTrigger": str(-(-rows // BATCHES))}
        return _steady(query(spark.readStream.format("penstock").options(**options).load()), stage, rows)  # fmt: skip

    def parquet(turn: int) -> Sample:
        reader = spark.readStream.schema(spark.read.parquet(twin).schema)
        reader = reader.option("maxFilesPerTrigger", -(-files // BATCHES))
        return _steady(query(reader.parquet(twin)), stage, rows)

    return {OURS: ours, PARQUET: parquet}


def _steady(frame: DataFrame, stage: Stage, rows: int) -> Sample:
    """Run a stream over all there is; the figures are of the batches after the first."""
    place = stage.folder / "checkpoints" / str(time.monotonic_ns())
    with Meter(0) as meter:
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(place))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    batches = [each for each in query.recentProgress if each.numInputRows]
    expect(sum(each.numInputRows for each in batches), rows, "read by the stream")
    for each in batches[1:]:
        meter.add(each.durationMs["triggerExecution"] / 1000, each.numInputRows)
    spent_s = sum(each.durationMs["triggerExecution"] for each in batches[1:]) / 1000
    sample = meter.sample(batches=len(batches), whole_s=meter.wall_s)
    return dataclasses.replace(sample, per_s=meter.events / spent_s)


def worker_memory(stage: Stage, rows: int) -> Mapping[str, Side]:
    """What a Python worker takes at most while events of a thousand bytes go through it."""
    log = stage.log(rows, LARGE_BYTES)
    spark = stage.spark

    def ours(turn: int) -> Sample:
        watch = _PeakMemory()
        frame = spark.read.format("penstock").options(url=log).load()
        with watch:
            sample = timed(lambda: _nowhere(frame), rows)
        expect(frame.select("offset").count(), rows, "read")
        return dataclasses.replace(sample, extra=watch.figures())

    return {OURS: ours}


class _PeakMemory:
    """The most that any Python worker below this process held, by its own high-water mark."""

    def __init__(self) -> None:
        self._peaks: dict[int, tuple[float, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        for pid in _workers():
            forget_peak(pid)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            for pid in _workers():
                peak, own = self._peaks.get(pid, (0.0, 0.0))
                self._peaks[pid] = (
                    max(peak, memory_mb(pid)),
                    max(own, memory_mb(pid, "RssAnon")),
                )

    def figures(self) -> dict[str, float]:
        if not self._peaks:
            raise PenstockError(f"no Python worker was seen below process {os.getpid()}")
        return {
            "worker_peak_mb": max(peak for peak, _ in self._peaks.values()),
            "worker_own_mb": max(own for _, own in self._peaks.values()),
            "workers": float(len(self._peaks)),
        }


def _workers() -> list[int]:
    """Python workers below this process: Spark forks them off a daemon, whose words they keep."""
    everyone = parents()
    daemons = {pid for pid in tree(os.getpid(), everyone) if "pyspark.daemon" in command_of(pid)}
    return [pid for pid in daemons if everyone.get(pid) in daemons]


def _nowhere(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()

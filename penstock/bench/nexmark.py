"""Nexmark over the bus and over Spark's own Parquet files, in one run, checked against DuckDB.

Each query runs in turn on three sides, in an order that rotates: `penstock` reads the log through
the source; `parquet` reads the same events, payloads still JSON, from Parquet files with Spark's
own source and `from_json`; `typed` reads them from Parquet files that hold typed columns, which is
as little work as reading can be. A result that is not DuckDB's ends the run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

import penstock
from penstock.bench.cases.workload import sealed, sealed_share
from penstock.bench.measure import Meter, Sample, rounded
from penstock.bench.progress import Progress, silent
from penstock.bench.result import OURS, ratio
from penstock.bench.spark.case import spark_result
from penstock.model.errors import InvalidInput, MissingExtra, NotFound, PenstockError
from penstock.model.settings import MIB, Journal, Settings
from penstock.pipelines.nexmark.generator import Events, Generator
from penstock.pipelines.nexmark.payload import bus_columns, publish
from penstock.pipelines.session import check_requirements, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.table import Table

    from penstock.pipelines.nexmark.queries import Query

SIDES = (OURS, "parquet", "typed")
DEFAULT_EVENTS = 1_000_000
DEFAULT_ROUNDS = 3
MAX_ROUNDS = 20
# All events, twice, are in memory while their results are compared: about 1 GB for these.
MAX_EVENTS = 5_000_000
# What an event takes in the journal, about: two and a half files, so that most of it gets sealed
# and the rest is read from the journal, as in a bus that is in use.
EVENT_BYTES = 230
# Files as Spark likes them: one for each core of a small machine.
PARQUET_FILES = 2
DUCKDB = "pip install duckdb"


def run_nexmark(
    queries: Sequence[str] = (),
    *,
    folder: Path,
    events: int = DEFAULT_EVENTS,
    rounds: int = DEFAULT_ROUNDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Run these queries, or all, on every side and return a result for each, as JSON-ready data.

    `folder` gets the log and the files, about 1 kB for each event, and keeps them: give one that
    is deleted afterwards.
    """
    check_requirements()
    if importlib.util.find_spec("duckdb") is None:
        raise MissingExtra(
            f"results are checked with DuckDB, which is not installed. Nothing was started: {DUCKDB}",
            package="duckdb",
            command=DUCKDB,
        )
    from penstock.pipelines.nexmark.queries import QUERIES

    chosen = [_query(QUERIES, name) for name in queries] or list(QUERIES.values())
    if not 1 <= rounds <= MAX_ROUNDS or not 1 <= events <= MAX_EVENTS:
        raise InvalidInput(
            f"rounds are 1 to {MAX_ROUNDS} and events 1 to {MAX_EVENTS:,}, not {rounds} and {events}"
        )
    run = _Run(folder, Generator(events=events, seed=seed), rounds, progress or silent)
    run.prepare()
    for query in chosen:
        run.check(query, len(chosen))
    for number in range(rounds):
        for query in chosen:
            run.turns(query, number, len(chosen))
    return [run.result(query) for query in chosen]


def _query(queries: dict[str, Query], name: str) -> Query:
    if name not in queries:
        raise NotFound(
            f"there is no Nexmark query {name!r} here; there is {', '.join(queries)}", query=name
        )
    return queries[name]


@dataclass
class _Run:
    folder: Path
    generator: Generator
    rounds: int
    progress: Progress
    done: int = 0
    sealed_share: float = 0.0
    samples: dict[tuple[str, str], dict[int, Sample]] = field(default_factory=dict)
    digests: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    load_1m: float = field(default_factory=lambda: os.getloadavg()[0])

    def prepare(self) -> None:
        """Make the events, put them where each side reads them, start Spark and DuckDB."""
        from penstock.pipelines.nexmark.reference import Reference

        self.progress("generate", 0, 1)
        events = self.generator.generate()
        self.counts = {name: table.num_rows for name, table in events._asdict().items()}
        self._write_files(events)
        asyncio.run(self._publish())
        self.progress("start Spark", 0, 1)
        self.spark: SparkSession = spark_session(name="penstock-nexmark")
        self.reference = Reference(events)

    def _write_files(self, events: Events) -> None:
        for name, table in events._asdict().items():
            for side, rows in (("parquet", bus_columns(table)), ("typed", table)):
                place = self.folder / side / name
                place.mkdir(parents=True)
                size = -(-rows.num_rows // PARQUET_FILES)
                for number in range(PARQUET_FILES):
                    part = rows.slice(number * size, size)
                    pq.write_table(part, place / f"{number}.parquet", compression="zstd")

    async def _publish(self) -> None:
        file_bytes = max(MIB, self.generator.events * EVENT_BYTES * 2 // 5)
        settings = Settings(journal=Journal(file_bytes=file_bytes))
        async with penstock.connect(self.folder / "bus", settings=settings) as bus:
            counts = await publish(
                bus,
                self.generator,
                progress=lambda done, total: self.progress("publish", done, total),
            )
            if sum(counts.values()) != sum(self.counts.values()):
                raise PenstockError(f"published {counts} where {self.counts} were made")
            await sealed(bus)
            self.sealed_share = sealed_share(bus)

    # -- running -----------------------------------------------------------------------------------

    def check(self, query: Query, count: int) -> None:
        """Run a query once on each side, unmeasured, and hold every row against DuckDB's."""
        from penstock.pipelines.nexmark.reference import difference, same_rows

        theirs = self.reference.result(query.name)
        for side in SIDES:
            self._tell(f"check {query.name}: {side}", count)
            place = str(self.folder / "results" / f"{query.name}-{side}")
            self._frame(query, side).write.parquet(place)
            ours = pq.read_table(place)
            if not same_rows(ours, theirs):
                raise PenstockError(
                    f"{query.name} over {side} does not give DuckDB's rows: "
                    f"{difference(ours, theirs)}. No figure is reported for a wrong result",
                    query=query.name,
                    side=side,
                )
            # The rows are DuckDB's, so this is what every later run must come to.
            self.digests[query.name] = _digest(self.spark.read.parquet(place))

    def turns(self, query: Query, number: int, count: int) -> None:
        """One measured run on each side."""
        start = number % len(SIDES)
        for side in SIDES[start:] + SIDES[:start]:
            self._tell(f"round {number + 1}: {query.name} {side}", count)
            frame = self._frame(query, side)
            with Meter(0) as meter:
                began = time.perf_counter()
                found = _digest(frame)
                meter.add(time.perf_counter() - began, self._events(query))
            if found != self.digests[query.name]:
                raise PenstockError(
                    f"{query.name} over {side} gave {found} where DuckDB's rows give "
                    f"{self.digests[query.name]} (rows and sums of their hashes)",
                    query=query.name,
                    side=side,
                )
            sample = meter.sample()
            per_core = sample.per_s / max(sample.cpu, 1e-9)
            turns = self.samples.setdefault((query.name, side), {})
            turns[number] = meter.sample(per_s_core=per_core, rows=found[0])

    def _tell(self, text: str, count: int) -> None:
        self.progress(text, self.done, count * len(SIDES) * (self.rounds + 1))
        self.done += 1

    def _events(self, query: Query) -> int:
        return sum(self.counts[name] for name in query.reads)

    def _frame(self, query: Query, side: str) -> DataFrame:
        from penstock.pipelines.nexmark.queries import from_bus, from_payloads

        tables = {}
        for name, columns in query.reads.items():
            if side == OURS:
                tables[name] = from_bus(self.spark.read, str(self.folder / "bus"), name, columns)
                continue
            rows = self.spark.read.parquet(str(self.folder / side / name))
            typed = side == "typed"
            tables[name] = rows.select(*columns) if typed else from_payloads(rows, name, columns)
        return query(tables)

    # -- reporting ---------------------------------------------------------------------------------

    def result(self, query: Query) -> dict[str, Any]:
        """What was measured of a query, in the shape docs/guide/benchmarks.md describes."""
        found = {side: self.samples[query.name, side] for side in SIDES}
        return spark_result(
            f"nexmark-{query.name}",
            query.title,
            found,
            load_1m=self.load_1m,
            events=self._events(query),
            result_rows=self.digests[query.name][0],
            ratio_core={
                side: ratio(found[OURS], found[side], lambda each: each.extra["per_s_core"])
                for side in SIDES[1:]
            },
            sealed_share=rounded(self.sealed_share),
        )


def _digest(frame: DataFrame) -> tuple[int, ...]:
    """Rows, and sums over both halves of a hash of every row: in any order the same.

    Every column of every row is looked at, so no part of the query can be left out.
    """
    from pyspark.sql import functions as f

    each = f.xxhash64(*frame.columns)
    (row,) = (
        frame.select(each.alias("hash"))
        .agg(
            f.count("*"),
            f.coalesce(f.sum(f.col("hash").bitwiseAND(f.lit(0xFFFFFFFF))), f.lit(0)),
            f.coalesce(f.sum(f.shiftrightunsigned("hash", 32)), f.lit(0)),
        )
        .collect()
    )
    return tuple(map(int, row))


def nexmark_table(results: Sequence[dict[str, Any]]) -> Table:
    """All queries for the terminal."""
    from rich.table import Table

    first = results[0]
    table = Table(
        title="nexmark: batch queries over the bus and over Parquet, results equal to DuckDB's",
        caption=(
            f"{first['rounds']} rounds in turns, medians; {first['machine']['cores']} cores, load "
            f"{first['machine']['load_1m']:g}; {first['sealed_share']:.0%} of the log sealed"
        ),
        caption_justify="left",
    )
    table.add_column("query")
    for heading in ("events", "rows", "events/s", "events/s/core", "parquet events/s/core",
                    "typed events/s/core", "to parquet", "to typed"):  # fmt: skip
        table.add_column(heading, justify="right")
    for found in results:
        sides = [found["penstock"], found["peers"]["parquet"], found["peers"]["typed"]]
        table.add_row(
            f"{found['case'].removeprefix('nexmark-')} {found['title']}",
            f"{found['events']:,}",
            f"{found['result_rows']:,}",
            f"{found['penstock']['per_s']:,.0f}",
            *(f"{side['extra']['per_s_core']:,.0f}" for side in sides),
            f"{found['ratio']['parquet']:.2f}x",
            f"{found['ratio']['typed']:.2f}x",
        )
    return table

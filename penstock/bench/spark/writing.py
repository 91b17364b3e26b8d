"""How fast rows get onto a bus and into tables, and how long one event takes through a pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import penstock
from penstock.bench.cases.workload import expect, stored
from penstock.bench.measure import Meter, Sample
from penstock.bench.result import OURS
from penstock.bench.spark.case import Side
from penstock.bench.spark.reading import PARQUET
from penstock.bench.spark.stage import Stage, timed
from penstock.pipelines.builtin.topic_to_table import TABLE
from penstock.pipelines.lakehouse.topics import sync_topics
from penstock.pipelines.lakehouse.warehouse import Warehouse
from penstock.pipelines.pipeline import Input, Pipeline, find
from penstock.pipelines.run import Route, start
from penstock.testing.broker_process import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPIC = "results.made"
GAP_S = 0.05  # between one event's arrival and the next event's start
WARM_EVENTS = 10
EVENT_TIMEOUT_S = 30.0


def sink(stage: Stage, rows: int) -> Mapping[str, Side]:
    """Rows from memory onto a folder's bus as one batch; Spark's Parquet files beside it."""
    frame = stage.rows_in_memory(rows)

    def ours(turn: int) -> Sample:
        place = str(stage.folder / f"sink-{turn}")
        sample = timed(lambda: _save(frame, place), rows)
        expect(asyncio.run(_count(place)), rows, "on the bus")
        return sample

    def parquet(turn: int) -> Sample:
        place = str(stage.folder / f"sink-parquet-{turn}")
        return timed(lambda: frame.write.parquet(place), rows)

    return {OURS: ours, PARQUET: parquet}


def sink_broker(stage: Stage, rows: int) -> Mapping[str, Side]:
    """The same through a broker: every task is one transaction."""
    frame = stage.rows_in_memory(rows)

    def ours(turn: int) -> Sample:
        with BrokerProcess(stage.folder / f"sink-broker-{turn}") as broker:
            url = broker.url()
            sample = timed(lambda: _save(frame, url), rows)
            expect(asyncio.run(_count(url)), rows, "on the bus")
        return sample

    return {OURS: ours}


def _save(frame: DataFrame, url: str) -> None:
    frame.write.format("penstock").options(url=url, topic=TOPIC).mode("append").save()


async def _count(url: str) -> int:
    async with penstock.connect(url) as bus:
        return await stored(bus)


def table(stage: Stage, rows: int) -> Mapping[str, Side]:
    """`topic-to-table` over a log; Spark writing the same rows as Parquet beside it."""
    log, twin = stage.log(rows), stage.twin(rows)
    made = find("topic-to-table")

    def ours(turn: int) -> Sample:
        place = stage.folder / f"table-{turn}"
        with Warehouse(place) as warehouse:
            route = Route(url=log, warehouse=warehouse)

            def run() -> None:
                query = start(made, stage.spark, route, checkpoint=place / "checkpoint", once=True)
                query.awaitTermination()

            sample = timed(run, rows)
            files = warehouse.table(TABLE).files()
        expect(stage.spark.read.parquet(*files).count(), rows, "in the table")
        return sample

    def parquet(turn: int) -> Sample:
        place = str(stage.folder / f"table-parquet-{turn}")
        rows_again = stage.spark.read.parquet(twin)
        return timed(lambda: rows_again.write.parquet(place), rows)

    return {OURS: ours, PARQUET: parquet}


def join(stage: Stage, rows: int) -> Mapping[str, Side]:
    """The sealed segments of a log join a new table by file; nothing is written again."""
    log = stage.log(rows)

    def ours(turn: int) -> Sample:
        joined = 0
        with Warehouse(stage.folder / f"join-{turn}") as warehouse, Meter(0) as meter:
            began = time.perf_counter()
            report = sync_topics(log, warehouse)
            joined = report.rows_joined + report.rows_copied
            meter.add(time.perf_counter() - began, joined)
        return meter.sample(share=joined / rows)

    return {OURS: ours}


# -- one event ---------------------------------------------------------------------------------------


def one_event(stage: Stage, rows: int) -> Mapping[str, Side]:
    """Publish, through a stateless pipeline on Spark, to a subscriber of its results, one by one."""

    def ours(turn: int) -> Sample:
        with BrokerProcess(stage.folder / f"one-event-{turn}") as broker:
            asyncio.run(_make_topics(broker.url()))
            made = Pipeline(
                "echo", _echo, {"events": Input("in.echo", "n BIGINT")}, writes="out.echo"
            )
            query = start(
                made, stage.spark, Route(url=broker.url()),
                checkpoint=stage.folder / f"one-event-checkpoint-{turn}",
            )  # fmt: skip
            try:
                return asyncio.run(_round_trips(broker.url(), rows))
            finally:
                query.stop()

    return {OURS: ours}


def _echo(events: DataFrame) -> DataFrame:
    return events.selectExpr("value.n AS n")


async def _make_topics(url: str) -> None:
    async with penstock.connect(url) as bus:
        await bus.topics.create("in.echo")
        await bus.topics.create("out.echo")


async def _round_trips(url: str, count: int) -> Sample:
    async with penstock.connect(url) as bus:
        arrived: asyncio.Queue[int] = asyncio.Queue()

        @bus.handler("out.echo", group="bench")
        async def take(value: dict[str, int]) -> None:
            arrived.put_nowait(value["n"])

        async def there_and_back(number: int) -> float:
            began = time.perf_counter()
            await bus.publish("in.echo", {"n": number})
            async with asyncio.timeout(EVENT_TIMEOUT_S):
                expect(await arrived.get(), number, "the number that came back")
            return time.perf_counter() - began

        for number in range(WARM_EVENTS):
            await there_and_back(number)
        with Meter(0) as meter:
            for number in range(WARM_EVENTS, WARM_EVENTS + count):
                await asyncio.sleep(GAP_S)
                meter.add(await there_and_back(number))
        return meter.sample()

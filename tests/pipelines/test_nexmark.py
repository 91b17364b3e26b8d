"""Row S9: Nexmark's events are what they should be, and every query gives DuckDB's rows.

A stream holds back what is not final: the windows and sessions of q5, q7 and q11 that end after the
last watermark, the newest bid's time less four seconds. DuckDB's result is cut at that same time
(`closed_ms`), and the watermark is compared with the one that Spark reports. The other queries
hold back nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.bench.cases.workload import sealed, sealed_share
from penstock.bench.nexmark import nexmark_table, run_nexmark
from penstock.bench.report import compare
from penstock.cli.app import run
from penstock.pipelines.nexmark import reference
from penstock.pipelines.nexmark.generator import (
    AUCTION,
    BID,
    CHUNK_EVENTS,
    PERSON,
    Events,
    Generator,
)
from penstock.pipelines.nexmark.payload import TOPICS, json_payloads, publish
from penstock.pipelines.nexmark.queries import QUERIES, WATERMARK_MS, from_bus
from penstock.pipelines.nexmark.reference import Reference, difference, same_rows

STREAMED = [name for name, query in QUERIES.items() if query.mode != "batch"]
HELD_BACK = ("q5", "q7", "q11")
FILES = 2
# A session and eight streams on a machine that others use too.
pytestmark = pytest.mark.timeout(300)
# 40 seconds of event time: several windows of ten, and sessions that end.
GENERATOR = Generator(events=4_000, seed=3, events_per_s=100)


@pytest.fixture(scope="module")
def events() -> Events:
    return GENERATOR.generate()


@pytest.fixture(scope="module")
def files(events: Events, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The events as Parquet files, older events in older files: streams take them in that order."""
    root = tmp_path_factory.mktemp("nexmark")
    for name, table in events._asdict().items():
        size = -(-table.num_rows // FILES)
        (root / name).mkdir()
        for number in range(FILES):
            path = root / name / f"{number}.parquet"
            pq.write_table(table.slice(number * size, size), path)
            os.utime(path, (number + 1, number + 1))
    return root


def assert_same(ours: pa.Table, theirs: pa.Table) -> None:
    assert same_rows(ours, theirs), difference(ours, theirs)


def milliseconds(column: pa.ChunkedArray) -> Any:
    return pc.divide(column.cast(pa.int64()), 1000).to_numpy()


# -- the generator ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_events_again_and_another_one_others() -> None:
    again, other = Generator(events=1_000, seed=5).generate(), Generator(events=1_000, seed=6)
    assert Generator(events=1_000, seed=5).generate() == again
    assert other.generate() != again


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    long = Generator(events=CHUNK_EVENTS + 1_234).generate()
    for count in (7, 1_234, CHUNK_EVENTS + 50):
        for short, whole in zip(Generator(events=count).generate(), long, strict=True):
            assert short.equals(whole.slice(0, short.num_rows))


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_rest_bids() -> None:
    made = Generator(events=CHUNK_EVENTS + 50).generate()
    epochs = made.total // 50
    assert [table.num_rows for table in made] == [epochs, 3 * epochs, 46 * epochs]
    assert [table.schema for table in made] == [PERSON, AUCTION, BID]
    assert not any(column.null_count for table in made for column in table.columns)


def test_few_auctions_bidders_and_sellers_are_hot() -> None:
    made = Generator(events=CHUNK_EVENTS).generate()
    hot = {
        "auction": (pc.mode(made.bids["auction"]), 0),
        "bidder": (pc.mode(made.bids["bidder"]), 1),
        "seller": (pc.mode(made.auctions["seller"]), 0),
    }
    for name, (mode, place) in hot.items():
        assert mode[0]["mode"].as_py() % 100 == place, name
    shares = [
        sum(value % 100 == place for value in column.to_pylist()) / len(column)
        for column, place in (
            (made.bids["auction"], 0), (made.bids["bidder"], 1), (made.auctions["seller"], 0),
        )
    ]  # fmt: skip
    assert shares == [pytest.approx(0.505, abs=0.02), pytest.approx(0.7525, abs=0.02),
                      pytest.approx(0.7525, abs=0.02)]  # fmt: skip


def test_ids_name_what_is_there_or_about_to_come(events: Events) -> None:
    persons, auctions = (
        set(events.persons["id"].to_pylist()),
        set(events.auctions["id"].to_pylist()),
    )
    assert min(persons) == min(auctions) == 1_000
    assert len(persons) == events.persons.num_rows
    assert max(events.bids["auction"].to_pylist()) <= max(auctions) + 10
    assert max(events.bids["bidder"].to_pylist()) <= max(persons) + 10
    prices = events.bids["price"].to_pylist()
    assert 100 <= min(prices) < max(prices) <= 100_000_000


def test_event_time_goes_on_at_the_rate_that_was_asked_for(events: Events) -> None:
    for table in events:
        times = milliseconds(table["date_time"])
        assert (times[1:] >= times[:-1]).all()
    bids = milliseconds(events.bids["date_time"])
    assert bids[-1] - bids[0] == (4_000 - 1 - 4) * 10
    lasting = milliseconds(events.auctions["expires"]) - milliseconds(events.auctions["date_time"])
    assert lasting.min() >= 1


def test_payloads_are_the_rows_as_json(events: Events) -> None:
    for table in events:
        first = table.slice(0, 20)
        for text, row in zip(json_payloads(first).to_pylist(), first.to_pylist(), strict=True):
            del row["date_time"]
            if "expires" in row:
                row["expires"] = int(row["expires"].timestamp() * 1000)
            assert json.loads(text) == row


async def test_publishing_puts_every_event_on_its_topic(tmp_path: Path, events: Events) -> None:
    told: list[tuple[int, int]] = []
    async with penstock.connect(tmp_path / "bus", sealing__enabled=False) as bus:
        counts = await publish(
            bus, GENERATOR, batch_events=500, progress=lambda done, all_: told.append((done, all_))
        )
        assert counts == {topic: getattr(events, name).num_rows for name, topic in TOPICS.items()}
        assert told[-1] == (4_000, 4_000)
        found = [event async for event in bus.replay("nexmark.auction")]
    assert [event.value()["id"] for event in found] == events.auctions["id"].to_pylist()
    assert [event.time_us for event in found] == (
        events.auctions["date_time"].cast(pa.int64()).to_pylist()
    )


# -- the queries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUERIES)
def test_a_batch_gives_duckdbs_rows(name: str, spark: Any, files: Path, events: Events) -> None:
    tables = {each: spark.read.parquet(str(files / each)) for each in events._fields}
    ours = QUERIES[name](tables).toArrow()
    assert ours.num_rows
    assert_same(ours, Reference(events).result(name))


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_gives_duckdbs_rows(name: str, spark: Any, files: Path, events: Events) -> None:
    query = QUERIES[name]
    streams = {
        each: spark.readStream.schema(table.limit(0).schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(files / each))
        for each in query.reads
        if (table := spark.read.parquet(str(files / each)))
    }
    assert_streams(spark, name, streams, events)


def assert_streams(spark: Any, name: str, streams: dict[str, Any], events: Events) -> None:
    """Run a query as a stream over all there is; it gives DuckDB's rows, less what it holds back."""
    query, table = QUERIES[name], f"nexmark_{name}"
    writing = query(streams).writeStream.outputMode(query.mode).format("memory").queryName(table)
    running = writing.trigger(availableNow=True).start()
    running.awaitTermination()
    ours = latest(spark.table(table).toArrow(), query.keys)
    spark.catalog.dropTempView(table)
    whole = Reference(events).result(name)
    if name not in HELD_BACK:
        assert_same(ours, whole)
        return
    closed_ms = int(milliseconds(events.bids["date_time"]).max()) - WATERMARK_MS
    reported = running.lastProgress["eventTime"]["watermark"]
    assert pc.strptime(reported[:19], "%Y-%m-%dT%H:%M:%S", "ms").cast(pa.int64()).as_py() == (
        closed_ms // 1_000 * 1_000
    )
    theirs = Reference(events).result(name, closed_ms=closed_ms)
    assert 0 < theirs.num_rows < whole.num_rows
    assert_same(ours, theirs)


def latest(rows: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """What an update stream has come to: the last row for each key."""
    if not keys:
        return rows
    last = {tuple(row[key] for key in keys): row for row in rows.to_pylist()}
    return pa.Table.from_pylist(list(last.values()), schema=rows.schema)


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_spark_refuses_to_stream_q4(mode: str, spark: Any, files: Path) -> None:
    """The reason why q4 runs as a batch only: when Spark learns it, its mode changes."""
    from pyspark.errors import AnalysisException

    assert QUERIES["q4"].mode == "batch"
    streams = {
        each: spark.readStream.schema(spark.read.parquet(str(files / each)).schema).parquet(
            str(files / each)
        )
        for each in ("auctions", "bids")
    }
    with pytest.raises(AnalysisException):
        QUERIES["q4"](streams).writeStream.outputMode(mode).format("noop").start()


def edges() -> Events:
    """Events on the borders of windows, sessions and auctions, and several that are alike."""
    start_us = GENERATOR.start_ms * 1000

    def at(ms: int) -> int:
        return start_us + ms * 1000

    bids = [  # auction, bidder, price, ms
        (123, 1, 500, 0), (123, 2, 500, 0), (7, 1, 400, 9_999), (7, 1, 450, 9_999),
        (246, 1, 500, 10_000), (7, 3, 100, 19_999), (7, 2, 100, 20_001), (8, 1, 90, 20_000),
        (8, 1, 90, 30_001),
    ]  # fmt: skip
    bid_rows = [
        (auction, bidder, price, "z" if price == 400 else "c", "u", at(ms), f"x{number}")
        for number, (auction, bidder, price, ms) in enumerate(bids)
    ]
    auction_rows = [
        (7, "n", "d", 1, 2, at(9_999), at(19_999), 1, 10, "e"),
        (8, "n", "d", 1, 2, at(20_001), at(30_000), 2, 11, "e"),
        (123, "n", "d", 1, 2, at(0), at(0), 1, 10, "e"),
    ]
    person_rows = [(1, "A", "m", "c", "Bend", "OR", at(9_999), "e"), (2, "B", "m", "c", "Kent", "WA", at(9_998), "e")]  # fmt: skip
    return Events(
        *(
            pa.table([pa.array(column) for column in zip(*rows, strict=True)], names=schema.names)
            .cast(pa.schema([(e.name, pa.int64() if pa.types.is_timestamp(e.type) else e.type) for e in schema]))
            .cast(schema)
            for rows, schema in ((person_rows, PERSON), (auction_rows, AUCTION), (bid_rows, BID))
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", QUERIES)
def test_borders_and_ties_are_the_same_in_both_engines(name: str, spark: Any) -> None:
    made = edges()
    tables = {each: spark.createDataFrame(table) for each, table in made._asdict().items()}
    assert_same(QUERIES[name](tables).toArrow(), Reference(made).result(name))


def test_borders_and_ties_as_reckoned_by_hand() -> None:
    """Not two engines that agree: what the definitions say."""
    found = {name: Reference(edges()).result(name) for name in QUERIES}
    # 7 has 450 and, at its very end, 100; 123 has 500 at the moment it opens and ends; 8 has none.
    assert found["q4"].to_pylist() == [{"category": 10, "final": (450 + 500) // 2}]
    # Two of 500 in the first window; the one at 10,000 is at its end too, and alone in the second.
    highest = Counter(row["extra"] for row in found["q7"].to_pylist())
    assert highest == {"x0": 1, "x1": 1, "x4": 2, "x6": 1, "x8": 1}
    # Exactly ten seconds apart is together, a millisecond more is not.
    sessions = {(row["bidder"], row["bid_count"]) for row in found["q11"].to_pylist()}
    assert sessions == {(1, 5), (1, 1), (2, 1), (3, 1)}
    last = {row["extra"] for row in found["q18"].to_pylist()}
    assert last == {"x0", "x1", "x3", "x4", "x5", "x6", "x8"}
    assert [row["id"] for row in found["q8"].to_pylist()] == [1]
    assert found["q2"]["auction"].to_pylist() == [123, 123, 246]


def test_different_rows_are_noticed() -> None:
    one = pa.table({"n": [1, 2, 2], "t": ["a", "b", "b"]})
    assert same_rows(one, one.take(pa.array([2, 0, 1])))
    assert not same_rows(one, one.take(pa.array([0, 0, 1])))  # as many rows, others
    assert not same_rows(one, one.slice(0, 2))
    assert not same_rows(one, one.drop_columns(["t"]))
    assert "only in the first 1" in difference(one, one.slice(0, 2))


# -- over the bus ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same events in a log, some of them sealed: the source reads segments and the journal."""
    folder = tmp_path_factory.mktemp("nexmark") / "bus"
    often = {"sealing__process": False, "journal__roll_after_s": 0.01}

    async def fill() -> None:
        async with penstock.connect(folder, **often) as made:
            # A file is closed by a publish that finds it old enough, however quick the machine is.
            await publish(made, GENERATOR, batch_events=500, progress=lambda *_: time.sleep(0.02))
            await sealed(made)
            assert 0 < sealed_share(made) < 1

    asyncio.run(fill())
    return str(folder)


@pytest.mark.parametrize("name", QUERIES)
def test_a_batch_over_the_bus_gives_duckdbs_rows(name: str, spark: Any, bus: str, events: Events) -> None:  # fmt: skip
    """Row S9: the same events, published and read back through the source."""
    query = QUERIES[name]
    tables = {each: from_bus(spark.read, bus, each, used) for each, used in query.reads.items()}
    ours = query(tables).toArrow()
    assert ours.num_rows
    assert_same(ours, Reference(events).result(name))


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_over_the_bus_gives_duckdbs_rows(name: str, spark: Any, bus: str, events: Events) -> None:  # fmt: skip
    """Row S9: in several batches, so that state, windows and watermarks go over their borders."""
    streams = {
        each: from_bus(spark.readStream.option("maxEventsPerTrigger", 2_000), bus, each, used)
        for each, used in QUERIES[name].reads.items()
    }
    assert_streams(spark, name, streams, events)


def test_the_command_reports_events_a_second_and_core(tmp_path: Path, spark: Any, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Row S9: `penstock bench nexmark --json`; events a second and core, beside Spark's own source."""
    words = ["--json", "bench", "nexmark", "--query", "q2,q8", "--events", "2000", "--rounds", "1"]
    assert run([*words, "--dir", str(tmp_path)]) == 0
    found = {each["case"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(found) == {"nexmark-q2", "nexmark-q8"}
    for result in found.values():
        sides = [result["penstock"], *result["peers"].values()]
        assert all(side["extra"]["per_s_core"] > 0 for side in sides)
        assert set(result["peers"]) == {"parquet", "typed"}
    assert not list(tmp_path.iterdir()), "the log and the files are gone"


def test_the_benchmark_reports_every_side(tmp_path: Path, spark: Any) -> None:
    (result,) = run_nexmark(["q2"], folder=tmp_path, events=3_000, rounds=1)
    assert result["case"] == "nexmark-q2"
    assert result["events"] == 2_760
    assert set(result["peers"]) == set(result["ratio"]) == {"parquet", "typed"}
    assert result["penstock"]["extra"]["per_s_core"] > 0
    assert result["result_rows"] == result["penstock"]["extra"]["rows"]
    assert compare(result, result)["case"] == "nexmark-q2"
    assert nexmark_table([result]).row_count == 1


def test_the_benchmark_reports_no_figure_for_wrong_rows(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.SQL, "q2", "SELECT auction, price + 1 FROM bids WHERE false")
    with pytest.raises(
        penstock.PenstockError, match="q2 over penstock does not give DuckDB's rows"
    ):
        run_nexmark(["q2"], folder=tmp_path, events=3_000, rounds=1)


def test_an_unknown_query_is_named(tmp_path: Path) -> None:
    with pytest.raises(penstock.NotFound, match="q99"):
        run_nexmark(["q99"], folder=tmp_path)
    with pytest.raises(penstock.NotFound, match="q99"):
        Reference(edges()).result("q99")

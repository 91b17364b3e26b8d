"""The Spark source over a folder and a broker: exact rows, exact restarts, clear failures (S1)."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.log.disk import RealDisk
from penstock.log.manifest import Manifest
from penstock.pipelines.pipeline import Input, Pipeline
from penstock.pipelines.progress import Meter
from penstock.pipelines.run import Route, run_batch
from penstock.testing.broker_process import BrokerProcess

MANY = 3_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four topics: sealed and not, of two tenants, with headers, keys and bad payloads."""
    path = tmp_path_factory.mktemp("source") / "data"
    with penstock.connect_sync(
        path, journal__file_bytes=1 << 20, sealing__process=False, journal__roll_after_s=0.1
    ) as bus:
        bus.topics.create("orders.made.v1.acme", partitions=3)
        for start in range(0, MANY, 500):
            numbers = range(start, start + 500)
            bus.publish_many(
                "orders.made.v1.acme",
                [{"n": n, "s": "x" * 300} for n in numbers],
                keys=[f"k{n % 50}" for n in numbers],
            )
        time.sleep(0.2)  # the next publish begins a new file, and the one before is sealed
        bus.publish("orders.made.v1.globex", {"n": 7}, headers={"trace": "t1"})
        bus._thread.wait(bus._target.engine.maintenance.settle())
        bus.publish("orders.made.v1.globex", b"not json")
        bus.publish("plain", "text", event_time=datetime(1970, 1, 1, tzinfo=UTC))
        bus.publish("plain", "text", event_time=datetime(2199, 1, 1, tzinfo=UTC))
    return path


@pytest.fixture(scope="module")
def middle(folder: Path) -> datetime:
    """A time with events before and after it: all but the last four are older."""
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        event = next(iter(bus.replay("orders.made.v1.globex")))
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=event.append_time_us)


@pytest.fixture(scope="module")
def broker(folder: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(folder) as running:
        yield running


@pytest.fixture(params=["folder", "broker"])
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The same events, read from files and through a broker."""
    if request.param == "folder":
        return str(folder)
    broker: BrokerProcess = request.getfixturevalue("broker")
    return broker.url()


def read(spark: Any, url: str, topics: str = "#", **options: Any) -> Any:
    reader = spark.read.format("penstock").option("url", url).option("topics", topics)
    return reader.options(**options).load()


def places(frame: Any) -> Counter[tuple[str, int, int]]:
    return Counter(tuple(row) for row in frame.select("topic", "partition", "offset").collect())


def in_the_log(url: str, pattern: str = "#") -> Counter[tuple[str, int, int]]:
    ro = url if "://" in url else f"{url}?mode=ro"
    with penstock.connect_sync(ro) as bus:
        return Counter(
            (event.topic, event.partition, event.offset) for event in bus.replay(pattern)
        )


def test_every_event_is_one_row_with_everything_it_has(spark, url) -> None:
    frame = read(spark, url)
    assert places(frame) == in_the_log(url)
    row = frame.filter("topic = 'orders.made.v1.globex' AND offset = 0").first()
    assert (row.tenant, bytes(row.payload), row.headers) == ("globex", b'{"n":7}', {"trace": "t1"})
    assert row.key is None
    assert frame.filter("offset = 0 AND topic = 'plain'").first().headers == {}
    assert len(row.id) == 16
    assert abs((datetime.now() - row.append_time).days) < 1
    years = [each.event_time.year for each in frame.filter("topic = 'plain'").collect()]
    assert sorted(years) == [1970, 2199]


def test_columns_that_are_never_null_say_so_and_others_cannot(spark, url) -> None:
    """S1: Spark does not look for nulls where there are none; a schema that forbids real ones is refused."""
    frame = read(
        spark, url, "orders.#", schema="n BIGINT", columns="offset,key,headers,value,fault"
    )
    assert {each.name: each.nullable for each in frame.schema} == {
        "offset": False, "key": True, "headers": False, "value": True, "fault": True
    }  # fmt: skip
    assert frame.filter("offset IS NULL").count() == 0
    reader = spark.read.format("penstock").schema("key BINARY NOT NULL").option("url", url)
    with pytest.raises(Exception, match="column 'key' can be null"):
        reader.load().collect()


def test_a_pipeline_says_which_columns_it_uses(spark, url) -> None:
    """S3: what is not named is not read."""
    made = Pipeline(
        "sizes", lambda events: events, {"events": Input("orders.#", columns="offset,key")}
    )
    assert run_batch(made, spark, Route(url=url)).columns == ["offset", "key"]


def test_patterns_offsets_and_times_choose_what_is_read(spark, url) -> None:
    assert places(read(spark, url, "orders.made.v1.*")) == in_the_log(url, "orders.made.v1.*")
    one = read(spark, url, "plain", start='{"plain": {"0": 1}}')
    assert [row.offset for row in one.collect()] == [1]
    some = read(spark, url, "plain", end='{"plain": {"0": 1}}')
    assert [row.offset for row in some.collect()] == [0]
    assert read(spark, url, start="latest").count() == 0
    assert read(spark, url, start="2h").count() == MANY + 4
    assert read(spark, url, end="2020-01-01T00:00:00Z").count() == 0


def test_times_in_the_middle_cut_a_batch_read(spark, url, middle) -> None:
    """S1: by when events were appended, from there on and up to there."""
    newer = read(spark, url, start=middle.isoformat())
    older = read(spark, url, end=middle.isoformat())
    assert newer.count() == 4
    assert places(older) == in_the_log(url, "orders.made.v1.acme")


def test_typed_values_and_what_does_not_fit(spark, url) -> None:
    frame = read(spark, url, "orders.#", schema="n BIGINT, s STRING")
    total = frame.selectExpr("sum(value.n)", "count(fault)").first()
    assert tuple(total) == (sum(range(MANY)) + 7, 1)
    bad = frame.filter("fault IS NOT NULL").first()
    assert bytes(bad.payload) == b"not json"
    assert "not a JSON object" in bad.fault


def test_only_the_columns_that_are_asked_for_exist(spark, url) -> None:
    frame = read(spark, url, "orders.#", columns="offset,tenant")
    assert frame.columns == ["offset", "tenant"]
    assert frame.groupBy("tenant").count().count() == 2
    chosen = spark.read.format("penstock").schema("topic STRING, value STRUCT<n: BIGINT>")
    values = chosen.option("url", url).option("topics", "orders.#").load()
    assert values.selectExpr("max(value.n)").first()[0] == MANY - 1
    assert read(spark, url, columns="partition").count() == MANY + 4


def test_columns_nobody_asked_for_are_not_decoded(spark, folder, tmp_path, monkeypatch) -> None:
    from penstock.log.segment_reader import SegmentReader
    from penstock.pipelines.plan import Split
    from penstock.pipelines.stores import FolderStore

    asked: set[str] = set()
    real = SegmentReader._some_columns

    def watched(self: Any, index: int, columns: Any) -> Any:
        asked.update(columns)
        return real(self, index, columns)

    monkeypatch.setattr(SegmentReader, "_some_columns", watched)
    store = FolderStore(str(folder))
    try:
        bounds = store.bounds("orders.made.v1.acme")
        split = Split("orders.made.v1.acme", 0, 0, bounds["orders.made.v1.acme", 0][1])
        rows = list(store.rows(split, ["topic", "offset", "event_time"]))
    finally:
        store.close()
    assert sum(each.num_rows for each in rows) == split.stop
    assert asked == {"event_time"}, "some of it is sealed, and one column of it was read"


@pytest.mark.parametrize(
    ("text", "few"),
    [
        ("topic = 'plain'", 1),
        ("tenant = 'globex' AND topic LIKE 'orders%'", 1),
        ("topic IN ('plain') AND offset = 1", 1),
        ("append_time < TIMESTAMP '2020-01-01'", 1),
        ("offset >= 900 AND topic = 'orders.made.v1.acme'", 3),
    ],
)
def test_filters_reach_the_plan(spark, folder, text, few) -> None:
    """Fewer tasks are planned, and the rows are the right ones."""
    plain = read(spark, str(folder), eventsPerTask="500", pushdown="false").filter(text)
    pushed = read(spark, str(folder), eventsPerTask="500").filter(text)
    assert pushed.rdd.getNumPartitions() <= few < plain.rdd.getNumPartitions()
    assert places(pushed) == places(plain)


def test_a_filter_on_append_time_keeps_the_rows_it_is_for(spark, folder, middle) -> None:
    text = f"append_time >= TIMESTAMP '{middle:%Y-%m-%d %H:%M:%S.%f}'"
    plain = read(spark, str(folder), eventsPerTask="500", pushdown="false").filter(text)
    pushed = read(spark, str(folder), eventsPerTask="500").filter(text)
    assert pushed.rdd.getNumPartitions() == 1 < plain.rdd.getNumPartitions()
    assert places(pushed) == places(plain)
    assert places(pushed).total() == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topicz": "x"}, "Did you mean 'topics'"),
        ({"columns": "ofset"}, "no column 'ofset'"),
        ({"start": '{"nobody": {"0": 1}}'}, "not among the topics"),
        ({"start": '{"plain": {"0": 99}}'}, "beyond the end"),
        ({"topics": "not.there"}, "no topic 'not.there'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(spark, folder, options, why) -> None:
    with pytest.raises(Exception, match=why):
        read(spark, str(folder), **options).count()


@pytest.mark.parametrize(
    "schema",
    ["n BIGINT NOT NULL", "a ARRAY<STRUCT<n: BIGINT NOT NULL>>", "s STRUCT<n: INT NOT NULL>"],
)
def test_a_payload_field_can_always_be_missing(spark, folder, schema) -> None:
    with pytest.raises(Exception, match="any field can be missing"):
        read(spark, str(folder), "orders.#", schema=schema).count()


def test_a_schema_of_other_types_is_refused(spark, folder) -> None:
    with pytest.raises(Exception, match="column 'offset' is BIGINT"):
        spark.read.format("penstock").schema("offset STRING").load(str(folder)).count()


# -- streams ---------------------------------------------------------------------------------------


def stream(spark: Any, url: str, topics: str = "#", **options: Any) -> Any:
    reader = spark.readStream.format("penstock").option("url", url).option("topics", topics)
    return reader.options(**options).load()


def run_to_the_end(frame: Any, out: Path, checkpoint: Path) -> Any:
    query = (
        frame.select("topic", "partition", "offset")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(out))
    )
    query.awaitTermination()
    return query


def test_a_stream_takes_what_its_limit_allows_and_ends_where_the_log_did(
    spark, url, tmp_path
) -> None:
    frame = stream(spark, url, maxEventsPerTrigger="1000")
    query = run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
    sizes = [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
    assert sum(sizes) == MANY + 4
    assert max(sizes) <= 1_000 + 5
    assert places(spark.read.parquet(str(tmp_path / "out"))) == in_the_log(url)


def test_a_stream_takes_so_many_bytes_at_a_time(spark, url, tmp_path) -> None:
    """Events of 300 bytes and more, sealed or not, from files and through a broker."""
    frame = stream(spark, url, "orders.#", maxBytesPerTrigger=str(200_000))
    query = run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
    sizes = [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]]
    assert sum(sizes) == MANY + 2
    assert 400 <= max(sizes) <= 700
    assert len(sizes) >= 5


def test_a_restart_goes_on_exactly_with_topics_that_appeared_meanwhile(spark, tmp_path) -> None:
    data, out, checkpoint = (tmp_path / name for name in ("data", "out", "cp"))
    for turn in range(3):
        with penstock.connect_sync(data) as bus:
            bus.publish_many("a", [b"x"] * (turn + 1))
            bus.publish_many(f"new{turn}", [b"y"] * 2)
        run_to_the_end(stream(spark, str(data)), out, checkpoint)
        assert places(spark.read.parquet(str(out))) == in_the_log(str(data))


@pytest.mark.parametrize("kind", ["offsets", "time", "latest"])
def test_a_stream_begins_where_it_is_told(spark, folder, middle, tmp_path, kind) -> None:
    """S1: without a checkpoint; with one it goes on from there, whatever `start` says."""
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    start, first = {
        "offsets": ('{"plain": {"0": 1}}', [("plain", 0, 1)]),
        "time": (middle.isoformat(), [("plain", 0, 0), ("plain", 0, 1)]),
        "latest": ("latest", []),
    }[kind]
    frame = stream(spark, str(data), "plain", start=start)
    for more in ([], [("plain", 0, 2)]):
        if more:
            with penstock.connect_sync(data) as bus:
                bus.publish("plain", "more")
        run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
        out = spark.read.schema("topic STRING, partition INT, offset BIGINT")
        assert places(out.parquet(str(tmp_path / "out"))) == Counter([*first, *more])


def test_a_topic_that_appears_while_a_query_runs_is_read(spark, tmp_path) -> None:
    """S1: by a query that goes on and on, from the topic's first event."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("in.a", [b"x"] * 3)
        seen: list[tuple[str, int]] = []
        query = (
            stream(spark, str(tmp_path / "data"), "in.#").select("topic", "offset")
            .writeStream.foreachBatch(lambda rows, _: seen.extend(map(tuple, rows.collect())))
            .option("checkpointLocation", str(tmp_path / "cp")).start()
        )  # fmt: skip

        def wait_for(count: int) -> None:
            end = time.monotonic() + 240
            while len(seen) < count and time.monotonic() < end and query.isActive:
                time.sleep(0.2)

        try:
            wait_for(3)
            bus.publish_many("in.new", [b"y"] * 2)
            wait_for(5)
        finally:
            query.stop()
    wanted = [("in.a", 0), ("in.a", 1), ("in.a", 2), ("in.new", 0), ("in.new", 1)]
    assert sorted(seen) == wanted, query.exception()


def test_events_later_than_allowed_are_marked_the_same_way_in_every_repetition(
    spark, tmp_path
) -> None:
    """S3: the watermark is in the offsets: the newest event so far less what is allowed."""
    data = tmp_path / "data"
    at = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()

    def publish(*minutes: float) -> None:
        with penstock.connect_sync(data) as bus:
            bus.publish_many(
                "t", [b"x"] * len(minutes),
                event_times=[datetime.fromtimestamp(at + m * 60, UTC) for m in minutes],
            )  # fmt: skip

    found: list[list[bool]] = []

    def note(batch: Any, number: int) -> None:
        found.append([row.late for row in batch.orderBy("event_time").collect()])

    for minutes in [(0, 30, 5), (10, 19.9, 20, 40), (29, 31)]:
        publish(*minutes)
        frame = stream(spark, str(data), lateAfter="10m").select("event_time", "late")
        query = (
            frame.writeStream.foreachBatch(note)
            .option("checkpointLocation", str(tmp_path / "cp"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
    # Watermarks: none, 12:20, 12:30.
    assert found == [[False] * 3, [True, True, False, False], [True, False]]


def test_a_broker_that_is_killed_and_comes_back_stops_no_query(spark, tmp_path) -> None:
    """S1, S2: source and sink wait for it; every event is copied once."""
    with BrokerProcess(tmp_path / "data") as broker:
        url = broker.url()

        def publish(*numbers: int) -> None:
            with penstock.connect_sync(url) as bus:
                bus.publish_many("in.numbers", [str(number).encode() for number in numbers])

        def copied() -> Counter[bytes]:
            with penstock.connect_sync(url) as bus:
                return Counter(event.payload for event in bus.replay("out.#"))

        def arrived(count: int) -> bool:
            end = time.monotonic() + 120
            while copied().total() < count and time.monotonic() < end and query.isActive:
                time.sleep(0.2)
            return copied() == Counter(str(number).encode() for number in range(count))

        publish(*range(50))
        query = (
            stream(spark, url, "in.#", maxEventsPerTrigger="7").select("payload")
            .writeStream.format("penstock").options(url=url, topic="out.copy")
            .option("checkpointLocation", str(tmp_path / "cp")).start()
        )  # fmt: skip
        try:
            assert arrived(50), query.exception()
            for turn in range(1, 4):
                publish(*range(50 * turn, 50 * turn + 50))
                broker.kill()
                time.sleep(turn)
                broker.start()
                assert arrived(50 * turn + 50), query.exception()
        finally:
            query.stop()


def test_a_checkpoint_of_another_bus_is_refused_by_folder_and_broker(spark, tmp_path) -> None:
    """S1: the topics are the same; through a broker or not, the first bus stays the first."""
    for name, count in (("one", 5), ("other", 9)):
        with penstock.connect_sync(tmp_path / name) as bus:
            bus.publish_many("a", [b"x"] * count)

    def read(url: str) -> None:
        run_to_the_end(stream(spark, url), tmp_path / "out", tmp_path / "cp")

    read(str(tmp_path / "one"))
    with BrokerProcess(tmp_path / "one") as one, BrokerProcess(tmp_path / "other") as other:
        for url in (str(tmp_path / "other"), other.url()):
            with pytest.raises(Exception, match="belongs to another bus"):
                read(url)
        with penstock.connect_sync(one.url()) as bus:
            bus.publish("a", b"y")
        read(one.url())
    assert spark.read.parquet(str(tmp_path / "out")).count() == 6


def test_a_checkpoint_of_another_query_is_refused(spark, tmp_path) -> None:
    """S1: of the same bus, whose topics have as many events."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        for topic in ("a", "b"):
            bus.publish_many(topic, [b"x"] * 5)
    url, out, checkpoint = str(tmp_path / "data"), tmp_path / "out", tmp_path / "cp"
    run_to_the_end(stream(spark, url, "a"), out, checkpoint)
    with pytest.raises(Exception, match="of a query that reads 'a', and this one reads 'b'"):
        run_to_the_end(stream(spark, url, "b"), out, checkpoint)
    run_to_the_end(stream(spark, url, "a"), out, checkpoint)
    assert places(spark.read.parquet(str(out))) == in_the_log(url, "a")


@pytest.mark.parametrize(
    ("choice", "more"),
    [("fail", {}), ("skip", {}), ("skip", {"lateAfter": "10m", "maxBytesPerTrigger": "2000000"})],
)
def test_offsets_that_retention_took_fail_the_query_or_are_skipped(
    spark, tmp_path, caplog, choice, more
) -> None:
    """S1: what is skipped is told to whoever runs the query, once, and counted in its progress."""
    data = tmp_path / "data"
    small = {"journal__file_bytes": 1 << 20, "sealing__process": False, "sealing__grace_s": 0.0}
    with penstock.connect_sync(data, **small) as bus:
        bus.publish_many("a", [b"x" * 1_000] * 10)
    frame = stream(spark, str(data), onExpired=choice, **more)
    run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
    dice = random.Random(1)
    with penstock.connect_sync(data, retention__max_bytes=1 << 20, **small) as bus:
        for _ in range(5):
            bus.publish_many("a", [dice.randbytes(1_000) for _ in range(1_000)])
        bus._thread.wait(bus._target.engine.maintenance.settle())
        first = bus.topics.info("a").partitions[0].first_offset
    assert first > 20, "retention took what the query had not read"
    if choice == "fail":
        with pytest.raises(Exception, match=r"(?s)is gone: retention kept.*while reading a/0/10"):
            run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
    else:
        query = run_to_the_end(frame, tmp_path / "out", tmp_path / "cp")
        found = places(spark.read.parquet(str(tmp_path / "out")))
        kept = in_the_log(str(data))
        meter = Meter(query)
        meter.look()
        assert meter.skipped_events == first - 10
        told = [each.message for each in caplog.records if each.name == "penstock.pipelines"]
        assert told, "a line of the planner reached the driver's log"
        assert told[0].endswith("is skipped, as onExpired=skip asks for")
        assert " a/0/10.." in told[0]
        assert len(told) == len(set(told))
        assert found == kept | Counter({("a", 0, n): 1 for n in range(10)})


def test_a_damaged_segment_fails_with_its_file_and_events(spark, folder, tmp_path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(folder, copy)
    live = Manifest.load(RealDisk(copy)).segments()  # files of merged segments linger for a while
    segment = copy / max(live, key=lambda info: info.size_bytes).path
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Exception, match=rf"(?s){segment.name}.*fails its checksum.*while reading"):
        read(spark, str(copy), columns="payload").selectExpr("sum(length(payload))").collect()

"""The Spark sink: rows onto a folder or a broker, once, whatever is repeated (S2)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess


@pytest.fixture(params=["folder", "broker"])
def bus_url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    with BrokerProcess(tmp_path / "data") as running:
        yield running.url()


def stored(url: str, pattern: str = "#") -> list[penstock.Event]:
    with penstock.connect_sync(url if "://" in url else f"{url}?mode=ro") as bus:
        return list(bus.replay(pattern))


def rows(spark: Any, count: int = 100) -> Any:
    return spark.range(count).selectExpr(
        "concat('out.', id % 3) AS topic",
        "CAST(id AS STRING) AS key",
        "map('from', 'spark') AS headers",
        "timestamp_seconds(id) AS event_time",
        "to_json(struct(id)) AS payload",
    )


def test_a_batch_write_puts_each_row_on_the_topic_it_names(spark, bus_url) -> None:
    rows(spark).write.format("penstock").option("url", bus_url).mode("append").save()
    events = stored(bus_url)
    assert Counter(event.topic for event in events) == {"out.0": 34, "out.1": 33, "out.2": 33}
    seven = next(event for event in events if event.key == b"7")
    assert (seven.topic, seven.payload, seven.headers) == ("out.1", b'{"id":7}', {"from": "spark"})
    assert seven.time.timestamp() == 7


def test_each_row_has_the_codec_it_names(spark, bus_url) -> None:
    """What was read and set aside stays what it was; a codec that is not there is no obstacle."""
    kinds = "CASE id % 3 WHEN 0 THEN 'json' WHEN 1 THEN 'of-a-plugin' END AS codec"
    frame = spark.range(9).selectExpr(
        "'out.mixed' AS topic", kinds, "to_json(struct(id)) AS payload"
    )
    frame.write.format("penstock").options(url=bus_url, codec="msgpack").mode("append").save()
    events = stored(bus_url)
    found = Counter((event.batch.codec, int(event.payload[6:7]) % 3) for event in events)
    assert found == {("json", 0): 3, ("of-a-plugin", 1): 3, ("msgpack", 2): 3}
    with pytest.raises(Exception, match=r"no 'jsn' in penstock\.codecs"):
        frame.write.format("penstock").options(url=bus_url, codec="jsn").mode("append").save()


def test_a_batch_that_was_named_is_written_once(spark, bus_url) -> None:
    for _ in range(2):
        rows(spark, 10).write.format("penstock").options(
            url=bus_url, queryId="nightly", batchId="7"
        ).mode("append").save()
    assert len(stored(bus_url)) == 10
    rows(spark, 10).write.format("penstock").options(
        url=bus_url, queryId="nightly", batchId="8"
    ).mode("append").save()
    assert len(stored(bus_url)) == 20


def test_a_batch_that_fails_half_way_leaves_nothing_in_a_folder(spark, tmp_path) -> None:
    bad = rows(spark, 10).selectExpr(
        "topic", "IF(key = '9', raise_error('broken'), payload) AS payload"
    )
    url = str(tmp_path / "data")
    with pytest.raises(Exception, match="broken"):
        bad.repartition(2).write.format("penstock").option("url", url).mode("append").save()
    rows(spark, 3).write.format("penstock").option("url", url).mode("append").save()
    assert len(stored(url)) == 3


SHUFFLE = "spark.sql.shuffle.partitions"


def copied(url: str) -> Counter[int]:
    return Counter(int(event.payload) for event in stored(url, "copy"))


def copy_once(spark: Any, source: Path, url: str, checkpoint: Path, change: dict[str, Any]) -> None:
    """A stream of one batch, shaped by what may be different the next time it is tried."""
    for name, value in change.get("conf", {}).items():
        spark.conf.set(name, value)
    reader = spark.readStream.format("penstock").options(url=str(source), **change.get("read", {}))
    frame = reader.load().selectExpr("payload", "key")
    if "repartition" in change:
        frame = frame.repartition(*change["repartition"])
    broken = "IF(payload = '7', raise_error('broken'), payload) AS payload"
    columns = ["key", broken if change.get("fails") else "payload"]
    if not change.get("each"):
        frame = frame.selectExpr(*columns)
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint))
    if change.get("each"):

        def write(batch: Any, number: int) -> None:
            shuffled = batch.groupBy("key", "payload").count().selectExpr(*columns)
            options = {"url": url, "topic": "copy", "queryId": "q", "batchId": str(number)}
            shuffled.write.format("penstock").options(**options).mode("append").save()

        writer = writer.foreachBatch(write)
    else:
        writer = writer.format("penstock").options(url=url, topic="copy", **change.get("write", {}))
    writer.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"repartition": (6, "key")}, {"repartition": (1, "key")}),
        ({"read": {"eventsPerTask": "1000"}}, {"read": {"eventsPerTask": "60"}}),
        (
            {"repartition": (5,)},
            {"repartition": (3, "payload"), "write": {"maxTransactionBytes": "3000"}},
        ),
        (
            {"each": True, "conf": {"spark.sql.adaptive.enabled": "false", SHUFFLE: "6"}},
            {"each": True, "conf": {"spark.sql.adaptive.enabled": "true", SHUFFLE: "6"}},
        ),
    ],
    ids=["partitions", "events-per-task", "size-of-transactions", "adaptive-execution"],
)
def test_a_batch_that_is_tried_again_in_another_shape_is_there_once(
    spark, bus_url, tmp_path, first, then
) -> None:
    """F1: after an attempt that failed, and after one that was published and not checkpointed."""
    source, checkpoint = tmp_path / "source", tmp_path / "cp"
    before = {name: spark.conf.get(name) for name in ("spark.sql.adaptive.enabled", SHUFFLE)}
    with penstock.connect_sync(source) as bus:
        bus.publish_many(
            "in", [b"%d" % n for n in range(300)], keys=[f"k{n % 11}" for n in range(300)]
        )
    try:
        with pytest.raises(Exception, match="broken"):
            copy_once(spark, source, bus_url, checkpoint, first | {"fails": True})
        if (tmp_path / "data" / "penstock.json").exists():
            assert "copy" not in {event.topic for event in stored(bus_url)}
        copy_once(spark, source, bus_url, checkpoint, then)
        assert copied(bus_url) == Counter(range(300))
        for file in (checkpoint / "commits").iterdir():  # the driver died before it wrote this
            file.unlink()
        copy_once(spark, source, bus_url, checkpoint, first)
        assert copied(bus_url) == Counter(range(300))
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


DRIVER = """
import os, sys
from pathlib import Path
os.environ["FAILPOINT_ROOT"] = str(os.getpid())
from penstock.pipelines.session import spark_session
from tests.pipelines.test_sink import copy_once
cores, source, url, checkpoint = sys.argv[1:]
spark = spark_session(master=f"local[{cores}]")
copy_once(spark, Path(source), url, Path(checkpoint), {"repartition": ("key",)})
spark.stop()
"""


def test_another_number_of_cores_loses_and_doubles_nothing(tmp_path) -> None:
    """F1: killed when some tasks were done and others not, and started again with fewer cores."""
    with penstock.connect_sync(tmp_path / "source") as bus:
        bus.publish_many(
            "in", [b"%d" % n for n in range(300)], keys=[f"k{n % 11}" for n in range(300)]
        )
    with BrokerProcess(tmp_path / "data") as running:
        for cores, failpoint in (("6", "sink.task-done"), ("1", "")):
            words = [sys.executable, "-c", DRIVER, cores, tmp_path / "source", running.url()]
            done = subprocess.run(
                [*map(str, words), str(tmp_path / "cp")],
                env={**os.environ, "FAILPOINT": failpoint},
                cwd=Path(__file__).parents[2],
                check=False,
                timeout=500,
            )
            assert (done.returncode == 0) == (failpoint == "")
        assert copied(running.url()) == Counter(range(300))


def test_a_stream_copies_every_event_once(spark, bus_url, tmp_path) -> None:
    source = tmp_path / "source"
    total = 0
    for turn in range(3):
        with penstock.connect_sync(source) as bus:
            bus.publish_many("in", [b"%d" % n for n in range(total, total + 40)])
        total += 40
        query = (
            spark.readStream.format("penstock").options(url=str(source), maxEventsPerTrigger="25")
            .load().selectExpr("payload", "key").writeStream.format("penstock")
            .options(url=bus_url, topic="copy", checkpointLocation=str(tmp_path / "cp"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        found = sorted(int(event.payload) for event in stored(bus_url))
        assert found == list(range(total)), f"turn {turn}"
    assert not list((tmp_path / "data").glob("staging/*")), "tasks leave no files behind"


@pytest.mark.parametrize(
    ("select", "options", "why"),
    [
        (["key"], {"topic": "t"}, "need a `payload` column"),
        (["payload"], {}, "need a `topic` column"),
        (["payload", "1 AS n"], {"topic": "t"}, "does not know the column 'n'"),
        (["payload"], {"topik": "t"}, "Did you mean 'topic'"),
        (["CAST(NULL AS STRING) AS payload"], {"topic": "t"}, "null payload"),
        (["payload", "IF(key = '1', NULL, topic) AS topic"], {}, "rows have no topic"),
        (["payload"], {"topic": "a..b"}, "a..b"),
        (["payload"], {"topic": "t", "queryId": "q"}, "together"),
    ],
)
def test_rows_that_cannot_be_events_are_refused_and_nothing_is_stored(
    spark, tmp_path, select, options, why
) -> None:
    url = str(tmp_path / "data")
    writer = rows(spark, 3).selectExpr(*select).write.format("penstock")
    with pytest.raises(Exception, match=why):
        writer.options(url=url, **options).mode("append").save()
    if (tmp_path / "data" / "penstock.json").exists():
        assert stored(url) == []


def test_a_folder_that_somebody_else_writes_is_refused_by_name(spark, tmp_path) -> None:
    with (
        penstock.connect_sync(tmp_path / "data"),
        pytest.raises(Exception, match=r"storage\.locked"),
    ):
        rows(spark, 3).write.format("penstock").options(url=str(tmp_path / "data")).mode(
            "append"
        ).save()

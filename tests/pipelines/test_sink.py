"""The Spark sink: rows onto a folder or a broker, once, whatever is repeated (S2)."""

from __future__ import annotations

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
        return [event._target for event in bus.replay(pattern)]


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

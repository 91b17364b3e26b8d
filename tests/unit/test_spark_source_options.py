"""What a read through Spark is told: where it begins, which topics, how much, in Kafka's words too (F3, F8, F10, F11).

The planner is called as Spark calls it, without Java.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

import penstock
from penstock.model.errors import InvalidInput, NotADataFolder, PenstockError, UnknownTopic
from penstock.pipelines.plan import Place
from penstock.pipelines.source import PenstockSource

SCHEMA = StructType([StructField("offset", LongType(), False)])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.topics.create("a", partitions=2)
        for partition in (0, 1):
            bus.publish_many("a", [b"old"] * 4, partition=partition)
        time.sleep(0.01)
        later = time.time()
        time.sleep(0.01)
        bus.publish_many("a", [b"new"] * 3, partition=1)
        bus.publish_many("b", [b"x"] * 5)
        bus.publish_many("c", [b"x"] * 6)
    (tmp_path / "later").write_text(str(later))
    return str(tmp_path / "data")


def begins(folder: str, **options: str) -> dict[str, Any]:
    """Where a stream begins, by topic and partition."""
    reader = PenstockSource({"url": folder, **options}).streamReader(SCHEMA)
    topics: dict[str, Any] = reader.initialOffset()["topics"]
    return topics


def ends(folder: str, **options: str) -> dict[str, Any]:
    """How far its first batch goes."""
    reader = PenstockSource({"url": folder, **options}).streamReader(SCHEMA)
    found = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    topics: dict[str, Any] = found["topics"]
    return topics


def test_negative_offsets_mean_what_they_mean_in_kafka(folder: str) -> None:
    """F3: -1 is the latest and -2 the earliest; they used to mean earliest, all of them."""
    start = json.dumps({"a": {"0": -1, "1": -2}})
    assert begins(folder, topics="a", start=start) == {"a": {"0": 4, "1": 0}}
    for refused in ("-3", '"4"', "true", "1.5", "null"):
        with pytest.raises(InvalidInput, match="offsets are JSON"):
            begins(folder, topics="a", start=f'{{"a": {{"0": {refused}}}}}')


def test_each_partition_can_begin_at_a_time_of_its_own(folder: str) -> None:
    later = float((Path(folder).parent / "later").read_text())
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(later)) + f"{later % 1:.6f}Z"[1:]
    start = json.dumps({"a": {"0": "2h", "1": moment}})
    assert begins(folder, topics="a", start=start) == {"a": {"0": 0, "1": 4}}
    start = json.dumps({"a": {"0": "latest", "1": 2}})
    assert begins(folder, topics="a", start=start) == {"a": {"0": 4, "1": 2}}
    with pytest.raises(PenstockError, match=r"start is .*, not 'soon'"):
        begins(folder, topics="a", start='{"a": {"0": "soon"}}')


def test_several_topics_are_read_by_one_source_and_some_left_out(folder: str) -> None:
    assert set(begins(folder, topics="a, b")) == {"a", "b"}
    assert set(begins(folder, topics="#", exclude="b,c.#")) == {"a"}
    with pytest.raises(UnknownTopic, match="'nope'"):
        begins(folder, topics="a,nope")
    with pytest.raises(InvalidInput, match=r"b\.\.c"):
        begins(folder, topics="a,b..c")


def test_a_topic_that_is_left_out_is_no_lag(folder: str) -> None:
    """F8: a pipeline that writes below what it reads came to no end."""
    reader = PenstockSource({"url": folder, "topics": "#", "exclude": "c"}).streamReader(SCHEMA)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable())["topics"].keys() == {"a", "b"}
    told = reader.reportLatestOffset()
    assert told["topics"].keys() == {"a", "b"}
    assert told["lag"] == 0


def test_the_lag_is_told_with_the_progress_of_a_query(folder: str) -> None:
    reader = PenstockSource({"url": folder, "topics": "b,c", "maxEventsPerTrigger": "4"})
    stream = reader.streamReader(SCHEMA)
    end = stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
    done = sum(Place.from_json(end).offsets.values())
    assert stream.reportLatestOffset()["lag"] == 11 - done > 0


def test_a_checkpoint_of_before_topics_were_left_out_is_taken(folder: str) -> None:
    """F8: its offsets of such topics stay where they are, and nothing of them is read."""
    reader = PenstockSource({"url": folder, "topics": "#", "exclude": "c"}).streamReader(SCHEMA)
    old = Place({("a", 0): 4, ("a", 1): 7, ("b", 0): 1, ("c", 0): 2}, reads="#").as_json()
    end = reader.latestOffset(old, ReadAllAvailable())
    assert [str(part) for task in reader.partitions(old, end) for part in task.parts] == [
        "b/0/1..5"
    ]


def test_kafkas_names_of_options_are_taken(folder: str) -> None:
    kafka = {
        "subscribe": "a,b",
        "startingOffsets": '{"a": {"0": 1, "1": -1}}',
        "maxOffsetsPerTrigger": "1",
        "failOnDataLoss": "false",
    }
    assert begins(folder, **kafka) == {"a": {"0": 1, "1": 7}, "b": {"0": 0}}
    assert ends(folder, **kafka) == {"a": {"0": 2, "1": 7}, "b": {"0": 1}}
    batch = PenstockSource({"url": folder, "subscribe": "b", "endingOffsets": '{"b": {"0": 2}}'})
    [task] = batch.reader(SCHEMA).partitions()
    assert [str(part) for part in task.parts] == ["b/0/0..2"]


def test_a_url_that_is_no_bus_is_named(tmp_path: Path) -> None:
    """F10: a Kafka address was taken for an empty folder, with the advice to choose an empty one."""
    for url in ("localhost:9092", str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(
            NotADataFolder, match=f"nothing to read: '{url}' .* penstock://host:port"
        ):
            begins(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("kafka.bootstrap.servers", "give `url`"),
        ("kafka.group.id", "no Kafka client"),
        ("subscribePattern", "give `topics`, a pattern of words"),
        ("assign", "filter on the column `partition`"),
        ("minPartitions", "`eventsPerTask`"),
        ("startingTimestamp", "give `start` a time"),
        ("startingOffsetsByTimestamp", "a time for each partition"),
        ("includeHeaders", "always there"),
        ("fetchOffset.numRetries", "leave it out"),
        ("kafkaConsumer.pollTimeoutMs", "no Kafka client"),
    ],
)
def test_kafkas_other_options_are_answered_with_ours(folder: str, name: str, answer: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}.*Kafka.*{answer}"):
        PenstockSource({"url": folder, name: "x"}).streamReader(SCHEMA)


def test_two_values_for_one_option_are_refused(folder: str) -> None:
    with pytest.raises(InvalidInput, match="two values for 'start'"):
        begins(folder, start="latest", startingOffsets="earliest")


def test_a_batch_waits_for_enough_events_but_not_for_ever(folder: str) -> None:
    """F11: for at most `maxTriggerDelay`, and not when the query is to end."""
    few = {"url": folder, "topics": "b", "minEventsPerTrigger": "6"}
    waiting = PenstockSource({**few, "maxTriggerDelay": "1h"}).streamReader(SCHEMA)
    start = waiting.initialOffset()
    assert waiting.latestOffset(start, ReadAllAvailable()) == start
    assert waiting.reportLatestOffset()["lag"] == 5
    with penstock.connect_sync(folder) as bus:
        bus.publish("b", b"x")
    assert waiting.latestOffset(start, ReadAllAvailable())["topics"] == {"b": {"0": 6}}

    few["minEventsPerTrigger"] = "7"
    impatient = PenstockSource({**few, "maxTriggerDelay": "1ms"}).streamReader(SCHEMA)
    time.sleep(0.01)
    assert impatient.latestOffset(start, ReadAllAvailable()) != start
    ending = PenstockSource({**few, "maxTriggerDelay": "1h"}).streamReader(SCHEMA)
    ending.prepareForTriggerAvailableNow()
    assert ending.latestOffset(start, ReadAllAvailable()) != start

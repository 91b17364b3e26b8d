"""Plans of reads: offsets only, the same cut every time (S1)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

import penstock
from penstock.log.audit_reader import IDENTITY_DIGITS, read_identity
from penstock.log.disk import RealDisk
from penstock.model.errors import InvalidInput
from penstock.pipelines.failure import relay_warning
from penstock.pipelines.options import offsets_of, sink_options, source_options
from penstock.pipelines.plan import Place, ahead, splits
from penstock.pipelines.source import StreamReader

LANES = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2)), st.integers(0, 500), max_size=6
)


@given(LANES, LANES, st.integers(1, 90))
def test_tasks_cover_every_offset_once_and_are_no_larger_than_asked(start, more, events) -> None:
    lanes = set(start) | set(more)
    begin = Place({lane: start.get(lane, 0) for lane in lanes})
    until = Place({lane: begin.offsets[lane] + more.get(lane, 0) for lane in lanes})
    tasks = splits(begin, until, events)
    assert tasks == splits(begin, until, events)
    covered = [
        (part.topic, part.partition, offset)
        for task in tasks
        for part in task
        for offset in range(part.start, part.stop)
    ]
    assert len(covered) == len(set(covered)) == sum(more.values())
    assert all(sum(part.stop - part.start for part in task) <= events for task in tasks)


@given(LANES, st.integers(1, 1_000))
def test_a_limit_is_kept_as_far_as_every_partition_gets_on(ends, limit) -> None:
    bounds = {lane: (0, end) for lane, end in ends.items()}
    reached = ahead({}, bounds, limit).offsets
    waiting = sum(end > 0 for end in ends.values())
    assert sum(reached.values()) <= max(limit, 0) + waiting
    assert all(reached[lane] > 0 for lane, end in ends.items() if end)
    assert all(reached[lane] <= end for lane, end in ends.items())


def test_a_partition_that_appears_begins_at_its_first_event_in_every_repetition() -> None:
    begin = Place({("a", 0): 5})
    until = ahead(begin.offsets, {("a", 0): (0, 9), ("b", 0): (3, 7)}, None)
    again = Place.from_json(json.loads(json.dumps(until.as_json())))
    assert again == until
    assert [[str(part) for part in task] for task in splits(begin, again, 100)] == [
        ["a/0/5..9", "b/0/3..7"]
    ]


@pytest.mark.parametrize("found", [{}, {"penstock": 2, "topics": {}}, {"kafka": {"0": 1}}])
def test_a_checkpoint_of_another_source_is_refused(found) -> None:
    with pytest.raises(InvalidInput, match="another query"):
        Place.from_json(found)


def test_a_place_says_which_topics_its_query_reads() -> None:
    place = Place({("a.b", 0): 5}, reads="a.*")
    again = Place.from_json(json.loads(json.dumps(place.as_json())))
    assert again == place
    again.check_reads("a.*")
    with pytest.raises(InvalidInput, match=r"reads 'a\.\*', and this one reads '#'.*another query"):
        again.check_reads("#")


def test_a_place_written_before_that_was_kept_is_judged_by_its_topics() -> None:
    place = Place.from_json({"penstock": 1, "topics": {"a": {"0": 5}}})
    place.check_reads("a")
    place.check_reads("#")
    with pytest.raises(InvalidInput, match="reads 'a', and this one reads 'b'"):
        place.check_reads("b")


def test_a_stream_refuses_the_place_of_another_query_and_of_another_bus(tmp_path) -> None:
    """S1: with the first batch, and with one that a crash left planned."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("a", [b"x"] * 5)
        bus.publish_many("b", [b"x"] * 9)
    with penstock.connect_sync(tmp_path / "other") as bus:
        bus.publish("c", b"x")
    ours, theirs = (reader(tmp_path / "data", topics) for topics in ("b", "a"))
    place = theirs.latestOffset(theirs.initialOffset(), ReadAllAvailable())
    with pytest.raises(InvalidInput, match="reads 'a', and this one reads 'b'"):
        ours.latestOffset(place, ReadAllAvailable())
    with pytest.raises(InvalidInput, match="reads 'a', and this one reads 'b'"):
        ours.partitions(place, place)
    del place["bus"]  # as before buses had an identity
    with pytest.raises(InvalidInput, match=r"is at a/0/5, and .* has no topic that it reads"):
        reader(tmp_path / "other", "a").latestOffset(place, ReadAllAvailable())
    with penstock.connect_sync(tmp_path / "other") as bus:
        bus.publish("a", b"x")
    with pytest.raises(InvalidInput, match=r"is at a/0/5, and the log ends at 1"):
        reader(tmp_path / "other", "a").latestOffset(place, ReadAllAvailable())


def test_a_place_on_another_bus_is_refused_however_many_events_that_has(tmp_path) -> None:
    """S1: the topics are the same, so only the identity tells them apart."""
    for name, count in (("one", 5), ("other", 9)):
        with penstock.connect_sync(tmp_path / name) as bus:
            bus.publish_many("a", [b"x"] * count)
    one, other = (reader(tmp_path / name, "a") for name in ("one", "other"))
    place = one.latestOffset(one.initialOffset(), ReadAllAvailable())
    for refused in (one.initialOffset(), place):
        with pytest.raises(InvalidInput, match="it belongs to another bus") as caught:
            other.latestOffset(refused, ReadAllAvailable())
        assert caught.value.checkpoint_bus == one.store().identity()
        assert caught.value.bus == other.store().identity()
    with pytest.raises(InvalidInput, match="it belongs to another bus"):
        other.partitions(place, place)  # which a crash left planned


def test_a_place_of_before_buses_had_an_identity_is_taken_and_gets_one(tmp_path) -> None:
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("a", [b"x"] * 5)
    ours = reader(tmp_path / "data", "a")
    old = Place({("a", 0): 3}, reads="a").as_json()
    assert "bus" not in old
    end = ours.latestOffset(old, ReadAllAvailable())
    assert Place.from_json(end).bus == ours.store().identity() != ""
    assert len(ours.partitions(old, end)) == 1


def test_a_bus_that_does_not_say_which_it_is_loses_no_identity(tmp_path, monkeypatch) -> None:
    """S1: an older broker in between is trusted, and the one behind it is looked at again."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("a", [b"x"] * 5)
    ours = reader(tmp_path / "data", "a")
    monkeypatch.setattr(ours.store(), "identity", lambda: "")
    place = Place({("a", 0): 3}, reads="a", bus="3b6a27bcceb6a42d")
    end = ours.latestOffset(place.as_json(), ReadAllAvailable())
    assert Place.from_json(end).bus == place.bus


def test_a_folder_keeps_its_identity_and_its_copy_has_it_too(tmp_path) -> None:
    found = set()
    for _ in range(2):
        with penstock.connect_sync(tmp_path / "data") as bus:
            bus.publish("a", b"x")
        found.add(read_identity(RealDisk(tmp_path / "data")))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    found.add(read_identity(RealDisk(tmp_path / "copy")))
    [identity] = found
    assert len(identity) == IDENTITY_DIGITS
    (tmp_path / "copy" / "audit" / "key.pub").unlink()
    assert read_identity(RealDisk(tmp_path / "copy")) == ""


def test_what_retention_took_is_told_once_and_counted_only_if_it_is_skipped(
    tmp_path, capfd, monkeypatch
) -> None:
    """S1: by the planner, which knows the bounds, in a line that the driver finds."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("a", [b"x"] * 9)
    for choice, skipped in (("fail", 0), ("skip", 4)):
        planner = reader(tmp_path / "data", "a", onExpired=choice, maxEventsPerTrigger="5")
        monkeypatch.setattr(planner.store(), "bounds", lambda _: {("a", 0): (7, 9)})
        start = Place({("a", 0): 3}, reads="a").as_json()
        end = planner.latestOffset(start, planner.getDefaultReadLimit())
        bus = planner.store().identity()
        assert Place.from_json(end) == Place({("a", 0): 8}, reads="a", skipped=skipped, bus=bus)
        for _ in range(2):
            assert len(planner.partitions(start, end)) == 1
        told = capfd.readouterr().err
        wanted = (
            "penstock warning: retention took 4 events before they were read: a/0/3..7 is skipped"
        )
        assert told.count("retention took") == bool(skipped)
        assert not skipped or told.startswith(wanted)


def test_warnings_of_the_planner_are_found_among_what_java_prints(caplog) -> None:
    assert relay_warning("penstock warning: a/0/3..7 is skipped")
    assert not relay_warning("26/11/16 WARN Utils: a word of Spark's")
    assert [(each.name, each.message) for each in caplog.records] == [
        ("penstock.pipelines", "a/0/3..7 is skipped")
    ]


def test_of_two_limits_the_smaller_one_counts(tmp_path) -> None:
    """S1: events of 1,000 bytes and a little."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("a", [b"x" * 1_000] * 100)

    def batch(events: int, size: int) -> int:
        limits = {"maxEventsPerTrigger": str(events), "maxBytesPerTrigger": str(size)}
        planner = reader(tmp_path / "data", "a", **limits)
        end = planner.latestOffset(planner.initialOffset(), planner.getDefaultReadLimit())
        return Place.from_json(end).offsets["a", 0]

    assert batch(7, 50_000) == 7
    assert 15 <= batch(70, 20_000) <= 20
    assert batch(1_000, 10_000_000) == 100
    everything = reader(tmp_path / "data", "a", maxEventsPerTrigger="7", maxBytesPerTrigger="1")
    end = everything.latestOffset(everything.initialOffset(), ReadAllAvailable())
    assert Place.from_json(end).offsets["a", 0] == 100, (
        "a trigger that takes all is told so by Spark"
    )


def reader(folder: Path, topics: str = "#", **options: str) -> StreamReader:
    """A stream's planner, which Spark runs in a process of its own."""
    given = {"url": str(folder), "topics": topics, **options}
    schema = StructType([StructField("offset", LongType(), False)])
    return StreamReader(source_options(given), schema)


def test_an_unknown_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInput, match=r"no option 'startt'\. Did you mean 'start'"):
        source_options({"url": "data", "startt": "latest"})
    with pytest.raises(InvalidInput, match=r"no option 'topics'\. Did you mean 'topic'"):
        sink_options({"url": "data", "topics": "orders"})
    with pytest.raises(InvalidInput, match=r"Did you mean 'eventsPerTask'"):  # as Spark tells it
        source_options({"url": "data", "eventspertasks": "5"})


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("maxEventsPerTrigger", "0", "maxEventsPerTrigger is a whole number of 1 or more, not '0'"),
        ("eventspertask", "many", "eventsPerTask is a whole number of 1 or more, not 'many'"),
        ("eventsPerTask", "2.5", "eventsPerTask is a whole number"),
        ("maxBytesPerTrigger", "some", "maxBytesPerTrigger is an amount of bytes .*, not 'some'"),
        ("onExpired", "ignore", "onExpired is one of fail, skip"),
        ("lateAfter", "soon", "lateAfter is a duration .*, not 'soon'"),
        ("maxTriggerDelay", "nan", "maxTriggerDelay is a duration .*, not 'nan'"),
        ("topics", "a..b", "a..b"),
        ("pushdown", "perhaps", "true, false"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_allowed(name, text, why) -> None:
    with pytest.raises(InvalidInput, match=why):
        source_options({"url": "data", name: text})


def test_options_are_found_whatever_their_case_and_the_path_is_the_url() -> None:
    found = source_options({"PATH": "file:/data", "MAXEVENTSPERTRIGGER": "5", "columns": "key, id"})
    assert (found.url, found.max_events_per_trigger) == ("/data", 5)
    assert found.columns == ("key", "id")
    assert (
        source_options({"url": "d", "maxBytesPerTrigger": "1MiB"}).max_bytes_per_trigger == 1 << 20
    )
    with pytest.raises(InvalidInput, match="where is the bus"):
        source_options({"topics": "#"})


def test_offsets_are_read_from_json_or_refused() -> None:
    assert offsets_of('{"a": {"1": 4}}') == {("a", 1): 4}
    with pytest.raises(InvalidInput, match="offsets are JSON"):
        offsets_of('{"a": 5}')

"""What callers may write for a value, and what becomes of it: the same on every engine (A5 to A12, D6)."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import penstock
from penstock import errors
from penstock.model import settings
from penstock.testing.broker_process import BrokerProcess

ENGINES = ("memory", "folder", "broker")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data").start() as process:
        yield process


@pytest.fixture(params=ENGINES)
async def bus(
    request: pytest.FixtureRequest, tmp_path: Path, broker: BrokerProcess
) -> AsyncIterator[penstock.Bus]:
    url = {"memory": "mem:", "folder": str(tmp_path / "data"), "broker": broker.url()}[
        request.param
    ]
    async with penstock.connect(url) as bus:
        yield bus


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"values.{abs(hash(request.node.name)):x}"


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0.2, "200ms", "0.2", timedelta(milliseconds=200)])
async def test_a_duration_is_seconds_text_or_a_timedelta(
    bus: penstock.Bus, topic: str, span: Any
) -> None:
    """A6: in the API as in the command line and the settings."""
    await bus.publish(topic, b"later", delay_s=span, ttl_s="1h")
    retry = penstock.Retry(ladder_ms=("100ms", timedelta(seconds=1), 10), max_attempts=4)
    async with bus.subscribe(topic, group=topic, lease_s="30s", retry=retry) as sub:
        event = await sub.get(timeout_s="30s")
        assert event is not None
        await event.extend("2m")
        await event.nack(span, reason="again")
        again = await sub.get(timeout_s=timedelta(seconds=30))
        assert again is not None
        assert again.attempt == 2
        await sub.nack([again], "50ms")
        third = await sub.get(timeout_s=30)
        assert third is not None
        await third.ack()


async def test_retention_is_given_as_people_write_it(bus: penstock.Bus, topic: str) -> None:
    """A6: durations and sizes of topics."""
    info = await bus.topics.create(topic, retention_age_s="7d", retention_bytes="1GB")
    assert (info.retention_age_s, info.retention_bytes) == (604_800.0, 10**9)
    info = await bus.topics.configure(topic, retention_age_s=timedelta(days=1))
    assert (info.retention_age_s, info.retention_bytes) == (86_400.0, 10**9)


@pytest.mark.parametrize("span", [5, 5.0, "5s", "5", "5000ms", timedelta(seconds=5)])
def test_settings_take_durations_as_calls_do(span: Any) -> None:
    """A6: one converter, for the keywords of `connect` and for the groups themselves."""
    assert penstock.connect("mem:", delivery__lease_s=span).settings.delivery.lease_s == 5.0
    assert settings.Delivery(lease_s=span).lease_s == 5.0
    ladder = ("250ms", timedelta(seconds=1), 10)
    bus = penstock.connect("mem:", delivery__ladder_ms=ladder, journal__file_bytes="64MiB")
    assert bus.settings.delivery.ladder_ms == (250, 1_000, 10)
    assert bus.settings.journal == settings.Journal(file_bytes="64MiB")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "span", [math.nan, math.inf, -1, "soon", True, b"5s", timedelta.max, object]
)
def test_a_setting_that_is_no_duration_is_named(span: Any) -> None:
    """A6: by its name, with what is allowed."""
    with pytest.raises(
        errors.InvalidSettings, match=r"delivery\.lease_s: .* give more than 0 to 1 d"
    ):
        penstock.connect("mem:", delivery__lease_s=span)
    with pytest.raises(errors.InvalidSettings, match=r"Delivery\.lease_s"):
        settings.Delivery(lease_s=span)


# -- leases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [math.nan, math.inf, 1e30, -1, "soon", True])
async def test_a_wrong_delay_leaves_the_event_in_hand(
    bus: penstock.Bus, topic: str, span: Any
) -> None:
    """A3, A5: what is refused has not touched the lease, and the writer goes on."""
    await bus.publish(topic, b"1")
    async with bus.subscribe(topic, group=topic, retry=penstock.Retry.none()) as sub:
        event = await sub.get(timeout_s=30)
        assert event is not None
        with pytest.raises(errors.InvalidInput, match="delay_s is a duration"):
            await event.nack(span)
        with pytest.raises(errors.InvalidInput, match="delay_s is a duration"):
            await sub.nack([event], span)
        with pytest.raises(errors.InvalidInput, match="seconds is a duration"):
            await event.extend(span)
        await event.ack()
        await bus.flush()
    assert (await bus.groups.info(topic)).lag == 0


async def test_a_filter_is_of_text(bus: penstock.Bus, topic: str) -> None:
    """A4: one that no event could pass is refused, not taken."""
    with pytest.raises(errors.InvalidInput, match=r"filter\['region'\] is text"):
        bus.subscribe(topic, group=topic, filter={"region": 1})  # type: ignore[dict-item]
    assert topic not in [group.name for group in await bus.groups.list()]


async def test_a_topic_that_a_broker_could_not_show_is_never_made(
    bus: penstock.Bus, topic: str
) -> None:
    """A2: retention before now broke every list of topics, and could not be deleted."""
    with pytest.raises(errors.InvalidInput, match="retention_age_s is a duration"):
        await bus.topics.create(topic, retention_age_s=-1)
    assert topic not in [each.name for each in await bus.topics.list()]


# -- times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [datetime(2026, 1, 1), date(2026, 1, 1), "2026-01-01", "2026-01-01T00:00:00", "@1767225600"],
)
async def test_a_time_without_a_zone_is_in_utc(bus: penstock.Bus, topic: str, moment: Any) -> None:
    """A7: one rule for event times, replays, groups, delays and the audit trail."""
    await bus.publish(topic, b"1", event_time=moment, deliver_at=None)
    [event] = [each async for each in bus.replay(topic, since=moment)]
    assert event.time == datetime(2026, 1, 1, tzinfo=UTC)
    assert [each async for each in bus.replay(topic, until=moment)] == []
    async with bus.subscribe(topic, group=topic, start=moment) as sub:
        assert await sub.get(timeout_s=30) is not None
    await bus.groups.reset(topic, moment, confirm="RESET")
    receipt = await bus.publish(topic, b"2", deliver_at=moment)  # it is due already
    assert receipt.scheduled
    await bus.audit.query(since=moment, until="1s")


@pytest.mark.parametrize("number", [0, 42, 1_767_225_600, 1.5, "42"])
async def test_a_number_is_no_time_and_no_place(bus: penstock.Bus, topic: str, number: Any) -> None:
    """A7: it meant microseconds, an offset or seconds; the refusal names what is meant by each."""
    await bus.publish(topic, b"1")
    for refused in (
        bus.publish(topic, b"2", event_time=number),
        bus.publish(topic, b"2", deliver_at=number),
        bus.groups.reset("g", number, confirm="RESET"),
        bus.audit.query(since=number),
        anext(bus.replay(topic, since=number)),
    ):
        with pytest.raises(
            errors.InvalidInput, match="a plain number could be an offset or a time"
        ):
            await refused
    with pytest.raises(errors.InvalidInput, match="offset:42"):
        bus.subscribe(topic, group="g", start=number)


async def test_an_offset_has_one_form(bus: penstock.Bus, topic: str) -> None:
    """A7: "offset:2" wherever a place in a log is given."""
    await bus.publish_many(topic, [b"0", b"1", b"2", b"3"])
    async with bus.subscribe(topic, group=topic, start="offset:2", mode="log") as sub:
        event = await sub.get(timeout_s=30)
        assert event is not None
        assert event.payload == b"2"
    await bus.groups.reset(topic, "offset:1", confirm="RESET")
    assert (await bus.groups.info(topic)).lag == 3


# -- payloads --------------------------------------------------------------------------------------


class Order(msgspec.Struct):
    """A set in a field with a type is read back as one."""

    tags: set[str]
    weight: float = 1.0
    note: str | None = None


@dataclasses.dataclass
class Parcel:
    """The same for a dataclass."""

    order: Order
    sizes: list[int]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_a_set_is_stored_only_where_it_comes_back(
    bus: penstock.Bus, topic: str, codec: str
) -> None:
    """A8: a set in plain data would be read as a list."""
    for value, path in (({"tags": {"a"}}, r"\$\.tags"), ([1, {2}], r"\$\[1\]"), ({"a": None, "b": [{1}]}, r"\$\.b\[0\]")):  # fmt: skip
        with pytest.raises(errors.EncodeFailed, match=path):
            await bus.publish(topic, value, codec=codec)
        with pytest.raises(errors.EncodeFailed, match=r"\$\[1\]"):
            await bus.publish_many(topic, [{"fine": [1, None]}, value], codec=codec)
    parcel = Parcel(Order({"a", "b"}), [1, 2])
    await bus.publish(topic, parcel, codec=codec)
    await bus.publish_many(topic, [parcel, parcel], codec=codec)
    found = [event.value(Parcel) async for event in bus.replay(topic)]
    assert found == [parcel] * 3


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_json_stores_no_number_that_it_does_not_have(
    bus: penstock.Bus, topic: str, number: float
) -> None:
    """A8: it would be read back as null."""
    for value in (number, {"a": [1, number]}, [None, {"b": number}], Order({"a"}, number), Parcel(Order(set(), number), [])):  # fmt: skip
        with pytest.raises(errors.EncodeFailed, match="JSON has no nan and no infinity"):
            await bus.publish(topic, value)
        with pytest.raises(errors.EncodeFailed, match="JSON has no nan and no infinity"):
            await bus.publish_many(topic, [1, value])
    await bus.publish(topic, {"a": None, "b": [None, 1.5, "null"]})
    await bus.publish(topic, {"a": number}, codec="msgpack")
    first, second = [event.value() async for event in bus.replay(topic)]
    assert first == {"a": None, "b": [None, 1.5, "null"]}
    assert repr(second) == repr({"a": number})


# -- many events -----------------------------------------------------------------------------------


def columns() -> list[Any]:
    return [[b"a", b"b"], pa.table({"payload": ["a", "b"]})]


@pytest.mark.parametrize("values", columns(), ids=["list", "table"])
async def test_lists_beside_a_table_are_heeded_as_beside_a_list(
    bus: penstock.Bus, topic: str, values: Any
) -> None:
    """A9: keys of idempotency, event times, priorities and the time to live."""
    labels = {
        "idempotency_keys": [f"{topic}-1", f"{topic}-2"],
        "event_times": ["2026-01-01", None],
        "priorities": [3, 0],
        "ttl_s": "1h",
    }
    first = await bus.publish_many(topic, values, **labels)
    again = await bus.publish_many(topic, values, **labels)
    assert (first.duplicate, again.duplicate, again.ids()) == (False, True, first.ids())
    events = [event async for event in bus.replay(topic)]
    assert [event.payload for event in events] == [b"a", b"b"]
    assert [event.priority for event in events] == [3, 0]
    assert events[0].time == datetime(2026, 1, 1, tzinfo=UTC)
    assert datetime.now(UTC) - events[1].time < timedelta(hours=1), "without a time it is now"
    assert all(event.expires_us for event in events)


@pytest.mark.parametrize("values", columns(), ids=["list", "table"])
async def test_many_events_can_be_delayed(bus: penstock.Bus, topic: str, values: Any) -> None:
    """A9: as one event can."""
    receipt = await bus.publish_many(topic, values, delay_s="100ms", priorities=[1, 2], ttl_s="1h")
    assert (receipt.scheduled, receipt.count) == (True, 2)
    receipt = await bus.publish_many(topic, values, deliver_at=datetime.now(UTC))
    assert receipt.scheduled
    async with bus.subscribe(topic, group=topic) as sub:
        found = []
        for _ in range(4):
            event = await sub.get(timeout_s=30)
            assert event is not None
            found.append(event.payload)
            await event.ack()
    assert sorted(found) == [b"a", b"a", b"b", b"b"]


async def test_what_contradicts_itself_is_refused(bus: penstock.Bus, topic: str) -> None:
    """A9: nothing that a caller passes is dropped in silence."""
    two = [b"a", b"b"]
    with pytest.raises(errors.InvalidInput, match="tokens or idempotency keys, not both"):
        await bus.publish_many(topic, two, tokens=[bytes(16)] * 2, idempotency_keys=["a", "b"])
    with pytest.raises(errors.InvalidInput, match="delay_s or deliver_at, not both"):
        await bus.publish_many(topic, two, delay_s=1, deliver_at="2030-01-01")
    table = pa.table({"payload": ["a"], "event_time": pa.array([0], pa.timestamp("us"))})
    with pytest.raises(errors.InvalidBatch, match="event_time column"):
        await bus.publish_many(topic, table, event_times=["2026-01-01"])
    for name in ("keys", "headers", "idempotency_keys", "event_times", "priorities"):
        with pytest.raises(errors.InvalidBatch, match=f"{name} has 1 values for 2 events"):
            await bus.publish_many(topic, two, **{name: [None]})


# -- connecting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["media__codec", "media__compressor"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_that_is_not_installed_is_missed_when_connecting(
    tmp_path: Path, broker: BrokerProcess, engine: str, option: str
) -> None:
    """A10: over a broker as in memory."""
    url = {"memory": "mem:", "folder": str(tmp_path / "data"), "broker": broker.url()}[engine]
    with pytest.raises(errors.MissingPart, match="nosuch"):
        penstock.connect(url, **{option: "nosuch"})


def test_a_foreign_variable_is_told_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A11: what Kubernetes sets for a service is not even told."""
    monkeypatch.setenv("PENSTOCK_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.7:5557")
    monkeypatch.setenv("PENSTOCK_VALUES_NOSUCH", "1")
    for _ in range(3):
        penstock.connect("mem:")
    told = [record.getMessage() for record in caplog.records if record.name == "penstock.settings"]
    assert len(told) == 1
    assert "PENSTOCK_VALUES_NOSUCH" in told[0]


@pytest.mark.parametrize("mode", ["", "?mode=ro"])
@pytest.mark.parametrize("below", ["file", "file/below", "x" * 300])
async def test_a_place_that_can_be_no_folder(tmp_path: Path, below: str, mode: str) -> None:
    """A12: with an error of the tree that says what to do."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(errors.NotADataFolder, match="Name a folder"):
        async with penstock.connect(f"{tmp_path / below}{mode}"):
            pass


async def test_the_advice_for_a_broken_description_works(tmp_path: Path) -> None:
    """A12: what the error says to write is JSON."""
    async with penstock.connect(tmp_path) as bus:
        await bus.publish("values.kept", b"1")
    about = tmp_path / "penstock.json"
    about.write_text("broken")
    with pytest.raises(errors.Corrupted) as caught:
        await penstock.connect(tmp_path).open()
    advice = caught.value.message
    about.write_text(advice[advice.index("{") : advice.index("}") + 1])
    async with penstock.connect(tmp_path) as bus:
        assert [event.payload async for event in bus.replay("values.kept")] == [b"1"]


# -- answers ---------------------------------------------------------------------------------------


async def test_topics_count_their_events_and_audit_results_are_what_they_say(
    bus: penstock.Bus, topic: str
) -> None:
    """D6: `events` as in the command line and over HTTP; truths are True and False."""
    await bus.publish_many(topic, [b"1", b"2"])
    info = await bus.topics.info(topic)
    assert isinstance(info, penstock.TopicInfo)
    assert info.events == 2
    route = penstock.Route(f"{topic}.#", topic, "group")
    await bus.routes.put(route)
    await bus.routes.disable(route.pattern, route.destination)
    await bus.topics.configure(topic, write_once=False)
    await asyncio.sleep(0)
    records = await bus.audit.query(since="1h")
    assert all(isinstance(record, penstock.AuditRecord) for record in records)
    results = {record.operation: record.result for record in records if topic in record.targets[0]}
    assert results["route.put"]["enabled"] is True
    assert results["route.disable"]["enabled"] is False
    assert results["topic.configure"]["write_once"] is False
    await bus.routes.remove(route.pattern, route.destination, confirm="REMOVE")

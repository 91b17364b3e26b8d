"""Every limit: one tenant reaches it and is told which, it is counted, and another tenant notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.model.errors import (
    Deferred,
    Dropped,
    InvalidInput,
    PenstockError,
    Rejected,
    ReplayLimited,
    RetentionFull,
    Throttled,
)
from penstock.testing.broker_process import BrokerProcess

TENANTS = {
    "events": {"events_per_s": 100},
    "bytes": {"bytes_per_s": 1_000},
    "storage": {"storage_bytes": 2_000},
    "ingress": {"max_ingress": 10},
    "queue": {"max_queued": 5},
    "replays": {"replays_per_minute": 2},
}
FLAGS: dict[str, Any] = {
    "admission__tenants": json.dumps(TENANTS),
    "admission__max_per_topic_queue": 5,
    "limits__max_scheduled": 20,
    "limits__max_batch_events": 50_000,
    "journal__file_bytes": 1 << 20,
    "sealing__grace_s": 0,
}


class Site:
    """A broker, and clients of its tenants."""

    def __init__(self, process: BrokerProcess, stack: contextlib.AsyncExitStack) -> None:
        self.process = process
        self._stack = stack

    async def client(self, tenant: str) -> penstock.Bus:
        bus = penstock.connect(self.process.url(), identity__tenant=tenant)
        return await self._stack.enter_async_context(bus)

    async def open(self, something: Any) -> Any:
        return await self._stack.enter_async_context(something)

    async def refusals(self, kind: str, limit: str) -> dict[str, float]:
        """How often each tenant was refused."""
        url = f"http://127.0.0.1:{self.process.ports['http']}/metrics"
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(url)).text
        return {
            sample.labels["tenant"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "penstock_refused_publishes_total"
            and (sample.labels["kind"], sample.labels["limit"]) == (kind, limit)
        }


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    process = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start, **FLAGS)
    try:
        async with contextlib.AsyncExitStack() as stack:
            yield Site(process, stack)
    finally:
        await asyncio.to_thread(process.stop)


async def _events(site: Site, bus: penstock.Bus, topic: str) -> None:
    for _ in range(3):  # the third is over the rate however slow this machine is
        await bus.publish_many(topic, [b"x"] * 100)


async def _bytes(site: Site, bus: penstock.Bus, topic: str) -> None:
    for _ in range(3):
        await bus.publish(topic, bytes(1_000))


async def _storage(site: Site, bus: penstock.Bus, topic: str) -> None:
    for _ in range(3):
        await bus.publish(topic, bytes(800))


async def _queue(site: Site, bus: penstock.Bus, topic: str) -> None:
    await site.open(bus.subscribe(topic, group=f"direct.{topic}", max_inflight=1))
    for _ in range(40):
        await bus.publish(topic, b"x")


async def _replays(site: Site, bus: penstock.Bus, topic: str) -> None:
    await bus.publish(topic, b"x")
    for _ in range(4):
        async for _event in bus.replay(topic):
            pass


async def _write_once(site: Site, bus: penstock.Bus, topic: str) -> None:
    await bus.topics.create(topic, write_once=True, retention_bytes=10_000)
    for _ in range(400):
        await bus.publish(topic, random.randbytes(1 << 16))
        await asyncio.sleep(0.02)


async def _scheduled(site: Site, bus: penstock.Bus, topic: str) -> None:
    for _ in range(21):
        await bus.publish(topic, b"x", delay_s=3_600)


class Case(NamedTuple):
    """One way to reach a limit."""

    tenant: str
    act: Callable[[Site, penstock.Bus, str], Awaitable[None]]
    error: type[Rejected]
    limit: str
    setting: str
    kind: str


def own(tenant: str, limit: str) -> str:
    return f"admission.tenants.{tenant}.{limit}"


def batch(size: int, payload: int = 1) -> Callable[[Site, penstock.Bus, str], Awaitable[None]]:
    async def act(site: Site, bus: penstock.Bus, topic: str) -> None:
        await bus.publish_many(topic, [bytes(payload)] * size)

    return act


CASES = {
    "events_per_s": Case("events", _events, Throttled, "events_per_s", own("events", "events_per_s"), "throttled"),
    "events burst": Case("events", batch(101), Dropped, "events_per_s", own("events", "events_per_s"), "dropped"),
    "bytes_per_s": Case("bytes", _bytes, Throttled, "bytes_per_s", own("bytes", "bytes_per_s"), "throttled"),
    "bytes burst": Case("bytes", batch(2, 501), Dropped, "bytes_per_s", own("bytes", "bytes_per_s"), "dropped"),
    "storage_bytes": Case("storage", _storage, Throttled, "storage_bytes", own("storage", "storage_bytes"), "throttled"),
    "more than storage": Case("storage", batch(1, 2_001), Dropped, "storage_bytes", own("storage", "storage_bytes"), "dropped"),
    "max_ingress": Case("ingress", batch(11), Dropped, "max_ingress", own("ingress", "max_ingress"), "dropped"),
    "max_queued": Case("queue", _queue, Deferred, "max_queued", own("queue", "max_queued"), "deferred"),
    "max_per_topic_queue": Case("plain", _queue, Deferred, "max_per_topic_queue", "admission.max_per_topic_queue", "deferred"),
    "replays_per_minute": Case("replays", _replays, ReplayLimited, "replays_per_minute", own("replays", "replays_per_minute"), "replay-limited"),
    "retention_bytes": Case("once", _write_once, RetentionFull, "topic_max_bytes", "retention_bytes of the topic", "retention-full"),
    "max_scheduled": Case("later", _scheduled, Deferred, "max_scheduled", "limits.max_scheduled", "deferred"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_a_limit_binds_whom_it_is_for_and_says_so(site: Site, name: str) -> None:
    """C1, C2: a typed error with the setting; counted for that tenant; another publishes meanwhile."""
    case = CASES[name]
    bus, other = await site.client(case.tenant), await site.client("other")
    topic = f"orders.created.v1.{case.tenant}"
    done = asyncio.Event()
    heard: list[PenstockError] = []

    async def publish_on() -> int:
        count = 0
        while not done.is_set() or count < 3:
            try:
                await other.publish("orders.created.v1.other", {"n": count})
            except PenstockError as error:
                heard.append(error)
            count += 1
            await asyncio.sleep(0.01)
        return count

    beside = asyncio.create_task(publish_on())
    try:
        with pytest.raises(case.error) as refused:
            await case.act(site, bus, topic)
    finally:
        done.set()
        await beside
    data = refused.value.data
    assert (data["limit"], data["setting"]) == (case.limit, case.setting)
    assert case.setting in refused.value.message
    assert "nothing was stored" in refused.value.message.lower()
    assert not heard
    counted = await site.refusals(case.kind, case.limit)
    assert counted.get(case.tenant, 0) > 0, counted
    assert "other" not in counted


@pytest.mark.parametrize("url", ["mem:", "folder"])
async def test_a_full_write_once_topic_refuses_only_its_own_publishes(
    tmp_path: Path, url: str
) -> None:
    """C1: by its own limit or by the folder's, and it takes events again when the limit is raised."""
    flags: dict[str, Any] = {"journal__file_bytes": 1 << 20, "sealing__grace_s": 0}
    async with penstock.connect("mem:" if url == "mem:" else tmp_path, **flags) as bus:
        await bus.topics.create("kept", write_once=True, retention_bytes=10_000)
        with pytest.raises(RetentionFull, match="retention_bytes of the topic = 10000"):
            for _ in range(400):
                await bus.publish("kept", random.randbytes(1 << 16))
                await asyncio.sleep(0.02)
        await bus.publish("others", b"x")
        await bus.publish("others", b"x", delay_s=60)
        with pytest.raises(RetentionFull):
            async with bus.transaction() as transaction:
                transaction.publish("others", b"x")
                transaction.publish("kept", b"x")
        await bus.topics.configure("kept", retention_bytes=1 << 30)
        async with asyncio.timeout(30):
            while True:
                try:
                    await bus.publish("kept", b"x")
                    break
                except RetentionFull:
                    await asyncio.sleep(0.05)


async def test_a_folder_full_of_write_once_events_refuses_only_more_of_them(tmp_path: Path) -> None:
    """C1: `retention.max_bytes` binds the topics whose events may not be deleted."""
    flags: dict[str, Any] = {
        "journal__file_bytes": 1 << 20, "sealing__grace_s": 0, "retention__max_bytes": 3 << 20,
    }  # fmt: skip
    async with penstock.connect(tmp_path, **flags) as bus:
        await bus.topics.create("kept", write_once=True)
        with pytest.raises(RetentionFull) as refused:
            for _ in range(400):
                await bus.publish("kept", random.randbytes(1 << 16))
                await asyncio.sleep(0.02)
        assert refused.value.data["setting"] == "retention.max_bytes"
        await bus.publish("others", b"x")


BOUNDS: dict[str, tuple[int, str, Callable[[penstock.Bus], Awaitable[Any]]]] = {
    "max_payload_bytes": (1_000, "too-large", lambda bus: bus.publish("t", bytes(1_001))),
    "max_headers": (2, "headers", lambda bus: bus.publish("t", b"", headers=dict.fromkeys("abc", ""))),
    "max_headers_bytes": (9, "headers", lambda bus: bus.publish("t", b"", headers={"a": "b" * 9})),
    "max_key_bytes": (8, "invalid", lambda bus: bus.publish("t", b"", key="k" * 9)),
    "max_batch_events": (10, "batch", lambda bus: bus.publish_many("t", [b""] * 11)),
}  # fmt: skip


@pytest.mark.parametrize("count", [11, 200])
async def test_a_bound_on_one_thing_names_its_setting_and_is_counted(
    tmp_path: Path, count: int
) -> None:
    """C1: `limits.*` of a broker, whatever its clients have; a client's own say the same."""
    settings = {f"limits__{name}": value for name, (value, _, _) in BOUNDS.items()}
    process = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start, **settings)
    try:
        async with contextlib.AsyncExitStack() as stack:
            site = Site(process, stack)
            theirs = await site.client("acme")
            own = await stack.enter_async_context(penstock.connect("mem:", **settings))
            for name, (value, kind, act) in BOUNDS.items():
                for bus in (theirs, own):
                    with pytest.raises(InvalidInput, match=f"limits.{name}") as refused:
                        await act(bus)
                    data = refused.value.data
                    assert (data["setting"], data["value"]) == (f"limits.{name}", value)
                assert await site.refusals(kind, name) == {"acme": 1}, name
            with pytest.raises(InvalidInput, match="max_batch_events"):
                await theirs.publish_many("t", [b""] * count)
            await theirs.publish("t", b"")
    finally:
        await asyncio.to_thread(process.stop)


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_one_client_too_many_is_told_the_setting_and_counted(
    tmp_path: Path, transport: str
) -> None:
    """C1: those that are connected go on."""
    process = BrokerProcess(tmp_path / "data")
    await asyncio.to_thread(process.start, server__max_connections=2)
    try:
        async with contextlib.AsyncExitStack() as stack:
            site = Site(process, stack)
            first, _ = await site.client("acme"), await site.client("acme")
            with pytest.raises(PenstockError, match=r"server\.max_connections"):
                async with penstock.connect(process.url(transport), client__deadline_s=2):
                    pass
            await first.publish("t", b"")
            assert sum((await site.refusals("deferred", "max_connections")).values()) > 0
    finally:
        await asyncio.to_thread(process.stop)


async def test_a_batch_that_never_fits_is_never_told_to_wait(site: Site) -> None:
    """C2: not even while smaller batches of its tenant are; it is told how large it may be, and that fits."""
    bus = await site.client("events")
    topic = "orders.created.v1.events"
    waits = 0
    for _ in range(20):
        with contextlib.suppress(Throttled):
            await bus.publish_many(topic, [b"x"] * 50)
            continue
        waits += 1
        with pytest.raises(Dropped, match="at most 100 events at once") as refused:
            await bus.publish_many(topic, [b"x"] * 150)
        assert refused.value.data["most"] == 100
        assert refused.value.retry_after_s == 0
    assert waits
    async with asyncio.timeout(60):
        while True:
            try:
                await bus.publish_many(topic, [b"x"] * 100)
                break
            except Throttled as error:
                await asyncio.sleep(error.retry_after_s)


@pytest.mark.parametrize(
    ("flag", "value", "most"),
    [("events_per_s", 100, 100), ("bytes_per_s", 1_000, 1_000)],
)
async def test_a_batch_over_its_burst_is_refused_for_good(
    tmp_path: Path, flag: str, value: int, most: int
) -> None:
    """C2: on a folder as over a broker, by events and by bytes."""
    tenants = json.dumps({"default": {flag: value}})
    async with penstock.connect(tmp_path, admission__tenants=tenants) as bus:
        payload = b"x" if flag == "events_per_s" else bytes(10)
        with pytest.raises(Dropped) as refused:
            await bus.publish_many("orders", [payload] * 101)
        assert refused.value.data["most"] == most
        assert refused.value.data["setting"] == f"admission.tenants.default.{flag}"
        await bus.publish_many("orders", [payload] * 100)

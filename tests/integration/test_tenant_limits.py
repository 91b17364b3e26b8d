"""Row T11 in a running broker: what a tenant's consumers hold together, and what waits for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.core.admission import AdmissionLimits, TenantLimits
from penstock.engines.embedded.publisher import Bundle
from penstock.server.broker import tenant_infos
from penstock.server.daemon import Daemon
from penstock.server.metrics.engine_stats import quotas
from penstock.server.transports import zeromq
from penstock.testing.broker_process import BrokerProcess, broker_inside
from penstock.wire.message import Hello

DEADLINE_S = 20.0


class Place:
    """A broker in this process, and clients of it that end with the test."""

    def __init__(self, daemon: Daemon, stack: AsyncExitStack) -> None:
        self.daemon = daemon
        self._stack = stack

    async def connect(self, tenant: str) -> penstock.Bus:
        url = f"penstock://127.0.0.1:{self.daemon.ports['tcp']}"
        bus = penstock.connect(url, identity__tenant=tenant)
        return await self._stack.enter_async_context(bus)

    async def consumer(self, bus: penstock.Bus, topic: str, group: str, **more: Any) -> Any:
        return await bus.subscribe(topic, group=group, **more).open()

    def limit(self, **tenants: TenantLimits) -> None:
        self.daemon.engine.admission.reload(AdmissionLimits(tenants=tenants))

    def held(self) -> int:
        """What all members hold, by their groups' machines and not by the window."""
        groups = self.daemon.engine.dispatcher.groups.values()
        return sum(member.inflight for group in groups for member in group.members.values())

    async def holds(self, count: int) -> None:
        """Wait until the consumers hold so much, and see that it stays so."""
        async with asyncio.timeout(DEADLINE_S):
            while self.held() != count:
                await asyncio.sleep(0.005)
        await self.daemon.engine.flush()
        assert self.held() == count

    def ratio(self, tenant: str, quota: str) -> float:
        [found] = [
            each.ratio
            for each in quotas(self.daemon.engine)
            if (each.tenant, each.quota) == (tenant, quota)
        ]
        return found


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    try:
        async with AsyncExitStack() as stack:
            yield Place(daemon, stack)
    finally:
        await daemon.stop()


async def test_the_consumers_of_a_tenant_hold_so_much_together(place: Place) -> None:
    """In one group and in several; who waits is served when another settles."""
    place.limit(acme=TenantLimits(max_inflight=10))
    acme, other = await place.connect("acme"), await place.connect("other")
    one = await place.consumer(acme, "orders", "a", max_inflight=8)
    await acme.publish_many("orders", [b"%d" % number for number in range(40)])
    await place.holds(8)
    two = await place.consumer(acme, "orders", "b", max_inflight=8, start="earliest")
    await place.holds(10)
    assert place.ratio("acme", "max_inflight") == 1.0
    free = await place.consumer(other, "orders", "c", max_inflight=100, start="earliest")
    await place.holds(50)
    assert len([await free.get(timeout_s=DEADLINE_S) for _ in range(40)]) == 40
    # Group b had room for two only; what a settles goes to b as well.
    seen = {one: 0, two: 0}
    for feed in (two, two, one, one, one, two, two, two, one, one):
        event = await feed.get(timeout_s=DEADLINE_S)
        assert event is not None
        await event.ack()
        seen[feed] += 1
        await acme.flush()
        await place.holds(50)
    assert seen == {one: 5, two: 5}


async def test_the_limit_of_a_tenant_replaces_that_of_one_consumer(place: Place) -> None:
    place.limit(acme=TenantLimits(max_inflight=1500))
    acme, other = await place.connect("acme"), await place.connect("other")
    await acme.publish_many("orders", [b"x"] * 3000)
    await place.consumer(acme, "orders", "a", max_inflight=2000, start="earliest")
    await place.holds(1500)
    await place.consumer(other, "orders", "b", max_inflight=2000, start="earliest")
    await place.holds(1500 + 1024)


async def test_new_limits_reach_consumers_that_are_there(place: Place) -> None:
    acme = await place.connect("acme")
    events = await place.consumer(acme, "orders", "a", max_inflight=100)
    await acme.publish_many("orders", [b"x"] * 300)
    await place.holds(100)
    place.limit(acme=TenantLimits(max_inflight=30))
    assert place.ratio("acme", "max_inflight") == pytest.approx(100 / 30)
    for _ in range(80):
        await (await events.get(timeout_s=DEADLINE_S)).ack()
    await acme.flush()
    await place.holds(30)
    place.limit(acme=TenantLimits(max_inflight=50))
    await place.holds(50)
    place.limit()
    await place.holds(100)


async def test_what_a_consumer_held_is_given_back_however_it_ends(place: Place) -> None:
    place.limit(acme=TenantLimits(max_inflight=10))
    acme = await place.connect("acme")
    await acme.publish_many("orders", [b"x"] * 40)
    leaves = await place.consumer(acme, "orders", "leaves", max_inflight=6, start="earliest")
    await place.holds(6)
    await place.consumer(acme, "orders", "dropped", max_inflight=4, start="earliest")
    await place.holds(10)
    await place.consumer(acme, "orders", "last", max_inflight=20, start="earliest")
    await leaves.close()
    await place.holds(10)
    await acme.groups.delete("dropped", confirm="DELETE")
    await place.holds(10)
    windows = place.daemon.engine.dispatcher.windows
    assert windows.by_tenant["acme"].held == 10
    await acme.close()
    async with asyncio.timeout(DEADLINE_S):
        while windows.by_tenant:
            await asyncio.sleep(0.005)


async def test_what_waits_for_direct_consumers_is_counted_for_the_tenant(place: Place) -> None:
    """All its topics and all consumers together; the limits of everyone hold for others."""
    place.limit(acme=TenantLimits(max_queued=25))
    acme = await place.connect("acme")
    mine, also = "orders.made.v1.acme", "orders.paid.v1.acme"
    broker = place.daemon.broker
    for number, topic in enumerate((mine, also)):
        hello = Hello(f"direct-{number}", subscriptions=[topic], max_inflight=1, tenant="acme")
        await broker.greet(broker.connected(Deaf()), hello)  # type: ignore[arg-type]
    await acme.publish_many(mine, [b"x"] * 11)
    await acme.publish_many(also, [b"x"] * 13)
    await place.holds(2)
    assert place.ratio("acme", "max_queued") == pytest.approx(22 / 25)
    with pytest.raises(penstock.Deferred) as caught:
        await acme.publish_many(mine, [b"x"] * 4)
    assert caught.value.data["limit"] == "max_queued"
    await acme.publish_many(mine, [b"x"] * 3)
    place.limit(acme=TenantLimits(max_queued=30))
    await acme.publish_many(mine, [b"x"] * 5)
    await acme.publish_many("orders.stored.v1.acme", [b"x"] * 50)  # nobody reads it directly


LIMITED = [
    penstock.Throttled(
        "the rate is used up", retry_after_s=0.1, limit="events_per_s", tenant="acme"
    ),
    penstock.Deferred("a queue is full", retry_after_s=0.1, limit="max_queued", tenant="acme"),
    penstock.Dropped("larger than the limit", limit="events_per_s", tenant="acme"),
]


@pytest.mark.parametrize("error", LIMITED, ids=lambda error: error.code)
async def test_a_refused_transaction_is_counted_like_a_publish(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: penstock.PenstockError
) -> None:
    """T11: for the tenant whose limit was reached, whoever published, in metrics and views alike."""

    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(place.daemon.engine.publisher, "transact", refuse)
    bus = await place.connect("other")
    with pytest.raises(type(error)) as caught:
        async with bus.transaction() as transaction:
            transaction.publish("orders", b"x")
    kind, limit = error.code.rpartition(".")[2], error.data["limit"]
    assert caught.value.data["limit"] == limit
    assert caught.value.data["tenant"] == "acme"
    assert place.daemon.counters.refusals == {(kind, limit, "acme"): 1}
    place.limit(acme=TenantLimits(events_per_s=1))
    views = tenant_infos(place.daemon.engine.admission, place.daemon.counters.refusals)
    assert {each.tenant: each.refusals for each in views}["acme"] == {f"{kind} {limit}": 1}


async def test_too_much_unanswered_over_zeromq_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: it names its limit and tenant, and is counted."""
    monkeypatch.setattr(zeromq, "UNANSWERED_BYTES", 50_000)
    began, go_on, publish = asyncio.Event(), asyncio.Event(), Bundle.publish

    async def slow(*args: Any) -> Any:
        began.set()
        await go_on.wait()
        return await publish(*args)

    monkeypatch.setattr(Bundle, "publish", slow)
    daemon = broker_inside(tmp_path, {"server.zmq": "127.0.0.1:0"})
    await daemon.start()
    try:
        url = f"penstock+zmq://127.0.0.1:{daemon.ports['zmq']}"
        async with penstock.connect(url, identity__tenant="acme") as bus:
            first = asyncio.create_task(bus.publish("orders", bytes(60_000)))
            await asyncio.wait_for(began.wait(), DEADLINE_S)
            with pytest.raises(penstock.Deferred) as caught:
                await asyncio.wait_for(bus.publish("orders", bytes(60_000)), DEADLINE_S)
            assert caught.value.data["limit"] == "unanswered_bytes"
            assert caught.value.data["tenant"] == "acme"
            assert caught.value.retry_after_s == zeromq.RETRY_AFTER_S
            assert daemon.counters.refusals == {("deferred", "unanswered_bytes", "acme"): 1}
            assert daemon.counters.frame_errors == {"rejected.deferred": 1}
            go_on.set()
            assert (await asyncio.wait_for(first, DEADLINE_S)).offset == 0
    finally:
        go_on.set()
        await daemon.stop()


class Deaf:
    """A connection whose client never settles anything."""

    peer, loopback = "deaf", True

    def send(self, frame: object) -> None: ...
    def close(self) -> None: ...
    def rest(self, seconds: float) -> None: ...
    def pending_bytes(self) -> int:
        return 0


async def test_a_limit_that_came_with_sighup_is_really_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: a client that is connected is refused with the typed error, and let in again."""
    config, log = tmp_path / "penstock.toml", tmp_path / "log"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    events = [b"x"] * 10

    async def reload(text: str, times: int) -> None:
        config.write_text(text)
        os.kill(broker.pid, signal.SIGHUP)
        async with asyncio.timeout(DEADLINE_S):
            while len(changed := reloads(log)) < times:
                await asyncio.sleep(0.02)
        assert changed[-1]["why"] == "SIGHUP"

    config.write_text("")
    with (
        log.open("wb") as file,
        BrokerProcess(tmp_path / "data", log=file).start(server__log_format="json") as broker,
    ):
        monkeypatch.delenv("PENSTOCK_CONFIG")  # it is the broker's, not ours
        async with (
            penstock.connect(broker.url(), identity__tenant="acme") as acme,
            penstock.connect(broker.url(), identity__tenant="other") as other,
        ):
            await acme.publish_many("orders", events)
            await reload("[admission.tenants.acme]\nevents_per_s = 5\n", 1)
            with pytest.raises(penstock.Dropped) as refused:
                await acme.publish_many("orders", events)
            assert refused.value.data["tenant"] == "acme"
            assert refused.value.data["limit"] == "events_per_s"
            await other.publish_many("orders", events)
            await reload("[admission.tenants.acme]\nevents_per_s = 5000\n", 2)
            await acme.publish_many("orders", events)
            assert len([event async for event in other.replay("orders")]) == 30


def reloads(log: Path) -> list[dict[str, Any]]:
    """What the broker logged about limits that it changed."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return [each for each in records if each["event"] == "limits changed"]

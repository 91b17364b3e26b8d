"""Metrics: what is counted, what is read from the engine, how it is exported, and that it stays small."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import prometheus_client
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from starlette.applications import Starlette

import penstock
from penstock.core.admission import AdmissionLimits, TenantLimits
from penstock.core.delivery import QueueGroup
from penstock.core.entry import GroupSpec
from penstock.core.lease import OUT, Lane
from penstock.core.retry import Retry
from penstock.model.settings import FastPath as FastPathSettings
from penstock.server.client_bytes import ClientBytes
from penstock.server.fastpath import FastPath
from penstock.server.metrics.counters import (
    BOUNDS_S,
    MAX_GROUPS,
    MAX_PAIRS,
    MAX_TENANTS,
    MAX_TOPICS,
    MAX_WORDS,
    OTHER,
    Counters,
    Histogram,
    duplicates_in,
    quantile_s,
)
from penstock.server.metrics.engine_stats import (
    Retained,
    appended_us,
    group_stats,
    quotas,
    unsettled_in,
)
from penstock.server.metrics.pressure import PressureMonitor
from penstock.server.metrics.prometheus import FAMILIES, Metrics, metrics_routes
from tools.reference.metrics import page

ROOT = Path(penstock.__file__).resolve().parent.parent
Values = dict[tuple[str, ...], float]


class Scraped:
    """A bus with its metrics, read the way Prometheus reads them."""

    def __init__(self, bus: penstock.Bus) -> None:
        self.bus = bus
        self.engine: Any = bus.engine
        self.counters = Counters()
        self.fastpath = FastPath(FastPathSettings())
        self.gauge = PressureMonitor(self.engine, self.counters)
        self.metrics = Metrics(
            self.engine, self.counters, self.gauge, self.fastpath, ClientBytes(1 << 30)
        )
        self.app = Starlette(routes=metrics_routes(self.metrics.collect))

    async def text(self, accept: str = "") -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://broker") as client:
            return await client.get("/metrics", headers={"accept": accept})

    async def families(self) -> dict[str, Any]:
        found = {}
        for family in parse_plain((await self.text()).text):
            suffix = "_total" if family.type == "counter" else ""
            found[family.name + suffix] = family
        return found

    async def values(self, name: str) -> Values:
        """The samples of one metric by the values of its labels, in the catalogue's order."""
        family = (await self.families())[name]
        labels = FAMILIES[name].labels
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for sample in family.samples
            if sample.name == name
        }


@pytest_asyncio.fixture
async def scraped() -> AsyncIterator[Scraped]:
    async with penstock.connect("mem:") as bus:
        yield Scraped(bus)


# -- counters --------------------------------------------------------------------------------------


async def test_what_the_broker_counts_is_exported(scraped: Scraped) -> None:
    """Row X10: messages, bytes, exactly-once hits, replays, back-pressure, full, dead letters."""
    count = scraped.counters
    count.published("acme", "orders", 100, 12_000, 0.004)
    count.published("acme", "orders", 1, 120, 0.2)
    count.duplicates("acme", "orders", 7)
    count.delivered("acme", "orders", 50, 6_000, 1.5)
    count.delivered("acme", "orders", 3)
    count.replayed("acme", "orders", 9)
    count.settled("ack", 40)
    count.settled("ack", 2)
    count.refused("deferred", "max_global_ingress", "acme")
    count.refused("deferred", "max_global_ingress", "acme")
    count.backpressure("send-buffer")
    scraped.fastpath.taken, scraped.fastpath.fallen_back = 5, 2
    count.frame_error("connection.protocol")
    count.dead_letter("acme", "orders")
    count.dead_letter_replayed("acme", "orders")
    for change in (1, 1, -1):
        count.connection(change)
    pair = ("acme", "orders")
    expected: dict[str, Values] = {
        "penstock_published_events_total": {pair: 101},
        "penstock_published_bytes_total": {pair: 12_120},
        "penstock_duplicate_events_total": {pair: 7},
        "penstock_delivered_events_total": {pair: 53},
        "penstock_delivered_bytes_total": {pair: 6_000},
        "penstock_replayed_events_total": {pair: 9},
        "penstock_settled_events_total": {("ack",): 42},
        "penstock_refused_publishes_total": {("deferred", "max_global_ingress", "acme"): 2},
        "penstock_backpressure_total": {("send-buffer",): 1},
        "penstock_fastpath_total": {("taken",): 5, ("fallen-back",): 2},
        "penstock_frame_errors_total": {("connection.protocol",): 1},
        "penstock_dead_letters_total": {pair: 1},
        "penstock_dead_letters_replayed_total": {pair: 1},
        "penstock_connections": {(): 1},
        "penstock_connections_opened_total": {(): 2},
    }
    assert {name: await scraped.values(name) for name in expected} == expected


async def test_latency_is_a_histogram_by_tenant(scraped: Scraped) -> None:
    """Row X10 latency: publishes are observed one by one, deliveries by event."""
    scraped.counters.published("acme", "orders", 1_000, 1, 0.004)
    scraped.counters.published("acme", "invoices", 1, 1, 0.0)
    scraped.counters.delivered("acme", "orders", 30, 1, 2.0)
    scraped.counters.delivered("acme", "orders", 5, 1, -3.0)  # a clock that stepped back
    families = await scraped.families()
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for name in ("penstock_publish_seconds", "penstock_delivery_seconds")
        for sample in families[name].samples
    }
    publish, delivery = "penstock_publish_seconds", "penstock_delivery_seconds"
    assert found[f"{publish}_bucket", "0.0005"] == 1
    assert found[f"{publish}_bucket", "0.0025"] == 1
    assert found[f"{publish}_bucket", "0.005"] == 2
    assert found[f"{publish}_bucket", "+Inf"] == found[f"{publish}_count", None] == 2
    assert found[f"{publish}_sum", None] == pytest.approx(0.004)
    assert found[f"{delivery}_bucket", "1.0"] == 5
    assert found[f"{delivery}_bucket", "2.5"] == found[f"{delivery}_count", None] == 35
    assert found[f"{delivery}_sum", None] == pytest.approx(60.0)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram()
    for bound in BOUNDS_S:
        histogram.observe(bound)
    histogram.observe(BOUNDS_S[-1] + 1)
    assert histogram.counts == [1] * (len(BOUNDS_S) + 1)
    assert histogram.above(0.1) == len(BOUNDS_S) - BOUNDS_S.index(0.1)
    assert histogram.above(0.09) == histogram.above(0.1)  # taken up to the next bound
    assert histogram.above(10_000.0) == 0


def test_quantiles_lie_in_the_right_bucket() -> None:
    """Row Q10 p99: within the bucket of the true value, for any distribution."""
    rng = random.Random(3)
    for _ in range(50):
        values = sorted(rng.lognormvariate(-5, 2) for _ in range(500))
        histogram = Histogram()
        for value in values:
            histogram.observe(value)
        for share in (0.5, 0.95, 0.99):
            true = values[int(share * len(values)) - 1]
            index = next(at for at, bound in enumerate(BOUNDS_S) if true <= bound)
            low = BOUNDS_S[index - 1] if index else 0.0
            assert low <= quantile_s(histogram.counts, share) <= BOUNDS_S[index]
    assert quantile_s([0] * 19, 0.99) == 0.0
    assert quantile_s([0] * 18 + [5], 0.99) == BOUNDS_S[-1]


async def test_duplicates_are_found_in_receipts(mem: penstock.Bus) -> None:
    """Row X10 exactly-once hits, from what the engine answers."""
    first = await mem.publish_many("orders", [b"a", b"b"], idempotency_keys=["1", "2"])
    half = await mem.publish_many("orders", [b"b", b"c"], idempotency_keys=["2", "3"])
    again = await mem.publish_many("orders", [b"a", b"b"], idempotency_keys=["1", "2"])
    one = await mem.publish("orders", b"a", idempotency_key="1")
    assert [duplicates_in(each) for each in (first, half, again, one)] == [0, 1, 2, 1]


# -- bounds ----------------------------------------------------------------------------------------


async def test_ten_thousand_topics_make_few_series(scraped: Scraped) -> None:
    """Row X10, bounded cardinality: 10,000 topics of 10,000 tenants, and nothing is lost."""
    count, names = scraped.counters, range(10_000)
    for number in names:
        tenant, topic = f"tenant-{number}", f"topic-{number}"
        count.published(tenant, topic, 1, 10, 0.001)
        count.delivered(tenant, topic, 1, 10, 0.001)
        count.refused("deferred", f"limit-{number}", tenant)
        count.frame_error(f"code-{number}")
        count.dead_letter(tenant, topic)
    for tenant in names[:150]:  # every tenant on every topic: pairs must not multiply
        for topic in names[:150]:
            count.published(f"tenant-{tenant}", f"topic-{topic}", 1, 10, 0.001)
    families = await scraped.families()
    samples = [
        sample
        for name, family in families.items()
        if name.startswith("penstock_")
        for sample in family.samples
    ]
    assert len({s.labels["tenant"] for s in samples if "tenant" in s.labels}) == MAX_TENANTS + 1
    assert len({s.labels["topic"] for s in samples if "topic" in s.labels}) == MAX_TOPICS + 1
    assert len({s.labels["code"] for s in samples if "code" in s.labels}) <= MAX_WORDS + 1
    published = await scraped.values("penstock_published_events_total")
    assert len(published) <= MAX_PAIRS + MAX_TENANTS + 1
    assert sum(published.values()) == 10_000 + 150 * 150
    assert sum((await scraped.values("penstock_dead_letters_total")).values()) == 10_000
    assert len(samples) < 10_000
    assert len(count.flows) == len(published), "memory is bounded, not just the output"


async def test_ten_thousand_real_topics_and_many_groups(scraped: Scraped) -> None:
    """Row X10: what is read from an engine is bounded, too."""
    bus = scraped.bus
    await asyncio.gather(*(bus.publish(f"many.t{number}", b"x") for number in range(10_000)))
    spec = GroupSpec(patterns=("many.t1",))
    for number in range(MAX_GROUPS + 20):
        await scraped.engine.groups.ensure(f"group-{number:03}", spec)
    lag = await scraped.values("penstock_group_lag_events")
    assert len(lag) == MAX_GROUPS + 1
    assert lag[OTHER,] == 20
    assert sum(lag.values()) == MAX_GROUPS + 20
    assert (await scraped.values("penstock_topics"))[()] == 10_000
    assert len((await scraped.text()).text) < 200_000


async def test_ten_thousand_tenants_with_limits_make_few_series(scraped: Scraped) -> None:
    """Row X10: of those that share a label the one nearest to its limit is shown."""
    admission = scraped.engine.admission
    admission.reload(AdmissionLimits(default=TenantLimits(max_ingress=4), max_global_ingress=None))
    for number in range(10_000):
        admission.admit(f"tenant-{number}", "orders", 1 + number % 4, 1, now_s=0.0)
    used = await scraped.values("penstock_quota_usage_ratio")
    assert len(used) == MAX_TENANTS + 1
    assert used["tenant-0", "max_ingress"] == 0.25
    assert used[OTHER, "max_ingress"] == 1.0


async def test_the_rest_is_as_old_as_its_oldest(scraped: Scraped) -> None:
    """Under "other" events add up, and ages do not."""
    for number in range(MAX_GROUPS):
        scraped.counters.labels.group(f"group-{number}")
    await scraped.bus.publish("orders", b"x")
    for name, topic in (("idle", "nothing"), ("late", "orders"), ("later", "orders")):
        await scraped.engine.groups.ensure(name, GroupSpec(patterns=(topic,)))
    await asyncio.sleep(0.05)
    assert await scraped.values("penstock_group_lag_events") == {(OTHER,): 2}
    for name in ("penstock_group_oldest_seconds", "penstock_group_waiting_seconds"):
        assert 0.05 <= (await scraped.values(name))[OTHER,] < 5


def test_names_the_bus_makes_up_share_a_label() -> None:
    """Inboxes and listeners come with every client: they must not use up the room of topics."""
    count = Counters()
    for number in range(1_000):
        count.published("acme", f"_inbox.{number}", 1, 1, 0.0)
        count.labels.group(f"_listener.{number}")
    count.published("acme", "orders", 1, 1, 0.0)
    assert set(count.flows) == {("acme", "_inbox"), ("acme", "orders")}
    assert count.labels.group("billing") == "billing"


# -- what is read from the engine ------------------------------------------------------------------


def random_walk(rng: random.Random, order: str) -> QueueGroup:
    """A delivery machine after a random life, with everything it can have in hand."""
    group = QueueGroup("g", GroupSpec(patterns=("t",), order=order, retry=Retry((100,), 3)))
    keys = [rng.choice([b"a", b"b", b"c", None]) for _ in range(2_000)]
    priorities = [rng.randrange(3) for _ in range(2_000)]
    hidden = rng.random() < 0.3

    def peek(of: Sequence[Any]) -> Callable[[Lane, int, int], Any]:
        return lambda lane, start, count: None if hidden else of[start : start + count]

    group.peek_keys, group.peek_priorities = peek(keys), peek(priorities)
    lanes = [group.lane("t", partition, cursor=0, end=0) for partition in range(2)]
    held: list[tuple[Any, int]] = []
    now, member = 0.0, 0
    for _ in range(rng.randrange(5, 60)):
        now += rng.random() * 10
        for lane in lanes:
            group.arrived(lane, lane.end + rng.randrange(20), prioritised=rng.random() < 0.2)
        if rng.random() < 0.3:
            member += 1
            group.join(f"m{member}", rng.randrange(1, 40))
        if len(group.members) > 1 and rng.random() < 0.2:
            group.leave(rng.choice(list(group.members)), now)
        for lease in group.dispatch(now):
            for index in range(lease.count):
                lease.hand(index, now + rng.choice([5.0, 500.0]))
                held.append((lease, index))
        rng.shuffle(held)
        for _ in range(rng.randrange(len(held) + 1)):
            lease, index = held.pop()
            if lease.states[index] == OUT and now < lease.deadlines[index]:
                settle = rng.choice([group.ack, group.ack, group.nack, group.reject])
                settle(lease, index, now)
    return group


@pytest.mark.parametrize("order", ["any", "key", "single"])
def test_owed_by_leases_is_owed_by_events(order: str) -> None:
    """Counting by leases and runs gives what counting every event gives."""
    seen = 0
    for seed in range(60):
        group = random_walk(random.Random(seed), order)
        owed = unsettled_in(group)
        debts = group.ledgers(0.0)
        assert owed.events == group.outstanding()
        lowest = {place: each.floor() for place, each in debts.items() if each.outstanding()}
        assert owed.lowest == lowest
        seen += owed.events
    assert seen > 1_000, "the walks leave something in hand"


async def test_lag_and_age_of_groups(scraped: Scraped) -> None:
    """Row Q10 lag, row T15 queue age: the same numbers as operators see, and ages that grow."""
    bus, engine = scraped.bus, scraped.engine
    await bus.publish_many("orders", [b"x"] * 10)
    async with (
        bus.subscribe("orders", group="slow", max_inflight=4) as events,
        bus.subscribe("orders", group="log", mode="log", start="earliest"),
    ):
        event = await anext(events)
        await event.nack(delay_s=60)
        await asyncio.sleep(0.05)
        for name in ("slow", "log"):
            info = await bus.groups.info(name)
            each = group_stats(engine)[name]
            assert (each.lag, each.outstanding) == (info.lag, info.outstanding)
            assert each.members == 1
            assert 0.05 <= each.waiting_s <= each.oldest_s < 5
        assert group_stats(engine)["slow"].credit == 4
    assert (await scraped.values("penstock_group_lag_events")) == {("slow",): 10, ("log",): 10}
    assert (await scraped.values("penstock_group_oldest_seconds"))["slow",] >= 0.05


async def test_a_group_that_is_through_has_no_age(scraped: Scraped) -> None:
    await scraped.bus.publish("orders", b"x")
    async with scraped.bus.subscribe("orders", group="fast") as events:
        await (await anext(events)).ack()
        each = group_stats(scraped.engine)["fast"]
    assert (each.lag, each.oldest_s, each.waiting_s) == (0, 0.0, 0.0)


async def test_append_times_are_found_wherever_events_lie(bus: penstock.Bus) -> None:
    """Exact in the journal, within its segment's span when sealed, and never an error."""
    engine: Any = bus.engine
    times = []
    for number in range(6):
        await bus.publish("orders", random.randbytes(300_000))
        times.append(engine.log.partition("orders", 0).last_time_us)
        await asyncio.sleep(0.01 * (number % 2))
    # Some of it may be sealed already, on a slow machine: those are judged below.
    begun = [each[1].last_offset for each in engine.log.manifest.ranges("orders", 0)]
    for offset in range(max(begun, default=-1) + 1, 6):
        assert appended_us(engine.log, ("orders", 0), offset) == times[offset]
    await engine.maintenance.settle()
    sealed = engine.log.manifest.ranges("orders", 0)
    assert sealed, "something was sealed"
    last = sealed[-1][1].last_offset
    for offset in range(6):
        found = appended_us(engine.log, ("orders", 0), offset)
        assert times[0] <= found <= times[-1]
        if offset > last:
            assert found == times[offset]
    assert appended_us(engine.log, ("orders", 0), 0) == times[0]


async def test_retained_bytes_follow_sealing_and_retention(
    tmp_path: Path, small: Callable[..., Any]
) -> None:
    """Row X10 retention bytes: kept up to date by differences, equal to counting afresh."""
    settings = small(retention__max_bytes=1_500_000)
    async with penstock.connect(tmp_path, settings=settings) as bus:
        scraped = Scraped(bus)
        engine = scraped.engine
        shown = []
        for _ in range(8):
            for topic in ("orders", "invoices"):
                await bus.publish_many(topic, [random.randbytes(1_000) for _ in range(300)])
            await engine.maintenance.settle()
            shown.append(await scraped.values("penstock_retained_bytes"))
            fresh = Retained(Counters().labels)
            fresh.update(engine.log.manifest.segments())
            assert {key: size for key, size in shown[-1].items() if size} == {
                key: size for key, size in fresh.bytes.items() if size
            }
        before = shown[-1]["default", "orders"]
        assert 0 < before < 8 * 300_000, "retention has taken some"
        await bus.topics.delete("invoices", confirm="DELETE")
        await engine.maintenance.settle()
        after = await scraped.values("penstock_retained_bytes")
        assert (after["default", "invoices"], after["default", "orders"]) == (0, before)


async def test_write_amplification_is_disk_over_published(
    tmp_path: Path, small: Callable[..., Any]
) -> None:
    """Row Q10: everything written is compared with what clients sent."""
    async with penstock.connect(tmp_path, settings=small()) as bus:
        scraped = Scraped(bus)
        for _ in range(4):
            await bus.publish_many("orders", [random.randbytes(1_000) for _ in range(500)])
            scraped.counters.published("default", "orders", 500, 500_000, 0.01)
        await scraped.engine.maintenance.settle()
        written = await scraped.values("penstock_disk_written_bytes_total")
        assert written["journal",] > 2_000_000
        assert written["segments",] > 500_000
        ratio = (await scraped.values("penstock_write_amplification_ratio"))[()]
        assert ratio == pytest.approx(sum(written.values()) / 2_000_000)
        assert 1.2 < ratio < 3


async def test_quotas_are_shares_of_limits(tmp_path: Path) -> None:
    """Row X10 quota usage ratio."""
    limits = TenantLimits(
        max_ingress=100, storage_bytes=1_000, events_per_s=10, replays_per_minute=0, max_queued=0,
        max_inflight=4,
    )  # fmt: skip
    async with penstock.connect(tmp_path) as bus:
        engine: Any = bus.engine
        now_s = 0.0
        engine.runtime.now = lambda: now_s
        engine.admission.reload(AdmissionLimits(tenants={"acme": limits}))
        engine.admission.admit("acme", "orders", 5, 100, now_s=0.0)
        engine.admission.admit("free", "orders", 5, 100, now_s=0.0)
        engine.admission.stored("acme", 400)
        found = {(each.tenant, each.quota): each.ratio for each in quotas(engine)}
        assert found == {
            ("acme", "max_inflight"): 0.0,
            ("acme", "max_ingress"): 0.05,
            ("acme", "max_queued"): 1.0,
            ("acme", "storage_bytes"): 0.5,
            ("acme", "events_per_s"): 0.5,
            ("acme", "replays_per_minute"): 1.0,
        }
        now_s = 0.25
        later = {each.quota: each.ratio for each in quotas(engine)}
        assert later["events_per_s"] == pytest.approx(0.25)
        engine.admission.ingress_done("acme", 5, 100)
        engine.admission.ingress_done("free", 5, 100)


async def test_what_pressure_says_is_exported(
    scraped: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows T15, Q10: alerts and autoscalers that read Prometheus see what `/pressure` shows."""
    shown = msgspec.structs.replace(
        scraped.gauge.read(), pressure=0.7, saturation={"ingress": 0.1, "loop": 0.2},
        burn={"latency": {"5m": 1.0, "1h": 2.0}, "errors": {"5m": 3.0, "1h": 4.0}},
        publish_p99_s=0.004, delivery_p99_s=0.012,
    )  # fmt: skip
    monkeypatch.setattr(scraped.gauge, "read", lambda known: shown)
    assert await scraped.values("penstock_pressure_ratio") == {(): 0.7}
    assert await scraped.values("penstock_saturation_ratio") == {("ingress",): 0.1, ("loop",): 0.2}
    assert await scraped.values("penstock_slo_burn_ratio") == {
        ("latency", "5m"): 1.0, ("latency", "1h"): 2.0, ("errors", "5m"): 3.0, ("errors", "1h"): 4.0,
    }  # fmt: skip
    found = await scraped.values("penstock_p99_seconds")
    assert found == {("publish",): 0.004, ("delivery",): 0.012}


async def test_failures_are_counted_by_cause(scraped: Scraped) -> None:
    """Row Q10 retry rate, row X10 dead letters: by the engine itself, groups that are gone included."""
    bus = scraped.bus
    await bus.publish_many("orders", [b"x"] * 5)
    once = penstock.Retry((10,), 1)
    async with bus.subscribe("orders", group="billing", lease_s=0.5, retry=once) as events:
        nacked, rejected, acked, *_ = [await anext(events) for _ in range(5)]
        await nacked.nack()
        await rejected.reject()
        await acked.ack()
        async with asyncio.timeout(5):
            while (await scraped.values("penstock_failed_deliveries_total"))["expired",] < 2:
                await asyncio.sleep(0.02)
        await bus.flush()
    found = await scraped.values("penstock_failed_deliveries_total")
    assert found == {("nacked",): 1, ("rejected",): 1, ("expired",): 2, ("returned",): 0}
    dead = ("default", "orders")
    assert await scraped.values("penstock_dead_letters_total") == {dead: 4}
    letter = (await bus.dead_letters.list())[0]
    await bus.dead_letters.replay(
        [letter.id], target_consumer="billing", target_topic="orders", actor="ann",
        reason="fixed", confirm="REPLAY",
    )  # fmt: skip
    assert await scraped.values("penstock_dead_letters_replayed_total") == {dead: 1}
    await bus.groups.delete("billing", confirm="DELETE")
    assert await scraped.values("penstock_failed_deliveries_total") == found


async def test_a_consumer_that_leaves_returns_what_it_was_handed(scraped: Scraped) -> None:
    await scraped.bus.publish_many("orders", [b"x"] * 5)
    async with scraped.bus.subscribe("orders", group="billing") as events:
        await anext(events)
    found = await scraped.values("penstock_failed_deliveries_total")
    assert found["returned",] == 1, "the other four cost nobody an attempt"


async def test_commits_take_time_and_side_files_count(tmp_path: Path) -> None:
    async with penstock.connect(tmp_path) as bus:
        scraped = Scraped(bus)
        await bus.publish("orders", random.randbytes(2 << 20))
        assert (await scraped.values("penstock_commit_seconds_total"))[()] > 0
        assert (await scraped.values("penstock_disk_written_bytes_total"))["side",] == 2 << 20


async def test_problems_are_seen(scraped: Scraped) -> None:
    parts = ("writer", "housekeeping", "disk", "retention", "audit")
    quiet = {(part,): 0 for part in parts}
    assert await scraped.values("penstock_problem") == quiet
    scraped.engine.maintenance.problem = "a file is missing"
    scraped.engine.maintenance.shortage_bytes = 1
    scraped.engine.audit.failure = "the disk is gone"
    assert await scraped.values("penstock_problem") == quiet | {
        ("housekeeping",): 1,
        ("retention",): 1,
        ("audit",): 1,
    }


async def test_state_is_counted(scraped: Scraped) -> None:
    bus = scraped.bus
    await bus.publish("orders", b"x", idempotency_key="1")
    await bus.publish("orders", b"x", delay_s=3_600)
    async with bus.subscribe("orders", group="billing") as events:
        await (await anext(events)).reject()
        await bus.flush()
    expected = {
        "penstock_dead_letters_kept": 1,
        "penstock_dedup_tokens": 1,
        "penstock_scheduled_events": 1,
        "penstock_groups": 1,
        "penstock_journal_pending_bytes": 0,
        "penstock_audit_behind_bytes": 0,
    }
    assert {name: (await scraped.values(name))[()] for name in expected} == expected
    assert (await scraped.values("penstock_commits_total"))[()] >= 4


# -- export ----------------------------------------------------------------------------------------


async def test_what_is_exported_is_the_catalogue(scraped: Scraped) -> None:
    """Row X10: every documented metric is exported with its kind and meaning, and no other."""
    families = {n: f for n, f in (await scraped.families()).items() if n.startswith("penstock_")}
    assert {name: (f.type, f.documentation) for name, f in families.items()} == {
        name: (family.kind, family.about) for name, family in FAMILIES.items()
    }


def test_the_page_is_the_catalogue() -> None:
    """docs/reference/metrics.md lists what is exported; `make reference` prints it."""
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text() == page()


def test_names_follow_the_rules() -> None:
    """Counters end in _total, units are last, and no two names clash in OpenMetrics."""
    units = {"seconds", "bytes", "ratio", "events", "total"}
    plain = {"connections", "kept", "members", "topics", "groups", "tokens", "problem", "info"}
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"penstock_[a-z0-9_]+", name)
        assert name.endswith("_total") == (family.kind == "counter")
        assert name.rpartition("_")[2] in units | plain, f"{name} has no unit"
    bare = [name.removesuffix("_total") for name in FAMILIES]
    assert len(bare) == len(set(bare))


async def test_openmetrics_on_request(scraped: Scraped) -> None:
    scraped.counters.published("acme", 'a "quoted"\nname', 1, 1, 0.1)
    plain = await scraped.text()
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    answer = await scraped.text("application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_open(answer.text)}
    (sample,) = families["penstock_published_events"].samples
    assert sample.labels["topic"] == 'a "quoted"\nname'


async def test_the_registry_is_our_own(scraped: Scraped) -> None:
    await scraped.text()
    names = {family.name for family in prometheus_client.REGISTRY.collect()}
    assert not {name for name in names if name.startswith("penstock")}
    assert "python_gc_objects_collected" not in (await scraped.text()).text
    assert "process_cpu_seconds_total" in await scraped.families()


async def test_many_scrapes_at_once(scraped: Scraped) -> None:
    answers = await asyncio.gather(*(scraped.text() for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("module", ["prometheus_client", "starlette.routing"])
def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "prometheus_client":
        monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(penstock.MissingExtra, match=r"pip install 'penstock\[server\]'"):
        metrics_routes(lambda: None)  # type: ignore[arg-type,return-value]


# -- dashboard and alerts --------------------------------------------------------------------------


def sample_names() -> set[str]:
    names = set()
    for name, family in FAMILIES.items():
        suffixes = ("_bucket", "_count", "_sum") if family.kind == "histogram" else ("",)
        names |= {name + suffix for suffix in suffixes}
    return names


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bpenstock_[a-z0-9_]+", text))


def queries() -> list[str]:
    """Every PromQL expression that we ship."""
    board = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = (ROOT / "deploy/prometheus/penstock.rules.yml").read_text()
    blocks = re.finditer(r"^( *)expr: *(>-\n(?:\1 +.*\n)+|.*\n)", rules, re.MULTILINE)
    return found + [" ".join(block[2].removeprefix(">-").split()) for block in blocks]


@pytest.mark.parametrize(
    "path",
    [
        "deploy/grafana/penstock.json",
        "deploy/prometheus/penstock.yml",
        "deploy/prometheus/penstock.rules.yml",
        "docs/guide/observability.md",
    ],
)
def test_only_real_metrics_are_named(path: str) -> None:
    """Row Q10: dashboards, alerts and the guide use names that exist."""
    text = (ROOT / path).read_text()
    assert named_in(text) <= sample_names() | set(FAMILIES)


def test_labels_in_queries_exist() -> None:
    """Every label that a query selects by belongs to its metric."""
    found = queries()
    assert len(found) > 25
    for query in found:
        for name, body in re.findall(r"\b(penstock_\w+)\{([^}]*)\}", query):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            allowed = {*FAMILIES.get(name, FAMILIES.get(base, SimpleNamespace(labels=()))).labels}
            used = set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", body))
            assert used <= allowed | {"le", "job", "instance"}, query
            assert set(re.findall(r'le="([^"]+)"', body)) <= {*map(str, BOUNDS_S)}, query
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_every_important_metric_is_on_the_dashboard() -> None:
    """Row Q10: write amplification, lag, retry rate and p99 are there to be seen."""
    seen = named_in((ROOT / "deploy/grafana/penstock.json").read_text())
    assert {
        "penstock_write_amplification_ratio",
        "penstock_group_lag_events",
        "penstock_failed_deliveries_total",
        "penstock_publish_seconds_bucket",
        "penstock_dead_letters_total",
        "penstock_quota_usage_ratio",
        "penstock_retained_bytes",
        "penstock_pressure_ratio",
        "penstock_slo_burn_ratio",
    } <= seen


def test_the_dashboard_is_laid_out() -> None:
    """Row Q10, dashboards that load: ids are unique, panels do not overlap, every query has a source."""
    board = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
    assert board["id"] is None
    assert board["schemaVersion"] >= 36
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["refId"]
    assert board["templating"]["list"][0]["name"] == "datasource"

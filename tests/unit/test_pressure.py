"""Pressure: burn rates as arithmetic on totals and times, and what a running engine says of itself."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

import penstock
from penstock.core.entry import GroupSpec
from penstock.model.errors import DiskFull
from penstock.server.metrics import pressure as module
from penstock.server.metrics.counters import Counters
from penstock.server.metrics.pressure import (
    BLAMED,
    PAGE_BURN,
    STEP_S,
    WINDOWS_S,
    Burn,
    GroupPressure,
    History,
    Objectives,
    Pressure,
    PressureMonitor,
    pressure_routes,
    total_pressure,
)

ROOT = Path(penstock.__file__).resolve().parent.parent
MINUTE_S = 60.0


def minutes(burn: Burn, count: int, total: int, bad: int, start: int = 0) -> float:
    """Note `total` and `bad` more in each of some minutes; returns the time then."""
    burn.note(start * MINUTE_S, start * total, start * bad)
    for number in range(start + 1, start + count + 1):
        burn.note(number * MINUTE_S, number * total, number * bad)
    return (start + count) * MINUTE_S


# -- the machine -----------------------------------------------------------------------------------


def test_burning_at_the_allowed_rate_is_one() -> None:
    """Row T15: 1 % failures against an objective of 99 % use the budget just in time."""
    burn = Burn(share=0.99)
    now_s = minutes(burn, 90, total=1_000, bad=10)
    assert burn.rates(now_s) == pytest.approx({"5m": 1.0, "1h": 1.0})


def test_a_burst_shows_in_the_short_window_first() -> None:
    """Row T15: five bad minutes after an hour of peace: high now, low over the hour; then it passes."""
    burn, total, bad = Burn(share=0.999), 0, 0
    rates = {}
    for minute in range(131):
        total += 1_000
        bad += 100 if 60 < minute <= 65 else 0
        burn.note(minute * MINUTE_S, total, bad)
        rates[minute] = burn.rates(minute * MINUTE_S)
    assert rates[60] == {"5m": 0.0, "1h": 0.0}
    assert rates[65] == pytest.approx({"5m": 100.0, "1h": 100 * 5 / 60})
    assert rates[70] == pytest.approx({"5m": 0.0, "1h": 100 * 5 / 60})
    assert rates[130] == {"5m": 0.0, "1h": 0.0}


def test_a_young_broker_is_judged_by_what_it_has_seen() -> None:
    burn = Burn(share=0.9)
    assert burn.rates(5.0) == {"5m": 0.0, "1h": 0.0}
    burn.note(0.0, 0, 0)
    burn.note(20.0, 10, 5)
    assert burn.rates(20.0) == pytest.approx({"5m": 5.0, "1h": 5.0})


def test_silence_burns_nothing() -> None:
    burn = Burn(share=0.99)
    now_s = minutes(burn, 10, total=100, bad=100)
    for number in range(1, 7):
        burn.note(now_s + number * MINUTE_S, 1_000, 1_000)
    assert burn.rate(now_s + 6 * MINUTE_S, WINDOWS_S["5m"]) == 0.0


def test_a_count_that_starts_again_forgets_the_past() -> None:
    burn = Burn(share=0.99)
    now_s = minutes(burn, 10, total=100, bad=100)
    burn.note(now_s + 1, 5, 0)
    assert burn.rates(now_s + 1) == {"5m": 0.0, "1h": 0.0}
    burn.note(now_s + 61, 105, 1)
    assert burn.rate(now_s + 61, WINDOWS_S["5m"]) == pytest.approx(1.0)


def test_time_does_not_run_back() -> None:
    history = History(60.0, 10.0)
    history.note(100.0, [5])
    history.note(40.0, [9])
    history.note(110.0, [7])
    assert history.added(110.0, 60.0) == [2]


@pytest.mark.parametrize("share", [1.0, 1.5, -0.1, float("nan")])
def test_an_objective_leaves_a_budget(share: float) -> None:
    with pytest.raises(penstock.InvalidSettings):
        Burn(share)


def test_history_is_bounded() -> None:
    """A year of notes takes the room of an hour."""
    history = History(3_600.0)
    for number in range(50_000):
        history.note(number * 0.5, [number])
    assert len(history._notes) <= 3_600 / STEP_S + 2
    assert history.added(25_000.0, 3_600.0)[0] == pytest.approx(7_200, abs=2 * STEP_S + 2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 20.0), st.integers(0, 50), st.integers(0, 50)),
        min_size=1,
        max_size=80,
    ),
    st.floats(10.0, 120.0),
)
def test_a_window_is_what_it_says(steps: list[tuple[float, int, int]], window_s: float) -> None:
    """Compared with keeping every note: the window begins at most a step and a gap early, never late."""
    step_s, history, every = 10.0, History(120.0, 10.0), [(0.0, 0)]
    history.note(0.0, [0])
    now_s, total = 0.0, 0
    for gap_s, good, bad in steps:
        now_s, total = now_s + gap_s, total + good + bad
        history.note(now_s, [total])
        every.append((now_s, total))
    gap_s = max(gap for gap, _, _ in steps)

    def since(start_s: float) -> int:
        return total - max(count for at, count in every if at <= max(start_s, 0.0))

    found = history.added(now_s, window_s)[0]
    assert since(now_s - window_s) <= found <= since(now_s - window_s - step_s - gap_s)


# -- the one number --------------------------------------------------------------------------------


def test_pressure_is_the_worst_of_all() -> None:
    """Row T15: resources, the slowest group, and alarms; consumers that are busy do not count."""
    calm = {"latency": {"5m": 0.0, "1h": 0.0}}
    assert total_pressure({"ingress": 0.2, "inflight": 1.0}, calm, 0.0) == 0.2
    assert total_pressure({"ingress": 0.2, "loop": 0.9}, calm, 0.3) == 0.9
    assert total_pressure({"ingress": 0.2}, calm, 2.5) == 2.5
    page = {"latency": {"5m": PAGE_BURN, "1h": PAGE_BURN}}
    assert total_pressure({"ingress": 0.2}, page, 0.0) == 1.0
    over = {"latency": {"5m": 100.0, "1h": 0.0}}
    assert total_pressure({"ingress": 0.2}, over, 0.0) == 0.2


# -- a running engine ------------------------------------------------------------------------------


def test_waiting_events_are_pressure_until_they_are_taken(world: Callable[..., Any]) -> None:
    """Row T15 queue age: a minute without consumers is twice the objective of half a minute."""

    async def work(bus: penstock.Bus) -> list[GroupPressure]:
        engine: Any = bus.engine
        gauge = PressureMonitor(engine, Counters(), cpu_s=lambda: 0.0)
        await engine.groups.ensure("billing", GroupSpec(patterns=("orders",)))
        await bus.publish_many("orders", [b"x"] * 10)
        found = []
        await asyncio.sleep(60)
        found.append(gauge.read().groups["billing"])
        assert gauge.read().pressure == pytest.approx(2.0, rel=0.01)
        async with bus.subscribe("orders", group="billing", max_inflight=5, lease_s=600) as events:
            held = [await anext(events) for _ in range(5)]
            found.append(gauge.read().groups["billing"])
            for event in held:
                await event.ack()
            held = [await anext(events) for _ in range(5)]
            found.append(gauge.read().groups["billing"])
            for event in held:
                await event.ack()
            await bus.flush()
            found.append(gauge.read().groups["billing"])
        assert gauge.read().pressure == pytest.approx(0.0, abs=0.01)
        return found

    alone, full, busy, done = world().run(work)
    assert (alone.lag, alone.outstanding, alone.members, alone.credit) == (10, 0, 0, 0)
    assert alone.waiting_s == alone.oldest_s == pytest.approx(60, rel=0.01)
    assert (full.lag, full.outstanding, full.held, full.credit) == (10, 5, 5, 5)
    assert full.pressure == pytest.approx(2.0, rel=0.01)
    assert (busy.lag, busy.outstanding) == (5, 5)
    assert busy.oldest_s >= 60
    assert busy.waiting_s == busy.pressure == 0.0
    assert (done.lag, done.oldest_s) == (0, 0.0)


def test_one_poisonous_event_is_not_pressure(world: Callable[..., Any]) -> None:
    """What waits for its next attempt is old, but more consumers would not help."""

    async def work(bus: penstock.Bus) -> Pressure:
        gauge = PressureMonitor(bus.engine, Counters(), cpu_s=lambda: 0.0)  # type: ignore[arg-type]
        async with bus.subscribe("orders", group="billing") as events:
            await bus.publish("orders", b"poison")
            await (await anext(events)).nack(delay_s=3_600)
            await asyncio.sleep(600)
            return gauge.read()

    found = world().run(work)
    assert found.groups["billing"].oldest_s >= 600
    assert found.oldest_s >= 600
    assert found.pressure < 0.01


def test_burn_rates_come_from_publishes_and_refusals(world: Callable[..., Any]) -> None:
    """Row T15: slow publishes burn the latency budget, refusals for want of room that of errors."""

    async def work(bus: penstock.Bus) -> Pressure:
        counters = Counters()
        gauge = PressureMonitor(bus.engine, counters, cpu_s=lambda: 0.0)  # type: ignore[arg-type]
        watch = asyncio.create_task(gauge.run())
        for _ in range(600):
            await asyncio.sleep(1.0)
            for _ in range(9):
                counters.published("acme", "orders", 1, 1, 0.01)
            counters.published("acme", "orders", 1, 1, 0.3)
            counters.refused("deferred", "max_global_ingress", "acme")
            for kind in ("throttled", "dropped", "replay-limited", "too-large"):
                counters.refused(kind, "events_per_s", "acme")
        watch.cancel()
        return gauge.read()

    found = world().run(work)
    assert found.burn["latency"] == pytest.approx({"5m": 10.0, "1h": 10.0})
    assert found.burn["errors"] == pytest.approx({"5m": 1 / 11 / 0.001, "1h": 1 / 11 / 0.001})
    assert found.pressure == pytest.approx(1 / 11 / 0.001 / PAGE_BURN)
    assert 0.25 < found.publish_p99_s <= 0.5


def test_the_percentile_forgets(world: Callable[..., Any]) -> None:
    """Commit latency p99 is of the last five minutes, not of the broker's whole life."""

    async def work(bus: penstock.Bus) -> list[float]:
        counters = Counters()
        gauge = PressureMonitor(bus.engine, counters, cpu_s=lambda: 0.0)  # type: ignore[arg-type]
        watch = asyncio.create_task(gauge.run())
        found = []
        for seconds in (2.0, 0.002):
            for _ in range(400):
                await asyncio.sleep(1.0)
                counters.published("acme", "orders", 1, 1, seconds)
                counters.delivered("acme", "orders", 1, 1, seconds)
            found += [gauge.read().publish_p99_s, gauge.read().delivery_p99_s]
        watch.cancel()
        return found

    slow, slow_delivery, fast, fast_delivery = world().run(work)
    assert 1.0 < slow == slow_delivery <= 2.5
    assert 0.001 < fast == fast_delivery <= 0.0025


async def test_saturation_is_use_against_limits(tmp_path: Path) -> None:
    """Row T15 saturation: ingress, connections, the loop, consumers, the disk."""
    clock = {"cpu": 0.0}
    limits: dict[str, Any] = {"admission__max_global_ingress": 100}
    async with penstock.connect(tmp_path, server__max_connections=50, **limits) as bus:
        engine: Any = bus.engine
        counters = Counters()
        gauge = PressureMonitor(engine, counters, cpu_s=lambda: clock["cpu"])
        assert set(gauge.read().saturation.values()) == {0.0}
        engine.admission.admit("acme", "orders", 75, 10, 0.0)
        counters.connection(10)
        await bus.publish_many("orders", [b"x"] * 10)
        async with bus.subscribe("orders", group="billing", max_inflight=20) as events:
            await anext(events)
            found = gauge.read()
            assert found.saturation["ingress"] == 0.75
            assert found.saturation["connections"] == 0.2
            assert found.saturation["inflight"] == 0.5
            assert found.pressure == 0.75
        start_s = engine.runtime.now()
        engine.runtime.now = lambda: start_s + 10.0
        clock["cpu"] = 9.0
        assert gauge.read().saturation["loop"] == pytest.approx(0.9, abs=0.02)
        engine.commits._full = DiskFull("no room")
        assert gauge.read().pressure == gauge.read().saturation["storage"] == 1.0
        engine.sealing_backlog.backlog_bytes = 2 * bus.settings.sealing.backlog_max_bytes
        found = gauge.read()
        assert found.saturation["backlog"] == found.pressure == 3.0
        assert found.backlog_bytes == engine.sealing_backlog.backlog_bytes


async def test_the_document_over_http(mem: penstock.Bus) -> None:
    """Row T15: one JSON document; the paths that the guide's autoscalers read are there."""
    engine: Any = mem.engine
    gauge = PressureMonitor(engine, Counters())
    await mem.publish_many("orders", [b"x"] * 3)
    await engine.groups.ensure("billing", GroupSpec(patterns=("orders",)))
    app = Starlette(routes=pressure_routes(gauge.read))
    transport = httpx.ASGITransport(app)
    async with (
        mem.subscribe("orders"),  # a listener of its own: nobody scales it
        httpx.AsyncClient(transport=transport, base_url="http://broker") as client,
    ):
        answer = await client.get("/pressure")
        assert (await client.post("/pressure")).status_code == 405
    assert answer.headers["content-type"] == "application/json"
    document = json.loads(answer.text)
    assert set(document) == set(Pressure.__struct_fields__)
    assert set(document["groups"]) == {"billing"}
    assert set(document["groups"]["billing"]) == set(GroupPressure.__struct_fields__)
    guide = (ROOT / "docs/guide/observability.md").read_text()
    paths = re.findall(r'valueLocation: "?([\w.]+)', guide)
    assert len(paths) >= 2
    for path in paths:
        value = document
        for step in path.split("."):
            value = value[step]
        assert isinstance(value, int | float)


async def test_only_the_worst_groups_are_shown(
    mem: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS_SHOWN", 2)
    engine: Any = mem.engine
    await mem.publish("orders", b"x")
    for name in ("idle-1", "idle-2", "idle-3"):
        await engine.groups.ensure(name, GroupSpec(patterns=("other",)))
    await engine.groups.ensure("late", GroupSpec(patterns=("orders",)))
    await asyncio.sleep(0.01)
    found = PressureMonitor(engine, Counters()).read()
    assert list(found.groups) == ["late", "idle-1"]
    assert (found.groups_left_out, found.lag) == (2, 1)


def test_every_field_is_explained() -> None:
    """The guide names every field of the document and every resource."""
    guide = (ROOT / "docs/guide/observability.md").read_text()
    fields = {*Pressure.__struct_fields__, *GroupPressure.__struct_fields__}
    resources = {"ingress", "pending", "backlog", "storage", "connections", "loop", "inflight"}
    missing = {name for name in fields | resources if f"`{name}`" not in guide}
    assert not missing


def test_objectives_of_the_guide_are_the_defaults() -> None:
    guide = (ROOT / "docs/guide/observability.md").read_text()
    for name, value in msgspec.structs.asdict(Objectives()).items():
        assert f"| `{name}` | {value:g} |" in guide


def test_alerts_blame_the_same_refusals() -> None:
    """The slow-burn alert and the burn rate agree on what is the broker's failure."""
    rules = (ROOT / "deploy/prometheus/penstock.rules.yml").read_text()
    named = set(re.findall(r'refused_publishes_total\{kind=~"([^"]+)"', rules))
    assert named == {"|".join(sorted(BLAMED))}


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.routing", None)
    with pytest.raises(penstock.MissingExtra, match=r"pip install 'penstock\[server\]'"):
        pressure_routes(lambda: None)  # type: ignore[arg-type,return-value]

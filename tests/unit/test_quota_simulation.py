"""The simulation of a quota change sends recorded traffic through the admission machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock
from penstock.cli import quota_simulation
from penstock.cli.quota_simulation import Batch, Traffic, read_traffic, rehearse, run
from penstock.core.admission import AdmissionLimits, TenantLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from penstock.model.settings import Settings

S = 1_000_000


def came(*batches: Batch, stored: dict[str, int] | None = None) -> Traffic:
    return Traffic(batches=sorted(batches), stored_bytes=stored or {}, cut=False)


def of(**limits: TenantLimits) -> AdmissionLimits:
    return AdmissionLimits(tenants=limits)


def test_a_rate_throttles_what_is_above_it() -> None:
    """T16: the rehearsal says what a new quota would have refused, beside the one in force."""
    batches = [Batch(second * S, "acme", "orders", 10, 1_000, 1_000) for second in range(10)]
    batches += [Batch(second * S + 1, "calm", "orders", 1, 100, 100) for second in range(10)]
    (acme, calm) = rehearse(came(*batches), of(), of(acme=TenantLimits(events_per_s=4)))
    assert (acme.tenant, acme.events, acme.size_bytes, acme.peak_per_s) == ("acme", 100, 10_000, 10)
    assert (acme.now.admitted, acme.now.refused) == (100, 0)
    assert (acme.new.admitted, acme.new.throttled) == (40, 60)
    assert acme.new.limits == {"events_per_s": 60}
    assert (calm.new.admitted, calm.new.refused) == (10, 0)
    assert acme.row()["throttled"] == "0 -> 60"


def test_a_large_batch_is_one_publish_and_small_ones_are_single_events() -> None:
    limits = of(acme=TenantLimits(events_per_s=50))
    large = run(came(Batch(S, "acme", "orders", 64, 6_400, 6_400)), limits)["acme"]
    assert (large.admitted, large.dropped) == (0, 64)
    small = run(came(Batch(S, "acme", "orders", 63, 6_300, 6_300)), limits)["acme"]
    assert (small.admitted, small.throttled, small.dropped) == (50, 13, 0)


def test_what_shared_a_commit_waits_together() -> None:
    limits = AdmissionLimits(max_global_ingress=100)
    together = [Batch(S, "a", f"t{n}", 60, 60, 60) for n in range(2)]
    assert run(came(*together), limits)["a"].deferred == 20
    apart = [Batch(n * S, "a", "t", 60, 60, 60) for n in range(2)]
    assert run(came(*apart), limits)["a"].deferred == 0, "one is through before the next comes"


def test_storage_counts_what_was_there_before() -> None:
    limits = of(acme=TenantLimits(storage_bytes=1_000))
    two = [Batch(n * S, "acme", "t", 1, 300, 300) for n in (1, 2)]
    assert run(came(*two, stored={"acme": 300}), limits)["acme"].admitted == 2
    late = run(came(*two, stored={"acme": 500}), limits)["acme"]
    assert (late.admitted, late.throttled, late.limits) == (1, 1, {"storage_bytes": 1})


async def publish(folder: Path, settings: Settings, rounds: int) -> None:
    async with penstock.connect(folder, settings=settings) as bus:
        for _ in range(rounds):
            for tenant, count in (("acme", 5), ("beta", 2)):
                topic = f"shop.orders.v1.{tenant}"
                await bus.publish_many(topic, [b"x" * 100] * count, codec="raw")
        await bus.publish("shop.orders.v1.acme", b"later", codec="raw", delay_s=3600)


async def test_traffic_is_the_same_from_journal_and_segments(
    tmp_path: Path, small: Callable[..., Settings]
) -> None:
    """T16: sealing moves events to other files; the recorded traffic stays the same."""
    settings = small()
    await publish(tmp_path / "data", settings, 7)
    before = read_traffic(tmp_path / "data", settings, 3_600)
    assert {batch.tenant for batch in before.batches} == {"acme", "beta"}, (
        "not the bus's own topics"
    )
    assert sum(b.events for b in before.batches if b.tenant == "acme") == 35
    assert not before.cut
    async with penstock.connect(tmp_path / "data", settings=settings) as bus:
        await bus.publish("other", b"y")  # each start begins a new file, so the old one is closed
        await bus.engine.maintenance.settle()
    assert list((tmp_path / "data" / "segments").glob("*.parquet"))
    after = read_traffic(tmp_path / "data", settings, 3_600)
    key = [(b.time_us, b.tenant, b.topic, b.events) for b in before.batches]
    assert [(b.time_us, b.tenant, b.topic, b.events) for b in after.batches if b.topic != "other"] == key  # fmt: skip
    for was, now in zip(before.batches, after.batches, strict=False):
        assert was == now, "the same sizes, too"
        assert (now.payload_bytes, now.event_bytes) == (100 * now.events, 164 * now.events)


async def test_the_window_and_the_bound_keep_the_newest(
    tmp_path: Path, small: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small()
    await publish(tmp_path / "data", settings, 7)
    everything = read_traffic(tmp_path / "data", settings, 3_600).batches
    newest_us = everything[-1].time_us
    window_s = (newest_us - everything[-3].time_us) / S
    assert read_traffic(tmp_path / "data", settings, window_s).batches == everything[-3:]
    monkeypatch.setattr(quota_simulation, "MAX_BATCHES", 3)
    cut = read_traffic(tmp_path / "data", settings, 3_600)
    assert cut.cut
    assert cut.batches == everything[-3:]
    assert cut.stored_bytes["acme"] > 0, "what was left out counts as stored before"


async def test_the_rehearsal_agrees_with_the_bus(
    tmp_path: Path, small: Callable[..., Settings]
) -> None:
    """T16, T11: limits that let recorded traffic in let it in again, to the byte."""
    topic, fits = "shop.orders.v1.acme", {"bytes_per_s": 1_000.0, "storage_bytes": 10 * 164}
    settings = small(admission__tenants={"acme": fits})
    async with penstock.connect(tmp_path / "data", settings=settings) as bus:
        for _ in range(10):
            await bus.publish(topic, b"x" * 100, codec="raw")
    traffic = read_traffic(tmp_path / "data", settings, 3_600)
    (same,) = rehearse(traffic, of(acme=TenantLimits(**fits)), of(acme=TenantLimits(storage_bytes=1_639)))  # type: ignore[arg-type]  # fmt: skip
    assert (same.now.refused, same.new.limits) == (0, {"storage_bytes": 1})


async def test_an_empty_folder_has_no_traffic(tmp_path: Path, small: Callable[..., Settings]) -> None:  # fmt: skip
    async with penstock.connect(tmp_path / "data", settings=small()):
        pass
    found = read_traffic(tmp_path / "data", small(), 60)
    assert (found.batches, rehearse(found, of(), of())) == ([], [])

"""Every case of `penstock bench` runs, and its figures rest on right counts (row T12)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from penstock.bench import Sample, Window, list_cases, route, soak
from penstock.bench.case import load_cases
from penstock.bench.cases import deliver, publish, read, recover, workload
from penstock.model.errors import PenstockError
from penstock.model.settings import MIB, Journal, Retention, Sealing, Settings

WINDOW_S = 0.2
FILL_EVENTS = 30_000
LEASED_EVENTS = 20_000

NAMES = [
    "publish-batched",
    "publish-awaited",
    "publish-serial",
    "queue",
    "fanout",
    "mixed",
    "read-batches",
    "read-events",
    "route",
    "recover",
]


@pytest.fixture
def window(tmp_path: Path) -> Window:
    shared = tmp_path / "shared"
    shared.mkdir()
    folder = tmp_path / "turn"
    folder.mkdir()
    return Window(WINDOW_S, folder, shared)


async def measured(name: str, window: Window) -> Sample:
    case = load_cases()[name]
    if case.prepare is not None:
        await case.prepare(window)
    sample = await case.penstock(window)
    assert sample.per_s > 0
    assert 0 < sample.p50_ms <= sample.p95_ms <= sample.p99_ms
    assert sample.cpu > 0
    assert sample.rss_mb > 10
    return sample


async def read_back(folder: Path) -> list[bytes]:
    async with workload.open_bus(folder) as bus:
        return [event.payload async for event in bus.replay("bench.#")]


def test_list_shows_every_case() -> None:
    assert [row["case"] for row in list_cases() if row["case"] in NAMES] == NAMES


@pytest.mark.parametrize(
    ("name", "inner"),
    [("publish-batched", ""), ("publish-awaited", ""), ("publish-serial", "bus")],
)
async def test_everything_published_is_readable(window: Window, name: str, inner: str) -> None:
    sample = await measured(name, window)
    payloads = await read_back(window.folder / inner)
    assert len(payloads) == sample.extra["published"] > 0
    assert set(payloads) <= {payload for batch in window.batches() for payload in batch}


async def test_publish_batched_uses_all_topics(window: Window) -> None:
    sample = await measured("publish-batched", window)
    assert sample.extra["write_amplification"] >= 0
    async with workload.open_bus(window.folder) as bus:
        topics = await bus.topics.list()
    ends = [topic.partitions[0].end_offset for topic in topics]
    assert len(ends) == publish.BATCHED_TOPICS
    assert max(ends) - min(ends) <= window.batch_events, "calls rotate over the topics"


async def test_publish_serial_stands_beside_the_disk(window: Window) -> None:
    extra = (await measured("publish-serial", window)).extra
    assert extra["fdatasync_p99_ms"] > 0
    assert extra["p99_to_fdatasync_p99"] > 0


async def test_queue_leaves_nothing_unacked(window: Window) -> None:
    sample = await measured("queue", window)
    async with workload.open_bus(window.folder) as bus:
        [group] = await bus.groups.list()
        assert (group.lag, group.outstanding) == (0, 0)
        assert await workload.stored(bus) == sample.extra["published"] > 0


async def test_an_event_acked_twice_or_never_spoils_the_figure(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(bus: object, topic: str, count: object) -> None:
        """A handler that is never registered."""

    monkeypatch.setattr(deliver, "_handle", deaf)
    monkeypatch.setattr(deliver, "DRAIN_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError):
        await deliver.queue(window)


async def test_fanout_counts_deliveries(window: Window) -> None:
    sample = await measured("fanout", window)
    async with workload.open_bus(window.folder) as bus:
        assert await workload.stored(bus) == sample.extra["published"] > 0


async def test_mixed_serves_every_topic(window: Window) -> None:
    sample = await measured("mixed", window)
    async with workload.open_bus(window.folder) as bus:
        topics = await bus.topics.list()
    ends = [topic.partitions[0].end_offset for topic in topics]
    assert len(ends) == deliver.MIXED_TOPICS
    assert min(ends) > 0
    assert sum(ends) == sample.extra["published"]


@pytest.mark.parametrize("name", ["read-batches", "read-events"])
async def test_read_joins_segments_and_journal(
    window: Window, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "FILL_EVENTS", FILL_EVENTS)
    extra = (await measured(name, window)).extra
    assert extra["stored"] == FILL_EVENTS
    assert extra["passes"] >= 1
    assert 0 < extra["sealed_share"] < 1, "part is sealed, part is journal"


async def test_route_tells_of_both_sizes(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"per_s": 100_000, "per_s_1k": 150_000, "slowdown": 1.5, "bytes_per_pattern": 300}
    monkeypatch.setattr(route, "measure", lambda: dict(figures))
    sample = await load_cases()["route"].penstock(window)  # too quick to use measurable CPU
    assert sample.per_s == figures["per_s"]
    assert sample.p50_ms == pytest.approx(0.01)
    assert sample.extra["slowdown"] == figures["slowdown"]


async def test_recover_finds_every_lease(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "LEASED_EVENTS", LEASED_EVENTS)
    # The whole machine's page cache is not a test's to drop.
    monkeypatch.setattr(recover, "DROP_CACHES", window.folder / "missing" / "drop_caches")
    sample = await measured("recover", window)
    assert sample.mb_per_s is not None
    assert sample.mb_per_s > 0
    assert sample.extra["leases"] == LEASED_EVENTS


async def test_soak_publishes_keeps_to_retention_and_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_bytes = 24 * MIB
    settings = Settings(
        journal=Journal(file_bytes=4 * MIB),
        retention=Retention(age_s=None, max_bytes=keep_bytes),
        # In line, because a process takes seconds to start where tests run side by side.
        sealing=Sealing(process=False, backlog_max_bytes=8 * MIB, grace_s=0.0),
    )
    monkeypatch.setattr(soak, "SETTINGS", settings)
    monkeypatch.setattr(soak, "KEEP_BYTES", keep_bytes)
    monkeypatch.setattr(soak, "READING_S", 0.2)
    monkeypatch.setattr(soak, "QUIET_S", 6.0)
    result = await soak.soak(tmp_path / "bus", seconds=60, journal_bytes=40e6)
    assert result["journal_bytes"] >= 40e6
    assert result["events"] > 300_000
    assert result["burst_per_s"] > 0
    assert result["problem"] is None
    assert 0 < result["kept_bytes"] <= keep_bytes
    assert result["folder_bytes"] <= result["folder_limit_bytes"]
    assert result["folder_bounded"]
    assert result["readings"][-1]["rss_mb"] > 10


def test_soak_sees_memory_that_grows() -> None:
    steady = [soak.Reading(10.0 * at, 0, 300.0 + at % 2, 0, 0, 0) for at in range(60)]
    leaking = [soak.Reading(10.0 * at, 0, 300.0 + at / 3, 0, 0, 0) for at in range(60)]
    assert abs(soak.slope_mb_per_min(steady)) < soak.MAX_SLOPE_MB_PER_MIN
    assert soak.slope_mb_per_min(leaking) == pytest.approx(2.0)


def test_soak_forgives_the_first_two_minutes() -> None:
    warming = [soak.Reading(10.0 * at, 0, min(300.0, 40.0 * at), 0, 0, 0) for at in range(60)]
    assert soak.slope_mb_per_min(warming) == pytest.approx(0.0)


def test_a_wrong_count_is_refused() -> None:
    workload.expect(3, 3, "stored")
    with pytest.raises(PenstockError, match="2 events are stored where 3 were expected"):
        workload.expect(2, 3, "stored")


async def test_together_stops_the_others_when_one_fails() -> None:
    stopped = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise PenstockError("no")

    with pytest.raises(ExceptionGroup):
        await workload.together(wait(), fail())
    assert stopped.is_set()


def test_disk_writes_are_counted(tmp_path: Path) -> None:
    writes = workload.DiskWrites()
    path = tmp_path / "block"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    found = writes.per_byte(1 << 20)
    assert found == 0 or found >= 1, "0 where the kernel does not count, and on tmpfs"

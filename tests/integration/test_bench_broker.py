"""Every case through a broker runs, its clients in processes of their own, and its books balance (T12).

The cases themselves raise when a count is wrong; here they run for a moment, and the counts they
report are compared once more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.bench import Sample, Window, list_cases
from penstock.bench.case import load_cases
from penstock.bench.cases import broker_consumers, broker_fair, broker_fuzzed, broker_matrix
from penstock.bench.cases.broker_fair import NOISY_TOPIC
from penstock.bench.cases.broker_flow import FLOW, Orders, Stream, flow
from penstock.bench.cases.broker_peer import PenstockBroker, stored_in
from penstock.bench.cases.broker_queue import fanout_apart, queue_apart
from penstock.bench.client_process import Crew, all_of
from penstock.bench.peers import Peer
from penstock.model.errors import PenstockError
from penstock.model.settings import MIB
from penstock.testing.broker_process import BrokerProcess

WINDOW_S = 0.3
NAMES = [
    "broker-publish-batched",
    "broker-queue",
    "broker-latency",
    "broker-direct-ack",
    "broker-fanout",
    "broker-mixed",
    "broker-consumers",
    "neighbour",
    "large",
    "fuzzed",
    "fuzzed-zmq",
    "matrix",
    "batch-cost",
]


async def measured(name: str, tmp_path: Path) -> Sample:
    """One turn of a case."""
    case = load_cases()[name]
    folder = tmp_path / "turn"
    folder.mkdir()
    async with Crew(tmp_path, *case.parts) as clients:
        sample = await case.penstock(Window(WINDOW_S, folder, tmp_path, clients=clients))
    assert sample.per_s > 0
    assert 0 < sample.p50_ms <= sample.p95_ms <= sample.p99_ms
    assert sample.cpu > 0
    assert sample.rss_mb > 10
    assert sample.server_cpu is not None
    assert sample.server_cpu > 0
    assert sample.server_rss_mb is not None
    assert sample.server_rss_mb > 10
    assert not (folder / "broker").exists(), "the broker and its data are gone"
    return sample


def test_list_shows_every_case_with_a_title() -> None:
    rows = {str(row["case"]): row for row in list_cases()}
    assert [name for name in rows if name in NAMES] == NAMES
    assert all(rows[name]["title"] for name in NAMES)
    assert rows["broker-queue"]["peers"] == ["jetstream", "jetstream-sync", "redis", "rabbitmq"]
    assert "redis" in rows["broker-publish-batched"]["peers"]  # type: ignore[operator]


async def test_publish_batched(tmp_path: Path) -> None:
    sample = await measured("broker-publish-batched", tmp_path)
    assert sample.extra["published"] >= 1_000


async def test_queue(tmp_path: Path) -> None:
    sample = await measured("broker-queue", tmp_path)
    assert sample.extra["published"] >= 1_000
    assert sample.extra["publish_p50_ms"] < sample.p99_ms


async def test_latency_stands_beside_the_disk(tmp_path: Path) -> None:
    sample = await measured("broker-latency", tmp_path)
    extra = sample.extra
    assert extra["fdatasync_p50_ms"] > 0
    assert sample.p50_ms == pytest.approx(
        extra["fdatasync_p50_ms"] + extra["p50_over_fdatasync_ms"]
    )
    assert sample.p50_ms > extra["publish_p50_ms"] / 2


async def test_direct_ack(tmp_path: Path) -> None:
    sample = await measured("broker-direct-ack", tmp_path)
    assert sample.extra["published"] > 0
    assert sample.extra["deferred"] >= 0
    assert abs(sample.extra["blocks_per_op"]) < 1_000


async def test_fanout_counts_deliveries(tmp_path: Path) -> None:
    sample = await measured("broker-fanout", tmp_path)
    assert sample.extra["published"] >= 1_000
    assert "blocks_per_op" in sample.extra


async def test_mixed(tmp_path: Path) -> None:
    sample = await measured("broker-mixed", tmp_path)
    assert sample.extra["published"] >= 800, "every topic was served"
    assert "blocks_per_op" in sample.extra


async def test_every_consumer_gets_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_consumers, "CONSUMERS", 30)
    sample = await measured("broker-consumers", tmp_path)
    extra = sample.extra
    assert extra["consumers"] == 30
    assert extra["events_each"] == broker_consumers.EVENTS_PER_S
    assert 0 < extra["slowest_per_s"] <= extra["median_per_s"] <= broker_consumers.EVENTS_PER_S
    assert 0 < extra["burst_slowest_per_s"] <= broker_consumers.EVENTS_PER_S


async def test_neighbour_is_refused_what_is_over_its_quota(tmp_path: Path) -> None:
    """T11: nine of ten are refused, the other tenant is not refused at all."""
    extra = (await measured("neighbour", tmp_path)).extra
    assert extra["refused"] > 0
    assert extra["accepted"] > 0
    assert extra["p99_ratio"] > 0
    assert extra["times_quota"] > 2, "far over its quota, also on a busy machine"


async def test_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T13."""
    monkeypatch.setattr(broker_fair, "LARGE_BYTES", 2 * MIB)
    extra = (await measured("large", tmp_path)).extra
    assert extra["large"] >= 1
    assert extra["p99_ratio"] > 0


@pytest.mark.parametrize("name", ["fuzzed", "fuzzed-zmq"])
async def test_fuzzed(tmp_path: Path, name: str) -> None:
    """T1, Q1: the publisher that is timed sees no error, or the case would have raised."""
    extra = (await measured(name, tmp_path)).extra
    assert 0 < extra["hung_up"] <= extra["connections"]
    assert extra["p99_ratio"] > 0


async def test_the_other_publisher_has_a_processor_of_its_own() -> None:
    """T11: what it takes of the machine is not what it takes of the broker."""
    *rest, last = sorted(os.sched_getaffinity(0))
    children = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
    try:
        broker_fair.set_apart(children[0].pid, [children[1].pid])
        found = [os.sched_getaffinity(child.pid) for child in children]
    finally:
        for child in children:
            child.kill()
            await child.wait()
    assert found == ([{last}, set(rest)] if rest else [{last}, {last}])


async def test_the_honest_half_of_a_hostile_client(tmp_path: Path) -> None:
    """T1, Q1: what is damaged is a conversation that the broker would have taken."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        async with penstock.connect(broker.url()) as bus:
            await bus.topics.create(NOISY_TOPIC)
            for number, (transport, make) in enumerate(broker_fuzzed.SPEECHES.items(), 1):
                speech = make()
                both = await asyncio.open_connection("127.0.0.1", broker.ports[transport])
                async with asyncio.timeout(20):
                    await broker_fuzzed.tell(*both, speech.said(), len(speech.opening))
                    while await stored_in(bus, NOISY_TOPIC) != 10 * number:
                        await asyncio.sleep(0.01)
                both[1].close()


async def test_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_matrix, "COMPRESSORS", ("none", "zstd"))
    monkeypatch.setattr(broker_matrix, "CONNECTIONS", (2,))
    sample = await measured("matrix", tmp_path)
    assert sample.mb_per_s is not None
    for cell in broker_matrix.cells():
        for figure in (*broker_matrix.CELL_FIGURES, "blocks_per_op"):
            assert f"{cell.name}.{figure}" in sample.extra
        assert sample.extra[f"{cell.name}.per_s"] > 0


async def test_batch_cost_compares_frames(tmp_path: Path) -> None:
    extra = (await measured("batch-cost", tmp_path)).extra
    assert extra["one_event_cpu_us"] > 0
    assert extra["batch_to_one"] == pytest.approx(extra["batch_cpu_us"] / extra["one_event_cpu_us"])
    assert extra["published"] == extra["frames"] / 2 * 1_001


# -- the books can fail ----------------------------------------------------------------------------


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[PenstockBroker]:
    broker = PenstockBroker()
    await broker.start(tmp_path / "broker")
    await broker.open("queue")
    yield broker
    await broker.stop()


def one_queue(boards: list[str]) -> Orders:
    given: dict[str, Any] = {"shape": "queue", "seats": [(boards[0], 0)], "server_pid": None}
    return [("subscribe", given)]


async def test_an_event_too_many_spoils_the_figure(broker: PenstockBroker, tmp_path: Path) -> None:
    await broker.bus.publish(broker.topics[0], b"from somebody else")
    async with Crew(tmp_path, FLOW, FLOW) as (producer, consumer):
        for client in (producer, consumer):
            await client.order("join", peer="penstock", tickets=[broker.ticket()])
        stream = Stream(tmp_path, WINDOW_S, batch_events=10)
        with pytest.raises(PenstockError, match="events are delivered where"):
            await flow(stream, producer, [consumer], one_queue)


async def test_a_broker_that_fails_tells_its_log(tmp_path: Path) -> None:
    broker = PenstockBroker(journal__file_bytes="nonsense")
    window = Window(WINDOW_S, tmp_path, tmp_path)
    with pytest.raises(PenstockError, match="did not start") as caught:
        async with broker.serving(window):
            pass
    assert "file_bytes" in caught.value.__notes__[0]


async def test_stored_in_counts_one_topic(broker: PenstockBroker) -> None:
    await broker.bus.topics.create("bench.other")
    await broker.bus.publish_many("bench.other", [b"1", b"2", b"3"])
    assert await stored_in(broker.bus, "bench.other") == 3
    assert await stored_in(broker.bus, broker.topics[0]) == 0
    assert await broker.stored() == 3


# -- peers, producer and consumer apart ------------------------------------------------------------


@pytest.mark.parametrize("peer", ["jetstream", "redis", "rabbitmq"], indirect=True)
async def test_peers_run_apart_too(peer: Peer, tmp_path: Path) -> None:
    await peer.start(tmp_path / "server")
    folder = tmp_path / "turn"
    folder.mkdir()
    try:
        async with Crew(tmp_path, FLOW, FLOW, FLOW) as clients:
            for run, used in ((queue_apart, 2), (fanout_apart, 3)):
                window = Window(
                    WINDOW_S, folder, tmp_path, batch_events=100, clients=clients[:used]
                )
                sample = await run(peer, window)
                assert sample.per_s > 0
                assert sample.extra["published"] >= 100
                assert sample.server_cpu is not None
            await all_of(*(client.order("leave") for client in clients))
    finally:
        await peer.stop()

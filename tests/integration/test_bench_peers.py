"""Each peer is really started and does each operation; the server is asked what it holds (row T12)."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from penstock.bench import CASES, Case, Meter, Sample, Window, register, run_case
from penstock.bench.peers import make_peer
from penstock.bench.peers import operation as operation_module
from penstock.bench.peers.operation import OPERATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.bench.peers import Peer

WINDOW_S = 0.1

COUNTING = ["jetstream", "jetstream-sync", "redis"]  # RabbitMQ reports the length of a queue late


@pytest.mark.parametrize("peer", [*COUNTING, "rabbitmq"], indirect=True)
async def test_each_operation_and_what_the_server_counts(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_module, "FILL_MAX_S", 0.1)
    assert peer.server_pid is None
    await peer.start(tmp_path / "server")
    try:
        window = Window(WINDOW_S, tmp_path, tmp_path, batch_events=100, server_pid=peer.server_pid)
        for operation, run in OPERATIONS.items():
            sample = await run(peer, window)
            assert sample.per_s > 0, operation
            assert 0 < sample.p50_ms <= sample.p95_ms <= sample.p99_ms, operation
            assert sample.server_rss_mb is not None
            assert sample.server_rss_mb > 3, operation
            published = sample.extra.get("published", 0)
            if operation.startswith("publish"):
                assert await peer.stored() == published > 0
            elif operation == "queue":
                assert await peer.leftover() == 0
            elif operation == "fanout":
                assert published > 0
            else:
                assert await peer.stored() == sample.extra["stored"] > 0
    finally:
        await peer.stop()
    assert peer.server_pid is None
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("peer", COUNTING, indirect=True)
async def test_publish_returns_after_the_server_has_all_of_it(peer: Peer, tmp_path: Path) -> None:
    await peer.start(tmp_path / "server")
    try:
        await peer.open("queue")
        payloads = [b"%04d" % number for number in range(500)]
        await peer.publish(payloads)
        assert await peer.stored() == 500
        await peer.publisher(1)(b"one more")
        await asyncio.gather(*(peer.publisher(10)(payload) for payload in payloads[:10]))
        assert await peer.stored() == 511
        counted: list[int] = []
        async with peer.deliver("queue", counted.append):
            async with asyncio.timeout(5):
                while sum(counted) < 511:
                    await asyncio.sleep(0.01)
        assert sum(counted) == 511
        async with asyncio.timeout(5):  # acks are sent, not awaited: the server gets to them soon
            while await peer.leftover():
                await asyncio.sleep(0.01)
        await peer.open("queue")
        assert await peer.stored() == 0
    finally:
        await peer.stop()


async def test_unacked_events_are_seen_as_left_over(tmp_path: Path) -> None:
    """The check behind `queue` can fail: events that nobody consumed are reported."""
    peer = make_peer("jetstream")
    await peer.start(tmp_path / "server")
    try:
        await peer.open("queue")
        counted: list[int] = []
        async with peer.deliver("queue", counted.append):
            pass
        await peer.publish([b"a", b"b", b"c"])
        assert await peer.leftover() == 3
        assert counted == []
    finally:
        await peer.stop()


def test_a_case_against_real_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def penstock(window: Window) -> Sample:
        with Meter(window.seconds) as meter:
            while meter.running:
                await asyncio.sleep(0.001)
                meter.add(0.001, events=1000)
        return meter.sample()

    monkeypatch.setattr("penstock.bench.case.load_cases", lambda: CASES)
    register(Case("itself", "Sleeps", penstock, operation="publish_batched"))
    try:
        vs = ["jetstream", "redis"] if shutil.which("redis-server") else ["jetstream"]
        result: dict[str, Any] = run_case("itself", vs, folder=tmp_path, seconds=0.1, rounds=2)
    finally:
        del CASES["itself"]
    assert set(result["peers"]) == set(result["ratio"]) == set(vs)
    assert result["left_out"] == {}
    for name in vs:
        assert result["ratio"][name] > 0
        assert {"per_s", "p50_ms", "p95_ms", "p99_ms", "cpu", "rss_mb", "server_cpu"} <= set(
            result["peers"][name]
        )
    json.dumps(result)
    assert list(tmp_path.iterdir()) == []

"""What benchmarks through a broker rest on (row T12): boards, client processes, and their sums."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import CASES, Case, Sample, Window, register, run_case
from penstock.bench.cases import (
    broker_board,
    broker_consumers,
    broker_fair,
    broker_fuzzed,
    broker_matrix,
)
from penstock.bench.cases.broker import BROKER_CASES
from penstock.bench.cases.broker_blocks import Blocks
from penstock.bench.cases.broker_board import Board
from penstock.bench.cases.broker_flow import Flowed, FlowPart
from penstock.bench.cases.broker_paced import PacedPart
from penstock.bench.cases.broker_publish import process_cpu_s
from penstock.bench.cases.broker_text import texts
from penstock.bench.client_process import ClientProcess, Crew, all_of, clean_environment
from penstock.bench.measure import Meter
from penstock.model.errors import BrokerUnreachable, Deferred, PenstockError
from penstock.wire.frame import Kind
from penstock.wire.negotiation import NEGOTIATE
from penstock.wire.stream import StreamReader, decode_frame

LOCK = "asyncio:Lock"  # a class with one call that returns and one that waits: `acquire`, twice


# -- boards ----------------------------------------------------------------------------------------


def test_a_board_is_shared_and_times_batches(tmp_path: Path) -> None:
    ours = Board.make(tmp_path / "board", consumers=2)
    theirs = Board(tmp_path / "board")
    meter = Meter(1)
    with meter:
        first, second = (theirs.counter(place, 10, meter) for place in range(2))
        ours.begin()
        ours.begin()
        first(10)
        first(10)
        second(9)
        assert ours.ahead(10) == 2, "one consumer has not had the first batch"
        second(1)
        assert ours.ahead(10) == 1
        assert ours.received == [20, 10]
        second(13)  # more than was published: counted, for the books to show
    assert (first.events, second.events) == (20, 23)
    assert meter.events == 40, "whole batches are timed"
    assert meter.sample().p99_ms > 0


async def test_a_producer_waits_for_the_slowest_consumer(tmp_path: Path) -> None:
    board = Board.make(tmp_path / "board", consumers=2)
    for _ in range(3):
        board.begin()
    board.had(0, 30)
    waiting = asyncio.create_task(board.room(3, 10))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    board.had(1, 10)
    await waiting


async def test_everything_is_known_only_when_the_producer_is_done(tmp_path: Path) -> None:
    board = Board.make(tmp_path / "board", consumers=1)
    board.had(0, 20)
    waiting = asyncio.create_task(board.everything(0))
    await asyncio.sleep(0.02)
    assert not waiting.done(), "the producer may go on"
    board.finish(30)
    await asyncio.sleep(0.02)
    assert not waiting.done(), "ten are missing"
    board.had(0, 30)
    await waiting


async def test_a_stuck_consumer_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_board, "STALLED_S", 0.05)
    board = Board.make(tmp_path / "board", consumers=1)
    board.begin()
    with pytest.raises(PenstockError, match="got nothing"):
        await board.room(1, 10)
    board.finish(10)
    with pytest.raises(PenstockError, match="got nothing"):
        await board.everything(0)


# -- client processes ------------------------------------------------------------------------------


async def test_orders_are_carried_out_in_another_process(
    tmp_path: Path, gone: Callable[..., bool]
) -> None:
    async with Crew(tmp_path, LOCK, LOCK) as clients:
        assert await all_of(*(client.order("acquire") for client in clients)) == [True, True]
        pids = {client.pid for client in clients}
        assert len(pids) == 2
        assert os.getpid() not in pids
    for pid in pids:
        assert gone(pid)


async def test_a_failed_order_says_why_and_the_next_one_starts_anew(tmp_path: Path) -> None:
    client = ClientProcess(LOCK, tmp_path / "log")
    try:
        await client.order("acquire")
        with pytest.raises(PenstockError, match=r"AttributeError.*no_such_order"):
            await client.order("no_such_order")
        assert await client.order("acquire") is True, "a new process, a new lock"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.order("acquire")  # waits for ever
        assert await client.order("acquire") is True
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(PenstockError, match="ended in 'locked'"):
            await client.order("locked")
    finally:
        await client.stop()
        await client.stop()


async def test_one_failure_gives_up_the_other_orders(tmp_path: Path) -> None:
    async with Crew(tmp_path, LOCK, LOCK) as (first, second):
        await first.order("acquire")
        began = time.monotonic()
        with pytest.raises(PenstockError, match="no_such_order"):
            await all_of(first.order("acquire"), second.order("no_such_order"))
        assert time.monotonic() - began < 30


def test_a_client_dies_with_us_even_by_kill_9(tmp_path: Path, gone: Callable[..., bool]) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from penstock.bench.client_process import ClientProcess\n"
        "async def main():\n"
        f"    client = ClientProcess({LOCK!r}, Path({str(tmp_path / 'log')!r}))\n"
        "    await client.order('acquire')\n"
        "    print(client.pid, flush=True)\n"
        "    await client.order('acquire')\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=clean_environment()
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child, 0.1)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert gone(child)


def test_settings_of_this_machine_do_not_reach_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DURABILITY_FSYNC", "never")
    monkeypatch.setenv("HOME", "/nowhere")
    environment = clean_environment()
    assert "PENSTOCK_DURABILITY_FSYNC" not in environment
    assert environment["HOME"] == "/nowhere"


# -- what is published, and what it costs ----------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [16, 100, 4096, 256 << 10, 3 << 20])
def test_texts_have_their_size_and_compress_like_texts(size_bytes: int) -> None:
    made = texts(size_bytes, 4, seed=7)
    assert {len(text) for text in made} == {size_bytes}
    assert len(set(made)) == 4
    assert made == texts(size_bytes, 4, seed=7)
    assert made != texts(size_bytes, 4, seed=8)
    if size_bytes >= 4096:
        assert 2 < size_bytes / len(zlib.compress(made[0])) < 6


def test_blocks_see_what_is_kept_and_switch_the_collector_on_again() -> None:
    kept: list[Any] = []
    with Blocks(True) as blocks:
        assert not gc.isenabled()
        kept += [object() for _ in range(5_000)]
    assert gc.isenabled()
    assert 4_000 < blocks.left < 6_000  # other threads of the process free some meanwhile
    with Blocks(False) as blocks:
        kept += [object() for _ in range(5_000)]
    assert blocks.left == 0


def test_cpu_of_a_process_grows_with_its_work() -> None:
    before = process_cpu_s(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    assert 0.04 < process_cpu_s(os.getpid()) - before < 1


class Busy:
    """A bus that takes every second call and defers the others."""

    def __init__(self) -> None:
        self.calls = 0

    async def publish(self, topic: str, payload: bytes) -> None:
        self.calls += 1
        refuse = self.calls % 2 == 0
        await asyncio.sleep(0)
        if refuse:
            raise Deferred("not now", retry_after_s=0.0)

    async def publish_many(self, topic: str, payloads: list[bytes]) -> None:
        await self.publish(topic, payloads[0])


@pytest.mark.parametrize("batch_events", [1, 20])
async def test_a_pace_is_kept_and_refusals_are_counted(batch_events: int) -> None:
    part = PacedPart()
    part._bus = bus = Busy()
    start = time.perf_counter()
    found = await part.pace("t", 4_000, 0.5, start, batch_events)
    assert found["events"] + found["refused"] == bus.calls * batch_events
    assert abs(found["events"] - found["refused"]) <= batch_events
    # All that was due was sent, late or not: a busy machine sends it in bunches.
    assert 0.9 * 4_000 * 0.5 <= bus.calls * batch_events <= 1.5 * 4_000 * found["seconds"]


@pytest.mark.parametrize(("warm_s", "timed"), [(0.0, True), (60.0, False)])
async def test_what_comes_before_a_pace_is_warm_counts_and_is_not_timed(
    warm_s: float, timed: bool
) -> None:
    """T11: publishers begin together, out of a pause; that moment would decide a p99."""
    part = PacedPart()
    part._bus = Busy()
    found = await part.pace("t", 1_000, 0.2, time.perf_counter(), warm_s=warm_s)
    assert found["events"] > 0
    assert len(found["latencies_s"]) == (found["events"] if timed else 0)


async def test_an_unexpected_error_ends_the_pace() -> None:
    class Gone:
        async def publish(self, topic: str, payload: bytes) -> None:
            raise BrokerUnreachable("no broker")

    part = PacedPart()
    part._bus = Gone()
    with pytest.raises(ExceptionGroup):
        await part.pace("t", 1_000, 5.0, time.perf_counter())


# -- sums ------------------------------------------------------------------------------------------


def figures(per_s: float, **more: float) -> dict[str, Any]:
    found = {"per_s": per_s, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0, "cpu": 0.5}
    return found | {"rss_mb": 50.0} | more


def part(per_s: float, blocks: int = 0, **more: float) -> dict[str, Any]:
    return {"sample": figures(per_s, **more), "events": [0], "blocks": blocks}


def test_a_flow_adds_up_rates_and_takes_the_slowest_latency() -> None:
    consumers = [
        part(100, blocks=10, server_cpu=0.7, server_rss_mb=90.0),
        part(300, blocks=20, p99_ms=9.0),
    ]
    flowed = Flowed(20, part(400, blocks=30, p99_ms=4.0), consumers)
    sample = flowed.sample(more=1.0)
    assert (sample.per_s, sample.p50_ms, sample.p99_ms) == (400, 1.0, 9.0)
    assert (sample.cpu, sample.rss_mb) == (1.5, 150)
    assert (sample.server_cpu, sample.server_rss_mb) == (0.7, 90.0)
    assert sample.extra["publish_p99_ms"] == 4.0
    assert sample.extra["more"] == 1.0
    assert flowed.blocks_per_op == 3.0


def test_the_slowest_consumer_counts_and_none_is_faster_than_it_was_fed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_consumers, "CONSUMERS", 4)
    each = 2 * broker_consumers.EVENTS_PER_S
    consumed = [part(10) | {"seconds": {"a": 1.0, "b": 2.0}}, part(10) | {"seconds": {"c": 4.0}}]
    produced = figures(10, server_cpu=0.1, server_rss_mb=9.0)
    sample = broker_consumers._sample(each, produced, consumed)
    assert sample.extra["slowest_per_s"] == each / 4
    assert sample.extra["median_per_s"] == broker_consumers.EVENTS_PER_S
    assert sample.per_s == each * 4 / 4


def test_a_neighbour_is_judged_by_the_p99_of_the_turn_in_the_middle() -> None:
    """T11: the machine pauses in a turn of either kind, and that is no neighbour's doing."""

    def turn(*latencies_ms: float) -> dict[str, Any]:
        return {"sample": figures(500), "latencies_s": [each / 1000 for each in latencies_ms]}

    alone = [turn(1, 2), turn(1, 2), turn(1, 2)]
    beside = [turn(2, 3), turn(2, 3), turn(2, 90)]
    sample = broker_fair._sample(alone, beside, [{"sample": figures(9)}] * 2)
    assert (sample.extra["p50_ratio"], sample.extra["p99_ratio"]) == (2.0, 1.5)
    assert sample.extra["pooled_p99_ratio"] == 45.0
    assert sample.extra["alone_p99_ms"] == 2.0
    assert (sample.per_s, sample.p99_ms, sample.cpu, sample.rss_mb) == (500, 3.0, 1.0, 100.0)


def test_hostile_clients_break_a_conversation_that_was_whole() -> None:
    """T1, Q1: what they damage would get far, and the same seed says the same again."""
    (first, _), *others = StreamReader(1 << 20).feed(broker_fuzzed.over_tcp().said())
    kinds = [decode_frame(message, 1 << 20).kind for message in others]
    assert first == NEGOTIATE
    assert kinds == [Kind.HELLO, Kind.PUBLISH, Kind.HEARTBEAT]
    for make in broker_fuzzed.SPEECHES.values():
        speech = make()
        whole = speech.said()
        for broken in broker_fuzzed.BROKEN:
            said = [broken(speech, random.Random(seed)) for seed in range(200)]
            assert said == [broken(speech, random.Random(seed)) for seed in range(200)]
            assert all(said), broken.__name__
            assert whole not in said, broken.__name__
            assert len(set(said)) > 20, broken.__name__


def test_the_matrix_has_every_combination_with_every_figure() -> None:
    names = [cell.name for cell in broker_matrix.cells()]
    assert len(names) == len(set(names)) == 3 * 3 * 2
    flowed = Flowed(10, part(1), [part(1_000, server_cpu=0.1, server_rss_mb=9.0)])
    probed = Flowed(10, part(1, blocks=5), [part(1)])
    measured = {
        cell.name: broker_matrix._figures(cell, flowed, probed) for cell in broker_matrix.cells()
    }
    sample = broker_matrix._sample(measured)
    wanted = {*broker_matrix.CELL_FIGURES, "blocks_per_op"}
    assert set(sample.extra) == {f"{name}.{figure}" for name in names for figure in wanted}
    assert sample.extra["medium.zstd.4.mb_per_s"] == pytest.approx(1_000 * 4096 / 1e6)
    assert sample.extra["large.none.1.blocks_per_op"] == 0.5


# -- the table and the runner ----------------------------------------------------------------------


def test_every_case_has_a_title_that_fits_a_line_and_parts_that_exist() -> None:
    parts = {part for case in BROKER_CASES for part in case.parts}
    for case in BROKER_CASES:
        assert len(case.title) <= 90, case.name
    for part in parts:
        module, _, name = part.partition(":")
        assert callable(getattr(sys.modules[module], name)().leave)


def test_the_runner_starts_parts_once_and_lets_peers_run_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: Callable[..., bool]
) -> None:
    pids: list[int] = []
    made = Sample(per_s=100, p50_ms=1, p95_ms=1, p99_ms=1, cpu=1, rss_mb=1)

    async def penstock(window: Window) -> Sample:
        [client] = window.clients
        pids.append(client.pid)
        return made

    class Peer:
        name, pipeline_depth, server_pid = "redis", 1, None

        async def start(self, folder: Path) -> None: ...
        async def stop(self) -> None: ...

    async def operate(peer: Any, window: Window) -> Sample:
        [client] = window.clients
        pids.append(client.pid)
        return Sample(per_s=50, p50_ms=1, p95_ms=1, p99_ms=1, cpu=1, rss_mb=1)

    monkeypatch.setattr("penstock.bench.runner.make_peer", lambda name: Peer())
    monkeypatch.setattr("penstock.bench.case.load_cases", lambda: CASES)
    register(Case("apart", "Apart", penstock, operation=operate, rounds=2, parts=(LOCK,)))
    try:
        result = run_case("apart", ["redis"], folder=tmp_path, seconds=0.1)
    finally:
        del CASES["apart"]
    assert result["rounds"] == 2
    assert result["ratio"] == {"redis": 2.0}
    assert result["machine"]["load_1m"] >= 0
    assert len(pids) == 4
    assert len(set(pids)) == 1
    assert gone(pids[0])


async def test_a_flow_part_can_leave_without_having_joined() -> None:
    await FlowPart().leave()

"""How a benchmark case is run (row T12): turns, medians, time limits, peers left out."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.bench import (
    CASES,
    Case,
    Sample,
    complete,
    list_cases,
    register,
    result_table,
    run_case,
    runner,
)
from penstock.bench.peers import make_peer
from penstock.bench.peers.operation import OPERATIONS
from penstock.model.errors import (
    AlreadyExists,
    InvalidSettings,
    MissingExtra,
    NotFound,
    PenstockError,
    RequestTimedOut,
)

if TYPE_CHECKING:
    from pathlib import Path


def sample(per_s: float = 1000.0, **figures: Any) -> Sample:
    defaults = {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0, "cpu": 0.5, "rss_mb": 50.0}
    return Sample(per_s=per_s, **(defaults | figures))


class FakePeer:
    """A peer without a server, which notes what the runner does with it."""

    pipeline_depth = 1
    server_pid = None

    def __init__(self, name: str, log: list[str], *, fail_start: str = "") -> None:
        self.name, self.log, self.fail_start = name, log, fail_start

    async def start(self, folder: Path) -> None:
        self.log.append(f"start {self.name}")
        if self.fail_start:
            raise PenstockError(self.fail_start)

    async def stop(self) -> None:
        self.log.append(f"stop {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Peers that answer a fixed rate per round, and a clean table of cases."""
    found: list[str] = []
    monkeypatch.setattr(runner, "make_peer", lambda name: FakePeer(name, found))
    monkeypatch.setattr(runner, "load_cases", lambda: CASES)
    monkeypatch.setattr("penstock.bench.case.load_cases", lambda: CASES)
    saved = dict(CASES)
    CASES.clear()

    async def operate(peer: Any, window: Any) -> Sample:
        found.append(f"{peer.name} {window.turn}")
        return sample({"jetstream": 100.0, "redis": [10.0, 20.0, 40.0][window.turn % 3]}[peer.name])

    monkeypatch.setitem(OPERATIONS, "queue", operate)
    yield found
    CASES.clear()
    CASES.update(saved)


def add_case(log: list[str], **options: Any) -> None:
    async def penstock(window: Any) -> Sample:
        assert window.folder.is_dir()
        log.append(f"penstock {window.turn}")
        return sample(1000.0 + window.turn)

    register(Case("fake", "A case for tests", options.pop("penstock", penstock), **options))


def test_turns_rotate_and_ratio_is_the_median_of_rounds(log: list[str], tmp_path: Path) -> None:
    add_case(log, operation="queue")
    result = run_case("fake", ["jetstream", "redis"], folder=tmp_path, seconds=0.1, rounds=3)
    assert log == [
        *("start jetstream", "start redis"),
        *("penstock 0", "jetstream 0", "redis 0"),
        *("jetstream 1", "redis 1", "penstock 1"),
        *("redis 2", "penstock 2", "jetstream 2"),
        *("stop jetstream", "stop redis"),
    ]
    assert result["penstock"]["per_s"] == 1001
    assert result["peers"]["redis"]["per_s"] == 20
    assert result["ratio"] == {"jetstream": 10.01, "redis": 50.05}
    assert complete(result, ["jetstream", "redis"])
    assert list(tmp_path.iterdir()) == []


def test_result_has_the_promised_shape(log: list[str], tmp_path: Path) -> None:
    add_case(log, operation="queue")
    steps: list[tuple[str, int, int]] = []
    result = run_case(
        "fake",
        ["redis"],
        folder=tmp_path,
        seconds=0.1,
        rounds=2,
        progress=lambda *step: steps.append(step),
    )
    assert json.loads(json.dumps(result)) == result
    promised = {"case", "penstock", "peers", "ratio", "machine", "date", "command", "rounds"}
    assert promised <= set(result)
    assert set(result["penstock"]) == {"per_s", "p50_ms", "p95_ms", "p99_ms", "cpu", "rss_mb"}
    assert result["rounds"] == 2
    assert result["machine"]["fdatasync_p99_ms"] >= result["machine"]["fdatasync_p50_ms"] > 0
    assert {"cores", "kernel", "python"} <= set(result["machine"])
    assert [len(rounds) for rounds in result["samples"].values()] == [2, 2]
    assert steps[0][0] == "start redis"
    assert max(done for _, done, _ in steps) < steps[-1][2]
    assert result_table(result).row_count == 2


def test_missing_peer_is_named_never_silent(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def make(name: str) -> FakePeer:
        if name == "rabbitmq":
            raise MissingExtra("needs apt-get install rabbitmq-server", peer=name)
        return FakePeer(name, log, fail_start="port taken" if name == "redis" else "")

    monkeypatch.setattr(runner, "make_peer", make)
    add_case(log, operation="queue", peers=("jetstream", "redis", "rabbitmq"))
    vs = ["jetstream", "redis", "rabbitmq", "jetstream-sync"]
    result = run_case("fake", vs, folder=tmp_path, seconds=0.1, rounds=1)
    assert set(result["peers"]) == {"jetstream"}
    assert set(result["left_out"]) == {"redis", "rabbitmq", "jetstream-sync"}
    assert "apt-get install rabbitmq-server" in result["left_out"]["rabbitmq"]
    assert "port taken" in result["left_out"]["redis"]
    assert "port taken" in capsys.readouterr().err
    assert not complete(result, vs)
    assert complete(result, ["jetstream"])
    assert log.count("stop redis") == 1
    assert result_table(result).row_count == 5


def test_peer_that_fails_or_measures_nothing_is_dropped(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def operate(peer: Any, window: Any) -> Sample:
        if peer.name == "jetstream":
            return sample(0.0)
        if window.turn:
            raise ExceptionGroup("tasks", [ValueError("connection lost")])
        return sample()

    monkeypatch.setitem(OPERATIONS, "queue", operate)
    add_case(log, operation="queue")
    result = run_case("fake", ["jetstream", "redis"], folder=tmp_path, seconds=0.1, rounds=3)
    assert result["peers"] == {}
    assert result["ratio"] == {}
    assert result["left_out"]["redis"] == "connection lost"
    assert "completed nothing" in result["left_out"]["jetstream"]
    assert result["rounds"] == 3
    assert log.count("stop redis") == log.count("stop jetstream") == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_peers_stop_when_our_side_fails(
    log: list[str], tmp_path: Path, error: type[BaseException]
) -> None:
    async def penstock(window: Any) -> Sample:
        raise error("on purpose")

    add_case(log, operation="queue", penstock=penstock)
    with pytest.raises(error):
        run_case("fake", ["redis"], folder=tmp_path, seconds=0.1)
    assert log == ["start redis", "stop redis"]
    assert list(tmp_path.iterdir()) == []


def test_case_keeps_to_its_budget(log: list[str], tmp_path: Path) -> None:
    """Whatever is asked for: 5 rounds of 2 s against one peer, in 3 s."""
    windows: list[float] = []

    async def penstock(window: Any) -> Sample:
        windows.append(window.seconds)
        await asyncio.sleep(window.seconds + 0.05)
        return sample()

    add_case(log, operation="queue", penstock=penstock)
    start = time.monotonic()
    result = run_case("fake", ["redis"], folder=tmp_path, seconds=2, rounds=5, budget_s=3)
    assert time.monotonic() - start < 3.5
    assert 1 <= result["rounds"] <= 5
    assert max(windows) < 2, "windows get shorter first, and on a quick machine that is enough"


def test_peer_that_hangs_loses_its_turn_only(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def operate(peer: Any, window: Any) -> Sample:
        if peer.name == "redis":
            await asyncio.sleep(60)
        return sample()

    monkeypatch.setitem(OPERATIONS, "queue", operate)
    monkeypatch.setattr(runner, "TURN_GRACE_S", 0.2)
    add_case(log, operation="queue")
    start = time.monotonic()
    result = run_case("fake", ["redis", "jetstream"], folder=tmp_path, seconds=0.1, rounds=2)
    assert time.monotonic() - start < 5
    assert "within its time" in result["left_out"]["redis"]
    assert result["ratio"] == {"jetstream": 1.0005}


def test_our_side_hanging_is_an_error_in_time(log: list[str], tmp_path: Path) -> None:
    async def penstock(window: Any) -> Sample:
        await asyncio.sleep(60)
        return sample()

    add_case(log, penstock=penstock)
    start = time.monotonic()
    with pytest.raises(RequestTimedOut, match="fewer seconds"):
        run_case("fake", folder=tmp_path, seconds=0.1, budget_s=0.5)
    assert time.monotonic() - start < 2


def test_prepare_runs_once_and_shares_its_folder(log: list[str], tmp_path: Path) -> None:
    async def prepare(window: Any) -> None:
        (window.shared / "data").write_text(str(time.monotonic()))

    seen: list[str] = []

    async def penstock(window: Any) -> Sample:
        seen.append((window.shared / "data").read_text())
        assert list(window.folder.iterdir()) == []
        (window.folder / "mine").touch()
        return sample()

    add_case(log, prepare=prepare, penstock=penstock)
    run_case("fake", folder=tmp_path, seconds=0.1, rounds=3)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_bad_requests_are_typed(log: list[str], tmp_path: Path) -> None:
    add_case(log)
    with pytest.raises(NotFound, match="penstock bench list"):
        run_case("nothing", folder=tmp_path)
    with pytest.raises(InvalidSettings, match="jetstream"):
        run_case("fake", ["kafka"], folder=tmp_path)
    with pytest.raises(InvalidSettings):
        run_case("fake", folder=tmp_path, rounds=0)
    with pytest.raises(InvalidSettings):
        run_case("fake", folder=tmp_path, seconds=0)
    with pytest.raises(AlreadyExists):
        add_case(log)
    with pytest.raises(InvalidSettings):
        make_peer("kafka")
    assert list_cases() == [
        {"case": "fake", "title": "A case for tests", "unit": "events", "peers": []}
    ]

"""What surrounds a peer (row T12): loss is caught, servers never outlive us, absence is explained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import Window
from penstock.bench.peers import make_peer
from penstock.bench.peers.operation import OPERATIONS
from penstock.model.errors import MissingExtra, PenstockError
from penstock.testing.server_process import Server


class LossyPeer:
    """Acknowledges everything, but keeps and delivers `lose` events fewer of each batch."""

    name = "lossy"
    pipeline_depth = 1
    server_pid = None

    def __init__(self, lose: int) -> None:
        self.lose, self.held = lose, 0
        self.counts: list[Any] = []

    async def open(self, shape: str) -> None:
        self.held, self.counts = 0, []

    async def publish(self, payloads: Any) -> None:
        await asyncio.sleep(0.001)
        self.held += len(payloads) - self.lose
        for count in self.counts:
            count(len(payloads) - self.lose)

    def publisher(self, concurrency: int) -> Any:
        async def one(payload: bytes) -> None:
            await self.publish([payload])

        return one

    @asynccontextmanager
    async def deliver(self, shape: str, count: Any) -> Any:
        if shape == "log":
            asyncio.get_running_loop().call_soon(count, self.held)
        else:
            self.counts.append(count)
        yield

    async def stored(self) -> int:
        return self.held

    async def leftover(self) -> int:
        return 0


@pytest.mark.parametrize("operation", list(OPERATIONS))
async def test_operations_count_and_catch_loss(
    operation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bench.peers.operation.DRAIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr("penstock.bench.peers.operation.FILL_MAX_S", 0.05)
    window = Window(0.05, tmp_path, tmp_path)
    honest: Any = LossyPeer(0)
    found = await OPERATIONS[operation](honest, window)
    assert found.per_s > 0
    assert found.p99_ms > 0
    if operation in ("queue", "publish_batched", "publish_serial", "publish_awaited"):
        assert found.extra["published"] == honest.held
    lossy: Any = LossyPeer(1)
    with pytest.raises(PenstockError, match="lossy"):
        await OPERATIONS[operation](lossy, window)


def test_server_dies_with_us_even_by_kill_9(tmp_path: Path, gone: Callable[..., bool]) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from penstock.testing.server_process import Server\n"
        f"server = Server('sleeper', ['sh', '-c', 'echo $$; exec sleep 300'], Path({str(tmp_path / 'data')!r}))\n"
        "while not server.log_tail().isdigit(): time.sleep(0.02)\n"
        "print(server.log_tail(), flush=True); time.sleep(300)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    sleeper = int(parent.stdout.readline())
    assert not gone(sleeper, 0.1)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert gone(sleeper)


async def test_server_that_ends_says_why(tmp_path: Path) -> None:
    server = Server("broken", ["sh", "-c", "echo no such option; exit 3"], tmp_path / "data")
    try:
        start = time.monotonic()
        with pytest.raises(PenstockError, match="no such option"):
            await server.wait_for_port(1)
        assert time.monotonic() - start < 5
    finally:
        server.stop()
        server.stop()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("peer", "command"),
    [("redis", "apt-get install redis-server"), ("jetstream", "pip install 'penstock[bench]'")],
)
def test_missing_server_gives_the_exact_command(
    peer: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **options: None)
    with pytest.raises(MissingExtra) as caught:
        make_peer(peer)
    assert caught.value.command == command
    assert command in str(caught.value)


def test_missing_client_gives_the_exact_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aio_pika", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[bench\]'"):
        make_peer("rabbitmq")

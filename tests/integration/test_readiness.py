"""Ready means that a client can publish; alive is told even when no open files are left for clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock
from penstock.model.errors import PenstockError

DEADLINE_S = 60.0
OFF = ["--zmq", "", "--pub", "", "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0"]


class Running:
    """A broker started the way an operator does, under a limit of open files if there is one."""

    def __init__(self, folder: Path, *words: str, files: int = 0) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "penstock.cli", "up", str(folder), *OFF, *words]
        if files:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + DEADLINE_S
        while not (folder / "ports.json").exists():
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        self.ports = json.loads((folder / "ports.json").read_text())["ports"]

    def get(self, path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.ports['http']}{path}"
        return httpx.get(url, timeout=10, trust_env=False)

    @property
    def url(self) -> str:
        return f"penstock://127.0.0.1:{self.ports['tcp']}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*args: Any, **more: Any) -> Running:
        started.append(Running(*args, **more))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


def check(folder: Path, *words: str, files: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "up", str(folder), *OFF, "--check", *words]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})


def test_ready_says_why_not_when_the_disk_cannot_hold_a_journal_file(
    small_disk: Path, start: Callable[..., Running]
) -> None:
    """C15: before the first publish, and again ready when there is room; `up --check` says it before."""
    small, filler = small_disk / "data", small_disk / "filler"
    checked = check(small)
    assert checked.returncode == 5, checked
    assert "a journal file needs 256 MiB" in checked.stdout
    filler.write_bytes(bytes(7 << 20))
    words = ("--set", "journal.file_bytes=6MiB", "--set", "journal.reserve_bytes=0")
    broker = start(small, *words)
    answer = broker.get("/ready")
    assert answer.status_code == 503
    assert "disk" in answer.json()["reasons"][0]
    assert broker.get("/health").status_code == 200

    async def publish() -> None:
        async with penstock.connect(broker.url, client__deadline_s=3) as bus:
            await bus.publish("orders", b"x")

    with pytest.raises(PenstockError, match="no room"):
        asyncio.run(publish())
    filler.unlink()
    end = time.monotonic() + DEADLINE_S
    while broker.get("/ready").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.1)
    asyncio.run(publish())


def test_without_open_files_for_clients_it_is_not_ready(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    """C15: `up --check` says so, the broker starts, lives, and tells why no client can come."""
    checked = check(tmp_path / "data", files=100)
    assert checked.returncode == 5, checked
    assert "none are left for clients" in checked.stdout
    broker = start(tmp_path / "data", files=100)
    answer = broker.get("/ready")
    assert answer.status_code == 503
    assert "open files" in answer.json()["reasons"][0]
    assert broker.get("/health").status_code == 200


def test_health_and_ready_answer_when_all_clients_are_there(
    tmp_path: Path, start: Callable[..., Running]
) -> None:
    """C15: clients, and strangers that say nothing, never get the last open files."""
    broker = start(tmp_path / "data", files=200)
    assert broker.get("/ready").status_code == 200
    with contextlib.ExitStack() as stack:
        for _ in range(220):
            stranger = stack.enter_context(socket.socket())
            stranger.settimeout(1)
            with contextlib.suppress(OSError):
                stranger.connect(("127.0.0.1", broker.ports["tcp"]))
        for _ in range(3):
            assert broker.get("/health").status_code == 200
        assert broker.get("/ready").status_code in (200, 503)

    async def fill() -> str:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(200):
                bus = penstock.connect(broker.url, client__deadline_s=3)
                try:
                    await stack.enter_async_context(bus)
                except PenstockError as error:
                    answers = [
                        await asyncio.to_thread(broker.get, p) for p in ("/health", "/ready")
                    ]
                    assert [each.status_code for each in answers] == [200, 503]
                    assert "clients" in answers[1].json()["reasons"][0]
                    return str(error)
        return "all came"

    assert "server.max_connections" in asyncio.run(fill())
    assert broker.get("/ready").status_code == 200

"""What integration tests share: a broker, peers as far as they are installed, a disk that is soon full."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.bench.peers import Peer, make_peer
from penstock.bench.peers.rabbitmq import server_path
from penstock.testing.broker_process import BrokerProcess

# Servers that come with the system, and where they are; the others come with `penstock[bench]`.
SYSTEM_SERVERS = {"redis": shutil.which("redis-server"), "rabbitmq": server_path()}


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Peer:
    """A peer by its name, not started; parametrise it with `indirect=True`."""
    name: str = request.param
    if SYSTEM_SERVERS.get(name, name) is None:
        pytest.skip(f"{name}-server is not installed: apt-get install {name}-server")
    return make_peer(name)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    """A broker process on a folder of its own; its loop is not ours."""
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    try:
        yield broker
    finally:
        await asyncio.to_thread(broker.stop)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 10 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = tmp_path / "mount"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(mount)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount was refused here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(params=["memory", "folder", "broker"])
async def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    """A bus of each kind: what it promises does not depend on where its events live."""
    if request.param != "broker":
        url = "mem:" if request.param == "memory" else str(tmp_path / "data")
        async with penstock.connect(url) as bus:
            yield bus
        return
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    try:
        async with penstock.connect(broker.url()) as bus:
            yield bus
    finally:
        await asyncio.to_thread(broker.stop)

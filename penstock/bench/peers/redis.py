"""Redis Streams through redis-py: append-only file, fsync every second (not for each write).

The blocking client with a pipeline of 1,000 XADD is its fastest documented way to publish, about
twice the asyncio client; hiredis is used by the client where it is installed. A hundred awaited
publishes need the asyncio client, over a small pool of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.bench.peers.need import need_binary, need_module
from penstock.testing.server_process import Server, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from penstock.bench.peers import Count, Shape

KEY = "bench"
GROUP = "workers"
READ_EVENTS = 1000
READ_WAIT_MS = 5  # a reader looks up this often whether it is to stop
SOCKET_TIMEOUT_S = 10.0  # a dead server must not hold a blocking call past the case's time
# More connections only add switching: 10 carried as much as 100 when measured.
MAX_CONNECTIONS = 10


class RedisStreams:
    """A Redis server of its own, a blocking client and a pool of asyncio connections."""

    name = "redis"
    pipeline_depth = 1

    def __init__(self) -> None:
        self._redis = need_module("redis", self.name)
        self._aio = need_module("redis.asyncio", self.name)
        self._binary = need_binary(
            shutil.which("redis-server"), self.name, "apt-get install redis-server"
        )
        self._server: Server | None = None
        self._client: Any = None
        self._pool: Any = None
        self._port = 0
        self._wait_ms: int | None = None  # for more to read; none where this loop publishes too

    @property
    def server_pid(self) -> int | None:
        """Root of the server's process tree."""
        return self._server.pid if self._server else None

    async def start(self, folder: Path) -> None:
        """Start redis-server on a free port, append-only file on, snapshots off."""
        (self._port,) = free_ports(1)
        command = [self._binary, "--port", str(self._port), "--bind", "127.0.0.1"]
        command += ["--dir", str(folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "everysec"]
        self._server = Server(self.name, command, folder)
        await self._server.wait_for_port(self._port)
        self._connect()

    def _connect(self) -> None:
        where: dict[str, Any] = {"host": "127.0.0.1", "port": self._port, "protocol": 2}
        self._client = self._redis.Redis(**where, socket_timeout=SOCKET_TIMEOUT_S)
        self._client.ping()
        self._pool = self._aio.Redis(
            connection_pool=self._aio.BlockingConnectionPool(
                max_connections=MAX_CONNECTIONS, timeout=None, **where
            )
        )

    def ticket(self) -> dict[str, Any]:
        """The port."""
        return {"port": self._port}

    async def join(self, ticket: dict[str, Any]) -> None:
        """Connect; a reader that has a process to itself may sleep in its reads."""
        self._port = ticket["port"]
        self._wait_ms = READ_WAIT_MS
        self._connect()

    async def stop(self) -> None:
        """Disconnect and kill the server."""
        if self._pool is not None:
            await self._pool.aclose()
            await self._pool.connection_pool.disconnect()
            self._pool = None
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    async def open(self, shape: Shape) -> None:
        """An empty stream; with a consumer group for a queue."""
        self._client.flushall()
        if shape == "queue":
            self._client.xgroup_create(KEY, GROUP, id="0", mkstream=True)

    async def publish(self, payloads: Sequence[bytes]) -> None:
        """One pipeline of XADD."""
        pipeline = self._client.pipeline(transaction=False)
        command = pipeline.execute_command
        for payload in payloads:
            command("XADD", KEY, "*", b"p", payload)
        pipeline.execute()
        await asyncio.sleep(0)  # readers on this loop get their turn

    def publisher(self, concurrency: int) -> Callable[[bytes], Awaitable[None]]:
        """XADD and its reply: the blocking client for one caller, the asyncio one for many."""
        client, pool = self._client, self._pool

        async def blocking(payload: bytes) -> None:
            client.execute_command("XADD", KEY, "*", b"p", payload)

        turns = asyncio.Semaphore(MAX_CONNECTIONS)  # first come, first served; the pool is not

        async def pooled(payload: bytes) -> None:
            async with turns:
                await pool.execute_command("XADD", KEY, "*", b"p", payload)

        return blocking if concurrency == 1 else pooled

    @asynccontextmanager
    async def deliver(self, shape: Shape, count: Count) -> AsyncIterator[None]:
        """A reader that takes turns with the publisher: XREADGROUP and XACK, or XREAD."""
        reader = asyncio.create_task(self._work(count) if shape == "queue" else self._read(count))
        try:
            yield
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _work(self, count: Count) -> None:
        client = self._client
        while True:
            reply = client.xreadgroup(
                GROUP, "one", {KEY: ">"}, count=READ_EVENTS, block=self._wait_ms
            )
            if reply:
                ids = [entry[0] for entry in reply[0][1]]
                client.xack(KEY, GROUP, *ids)
                count(len(ids))
            await asyncio.sleep(0)

    async def _read(self, count: Count) -> None:
        client, last = self._client, "0"
        while True:
            reply = client.xread({KEY: last}, count=READ_EVENTS, block=self._wait_ms)
            if reply:
                entries = reply[0][1]
                last = entries[-1][0]
                count(len(entries))
            await asyncio.sleep(0)

    async def stored(self) -> int:
        """XLEN."""
        return int(self._client.xlen(KEY))

    async def leftover(self) -> int:
        """What the group has not read (lag) and what it read without ack (pending)."""
        group = self._client.xinfo_groups(KEY)[0]
        return int(group["pending"]) + int(group["lag"] or 0)


def redis_streams() -> RedisStreams:
    """The peer named `redis`."""
    return RedisStreams()

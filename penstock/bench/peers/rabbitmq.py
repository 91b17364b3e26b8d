"""RabbitMQ through aio-pika: quorum queues, persistent messages, publisher confirms.

A quorum queue fsyncs before it confirms. Publishes of one batch are awaited together, so the
confirms are pipelined; consumers run with a prefetch of 2,000. A queue cannot be read twice, so
reading from the beginning uses a stream queue. The node is private: own home, cookie, node name,
ports and epmd; its start takes about eight seconds.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.bench.peers import FANOUT_SUBSCRIBERS, Count, Shape
from penstock.bench.peers.need import need_binary, need_module
from penstock.testing.server_process import Server, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

PREFETCH_EVENTS = 2000  # two batches: the consumer never waits for credit
# Debian's command in /usr/sbin changes to another user; this script below it does not.
DEBIAN_SCRIPT = "/usr/lib/rabbitmq/bin/rabbitmq-server"

# epmd would daemonise out of our process group if the node had to start it.
_START = 'epmd -port "$ERL_EPMD_PORT" -address 127.0.0.1 & exec "$1"'


def server_path() -> str | None:
    """Where RabbitMQ's start script is, or None."""
    return shutil.which(DEBIAN_SCRIPT) or shutil.which("rabbitmq-server")


class RabbitMQ:
    """A RabbitMQ node of its own, one connection, one channel to publish and one per consumer."""

    name = "rabbitmq"
    pipeline_depth = 2

    def __init__(self) -> None:
        self._pika = need_module("aio_pika", self.name)
        self._binary = need_binary(server_path(), self.name, "apt-get install rabbitmq-server")
        self._server: Server | None = None
        self._connection: Any = None
        self._channel: Any = None
        self._exchange: Any = None
        self._queues: list[Any] = []
        self._port = 0
        self._taken = 0
        self._opened = 0

    @property
    def server_pid(self) -> int | None:
        """Root of the server's process tree."""
        return self._server.pid if self._server else None

    async def start(self, folder: Path) -> None:
        """Start a node that shares nothing with one the machine may already run."""
        port, dist_port, epmd_port = free_ports(3)
        self._port = port
        self._server = Server(
            self.name,
            ["/bin/sh", "-c", _START, "rabbitmq", self._binary],
            folder,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "LANG": "C.UTF-8",
                "HOME": str(folder / "home"),
                "ERL_EPMD_PORT": str(epmd_port),
                "RABBITMQ_NODENAME": f"bench{port}@localhost",
                "RABBITMQ_DIST_PORT": str(dist_port),
                "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
                "RABBITMQ_LOG_BASE": str(folder / "log"),
                "RABBITMQ_LOGS": "-",
                "RABBITMQ_PID_FILE": str(folder / "pid"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
                "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
                "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            },
            files={
                "home/.erlang.cookie": secrets.token_hex(16),
                "plugins": "[].\n",
                "rabbitmq.conf": f"listeners.tcp.1 = 127.0.0.1:{port}\n",
            },
        )
        await self._server.wait_for_port(port)
        await self._connect()

    async def _connect(self) -> None:
        self._connection = await self._pika.connect(f"amqp://guest:guest@127.0.0.1:{self._port}/")
        self._channel = await self._connection.channel(publisher_confirms=True)

    def ticket(self) -> dict[str, Any]:
        """The port, and how many queues stand behind the newest exchange."""
        return {"port": self._port, "opened": self._opened, "queues": len(self._queues)}

    async def join(self, ticket: dict[str, Any]) -> None:
        """Connect to the newest exchange and its queues; `taken` of them belong to others."""
        self._port, self._opened = ticket["port"], ticket["opened"]
        self._taken = ticket.get("taken", 0)
        await self._connect()
        self._exchange = await self._channel.get_exchange(f"bench{self._opened}")
        self._queues = [
            await self._channel.get_queue(f"bench{self._opened}-{number}")
            for number in range(ticket["queues"])
        ]

    async def stop(self) -> None:
        """Disconnect and kill the node."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    async def open(self, shape: Shape) -> None:
        """Fresh queues behind a fresh fanout exchange: eight for fanout, else one."""
        for queue in self._queues:
            await queue.delete(if_unused=False, if_empty=False)
        self._opened += 1
        self._taken = 0
        self._exchange = await self._channel.declare_exchange(
            f"bench{self._opened}", self._pika.ExchangeType.FANOUT, auto_delete=True
        )
        self._queues = []
        for number in range(FANOUT_SUBSCRIBERS if shape == "fanout" else 1):
            queue = await self._channel.declare_queue(
                f"bench{self._opened}-{number}",
                durable=True,
                arguments={"x-queue-type": "stream" if shape == "log" else "quorum"},
            )
            await queue.bind(self._exchange)
            self._queues.append(queue)

    async def publish(self, payloads: Sequence[bytes]) -> None:
        """All confirms awaited together."""
        publish, message = self._exchange.publish, self._pika.Message
        mode = self._pika.DeliveryMode.PERSISTENT
        await asyncio.gather(
            *[publish(message(payload, delivery_mode=mode), routing_key="") for payload in payloads]
        )

    def publisher(self, concurrency: int) -> Callable[[bytes], Awaitable[None]]:
        """One persistent message and its confirm."""
        publish, message = self._exchange.publish, self._pika.Message
        mode = self._pika.DeliveryMode.PERSISTENT

        async def one(payload: bytes) -> None:
            await publish(message(payload, delivery_mode=mode), routing_key="")

        return one

    @asynccontextmanager
    async def deliver(self, shape: Shape, count: Count) -> AsyncIterator[None]:
        """A consumer on its own channel; fanout needs no acks, a stream takes them as credit."""
        channel = await self._connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH_EVENTS)
        queue = await channel.get_queue(self._queues[self._taken].name)
        self._taken = (self._taken + 1) % len(self._queues)

        async def acked(message: Any) -> None:
            await message.ack()
            count(1)

        async def read(message: Any) -> None:
            count(1)

        try:
            await queue.consume(
                read if shape == "fanout" else acked,
                no_ack=shape == "fanout",
                arguments={"x-stream-offset": "first"} if shape == "log" else None,
            )
            yield
        finally:
            await channel.close()

    async def stored(self) -> int:
        """Messages ready in the first queue."""
        found = await self._channel.declare_queue(self._queues[0].name, passive=True)
        return int(found.declaration_result.message_count)

    async def leftover(self) -> int:
        """Once its consumer is gone, unacked messages are back in the queue."""
        return await self.stored()


def rabbitmq() -> RabbitMQ:
    """The peer named `rabbitmq`."""
    return RabbitMQ()

"""The systems Penstock is measured against, each started by the harness for the run.

A peer offers the few calls of `Peer`, each in the fastest way its Python client documents;
`penstock.bench.peers.operation` turns them into the timed operations, so that every peer is
timed by the same loops.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

PEERS = ("jetstream", "jetstream-sync", "redis", "rabbitmq")
FANOUT_SUBSCRIBERS = 8

Shape = Literal["log", "queue", "fanout"]
Count = Callable[[int], None]

_MODULES = {
    "jetstream": ("penstock.bench.peers.jetstream", "jetstream"),
    "jetstream-sync": ("penstock.bench.peers.jetstream", "jetstream_sync"),
    "redis": ("penstock.bench.peers.redis", "redis_streams"),
    "rabbitmq": ("penstock.bench.peers.rabbitmq", "rabbitmq"),
}


class Peer(Protocol):
    """One other system: server and Python client, with its own ports and data folder."""

    name: str
    pipeline_depth: int
    """How many batched publishes in flight at once serve this client best."""

    @property
    def server_pid(self) -> int | None:
        """Root of the server's process tree, for its CPU and memory."""
        ...

    async def start(self, folder: Path) -> None:
        """Start the server with its data below `folder` and connect; returns when it serves."""
        ...

    async def stop(self) -> None:
        """Stop the server whatever state it is in, and delete its data; leave it if it is not ours."""
        ...

    def ticket(self) -> dict[str, Any]:
        """What `join` needs to know of the running server and what was opened there last."""
        ...

    async def join(self, ticket: dict[str, Any]) -> None:
        """Connect to a server that another process has started: instead of `start` and `open`."""
        ...

    async def open(self, shape: Shape) -> None:
        """Begin empty; what was there before is deleted. `log` is what can be read again."""
        ...

    async def publish(self, payloads: Sequence[bytes]) -> None:
        """Publish all, pipelined; returns when the server has acknowledged every one."""
        ...

    def publisher(self, concurrency: int) -> Callable[[bytes], Awaitable[None]]:
        """A call that publishes one event and returns on its ack, for that many callers."""
        ...

    def deliver(self, shape: Shape, count: Count) -> AbstractAsyncContextManager[None]:
        """Subscribe while open; `count(n)` is called when n more events were delivered.

        `queue`: each event is acked before it is counted. `fanout`: one more subscriber, which
        gets every event from now on. `log`: every event from the beginning.
        """
        ...

    async def stored(self) -> int:
        """How many events the server says it holds."""
        ...

    async def leftover(self) -> int:
        """How many events of the queue the server says are not acked, the consumers gone."""
        ...


def make_peer(name: str) -> Peer:
    """A peer that is not started yet; raises MissingExtra with the command that installs it."""
    if name not in _MODULES:
        raise InvalidSettings(
            f"no peer {name!r} to compare with; choose from {', '.join(PEERS)}", peer=name
        )
    module, factory = _MODULES[name]
    return cast("Peer", getattr(importlib.import_module(module), factory)())

"""Penstock's broker, driven as the peers are: a server of its own, and clients that join it.

The server is `penstock up` with its default settings, and with smaller journal files, so that
sealing is part of what is measured. Clients speak `penstock://`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import penstock
from penstock.bench.cases.workload import JOURNAL_FILE_BYTES, PRODUCERS, stored, together
from penstock.bench.client_process import all_of, clean_environment
from penstock.model.errors import PenstockError
from penstock.model.event import Identity
from penstock.model.settings import Client, Settings
from penstock.testing.server_process import POLL_S, START_TIMEOUT_S, Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from penstock.bench.case import Window
    from penstock.bench.peers import Count, Shape
    from penstock.bus.bus import Bus

GROUP = "workers"
# More than a broker allows one consumer by default: it is always given what it may have.
PREFETCH = 2_000
SERVICES = ("zmq", "pub", "tcp", "http")


def connect(url: str, *, tenant: str = "default", client: str = "", **settings: Any) -> Bus:
    """A bus at a broker, whatever this machine's configuration says; `settings` are the client's."""
    where = f"{url}?client={client}" if client else url
    identity = Identity(tenant, "bench")
    return penstock.connect(where, settings=Settings(client=Client(**settings)), identity=identity)


class PenstockBroker:
    """A broker process of its own, or a client of one that was started elsewhere."""

    name = "penstock"
    pipeline_depth = PRODUCERS

    def __init__(self, topics: int = 1, **flags: Any) -> None:
        self.bus: Any = None
        self.url = ""
        self.urls: dict[str, str] = {}
        """Where a broker of our own listens, by service; `url` is that of TCP."""
        self.pid = 0
        """The broker's own process; `server_pid` is the root of its tree."""
        self.topics: list[str] = []
        self._topic_count = topics
        self._flags = {"journal__file_bytes": JOURNAL_FILE_BYTES, **flags}
        self._client: dict[str, Any] = {}
        self._delivering: list[Bus] = []
        self._server: Server | None = None
        self._turns: Any = iter(())

    @property
    def server_pid(self) -> int | None:
        """Root of the server's process tree."""
        return self._server.pid if self._server else None

    async def start(self, folder: Path) -> None:
        """Run `penstock up` on free ports and connect to it."""
        data = folder / "data"
        command = [sys.executable, "-m", "penstock.cli", "up", str(data), "--json"]
        for service in SERVICES:
            command += [f"--{service}", "127.0.0.1:0"]
        for name, value in self._flags.items():
            text = value if isinstance(value, str) else json.dumps(value)
            command += ["--set", f"{name.replace('__', '.', 1)}={text}"]
        self._server = Server(self.name, command, folder, env=clean_environment())
        record = await self._listening(data / "ports.json")
        self.urls, self.pid = record["urls"], record["pid"]
        self.url = self.urls["tcp"]
        self.bus = await connect(self.url).open()

    async def _listening(self, path: Path) -> dict[str, Any]:
        """What the broker writes into a file when it is ready."""
        assert self._server is not None
        end = time.monotonic() + START_TIMEOUT_S
        while (record := _record(path)) is None:
            if not self._server.alive or time.monotonic() > end:
                raise PenstockError("the broker did not start for the benchmark")
            await asyncio.sleep(POLL_S)
        return record

    @asynccontextmanager
    async def serving(self, window: Window) -> AsyncIterator[None]:
        """Runs for one turn; an error is told together with the end of the broker's log."""
        try:
            await self.start(window.folder / "broker")
            yield
            await all_of(*(client.order("leave") for client in window.clients))
        except Exception as error:
            if self._server is not None:
                error.add_note(f"the end of the broker's log: {self._server.log_tail()}")
            raise
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Disconnect and kill the broker, if it is ours: its data is not needed any more."""
        bus, self.bus = self.bus, None
        if bus is not None:
            await bus.close()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def ticket(self) -> dict[str, Any]:
        """Where the broker listens, and the topics that were made."""
        return {"url": self.url, "topics": self.topics}

    async def join(self, ticket: dict[str, Any]) -> None:
        """Connect; `client` in a ticket holds client settings."""
        self.url = ticket["url"]
        self._client = ticket.get("client", {})
        self._use(ticket["topics"])
        self.bus = await connect(self.url, **self._client).open()

    def _use(self, topics: list[str]) -> None:
        self.topics = topics
        self._turns = itertools.cycle(topics)

    async def open(self, shape: Shape) -> None:
        """As many topics as were asked for, all at once: a thousand commits would take seconds."""
        topics = [f"bench.topic{number}" for number in range(self._topic_count)]
        await together(*(self._make(topic) for topic in topics))
        self._use(topics)

    async def _make(self, topic: str) -> None:
        await self.bus.topics.create(topic)

    async def publish(self, payloads: Sequence[bytes]) -> None:
        """One call, to the next topic."""
        await self.bus.publish_many(next(self._turns), payloads)

    def publisher(self, concurrency: int) -> Callable[[bytes], Awaitable[None]]:
        """One event; what many callers publish in a turn of the loop shares a frame."""
        bus, topic = self.bus, self.topics[0]

        async def one(payload: bytes) -> None:
            await bus.publish(topic, payload)

        return one

    @asynccontextmanager
    async def deliver(self, shape: Shape, count: Count) -> AsyncIterator[None]:
        """A connection of its own: with a handler for a queue, else one that reads batches."""
        topic = self.topics[0]
        async with connect(self.url, **self._client) as bus:
            self._delivering.append(bus)
            try:
                if shape == "queue":

                    async def handle(payload: bytes) -> None:
                        count(1)

                    bus.handler(topic, group=f"{GROUP}-{topic}", max_inflight=PREFETCH)(handle)
                    await bus.ready()
                    yield
                else:
                    async with reading(bus, topic, {topic: count}):
                        yield
            finally:
                self._delivering.remove(bus)

    async def flush(self) -> None:
        """Every ack given so far is durable when this returns: only then does it count."""
        for bus in self._delivering:
            await bus.flush()

    async def stored(self) -> int:
        """Events in all topics."""
        return await stored(self.bus)

    async def leftover(self) -> int:
        """Events of queues that are not acked."""
        groups = await self.bus.groups.list()
        return sum(group.lag for group in groups if group.mode == "queue")


def _record(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    return record


async def stored_in(bus: Bus, topic: str) -> int:
    """How many events one topic holds."""
    info = await bus.topics.info(topic)
    return sum(part.end_offset - part.first_offset for part in info.partitions)


@asynccontextmanager
async def reading(bus: Bus, pattern: str, counters: dict[str, Count]) -> AsyncIterator[None]:
    """A group of its own that reads on while this is open, each event as an object of its own."""
    group = f"readers-{uuid.uuid4().hex}"
    async with bus.subscribe(pattern, group=group, mode="log", start="latest") as subscription:

        async def read() -> None:
            async for batch in subscription.batches():
                counters[batch.topic](sum(1 for event in batch if event.payload))

        task = asyncio.create_task(read())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

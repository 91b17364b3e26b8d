"""A large frame to a client is compressed in a thread while its connection keeps its order (row T13)."""

from __future__ import annotations

import asyncio
import random
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.engines.broker.tcp import TcpLink as ClientLink
from penstock.model.errors import BusClosed
from penstock.model.settings_loader import load
from penstock.server.fastpath import FastPath
from penstock.server.transports import tcp as outgoing
from penstock.server.transports.tcp import TcpLink, TcpServer
from penstock.testing.broker_process import BrokerProcess
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Fault, Welcome, decode, encode, to_error
from penstock.wire.stream import encode_frame

DEADLINE_S = 20.0
CUTOVER = 64 << 10
LARGE = b"large" * 40_000
SEND_BUFFER = 256 << 10


class Slow:
    """A compressor that stops at every large frame until it may go on."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.threads: list[int] = []
        self.error: Exception | None = None

    def encode_frame(self, frame: Frame, compressor: int = 0) -> Any:
        if frame.size_bytes >= CUTOVER:
            self.threads.append(threading.get_ident())
            self.began.release()
            assert self.go_on.acquire(timeout=DEADLINE_S)
            if self.error is not None:
                raise self.error
        return encode_frame(frame, compressor)

    async def at_work(self) -> None:
        assert await asyncio.to_thread(self.began.acquire, timeout=DEADLINE_S)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    monkeypatch.setattr(outgoing, "encode_frame", slow.encode_frame)
    yield slow
    slow.go_on.release(100)


class Stub:
    """A broker that only keeps its links."""

    def __init__(self) -> None:
        self.links: list[Any] = []
        self.failures: list[Exception] = []
        self.reasons: list[str] = []

    def connected(self, link: Any) -> Stub:
        self.links.append(link)
        return self

    def received(self, frame: Frame) -> None:
        self.links[-1].send(Frame(Kind.WELCOME, 0, encode(Welcome("s", "b"))))

    def lost(self, reason: str, *, closed: bool = False) -> None:
        self.reasons.append(reason)

    def failed(self, error: Exception) -> None:
        self.failures.append(error)


class Pair:
    """A server's link and its client, which takes what is compressed."""

    def __init__(self, **flags: Any) -> None:
        dotted = {name.replace("__", ".", 1): value for name, value in flags.items()}
        cutover = {"fastpath.cutover_bytes": CUTOVER, "server.send_buffer_bytes": SEND_BUFFER}
        settings = load(None, {}, {**cutover, **dotted})
        self.broker = Stub()
        self.fastpath = FastPath(settings.fastpath)
        self.server = TcpServer(settings, self.broker, self.fastpath)
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.link: TcpLink
        self._client: ClientLink

    async def open(self) -> Pair:
        port = await self.server.start("127.0.0.1", 0)
        self._client = ClientLink("127.0.0.1", port, compressor="lz4")
        await self._client.open(self.frames.put_nowait, lambda reason: self.ended.set())
        self.link = self.broker.links[0]
        return self

    async def get(self) -> Frame:
        async with asyncio.timeout(DEADLINE_S):
            return await self.frames.get()

    async def requests(self, count: int) -> list[int]:
        return [(await self.get()).request for _ in range(count)]

    async def close(self) -> None:
        self._client.close()
        await self.server.stop()
        self.fastpath.close()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = await Pair().open()
    yield pair
    await pair.close()


def answer(number: int, part: bytes = LARGE) -> Frame:
    return Frame(Kind.RESULT, number, b"", (part,))


async def test_the_loop_does_not_compress_and_nothing_is_overtaken(pair: Pair, slow: Slow) -> None:
    """T13: with the order kept, and what waits counted by flow control."""
    for number in (1, 3):
        pair.link.send(answer(number))
        pair.link.send(answer(number + 1, b"small"))
    await slow.at_work()
    assert pair.frames.empty()
    assert pair.link.pending_bytes() >= 2 * len(LARGE)
    assert pair.link.holding, "it asks no more while the broker is behind"
    slow.go_on.release()
    assert await pair.requests(2) == [1, 2]
    await slow.at_work()
    assert pair.frames.empty()
    assert not pair.link.holding
    slow.go_on.release()
    assert await pair.requests(2) == [3, 4]
    assert pair.link.pending_bytes() == 0
    assert len(slow.threads) == 2
    assert threading.get_ident() not in slow.threads
    assert pair.fastpath.taken == 2


async def test_what_piles_up_behind_a_large_frame_is_bounded(pair: Pair, slow: Slow) -> None:
    """T13, T9: a client that gets far more than it may leave unread is cut off."""
    for number in range(1, 100):
        pair.link.send(answer(number))
        if not pair.server.links or pair.link.pending_bytes() == 0:
            break
    assert number < 10
    slow.go_on.release(100)
    await asyncio.wait_for(pair.ended.wait(), DEADLINE_S)
    assert pair.frames.empty()


async def test_closing_sends_what_waits_first(pair: Pair, slow: Slow) -> None:
    pair.link.send(answer(1))
    pair.link.send(answer(2, b"small"))
    pair.link.send(answer(3))
    await slow.at_work()
    pair.link.close()
    pair.link.send(answer(4, b"too late"))
    slow.go_on.release(2)
    assert await pair.requests(3) == [1, 2, 3]
    await asyncio.wait_for(pair.ended.wait(), DEADLINE_S)
    assert pair.frames.empty()


async def test_closing_while_the_threads_end(pair: Pair, slow: Slow) -> None:
    """The broker drains: what is behind a large frame is compressed by the loop then."""
    pair.link.send(answer(1))
    pair.link.send(answer(2))
    await slow.at_work()
    pair.link.close()
    pair.fastpath.close()
    slow.go_on.release(2)
    assert await pair.requests(2) == [1, 2]


async def test_a_link_that_is_aborted_meanwhile_forgets_all(pair: Pair, slow: Slow) -> None:
    pair.link.send(answer(1))
    pair.link.send(answer(2, b"small"))
    await slow.at_work()
    pair.link.abort("enough")
    slow.error = ValueError("nobody hears this")
    slow.go_on.release()
    await asyncio.wait_for(pair.ended.wait(), DEADLINE_S)
    assert pair.frames.empty()
    assert pair.broker.reasons == ["enough"]
    assert pair.broker.failures == []


async def test_an_answer_that_cannot_be_compressed_becomes_an_error(pair: Pair, slow: Slow) -> None:
    slow.error = ValueError("a bug in a compressor")
    pair.link.send(answer(1))
    pair.link.send(answer(2, b"small"))
    slow.go_on.release()
    frame = await pair.get()
    assert (frame.kind, frame.request) == (Kind.FAULT, 1)
    assert decode(frame.meta, Fault).code == "error"
    assert await pair.requests(1) == [2]
    assert pair.broker.failures == [slow.error]


async def test_a_push_that_cannot_be_compressed_ends_its_connection(pair: Pair, slow: Slow) -> None:
    slow.error = BusClosed("a compressor that says why")
    pair.link.send(answer(0))
    pair.link.send(answer(2, b"small"))
    slow.go_on.release()
    frame = await pair.get()
    assert (frame.kind, frame.request) == (Kind.FAULT, 0)
    assert isinstance(to_error(decode(frame.meta, Fault)), BusClosed)
    await asyncio.wait_for(pair.ended.wait(), DEADLINE_S)
    assert pair.frames.empty()


@pytest.mark.parametrize(
    ("flags", "part"),
    [({"fastpath__enabled": False}, LARGE), ({}, b"s" * (CUTOVER - 1))],
    ids=["switched off", "below the cut-over"],
)
async def test_the_loop_compresses_what_the_settings_leave_it(
    flags: dict[str, Any], part: bytes
) -> None:
    pair = await Pair(**flags).open()
    pair.link.send(answer(1, part))
    assert await pair.requests(1) == [1]
    assert pair.fastpath.taken == 0
    await pair.close()


async def test_consumers_of_a_real_broker(tmp_path: Path) -> None:
    """T13: large and small events in their order; the metric counts both directions."""
    wanted = [random.randbytes(300_000 if number % 3 == 0 else 5) for number in range(30)]
    with BrokerProcess(tmp_path / "data").start(fastpath__cutover_bytes=CUTOVER) as broker:
        url = broker.url()
        async with (
            penstock.connect(url, client__compressor="zstd") as bus,
            bus.subscribe("orders", group="g") as events,
        ):
            for payload in wanted:
                await bus.publish("orders", payload, key=b"one", codec="raw")
            got = []
            for _ in wanted:
                event = await events.get(timeout_s=DEADLINE_S)
                assert event is not None
                got.append(event.payload)
                await event.ack()
        assert got == wanted
        with urllib.request.urlopen(f"http://127.0.0.1:{broker.ports['http']}/metrics") as page:
            text = page.read().decode()
    [taken] = [line for line in text.splitlines() if 'fastpath_total{outcome="taken"' in line]
    assert float(taken.split()[-1]) >= 20, "ten came in, and ten went out"

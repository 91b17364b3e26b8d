"""The TCP transport on real sockets (row Q1), with a broker that only records and echoes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.engines.broker import tcp as client_tcp
from penstock.engines.broker.tcp import TcpLink as ClientLink
from penstock.engines.broker.tcp import client_tls
from penstock.model.errors import (
    BrokerUnreachable,
    Deferred,
    InvalidSettings,
    PayloadTooLarge,
    ProtocolViolation,
    WrongProtocolVersion,
)
from penstock.model.settings import Settings
from penstock.model.settings_loader import load
from penstock.server.transports import tcp as server_tcp
from penstock.server.transports.tcp import UNWELCOMED_FRAME_BYTES, TcpLink, TcpServer
from penstock.testing.authority import Authority
from penstock.wire import message as say
from penstock.wire.encodings import for_mark, from_mark
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.negotiation import chosen, offer
from penstock.wire.stream import StreamReader, decode_frame, encode_frame, encode_message

MIB = 1 << 20


class Recorder:
    """A connection that keeps what it gets: welcomes, echoes publishes, falls silent on demand."""

    def __init__(self, link: Any, echo: bool) -> None:
        self.link = link
        self.echo = echo
        self.frames: list[Frame] = []
        self.reasons: list[str] = []

    def received(self, frame: Frame) -> None:
        assert frame.mark == Mark.RAW
        self.frames.append(frame)
        if frame.meta == b"bug":
            raise ZeroDivisionError("a bug in the broker")
        if frame.kind == Kind.HELLO:
            self.link.send(Frame(Kind.WELCOME, frame.request, say.encode(say.Welcome("s", "b"))))
        elif frame.kind == Kind.PUBLISH and self.echo:
            self.link.send(Frame(Kind.RESULT, frame.request, b"", frame.parts))

    def lost(self, reason: str, *, closed: bool = False) -> None:
        self.reasons.append(reason)


class StubBroker:
    """Makes recorders, as many as are allowed."""

    def __init__(self) -> None:
        self.connections: list[Recorder] = []
        self.failures: list[Exception] = []
        self.most = 1_000
        self.echo = True

    def connected(self, link: Any) -> Recorder:
        if len(self.connections) >= self.most:
            raise Deferred("full", retry_after_s=5.0)
        self.connections.append(Recorder(link, self.echo))
        return self.connections[-1]

    def failed(self, error: Exception) -> None:
        self.failures.append(error)


class Harness:
    """A server on a free port, and clients of it."""

    def __init__(self, **flags: Any) -> None:
        self.broker = StubBroker()
        dotted = {name.replace("__", ".", 1): value for name, value in flags.items()}
        self.settings: Settings = load(None, {}, dotted)
        self.server = TcpServer(self.settings, self.broker)
        self.port = 0
        self.clients: list[Client] = []

    async def start(self) -> None:
        self.port = await self.server.start("127.0.0.1", 0)

    async def client(self, *, hello: bool = True, **options: Any) -> Client:
        client = Client(self.port, **options)
        self.clients.append(client)
        await client.open()
        if hello:
            await client.call(Frame(Kind.HELLO, 0, say.encode(say.Hello("c"))))
        return client

    async def stop(self) -> None:
        for client in self.clients:
            client.link.close()
        await self.server.stop()


class Client:
    """A ClientLink with its frames in a queue."""

    def __init__(self, port: int, host: str = "127.0.0.1", **options: Any) -> None:
        self.link = ClientLink(host, port, **options)
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.reasons: asyncio.Queue[str] = asyncio.Queue()

    async def open(self) -> None:
        await self.link.open(self.frames.put_nowait, self.reasons.put_nowait)

    async def call(self, frame: Frame) -> Frame:
        self.link.send(frame)
        return await soon(self.frames.get())


class Raw:
    """A socket without manners."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._stream = StreamReader(64 * MIB)
        self._messages: list[Any] = []

    async def open(self, **options: Any) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        return self

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def negotiate(self, *marks: str) -> Any:
        await self.send(offer(marks=marks or ("raw",)))
        _, body = await self.message()
        return chosen(body)

    async def message(self) -> Any:
        while not self._messages:
            data = await soon(self.reader.read(65_536))
            if not data:
                return None
            self._messages += self._stream.feed(data)
        return self._messages.pop(0)

    async def frame(self) -> Frame | None:
        message = await self.message()
        return None if message is None else decode_frame(message, 64 * MIB)

    async def ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return await self.message() is None
        return True

    def close(self) -> None:
        self.writer.close()


async def soon(awaitable: Any, seconds: float = 10.0) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness(server__send_buffer_bytes=256 * 1024, server__max_frame_bytes=32 * MIB)
    await harness.start()
    yield harness
    await harness.stop()


@pytest_asyncio.fixture
async def raw(harness: Harness) -> AsyncIterator[Raw]:
    raw = await Raw(harness.port).open()
    yield raw
    raw.close()


# -- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["none", "lz4", "zstd", "snappy"])
async def test_frames_go_both_ways(harness: Harness, compressor: str) -> None:
    client = await harness.client(compressor=compressor)
    for number, size in enumerate([0, 10, 5_000, 110_000, 5 * MIB], 1):
        part = (b"spam and " * (size // 9 + 1))[:size]
        answer = await client.call(Frame(Kind.PUBLISH, number, b"meta", (part, b"")))
        assert (answer.kind, answer.request) == (Kind.RESULT, number)
        assert answer.parts == (part, b"")
    received = harness.broker.connections[0].frames
    assert [frame.request for frame in received] == [0, 1, 2, 3, 4, 5]
    assert received[1].meta == b"meta"


async def test_many_frames_in_one_read_keep_their_order(harness: Harness, raw: Raw) -> None:
    await raw.negotiate()
    hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("c")))
    stream = b"".join(b"".join(encode_frame(Frame(Kind.PUBLISH, n, b"m"))) for n in range(1, 3_001))
    await raw.send(b"".join(encode_frame(hello)) + stream)
    found = [await raw.frame() for _ in range(3_001)]
    assert [frame.request for frame in found if frame is not None] == list(range(3_001))


@pytest.mark.parametrize("mark", [Mark.JSON, Mark.PROTOBUF])
async def test_other_marks_are_raw_to_the_broker(harness: Harness, raw: Raw, mark: Mark) -> None:
    choice = await raw.negotiate(mark.name.lower())
    assert choice.mark == mark.name.lower()
    hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("c", tenant="acme")))
    await raw.send(b"".join(encode_frame(for_mark(hello, mark))))
    welcome = await raw.frame()
    assert welcome is not None
    assert welcome.mark == mark
    assert say.decode(from_mark(welcome).meta, say.Welcome).session == "s"
    assert harness.broker.connections[0].frames == [hello]


async def test_a_message_that_cannot_be_read_costs_an_answer_only(
    harness: Harness, raw: Raw
) -> None:
    await raw.negotiate("json")
    for meta in (b"{nonsense", b'{"feed":"three"}'):
        await raw.send(b"".join(encode_frame(Frame(Kind.FETCH, 7, meta, mark=Mark.JSON))))
        fault = await raw.frame()
        assert fault is not None
        assert (fault.kind, fault.request) == (Kind.FAULT, 7)
        assert json.loads(fault.meta)["code"] == "connection.protocol"
    await raw.send(b"".join(encode_frame(Frame(Kind.FETCH, 8, b'{"feed":3}', mark=Mark.JSON))))
    await until(lambda: bool(harness.broker.connections[0].frames))


async def test_sockets_do_not_delay_and_notice_the_dead(harness: Harness) -> None:
    client = await harness.client()
    [server_side] = harness.server.links
    for link in (client.link, server_side):
        sock = link._transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert server_side.loopback
    assert server_side.peer.startswith("127.0.0.1:")


# -- negotiation and refusals ------------------------------------------------------------------------


async def test_the_choice_names_the_limit(harness: Harness) -> None:
    client = await harness.client()
    assert client.link.max_frame_bytes == 32 * MIB
    with pytest.raises(PayloadTooLarge):
        client.link.send(Frame(Kind.PUBLISH, 1, b"", (bytes(32 * MIB),)))
    assert (await client.call(Frame(Kind.PUBLISH, 2, b""))).request == 2


async def test_a_wrong_version_is_named(harness: Harness, raw: Raw) -> None:
    await raw.send(encode_message(0xFE, b'{"versions":[7]}'))
    command, body = await raw.message()
    with pytest.raises(WrongProtocolVersion):
        chosen(body)
    assert command == 0xFE
    assert await raw.ended()
    assert harness.broker.connections == []


async def test_a_broker_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        client_tcp, "offer", lambda compressor: encode_message(0xFE, b'{"versions":[7]}')
    )
    harness = Harness()
    await harness.start()
    with pytest.raises(WrongProtocolVersion):
        await harness.client()
    await harness.stop()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"\x15\x03\x03\0\x02\x02\x46"],
    ids=["HTTP", "ZeroMQ", "TLS"],
)  # fmt: skip
async def test_a_port_of_something_else_is_named(answer: bytes) -> None:
    """T16: what answers and is no broker's TCP port is recognised at once."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolViolation, match=r"port of server\.tcp"):
            await soon(penstock.connect(f"penstock://127.0.0.1:{port}").open(), 5)


async def test_a_port_that_says_nothing_is_told_from_one_that_is_closed() -> None:
    """T16: an HTTP server waits for the end of a line; the error says that the port may be wrong."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"penstock://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BrokerUnreachable, match="a port that is not the broker's"):
            await penstock.connect(url, client__deadline_s=0.3).open()


async def test_a_full_broker_says_so(harness: Harness) -> None:
    harness.broker.most = 1
    await harness.client()
    with pytest.raises(Deferred) as raised:
        await harness.client()
    assert raised.value.retry_after_s == 5.0


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x10", b"\xff" * 100]
)
async def test_other_protocols_hear_at_once(harness: Harness, raw: Raw, data: bytes) -> None:
    await raw.send(data)
    _, body = await raw.message()
    with pytest.raises(ProtocolViolation):
        chosen(body)
    assert await raw.ended()


async def test_a_second_negotiation_ends_the_connection(harness: Harness, raw: Raw) -> None:
    await raw.negotiate()
    await raw.send(offer())
    fault = await raw.frame()
    assert fault is not None
    assert say.decode(fault.meta, say.Fault).code == "connection.protocol"
    assert harness.broker.connections[0].reasons, "the broker hears it before the socket is closed"
    assert await raw.ended()


# -- bad clients -------------------------------------------------------------------------------------


async def test_a_claim_of_4_gb_costs_an_answer(harness: Harness) -> None:
    """Refused from the head alone, with a reason, while the client is still sending."""
    control = await harness.client()
    raw = await Raw(harness.port).open()
    await raw.negotiate()
    await raw.send(struct.pack("<BI", Kind.PUBLISH, 0xFFFFFFFF))
    for _ in range(5):
        await asyncio.sleep(0.02)
        await raw.send(bytes(100_000))
    fault = await raw.frame()
    assert fault is not None
    assert (fault.kind, fault.request) == (Kind.FAULT, 0)
    assert say.decode(fault.meta, say.Fault).data["size_bytes"] == 0xFFFFFFFF
    assert await raw.ended()
    raw.close()
    assert (await control.call(Frame(Kind.PUBLISH, 1, b""))).request == 1
    assert len(harness.broker.connections[1].reasons) == 1


async def test_strangers_send_little(harness: Harness, raw: Raw) -> None:
    await raw.negotiate()
    await raw.send(struct.pack("<BI", Kind.HELLO, UNWELCOMED_FRAME_BYTES + 1))
    fault = await raw.frame()
    assert fault is not None
    assert fault.kind == Kind.FAULT
    # Once welcomed, the same size is fine.
    client = await harness.client()
    answer = await client.call(Frame(Kind.PUBLISH, 1, b"", (bytes(UNWELCOMED_FRAME_BYTES + 1),)))
    assert answer.request == 1


async def test_strangers_send_no_more_than_others() -> None:
    """Q1: a broker that takes small frames only takes no larger one from who is not welcomed yet."""
    harness = Harness(server__max_frame_bytes=64 << 10)
    await harness.start()
    raw = await Raw(harness.port).open()
    await raw.negotiate()
    await raw.send(struct.pack("<BI", Kind.HELLO, (64 << 10) + 1))
    fault = await raw.frame()
    assert fault is not None
    assert say.decode(fault.meta, say.Fault).data["limit_bytes"] == 64 << 10
    raw.close()
    await harness.stop()


@pytest.mark.parametrize("sent", [b"", b"\xfe", offer(), b"\x04\x20\x00\x00\x00"])
async def test_a_silent_client_is_let_go(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Connected, and nothing; or half a negotiation; or no Hello; or half an old command."""
    monkeypatch.setattr(server_tcp, "HANDSHAKE_S", 0.2)
    raw = await Raw(harness.port).open()
    if sent:
        await raw.send(sent)
    while not await raw.ended():
        pass
    raw.close()
    await until(lambda: not harness.server.links)


async def test_a_welcomed_client_may_be_quiet(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tcp, "HANDSHAKE_S", 0.1)
    client = await harness.client()
    await asyncio.sleep(0.4)
    assert (await client.call(Frame(Kind.PUBLISH, 1, b""))).request == 1


async def test_a_client_that_never_reads_is_cut_off(harness: Harness, raw: Raw) -> None:
    await raw.negotiate()
    await raw.send(b"".join(encode_frame(Frame(Kind.HELLO, 0, say.encode(say.Hello("c"))))))
    await raw.frame()
    control = await harness.client()
    raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
    [victim] = [link for link in harness.server.links if link.peer.endswith(port_of(raw))]
    connection = harness.broker.connections[0]
    most = 0
    for number in range(2_000):
        victim.send(Frame(Kind.DELIVER, 0, b"", (bytes(100_000),)))
        most = max(most, victim.pending_bytes())
        if number % 50 == 0:
            assert (await control.call(Frame(Kind.PUBLISH, number + 1, b""))).kind == Kind.RESULT
        if victim not in harness.server.links:
            break
    await until(lambda: bool(connection.reasons))
    assert "unread" in connection.reasons[0]
    assert 4 * harness.settings.server.send_buffer_bytes < most < 2 * MIB
    assert victim.pending_bytes() == 0


async def test_one_large_frame_is_no_reason_to_cut_off(harness: Harness, raw: Raw) -> None:
    await raw.negotiate()
    await raw.send(b"".join(encode_frame(Frame(Kind.HELLO, 0, say.encode(say.Hello("c"))))))
    await raw.frame()
    link = harness.broker.connections[0].link
    raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
    link.send(Frame(Kind.RESULT, 1, b"", (bytes(30 * MIB),)))
    link.send(Frame(Kind.BEAT, 0, b""))
    await asyncio.sleep(0.05)
    raw.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert [frame.kind for frame in (await raw.frame(), await raw.frame()) if frame] == [
        Kind.RESULT,
        Kind.BEAT,
    ]


async def test_unanswered_requests_stop_the_reading(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends faster than the broker stores is slowed down, not stored in memory."""
    monkeypatch.setattr(server_tcp, "UNANSWERED_BYTES", 4 * MIB)
    harness.broker.echo = False
    client = await harness.client()
    for number in range(1, 65):
        client.link.send(Frame(Kind.PUBLISH, number, b"", (bytes(MIB),)))
    connection = harness.broker.connections[0]
    await until(lambda: connection.link.holding)
    await asyncio.sleep(0.1)
    assert len(connection.frames) < 12
    for number in range(1, 65):
        await until(lambda number=number: len(connection.frames) > number)  # type: ignore[misc]
        connection.link.send(Frame(Kind.RESULT, number, b""))
    assert not connection.link.holding
    assert [(await soon(client.frames.get())).request for _ in range(64)] == list(range(1, 65))


async def test_a_link_that_rests_reads_on_by_itself_and_not_before(harness: Harness) -> None:
    """Neither an answer nor another wish to rest changes when: what was sent meanwhile waits."""
    harness.broker.echo = False
    client = await harness.client()
    connection = harness.broker.connections[0]
    client.link.send(Frame(Kind.PUBLISH, 1, b"", (bytes(MIB),)))
    await until(lambda: len(connection.frames) == 2)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 0.3
    connection.link.rest(0.3)
    connection.link.rest(60.0)
    connection.link.send(Frame(Kind.RESULT, 1, b""))
    assert connection.link.holding
    for number in (2, 3):
        client.link.send(Frame(Kind.PUBLISH, number, b""))
    await until(lambda: len(connection.frames) > 2)
    assert loop.time() >= end_s
    assert not connection.link.holding
    await until(lambda: [frame.request for frame in connection.frames] == [0, 1, 2, 3])


async def test_closing_a_link_that_rests_does_not_wait_for_the_rest(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tcp, "LINGER_S", 60.0)
    await harness.client()
    connection = harness.broker.connections[0]
    connection.link.rest(60.0)
    connection.link.close()
    await until(lambda: connection.link._transport.is_closing())


async def test_a_bug_costs_one_connection(harness: Harness) -> None:
    client, control = await harness.client(), await harness.client()
    answer = await client.call(Frame(Kind.PUBLISH, 1, b"bug"))
    fault = say.decode(answer.meta, say.Fault)
    assert (fault.code, "ZeroDivisionError" in fault.message) == ("error", True)
    await soon(client.reasons.get())
    assert (await control.call(Frame(Kind.PUBLISH, 1, b""))).request == 1


async def test_compressed_requests_count_with_their_real_size(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tcp, "UNANSWERED_BYTES", 4 * MIB)
    harness.broker.echo = False
    client = await harness.client(compressor="zstd")
    client.link.send(Frame(Kind.PUBLISH, 1, b"", (bytes(20 * MIB),)))
    link = harness.broker.connections[0].link
    await until(lambda: link.holding)
    link.send(Frame(Kind.RESULT, 1, b""))
    assert not link.holding


@pytest.mark.parametrize("seed", range(5))
async def test_noise_disturbs_nobody(harness: Harness, seed: int) -> None:
    """Random bytes behind a good beginning; a client beside it sees no error."""
    import random

    chance = random.Random(seed)
    control = await harness.client()
    for number in range(1, 16):
        raw = await Raw(harness.port).open()
        start = chance.choice([b"", offer(), b"\xfe", b"\x02\x00\x00\x00\x00", b"\x04"])
        with contextlib.suppress(ConnectionError):
            await raw.send(start + chance.randbytes(chance.randrange(400)))
        raw.close()
        assert (await control.call(Frame(Kind.PUBLISH, number, b"x"))).request == number
    await until(lambda: len(harness.server.links) == 1)


# -- the end of connections --------------------------------------------------------------------------


async def test_the_broker_hears_once_that_a_client_is_gone(harness: Harness) -> None:
    client = await harness.client()
    client.link.close()
    connection = harness.broker.connections[0]
    await until(lambda: bool(connection.reasons))
    await asyncio.sleep(0.05)
    assert connection.reasons == ["the client closed the connection"]
    assert client.reasons.empty()
    client.link.send(Frame(Kind.BYE, 0, b""))
    assert client.link.pending_bytes() == 0


async def test_what_is_queued_arrives_before_the_end(harness: Harness) -> None:
    client = await harness.client()
    link = harness.broker.connections[0].link
    for number in range(1, 101):
        link.send(Frame(Kind.RESULT, number, bytes(2_000)))
    link.close()
    link.send(Frame(Kind.RESULT, 999, b""))
    found = [(await soon(client.frames.get())).request for _ in range(100)]
    assert found == list(range(1, 101))
    assert "closed" in await soon(client.reasons.get())
    await until(lambda: bool(harness.broker.connections[0].reasons))
    assert client.frames.empty()


async def test_a_client_that_never_reads_does_not_hold_up_the_end(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tcp, "LINGER_S", 0.2)
    raw = await Raw(harness.port).open()
    await raw.negotiate()
    raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
    link = harness.broker.connections[0].link
    link.send(Frame(Kind.RESULT, 1, b"", (bytes(20 * MIB),)))
    link.close()
    await until(lambda: not harness.server.links)
    raw.close()


async def test_closing_a_connection_that_was_reset(harness: Harness) -> None:
    """The client resets it, and the broker ends it before asyncio has heard."""
    raw = await Raw(harness.port).open()
    await raw.negotiate()
    sock = raw.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.writer.transport.abort()
    await asyncio.sleep(0)
    harness.broker.connections[0].link.close()
    await until(lambda: bool(harness.broker.connections[0].reasons))
    await until(lambda: not harness.server.links)


async def test_a_killed_broker_is_noticed_once(harness: Harness) -> None:
    client = await harness.client()
    for link in list(harness.server.links):
        link.abort("power failure")
    await soon(client.reasons.get())
    await asyncio.sleep(0.05)
    assert client.reasons.empty()
    client.link.send(Frame(Kind.BYE, 0, b""))


async def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(BrokerUnreachable) as raised:
        await Client(port).open()
    assert raised.value.port == port


async def test_somebody_else_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and says nothing, or something else."""
    monkeypatch.setattr(client_tcp, "OPEN_S", 0.2)
    say_this = b""
    gone = []

    async def serve(reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(say_this)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        gone.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(BrokerUnreachable):
        await Client(port).open()
    say_this = b"220 mail.example ESMTP ready to serve you today\r\n"
    with pytest.raises(ProtocolViolation):
        await Client(port).open()
    await until(lambda: len(gone) == 2)
    server.close()


async def test_a_cancelled_open_leaves_nothing() -> None:
    accepted: list[asyncio.StreamWriter] = []
    blocked = await asyncio.start_server(
        lambda reader, writer: accepted.append(writer), "127.0.0.1", 0
    )
    client = Client(blocked.sockets[0].getsockname()[1])
    task = asyncio.create_task(client.open())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.link.pending_bytes() == 0
    for writer in accepted:
        writer.close()
    blocked.close()
    await asyncio.sleep(0.01)


async def test_a_broken_answer_ends_the_connection(harness: Harness) -> None:
    client = await harness.client(max_frame_bytes=MIB)
    harness.broker.connections[0].link.send(Frame(Kind.RESULT, 1, b"", (bytes(2 * MIB),)))
    assert "limit" in await soon(client.reasons.get())
    await until(lambda: not harness.server.links)
    assert client.reasons.empty()


async def test_a_broker_that_never_reads_does_not_hold_up_the_end(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_tcp, "LINGER_S", 0.1)
    client = await harness.client()
    connection = harness.broker.connections[0]
    connection.link._transport.pause_reading()
    client.link.send(Frame(Kind.PUBLISH, 1, b"", (bytes(30 * MIB),)))
    await asyncio.sleep(0.01)
    client.link.close()
    await asyncio.sleep(0.2)
    connection.link._transport.resume_reading()
    await until(lambda: bool(connection.reasons))


def port_of(raw: Raw) -> str:
    return f":{raw.writer.get_extra_info('sockname')[1]}"


# -- TLS ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


async def test_tls(authority: Authority) -> None:
    certificate, key = authority.issue("broker")
    harness = Harness(server__tls_certificate=certificate, server__tls_key=key)
    await harness.start()
    client = await harness.client(tls_context=client_tls(authority.ca_file))
    part = bytes(3 * MIB)
    answer = await client.call(Frame(Kind.PUBLISH, 1, b"m", (part,)))
    assert answer.parts == (part,)
    link = harness.broker.connections[0].link
    assert link._transport.get_extra_info("cipher")
    with pytest.raises(BrokerUnreachable, match="certificate"):
        await harness.client(tls_context=client_tls())
    with pytest.raises(BrokerUnreachable):
        await harness.client()
    client.link.close()
    await until(lambda: bool(harness.broker.connections[0].reasons))
    await harness.stop()


async def test_tls_with_client_certificates(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("broker2")
    harness = Harness(
        server__tls_certificate=certificate,
        server__tls_key=key,
        server__tls_client_ca=authority.ca_file,
    )
    await harness.start()
    context = client_tls(authority.ca_file)
    with pytest.raises(BrokerUnreachable):
        await harness.client(tls_context=context)
    stranger = client_tls(authority.ca_file)
    stranger.load_cert_chain(*Authority(tmp_path, "somebody").issue("stranger"))
    with pytest.raises(BrokerUnreachable):
        await harness.client(tls_context=stranger)
    context.load_cert_chain(*authority.issue("client"))
    client = await harness.client(tls_context=context)
    assert (await client.call(Frame(Kind.PUBLISH, 1, b""))).request == 1
    await harness.stop()


async def test_tls_refuses_old_versions(authority: Authority) -> None:
    certificate, key = authority.issue("broker3")
    harness = Harness(server__tls_certificate=certificate, server__tls_key=key)
    await harness.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.ca_file)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(BrokerUnreachable):
        await harness.client(tls_context=context)
    await harness.stop()


async def test_a_taken_port_is_named(harness: Harness) -> None:
    with pytest.raises(InvalidSettings, match=str(harness.port)):
        await TcpServer(harness.settings, harness.broker).start("127.0.0.1", harness.port)


async def test_clients_of_ipv6() -> None:
    harness = Harness()
    try:
        harness.port = await harness.server.start("::1", 0)
    except InvalidSettings:
        pytest.skip("no IPv6 here")
    harness.clients.append(client := Client(harness.port, "::1"))
    await client.open()
    assert harness.broker.connections[0].link.loopback
    await harness.stop()


@pytest.mark.parametrize(
    "flags",
    [
        {"server__tls_certificate": "nowhere.pem"},
        {"server__tls_key": "key.pem"},
        {"server__tls_client_ca": "ca.pem"},
    ],
)
async def test_tls_settings_are_checked(flags: dict[str, str]) -> None:
    with pytest.raises(InvalidSettings):
        await Harness(**flags).start()
    with pytest.raises(InvalidSettings):
        client_tls("nowhere.pem")


def test_links_have_the_shape_the_broker_asks_for() -> None:
    for name in ("send", "pending_bytes", "close"):
        assert callable(getattr(TcpLink, name))
        assert callable(getattr(ClientLink, name))

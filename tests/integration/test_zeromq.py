"""The ZeroMQ transport, with real sockets and a broker that only echoes: row T1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as net
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.broker.zeromq import ZmqLink
from penstock.model.errors import (
    BrokerUnreachable,
    Deferred,
    InvalidSettings,
    PayloadTooLarge,
    PenstockError,
    Rejected,
)
from penstock.model.settings import Server, Settings
from penstock.server.transports import zeromq, zeromq_peers
from penstock.server.transports.curve import make_keys, public_key
from penstock.server.transports.link import Link
from penstock.server.transports.zeromq import ZmqServer
from penstock.transport.tcp import KEEPALIVE_IDLE_S
from penstock.wire.frame import ENVELOPE, MAGIC, Bytes, Frame, Kind, Mark
from penstock.wire.message import Fault, decode

DEADLINE_S = 10.0


class EchoConnection:
    """Welcomes on HELLO and echoes the rest; some kinds ask for mischief."""

    tenant = "acme"

    def __init__(self, broker: EchoBroker, link: Link) -> None:
        self.broker = broker
        self.link = link
        self.frames: list[Frame] = []
        self.lost_because: list[str] = []

    def received(self, frame: Frame) -> None:
        assert not self.lost_because, "a frame after lost"
        self.frames.append(frame)
        if frame.kind == Kind.HELLO:
            self.link.send(Frame(Kind.WELCOME, frame.request, b""))
        elif frame.kind == Kind.BYE:
            self.link.send(Frame(Kind.RESULT, frame.request, b"goodbye", frame.parts))
            self.link.close()
        elif frame.kind == Kind.ASK:
            raise ZeroDivisionError("a bug of the broker")
        elif frame.kind == Kind.READ:
            self.broker.flood(self.link)
        elif frame.kind != Kind.SETTLE:
            self.link.send(Frame(Kind.RESULT, frame.request, frame.meta, frame.parts))

    def lost(self, reason: str, *, closed: bool = False) -> None:
        self.lost_because.append(reason)


class EchoBroker:
    """Records what transports tell it."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.connections: list[EchoConnection] = []
        self.failures: list[Exception] = []
        self.room = room
        self.flooded = 0

    def connected(self, link: Link) -> EchoConnection:
        if len(self.connections) >= self.room:
            raise Deferred("full", retry_after_s=5.0)
        self.connections.append(EchoConnection(self, link))
        return self.connections[-1]

    def failed(self, error: Exception) -> None:
        self.failures.append(error)

    def refused(self, error: Rejected) -> None:
        self.failures.append(error)

    def flood(self, link: Link) -> None:
        """Send without ever looking whether the client reads."""
        for number in range(2_000):
            link.send(Frame(Kind.DELIVER, number, b"", (bytes(100_000),)))
            self.flooded = max(self.flooded, link.pending_bytes())


class Client:
    """A ZmqLink and what it received."""

    def __init__(self, port: int, host: str = "127.0.0.1", **options: object) -> None:
        self.link = ZmqLink(host, port, **options)  # type: ignore[arg-type]
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.lost_because: list[str] = []

    async def __aenter__(self) -> Client:
        await self.link.open(self.frames.put_nowait, self.lost_because.append)
        assert (await self.call(Frame(Kind.HELLO, 1, b""))).kind == Kind.WELCOME
        return self

    async def __aexit__(self, *_: object) -> None:
        self.link.close()

    async def receive(self) -> Frame:
        async with asyncio.timeout(DEADLINE_S):
            return await self.frames.get()

    async def call(self, frame: Frame) -> Frame:
        self.link.send(frame)
        return await self.receive()

    async def echo(self, text: bytes = b"still here") -> None:
        assert (await self.call(Frame(Kind.PUBLISH, 7, text))).meta == text


async def until(true: object, what: str = "it") -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    broker: EchoBroker | None = None, **options: object
) -> AsyncIterator[tuple[ZmqServer, EchoBroker, int]]:
    broker = broker or EchoBroker()
    server = ZmqServer(Settings(server=Server(**options)), broker)  # type: ignore[arg-type]
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, broker, port
    finally:
        await server.stop()


def raw_dealer(port: int, identity: bytes = b"") -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, int(DEADLINE_S * 1_000))
    socket.set(zmq.RECONNECT_IVL, 3_600_000)
    if identity:
        socket.set(zmq.IDENTITY, identity)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


async def raw_call(socket: zmq.Socket[bytes], message: list[Bytes]) -> Frame:
    socket.send_multipart(message)
    return Frame.of_multipart(await asyncio.to_thread(socket.recv_multipart))


def zmtp(port: int) -> net.socket:
    """A TCP connection that has shaken hands as a ZeroMQ DEALER, byte by byte."""
    connection = net.create_connection(("127.0.0.1", port), timeout=DEADLINE_S / 2)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    answer = b""
    while not answer.endswith(b"Identity" + bytes(4)):  # libzmq takes messages only after its READY
        answer += connection.recv(4_096)
    return connection


def closed(connection: net.socket) -> None:
    """Read until the other side ends the connection; fails when it does not, well before 10 s."""
    end_s = time.monotonic() + DEADLINE_S / 2
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            assert time.monotonic() < end_s, "it was not cut off"


def hello() -> list[Bytes]:
    return Frame(Kind.HELLO, 1, b"").multipart()


# -- frames ------------------------------------------------------------------------------------------


async def test_frames_make_the_round_trip() -> None:
    """Row T1: multipart frames, empty and large parts included, arrive as they were sent."""
    parts = (b"", b"x", os.urandom(31_000), os.urandom(110_000), os.urandom(5_000_000))
    async with serving() as (_, broker, port), Client(port) as client:
        answer = await client.call(Frame(Kind.PUBLISH, 1 << 63, b"meta", parts))
        assert (answer.kind, answer.request, answer.meta) == (Kind.RESULT, 1 << 63, b"meta")
        assert [bytes(part) for part in answer.parts] == list(parts)
        link = broker.connections[0].link
        assert link.loopback
        assert link.peer.startswith("127.0.0.1:")


async def test_many_frames_keep_their_order() -> None:
    """More than the window of bytes, in small and large frames mixed, both ways."""
    async with serving() as (_, _, port), Client(port) as client:
        for number in range(3_000):
            client.link.send(Frame(Kind.PUBLISH, number, b"", (bytes(number % 50 * 1_000),)))
        assert client.link.pending_bytes() > 0
        for number in range(3_000):
            frame = await client.receive()
            assert (frame.request, len(frame.parts[0])) == (number, number % 50 * 1_000)
        await until(lambda: client.link.pending_bytes() == 0)


async def test_many_clients() -> None:
    """Everybody gets their own answers."""
    async with serving() as (server, _, port), contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(port)) for _ in range(100)]
        for number, client in enumerate(clients):
            for request in range(20):
                client.link.send(Frame(Kind.PUBLISH, request, b"%d" % number))
        for number, client in enumerate(clients):
            for request in range(20):
                frame = await client.receive()
                assert (frame.request, frame.meta) == (request, b"%d" % number)
        assert len(server.links) == 100


async def test_a_frame_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with serving() as (_, _, port), Client(port, max_frame_bytes=1_000) as client:
        with pytest.raises(PayloadTooLarge):
            client.link.send(Frame(Kind.PUBLISH, 1, bytes(1_001)))
        await client.echo()


# -- broken messages -----------------------------------------------------------------------------


async def test_wrong_version() -> None:
    """Row T1: another version of the protocol gets a coded answer to its request."""
    async with serving() as (_, _, port):
        socket = raw_dealer(port)
        answer = await raw_call(socket, [ENVELOPE.pack(MAGIC, 9, Kind.HELLO, 0, 77), b""])
        fault = decode(answer.meta, Fault)
        assert (answer.kind, answer.request) == (Kind.FAULT, 77)
        assert (fault.code, fault.data["version"]) == ("connection.version", 9)
        assert (await raw_call(socket, hello())).kind == Kind.WELCOME  # it may think again
        socket.close()


async def test_other_marks_are_for_tcp() -> None:
    async with serving() as (_, broker, port):
        socket = raw_dealer(port)
        answer = await raw_call(socket, Frame(Kind.HELLO, 6, b"{}", mark=Mark.JSON).multipart())
        assert (answer.request, decode(answer.meta, Fault).code) == (6, "connection.protocol")
        assert broker.connections == []
        socket.close()


async def test_too_many_parts() -> None:
    """A message of 20,000 parts is thrown away over several turns, and answered once."""
    async with serving() as (server, broker, port), Client(port) as control:
        socket = raw_dealer(port)
        answer = await raw_call(socket, [*hello(), *[b"x"] * 20_000])
        assert decode(answer.meta, Fault).code == "connection.protocol"
        assert (await raw_call(socket, hello())).kind == Kind.WELCOME
        await control.echo()
        assert [len(each.frames) for each in broker.connections] == [2, 1]
        assert [link.source.violations for link in server.links.values()] == [0, 1]
        socket.close()


async def test_who_goes_on_is_cut_off() -> None:
    """Row T1: broken messages cost their sender the connection, and nobody else anything."""
    async with serving() as (server, _, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            connection.sendall(b"\x00\x07garbage")
            assert b"connection.protocol" in await asyncio.to_thread(connection.recv, 4_096)
            connection.sendall(b"\x00\x07garbage" * 40)
            await asyncio.to_thread(closed, connection)
        await control.echo()
        await until(lambda: len(server.peers) == 1)


async def test_a_bug_of_the_broker_costs_one_connection() -> None:
    async with serving() as (server, _, port), Client(port) as control, Client(port) as victim:
        answer = await victim.call(Frame(Kind.ASK, 5, b""))
        assert (answer.kind, answer.request) == (Kind.FAULT, 5)
        assert decode(answer.meta, Fault).code == "error"
        await until(lambda: victim.lost_because)
        await control.echo()
        assert len(server.links) == 1


@pytest.fixture(scope="module")
def background() -> Iterator[int]:
    """A server in a thread of its own, for tests that are not async."""
    started: list[int] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving() as (_, _, port):
            started.append(port)
            ready.set()
            while not end.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    yield started[0]
    end.set()
    thread.join()


@pytest.fixture(scope="module")
def control(background: int) -> Iterator[zmq.Socket[bytes]]:
    """A client that works while others send garbage."""
    socket = raw_dealer(background)
    socket.send_multipart(hello())
    assert Frame.of_multipart(socket.recv_multipart()).kind == Kind.WELCOME
    yield socket
    socket.close()


envelopes = st.builds(
    ENVELOPE.pack, st.sampled_from([b"PS", b"XX"]), st.integers(0, 3), st.integers(0, 255),
    st.integers(0, 4), st.integers(0, 2**64 - 1),
)  # fmt: skip
messages = st.lists(st.one_of(envelopes, st.binary(max_size=300)), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(sent=st.lists(messages, min_size=1, max_size=6))
def test_garbage_harms_nobody(
    background: int, control: zmq.Socket[bytes], sent: list[list[bytes]]
) -> None:
    """Row T1: whatever one client sends, another one works on."""
    stranger = raw_dealer(background)
    for message in sent:
        stranger.send_multipart(message)
    control.send_multipart(Frame(Kind.PUBLISH, 3, b"work").multipart())
    assert Frame.of_multipart(control.recv_multipart()).meta == b"work"
    stranger.close()


@settings(max_examples=40, deadline=None)
@given(sent=st.binary(min_size=1, max_size=400), greet=st.booleans())
def test_garbage_below_messages_harms_nobody(
    background: int, control: zmq.Socket[bytes], sent: bytes, greet: bool
) -> None:
    """Row T1: not even what is no ZeroMQ at all, before or after the handshake."""
    stranger = zmtp(background) if greet else net.create_connection(("127.0.0.1", background))
    with stranger:
        stranger.sendall(sent)
        control.send_multipart(Frame(Kind.PUBLISH, 4, b"work").multipart())
        assert Frame.of_multipart(control.recv_multipart()).meta == b"work"


# -- strangers and giants ------------------------------------------------------------------------


async def test_a_part_of_four_gigabytes_ends_the_connection() -> None:
    """Row T1: the claim alone is enough."""
    async with serving() as (_, _, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", 4 << 30) + b"x" * 1_000)
            await asyncio.to_thread(closed, connection)
        await control.echo()


async def test_a_message_without_end_ends_the_connection() -> None:
    """Row T1: libzmq keeps parts until the last one has come; a stranger's never does."""
    async with serving() as (_, _, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            assert await asyncio.to_thread(_drip, connection) < 400 << 20
        await control.echo()


async def test_a_message_without_end_of_a_known_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same after its welcome, with the limit of a frame."""
    monkeypatch.setattr(zeromq_peers, "LOOK_S", 0.1)
    async with serving(max_frame_bytes=1 << 20) as (_, _, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            greeting = b"".join(
                bytes([more, len(part)]) + part for more, part in zip((1, 0), hello(), strict=True)
            )
            connection.sendall(greeting)
            await asyncio.sleep(0.3)
            assert await asyncio.to_thread(_drip, connection) < 400 << 20
        await control.echo()


async def test_a_client_far_ahead_of_the_broker_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T1, Q7: libzmq reads whatever comes; who sends much more than is taken loses its connection."""
    monkeypatch.setattr(zeromq, "PARTS_PER_TURN", 8)
    monkeypatch.setattr(zeromq_peers, "AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(zeromq_peers, "AHEAD_LOOK_S", 0.01)
    received = EchoConnection.received

    def slowly(connection: EchoConnection, frame: Frame) -> None:
        if frame.kind == Kind.SETTLE:
            time.sleep(0.001)
        received(connection, frame)

    monkeypatch.setattr(EchoConnection, "received", slowly)
    async with serving(max_frame_bytes=1 << 20) as (server, _, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            connection.sendall(on_the_wire(hello()))
            await asyncio.sleep(0.3)
            settle = on_the_wire(Frame(Kind.SETTLE, 0, bytes(4_000)).multipart())
            # A pace that is kept: what is taken at once is never too much.
            for _ in range(1_000):
                await asyncio.to_thread(connection.sendall, settle)
                await asyncio.sleep(0.0)
            assert len(server.peers) == 2
            assert await asyncio.to_thread(_drip, connection, settle) < 100 << 20
        await control.echo()


def on_the_wire(parts: list[Bytes]) -> bytes:
    """A message as ZeroMQ writes it, without encryption."""
    said = b""
    for number, part in enumerate(parts, 1):
        more = int(number < len(parts))
        long = bytes([more | 2]) + struct.pack(">Q", len(part))
        said += (bytes([more, len(part)]) if len(part) < 256 else long) + bytes(part)
    return said


PART = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)  # with the `more` flag


def _drip(connection: net.socket, part: bytes = PART) -> int:
    """Send this again and again until the connection breaks; returns how many bytes that took."""
    sent = 0
    while True:
        try:
            connection.sendall(part)
        except ConnectionError:
            return sent
        sent += len(part)
        assert sent < 2 << 30, "it was never cut off"


async def test_silent_strangers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row T1: who connects and says nothing of use holds a descriptor for a while, and that is all."""
    monkeypatch.setattr(zeromq_peers, "UNWELCOMED_S", 0.3)
    async with serving() as (server, broker, port), Client(port) as control:
        silent = [await asyncio.to_thread(zmtp, port) for _ in range(20)]
        await until(lambda: len(server.peers) == 21)
        await until(lambda: len(server.peers) == 1)
        assert len(broker.connections) == 1
        await control.echo()
        for connection in silent:
            connection.close()


async def test_an_eager_stranger_is_stopped() -> None:
    """Before its welcome a client may not fill the broker's memory."""
    async with serving() as (_, broker, port), Client(port):
        socket = raw_dealer(port)
        for _ in range(5):
            frame = Frame(Kind.SETTLE, 1, b"", (bytes(400_000),))
            socket.send_multipart(frame.multipart())
        answer = Frame.of_multipart(await asyncio.to_thread(socket.recv_multipart))
        assert decode(answer.meta, Fault).code == "connection.protocol"
        await until(lambda: broker.connections[1].lost_because)
        assert len(broker.connections[1].frames) == 2
        socket.close()


async def test_requests_without_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot fill the broker's memory with requests: one too many is to come again later."""
    monkeypatch.setattr(zeromq, "UNANSWERED_BYTES", 1 << 20)
    async with serving() as (_, broker, port), Client(port) as client:
        received = broker.connections[0].frames
        for request in range(2, 52):  # SETTLE is never answered here
            client.link.send(Frame(Kind.SETTLE, request, b"", (bytes(100_000),)))
        for request in range(13, 52):
            answer = await client.receive()
            assert (answer.kind, answer.request) == (Kind.FAULT, request)
            fault = decode(answer.meta, Fault)
            assert (fault.code, fault.data["retry_after_s"]) == ("rejected.deferred", 0.1)
            assert (fault.data["limit"], fault.data["tenant"]) == ("unanswered_bytes", "acme")
        assert [frame.request for frame in received] == [1, *range(2, 13)]
        await client.echo()  # small ones do not count
        for request in range(2, 13):
            broker.connections[0].link.send(Frame(Kind.RESULT, request, b""))
            assert (await client.receive()).request == request
        large = Frame(Kind.PUBLISH, 99, b"", (bytes(5_000_000),))  # alone, it may be any size
        for _ in range(2):
            assert (await client.call(large)).kind == Kind.RESULT


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker refuses clients by name; beyond those, connections are not even kept."""
    monkeypatch.setattr(zeromq_peers, "MAX_UNWELCOMED", 5)
    serve = serving(EchoBroker(room=1), max_connections=1)
    async with serve as (server, _, port), Client(port) as control:
        refused = Client(port)
        await refused.link.open(refused.frames.put_nowait, refused.lost_because.append)
        answer = await refused.call(Frame(Kind.HELLO, 9, b""))
        assert (answer.kind, answer.request) == (Kind.FAULT, 9)
        assert decode(answer.meta, Fault).code == "rejected.deferred"
        await until(lambda: refused.lost_because)
        crowd = [net.create_connection(("127.0.0.1", port)) for _ in range(20)]
        await until(lambda: len(server.peers) > 1)
        await until(lambda: len(server.peers) <= 6)
        await control.echo()
        for connection in crowd:
            connection.close()


# -- comings and goings --------------------------------------------------------------------------


async def test_an_identity_that_reconnects() -> None:
    """Row T1: the same identity on a new connection is a new client, the old one is lost."""
    async with serving() as (_, broker, port):
        for number in range(5):
            socket = raw_dealer(port, b"always-me")
            assert (await raw_call(socket, hello())).kind == Kind.WELCOME
            assert len(broker.connections) == number + 1
            socket.close()
            await until(lambda: broker.connections[-1].lost_because)
        assert all(len(each.lost_because) == 1 for each in broker.connections)
        assert all(len(each.frames) == 1 for each in broker.connections)


async def test_an_identity_that_reconnects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next connection is told from the last words of the one before."""
    monkeypatch.setattr(zeromq, "LAST_MESSAGES_S", 1.0)
    async with serving() as (server, broker, port):
        socket = raw_dealer(port, b"always-me")
        assert (await raw_call(socket, hello())).kind == Kind.WELCOME
        socket.close()
        await until(lambda: server.links[b"always-me"].leaving)
        assert not broker.connections[0].lost_because
        socket = raw_dealer(port, b"always-me")
        assert (await raw_call(socket, hello())).kind == Kind.WELCOME
        assert broker.connections[0].lost_because
        await asyncio.sleep(1.1)
        assert not broker.connections[1].lost_because
        socket.close()


async def test_an_identity_cannot_be_taken() -> None:
    """Row T1: who claims the identity of a connected client gets nothing of it."""
    async with serving() as (_, broker, port):
        first = raw_dealer(port, b"me")
        assert (await raw_call(first, hello())).kind == Kind.WELCOME
        thief = raw_dealer(port, b"me")
        thief.set(zmq.RCVTIMEO, 200)
        thief.send_multipart(hello())
        with pytest.raises(zmq.Again):
            await asyncio.to_thread(thief.recv_multipart)
        answer = await raw_call(first, Frame(Kind.PUBLISH, 2, b"mine").multipart())
        assert (answer.meta, len(broker.connections)) == (b"mine", 1)
        first.close()
        thief.close()


@pytest.mark.parametrize(("count", "size"), [(3_000, 0), (50, 100_000)])
async def test_last_words_of_a_client_are_heard(count: int, size: int) -> None:
    """What was sent before the connection closed counts: acks of a client that leaves.

    It is more than is read in one turn, and more than a window of bytes.
    """
    async with serving() as (_, broker, port):
        for number in range(3):
            async with Client(port) as client:
                for request in range(count):
                    client.link.send(Frame(Kind.SETTLE, request, b"", (bytes(size),)))
            await until(lambda: broker.connections[-1].lost_because)
            assert len(broker.connections) == number + 1
            assert len(broker.connections[-1].frames) == count + 1


async def test_last_words_of_the_broker_are_heard() -> None:
    """A link that is closed sends what is queued, large or small, then ends."""
    async with serving() as (server, _, port):
        for part in (b"", bytes(20_000_000)):
            async with Client(port) as client:
                answer = await client.call(Frame(Kind.BYE, 2, b"", (part,)))
                assert answer.meta == b"goodbye"
                await until(lambda client=client: client.lost_because)
                assert len(client.lost_because) == 1
        await until(lambda: not server.links)


async def test_lost_is_said_once_and_not_after_close() -> None:
    async with serving() as (server, broker, port):
        gone, left = Client(port), Client(port)
        async with gone, left:
            left.link.close()
            await until(lambda: broker.connections[1].lost_because)
            await server.stop()
            await until(lambda: gone.lost_because)
            gone.link.send(Frame(Kind.PUBLISH, 1, b"into the void"))
            await asyncio.sleep(0.05)
        assert (len(gone.lost_because), left.lost_because) == (1, [])
        assert [len(each.lost_because) for each in broker.connections] == [1, 1]


async def test_a_client_that_never_reads() -> None:
    """Row T1: it costs a bounded number of bytes, then its connection; others do not notice."""
    serve = serving(send_buffer_bytes=1 << 20)
    async with serve as (server, broker, port), Client(port) as control:
        with await asyncio.to_thread(zmtp, port) as connection:
            for frame in (hello(), Frame(Kind.READ, 2, b"").multipart()):
                connection.sendall(b"\x01\x10" + bytes(frame[0]) + b"\x00\x00")
            await until(lambda: broker.flooded > 0)
            await control.echo()
            await until(lambda: len(server.links) == 1)
        assert broker.flooded < 6 << 20
        assert "unread" in broker.connections[1].lost_because[0]
        await control.echo()


async def test_the_system_looks_for_peers_that_are_gone() -> None:
    """T1: nobody else does before they have a session; libzmq's own heartbeats can end a process."""
    async with serving(heartbeat_s=0.1) as (server, broker, port), Client(port) as client:
        await client.echo()
        [peer] = server.peers._peers.values()
        with net.fromfd(peer.fd, net.AF_INET, net.SOCK_STREAM) as connection:
            assert connection.getsockopt(net.SOL_SOCKET, net.SO_KEEPALIVE)
            assert connection.getsockopt(net.IPPROTO_TCP, net.TCP_KEEPIDLE) == KEEPALIVE_IDLE_S
        assert server._socket.get(zmq.HEARTBEAT_IVL) == 0
        assert not broker.connections[0].lost_because


# -- connecting ----------------------------------------------------------------------------------


async def open_fails(port: int, host: str = "127.0.0.1", **options: object) -> str:
    client = Client(port, host, connect_timeout_s=2.0, **options)
    began_s = time.monotonic()
    with pytest.raises(BrokerUnreachable) as caught:
        await client.link.open(client.frames.put_nowait, client.lost_because.append)
    assert time.monotonic() - began_s < 3.0
    assert client.lost_because == []
    assert caught.value.port == port
    return caught.value.message


async def test_nobody_listens() -> None:
    with net.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert "penstock up" in await open_fails(port)
        free.listen()  # but never accepts, let alone answers
        assert "timed out" in await open_fails(port)
    assert "no-such-host" in await open_fails(port, "no-such-host.invalid")


async def test_something_else_listens() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100)
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    async with server:
        assert "handshake" in await open_fails(server.sockets[0].getsockname()[1])


async def test_names_are_resolved() -> None:
    async with serving() as (_, _, port), Client(port, "localhost") as client:
        await client.echo()


async def test_a_port_that_is_taken() -> None:
    async with serving() as (_, broker, port):
        other = ZmqServer(Settings(), broker)
        with pytest.raises(InvalidSettings, match=r"server\.zmq.*in use"):
            await other.start("127.0.0.1", port)


# -- CURVE ---------------------------------------------------------------------------------------


async def test_curve_with_the_right_keys() -> None:
    """Row T1: encrypted with CURVE; the client's own key is made up when none is listed."""
    _, secret = make_keys()
    serve = serving(curve_secret_key=secret)
    async with serve as (_, _, port), Client(port, server_key=public_key(secret)) as client:
        await client.echo(os.urandom(200_000))


async def test_curve_with_the_wrong_key_of_the_broker() -> None:
    """Row T1: a mismatch is named as such, and in time."""
    _, secret = make_keys()
    async with serving(curve_secret_key=secret) as (_, broker, port):
        message = await open_fails(port, server_key=make_keys()[0])
        assert "client.curve_server_key" in message
        assert broker.connections == []


async def test_curve_with_a_list_of_clients() -> None:
    """Row T1: only keys on the list come in."""
    _, secret = make_keys()
    listed, client_secret = make_keys()
    key = public_key(secret)
    async with serving(curve_secret_key=secret, curve_clients=(listed,)) as (_, broker, port):
        assert "server.curve_clients" in await open_fails(
            port, server_key=key, secret_key=make_keys()[1]
        )
        assert "server.curve_clients" in await open_fails(port, server_key=key)
        assert broker.connections == []
        async with Client(port, server_key=key, secret_key=client_secret) as client:
            await client.echo()


async def test_curve_on_one_side_only() -> None:
    """Row T1: no client without CURVE gets into a broker with it, nor the other way round."""
    public, secret = make_keys()
    async with serving(curve_secret_key=secret) as (_, broker, port):
        assert "client.curve_server_key" in await open_fails(port)
        assert broker.connections == []
    async with serving() as (_, broker, port):
        assert "client.curve_server_key" in await open_fails(port, server_key=public)
        assert broker.connections == []


async def test_a_key_that_is_none() -> None:
    with pytest.raises(InvalidSettings, match=r"client\.curve_server_key"):
        await Client(1, server_key="oops").link.open(print, print)
    with pytest.raises(InvalidSettings, match=r"server\.curve_secret_key"):
        async with serving(curve_secret_key="oops"):
            pass


# -- the end -------------------------------------------------------------------------------------


def held() -> tuple[int, int, set[str]]:
    """Threads of the process, its descriptors, and the threads of Python."""
    names = {thread.name for thread in threading.enumerate()}
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), names


async def settled() -> tuple[int, int, set[str]]:
    """The same, when nothing of earlier tests goes away any more."""
    before = held()
    await asyncio.sleep(0.3)
    while (now := held()) != before:
        before = now
        await asyncio.sleep(0.3)
    return now


async def test_stop_leaves_nothing_behind() -> None:
    """Row T1: no thread, descriptor or task stays when the server stops under its clients."""
    _, secret = make_keys()
    public, client_secret = make_keys()

    async def once() -> None:
        options = {"curve_secret_key": secret, "curve_clients": (public,)}
        keys = {"server_key": public_key(secret), "secret_key": client_secret}
        async with serving(**options) as (server, _, port), contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(port, **keys)) for _ in range(10)]
            for client in clients:
                client.link.send(Frame(Kind.PUBLISH, 1, b"", (bytes(100_000),)))
            await server.stop()
            await server.stop()
            assert not server.links
            for client in clients:
                await until(lambda client=client: client.lost_because)

    await once()  # threads that the process keeps: of clients, and of pyzmq for large parts
    before = await settled()
    tasks = asyncio.all_tasks()
    for _ in range(3):
        await once()
    await until(lambda: held() == before)
    assert asyncio.all_tasks() == tasks


async def test_a_client_that_fails_to_open_leaves_nothing_behind() -> None:
    await open_fails(1)
    before = await settled()
    for _ in range(5):
        await open_fails(1)
    await until(lambda: held() == before)


def test_missing_pyzmq_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyzmq the message holds the command that installs it."""
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "penstock.transport.zeromq")
    with pytest.raises(PenstockError, match=r"pip install 'penstock\[server\]'"):
        importlib.import_module("penstock.transport.zeromq")

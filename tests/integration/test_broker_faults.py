"""A real broker among clients that break the rules, connections that break, and bad luck.

Row T1, T4, Q1, X11: whatever one client does costs that client an answer or its connection, and
nobody else anything. docs/guide/broker-faults.md tells the same as a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import errors
from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.model.settings_loader import load
from penstock.server import publish
from penstock.server.auth import Authenticator
from penstock.server.broker import tenant_infos
from penstock.server.daemon import Daemon
from penstock.server.publish import MAX_REST_S
from penstock.server.transports.curve import make_keys
from penstock.server.transports.tcp import TcpLink
from penstock.testing.broker_process import BrokerProcess, broker_inside
from penstock.wire import message as say
from penstock.wire.frame import ENVELOPE, MAGIC, Frame, Kind
from penstock.wire.negotiation import offer
from penstock.wire.stream import StreamReader, decode_frame, encode_frame, encode_message

MIB = 1 << 20
DEADLINE_S = 20.0
PATIENT = penstock.Retry(ladder_ms=(0,), max_attempts=50)
CORPUS = Path(__file__).resolve().parent.parent / "fuzz" / "corpus" / "connection"
SESSION_S = 3.0
SECRET = "a secret of this test, as long as it has to be"
# Twice is what the bench case `fuzzed` asks for on a quiet machine; here others may be at work
# beside us.
GENEROUS = 10.0
LEAST_S = 0.5


# -- the broker, and those who talk to it ------------------------------------------------------------


class Site:
    """A broker process and what it says in its log."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "broker.log"
        self.flags = {"server__session_s": SESSION_S, "server__heartbeat_s": 0.5, **flags}
        self._log = self.log.open("ab")
        self.broker = BrokerProcess(folder / "data", log=self._log).start(**self.flags)

    def restart(self) -> None:
        """Start it again after a kill, where clients know it."""
        self.broker.start(**self.flags)

    def stop(self) -> int:
        with self._log:
            return self.broker.stop()

    def url(self, transport: str = "tcp") -> str:
        return self.broker.url(transport)

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.broker.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def get(self, path: str) -> str:
        address = f"http://127.0.0.1:{self.broker.ports['http']}{path}"
        return await asyncio.to_thread(lambda: urllib.request.urlopen(address).read().decode())

    async def counted(self, name: str) -> float:
        """A metric, written with its labels; 0 where it is not there."""
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return 0.0

    async def late(self) -> float:
        """Settlements that came too late, as the metrics count them."""
        return await self.counted('penstock_settled_events_total{kind="late"}')

    async def held_back(self) -> float:
        """Times that a client's send buffer was full."""
        return await self.counted('penstock_backpressure_total{reason="send-buffer"}')

    async def sessions(self) -> list[dict[str, Any]]:
        return json.loads(await self.get("/api/admin/sessions"))["items"]

    def complaints(self) -> str:
        """What the broker calls its own failure; there must be none, whatever clients send."""
        text = self.log.read_text()
        return text[text.index("Traceback") - 500 :][:3_000] if "Traceback" in text else ""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("faults"))
    yield site
    assert site.stop() == 0


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """The broker of all these tests: none of them may harm it."""
    pid = shared.broker.pid
    yield shared
    assert shared.broker.pid == pid
    os.kill(pid, 0)
    assert not shared.complaints()


@pytest_asyncio.fixture
async def bus(site: Site) -> AsyncIterator[penstock.Bus]:
    async with penstock.connect(site.url()) as bus:
        yield bus


class Control:
    """Somebody who works while others misbehave, and notes how long each event took."""

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self._name = name

    async def __aenter__(self) -> Control:
        self._bus = await penstock.connect(self._site.url()).open()
        topic = f"control.{self._name}"
        self._events = await self._bus.subscribe(topic, group=topic).open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bus.close()

    async def p99_s(self, seconds: float) -> float:
        """Publish, receive, ack, again and again; raises what any of it raises."""
        taken: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(taken) < 20:
            began = time.monotonic()
            await self._bus.publish(f"control.{self._name}", b"%d" % len(taken))
            event = await self._events.get(timeout_s=DEADLINE_S)
            assert event is not None
            assert event.payload == b"%d" % len(taken)
            await event.ack()
            taken.append(time.monotonic() - began)
            await asyncio.sleep(0.002)
        return sorted(taken)[len(taken) * 99 // 100]

    async def unharmed(self, harm: Callable[[], Any], seconds: float = 2.0) -> None:
        """Work before and during something; it costs at most a generous factor."""
        before = await self.p99_s(seconds / 2)
        harming = asyncio.create_task(harm())
        try:
            during = await self.p99_s(seconds)
        finally:
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
        assert during <= max(GENEROUS * before, LEAST_S), f"p99 {before:.3f} s, then {during:.3f} s"


class Stranger:
    """A TCP client without manners."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream = StreamReader(64 * MIB)
        self._messages: list[Any] = []

    async def __aenter__(self) -> Stranger:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def hello(self, **fields: Any) -> Frame:
        await self.send(offer())
        await self.message()
        await self.frame(Frame(Kind.HELLO, 0, say.encode(say.Hello(**{"client": "x", **fields}))))
        return await self.answer()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self, frame: Frame) -> None:
        await self.send(b"".join(encode_frame(frame)))

    async def message(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not self._messages:
                data = await self.reader.read(65_536)
                if not data:
                    return None
                self._messages += self._stream.feed(data)
        return self._messages.pop(0)

    async def answer(self, *kinds: Kind) -> Frame:
        """The next frame of these kinds."""
        while True:
            message = await self.message()
            assert message is not None, "the broker closed the connection"
            frame = decode_frame(message, 64 * MIB)
            if not kinds or frame.kind in kinds:
                return frame

    async def ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            while await self.message() is not None:
                pass
        return True


class Dealer:
    """A ZeroMQ client without manners: it reads what it asks for here, and libzmq one message ahead."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Dealer:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.RCVHWM, 1), (zmq.SNDHWM, 0), (zmq.RECONNECT_IVL, -1)):
            self._socket.set(option, value)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://127.0.0.1:{self._port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def hello(self, **fields: Any) -> Frame:
        await self.frame(Frame(Kind.HELLO, 0, say.encode(say.Hello(**{"client": "x", **fields}))))
        assert await asyncio.to_thread(self._socket.poll, int(DEADLINE_S * 1_000))
        return Frame.of_multipart(self._socket.recv_multipart())

    async def frame(self, frame: Frame) -> None:
        try:
            self._socket.send_multipart(frame.multipart(), zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionError("the broker has cut it off") from None

    async def ended(self) -> bool:
        return bool(await asyncio.to_thread(self._ends.poll, int(DEADLINE_S * 1_000)))


STRANGERS: dict[str, type[Stranger | Dealer]] = {"tcp": Stranger, "zmq": Dealer}


def fault_of(frame: Frame) -> str:
    assert frame.kind == Kind.FAULT
    return str(say.decode(frame.meta, say.Fault).code)


# -- bytes that are no conversation ------------------------------------------------------------------


def inputs() -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.iterdir())]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of a conversation changed, or left out, or noise instead of it."""
    changed = bytearray(data)
    for _ in range(rng.randrange(4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed) + 1) :]
    return rng.randbytes(300) if rng.random() < 0.1 else bytes(changed)


async def fuzz_tcp(site: Site) -> None:
    rng, known = random.Random(7), inputs()

    async def one() -> None:
        while True:
            async with Stranger(site.broker.ports["tcp"]) as stranger:
                with contextlib.suppress(ConnectionError, AssertionError):
                    if rng.random() < 0.9:
                        await stranger.hello()
                    await stranger.send(damaged(rng.choice(known), rng))
                    await asyncio.sleep(rng.random() * 0.05)

    await asyncio.gather(*(one() for _ in range(6)))


async def fuzz_zmq(site: Site) -> None:
    await asyncio.to_thread(_fuzz_zmq, site.broker.ports["zmq"], time.monotonic() + 3.0)


def _fuzz_zmq(port: int, end: float) -> None:
    rng, known = random.Random(8), inputs()
    with zmq.Context() as context:
        while time.monotonic() < end:
            with context.socket(zmq.DEALER) as dealer:
                dealer.set(zmq.LINGER, 100)
                dealer.connect(f"tcp://127.0.0.1:{port}")
                hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("zmq")))
                dealer.send_multipart(hello.multipart())
                for message in _messages(rng.choice(known), rng):
                    dealer.send_multipart(message)
                time.sleep(rng.random() * 0.02)


def _messages(data: bytes, rng: random.Random) -> Iterator[list[Any]]:
    for message in StreamReader(MIB).feed(data):
        parts = [bytes(part) for part in decode_frame(message, MIB).multipart()]
        if rng.random() < 0.3:
            at = rng.randrange(len(parts))
            parts[at] = damaged(parts[at], rng)
        if rng.random() < 0.1:
            parts = [rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(1, 6))]
        yield parts


@pytest.mark.parametrize("fuzz", [fuzz_tcp, fuzz_zmq], ids=["tcp", "zmq"])
async def test_fuzzed_frames_disturb_nobody(site: Site, fuzz: Callable[[Site], Any]) -> None:
    """T1, Q1: the broker stays up, and a client that works meanwhile sees no error."""
    async with Control(site, fuzz.__name__.replace("_", "-")) as control:
        await control.unharmed(lambda: fuzz(site), 3.0)


@pytest.mark.parametrize("greeted", [False, True])
async def test_a_frame_that_claims_4_gb(site: Site, greeted: bool) -> None:
    """Q1: refused from its five bytes; no memory is reserved."""
    before = site.rss_bytes
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            stranger = await stack.enter_async_context(Stranger(site.broker.ports["tcp"]))
            if greeted:
                await stranger.hello()
            else:
                await stranger.send(offer())
                await stranger.message()
            await stranger.send(struct.pack("<BI", Kind.PUBLISH, 0xFFFF_FFFF) + b"x" * 1_000)
            assert fault_of(await stranger.answer()) == "connection.protocol"
            assert await stranger.ended()
    assert site.rss_bytes - before < 16 * MIB


async def test_a_part_that_claims_4_gb_over_zmq(site: Site) -> None:
    """T1: libzmq ends the connection on the claim alone; the others go on."""

    def claim() -> None:
        with socket.create_connection(("127.0.0.1", site.broker.ports["zmq"]), 5) as connection:
            head = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            connection.sendall(head + b"\x04" + bytes([len(ready)]) + ready)
            connection.sendall(b"\x02" + struct.pack(">Q", 4 << 30) + b"x" * 1_000)
            with contextlib.suppress(ConnectionError):
                while connection.recv(65_536):
                    pass

    before = site.rss_bytes
    await asyncio.to_thread(claim)
    assert site.rss_bytes - before < 16 * MIB
    async with Control(site, "claim-zmq") as control:
        await control.p99_s(0.2)


async def test_a_wrong_version_is_named(site: Site) -> None:
    """T1, Q1: by a code of its own, over both transports."""
    async with Stranger(site.broker.ports["tcp"]) as stranger:
        body = json.dumps({"versions": [99]}).encode()
        await stranger.send(encode_message(0xFE, body))
        _, answer = await stranger.message()
        assert json.loads(bytes(answer))["error"]["code"] == "connection.version"
        assert await stranger.ended()

    def over_zmq() -> Frame:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVTIMEO, int(DEADLINE_S * 1_000))
            dealer.connect(f"tcp://127.0.0.1:{site.broker.ports['zmq']}")
            dealer.send_multipart([ENVELOPE.pack(MAGIC, 99, Kind.HELLO, 0, 1), b""])
            return Frame.of_multipart(dealer.recv_multipart())

    assert fault_of(await asyncio.to_thread(over_zmq)) == "connection.version"


# -- clients that take and do not give ---------------------------------------------------------------


async def test_half_open_connections_are_let_go(site: Site) -> None:
    """They cost a socket for ten seconds; those who come with manners are served meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(Stranger(site.broker.ports["tcp"])) for _ in range(150)
        ]
        for stranger in silent[:50]:
            await stranger.send(offer()[:3])
        async with Control(site, "half-open") as control:
            await control.p99_s(1.0)
        async with asyncio.timeout(DEADLINE_S):
            assert all(await asyncio.gather(*(stranger.ended() for stranger in silent)))


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_a_client_that_falls_silent_is_let_go(site: Site, transport: str) -> None:
    """T4, T1: after three heartbeats its connection ends, and after `session_s` its session."""
    async with STRANGERS[transport](site.broker.ports[transport]) as stranger:
        assert (await stranger.hello(client="silent", heartbeat_s=0.5)).kind == Kind.WELCOME
        async with asyncio.timeout(DEADLINE_S):
            assert await stranger.ended()
            while "silent" in {each["client"] for each in await site.sessions()}:
                await asyncio.sleep(0.2)


async def test_a_connection_that_ends_while_it_is_greeted_leaves_nothing(site: Site) -> None:
    """T4: the session it began is nobody's, and ends."""
    for number in range(30):
        async with Stranger(site.broker.ports["tcp"]) as stranger:
            await stranger.send(offer())
            await stranger.message()
            hello = say.encode(say.Hello("gone", resumable=bool(number % 2)))
            await stranger.frame(Frame(Kind.HELLO, 0, hello))
    async with asyncio.timeout(DEADLINE_S):
        while "gone" in {each["client"] for each in await site.sessions()}:
            await asyncio.sleep(0.2)


async def test_a_registration_that_is_refused_leaves_nothing(site: Site) -> None:
    """T4: a direct consumer with a broken pattern hears why, before any welcome."""
    async with Stranger(site.broker.ports["tcp"]) as stranger:
        refused = await stranger.hello(client="refused", subscriptions=["a..b"])
        assert fault_of(refused) == "invalid.pattern"
        assert await stranger.ended()
    await asyncio.sleep(0.3)
    assert "refused" not in {each["client"] for each in await site.sessions()}


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_a_client_that_never_reads(tmp_path: Path, transport: str) -> None:
    """T1, Q1: broker memory stays flat, others get their events, and the client is cut off or waits."""
    site = Site(tmp_path, server__send_buffer_bytes=256 * 1024)
    kind, port = STRANGERS[transport], site.broker.ports[transport]
    try:
        async with penstock.connect(site.url()) as bus, kind(port) as lazy, kind(port) as greedy:
            await bus.publish("big.events", b"first")
            spec = GroupSpec(("big.events",), lease_s=600.0)
            await lazy.hello(client="lazy")
            wish = say.Subscribe(1, "lazy", spec, "lazy", 1_000_000)
            await lazy.frame(Frame(Kind.SUBSCRIBE, 1, say.encode(wish)))
            await greedy.hello(client="greedy")
            for _ in range(20):
                await bus.publish_many("big.events", [random.randbytes(10_000)] * 100)
            full = site.rss_bytes
            for request in range(1, 1_000):  # a gigabyte of answers, if they were all made
                read = say.Read("big.events", 0, 0, max_bytes=2**40)
                with contextlib.suppress(ConnectionError):
                    await greedy.frame(Frame(Kind.READ, request, say.encode(read)))
            async with Control(site, "never-reads") as control:
                await control.p99_s(3.0)
            for _ in range(20):
                await bus.publish_many("big.events", [random.randbytes(10_000)] * 100)
            assert site.rss_bytes - full < 160 * MIB
            assert await site.held_back() > 0, "row X10: it is seen that deliveries wait"
            assert not site.complaints()
    finally:
        assert site.stop() == 0


CUT = 3
"""How a flood ends when its connection does."""
FLOOD_TCP = """
import socket, sys, threading
greeting, frame = map(bytes.fromhex, sys.argv[2:])
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(greeting)
    def swallow():
        while connection.recv(1 << 20):
            pass
    threading.Thread(target=swallow, daemon=True).start()
    try:
        while True:
            connection.sendall(frame * 500)
    except OSError:
        sys.exit(3)
"""
FLOOD_ZMQ = """
import contextlib, sys, zmq
greeting, frame = ([bytes.fromhex(part) for part in word.split(",")] for word in sys.argv[2:])
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RECONNECT_IVL, -1)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
    dealer.send_multipart(greeting)
    while not monitor.poll(0):
        with contextlib.suppress(zmq.Again):
            for _ in range(500):
                dealer.send_multipart(frame, zmq.NOBLOCK)
        while dealer.poll(0):
            dealer.recv_multipart()
    dealer.disable_monitor()
    sys.exit(3)
"""


def flood_words(site: Site, transport: str) -> list[str]:
    """A program that greets the broker and then sends heartbeats as fast as it can."""
    hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("flood")))
    beat = Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat(5)))
    port = str(site.broker.ports[transport])
    if transport == "zmq":
        parts = (",".join(bytes(part).hex() for part in each.multipart()) for each in (hello, beat))
        return ["-c", FLOOD_ZMQ, port, *parts]
    greeting = offer() + b"".join(encode_frame(hello))
    return ["-c", FLOOD_TCP, port, greeting.hex(), b"".join(encode_frame(beat)).hex()]


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_a_flood_of_heartbeats(site: Site, transport: str) -> None:
    """T1, Q1: a client that does nothing but live is cut off, and costs others little until then."""
    started: list[asyncio.subprocess.Process] = []

    async def flood() -> None:
        words = flood_words(site, transport)
        started.append(await asyncio.create_subprocess_exec(sys.executable, *words))
        await started[0].wait()

    try:
        async with Control(site, f"flood-{transport}") as control:
            await control.unharmed(flood, 3.0)
        assert await asyncio.wait_for(started[0].wait(), DEADLINE_S) == CUT
    finally:
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                child.kill()


async def test_pings_behind_a_full_queue_end_nobody_but_their_sender(site: Site) -> None:
    """T1: libzmq must not answer a PING on a connection that is gone; it would end the process."""
    ping = b"\x04\x07\x04PING\x00\x00"
    beat = b"".join(
        bytes([more, len(part)]) + bytes(part)
        for more, part in zip(
            (1, 0), Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat(1))).multipart(), strict=True
        )
    )
    hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("pings"))).multipart()
    greeting = b"".join(
        bytes([more, len(part)]) + bytes(part) for more, part in zip((1, 0), hello, strict=True)
    )

    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    opening = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    opening += b"\x04" + bytes([len(ready)]) + ready
    place = ("127.0.0.1", site.broker.ports["zmq"])

    def bother() -> None:
        end_s, number = time.monotonic() + 8.0, 0
        while time.monotonic() < end_s and number < 300:
            number += 1
            with (
                contextlib.suppress(OSError),
                socket.create_connection(place, DEADLINE_S) as connection,
            ):
                connection.sendall(opening)
                connection.sendall(greeting)
                time.sleep(0.03)
                connection.recv(65_536)  # until it is welcomed
                connection.sendall((beat + ping) * 1_500)
                time.sleep(number % 5 * 0.001)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with Control(site, "pings") as control:
        await control.unharmed(lambda: asyncio.to_thread(bother), 10.0)


async def test_a_client_that_goes_on_breaking_the_protocol_is_cut_off(site: Site) -> None:
    """Q1: each frame is answered, and after a few the connection ends."""
    async with Stranger(site.broker.ports["tcp"]) as stranger:
        await stranger.hello()
        with contextlib.suppress(ConnectionError):
            for request in range(1, 100):
                await stranger.frame(Frame(Kind.WELCOME, request, b""))
        assert await stranger.ended()


# -- who may do what ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker that asks for tokens."""
    site = Site(tmp_path_factory.mktemp("guarded"), auth__jwt_secret=SECRET)
    yield site
    assert site.stop() == 0
    assert not site.complaints()


def token(tenant: str, *, secret: str = SECRET, age_s: float = 0.0) -> str:
    auth = load(None, {}, {"auth.jwt_secret": secret}).auth
    keeper = Authenticator(auth, lambda: time.time() - age_s)
    return keeper.issue(tenant, "tester", ["operator"], 60.0)


NOT_KNOWN, DENIED = "access.unauthenticated", "access.denied"
BAD_TOKENS: dict[str, tuple[Callable[[], str], str]] = {
    "missing": (lambda: "", NOT_KNOWN),
    "malformed": (lambda: "no token at all", NOT_KNOWN),
    "expired": (lambda: token("acme", age_s=3_600.0), NOT_KNOWN),
    "of-another-broker": (lambda: token("acme", secret="x" * 40), NOT_KNOWN),
    "of-another-tenant": (lambda: token("other"), DENIED),
}


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
@pytest.mark.parametrize("name", BAD_TOKENS)
async def test_tokens_that_do_not_open_the_door(guarded: Site, transport: str, name: str) -> None:
    """T10: said at once, by its code; connecting again and again would not help."""
    make, code = BAD_TOKENS[name]
    began = time.monotonic()
    with pytest.raises(errors.AccessDenied) as raised:
        async with penstock.connect(
            guarded.url(transport), identity__tenant="acme", client__token=make()
        ):
            pass
    assert raised.value.code == code
    assert time.monotonic() - began < 5.0


async def test_a_token_is_enough_to_speak_for_its_tenant(guarded: Site) -> None:
    """T10: whoever names no tenant speaks for that of its token."""
    async with penstock.connect(guarded.url(), client__token=token("acme")) as bus:
        await bus.publish("orders.named.v1.acme", b"mine")
        assert bus.engine.channel.welcome.tenant == "acme"
        with pytest.raises(errors.AccessDenied):
            await bus.publish("orders.named.v1.other", b"not mine")


async def test_a_tenant_stays_within_its_own(guarded: Site) -> None:
    """T10, T11: not by publishing, consuming, reading, nor administration over the wire."""
    async with (
        penstock.connect(
            guarded.url(), identity__tenant="acme", client__token=token("acme")
        ) as acme,
        penstock.connect(
            guarded.url(), identity__tenant="other", client__token=token("other")
        ) as other,
    ):
        await other.publish("orders.created.v1.other", b"theirs")
        dead = await other.dead_letters.dead_letter(
            "x1", consumer="theirs", topic="orders.created.v1.other", payload=b"p",
            actor="tester", reason="test",
        )  # fmt: skip
        for denied in (
            lambda: acme.publish("orders.created.v1.other", b"mine"),
            lambda: acme.subscribe("orders.created.v1.other", group="spy").open(),
            lambda: acme.subscribe("orders.#", group="spy").open(),
            lambda: anext(aiter(acme.replay("orders.created.v1.other"))),
            lambda: acme.topics.delete("orders.created.v1.other", confirm="DELETE"),
        ):
            with pytest.raises(errors.AccessDenied):
                await denied()
        assert await acme.dead_letters.list() == []
        with pytest.raises(errors.UnknownDeadLetter):
            await acme.dead_letters.inspect(dead.id)
        gone = await acme.dead_letters.purge(
            [dead.id], actor="tester", reason="no", confirm="PURGE"
        )
        assert gone.done == 0
        assert [event.payload async for event in other.replay("orders.created.v1.other")] == [
            b"theirs"
        ]
        assert [letter.id for letter in await other.dead_letters.list()] == [dead.id]


async def test_curve_keys_that_do_not_match(tmp_path: Path) -> None:
    """T1: the client hears which setting to look at; with the right key it comes in."""
    public, secret = make_keys()
    site = Site(tmp_path, server__curve_secret_key=secret)
    for key in (make_keys()[0], ""):
        with pytest.raises(errors.BrokerUnreachable, match=r"client\.curve_server_key"):
            async with penstock.connect(
                site.url("zmq"), client__curve_server_key=key, client__deadline_s=5
            ):
                pass
    async with penstock.connect(site.url("zmq"), client__curve_server_key=public) as bus:
        await bus.publish("faults.curve", b"x")
    assert site.stop() == 0
    assert not site.complaints()


# -- operators ---------------------------------------------------------------------------------------


async def dead_letter(bus: penstock.Bus, topic: str) -> str:
    """An event that a consumer rejected."""
    await bus.publish(topic, b"poison")
    async with bus.subscribe(topic, group=f"g-{topic}") as events:
        event = await events.get(timeout_s=DEADLINE_S)
        assert event is not None
        await event.reject("bad")
        await bus.flush()
    (letter,) = await bus.dead_letters.list(topic=topic)
    return str(letter.id)


async def test_a_replay_needs_its_exact_target(bus: penstock.Bus) -> None:
    """T8: consumer and topic restated to the letter; nothing happens otherwise."""
    topic = "faults.exact"
    letter = await dead_letter(bus, topic)
    why = {"actor": "me", "reason": "fixed", "confirm": "REPLAY"}
    for consumer, wrong in (
        ("other", topic),
        (f"g-{topic} ", topic),
        (f"g-{topic}", "faults.Exact"),
    ):
        outcome = await bus.dead_letters.replay(
            [letter], target_consumer=consumer, target_topic=wrong, **why
        )
        assert (outcome.done, outcome.failures[0]["code"]) == (0, "refused.target-mismatch")
    with pytest.raises(errors.ConfirmationNeeded):
        await bus.dead_letters.replay(
            [letter], target_consumer=f"g-{topic}", target_topic=topic, **why | {"confirm": "yes"}
        )
    (kept,) = await bus.dead_letters.list(topic=topic)
    assert (kept.status, kept.replay_count) == ("dead", 0)


async def test_a_purge_needs_its_word(bus: penstock.Bus) -> None:
    """T8: without it nothing is gone."""
    letter = await dead_letter(bus, "faults.purge")
    for word in ("", "purge", "REPLAY"):
        with pytest.raises(errors.ConfirmationNeeded, match="--confirm PURGE"):
            await bus.dead_letters.purge([letter], actor="me", reason="spam", confirm=word)
    assert len(await bus.dead_letters.list(topic="faults.purge")) == 1
    done = await bus.dead_letters.purge([letter], actor="me", reason="spam", confirm="PURGE")
    assert done.done == 1
    assert await bus.dead_letters.list(topic="faults.purge") == []


async def test_two_operators_replay_the_same_record(site: Site, bus: penstock.Bus) -> None:
    """T8: one of them does it, the other hears why not; the event comes again once."""
    topic = "faults.both"
    letter = await dead_letter(bus, topic)
    async with penstock.connect(site.url("zmq")) as second:
        outcomes = await asyncio.gather(
            *(
                operator.dead_letters.replay(
                    [letter], target_consumer=f"g-{topic}", target_topic=topic, actor="me",
                    reason="fixed", confirm="REPLAY",
                )
                for operator in (bus, second) * 4
            )
        )  # fmt: skip
    assert sum(each.done for each in outcomes) == 1
    async with bus.subscribe(topic, group=f"g-{topic}") as events:
        event = await events.get(timeout_s=DEADLINE_S)
        assert event is not None
        await event.ack()
        assert await events.get(timeout_s=0.3) is None


async def test_operators_who_change_routes_at_once(tmp_path: Path) -> None:
    """Each change is made and kept, whoever else makes one."""
    site = Site(tmp_path)
    try:
        async with penstock.connect(site.url()) as bus:
            routes = [penstock.Route(f"faults.r{number}", "nobody") for number in range(40)]
            await asyncio.gather(*(bus.routes.put(route) for route in routes))
            kept = {route.pattern for route in await bus.routes.list()}
            assert {route.pattern for route in routes} <= kept
    finally:
        site.stop()


async def test_a_message_that_is_nested_too_deep(site: Site) -> None:
    """It is the client's mistake, and no failure of the broker."""
    deep = b"\x82\xa7request\xaaListTopics\xa6fields\x81\xa1x" + b"\x91" * 5_000 + b"\x01"
    async with Stranger(site.broker.ports["tcp"]) as stranger:
        await stranger.hello()
        await stranger.frame(Frame(Kind.ASK, 1, deep))
        assert fault_of(await stranger.answer()) == "connection.protocol"


# -- consumers that stop, come late, or come twice ------------------------------------------------------

CONSUMER = """
import asyncio, sys, penstock
async def main():
    retry = penstock.Retry((0,), 50)
    async with (
        penstock.connect(sys.argv[1], client__heartbeat_s=0.5) as bus,
        bus.subscribe("jobs.stopped", group="stopped", lease_s=1.5, retry=retry, max_inflight=1) as events,
    ):
        event = await events.get(timeout_s=30)
        print("got", event.attempt, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await event.ack()
            print("acked", flush=True)
        except penstock.DeliveryError as error:
            print(error.code, flush=True)
        event = await events.get(timeout_s=30)
        await event.ack()
        await bus.flush()
        print("next", event.payload.decode(), flush=True)
asyncio.run(main())
"""


async def test_a_consumer_that_is_stopped_past_its_lease(site: Site, bus: penstock.Bus) -> None:
    """T5: SIGSTOP; another one gets the event, the late ack is refused, and nothing is lost."""
    await bus.publish("jobs.stopped", b"one")
    child = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, site.url()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert await asyncio.to_thread(child.stdout.readline) == b"got 1\n"
        await asyncio.sleep(0.2)  # the broker hears that it was handed over
        child.send_signal(signal.SIGSTOP)
        async with bus.subscribe(
            "jobs.stopped", group="stopped", lease_s=1.5, retry=PATIENT, max_inflight=1
        ) as events:
            event = await events.get(timeout_s=DEADLINE_S)
            assert event is not None
            assert (event.payload, event.attempt) == (b"one", 2)
            await event.ack()
            await bus.flush()
        child.send_signal(signal.SIGCONT)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert await asyncio.to_thread(child.stdout.readline) == b"delivery.lease-expired\n"
        await bus.publish("jobs.stopped", b"two")
        assert await asyncio.to_thread(child.stdout.readline) == b"next two\n"
        assert (await bus.groups.info("stopped")).lag == 0
    finally:
        child.kill()
        child.communicate()


async def test_a_settlement_that_comes_too_late_is_refused_and_counted(site: Site) -> None:
    """T5: the client hears which; the metrics say how many."""
    before = await site.late()
    async with (
        penstock.connect(site.url()) as bus,
        Stranger(site.broker.ports["tcp"]) as slow,
    ):
        await bus.publish("jobs.late", b"x")
        await slow.hello(client="slow", heartbeat_s=60.0)
        spec = GroupSpec(("jobs.late",), lease_s=0.3, retry=Retry((60_000,), 5))
        await slow.frame(
            Frame(Kind.SUBSCRIBE, 1, say.encode(say.Subscribe(1, "late", spec, "slow", 5)))
        )
        got = say.decode((await slow.answer(Kind.DELIVER)).meta, say.Deliver)
        handed = say.Settle(1, [say.Settlement(got.delivery, 1)])
        await slow.frame(Frame(Kind.SETTLE, 0, say.encode(handed)))
        await asyncio.sleep(0.8)
        acked = say.Settle(2, [say.Settlement(got.delivery, 1, [0, 1])])
        await slow.frame(Frame(Kind.SETTLE, 0, say.encode(acked)))
        refused = say.decode((await slow.answer(Kind.REFUSED)).meta, say.Refused)
        assert (refused.delivery, refused.fault.code) == (got.delivery, "delivery.lease-expired")
        assert (await bus.groups.info("late")).lag == 1
    assert await site.late() == before + 1


async def test_a_consumer_that_comes_again_under_its_name(site: Site, bus: penstock.Bus) -> None:
    """T4: it takes the place of its former self, whose session still waits for it."""
    async with penstock.connect(site.url()) as again:
        former = await bus.subscribe("jobs.named", group="named", member="worker-1").open()
        async with again.subscribe("jobs.named", group="named", member="worker-1") as events:
            with pytest.raises(errors.Fenced):
                await former.get(timeout_s=DEADLINE_S)
            await former.close()
            await bus.publish("jobs.named", b"x")
            event = await events.get(timeout_s=DEADLINE_S)
            assert event is not None
            await event.ack()
        await bus.publish("jobs.named", b"y")  # with nobody left in the group
        await again.flush()
        assert (await bus.groups.info("named")).members == []


async def test_a_log_of_many_small_batches_can_be_read(bus: penstock.Bus) -> None:
    """T9: more batches than a frame has parts."""
    count = 5_000
    await asyncio.gather(
        *(bus.publish("faults.small", b"%d" % n, idempotency_key=str(n)) for n in range(count))
    )
    found = [int(event.payload) async for event in bus.replay("faults.small")]
    assert sorted(found) == list(range(count))


# -- a tenant over its rate --------------------------------------------------------------------------

METERED, RATE_PER_S = "orders.created.v1.acme", 100


@pytest_asyncio.fixture
async def metered(tmp_path: Path) -> AsyncIterator[Daemon]:
    """A broker that lets a tenant publish so much, and whose clock moves only when it is told to."""
    daemon = broker_inside(tmp_path, {"admission.tenants.acme.events_per_s": RATE_PER_S})
    await daemon.start()
    now_s = daemon.engine.runtime.now()
    daemon.engine.runtime.now = lambda: now_s
    yield daemon
    await daemon.stop()


@pytest_asyncio.fixture
async def eager(metered: Daemon) -> AsyncIterator[penstock.Bus]:
    """A client of that broker."""
    async with penstock.connect(f"penstock://127.0.0.1:{metered.ports['tcp']}") as bus:
        yield bus


@pytest.mark.parametrize(("events", "retry_after_s"), [(2, 0.25), (80, 0.8)])
async def test_a_client_over_its_rate_rests_for_a_moment_and_goes_on(
    metered: Daemon,
    eager: penstock.Bus,
    monkeypatch: pytest.MonkeyPatch,
    events: int,
    retry_after_s: float,
) -> None:
    """T11: for 50 ms, and not for as long as it was told to wait: it may have other things to say."""
    rested: list[tuple[TcpLink, float, bool]] = []
    rest = TcpLink.rest

    def watched(link: TcpLink, seconds: float) -> None:
        rest(link, seconds)
        rested.append((link, seconds, link.holding))

    monkeypatch.setattr(TcpLink, "rest", watched)
    await eager.publish_many(METERED, [b"x"] * RATE_PER_S)
    with pytest.raises(penstock.Throttled) as caught:
        await eager.publish_many(METERED, [b"x"] * events)
    assert caught.value.retry_after_s == pytest.approx(retry_after_s)
    [(link, seconds, held)] = rested
    assert (seconds, held) == (MAX_REST_S, True)
    async with asyncio.timeout(DEADLINE_S):
        while link.holding:
            await asyncio.sleep(0.005)
        assert (await eager.publish("orders.created.v1.other", b"at once")).offset == 0
    later_s = metered.engine.runtime.now() + caught.value.retry_after_s
    metered.engine.runtime.now = lambda: later_s
    await asyncio.sleep(caught.value.retry_after_s)  # the client goes by its own clock
    assert (await eager.publish_many(METERED, [b"x"] * events)).offset == RATE_PER_S
    assert metered._tcp.links == {link}, "it is the same connection"


@pytest.mark.parametrize("size", [1, 100_000])  # events, and batches for the fast path
async def test_a_tenant_ahead_of_its_rate_lets_others_go_first(
    metered: Daemon, eager: penstock.Bus, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """T11: its batches are looked at when nobody else's publish is under way."""
    monkeypatch.setattr("penstock.server.publish.PATIENCE_S", DEADLINE_S)
    courtesy, stored = metered.broker.courtesy, metered.engine.log
    courtesy.begin()  # as if another tenant's were
    await eager.publish_many(METERED, [b"x"] * (RATE_PER_S // 5))
    ahead = asyncio.create_task(eager.publish_many(METERED, [os.urandom(size)] * 3))
    async with asyncio.timeout(DEADLINE_S):
        while not courtesy._waiting:
            await asyncio.sleep(0.001)
    await eager.publish("orders.created.v1.other", b"at once")
    assert not ahead.done()
    assert stored.bounds(METERED, 0)[1] == RATE_PER_S // 5
    courtesy.end()
    assert (await asyncio.wait_for(ahead, DEADLINE_S)).offset == RATE_PER_S // 5
    assert not courtesy._under_way


async def test_a_tenant_that_is_not_ahead_any_more_does_not_overtake_itself(
    metered: Daemon, eager: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11, X2: what waits out of courtesy is stored before what comes behind it."""
    monkeypatch.setattr("penstock.server.publish.PATIENCE_S", DEADLINE_S)
    courtesy, admission = metered.broker.courtesy, metered.engine.admission
    await eager.topics.create(METERED)
    courtesy.begin()  # as if another tenant's were
    monkeypatch.setattr(admission, "ahead", lambda tenant, now_s: True)
    first = asyncio.create_task(eager.publish(METERED, b"first"))
    async with asyncio.timeout(DEADLINE_S):
        while not courtesy._waiting:
            await asyncio.sleep(0.001)
    monkeypatch.setattr(admission, "ahead", lambda tenant, now_s: False)
    second = asyncio.create_task(eager.publish(METERED, b"second"))
    await asyncio.sleep(0.01)  # or they would share a frame
    await eager.publish("orders.created.v1.other", b"another topic")
    courtesy.end()
    receipts = await asyncio.wait_for(asyncio.gather(first, second), DEADLINE_S)
    assert [receipt.offset for receipt in receipts] == [0, 1]


async def test_newcomers_and_leavers_let_others_go_first(
    metered: Daemon, eager: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1, Q1: whoever connects all the time costs those who publish as little as can be."""
    monkeypatch.setattr("penstock.server.publish.PATIENCE_S", DEADLINE_S)
    courtesy, sessions, topic = (
        metered.broker.courtesy,
        metered.engine.state.sessions,
        "control.turn",
    )
    leaving = asyncio.Event()

    async def visit() -> None:
        async with penstock.connect(f"penstock://127.0.0.1:{metered.ports['tcp']}"):
            await leaving.wait()

    async def when(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    visitor = asyncio.create_task(visit())
    for act, before, after in ((lambda: None, 1, 2), (leaving.set, 2, 1)):
        courtesy.begin()  # as if somebody's publish were under way
        act()
        await when(lambda: courtesy._waiting)
        await eager.publish(topic, b"at once")
        assert len(sessions) == before
        courtesy.end()
        await when(lambda after=after: len(sessions) == after)
    await asyncio.wait_for(visitor, DEADLINE_S)


async def test_a_client_that_was_told_to_wait_does_not_ask_in_vain(
    metered: Daemon, eager: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: it knows the answer, a smaller batch is sent, and the broker's counters are complete."""
    asked: list[int] = []
    peek = metered.engine.admission.peek

    def watched(tenant: str, topic: str, events: int, now_s: float) -> Any:
        asked.append(events)
        return peek(tenant, topic, events, now_s)

    monkeypatch.setattr(metered.engine.admission, "peek", watched)
    await eager.publish_many(METERED, [b"x"] * (RATE_PER_S - 10))
    refused = []
    for _ in range(5):
        with pytest.raises(penstock.Throttled) as caught:
            await eager.publish_many(METERED, [b"x"] * 90)
        refused.append(caught.value)
    assert asked == [RATE_PER_S - 10, 90]
    waits = [each.retry_after_s for each in refused]
    assert waits == sorted(waits, reverse=True)
    assert 0 < waits[-1] < waits[0] == pytest.approx(0.8)
    assert {each.data["limit"] for each in refused} == {"events_per_s"}
    await eager.publish_many(METERED, [b"x"] * 10)
    assert metered.counters.refusals == {("throttled", "events_per_s", "acme"): 5}
    [acme] = [
        each
        for each in tenant_infos(metered.engine.admission, metered.counters.refusals)
        if each.tenant == "acme"
    ]
    assert acme.refusals == {"throttled events_per_s": 5}


async def test_a_batch_over_the_rate_is_refused_on_the_loop_before_it_is_decoded(
    metered: Daemon, eager: penstock.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: by its head. Decoding one of this size is for a thread, and admission is for the loop."""
    asked: list[int] = []
    decoded: list[int] = []

    def watched(where: Any, name: str, threads: list[int]) -> None:
        function = getattr(where, name)

        def call(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*args)

        monkeypatch.setattr(where, name, call)

    watched(metered.engine.admission, "peek", asked)
    watched(publish, "to_draft", decoded)
    batch = [random.randbytes(4_096)] * RATE_PER_S
    await eager.publish_many(METERED, batch)
    assert len(decoded) == 1
    assert decoded != [threading.get_ident()]
    with pytest.raises(penstock.Throttled):
        await eager.publish_many(METERED, batch)
    assert len(decoded) == 1
    assert asked == [threading.get_ident()] * 2


# -- a full disk, a clock that jumps -----------------------------------------------------------------


async def fill(bus: penstock.Bus, stored: dict[int, bytes]) -> None:
    """Publish until the disk is full, noting what was confirmed."""
    dice = random.Random(len(stored))
    for _ in range(300):
        payload = dice.randbytes(50_000)
        receipt = await bus.publish("disk.full", payload)
        stored[receipt.offset] = payload


async def test_a_disk_that_is_full_under_load(small_disk: Path) -> None:
    """T6, T11: publishers hear it, the rest goes on, room is taken up again, and nothing is lost."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\1" * (3 * MIB))
    site = Site(small_disk, journal__file_bytes=MIB, sealing__enabled=False)
    stored: dict[int, bytes] = {}
    try:
        async with penstock.connect(site.url()) as bus, penstock.connect(site.url("zmq")) as second:
            full = await asyncio.gather(
                *(fill(each, stored) for each in (bus, second) * 2), return_exceptions=True
            )
            assert {type(each) for each in full} == {penstock.DiskFull}
            assert len(stored) > 20
            async with bus.subscribe("disk.full", group="g", max_inflight=5) as events:
                for _ in range(5):
                    event = await events.get(timeout_s=DEADLINE_S)
                    assert event is not None
                    await event.ack()
                await bus.flush()
            async with penstock.connect(site.url()) as late:  # who comes now is served too
                found = {each.offset: each.payload async for each in late.replay("disk.full")}
                assert found == stored
                with pytest.raises(penstock.DiskFull):
                    await fill(late, stored)
            ballast.unlink()
            for _ in range(200):
                with contextlib.suppress(penstock.DiskFull):
                    receipt = await bus.publish("disk.full", b"there is room again")
                    break
                await asyncio.sleep(0.1)
            stored[receipt.offset] = b"there is room again"
            await asyncio.to_thread(site.broker.kill)
            await asyncio.to_thread(site.restart)
            assert {each.offset: each.payload async for each in bus.replay("disk.full")} == stored
            assert (await bus.groups.info("g")).lag == len(stored) - 5
        assert not site.complaints()
    finally:
        assert site.stop() == 0


@pytest.mark.timeout(30)
async def test_a_feed_of_a_client_that_left_waits_without_spinning(tmp_path: Path) -> None:
    """T4: a client may leave while events are on their way to it; the broker goes on."""
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    try:
        url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
        async with penstock.connect(url) as bus, bus.subscribe("t", group="g"):
            [session] = daemon.broker.sessions.values()
        while session.id in daemon.broker.sessions:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(session.room())
        await asyncio.sleep(0.05)  # for ever, if it spins
        assert not waiting.done()
        waiting.cancel()
    finally:
        await daemon.stop()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("late", [False, True])
async def test_a_consumer_that_settles_nothing_in_time_costs_no_memory(
    tmp_path: Path, late: bool
) -> None:
    """Q7, found by review: each lease that ran out was kept, with its events, until the feed ended."""
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    refused = attempts = 0
    try:
        url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
        async with penstock.connect(url) as bus:
            await bus.publish_many("t", [b"x"] * 10)
            async with bus.subscribe(
                "t", group="g", lease_s=0.01, max_inflight=10, retry=PATIENT
            ) as sub:
                while attempts < 10:
                    event = await sub.get(timeout_s=DEADLINE_S)
                    assert event is not None
                    attempts = max(attempts, event.attempt)
                    if late:
                        await asyncio.sleep(0.015)
                        with contextlib.suppress(errors.LeaseExpired):
                            await event.ack()
                            refused -= 1
                        refused += 1
                [session] = daemon.broker.sessions.values()
                [subscription] = session.feeds.queues()
                assert len(subscription.held) <= 2 * 10 + 1
                assert len(bus.engine._feeds[1].held) <= 2 * 10 + 1  # type: ignore[attr-defined]
                assert bool(refused) == late
    finally:
        await daemon.stop()


async def test_a_clock_that_jumps_back_an_hour(tmp_path: Path) -> None:
    """T6: append times never run back; leases, retries, heartbeats and sessions do not notice."""
    ahead_us = 0
    daemon = broker_inside(tmp_path, {"server.heartbeat_s": 0.2, "server.session_s": 1.0})
    daemon.engine.runtime.wall_us = lambda: time.time_ns() // 1_000 + ahead_us  # type: ignore[method-assign]
    await daemon.start()
    try:
        url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
        async with penstock.connect(url, client__heartbeat_s=0.2) as bus:
            await bus.publish("clock.jumps", b"before")
            async with bus.subscribe(
                "clock.jumps", group="g", lease_s=0.8, retry=penstock.Retry((200,), 9)
            ) as events:
                held = await events.get(timeout_s=DEADLINE_S)
                assert held is not None
                session = set(daemon.broker.sessions)
                ahead_us = -3_600_000_000
                await bus.publish("clock.jumps", b"after")
                event = await events.get(timeout_s=DEADLINE_S)
                assert event is not None
                assert event.payload == b"after"
                await event.ack()
                began = time.monotonic()
                again = await events.get(timeout_s=DEADLINE_S)  # the lease, then the ladder's step
                assert again is not None
                assert (again.payload, again.attempt) == (b"before", 2)
                assert 0.5 < time.monotonic() - began < 5.0
                await again.ack()
                await bus.flush()
                assert set(daemon.broker.sessions) == session
            times = [each.append_time_us async for each in bus.replay("clock.jumps")]
            assert times == sorted(times)
            assert (await bus.groups.info("g")).lag == 0
    finally:
        await daemon.stop()


# -- connections that break --------------------------------------------------------------------------


class Cut(NamedTuple):
    """Where a connection breaks: behind so many frames of one side, or within the next."""

    upstream: bool
    frames: int
    torn: bool


class Cutter:
    """A TCP proxy that knows frames, and breaks each connection where it is told to."""

    def __init__(self, port: int, cuts: list[Cut]) -> None:
        self._target = port
        self._cuts = list(cuts)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.plugged = True
        self.muted = False
        """What the broker says does not arrive."""
        self.slow_s = 0.0
        """How long a Subscribe is under way, and what is sent behind it waits."""
        self.subscribing = asyncio.Event()
        self.made = 0
        self.port = 0

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.plugged:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        cut = self._cuts.pop(0) if self._cuts else None
        ways = [(reader, back, True), (there, writer, False)]
        pipes = [
            asyncio.create_task(
                self._pipe(source, sink, up, cut if cut and cut.upstream == up else None)
            )
            for source, sink, up in ways
        ]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, back):
            self._open.discard(each)
            each.transport.abort()
        await asyncio.gather(*pipes, return_exceptions=True)

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool, cut: Cut | None
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(5)
                frame = head + await reader.readexactly(struct.unpack("<BI", head)[1])
                if cut is not None and passed >= cut.frames:
                    self.made += 1
                    writer.write(frame[: len(frame) // 2] if cut.torn else b"")
                    await writer.drain()
                    await asyncio.sleep(0.01)  # what passed before arrives
                    return
                if up and self.slow_s and head[0] == Kind.SUBSCRIBE:
                    self.subscribing.set()
                    await asyncio.sleep(self.slow_s)
                if up or not self.muted:
                    writer.write(frame)
                    await writer.drain()
                passed += 1


EVENTS = 6
cuts = st.lists(st.builds(Cut, st.booleans(), st.integers(0, 12), st.booleans()), max_size=4)
broken = 0


async def work_through(site: Site, topic: str, where: list[Cut]) -> None:
    """Publish, receive, ack and flush over a connection that breaks; everything happens once."""
    global broken
    async with Cutter(site.broker.ports["tcp"], where) as cutter:
        url = f"penstock://127.0.0.1:{cutter.port}"
        seen: list[tuple[bytes, int]] = []
        async with (
            penstock.connect(url, client__reconnect_max_s=0.05, client__heartbeat_s=0.3) as bus,
            bus.subscribe(topic, group=topic, retry=PATIENT) as events,
        ):

            async def produce() -> None:
                for number in range(EVENTS):
                    await bus.publish(topic, b"%d" % number)

            producing = asyncio.create_task(produce())
            while len(seen) < EVENTS:
                event = await events.get(timeout_s=DEADLINE_S)
                assert event is not None, f"{len(seen)} of {EVENTS} came"
                seen.append((event.payload, event.attempt))
                await event.ack()
            await producing
            await bus.flush()
            async with penstock.connect(site.url()) as direct:
                assert (await direct.groups.info(topic)).lag == 0, "a settlement was lost"
        broken += cutter.made
    wanted = [b"%d" % number for number in range(EVENTS)]
    assert sorted(seen) == [(payload, 1) for payload in wanted]
    async with penstock.connect(site.url()) as direct:
        assert [event.payload async for event in direct.replay(topic)] == wanted


def test_a_connection_may_break_at_any_frame(shared: Site) -> None:
    """T4: publishes are stored once, events are handed out once, settlements are not lost."""

    @settings(max_examples=25, deadline=None)
    @given(where=cuts)
    def cut(where: list[Cut]) -> None:
        asyncio.run(work_through(shared, f"cut.t{time.monotonic_ns()}", where))

    cut()
    assert broken > 10, "nothing is proven when no connection broke"


async def test_a_feed_that_ended_while_its_client_was_away(site: Site) -> None:
    """T4: the client hears of it when it is back, and does not wait for ever."""
    async with (
        Cutter(site.broker.ports["tcp"], []) as cutter,
        penstock.connect(
            f"penstock://127.0.0.1:{cutter.port}", client__reconnect_max_s=0.05
        ) as bus,
        penstock.connect(site.url()) as direct,
    ):
        await bus.publish("faults.away", b"x")
        events = await bus.subscribe("faults.away", group="away").open()
        event = await events.get(timeout_s=DEADLINE_S)
        assert event is not None
        await event.ack()
        await bus.flush()
        cutter.plugged = False
        cutter.cut()
        await direct.groups.delete("away", confirm="DELETE")
        await asyncio.sleep(0.2)
        cutter.plugged = True
        with pytest.raises(errors.UnknownGroup):
            await events.get(timeout_s=DEADLINE_S)


async def test_a_request_is_not_made_twice(tmp_path: Path) -> None:
    """What a restarted broker cannot vouch for fails as unknown, and is not repeated."""
    site = Site(tmp_path)
    try:
        async with (
            Cutter(site.broker.ports["tcp"], []) as cutter,
            penstock.connect(f"penstock://127.0.0.1:{cutter.port}") as bus,
        ):
            await bus.topics.list()
            cutter.muted = True
            creating = asyncio.create_task(bus.topics.create("faults.once"))
            async with penstock.connect(site.url()) as direct, asyncio.timeout(DEADLINE_S):
                while "faults.once" not in [each.name for each in await direct.topics.list()]:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(site.broker.kill)
            cutter.cut()
            cutter.muted = False
            await asyncio.to_thread(site.restart)
            with pytest.raises(errors.ConnectionLost) as raised:
                await creating
            assert raised.value.outcome == "unknown"
            assert "faults.once" in [each.name for each in await bus.topics.list()]
    finally:
        assert site.stop() == 0


async def test_acks_while_a_restarted_broker_gives_the_leases_back(tmp_path: Path) -> None:
    """T4: they wait until it has; none is refused, and no event comes again."""
    site = Site(tmp_path)
    try:
        async with (
            Cutter(site.broker.ports["tcp"], []) as cutter,
            penstock.connect(f"penstock://127.0.0.1:{cutter.port}") as bus,
            bus.subscribe("faults.back", group="g", retry=PATIENT) as events,
        ):
            await bus.publish_many("faults.back", [b"%d" % number for number in range(4)])
            held = [await events.get(timeout_s=DEADLINE_S) for _ in range(3)]
            await asyncio.sleep(0.2)  # the broker hears that they were handed over
            await asyncio.to_thread(site.broker.kill)
            cutter.slow_s = 0.5
            await asyncio.to_thread(site.restart)
            async with asyncio.timeout(DEADLINE_S):
                await cutter.subscribing.wait()
            for event in held:
                assert event is not None
                await event.ack()
            await asyncio.sleep(1.0)
            last = await events.get(timeout_s=DEADLINE_S)
            assert last is not None
            assert (last.payload, last.attempt) == (b"3", 1)
            await last.ack()
            await bus.flush()
            assert (await bus.groups.info("g")).lag == 0
    finally:
        assert site.stop() == 0


async def test_a_flush_tells_the_truth_about_a_broker_that_was_killed(tmp_path: Path) -> None:
    """T5: an ack that a restarted broker may not know of was not flushed."""
    site = Site(tmp_path)
    try:
        async with (
            Cutter(site.broker.ports["tcp"], []) as cutter,
            penstock.connect(f"penstock://127.0.0.1:{cutter.port}") as bus,
            bus.subscribe("faults.flush", group="g", retry=PATIENT) as events,
        ):
            await bus.publish("faults.flush", b"x")
            event = await events.get(timeout_s=DEADLINE_S)
            assert event is not None
            await asyncio.to_thread(site.broker.kill)
            await event.ack()
            flushing = asyncio.create_task(bus.flush())
            await asyncio.to_thread(site.restart)
            with pytest.raises(errors.ConnectionLost):
                await flushing
            again = await events.get(timeout_s=DEADLINE_S)
            assert again is not None
            await again.ack()
            await bus.flush()
            assert (await bus.groups.info("g")).lag == 0
    finally:
        assert site.stop() == 0

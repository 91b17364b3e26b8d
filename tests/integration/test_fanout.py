"""The PUB side of the broker, heard with plain pyzmq: row T1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket as net
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

import penstock
from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidSettings
from penstock.model.settings import Server, Settings
from penstock.server.transports import fanout as module
from penstock.server.transports.curve import make_keys, public_key
from penstock.server.transports.fanout import Fanout
from penstock.testing.broker_process import BrokerProcess
from penstock.wire.frame import ENVELOPE, MAGIC, VERSION

ROOT = Path(penstock.__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide" / "zeromq.md"
DEADLINE_S = 10.0


def batch(topic: str, *payloads: bytes, offset: int = 0) -> EventBatch:
    made = EventBatch.build(topic, payloads)
    made.base_offset = offset
    return made


@contextlib.contextmanager
def fanning(**options: object) -> Iterator[tuple[Fanout, int]]:
    fanout = Fanout(Settings(server=Server(**options)))  # type: ignore[arg-type]
    port = fanout.start("127.0.0.1", 0)
    try:
        yield fanout, port
    finally:
        fanout.stop()


@contextlib.contextmanager
def listening(port: int, *prefixes: bytes, **options: object) -> Iterator[zmq.Socket[bytes]]:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, int(DEADLINE_S * 1_000))
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)  # type: ignore[arg-type]
    for prefix in prefixes:
        socket.subscribe(prefix)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        socket.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.005)


async def hear(socket: zmq.Socket[bytes]) -> EventBatch:
    topic, envelope, encoded = await asyncio.to_thread(socket.recv_multipart)
    assert ENVELOPE.unpack(envelope)[:2] == (MAGIC, VERSION)
    heard = EventBatch.decode(encoded)
    assert heard.topic.encode() == topic
    return heard


async def test_prefixes() -> None:
    """Row T1: a subscription to `orders.` hears every topic below, and nothing else."""
    with (
        fanning() as (fanout, port),
        listening(port, b"orders.") as orders,
        listening(port, b"") as everything,
    ):
        await until(lambda: len(fanout._prefixes) == 2)
        sent = ["users.made", "orders.created", "ordersize.x", "orders.eu.paid"]
        fanout.committed([batch(topic, b"a", b"b", offset=7) for topic in sent])
        assert [(await hear(orders)).topic for _ in range(2)] == [sent[1], sent[3]]
        heard = [await hear(everything) for _ in sent]
        assert [each.topic for each in heard] == sent
        assert all(each.payloads() == [b"a", b"b"] for each in heard)
        assert all(each.base_offset == 7 for each in heard)


async def test_nothing_is_encoded_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = EventBatch.encode
    monkeypatch.setattr(
        EventBatch, "encode", lambda self: encoded.append(self.topic) or encode(self)
    )
    with fanning() as (fanout, port):
        fanout.committed([batch("orders.created", b"x")])
        with listening(port, b"orders.") as orders:
            await until(lambda: fanout._prefixes)
            fanout.committed([batch("users.made", b"x"), batch("orders.created", b"x")])
            await hear(orders)
            orders.subscribe(b"users.")
            await until(lambda: len(fanout._prefixes) == 2)
            fanout.committed([batch("users.made", b"x")])
            await hear(orders)
        await until(lambda: not fanout._prefixes)
        fanout.committed([batch("orders.created", b"x")])
    assert encoded == ["orders.created", "users.made"]


async def test_more_prefixes_than_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then libzmq filters; nobody misses anything."""
    monkeypatch.setattr(module, "MAX_PREFIXES", 3)
    prefixes = [b"topic.%d" % number for number in range(10)]
    with fanning() as (fanout, port), listening(port, *prefixes) as socket:
        await until(lambda: fanout._all)
        fanout.committed([batch("other.9", b"x"), batch("topic.9", b"x")])
        assert (await hear(socket)).topic == "topic.9"


async def test_a_subscriber_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row T1: it costs a bounded number of bytes, then its connection; the others get everything."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 4 << 20)
    monkeypatch.setattr(module, "STEP_BYTES", 1 << 20)
    with fanning() as (fanout, port):
        with (
            listening(port, b"b", RCVHWM=1, RCVBUF=4_096, RECONNECT_IVL=3_600_000) as bad,
            listening(port, b"a") as good,
        ):
            bad.subscribe(b"a")
            await until(lambda: fanout._prefixes == {b"a", b"b"} and len(fanout._peers) == 2)
            await asyncio.sleep(0.1)  # of two who subscribe to the same, only one is reported
            most = 0
            for number in range(300):
                fanout.committed([batch("a", bytes(200_000), offset=number)])
                most = max(most, fanout.held_bytes())
                assert (await hear(good)).base_offset == number
            assert 4 << 20 < most < 7 << 20
            assert len(fanout._peers) == 1
        await until(lambda: fanout.held_bytes() == 0)


async def test_nothing_is_sent_when_everybody_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort, should nobody be found who is to blame."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 4 << 20)
    monkeypatch.setattr("penstock.server.transports.zeromq_peers.Peers.slowest", lambda self: None)
    with fanning() as (fanout, port), listening(port, b"a", RCVHWM=1, RCVBUF=4_096):
        await until(lambda: fanout._prefixes)
        for number in range(300):
            fanout.committed([batch("a", bytes(200_000), offset=number)])
        assert 8 << 20 < fanout.held_bytes() < 9 << 20
        left_out = fanout._counters.held_back["fan-out"]
        assert 0 < left_out < 300, "what was left out is counted"


async def test_curve_lets_only_listed_subscribers_in() -> None:
    """Row T1: PUB is behind the same keys as ROUTER."""
    _, secret = make_keys()
    public, client_secret = make_keys()
    other_public, other_secret = make_keys()
    server_key = public_key(secret).encode()
    keys = {"CURVE_SERVERKEY": server_key, "CURVE_PUBLICKEY": public.encode(),
            "CURVE_SECRETKEY": client_secret.encode()}  # fmt: skip
    wrong = {**keys, "CURVE_PUBLICKEY": other_public.encode(),
             "CURVE_SECRETKEY": other_secret.encode(), "RCVTIMEO": 300}  # fmt: skip
    with (
        fanning(curve_secret_key=secret, curve_clients=(public,)) as (fanout, port),
        listening(port, b"", **wrong) as stranger,
        listening(port, b"", RCVTIMEO=300) as plain,
        listening(port, b"a", **keys) as known,
    ):
        await until(lambda: fanout._prefixes == {b"a"})
        fanout.committed([batch("a", b"secret")])
        assert (await hear(known)).payloads() == [b"secret"]
        for socket in (stranger, plain):
            with pytest.raises(zmq.Again):
                await hear(socket)


@pytest.mark.parametrize("keys", [{}, {"curve_secret_key": make_keys()[1]}])
async def test_it_is_not_open_to_the_network(keys: dict[str, str]) -> None:
    """Subscribers show no token, so other hosts need a key that is listed."""
    fanout = Fanout(Settings(server=Server(**keys)))  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings, match=r"server\.pub"):
        fanout.start("0.0.0.0", 0)


async def test_garbage_from_subscribers() -> None:
    with fanning() as (fanout, port), listening(port, b"a") as good:
        await until(lambda: fanout._prefixes)
        with net.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(os.urandom(500))
            peer = zmq.Context.instance().socket(zmq.XSUB)
            peer.connect(f"tcp://127.0.0.1:{port}")
            for message in (b"\x02what", b"", b"\x00never subscribed", b"\x01" + bytes(300)):
                peer.send(message)
            await until(lambda: bytes(300) in fanout._prefixes)
            fanout.committed([batch("a", b"x")])
            assert (await hear(good)).payloads() == [b"x"]
            peer.close(0)


async def test_stop_leaves_nothing_behind() -> None:
    def once() -> None:
        with fanning() as (fanout, port), listening(port, b"a"):
            fanout.committed([batch("a", b"x")])
            fanout.stop()
            fanout.committed([batch("a", b"x")])

    def held() -> tuple[int, int, int]:
        return (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")),
                threading.active_count())  # fmt: skip

    once()
    await asyncio.sleep(0.3)
    before = held()
    for _ in range(3):
        once()
    await until(lambda: held() == before)


async def test_the_example_of_the_guide() -> None:
    """Rows T1, Y13: the subscriber of docs/guide/zeromq.md runs as it stands there."""
    code = re.search(r"^```py\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert code is not None
    with fanning() as (fanout, port):
        program = code[1].replace("5556", str(port))
        assert program != code[1]
        started = subprocess.Popen(
            [sys.executable, "-W", "error", "-u", "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(30):
                while not fanout._prefixes:
                    await asyncio.sleep(0.02)
            fanout.committed([batch("orders.created", b"one", b"two", offset=41)])
            assert started.stdout is not None
            line = await asyncio.to_thread(started.stdout.readline)
            assert line == "orders.created 41 [b'one', b'two']\n"
        finally:
            started.kill()
            started.communicate()


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_the_socket_of_a_real_broker(tmp_path: Path, transport: str) -> None:
    """T1: whoever listens hears what clients publish, once it is committed, and with its offsets."""
    with (
        BrokerProcess(tmp_path / "data") as broker,
        listening(broker.ports["pub"], b"orders.") as orders,
    ):
        async with penstock.connect(broker.url(transport)) as bus:
            first = await until_heard(bus, orders)
            await bus.publish("users.made", b"not for us")
            sent = await bus.publish_many("orders.paid", [b"one", b"two"])
            heard = await hear(orders)
            while heard.topic == "orders.hello":  # the last of those that knocked
                heard = await hear(orders)
    assert first.topic == "orders.hello"
    assert (heard.topic, heard.payloads()) == ("orders.paid", [b"one", b"two"])
    assert (heard.partition, heard.base_offset) == (sent.partition, sent.offset)


async def until_heard(bus: penstock.Bus, socket: zmq.Socket[bytes]) -> EventBatch:
    """Publish until the subscription has reached the broker: a SUB socket is told nothing of that."""
    async with asyncio.timeout(DEADLINE_S):
        while not socket.poll(0):
            await bus.publish("orders.hello", b"?")
            await asyncio.sleep(0.01)
    return await hear(socket)

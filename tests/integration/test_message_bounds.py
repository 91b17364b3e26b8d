"""Rows T1, Q1, Q7: one frame of a welcomed client costs the broker little memory and others no time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import penstock
from penstock import errors
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import legacy
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.limits import (
    MAX_MESSAGE_BYTES,
    MAX_PROTOBUF_VALUES,
    MAX_SETTLE_VALUES,
    MAX_VALUES,
)
from penstock.wire.negotiation import offer
from penstock.wire.stream import StreamReader, decode_frame, encode_frame

DEADLINE_S = 60.0
MB = 1_000_000
SIZE = 15 << 20  # below what a Publish may take: it is what lies inside that counts
# Some ten times what a frame costs on a quiet machine: others may be at work beside us.
MOST_STALL_S = 0.6
MOST_GROWTH = 120 * MB  # the frame and its copies, too


class Watch:
    """Somebody else: pings the broker all the time, and notes the longest wait for an answer."""

    def __init__(self, port: int) -> None:
        self.longest_s = 0.0
        self.pings = 0
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        ping = legacy.Ping(b"!").message()
        with self._socket:
            while not self._end.is_set():
                began = time.perf_counter()
                self._socket.sendall(ping)
                self._socket.recv(64)
                self.longest_s = max(self.longest_s, time.perf_counter() - began)
                self.pings += 1
                time.sleep(0.002)

    def __enter__(self) -> Watch:
        self._thread.start()
        while not self.pings:
            time.sleep(0.001)
        self.longest_s = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


class Client:
    """A client of another make, welcomed over TCP."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream = StreamReader(MAX_MESSAGE_BYTES * 2)
        self._frames: list[Frame] = []

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(offer())
        while not self._stream.feed(await self._reader.read(65_536)):
            pass
        await self.send(Frame(Kind.HELLO, 0, say.encode(say.Hello("other"))))
        self.welcome: say.Welcome = say.decode((await self.answer(Kind.WELCOME)).meta, say.Welcome)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def send(self, frame: Frame) -> None:
        for piece in encode_frame(frame):
            self._writer.write(piece)
        await self._writer.drain()

    async def answer(self, *kinds: Kind) -> Frame:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                while self._frames:
                    frame = self._frames.pop(0)
                    if frame.kind in kinds:
                        return frame
                data = await self._reader.read(1 << 20)
                assert data, "the broker hung up"
                found = self._stream.feed(data)
                self._frames += [decode_frame(message, 1 << 30) for message in found]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("bounds") / "data"
    with BrokerProcess(folder).start(server__heartbeat_s=30.0) as broker:
        yield broker


def peak(broker: BrokerProcess) -> int:
    for line in Path(f"/proc/{broker.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no peak of memory")


def forget_peak(broker: BrokerProcess) -> int:
    Path(f"/proc/{broker.pid}/clear_refs").write_text("5")
    return peak(broker)


async def cost(broker: BrokerProcess, frame: Frame) -> tuple[Frame, float, int]:
    """A frame's answer, the longest that another client waited meanwhile, and what memory it took."""
    async with Client(broker.ports["tcp"]) as client:
        with Watch(broker.ports["tcp"]) as watch:
            before = forget_peak(broker)
            await client.send(frame)
            if frame.kind == Kind.SETTLE:  # which has no answer of its own
                await client.send(Frame(Kind.FLUSH, 7, b""))
            answer = await client.answer(Kind.FAULT, Kind.RESULT)
        await client.send(Frame(Kind.FLUSH, 9, b""))
        while (await client.answer(Kind.RESULT)).request != 9:
            pass
        print(f"\n{watch.longest_s * 1_000:.0f} ms, {(peak(broker) - before) / MB:.0f} MB")
        return answer, watch.longest_s, peak(broker) - before


def listed(count: int) -> bytes:
    """The head of a msgpack list."""
    return b"\xdd" + count.to_bytes(4, "big")


def headers(count: int) -> bytes:
    """A raw Publish of one draft with so many empty headers."""
    head = b"\x82\xa8sequence\x01\xa6drafts\x91\x82\xa5topic\xa1a\xa7headers"
    return head + listed(count) + b"\x80" * count


def drafts(count: int) -> bytes:
    return b"\x82\xa8sequence\x01\xa6drafts" + listed(count) + b"\x81\xa5topic\xa0" * count


def events(count: int) -> bytes:
    """A raw Publish of so many events, of no bytes each, with empty headers."""
    head = b"\x82\xa8sequence\x01\xa6drafts\x91\x83\xa5topic\xa1a\xa8payloads"
    payloads = listed(count) + b"\xc4\x00" * count
    return head + payloads + b"\xa7headers" + listed(count) + b"\x80" * count


def settlements(count: int, one: bytes = b"\x81\xa8delivery\x00") -> bytes:
    return b"\x82\xa8sequence\x01\xabsettlements" + listed(count) + one * count


def nacks(count: int) -> bytes:
    """A raw Settle of so many nacks of a delivery that nobody has."""
    return settlements(
        1, b"\x82\xa8delivery\x01\xa5nacks" + listed(count) + b"\x93\x00\xc0\xa0" * count
    )


def asked(count: int) -> bytes:
    return b"\x82\xa7request\xa1x\xa6fields\x81\xa1a" + listed(count) + b"\x90" * count


def json_headers(count: int) -> bytes:
    return b'{"sequence":1,"drafts":[{"topic":"a","headers":[' + b"{}," * (count - 1) + b"{}]}]}"


def json_asked(count: int) -> bytes:
    return b'{"request":"x","fields":{"a":[' + b"[]," * (count - 1) + b"[]]}}"


def protobuf(count: int, one: bytes = b"\x12\x00") -> bytes:
    """Empty messages in field 2: drafts of a Publish, settlements of a Settle."""
    return b"\x08\x01" + one * count


TOO_MUCH: dict[str, tuple[Kind, Mark, bytes]] = {
    "headers": (Kind.PUBLISH, Mark.RAW, headers(SIZE)),
    "drafts": (Kind.PUBLISH, Mark.RAW, drafts(SIZE // 8)),
    "transaction": (Kind.TRANSACT, Mark.RAW, headers(SIZE)),
    "asked": (Kind.ASK, Mark.RAW, asked(SIZE)),
    "settlements": (Kind.SETTLE, Mark.RAW, settlements(1_000_000 // 11)),
    "fields-of-a-fetch": (Kind.FETCH, Mark.RAW, asked(SIZE)),
    "json-headers": (Kind.PUBLISH, Mark.JSON, json_headers(SIZE // 3)),
    "json-asked": (Kind.ASK, Mark.JSON, json_asked(SIZE // 3)),
    "protobuf-drafts": (Kind.PUBLISH, Mark.PROTOBUF, protobuf(SIZE // 2)),
    "protobuf-settlements": (Kind.SETTLE, Mark.PROTOBUF, protobuf(SIZE // 2)),
    "protobuf-settlements-of-1-MB": (Kind.SETTLE, Mark.PROTOBUF, protobuf(500_000)),
}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_a_message_that_holds_too_much_is_refused_unread(
    broker: BrokerProcess, name: str
) -> None:
    """Q1: its client hears why and goes on; nobody else notices, and memory stays as it was."""
    kind, mark, meta = TOO_MUCH[name]
    request = 0 if kind == Kind.SETTLE else 5
    answer, stall_s, growth = await cost(broker, Frame(kind, request, meta, (), mark))
    assert (answer.kind, answer.request) == (Kind.FAULT, request)
    assert say.decode(answer.meta, say.Fault).code == errors.ProtocolViolation.code
    assert stall_s < MOST_STALL_S
    assert growth < MOST_GROWTH


ALLOWED: dict[str, tuple[Kind, Mark, Callable[[int], bytes], int]] = {
    "headers": (Kind.PUBLISH, Mark.RAW, headers, MAX_VALUES - 20),
    "drafts": (Kind.PUBLISH, Mark.RAW, drafts, MAX_VALUES // 3 - 20),
    "events": (Kind.PUBLISH, Mark.RAW, events, MAX_VALUES // 2 - 20),
    "asked": (Kind.ASK, Mark.RAW, asked, MAX_VALUES - 20),
    "settlements": (Kind.SETTLE, Mark.RAW, settlements, MAX_SETTLE_VALUES // 3 - 20),
    "nacks": (Kind.SETTLE, Mark.RAW, nacks, MAX_SETTLE_VALUES // 4 - 20),
    "json-headers": (Kind.PUBLISH, Mark.JSON, json_headers, MAX_VALUES // 3 - 20),
    "protobuf-drafts": (Kind.PUBLISH, Mark.PROTOBUF, protobuf, MAX_PROTOBUF_VALUES - 20),
}


@pytest.mark.parametrize("name", ALLOWED)
async def test_the_most_that_a_message_may_hold_costs_others_little(
    broker: BrokerProcess, name: str
) -> None:
    """Q7: whatever it is answered with, it was looked at as a whole."""
    kind, mark, make, count = ALLOWED[name]
    request = 0 if kind == Kind.SETTLE else 5
    answer, stall_s, growth = await cost(broker, Frame(kind, request, make(count), (), mark))
    if answer.kind == Kind.FAULT:
        assert "limit_values" not in say.decode(answer.meta, say.Fault).data
    assert stall_s < MOST_STALL_S
    assert growth < MOST_GROWTH


async def test_over_zeromq_as_well(broker: BrokerProcess) -> None:
    """T1: the same limits, the same answer; the connection goes on."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    try:
        dealer.connect(f"tcp://127.0.0.1:{broker.ports['zmq']}")

        async def ask(frame: Frame) -> Frame:
            await dealer.send_multipart(frame.multipart())
            async with asyncio.timeout(DEADLINE_S):
                return Frame.of_multipart(await dealer.recv_multipart())

        hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("zmq")))
        assert (await ask(hello)).kind == Kind.WELCOME
        with Watch(broker.ports["tcp"]) as watch:
            before = forget_peak(broker)
            fault = await ask(Frame(Kind.PUBLISH, 5, headers(SIZE)))
        assert (fault.kind, fault.request) == (Kind.FAULT, 5)
        assert say.decode(fault.meta, say.Fault).code == errors.ProtocolViolation.code
        assert peak(broker) - before < MOST_GROWTH
        assert watch.longest_s < MOST_STALL_S
        assert (await ask(Frame(Kind.FLUSH, 6, b""))).kind == Kind.RESULT
    finally:
        dealer.close()
        context.term()


async def test_the_welcome_says_how_much_a_message_may_hold(broker: BrokerProcess) -> None:
    """Q1: a client in any language knows before it sends."""
    async with Client(broker.ports["tcp"]) as client:
        assert client.welcome.max_message_bytes == MAX_MESSAGE_BYTES
        assert client.welcome.max_values == MAX_VALUES


async def test_too_many_drafts_are_refused_at_once(broker: BrokerProcess) -> None:
    """T1: each costs far more than it takes in a message."""
    async with Client(broker.ports["tcp"]) as client:
        await client.send(Frame(Kind.PUBLISH, 5, drafts(5_000)))
        answer = await client.answer(Kind.FAULT, Kind.RESULT)
        assert answer.kind == Kind.FAULT
        assert say.decode(answer.meta, say.Fault).code == errors.InvalidInput.code


async def test_large_events_still_travel_in_json(broker: BrokerProcess) -> None:
    """Q1: a client that knows no batches publishes payloads of megabytes."""
    payload = bytes(8 << 20)
    message = say.Publish(1, [say.DraftMeta("large.json", payloads=[payload])])
    async with Client(broker.ports["tcp"]) as client:
        await client.send(Frame(Kind.PUBLISH, 5, msgspec.json.encode(message), (), Mark.JSON))
        answer = await client.answer(Kind.FAULT, Kind.RESULT)
        assert say.decode(answer.meta, say.Published).receipts[0] is not None


async def test_clients_of_ours_keep_to_it(broker: BrokerProcess) -> None:
    """T1: many events with many headers at once, alone and in a transaction."""
    wide = {f"name-{number}": "x" * 150 for number in range(60)}
    async with penstock.connect(broker.url()) as bus:
        await asyncio.gather(
            *(bus.publish("wide", b"x" * 3_000, headers=wide, codec="raw") for _ in range(600))
        )
        async with bus.transaction() as transaction:
            for _ in range(1_500):
                transaction.publish("wide", b"x" * 3_000, headers=wide, codec="raw")
        found = [event async for event in bus.replay("wide")]
        assert len(found) == 2_100
        assert all(event.headers == wide for event in found)


async def test_what_cannot_be_sent_says_so_before_it_is(broker: BrokerProcess) -> None:
    """T1: a transaction cannot be split; nothing of this one happens, and the next one does."""

    async def publish(bus: Any, count: int) -> None:
        async with bus.transaction() as transaction:
            for _ in range(count):
                transaction.publish("tiny", b"", codec="raw")

    async with penstock.connect(broker.url()) as bus:
        with pytest.raises(errors.PayloadTooLarge, match="nothing was sent"):
            await publish(bus, MAX_VALUES // 4)
        await publish(bus, 5_000)
        assert len([event async for event in bus.replay("tiny")]) == 5_000


async def test_an_old_command_with_too_large_a_payload_is_answered(tmp_path: Path) -> None:
    """Q1: before it is copied; the connection goes on."""
    flags = {"limits__max_payload_bytes": 1_000, "limits__max_batch_bytes": 10_000}
    with BrokerProcess(tmp_path / "data").start(**flags) as broker:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.ports["tcp"])
        for size in (1_001, 1_000):
            writer.write(legacy.LegacyPublish("a.b", bytes(size)).message())
        async with asyncio.timeout(DEADLINE_S):
            stream, replies = StreamReader(1 << 20), []
            while len(replies) < 2:
                replies += stream.feed(await reader.read(4_096))
        writer.close()
    assert [command for command, _ in replies] == [legacy.LegacyReply.ERROR, legacy.LegacyReply.OK]
    assert errors.PayloadTooLarge.code.encode() in bytes(replies[0][1])

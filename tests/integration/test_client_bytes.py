"""What clients make the broker hold is bounded in all, and given back when they go (C5, C6)."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.model.compressor import compressors
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import BODY_HEAD, Frame, Kind
from penstock.wire.negotiation import offer
from penstock.wire.stream import (
    COMPRESSORS,
    MESSAGE_HEAD,
    RAW_SIZE,
    StreamReader,
    decode_frame,
    encode_frame,
)

MIB = 1 << 20
LIMIT = 64 * MIB
WAIT_S = 60.0


class Raw:
    """A client that does as it likes: it was welcomed, and writes bytes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._stream = StreamReader(64 * MIB)
        self._frames: list[Any] = []

    async def open(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(offer())
        await self.message()
        self.writer.writelines(encode_frame(Frame(Kind.HELLO, 0, say.encode(say.Hello("raw")))))
        assert (await self.frame()).kind == Kind.WELCOME
        return self

    async def message(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not self._frames:
                data = await self.reader.read(1 << 16)
                if not data:
                    raise ConnectionResetError
                self._frames += self._stream.feed(data)
        return self._frames.pop(0)

    async def frame(self) -> Frame:
        return decode_frame(await self.message(), 64 * MIB)

    async def begin_upload(self, claimed: int, sent: int) -> None:
        """Claim a message of some size, and send a part of it, as far as it is read."""
        self.writer.write(MESSAGE_HEAD.pack(Kind.PUBLISH, claimed) + bytes(sent))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1):
                await self.writer.drain()

    def bomb(self, size: int) -> None:
        """A frame that expands to so much."""
        small = compressors.get("zstd").compress(bytes(size))
        number = COMPRESSORS.index("zstd")
        body = BODY_HEAD.pack(9, 0, number, 0, 0) + RAW_SIZE.pack(size) + small
        self.writer.write(MESSAGE_HEAD.pack(Kind.PUBLISH, len(body)) + body)

    async def told(self) -> str:
        """The limit that an error names, once one comes."""
        while True:
            frame = await self.frame()
            if frame.kind == Kind.FAULT:
                fault = say.decode(frame.meta, say.Fault)
                return str(fault.data.get("limit", fault.code))

    def close(self) -> None:
        self.writer.transport.abort()


def resident_bytes(broker: BrokerProcess, what: str = "VmRSS") -> int:
    for line in Path(f"/proc/{broker.pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def metric(broker: BrokerProcess, name: str) -> float:
    url = f"http://127.0.0.1:{broker.ports['http']}/metrics"
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise AssertionError(name)


async def held(broker: BrokerProcess) -> float:
    return await asyncio.to_thread(metric, broker, "penstock_client_held_bytes")


async def until_held(broker: BrokerProcess, most: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while await held(broker) > most:
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture
async def tight(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    """A broker that holds little for its clients."""
    broker = BrokerProcess(tmp_path / "data")
    await asyncio.to_thread(broker.start, server__max_client_bytes=LIMIT)
    try:
        yield broker
    finally:
        await asyncio.to_thread(broker.stop)


async def clients(broker: BrokerProcess, count: int) -> list[Raw]:
    return [await Raw(broker.ports["tcp"]).open() for _ in range(count)]


async def test_memory_of_uploads_that_break_off_is_given_back(broker: BrokerProcess) -> None:
    before = resident_bytes(broker)
    for _ in range(3):
        uploading = await clients(broker, 2)
        for each in uploading:
            await each.begin_upload(60 * MIB, 50 * MIB)
        for each in uploading:
            each.close()
    await until_held(broker, 0)
    async with asyncio.timeout(WAIT_S):
        while resident_bytes(broker) > before + 40 * MIB:
            await asyncio.sleep(0.1)


async def test_uploads_together_are_bounded_and_others_publish_meanwhile(
    tight: BrokerProcess,
) -> None:
    before = resident_bytes(tight)
    uploading = await clients(tight, 12)
    await asyncio.gather(*(each.begin_upload(20 * MIB, 16 * MIB) for each in uploading))
    assert await held(tight) <= LIMIT
    assert resident_bytes(tight) < before + LIMIT + 32 * MIB
    async with penstock.connect(tight.url()) as bus:
        for number in range(20):
            await bus.publish("small.events", {"n": number})
    for each in uploading:
        each.close()
    await until_held(tight, 0)


async def test_one_that_stands_still_while_others_wait_is_cut_off_and_told(
    tight: BrokerProcess,
) -> None:
    uploading = await clients(tight, 4)
    await asyncio.gather(*(each.begin_upload(30 * MIB, 25 * MIB) for each in uploading))
    told = [asyncio.create_task(each.told()) for each in uploading]
    done, pending = await asyncio.wait(told, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert {each.result() for each in done} == {"server.max_client_bytes"}
    for each in pending:
        each.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for client in uploading:
        client.close()


async def test_bombs_together_are_bounded(tight: BrokerProcess) -> None:
    before = resident_bytes(tight)
    bombing = await clients(tight, 10)
    for each in bombing:
        each.bomb(30 * MIB)
    async with penstock.connect(tight.url()) as bus:
        await bus.publish("small.events", b"x")
    # What they expand to is no message, which each is told.
    assert {await each.told() for each in bombing} <= {"connection.protocol"}
    assert resident_bytes(tight, "VmHWM") < before + 2 * LIMIT
    for client in bombing:
        client.close()


async def test_large_publishes_of_many_clients_wait_for_each_other(tight: BrokerProcess) -> None:
    payloads = [bytes([number]) * (12 * MIB) for number in range(6)]

    async def publish(payload: bytes) -> None:
        async with penstock.connect(tight.url(), client__deadline_s=WAIT_S) as bus:
            await bus.publish("large.events", payload)

    await asyncio.gather(*map(publish, payloads))
    async with penstock.connect(tight.url()) as bus:
        found = [bytes(event.payload[:1]) async for event in bus.replay("large.events")]
    assert sorted(found) == [payload[:1] for payload in payloads]


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_answers_that_are_not_read_count(tight: BrokerProcess, transport: str) -> None:
    async with penstock.connect(tight.url(transport)) as bus:
        await bus.publish_many("much", [bytes(MIB)] * 20)
        assert sum([len(event.payload) async for event in bus.replay("much")]) == 20 * MIB
    await until_held(tight, 1 * MIB)
    assert await asyncio.to_thread(metric, tight, "penstock_client_limit_bytes") == LIMIT

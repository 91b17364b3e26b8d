"""A large compressed frame is decoded in a thread while its connection keeps its order (row T13)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engines.embedded import batching
from penstock.server import fastpath
from penstock.server.session import Session
from penstock.testing.broker_process import broker_inside
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.negotiation import offer
from penstock.wire.stream import StreamReader, decode_frame, encode_frame

DEADLINE_S = 20.0
LARGE = b"large" * 200_000
FLAGS = {"fastpath.cutover_bytes": 64 * 1024}


async def test_a_large_frame_holds_up_its_own_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    def slow(message: Any, limit_bytes: int) -> Any:
        threads.append(threading.get_ident())
        began.set()
        assert go_on.wait(DEADLINE_S)
        return decode_frame(message, limit_bytes)

    monkeypatch.setattr(fastpath, "decode_frame", slow)
    daemon = broker_inside(tmp_path, FLAGS)
    await daemon.start()
    url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
    try:
        async with (
            penstock.connect(url, client__compressor="lz4") as bus,
            penstock.connect(url) as other,
        ):
            large = asyncio.create_task(bus.publish("orders", LARGE, codec="raw"))
            assert await asyncio.to_thread(began.wait, DEADLINE_S)
            small = asyncio.create_task(bus.publish("orders", b"behind", codec="raw"))
            await other.publish("elsewhere", b"at once")
            assert not large.done()
            assert not small.done()
            go_on.set()
            # Both were under way at once: which is stored first is nobody's promise.
            receipts = await asyncio.gather(large, small)
            stored = {event.offset: event.payload async for event in other.replay("orders")}
            expected = zip(receipts, (LARGE, b"behind"), strict=True)
            assert stored == {receipt.offset: payload for receipt, payload in expected}
        assert threads
        assert threading.get_ident() not in threads
        assert daemon.broker.fastpath.taken >= 1
    finally:
        go_on.set()
        await daemon.stop()


async def test_frames_of_one_read_are_taken_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one is a few KiB on the wire: what came with it waits for it."""
    taken: list[int] = []
    done = asyncio.Event()

    def received(session: Session, frame: Frame) -> None:
        taken.append(frame.request)
        if len(taken) == 3:
            done.set()

    monkeypatch.setattr(Session, "received", received)
    daemon = broker_inside(tmp_path, FLAGS)
    await daemon.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.ports["tcp"])
        hello = Frame(Kind.HELLO, 0, say.encode(say.Hello("raw")))
        writer.write(offer(compressor="lz4") + b"".join(encode_frame(hello)))
        stream, welcomed = StreamReader(1 << 20), 0
        async with asyncio.timeout(DEADLINE_S):
            while welcomed < 2:  # the answer to the offer, and the Welcome
                welcomed += len(stream.feed(await reader.read(65_536)))
        frames = [Frame(Kind.PUBLISH, number, b"", (LARGE,)) for number in (1, 2)]
        small = encode_frame(Frame(Kind.FLUSH, 3, b""))
        writer.write(b"".join([*encode_frame(frames[0], 1), *encode_frame(frames[1], 1), *small]))
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        assert taken == [1, 2, 3]
        assert daemon.broker.fastpath.taken == 2
        writer.transport.abort()
    finally:
        await daemon.stop()


def broken(message: Any, limit_bytes: int) -> Any:
    raise penstock.errors.ProtocolViolation("a frame does not expand")


async def test_a_frame_that_does_not_expand_ends_its_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpath, "decode_frame", broken)
    daemon = broker_inside(tmp_path, FLAGS)
    await daemon.start()
    url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
    try:
        async with (
            penstock.connect(url, client__compressor="lz4", client__deadline_s=1.0) as bus,
            penstock.connect(url) as other,
        ):
            with pytest.raises(penstock.PenstockError):
                await bus.publish("orders", LARGE, codec="raw")
            await other.publish("elsewhere", b"at once")
    finally:
        await daemon.stop()


async def test_a_batch_is_weighed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T13: whether compressing pays is looked at where the batch comes in, and not again on the loop."""
    weighed: list[int] = []

    def weigh(data: Any, compressor: Any) -> bool:
        weighed.append(len(data))
        return False

    daemon = broker_inside(tmp_path, FLAGS)
    await daemon.start()
    try:
        async with penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}") as bus:
            await bus.topics.create("orders")
            monkeypatch.setattr(batching, "worth_compressing", weigh)
            await bus.publish_many("orders", [b"%0100d" % number for number in range(100)])
            assert len(weighed) == 1
            assert len([event async for event in bus.replay("orders")]) == 100
    finally:
        await daemon.stop()

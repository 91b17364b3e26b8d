"""`ZmqOutbox` counts and bounds the bytes on their way into libzmq, and keeps their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import zmq

from penstock.transport import zeromq
from penstock.transport.zeromq import MARK_BYTES, WINDOW_BYTES, ZmqOutbox


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A DEALER that sends, and one that reads only when it is told to."""
    context = zmq.Context()
    reader, writer = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    reader.set(zmq.RCVHWM, 1)
    reader.set(zmq.RCVBUF, 8_192)
    reader.set(zmq.RCVTIMEO, 5_000)
    writer.set(zmq.SNDHWM, 0)
    writer.set(zmq.SNDBUF, 8_192)
    writer.connect(f"tcp://127.0.0.1:{reader.bind_to_random_port('tcp://127.0.0.1')}")
    yield reader, writer
    context.destroy(linger=0)


class Calls:
    def __init__(self) -> None:
        self.nudges = 0
        self.gone = 0

    def nudge(self) -> None:
        self.nudges += 1

    def unreachable(self) -> None:
        self.gone += 1


async def drained(send_buffer: ZmqOutbox) -> None:
    async with asyncio.timeout(5):
        while send_buffer.pending_bytes():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("size", [100, 20_000, 40_000, 3_000_000])
async def test_pending_bytes_are_counted(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], size: int
) -> None:
    """What nobody reads is pending, up to the part that is not marked; what is read is not."""
    reader, writer = pair
    calls = Calls()
    send_buffer = ZmqOutbox(writer, calls.nudge, calls.unreachable)
    count = 12_000_000 // max(size, 2_000)
    for number in range(count):
        send_buffer.put([b"%d" % number, bytes(size)])
    total = count * size
    # In the buffers of both sides there is room for a little more than the marks leave out.
    assert total - MARK_BYTES - 3 * size - (1 << 20) <= send_buffer.pending_bytes()
    assert send_buffer.pending_bytes() <= total + count * 2 * (zeromq.PART_COST_BYTES + 5)
    assert send_buffer._held_bytes <= WINDOW_BYTES + MARK_BYTES + size + 200
    for number in range(count):
        head, part = await asyncio.to_thread(reader.recv_multipart)
        assert (head, len(part)) == (b"%d" % number, size)
    await drained(send_buffer)
    assert (calls.nudges, calls.gone) == (count, 0)


async def test_what_is_sent_may_be_a_view(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """Parts are views into batches; the view given to libzmq dies although its batch lives on."""
    reader, writer = pair
    calls = Calls()
    send_buffer = ZmqOutbox(writer, calls.nudge, calls.unreachable)
    body = bytes(range(256)) * 1_000
    views = [memoryview(body)[start : start + 100_000] for start in (0, 50_000, 100_000)]
    send_buffer.put(views)
    heard = await asyncio.to_thread(reader.recv_multipart)
    assert heard == [bytes(view) for view in views]
    await drained(send_buffer)


async def test_finish_gives_everything_away(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    reader, writer = pair
    calls = Calls()
    send_buffer = ZmqOutbox(writer, calls.nudge, calls.unreachable)
    for number in range(100):
        send_buffer.put([b"%d" % number, bytes(100_000)])
    assert send_buffer._queue
    send_buffer.finish()
    send_buffer.put([b"too late"])
    for number in range(100):
        assert (await asyncio.to_thread(reader.recv_multipart))[0] == b"%d" % number


async def test_a_peer_that_is_gone_is_reported_once() -> None:
    """A ROUTER knows who it can reach; the rest is forgotten."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    calls = Calls()
    send_buffer = ZmqOutbox(router, calls.nudge, calls.unreachable, b"nobody")
    send_buffer.put([b"hello"])
    send_buffer.put([b"again"])
    assert (calls.gone, send_buffer.pending_bytes()) == (1, 0)
    context.destroy(linger=0)


async def test_the_loop_may_end_first(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """libzmq lets go of parts when nobody is there to hear it; nothing is raised anywhere."""
    reader, writer = pair
    calls = Calls()
    boxes: list[ZmqOutbox] = []

    async def fill() -> None:
        send_buffer = ZmqOutbox(writer, calls.nudge, calls.unreachable)
        for _ in range(100):
            send_buffer.put([bytes(100_000)])
        boxes.append(send_buffer)

    await asyncio.to_thread(asyncio.run, fill())
    assert boxes[0]._waiting
    async with asyncio.timeout(5):
        while boxes[0].pending_bytes() > boxes[0]._queued_bytes:
            with contextlib.suppress(zmq.Again):
                reader.recv_multipart(zmq.NOBLOCK)
            await asyncio.sleep(0.001)

"""`SendBuffer` writes the first bytes of a turn of the loop at once and the rest together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.engines.broker.tcp import TcpLink
from penstock.transport.tcp import SendBuffer
from penstock.wire.negotiation import answer, choose, offer
from penstock.wire.stream import MESSAGE_HEAD


class Transport:
    """Takes everything, and remembers each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Transport:
        return self

    def setsockopt(self, *option: int) -> None:
        pass

    def writelines(self, buffers: list[bytes]) -> None:
        self.writes.append(b"".join(buffers))


async def test_the_first_words_of_a_turn_do_not_wait_for_the_others() -> None:
    transport = Transport()
    send_buffer = SendBuffer(asyncio.get_running_loop(), transport)  # type: ignore[arg-type]
    for word in (b"a", b"b", b"c"):
        send_buffer.put([word])
    assert transport.writes == [b"a"]
    await asyncio.sleep(0)
    assert transport.writes == [b"a", b"bc"]
    send_buffer.put([b"d"])
    assert transport.writes[-1] == b"d", "another turn has begun"


async def test_nothing_is_written_while_the_peer_is_slow() -> None:
    transport = Transport()
    send_buffer = SendBuffer(asyncio.get_running_loop(), transport)  # type: ignore[arg-type]
    send_buffer.pause()
    send_buffer.put([b"a"])
    send_buffer.put([b"b"])
    await asyncio.sleep(0)
    assert not transport.writes
    send_buffer.resume()
    assert transport.writes == [b"ab"]


async def test_a_broker_may_answer_before_the_client_knows_that_it_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = answer(choose(offer()[MESSAGE_HEAD.size :], 1 << 20))
    loop, transport = asyncio.get_running_loop(), Transport()

    async def connect(factory: Callable[[], TcpLink], *where: object, ssl: object) -> None:
        link = factory()
        link.connection_made(transport)  # type: ignore[arg-type]
        link.get_buffer(-1)[: len(said)] = said
        link.buffer_updated(len(said))

    monkeypatch.setattr(loop, "create_connection", connect)
    link = TcpLink("localhost", 1, compressor="none")
    await link.open(lambda frame: None, lambda reason: None)
    assert transport.writes == [offer()]
    assert link.max_frame_bytes == 1 << 20

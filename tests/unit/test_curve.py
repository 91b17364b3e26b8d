"""Keys, and the questions about them that libzmq asks."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from penstock.model.errors import InvalidSettings
from penstock.model.settings import Server
from penstock.server.logs import LINES_PER_S
from penstock.server.transports.curve import ZAP_ADDRESS, CurveAuthenticator, make_keys, public_key
from penstock.transport.zeromq import curve_key


def test_keys_are_pairs() -> None:
    public, secret = make_keys()
    assert public_key(secret) == public
    assert len({*make_keys(), *make_keys(), public, secret}) == 6
    assert len(z85.decode(public.encode())) == 32


@given(st.text(max_size=50))
def test_anything_else_is_no_key(text: str) -> None:
    """Nothing but Z85 text of 40 characters comes through, and nothing else is raised."""
    with contextlib.suppress(InvalidSettings):
        assert len(z85.decode(curve_key(text, "server.curve_secret_key"))) == 32


@pytest.mark.parametrize("text", ["", "a" * 39, "a" * 41, "ä" * 40, '"' * 40, "#" * 40, "\0" * 40])
def test_near_misses_are_no_keys(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"client\.curve_server_key.*40 characters"):
        curve_key(text, "client.curve_server_key")


async def ask(question: list[bytes], clients: tuple[str, ...]) -> list[bytes]:
    """What the gate answers to a ZAP request."""
    context = zmq.Context()
    gate = CurveAuthenticator(
        context, Server(curve_secret_key=make_keys()[1], curve_clients=clients)
    )
    asking = context.socket(zmq.REQ)
    asking.set(zmq.RCVTIMEO, 5_000)
    asking.connect(ZAP_ADDRESS)
    try:
        asking.send_multipart(question)
        return await asyncio.to_thread(asking.recv_multipart)
    finally:
        gate.close()
        gate.close()
        asking.close(0)
        context.term()


def zap(key: str, mechanism: bytes = b"CURVE") -> list[bytes]:
    credentials = z85.decode(key.encode())
    return [b"1.0", b"7", b"penstock", b"10.0.0.9", b"", mechanism, credentials]


async def test_the_gate_knows_its_list(caplog: pytest.LogCaptureFixture) -> None:
    """Row T1: a key on the list comes in, another one is turned away and logged."""
    listed, other = make_keys()[0], make_keys()[0]
    assert await ask(zap(listed), (listed,)) == [b"1.0", b"7", b"200", b"welcome", b"", b""]
    assert caplog.records == []
    assert (await ask(zap(other), (listed,)))[1:3] == [b"7", b"400"]
    assert caplog.records[0].__dict__["peer"] == "10.0.0.9"
    assert caplog.records[0].__dict__["key"] == other


async def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """T1: whoever tries keys all day gets so many lines a second."""
    listed, other = make_keys()[0], make_keys()[0]
    context = zmq.Context()
    gate = CurveAuthenticator(
        context, Server(curve_secret_key=make_keys()[1], curve_clients=(listed,))
    )
    try:
        for _ in range(10 * LINES_PER_S):
            assert gate._judge(zap(other))[0] == b"400"
    finally:
        gate.close()
        context.term()
    assert len(caplog.records) <= 2 * LINES_PER_S, "two seconds, on a slow machine"


async def test_odd_questions_are_refused() -> None:
    listed = make_keys()[0]
    for question in ([b"1.0"], zap(listed, b"NULL"), [b"2.0", *zap(listed)[1:]], zap(listed)[:6]):
        assert (await ask(question, (listed,)))[2] == b"400"


async def test_a_list_that_holds_no_key_stops_the_start() -> None:
    context = zmq.Context()
    with pytest.raises(InvalidSettings, match=r"server\.curve_clients"):
        CurveAuthenticator(
            context, Server(curve_secret_key=make_keys()[1], curve_clients=("oops",))
        )
    context.term()

"""Hostile bytes and hostile messages, made up by hypothesis (T1, Q1).

run_atheris.py searches the same targets guided by coverage, and for longer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fuzz_targets import TARGETS, Finding, play
from hostile_messages import ASKED, HELLO, HONEST, conversations, twisted
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.embedded.batching import Batcher
from penstock.engines.requests import REQUESTS
from penstock.wire.encodings import MESSAGES
from penstock.wire.frame import Frame, Kind
from penstock.wire.stream import encode_frame

PURE = settings(max_examples=200, deadline=None)
WHOLE = settings(max_examples=150, deadline=None)


@PURE
@given(st.binary(max_size=600), st.sampled_from(["stream", "frame", "message"]))
def test_random_bytes(data: bytes, name: str) -> None:
    TARGETS[name](data)


@PURE
@given(st.data())
def test_hostile_messages_are_read_or_refused(data: st.DataObject) -> None:
    """Honest ones with a few values replaced, over both transports."""
    kind, honest = data.draw(st.sampled_from([(Kind.HELLO, HELLO), *HONEST]))
    if honest is None:
        return
    meta = data.draw(twisted(honest))
    TARGETS["message"](bytes([list(MESSAGES).index(kind)]) + meta)
    frame = Frame(int(kind), 1, meta)
    TARGETS["stream"](b"\x07" + b"".join(encode_frame(frame)))


@WHOLE
@given(conversations())
def test_a_hostile_client_harms_nobody(said: list[Frame]) -> None:
    """A whole broker: it stays up, serves another client, and can be started again."""
    play(said)


def test_every_request_is_tried() -> None:
    """A new administrative request belongs into ASKED; this one writes where a caller says."""
    assert {name for name, _ in ASKED} == set(REQUESTS) - {"ExportAudit"}
    assert {kind for kind, _ in HONEST} == {kind for kind in MESSAGES if kind < Kind.WELCOME} - {
        Kind.HELLO, Kind.ASK
    } | {Kind.BYE, Kind.FLUSH}  # fmt: skip


def test_honest_clients_are_no_finding() -> None:
    """What everybody sends, in order, passes; so a finding means something."""
    frames = [Frame(int(Kind.HELLO), 0, msgspec.msgpack.encode(HELLO))]
    for number, (kind, honest) in enumerate(HONEST, 1):
        meta = b"" if honest is None else msgspec.msgpack.encode(honest)
        frames.append(Frame(int(kind), number, meta))
    play(frames)


def test_the_target_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish that stops the writer of everybody is a finding."""

    def broken(self: Batcher, *_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Batcher, "lay", broken)
    draft = {"topic": "orders.created", "payloads": [b"x"]}
    meta = msgspec.msgpack.encode({"sequence": 1, "drafts": [draft]})
    with pytest.raises(Finding):
        play([Frame(int(Kind.PUBLISH), 1, meta)])


def test_the_target_notices_sessions_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a session that hangs on a connection that is gone."""
    monkeypatch.setattr("penstock.server.session.Session.detach", lambda self: None)
    with pytest.raises(Finding, match="attached to connections that are gone"):
        play([Frame(int(Kind.HEARTBEAT), 0, b"\x80")])

"""Negotiation (row Q1): what is offered, chosen and refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.errors import Deferred, ProtocolViolation, WrongProtocolVersion
from penstock.wire.negotiation import (
    MAX_NEGOTIATION_BYTES,
    Choice,
    answer,
    choose,
    chosen,
    offer,
    refuse,
)
from penstock.wire.stream import StreamReader

LIMIT = 1 << 20


def body_of(message: bytes) -> bytes:
    [(command, body)] = StreamReader(MAX_NEGOTIATION_BYTES).feed(message)
    assert command == 0xFE
    return bytes(body)


@pytest.mark.parametrize("compressor", ["none", "lz4", "zstd", "snappy"])
@pytest.mark.parametrize("mark", ["raw", "json"])
def test_offer_and_answer(compressor: str, mark: str) -> None:
    choice = choose(body_of(offer(compressor, [mark])), LIMIT, ("raw", "json"))
    assert choice == Choice(1, compressor, mark, LIMIT)
    assert chosen(body_of(answer(choice))) == choice


def test_what_is_named_first_is_preferred() -> None:
    body = json.dumps(
        {"versions": [9, 1], "compressors": ["x", "snappy", "lz4"], "marks": ["x", "json", "raw"]}
    ).encode()
    choice = choose(body, LIMIT, ("raw", "json"))
    assert (choice.compressor, choice.mark) == ("snappy", "json")


def test_a_mark_that_is_not_installed_is_not_chosen() -> None:
    assert choose(body_of(offer(marks=["protobuf", "raw"])), LIMIT, ("raw",)).mark == "raw"
    with pytest.raises(ProtocolViolation, match="protobuf"):
        choose(body_of(offer(marks=["protobuf"])), LIMIT, ("raw",))


def test_an_unknown_version_is_refused_with_its_code() -> None:
    with pytest.raises(WrongProtocolVersion) as raised:
        choose(b'{"versions":[2]}', LIMIT)
    assert raised.value.versions == [2]
    answered = json.loads(body_of(refuse(raised.value)))
    assert answered["error"]["code"] == "connection.version"


def test_the_client_raises_what_the_server_says() -> None:
    full = Deferred("full", retry_after_s=5.0)
    with pytest.raises(Deferred) as raised:
        chosen(body_of(refuse(full)))
    assert raised.value.retry_after_s == 5.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"version":"one"}',
        b'{"version":2,"compressor":"none","mark":"raw","max_frame_bytes":5}',
        b'{"version":1,"compressor":"none","mark":"cbor","max_frame_bytes":5}',
        b'{"version":1,"compressor":"zip","mark":"raw","max_frame_bytes":5}',
        b'{"version":1,"compressor":"none","mark":"raw","max_frame_bytes":-5}',
    ],
)
def test_a_client_believes_no_nonsense(body: bytes) -> None:
    with pytest.raises((ProtocolViolation, WrongProtocolVersion)):
        chosen(body)


def test_an_offer_is_short() -> None:
    words = ",".join(f'"{number}"' for number in range(MAX_NEGOTIATION_BYTES))
    with pytest.raises(ProtocolViolation):
        choose(f'{{"versions":[1],"marks":[{words}]}}'.encode(), LIMIT)


def test_nests_are_refused_like_other_nonsense() -> None:
    """Q1: a stranger's bytes are never taken for a failure of the broker."""
    depth = MAX_NEGOTIATION_BYTES // 2 - 20
    body = b'{"versions":[1],"x":%b%b}' % (b"[" * depth, b"]" * depth)
    with pytest.raises(ProtocolViolation):
        choose(body, LIMIT)
    with pytest.raises(ProtocolViolation):
        chosen(body)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_random_bytes_raise_nothing_else(body: bytes) -> None:
    for read in (chosen, lambda data: choose(data, LIMIT)):
        try:
            read(body)
        except (ProtocolViolation, WrongProtocolVersion):
            continue


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)
words = st.sampled_from(["versions", "marks", "compressors", "version", "mark", "error"])


@given(st.dictionaries(words, json_values))
def test_random_json_raises_nothing_else(value: object) -> None:
    body = json.dumps(value).encode()
    for read in (chosen, lambda data: choose(data, LIMIT)):
        try:
            read(body)
        except (ProtocolViolation, WrongProtocolVersion):
            continue

"""Commands of old clients (row Q1): bytes both ways, and hostile ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.errors import ProtocolViolation
from penstock.wire import legacy

texts = st.text(max_size=20)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
data = st.binary(max_size=50)
commands = st.one_of(
    st.builds(legacy.LegacyAuth, texts, texts, texts),
    st.builds(legacy.Ping, data),
    st.builds(legacy.Create, texts, u16),
    st.builds(legacy.LegacyPublish, texts, data),
    st.builds(legacy.LegacySubscribe, texts, texts, u16),
    st.builds(legacy.Ack, u64),
    st.builds(legacy.Nack, u64, u32, texts),
)
replies = st.one_of(
    st.builds(legacy.Ok, data),
    st.builds(legacy.Error, texts, texts),
    st.builds(
        legacy.LegacyLeased, u16, u64, u16, u32, u64, st.integers(-(2**63), 2**63 - 1), texts,
        st.none() | data, data,
    ),
    st.builds(legacy.Notice, u64, texts, texts),
)  # fmt: skip


@given(commands)
def test_commands_both_ways(command: legacy.AnyCommand) -> None:
    assert legacy.parse_command(*legacy.split(command.message())) == command


@given(replies)
def test_replies_both_ways(reply: legacy.AnyReply) -> None:
    assert legacy.parse_reply(*legacy.split(reply.message())) == reply


@settings(max_examples=300)
@given(st.integers(0, 255), st.binary(max_size=60))
def test_random_bytes_raise_nothing_else(command: int, body: bytes) -> None:
    for parse in (legacy.parse_command, legacy.parse_reply):
        try:
            parse(command, body)
        except ProtocolViolation:
            continue


@given(commands, st.data())
def test_a_body_that_is_cut_or_goes_on_is_refused(
    command: legacy.AnyCommand, data: st.DataObject
) -> None:
    if isinstance(command, legacy.Ping | legacy.LegacyPublish):
        return  # their last field is the rest of the body
    number, body = legacy.split(command.message())
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for wrong in (cut, body + b"x"):
        with pytest.raises(ProtocolViolation):
            legacy.parse_command(number, wrong)


def test_texts_have_an_end() -> None:
    with pytest.raises(ProtocolViolation):
        legacy.Create("x" * 70_000, 1).message()
    with pytest.raises(ProtocolViolation):
        legacy.parse_command(legacy.Command.PING, bytes(legacy.MAX_PING_BYTES + 1))

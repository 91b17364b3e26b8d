"""The old commands (row Q1): bytes both ways, and hostile ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.errors import ProtocolViolation
from penstock.wire import legacy as old

texts = st.text(max_size=20)
u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
data = st.binary(max_size=50)
commands = st.one_of(
    st.builds(old.LegacyAuth, texts, texts, texts),
    st.builds(old.Ping, data),
    st.builds(old.Create, texts, u16),
    st.builds(old.LegacyPublish, texts, data),
    st.builds(old.LegacySubscribe, texts, texts, u16),
    st.builds(old.Ack, u64),
    st.builds(old.Nack, u64, u32, texts),
)
replies = st.one_of(
    st.builds(old.Ok, data),
    st.builds(old.Error, texts, texts),
    st.builds(
        old.LegacyLeased, u16, u64, u16, u32, u64, st.integers(-(2**63), 2**63 - 1), texts,
        st.none() | data, data,
    ),
    st.builds(old.Notice, u64, texts, texts),
)  # fmt: skip


@given(commands)
def test_commands_both_ways(command: old.AnyCommand) -> None:
    assert old.parse_command(*old.split(command.message())) == command


@given(replies)
def test_replies_both_ways(reply: old.AnyReply) -> None:
    assert old.parse_reply(*old.split(reply.message())) == reply


@settings(max_examples=300)
@given(st.integers(0, 255), st.binary(max_size=60))
def test_random_bytes_raise_nothing_else(command: int, body: bytes) -> None:
    for parse in (old.parse_command, old.parse_reply):
        try:
            parse(command, body)
        except ProtocolViolation:
            continue


@given(commands, st.data())
def test_a_body_that_is_cut_or_goes_on_is_refused(
    command: old.AnyCommand, data: st.DataObject
) -> None:
    if isinstance(command, old.Ping | old.LegacyPublish):
        return  # their last field is the rest of the body
    number, body = old.split(command.message())
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for wrong in (cut, body + b"x"):
        with pytest.raises(ProtocolViolation):
            old.parse_command(number, wrong)


def test_texts_have_an_end() -> None:
    with pytest.raises(ProtocolViolation):
        old.Create("x" * 70_000, 1).message()
    with pytest.raises(ProtocolViolation):
        old.parse_command(old.Command.PING, bytes(old.MAX_PING_BYTES + 1))

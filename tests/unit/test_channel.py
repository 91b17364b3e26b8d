"""A client's session when a connection cannot carry a call: that call fails, and nothing else (T1, T4)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import errors
from penstock.engines.broker.channel import Channel
from penstock.engines.broker.tcp import check_size
from penstock.model.settings_loader import load
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Frame, Kind
from penstock.wire.limits import MAX_MESSAGE_BYTES, check_message

BEFORE = say.Welcome("s", "b1")


class Narrow:
    """In place of a connection: takes what fits, and notes it."""

    def __init__(self, max_frame_bytes: int = 1_000) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        check_size(frame, frame.size_bytes, self.max_frame_bytes)
        self.sent.append(frame)


def channel_over(link: Narrow) -> Any:
    settings = load(None, {}, {})
    channel: Any = Channel(lambda: link, settings.client, say.Hello("c"))  # type: ignore[arg-type, return-value]
    channel._link, channel.welcome = link, BEFORE
    return channel


async def test_a_call_that_was_too_large_is_forgotten() -> None:
    """T4: kept, it would be sent again over the next connection, and every one after that."""
    link = Narrow()
    channel = channel_over(link)
    with pytest.raises(errors.PayloadTooLarge):
        channel.begin(Kind.PUBLISH, say.Publish(1, []), [bytes(2_000)])
    assert channel._calls == {}
    channel._resume(say.Welcome("s", "b1", resumed=True), BEFORE)
    assert link.sent == []


@pytest.mark.parametrize(
    "welcome",
    [say.Welcome("s", "b1", resumed=True, unknown=[1, 2, 3]), say.Welcome("s", "b2")],
    ids=["resumed", "restarted"],
)
@pytest.mark.parametrize("before", [True, False], ids=["sent-before", "waiting"])
async def test_a_new_connection_carries_what_it_can(welcome: say.Welcome, before: bool) -> None:
    """T4: a broker that came back with a smaller limit costs the large call its answer, and no other."""
    channel = channel_over(Narrow(10_000))
    if not before:
        channel._link = None
    calls = [
        channel.begin(Kind.PUBLISH, say.Publish(number, []), [bytes(size)])
        for number, size in enumerate((10, 2_000, 20))
    ]
    link = channel._link = Narrow(1_000)
    channel._resume(welcome, BEFORE)
    assert [frame.request for frame in link.sent] == [1, 3]
    with pytest.raises(errors.PayloadTooLarge):
        await channel.finish(calls[1])
    assert set(channel._calls) == {1, 3}


async def test_the_broker_says_how_large_a_frame_may_be() -> None:
    """T1: its Welcome does, whatever carries it; one that says nothing changes nothing."""
    link = Narrow(1 << 30)
    channel = channel_over(link)
    channel._resume(say.Welcome("s", "b1"), BEFORE)
    assert link.max_frame_bytes == 1 << 30
    channel._resume(say.Welcome("s", "b1", max_frame_bytes=70_000), BEFORE)
    assert link.max_frame_bytes == 70_000


async def test_settlements_that_do_not_fit_hold_up_nothing() -> None:
    """T4: they are reported in the log, and the session goes on."""
    channel = channel_over(Narrow(100_000))
    channel.settle([say.Settlement(1, rejects=[(0, "x" * 2_000)])])
    channel.settle([say.Settlement(2, acks=[0, 1])])
    link = channel._link = Narrow(1_000)
    channel._resume(say.Welcome("s", "b1", resumed=True), BEFORE)
    assert len(link.sent) == 1


async def test_settlements_are_reported_in_portions_that_a_broker_reads() -> None:
    """T1, T4: many deliveries, and one of many events; none is lost, none said twice."""
    link = Narrow(1 << 30)
    channel = channel_over(link)
    many = [say.Settlement(number, handed=1, acks=[0, 1]) for number in range(5_000)]
    nacks = [(index, None, "a reason of some length" * 200) for index in range(3_000)]
    acks = [number for index in range(4_000) for number in (3_000 + 2 * index, 1)]
    extends, returns = [(20_001, 2.0)], list(range(21_000, 24_000))
    one = say.Settlement(9_999, 11_000, acks, nacks, [(20_000, "bad")], extends, returns)
    channel.settle([*many, one])
    settles = [say.decode(frame.meta, say.Settle) for frame in link.sent]
    for frame in link.sent:
        check_message(frame)
    assert [settle.sequence for settle in settles] == [*range(1, len(settles) + 1)]
    said = [each for settle in settles for each in settle.settlements]
    assert said[:5_000] == many
    rest = said[5_000:]
    assert {(each.delivery, each.handed) for each in rest} == {(9_999, 11_000)}
    assert [number for each in rest for number in each.acks] == acks
    assert [nack for each in rest for nack in each.nacks] == nacks
    assert [each.rejects for each in rest if each.rejects] == [[(20_000, "bad")]]
    assert [each.extends for each in rest if each.extends] == [extends]
    assert [index for each in rest for index in each.returns] == returns


@pytest.mark.parametrize("reason", ["", "as it was", "\N{SNOWMAN}" * say.MAX_REASON_CHARACTERS])
async def test_settlements_fit_the_smallest_frame_that_a_broker_may_take(reason: str) -> None:
    """T4: what is behind a portion that was refused would not be reported either."""
    link = Narrow(64 << 10)
    channel = channel_over(link)
    channel.frame_bytes = 64 << 10
    nacks = [say.Settlement(1 << 40, 1 << 20, nacks=[(1 << 20, 0.5, reason)])] * 1_500
    extends = say.Settlement(1 << 40, 1 << 20, extends=[(1 << 20, 1e9)] * 3_000)
    both = say.Settlement(3, nacks=[(1, None, reason)], rejects=[(2, reason)])
    rejects = say.Settlement(1 << 40, 1 << 20, rejects=[(1, reason)] * 500)
    channel.settle([*nacks, both, rejects, extends])
    said = [each for frame in link.sent for each in say.decode(frame.meta, say.Settle).settlements]
    assert [nack for each in said for nack in each.nacks] == [
        nacks[0].nacks[0]
    ] * 1_500 + both.nacks
    assert sum(len(each.rejects) for each in said) == 501
    assert sum(len(each.extends) for each in said) == 3_000


def test_a_message_is_bounded_as_well_as_a_frame() -> None:
    """T1: a broker reads no more of it, so it is refused before it is sent."""
    fits = Frame(Kind.PUBLISH, 1, bytes(MAX_MESSAGE_BYTES))
    check_size(fits, fits.size_bytes, 1 << 30)
    with pytest.raises(errors.PayloadTooLarge) as raised:
        check_size(Frame(Kind.PUBLISH, 1, bytes(MAX_MESSAGE_BYTES + 1)), 0, 1 << 30)
    assert raised.value.data["limit_bytes"] == MAX_MESSAGE_BYTES
    with pytest.raises(errors.PayloadTooLarge):
        check_size(Frame(Kind.PUBLISH, 1, b""), 11, 10)
    check_size(Frame(Kind.PUBLISH, 1, b"", [b""] * MAX_PARTS), 0, 10)
    with pytest.raises(errors.PayloadTooLarge, match="batches"):
        check_size(Frame(Kind.PUBLISH, 1, b"", [b""] * (MAX_PARTS + 1)), 0, 10)


async def test_an_overdue_call_names_the_deadline_of_the_settings() -> None:
    """T4: what is left of it for one frame would say little to its caller."""
    channel = channel_over(Narrow())
    channel._link = None
    call = channel.begin(Kind.FLUSH)
    async with asyncio.timeout(5):
        with pytest.raises(
            errors.BrokerUnreachable, match="within 10 s; nothing was sent"
        ) as raised:
            await channel.finish(call, 0.01)
    assert raised.value.outcome == "not sent"

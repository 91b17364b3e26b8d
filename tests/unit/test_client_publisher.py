"""`RemotePublisher` lays drafts into frames, and bounds the wait for room in one (T1, T4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.engines.broker.channel import Channel
from penstock.engines.broker.publisher import (
    GATHER_S,
    LATELY_S,
    MAX_UNDER_WAY,
    MESSAGE_BYTES,
    PART_BYTES,
    RemotePublisher,
    bundled,
    described,
)
from penstock.engines.embedded.batching import MERGE_EVENTS
from penstock.model.draft import Draft
from penstock.model.event import Identity, Receipt
from penstock.model.settings import Limits
from penstock.model.settings_loader import load
from penstock.server.validation import to_draft
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Frame, Kind

DEADLINE_S = 1.0
SLACK_S = 0.6  # of a busy machine; well below another deadline


class Link:
    """In place of a connection: notes what is sent, and answers when the test wants it."""

    def __init__(self) -> None:
        self.max_frame_bytes = 1 << 30
        self.sent: list[Frame] = []
        self.answer: Callable[[Frame], None] = lambda frame: None

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)
        self.answer(frame)


def publisher_over(link: Link | None, **client: Any) -> tuple[Any, RemotePublisher]:
    flags = {f"client.{name}": value for name, value in client.items()}
    settings = load(None, {}, {"client.deadline_s": DEADLINE_S, **flags}).client
    channel: Any = Channel(lambda: link, settings, say.Hello("c"))  # type: ignore[arg-type, return-value]
    channel._link, channel.welcome = link, say.Welcome("s", "b")
    return channel, RemotePublisher(channel, settings.linger_ms, settings.deadline_s)


def draft(*payloads: bytes) -> Draft:
    return Draft("a.b", payloads, tenant="acme", codec="raw")


async def timed(publisher: RemotePublisher, what: Draft) -> tuple[float, BaseException | None]:
    began = time.monotonic()
    try:
        await publisher.publish(what)
    except errors.PenstockError as error:
        return time.monotonic() - began, error
    return time.monotonic() - began, None


def stored(channel: Any, frame: Frame) -> None:
    """Answer a publish in the next turn of the loop."""
    wish: say.Publish = say.decode(frame.meta, say.Publish)
    receipts = [Receipt("a.b", 0, 0, 1, bytes(16))] * len(wish.drafts)
    answer = Frame(Kind.RESULT, frame.request, say.encode(say.Published(list(receipts))))
    asyncio.get_running_loop().call_soon(channel._received, answer)


async def each_in_its_own_frame(
    publisher: RemotePublisher, count: int
) -> list[asyncio.Task[tuple[float, BaseException | None]]]:
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(timed(publisher, draft(b"%d" % number))))
        for _ in range(5):
            await asyncio.sleep(0)
    return tasks


# -- time --------------------------------------------------------------------------------------------


async def test_the_deadline_counts_from_the_publish_with_no_broker_in_reach() -> None:
    """T4: also for those who wait for a place, of whom nothing was sent."""
    _, publisher = publisher_over(None)
    answers = await asyncio.gather(*await each_in_its_own_frame(publisher, 2 * MAX_UNDER_WAY))
    assert max(seconds for seconds, _ in answers) < DEADLINE_S + SLACK_S
    assert min(seconds for seconds, _ in answers) > (1 - 0.2) * DEADLINE_S
    for _, error in answers:
        assert isinstance(error, errors.BrokerUnreachable)
        assert error.outcome == "not sent"
    assert not publisher._waiting


async def test_who_found_no_place_behind_a_silent_broker_was_not_sent() -> None:
    """T4: what was sent may take effect; what waited behind it cannot, and its caller hears that."""
    link = Link()
    _, publisher = publisher_over(link)
    answers = await asyncio.gather(*await each_in_its_own_frame(publisher, MAX_UNDER_WAY + 10))
    kinds = [type(error) for _, error in answers]
    assert kinds[:MAX_UNDER_WAY] == [errors.ConnectionLost] * MAX_UNDER_WAY
    assert kinds[MAX_UNDER_WAY:] == [errors.BrokerUnreachable] * 10
    assert len(link.sent) == MAX_UNDER_WAY
    assert max(seconds for seconds, _ in answers) < DEADLINE_S + SLACK_S


async def test_those_who_waited_are_sent_when_there_is_room() -> None:
    """T1: behind them nobody is refused."""
    link = Link()
    channel, publisher = publisher_over(link)
    tasks = await each_in_its_own_frame(publisher, MAX_UNDER_WAY + 10)
    assert len(link.sent) == MAX_UNDER_WAY
    link.answer = lambda frame: stored(channel, frame)
    for frame in list(link.sent):
        stored(channel, frame)
    answers = await asyncio.gather(*tasks)
    assert [error for _, error in answers] == [None] * len(tasks)
    assert len(link.sent) == MAX_UNDER_WAY + 1


async def test_who_waited_for_a_place_has_only_the_rest_of_its_time() -> None:
    """T4: and what is much younger goes into the next frame, for a frame has the time of its oldest."""
    link = Link()
    channel, publisher = publisher_over(link)
    earlier = await each_in_its_own_frame(publisher, MAX_UNDER_WAY)
    waited = await each_in_its_own_frame(publisher, 1)
    await asyncio.sleep(0.6 * DEADLINE_S)
    young = await each_in_its_own_frame(publisher, 1)
    for frame in list(link.sent):
        stored(channel, frame)
    await asyncio.gather(*earlier)
    for seconds, error in await asyncio.gather(*waited, *young):
        assert isinstance(error, errors.ConnectionLost)
        assert 0.8 * DEADLINE_S < seconds < 1.5 * DEADLINE_S
    assert len(link.sent) == MAX_UNDER_WAY + 2


async def test_a_publish_that_lingers_keeps_half_its_time_for_the_broker() -> None:
    """T4, Y3: `linger_ms` may be longer than the deadline; nothing would ever be sent in time."""
    link = Link()
    _, publisher = publisher_over(link, linger_ms=1_000, deadline_s=0.3)
    seconds, error = await timed(publisher, draft(b"x"))
    assert isinstance(error, errors.ConnectionLost)
    assert seconds < 0.3 + SLACK_S
    assert len(link.sent) == 1


# -- size --------------------------------------------------------------------------------------------


async def test_small_drafts_never_make_a_frame_that_is_too_large() -> None:
    """T1: each would fit alone; together they are cut to what the broker takes."""
    link = Link()
    channel, publisher = publisher_over(link)
    channel.frame_bytes = 100_000
    tasks = [asyncio.create_task(timed(publisher, draft(bytes(20_000)))) for _ in range(10)]
    await asyncio.sleep(0.05)
    assert len(link.sent) == 5
    assert max(frame.size_bytes for frame in link.sent) < 100_000
    await asyncio.gather(*tasks)


def labelled(*payloads: bytes) -> Draft:
    made = draft(*payloads)
    made.tokens = [bytes([number]) * 16 for number in range(len(payloads))]
    return made


@pytest.mark.parametrize(
    "large",
    [labelled(bytes(PART_BYTES)), labelled(*[b"x"] * MERGE_EVENTS)],
    ids=["bytes", "events"],
)
def test_large_drafts_with_tokens_travel_beside_the_message(large: Draft) -> None:
    """T1: the message has a limit of its own, below that of a frame and of a payload."""
    parts: list[Any] = []
    meta = described(large, parts)
    assert (meta.part, meta.payloads, len(parts)) == (0, [], 1)
    assert len(say.encode(meta)) < 200


def test_headers_and_keys_count_as_payloads_do() -> None:
    """T1: one event with nothing but headers travels as a batch when they are large."""
    wide = draft(b"")
    wide.headers = [{f"name-{number}": "x" * 1_000 for number in range(PART_BYTES // 1_000)}]
    parts: list[Any] = []
    assert described(wide, parts).part == 0
    arrived = to_draft(described(wide, parts), parts, Identity(), WIDE)
    assert [dict(each or {}) for each in arrived.subset([0]).headers or ()] == wide.headers


WIDE = Limits(max_headers=1_024, max_headers_bytes=1 << 20)


async def test_no_message_is_longer_than_a_broker_reads_uncounted() -> None:
    """T1: many small drafts are split over frames, whatever of them takes the room."""
    link = Link()
    channel, publisher = publisher_over(link)
    link.answer = lambda frame: stored(channel, frame)
    drafts = []
    for number in range(500):
        one = draft(bytes(number % 7 * 100))
        one.keys, one.headers = [bytes(900)], [{"name": "x" * 900, "other": "y"}]
        drafts.append(one)
    await asyncio.gather(*(publisher.publish(one) for one in drafts))
    assert len(link.sent) > 5
    assert max(len(frame.meta) for frame in link.sent) <= MESSAGE_BYTES
    found = [meta for frame in link.sent for meta in say.decode(frame.meta, say.Publish).drafts]
    assert [meta.payloads for meta in found] == [list(one.payloads) for one in drafts]


@pytest.mark.parametrize("column", ["none", "keys", "headers", "tokens", "many"])
@pytest.mark.parametrize("size", [0, 1, 20, 60, 300])
async def test_no_frame_is_larger_than_the_least_that_a_broker_takes(
    size: int, column: str
) -> None:
    """T1: names and lengths count, too: of small events they take most of a frame."""
    link = Link()
    channel, publisher = publisher_over(link, deadline_s=30.0)
    channel.frame_bytes = 64 << 10
    link.answer = lambda frame: stored(channel, frame)
    columns: dict[str, Any] = {"keys": b"key", "headers": {"name": "x"}, "tokens": bytes(16)}
    drafts = []
    for _ in range(1_100):
        one = draft(*[bytes(size)] * (MERGE_EVENTS if column == "many" else 1))
        if column in columns:
            setattr(one, column, [columns[column]])
        drafts.append(one)
    await asyncio.gather(*(publisher.publish(one) for one in drafts))
    assert max(frame.size_bytes + 4 * len(frame.parts) for frame in link.sent) < 64 << 10


def test_drafts_that_must_share_a_frame_go_beside_a_message_that_is_full() -> None:
    """T1: those of a transaction; tiny ones stay in it."""
    parts: list[Any] = []
    metas = bundled([*[draft(bytes(30_000))] * 10, draft(b"tiny")], parts)
    assert [meta.part for meta in metas] == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, -1]
    assert len(parts) == 6


@pytest.mark.parametrize("last", [1, 2, 500])
def test_a_transaction_keeps_parts_for_what_has_to_be_one(last: int) -> None:
    """T1: drafts that need none would take them all, and a batch behind them be one too many."""
    parts: list[Any] = []
    batches = [draft(*[b"x"] * MERGE_EVENTS)] * last
    metas = bundled([*[draft(bytes(1_500))] * 4_500, *batches, *[draft(bytes(1_500))] * 9], parts)
    assert len(parts) == MAX_PARTS
    assert [meta.part for meta in metas[4_500 : 4_500 + last]] == [
        *range(MAX_PARTS - last, MAX_PARTS)
    ]
    assert sum(len(meta.payloads) for meta in metas if meta.part < 0) == 4_509 + last - MAX_PARTS


COLUMN = st.none() | st.binary(max_size=4)


@given(st.integers(1, 70), st.booleans(), st.booleans(), st.data())
def test_a_draft_arrives_as_it_was_whatever_way_it_went(
    count: int, large: bool, with_tokens: bool, data: st.DataObject
) -> None:
    """T1: as lists or as a batch, and also when only some of its events are new."""
    first = bytes(PART_BYTES if large else 0)
    sent = draft(first, *(b"%d" % number for number in range(1, count)))
    sent.keys = data.draw(st.lists(COLUMN, min_size=count, max_size=count))
    sent.headers = [{"n": str(number)} if number % 2 else None for number in range(count)]
    sent.times_us = list(range(1, count + 1))
    if with_tokens:
        sent.tokens = [bytes([number]) * 16 for number in range(count)]
    parts: list[Any] = []
    meta = described(sent, parts)
    some = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    arrived = to_draft(meta, parts, Identity(), Limits())
    assert arrived.count == count
    assert arrived.tokens == sent.tokens
    found, wanted = arrived.subset(some), sent.subset(some)
    assert list(found.payloads) == list(wanted.payloads)
    assert found.tokens == wanted.tokens
    assert (found.keys, found.times_us) == (wanted.keys, wanted.times_us)
    assert [dict(each or {}) for each in found.headers or ()] == [
        dict(each or {}) for each in wanted.headers or ()
    ]


async def test_remembered_refusals_measure_what_the_rate_does() -> None:
    """T11: payload bytes, whether a draft is laid out as a batch already or not."""
    link = Link()
    _, publisher = publisher_over(link)
    refused = draft(b"x" * 500, b"y" * 500)
    refused.batch = refused.build()
    error = errors.Throttled("too fast", limit="bytes_per_s", retry_after_s=60.0)
    publisher._remember(refused, error)
    with pytest.raises(errors.Throttled):
        await publisher.publish(draft(b"x" * 500, b"y" * 500))
    assert not link.sent, "the answer is known"
    smaller = draft(b"x" * 500, b"y" * 499)
    smaller.batch = smaller.build()
    with pytest.raises(errors.PenstockError) as caught:
        await publisher.publish(smaller)
    assert link.sent, "it may fit"
    assert not isinstance(caught.value, errors.Throttled)


async def test_a_tenant_at_its_limit_gathers_and_keeps_nobody_waiting() -> None:
    """T11: a frame costs a broker about the same whatever is in it, and others wait for it."""
    link = Link()
    channel, publisher = publisher_over(link)
    link.answer = lambda frame: stored(channel, frame)
    error = errors.Throttled("too fast", limit="events_per_s", retry_after_s=0.0)
    publisher._remember(draft(b"x", b"y"), error)
    tasks = await each_in_its_own_frame(publisher, 5)
    assert not link.sent
    for task in tasks:
        took_s, refusal = await task
        assert refusal is None
        assert took_s >= GATHER_S / 2
    assert len(link.sent) == 1
    waiting = asyncio.create_task(timed(publisher, draft(b"x")))
    await asyncio.sleep(0)
    other = Draft("a.b", (b"z",), tenant="other", codec="raw")
    assert (await timed(publisher, other))[1] is None
    assert len(link.sent) == 2
    assert (await waiting)[1] is None, "it went with the other's"
    assert len(link.sent) == 2
    await asyncio.sleep(LATELY_S)
    tasks = await each_in_its_own_frame(publisher, 3)
    assert len(link.sent) == 5, "it was not refused for long enough"
    await asyncio.gather(*tasks)

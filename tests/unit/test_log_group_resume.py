"""A member of a log group names the ranges it still holds when it subscribes again (Q13, Q6)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

import penstock
from penstock.core.entry import GroupSpec
from penstock.engines.broker.consumer import RemoteLog
from penstock.engines.broker.engine import subscribe_message
from penstock.engines.broker.tcp import check_size
from penstock.engines.engine import ReadRange, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import Fenced, InvalidInput
from penstock.server.validation import check_subscribe, to_engine
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind

TOPIC = "in.a"
SPEC = GroupSpec((TOPIC,), "log")
MOST = (1 << 63) - 1


class Broker:
    """In place of a channel: answers a fetch with what the test says, and may refuse a commit."""

    def __init__(self) -> None:
        self.frame_bytes = 64 << 20
        self.refuses = False
        self.commits: list[say.Commit] = []
        self.answer: tuple[str, int, int, int] = (TOPIC, 0, 0, 0)

    async def call(self, kind: Kind, message: Any, **_: Any) -> Frame:
        if kind == Kind.COMMIT and self.refuses:
            raise Fenced("somebody else's")
        if kind == Kind.COMMIT:
            self.commits.append(message)
            return Frame(Kind.RESULT, 1, b"")
        topic, start, stop, epoch = self.answer
        batch = EventBatch.build(topic, [b"x"] * (stop - start))
        batch.base_offset = start
        return Frame(Kind.RESULT, 1, say.encode(say.Fetched(epoch)), (batch.encode(),))


class Client:
    """A log feed."""

    def __init__(self) -> None:
        self.broker = Broker()
        wanted = Subscribe("g", SPEC, "m", 1)
        self.feed = RemoteLog(1, wanted, cast(Any, self.broker), cast(Any, None))

    async def fetch(self, start: int, stop: int, epoch: int = 1, topic: str = TOPIC) -> None:
        self.broker.answer = (topic, start, stop, epoch)
        await self.feed.receive()

    async def commit(self, offset: int, epoch: int = 1) -> None:
        self.feed.mark(TOPIC, 0, offset, epoch)
        await self.feed.commit()

    def says(self) -> list[tuple[int, int, int]]:
        return [
            (each.start, each.stop, each.epoch) for each in subscribe_message(self.feed).log_held
        ]


async def test_a_client_says_nothing_before_it_has_something() -> None:
    assert Client().says() == []


async def test_batches_behind_one_another_are_one_range() -> None:
    client = Client()
    await client.fetch(5, 8)
    await client.fetch(8, 10)
    assert client.says() == [(5, 10, 1)]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ((12, 15, 1), (12, 15, 1)),  # what lies between it never had
        ((2, 4, 1), (2, 4, 1)),
        ((7, 9, 1), (5, 9, 1)),  # the reader was set back, and 9 comes again anyway
        ((10, 12, 2), (10, 12, 2)),  # a reset, by chance to where it was
    ],
)
async def test_what_is_no_continuation_is_a_new_range(
    then: tuple[int, int, int], said: tuple[int, int, int]
) -> None:
    client = Client()
    await client.fetch(5, 10)
    await client.fetch(*then)
    assert client.says() == [said]


async def test_what_is_committed_is_not_in_hand() -> None:
    client = Client()
    await client.fetch(5, 10)
    await client.commit(8)
    assert client.says() == [(5, 10, 1)]
    await client.commit(10, epoch=0)  # of other reading
    assert client.says() == [(5, 10, 1)]
    await client.commit(10)
    assert client.says() == []
    await client.fetch(10, 12)
    assert client.says() == [(10, 12, 1)]


async def test_what_was_refused_is_to_come_again() -> None:
    client = Client()
    await client.fetch(5, 10)
    client.broker.refuses = True
    with pytest.raises(Fenced):
        await client.commit(8)
    assert client.says() == []


async def test_of_too_many_partitions_the_latest_are_named() -> None:
    """So that the broker takes the message, also one that takes small frames only."""
    client = Client()
    for number in range(say.MAX_LOG_HELD + 2):
        await client.fetch(0, 1, topic=f"in.{number}")
    await client.fetch(1, 2, topic="in.0")
    held = subscribe_message(client.feed).log_held
    assert [each.topic for each in (held[0], held[-1])] == ["in.3", "in.0"]
    check_subscribe(subscribe_message(client.feed))
    client.broker.frame_bytes = 64 << 10
    client.feed._has = {
        (f"{number:02}{'x' * 253}", MOST): ReadRange(MOST, MOST, MOST) for number in range(99)
    }
    assert len(say.encode(subscribe_message(client.feed))) < 64 << 10
    assert len(subscribe_message(client.feed).log_held) == 64


@pytest.mark.parametrize("frame_bytes", [64 << 10, 64 << 20])
async def test_a_commit_of_very_many_partitions_is_several(frame_bytes: int) -> None:
    """T1: a broker reads only so much of one, and it was refused again and again."""
    client = Client()
    client.broker.frame_bytes = frame_bytes
    places = [f"{number:05}{'x' * 250}" for number in range(5_000)]
    for topic in places:
        client.feed.mark(topic, MOST, MOST, MOST)
    await client.feed.commit()
    for commit in client.broker.commits:
        check_size(Frame(Kind.COMMIT, 1, say.encode(commit)), len(say.encode(commit)), frame_bytes)
        assert len(commit.epochs) == len(commit.marks)
    assert [mark[0] for commit in client.broker.commits for mark in commit.marks] == places
    assert client.feed.pending().marks == []


def subscribe(*held: tuple[Any, ...], spec: GroupSpec = SPEC) -> say.Subscribe:
    return say.Subscribe(1, "g", spec, "m", 1, [], [say.LogHeld(*each) for each in held])


@pytest.mark.parametrize(
    "held",
    [
        [(TOPIC, -1, 0, 1, 1)],
        [(TOPIC, 0, -1, 1, 1)],
        [(TOPIC, 0, 2, 1, 1)],
        [(TOPIC, 0, 0, 1, -1)],
        [(TOPIC, 0, 0, MOST + 1, 1)],
        [(TOPIC, MOST + 1, 0, 1, 1)],
        [(TOPIC, 0, 0, 1, MOST + 1)],
        [(TOPIC, 0, 0, 1, 1), (TOPIC, 0, 1, 2, 1)],
        [(TOPIC, number, 0, 1, 1) for number in range(say.MAX_LOG_HELD + 1)],
    ],
)
def test_what_nobody_can_have_in_hand_is_refused(held: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InvalidInput, match="log_held"):
        check_subscribe(subscribe(*held))


def test_a_queue_has_other_things_in_hand() -> None:
    queue = msgspec.structs.replace(SPEC, mode="queue")
    with pytest.raises(InvalidInput, match="log_held"):
        check_subscribe(subscribe((TOPIC, 0, 0, 1, 1), spec=queue))


def test_the_most_that_is_taken() -> None:
    held = [(TOPIC, number, 0, MOST, MOST) for number in range(say.MAX_LOG_HELD)]
    check_subscribe(subscribe(*held))
    wanted = to_engine(subscribe(*held), penstock.Identity())
    assert wanted.handed[TOPIC, 7] == ReadRange(0, MOST, MOST)
    assert len(wanted.handed) == say.MAX_LOG_HELD


def test_clients_and_brokers_of_another_age_understand_each_other() -> None:
    """An older one ignores the field, and does not send it."""
    fields = msgspec.structs.fields(say.Subscribe)[:-1]
    older: Any = msgspec.defstruct(
        "Older",
        [(each.name, Any) if each.required else (each.name, Any, []) for each in fields],
    )
    sent = say.encode(subscribe((TOPIC, 0, 0, 1, 1)))
    assert msgspec.msgpack.decode(sent, type=older).group == "g"
    before = msgspec.msgpack.encode(msgspec.msgpack.decode(sent, type=older))
    assert say.decode(before, say.Subscribe).log_held == []


@pytest.mark.parametrize(
    ("has", "first"),
    [
        (None, 4),
        (ReadRange(4, 8, 1), 8),
        (ReadRange(0, 10, 1), 10),  # all there is
        (ReadRange(4, 4, 1), 4),
        (ReadRange(0, 3, 1), 4),  # another member got further
        (ReadRange(5, 8, 1), 4),  # 4 it never had
        (ReadRange(4, 11, 1), 4),  # beyond the end: not of this log
        (ReadRange(4, 8, 0), 4),  # from before a reset
        (ReadRange(4, 8, 2), 4),
    ],
)
async def test_where_a_member_begins(mem: penstock.Bus, has: ReadRange | None, first: int) -> None:
    """Behind what it has, if all between that and the committed offset is among it."""
    await mem.publish_many(TOPIC, [b"x"] * 10)
    engine: Any = mem.engine
    former: Any = await engine.subscribe(Subscribe("g", SPEC, "m", 1))
    former.mark(TOPIC, 0, 4, 1)
    await former.commit()
    handed = {} if has is None else {(TOPIC, 0): has}
    reader: Any = await engine.subscribe(Subscribe("g", SPEC, "m", 1, handed=handed))
    if first == 10:
        await mem.publish(TOPIC, b"y")
    async with asyncio.timeout(5):
        batch, _ = await reader.receive()
    assert batch.base_offset == first


async def test_what_a_member_is_given_later_begins_at_the_cursor(mem: penstock.Bus) -> None:
    await mem.publish_many(TOPIC, [b"x"] * 10)
    engine: Any = mem.engine
    other: Any = await engine.subscribe(Subscribe("g", SPEC, "a", 1))
    handed = {(TOPIC, 0): ReadRange(0, 8, 1)}
    reader: Any = await engine.subscribe(Subscribe("g", SPEC, "b", 1, handed=handed))
    assert reader._next == {}
    await other.close()
    async with asyncio.timeout(5):
        batch, _ = await reader.receive()
    assert batch.base_offset == 0

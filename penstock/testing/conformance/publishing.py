"""What a publish keeps, and what its receipt says."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from penstock.testing.conformance.harness import Contract, numbers, payloads, read, take

if TYPE_CHECKING:
    import penstock

EVERY_BYTE = bytes(range(256))
LARGE_BATCH = 10_000


class Order(msgspec.Struct):
    """A typed payload."""

    id: int
    item: str


class TestPublishing(Contract):
    """Publishing"""

    async def test_one_event_round_trip(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Payload, key, headers, codec, token and event time arrive byte for byte as published."""
        at = datetime(2024, 2, 29, 23, 59, 59, 123_457, tzinfo=UTC)
        receipt = await bus.publish(
            topic,
            EVERY_BYTE,
            key=b"\x00key\xff",
            headers={"trace": "00-ab-cd", "città": "Zürich 東京", "empty": ""},
            event_time=at,
        )
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1)
        assert event.topic == topic
        assert event.payload == EVERY_BYTE
        assert event.key == b"\x00key\xff"
        assert dict(event.headers) == {"trace": "00-ab-cd", "città": "Zürich 東京", "empty": ""}
        assert event.codec == "raw"
        assert event.token.bytes == receipt.token
        assert event.id == receipt.ids()[0]
        assert event.time_us == (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert event.tenant == bus.identity.tenant
        assert event.append_time_us > 0
        assert event.attempt == 1

    async def test_many_events_round_trip(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Each event of a batch keeps its own key, headers and event time."""
        values = [EVERY_BYTE, b"", b"last"]
        keys = [b"a", None, b"c"]
        headers = [{"n": "1"}, {}, {"n": "3", "more": "yes"}]
        times = [datetime(2024, 1, day, tzinfo=UTC) for day in (3, 1, 2)]
        await bus.publish_many(topic, values, keys=keys, headers=headers, event_times=times)
        async with bus.subscribe(topic, group=group) as sub:
            events = await take(sub, 3)
        assert payloads(events) == values
        assert [event.key for event in events] == keys
        assert [dict(event.headers) for event in events] == headers
        assert [event.time for event in events] == times

    async def test_text_key(self, bus: penstock.Bus, topic: str) -> None:
        """A key given as text is kept as its UTF-8 bytes, and no key stays no key."""
        await bus.publish(topic, b"a", key="clé")
        await bus.publish(topic, b"b")
        assert [event.key for event in await read(bus, topic)] == ["clé".encode(), None]

    async def test_values_are_encoded(self, bus: penstock.Bus, topic: str) -> None:
        """A value is encoded by the codec asked for, JSON by default, and decodes to the same value."""
        await bus.publish(topic, {"id": 7, "item": "pump"})
        await bus.publish(topic, Order(8, "pipe"), codec="msgpack")
        first, second = await read(bus, topic)
        assert (first.codec, second.codec) == ("json", "msgpack")
        assert first.value() == {"id": 7, "item": "pump"}
        assert second.value(Order) == Order(8, "pipe")

    async def test_columns(self, bus: penstock.Bus, topic: str) -> None:
        """An Arrow table with a payload column is published like the list of its rows."""
        table = pa.table(
            {
                "key": pa.array([b"a", None, b"c"], pa.binary()),
                "payload": pa.array(numbers(3), pa.binary()),
            }
        )
        receipt = await bus.publish_many(topic, table)
        events = await read(bus, topic)
        assert receipt.count == 3
        assert payloads(events) == numbers(3)
        assert [event.key for event in events] == [b"a", None, b"c"]

    async def test_receipts(self, bus: penstock.Bus, topic: str) -> None:
        """A receipt names the events it stands for; offsets in a partition only grow."""
        first = await bus.publish(topic, b"0")
        many = await bus.publish_many(topic, numbers(3, first=1))
        last = await bus.publish(topic, b"4")
        ids = [*first.ids(), *many.ids(), *last.ids()]
        assert (first.count, many.count, last.count) == (1, 3, 1)
        assert not any(receipt.duplicate or receipt.scheduled for receipt in (first, many, last))
        offsets = [each.offset for each in ids]
        assert offsets == sorted(set(offsets))
        events = await read(bus, topic)
        assert [event.id for event in events] == ids
        assert payloads(events) == numbers(5)
        assert events[0].token.bytes == first.token
        assert events[1].token.bytes == many.token

    async def test_tokens_are_unique(self, bus: penstock.Bus, topic: str) -> None:
        """Every event has a token of its own."""
        await bus.publish_many(topic, [b"same"] * 50)
        for _ in range(50):
            await bus.publish(topic, b"same")
        assert len({event.token for event in await read(bus, topic)}) == 100

    async def test_concurrent_publishes(self, bus: penstock.Bus, topic: str) -> None:
        """Publishes awaited at the same time all succeed and none shares an offset."""
        receipts = await asyncio.gather(*(bus.publish(topic, each) for each in numbers(200)))
        assert len({receipt.ids()[0] for receipt in receipts}) == 200
        stored = {event.id: event.payload for event in await read(bus, topic)}
        assert stored == {
            receipt.ids()[0]: payload
            for receipt, payload in zip(receipts, numbers(200), strict=True)
        }

    async def test_read_your_writes(self, bus: penstock.Bus, topic: str) -> None:
        """An event can be read as soon as its publish has returned."""
        for number in range(20):
            await bus.publish(topic, str(number).encode())
            assert payloads(await read(bus, topic)) == numbers(number + 1)

    async def test_partition_by_key(self, bus: penstock.Bus, topic: str) -> None:
        """Events with the same key lie in the same partition, in the order they were published."""
        await bus.topics.create(topic, partitions=4)
        keys = [f"k{number % 20}".encode() for number in range(200)]
        receipt = await bus.publish_many(topic, numbers(200), keys=keys)
        assert receipt.count == 200
        assert len(set(receipt.ids())) == 200
        events = await read(bus, topic)
        assert len(events) == 200
        assert len({event.partition for event in events}) > 1
        for key in set(keys):
            own = [event for event in events if event.key == key]
            assert len({event.partition for event in own}) == 1
            assert [int(event.payload) for event in own] == [
                number for number in range(200) if keys[number] == key
            ]

    async def test_chosen_partition(self, bus: penstock.Bus, topic: str) -> None:
        """A publish that names a partition goes there."""
        await bus.topics.create(topic, partitions=3)
        receipt = await bus.publish(topic, b"here", partition=2)
        many = await bus.publish_many(topic, numbers(2), partition=1)
        assert (receipt.partition, many.partition) == (2, 1)
        assert payloads(await read(bus, topic, partition=2)) == [b"here"]
        assert payloads(await read(bus, topic, partition=1)) == numbers(2)

    async def test_large_batch(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A batch of 10,000 events arrives complete, in order and unchanged."""
        sent = [hashlib.sha256(each).digest() * 3 for each in numbers(LARGE_BATCH)]
        receipt = await bus.publish_many(topic, sent)
        assert receipt.count == LARGE_BATCH
        async with bus.subscribe(topic, group=group) as sub:
            events = await take(sub, LARGE_BATCH, deadline_s=60)
        assert len({event.id for event in events}) == LARGE_BATCH
        received = hashlib.sha256(b"".join(payloads(events))).hexdigest()
        assert received == hashlib.sha256(b"".join(sent)).hexdigest()

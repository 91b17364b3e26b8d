"""How events are identified, and how slow consumers hold up nobody but themselves."""

from __future__ import annotations

import uuid
from pathlib import Path

import penstock


async def test_an_event_has_a_place_and_a_token(tmp_path: Path) -> None:
    """Row Q2: (partition, offset) says where it lies, 128 bits say which it is; both survive a restart."""
    token = uuid.uuid4()
    async with penstock.connect(tmp_path / "bus") as bus:
        chosen = await bus.publish("orders.created", b"a", token=token)
        given = await bus.publish("orders.created", b"b")
    async with penstock.connect(tmp_path / "bus") as bus:
        first, second = [event async for event in bus.replay("orders.created")]
    assert (first.id, second.id) == (chosen.ids()[0], given.ids()[0])
    assert (first.id.partition, first.id.offset, second.id.offset) == (0, 0, 1)
    assert first.token == token
    assert second.token.bytes == given.token
    assert penstock.MessageId.parse(str(first.id)) == first.id


async def test_a_slow_consumer_holds_its_credit_and_no_more(tmp_path: Path) -> None:
    """Row Q7: what has no credit waits in the log, producers and other groups go on."""
    async with penstock.connect(tmp_path / "bus", limits__cache_bytes=0) as bus:
        slow = bus.subscribe("orders.created", group="slow", max_inflight=10)
        quick = bus.subscribe("orders.created", group="quick", mode="log")
        async with slow as held, quick as read:
            events = []
            for _ in range(20):
                await bus.publish_many("orders.created", [bytes(1_000)] * 500)
            while (event := await held.get(timeout_s=0.5)) is not None:
                events.append(event)
            assert len(events) == 10
            info = await bus.groups.info("slow")
            assert (info.outstanding, info.lag) == (10, 10_000)
            seen = 0
            async for batch in read.batches():
                seen += len(batch)
                if seen == 10_000:
                    break
            await held.ack(events[:3])
            more = [await held.get(timeout_s=2.0) for _ in range(3)]
            assert [event.offset for event in more if event] == [10, 11, 12]
            assert await held.get(timeout_s=0.2) is None

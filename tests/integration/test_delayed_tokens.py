"""Delayed events under idempotency keys and tokens: known for their topic only."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

TOKEN = uuid.UUID(int=7)


@pytest.mark.parametrize(
    "named", [{"idempotency_key": "n"}, {"token": TOKEN}], ids=["key", "token"]
)
@pytest.mark.parametrize("engine", ["memory", "folder", "broker"])
async def test_a_delayed_event_is_not_taken_for_that_of_another_topic(
    engine: str, named: dict[str, Any], tmp_path: Path
) -> None:
    if engine == "broker":
        with BrokerProcess(tmp_path / "data").start() as broker:
            return await delayed_twice(broker.url(), named)
    return await delayed_twice("mem:" if engine == "memory" else str(tmp_path / "data"), named)


async def delayed_twice(url: str, named: dict[str, Any]) -> None:
    async with (
        penstock.connect(url) as bus,
        bus.subscribe("t.*", group="g", start="earliest") as events,
    ):
        first = await bus.publish("t.a", b"1", delay_s=0.2, **named)
        other = await bus.publish("t.b", b"2", delay_s=0.2, **named)
        again = await bus.publish("t.a", b"1", delay_s=0.2, **named)
        duplicates = [receipt.duplicate for receipt in (first, other, again)]
        assert duplicates == [False, False, True]
        assert first.token == other.token == again.token
        came = {}
        for _ in range(2):
            event = await events.get(timeout_s=30)
            assert event is not None
            came[event.topic] = (event.payload, event.token.bytes, dict(event.headers))
            await event.ack()
        token = first.token
        assert came == {"t.a": (b"1", token, {}), "t.b": (b"2", token, {})}
        assert await events.get(timeout_s=0.3) is None

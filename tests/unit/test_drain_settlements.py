"""`finish` makes settlements durable before the broker stops, and does not wait for a full disk (T5, T8)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from penstock.server import broker


class Client:
    """A session that holds no events; its settlements are durable when the test says so."""

    link = None

    def __init__(self) -> None:
        self.stored = asyncio.Event()
        self.durable = False

    async def finish(self, seconds: float) -> None: ...

    async def make_durable(self) -> None:
        await self.stored.wait()
        self.durable = True


async def test_what_cannot_be_buried_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker, "DURABLE_S", 0.05)
    stuck, other = Client(), Client()
    other.stored.set()
    async with asyncio.timeout(5):
        await broker.finish(cast(Any, {"a": stuck, "b": other}), time.monotonic())
    assert (stuck.durable, other.durable) == (False, True)


async def test_what_takes_a_moment_is_waited_for_though_the_time_is_up() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.05, client.stored.set)
    async with asyncio.timeout(5):
        await broker.finish(cast(Any, {"a": client}), time.monotonic())
    assert client.durable

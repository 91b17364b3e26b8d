"""A broker that is told to stop: consumers finish what is in their hands (T5, T16)."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 60.0
LONG_S = 600.0  # a drain that takes this long fails the test


async def draining(bus: penstock.Bus) -> None:
    """Wait until the client knows that its broker stops."""
    async with asyncio.timeout(DEADLINE_S):
        while not all(feed.paused for feed in bus.engine._feeds.values()):
            await asyncio.sleep(0.005)


async def asked(broker: BrokerProcess, path: str) -> tuple[int, bytes]:
    """What the broker answers over HTTP: status and text."""
    url = f"http://127.0.0.1:{broker.ports['http']}{path}"

    def get() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(get)


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_an_event_in_a_handler_is_finished_first(tmp_path: Path, transport: str) -> None:
    """Its ack is durable; what was only fetched is nobody's attempt and comes after the restart."""
    with BrokerProcess(tmp_path / "data").start(server__drain_s=LONG_S) as broker:
        async with penstock.connect(broker.url(transport)) as bus:
            await bus.publish_many("orders", [b"0", b"1", b"2"])
            async with bus.subscribe("orders", group="g", start="earliest") as events:
                first = await events.get(timeout_s=DEADLINE_S)
                assert first is not None
                stopping = asyncio.create_task(asyncio.to_thread(broker.stop))
                await draining(bus)
                assert await events.get(timeout_s=0.5) is None, "it was fetched, not begun"
                assert not stopping.done()
                await first.ack()
                assert await asyncio.wait_for(stopping, DEADLINE_S) == 0
                broker.start()
                again = [await events.get(timeout_s=DEADLINE_S) for _ in range(2)]
                assert [(each.payload, each.attempt) for each in again if each] == [
                    (b"1", 1),
                    (b"2", 1),
                ]
                for each in again:
                    await each.ack()
                await bus.flush()
            info = await bus.groups.info("g")
            assert (info.lag, info.outstanding) == (0, 0)


async def test_a_handler_that_never_ends_delays_the_end_by_drain_s_only(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start(server__drain_s=1.0) as broker:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish("orders", b"0")
            async with bus.subscribe("orders", group="g", start="earliest") as events:
                held = await events.get(timeout_s=DEADLINE_S)
                assert held is not None
                await asyncio.sleep(0)  # the broker hears of it after this turn of the loop
                began = time.monotonic()
                assert await asyncio.to_thread(broker.stop) == 0
                assert time.monotonic() - began >= 1.0
                broker.start()
                assert await events.get(timeout_s=0.5) is None
                await held.ack()  # its lease outlived the broker
                await bus.flush()
                assert (await bus.groups.info("g")).lag == 0


async def test_consumers_that_are_at_nothing_delay_nothing(tmp_path: Path) -> None:
    """Whether nothing came for them or nobody has looked at it."""
    with BrokerProcess(tmp_path / "data").start(server__drain_s=LONG_S) as broker:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish("orders", b"0")
            async with (
                bus.subscribe("orders", group="g", start="earliest"),
                bus.subscribe("orders.none", group="h"),
            ):
                assert await asyncio.wait_for(asyncio.to_thread(broker.stop), DEADLINE_S) == 0
                broker.start()


async def test_load_balancers_are_told_while_a_handler_holds_the_drain(tmp_path: Path) -> None:
    """T16: `/ready` answers 503, so that nobody new is sent here; `/health` says that it lives."""
    with BrokerProcess(tmp_path / "data").start(server__drain_s=LONG_S) as broker:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish("orders", b"0")
            async with bus.subscribe("orders", group="g", start="earliest") as events:
                event = await events.get(timeout_s=DEADLINE_S)
                assert event is not None
                assert await asked(broker, "/ready") == (200, b'{"ready":true}')
                stopping = asyncio.create_task(asyncio.to_thread(broker.stop))
                await draining(bus)
                assert await asked(broker, "/ready") == (
                    503,
                    b'{"ready":false,"reasons":["draining"]}',
                )
                assert (await asked(broker, "/health"))[0] == 200
                assert not stopping.done()
                await event.ack()
                assert await asyncio.wait_for(stopping, DEADLINE_S) == 0
                broker.start()
                assert (await asked(broker, "/ready"))[0] == 200

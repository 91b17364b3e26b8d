"""Closing a bus whose handlers work: they finish, or their events go back at no cost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.conformance.harness import entered, owes, take

ROOT = Path(penstock.__file__).resolve().parent.parent
ONCE = penstock.Retry.none()
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("closing") / "data") as broker:
        yield broker.url()


@pytest.fixture(params=["folder", "broker"])
def url(request: pytest.FixtureRequest, tmp_path: Path, broker_url: str) -> str:
    """Where events are still there when the bus was closed."""
    return {"folder": str(tmp_path / "data"), "broker": broker_url}[request.param]


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex[:12]}.orders"


async def left(url: str, topic: str) -> list[tuple[bytes, int]]:
    """What group `g-<topic>` has not done: payload and attempt, in order; nothing of it is dead."""
    async with penstock.connect(url) as bus:
        info = await bus.groups.info(f"g-{topic}")
        async with bus.subscribe(topic, group=f"g-{topic}", retry=ONCE) as sub:
            found = [(event.payload, event.attempt) for event in await take(sub, info.lag)]
        assert await bus.dead_letters.list(topic=topic) == []
    return sorted(found)


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_what_is_in_work_is_finished_and_settled_and_nothing_else_begins(
    url: str, topic: str, plain: bool
) -> None:
    begun: list[bytes] = []
    two = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin(payload: bytes) -> None:
        begun.append(payload)
        if len(begun) == 2:
            loop.call_soon_threadsafe(two.set)

    async def handle(payload: bytes) -> None:
        begin(payload)
        await asyncio.sleep(0.3)

    def handle_plainly(payload: bytes) -> None:
        begin(payload)
        time.sleep(0.3)

    async with penstock.connect(url) as bus:
        bus.handler(topic, group=f"g-{topic}", concurrency=2, retry=ONCE)(
            handle_plainly if plain else handle
        )
        await bus.publish_many(topic, [b"0", b"1", b"2", b"3"])
        await asyncio.wait_for(two.wait(), PATIENCE_S)
    assert sorted(begun) == [b"0", b"1"]
    assert await left(url, topic) == [(b"2", 1), (b"3", 1)]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_what_does_not_finish_goes_back_at_no_cost(
    url: str, topic: str, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun, cancelled = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    async def handle(payload: bytes) -> None:
        begun.set()
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            cancelled.append(payload)
            raise OSError("cleaning up failed") from None

    def handle_plainly(payload: bytes) -> None:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(2)

    async with penstock.connect(url) as bus:
        bus.handler(topic, group=f"g-{topic}", retry=ONCE)(handle_plainly if plain else handle)
        await bus.publish(topic, b"x")
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        began = time.monotonic()
        await bus.close(drain_s=0.2)
        assert time.monotonic() - began >= 0.15
    assert cancelled == ([] if plain else [b"x"])
    assert any("did not finish" in record.message for record in caplog.records)
    assert await left(url, topic) == [(b"x", 1)]


async def test_a_cancelled_close_waits_for_no_handler_and_closes_all_the_same(
    url: str, topic: str
) -> None:
    begun = asyncio.Event()
    bus = await penstock.connect(url, delivery__drain_s=3_600.0).open()

    @bus.handler(topic, group=f"g-{topic}", retry=ONCE)
    async def handle(payload: bytes) -> None:
        begun.set()
        await asyncio.sleep(3_600)

    await bus.publish(topic, b"x")
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await bus.close()
    with pytest.raises(penstock.BusClosed):
        await bus.publish(topic, b"y")
    assert await left(url, topic) == [(b"x", 1)]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_handler_may_close_its_bus_and_its_event_is_settled(
    url: str, topic: str, concurrency: int
) -> None:
    closing = asyncio.Barrier(concurrency)

    async def main() -> None:
        bus = penstock.connect(url)

        @bus.handler(topic, group=f"g-{topic}", concurrency=concurrency, retry=ONCE)
        async def handle(payload: bytes) -> None:
            await closing.wait()
            await bus.close()
            await asyncio.sleep(0.05)
            await asyncio.wait_for(bus.close(), PATIENCE_S)

        async with bus:
            await bus.publish_many(topic, [b"stop"] * (concurrency + 2))
            await bus.run()
        with pytest.raises(penstock.BusClosed):
            await bus.publish(topic, b"x")

    await asyncio.wait_for(main(), PATIENCE_S)
    assert await left(url, topic) == [(b"stop", 1)] * 2


async def test_a_plain_handler_may_close_its_bus(url: str, topic: str) -> None:
    loop = asyncio.get_running_loop()
    bus = penstock.connect(url)

    @bus.handler(topic, group=f"g-{topic}", retry=ONCE)
    def handle(payload: bytes) -> None:
        asyncio.run_coroutine_threadsafe(bus.close(), loop).result(PATIENCE_S)

    async with bus:
        await bus.publish_many(topic, [b"stop", b"go"])
        await asyncio.wait_for(bus.run(), PATIENCE_S)
    assert await left(url, topic) == [(b"go", 1)]


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_the_bus(
    url: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, enough = asyncio.Event(), asyncio.Event()
    bus = await penstock.connect(url).open()

    @bus.handler(topic, group=f"g-{topic}", retry=ONCE)
    async def stubborn(payload: bytes) -> None:
        begun.set()
        while not enough.is_set():
            try:
                await enough.wait()
            except asyncio.CancelledError:
                continue

    await bus.publish(topic, b"x")
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.wait_for(bus.close(drain_s=0.1), PATIENCE_S)
    ignored = [r.message for r in caplog.records if "ignores that it was cancelled" in r.message]
    assert len(ignored) == 1
    assert "stubborn" in ignored[0]
    assert await left(url, topic) == [(b"x", 1)]  # the folder is free, the event is not lost
    enough.set()
    await asyncio.sleep(0.05)
    assert any("does not count" in record.message for record in caplog.records)


async def test_closing_from_many_places_closes_once(url: str, topic: str) -> None:
    begun = asyncio.Event()
    bus = await penstock.connect(url).open()

    @bus.handler(topic, group=f"g-{topic}")
    async def handle(payload: bytes) -> None:
        begun.set()
        await asyncio.sleep(0.2)

    await bus.publish(topic, b"x")
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    await asyncio.gather(*(bus.close() for _ in range(5)))
    await bus.close()
    with pytest.raises(penstock.BusClosed):
        await bus.open()
    with pytest.raises(penstock.BusClosed):
        bus.handler(topic, group="late")(handle)
    assert await left(url, topic) == []


# -- bus.run -------------------------------------------------------------------------------------


async def test_running_without_handlers_says_what_to_do(mem: penstock.Bus) -> None:
    with pytest.raises(penstock.InvalidInput, match="register a handler"):
        await mem.run()


async def test_a_handler_that_cannot_subscribe_closes_the_bus(url: str, topic: str) -> None:
    async with penstock.connect(url) as before:
        await entered(before.subscribe(topic, group=f"g-{topic}", mode="log"))
    bus = penstock.connect(url)

    @bus.handler(topic, group=f"g-{topic}", concurrency=2)
    async def handle(payload: bytes) -> None: ...

    with pytest.raises(penstock.InvalidInput, match="log group"):
        await asyncio.wait_for(bus.run(), PATIENCE_S)
    with pytest.raises(penstock.BusClosed):
        await bus.publish(topic, b"x")
    async with penstock.connect(url) as again:
        await again.publish(topic, b"x")


async def test_a_handler_registered_while_the_bus_runs_counts_too(url: str, topic: str) -> None:
    async with penstock.connect(url) as bus:

        async def handle(payload: bytes) -> None: ...

        bus.handler(topic, group=f"g-{topic}")(handle)
        serving = asyncio.create_task(bus.run())
        await bus.ready()
        bus.handler(topic, group=f"late-{topic}")(handle)
        await bus.ready()
        await bus.publish(topic, b"x")
        await owes(bus, f"late-{topic}", 0)
        await bus.groups.delete(f"late-{topic}", confirm="DELETE")
        with pytest.raises(penstock.UnknownGroup):
            await asyncio.wait_for(serving, PATIENCE_S)


SERVICE = """
    import asyncio, sys, time, penstock

    async def main():
        bus = penstock.connect(sys.argv[1], delivery__drain_s=float(sys.argv[4]))

        @bus.handler(sys.argv[2], group="g-" + sys.argv[2], retry=penstock.Retry.none())
        async def handle(payload: bytes):
            print("begun", flush=True)
            await asyncio.sleep(float(sys.argv[3]))
            print("done", flush=True)

        if sys.argv[1].startswith("/"):
            async with bus:
                await bus.publish_many(sys.argv[2], [b"0", b"1"])
                await bus.run()
        else:
            await bus.run()
        print("after run", flush=True)

    asyncio.run(main())
"""


async def signalled(
    url: str, topic: str, number: int, work_s: float, drain_s: float
) -> tuple[int, list[str], str]:
    if not url.startswith("/"):
        async with penstock.connect(url) as bus:
            await bus.publish_many(topic, [b"0", b"1"])
    words = [sys.executable, "-c", textwrap.dedent(SERVICE), url, topic, str(work_s), str(drain_s)]
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PENSTOCK_")}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=clean | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "begun\n"
        process.send_signal(number)
        said, complaints = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        process.kill()
    return process.returncode, said.split("\n")[:-1], complaints


async def test_sigterm_lets_the_handlers_finish_and_ends_the_program_well(
    url: str, topic: str
) -> None:
    ended = await signalled(url, topic, signal.SIGTERM, 0.5, 30)
    assert ended == (0, ["done", "after run"], "")
    assert await left(url, topic) == [(b"1", 1)]


async def test_sigterm_waits_for_no_handler_longer_than_it_may(url: str, topic: str) -> None:
    code, said, _ = await signalled(url, topic, signal.SIGTERM, 3_600, 0.2)
    assert (code, said) == (0, ["after run"])
    assert await left(url, topic) == [(b"0", 1), (b"1", 1)]


async def test_ctrl_c_lets_the_handlers_finish_and_is_still_ctrl_c(url: str, topic: str) -> None:
    code, said, complaints = await signalled(url, topic, signal.SIGINT, 0.5, 30)
    assert (code, said) == (-signal.SIGINT, ["done"])
    assert "KeyboardInterrupt" in complaints
    assert await left(url, topic) == [(b"1", 1)]


async def test_a_program_with_its_own_sigterm_handler_keeps_it(mem: penstock.Bus) -> None:
    loop = asyncio.get_running_loop()
    mine = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, mine.set)
    try:

        @mem.handler("orders", group="g")
        async def handle(payload: Any) -> None: ...

        serving = asyncio.create_task(mem.run())
        await mem.ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(mine.wait(), PATIENCE_S)
        assert not serving.done()
        serving.cancel()
        await asyncio.wait([serving])
    finally:
        loop.remove_signal_handler(signal.SIGTERM)

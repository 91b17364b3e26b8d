"""Row T13: a large draft is checked, laid out and compressed beside the loop, however it travels."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.engines.embedded.batching import Batcher
from penstock.server import publish as publish_module
from penstock.server.daemon import Daemon
from penstock.testing.broker_process import broker_inside

DEADLINE_S = 20.0
CUTOVER = 64 << 10
LARGE = b"large" * 40_000
Publish = Callable[[penstock.Bus, bytes], Any]


async def alone(bus: penstock.Bus, payload: bytes) -> None:
    """As a part of its frame."""
    await bus.publish("orders", payload, codec="raw")


async def known(bus: penstock.Bus, payload: bytes) -> None:
    """In lists, since it has a token."""
    await bus.publish("orders", payload, codec="raw", idempotency_key="once")


async def several(bus: penstock.Bus, payload: bytes) -> None:
    """In lists, and large only together."""
    pieces = [payload[at::4] for at in range(4)]
    await bus.publish_many("orders", pieces, codec="raw", idempotency_keys=list("abcd"))


async def together(bus: penstock.Bus, payload: bytes) -> None:
    """In a transaction, as a part."""
    async with bus.transaction() as transaction:
        transaction.publish("orders", payload, codec="raw")


async def known_together(bus: penstock.Bus, payload: bytes) -> None:
    """In a transaction, in lists."""
    async with bus.transaction() as transaction:
        transaction.publish("orders", payload, codec="raw", idempotency_key="once")


WAYS = [alone, known, several, together, known_together]


class Threads:
    """Who worked on drafts."""

    def __init__(self) -> None:
        self.checked: list[int] = []
        self.compressed: list[int] = []


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Notes which thread checks, and which one compresses."""
    found = Threads()
    inbound, compress = publish_module.to_draft, Batcher.compress

    def checked(*args: Any) -> Any:
        found.checked.append(threading.get_ident())
        return inbound(*args)

    def compressed(batcher: Batcher, batch: Any) -> None:
        if batch.topic == "orders" and batch.compressor == "none":
            found.compressed.append(threading.get_ident())
        compress(batcher, batch)

    monkeypatch.setattr(publish_module, "to_draft", checked)
    monkeypatch.setattr(Batcher, "compress", compressed)
    return found


async def started(folder: Path, **flags: Any) -> Daemon:
    daemon = broker_inside(folder, {"fastpath.cutover_bytes": CUTOVER, **flags})
    await daemon.start()
    return daemon


@pytest_asyncio.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = await started(tmp_path)
    yield daemon
    await daemon.stop()


def connect(daemon: Daemon) -> penstock.Bus:
    return penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}")


async def stored(bus: penstock.Bus) -> list[bytes]:
    return [event.payload async for event in bus.replay("orders")]


@pytest.mark.parametrize("publish", WAYS)
async def test_large_drafts_leave_the_loop(
    daemon: Daemon, threads: Threads, publish: Publish
) -> None:
    """T13: whether it is a part or lists, alone or in a transaction."""
    async with connect(daemon) as bus:
        await bus.topics.create("orders")
        await publish(bus, LARGE)
        assert sorted(map(len, await stored(bus))) in ([len(LARGE)], [len(LARGE) // 4] * 4)
        if publish in (known, several):
            await publish(bus, LARGE)
            assert len(b"".join(await stored(bus))) == len(LARGE), "a token is known again"
    assert threads.checked
    assert threads.compressed
    assert threading.get_ident() not in threads.checked + threads.compressed
    assert daemon.broker.fastpath.taken == len(threads.checked)


@pytest.mark.parametrize("publish", WAYS)
async def test_small_drafts_stay(daemon: Daemon, threads: Threads, publish: Publish) -> None:
    """T13: a thread would cost them more than their work."""
    async with connect(daemon) as bus:
        await publish(bus, bytes(CUTOVER - 1))
    assert set(threads.checked) == {threading.get_ident()}
    assert daemon.broker.fastpath.taken == 0


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("publish", WAYS)
async def test_where_the_fast_path_is_required_nothing_large_goes_without_it(
    tmp_path: Path, go_on: threading.Event, publish: Publish
) -> None:
    """T13: while it is busy the client is told to wait, nothing is stored, and it is counted."""
    daemon = await started(tmp_path, **{"fastpath.require": True, "fastpath.threads": 1})
    try:
        async with connect(daemon) as bus:
            await bus.topics.create("orders")
            busy = daemon.broker.fastpath.submit(go_on.wait, DEADLINE_S)
            with pytest.raises(penstock.Deferred) as raised:
                await publish(bus, LARGE)
            assert raised.value.data["limit"] == "fastpath.threads"
            assert daemon.counters.refusals == {("deferred", "fastpath.threads", "default"): 1}
            assert await stored(bus) == []
            go_on.set()
            await asyncio.wait_for(busy, DEADLINE_S)
            await publish(bus, LARGE)
            assert len(b"".join(await stored(bus))) == len(LARGE)
    finally:
        go_on.set()
        await daemon.stop()


async def test_the_drafts_of_a_transaction_keep_their_order(daemon: Daemon) -> None:
    """T13: what is small does not overtake what is large."""
    payloads = [b"first", LARGE, b"third", LARGE[:CUTOVER], b"last"]
    async with connect(daemon) as bus:
        async with bus.transaction() as transaction:
            for payload in payloads:
                transaction.publish("orders", payload, codec="raw")
        assert await stored(bus) == payloads
        assert daemon.broker.fastpath.taken == 2


@pytest.mark.parametrize("more", [{}, {"idempotency_key": "once"}, {"ttl_s": 60.0, "priority": 3}])
async def test_a_large_delayed_event_arrives(daemon: Daemon, more: dict[str, Any]) -> None:
    """T13: it travels as a batch, and is kept under another topic until its time."""
    async with connect(daemon) as bus, bus.subscribe("orders", group="g") as events:
        labels = {"key": b"k", "headers": {"a": "b"}, "codec": "raw"}
        receipt = await bus.publish("orders", LARGE, delay_s=0.05, **labels, **more)
        assert receipt.scheduled
        event = await events.get(timeout_s=DEADLINE_S)
        assert event is not None
        assert (event.payload, event.key, event.headers["a"]) == (LARGE, b"k", "b")
        assert event.priority == more.get("priority", 0)
        assert (event.expires_us is not None) is ("ttl_s" in more)


async def test_what_is_over_its_rate_is_refused_before_any_work(
    tmp_path: Path, threads: Threads
) -> None:
    """T13: large lists are refused by their number of events, as batches are by their head."""
    topic = "orders.created.v1.acme"
    daemon = await started(tmp_path, **{"admission.tenants.acme.events_per_s": 1})
    try:
        async with connect(daemon) as bus:
            await bus.publish(topic, b"the first one is looked at")
            threads.checked.clear()
            keys = [str(number) for number in range(4)]
            with pytest.raises(penstock.Dropped):
                await bus.publish_many(topic, [LARGE] * 4, codec="raw", idempotency_keys=keys)
        assert not threads.checked
        assert daemon.counters.refusals == {("dropped", "events_per_s", "acme"): 1}
    finally:
        await daemon.stop()


async def test_what_has_a_token_never_lies_beside_the_journal(
    daemon: Daemon, threads: Threads
) -> None:
    """T13: so it is compressed, and by a thread, where one without a token gets a side file."""
    huge = b"huge" * (daemon.engine.settings.journal.side_file_bytes // 3)
    async with connect(daemon) as bus:
        await bus.topics.create("orders")
        await alone(bus, huge)
        assert not threads.compressed
        await known(bus, huge)
        await known_together(bus, b"x" + huge)
        assert await stored(bus) == [huge, huge]
    assert threads.compressed
    assert threading.get_ident() not in threads.compressed

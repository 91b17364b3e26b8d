"""Clients that never negotiate (row Q1), against a real broker on a real folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.model.settings_loader import load
from penstock.server.daemon import Daemon
from penstock.server.publish import PublishHandler
from penstock.server.transports import legacy as legacy_transport
from penstock.wire import legacy
from penstock.wire.stream import StreamReader

MIB = 1 << 20


class Caller:
    """An old client, written the way its author would."""

    def __init__(self) -> None:
        self._stream = StreamReader(1 << 26)
        self._replies: list[legacy.AnyReply] = []
        self.leased: list[legacy.LegacyLeased] = []
        self.notices: list[legacy.Notice] = []

    async def open(self, port: int) -> Caller:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    def tell(self, *commands: legacy.AnyCommand) -> None:
        self._writer.write(b"".join(command.message() for command in commands))

    async def _read(self) -> bool:
        async with asyncio.timeout(10):
            data = await self._reader.read(65_536)
        for message in self._stream.feed(data):
            reply = legacy.parse_reply(*message)
            if isinstance(reply, legacy.LegacyLeased):
                self.leased.append(reply)
            elif isinstance(reply, legacy.Notice):
                self.notices.append(reply)
            else:
                self._replies.append(reply)
        return bool(data)

    async def reply(self) -> Any:
        while not self._replies:
            if not await self._read():
                return None
        return self._replies.pop(0)

    async def call(self, command: legacy.AnyCommand) -> Any:
        self.tell(command)
        return await self.reply()

    async def events(self, count: int) -> list[legacy.LegacyLeased]:
        while len(self.leased) < count:
            assert await self._read(), "the connection has ended"
        found, self.leased = self.leased[:count], self.leased[count:]
        return found

    async def notice(self) -> legacy.Notice:
        while not self.notices:
            await self._read()
        return self.notices.pop(0)

    async def quiet(self, seconds: float) -> bool:
        """Whether nothing comes for a while."""
        try:
            async with asyncio.timeout(seconds):
                await self._read()
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._writer.close()


def broker_on(folder: Path, **flags: Any) -> Daemon:
    dotted = {name.replace("__", ".", 1): value for name, value in flags.items()}
    listeners = {f"server.{name}": "" for name in ("zmq", "pub", "http")}
    base = {"server.tcp": "127.0.0.1:0", "server.heartbeat_s": 0.2, "server.drain_s": 1.0}
    return Daemon(folder, load(None, {}, {**listeners, **base, **dotted}))


@pytest_asyncio.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = broker_on(tmp_path / "data", delivery__lease_s=0.6, delivery__ladder_ms=[50])
    await daemon.start()
    yield daemon
    await daemon.stop()


@pytest_asyncio.fixture
async def caller(daemon: Daemon) -> AsyncIterator[Caller]:
    caller = await Caller().open(daemon.ports["tcp"])
    yield caller
    caller.close()


async def test_ok_means_durable(tmp_path: Path) -> None:
    """What was answered with OK is on the disk at that moment: another process can read it."""
    daemon = broker_on(tmp_path / "data")
    await daemon.start()
    caller = await Caller().open(daemon.ports["tcp"])
    assert await caller.call(legacy.Create("orders", 1)) == legacy.Ok()
    caller.tell(*(legacy.LegacyPublish("orders", b"event %d" % number) for number in range(50)))
    replies = [await caller.reply() for _ in range(50)]
    assert replies == [legacy.Ok.stored(0, number) for number in range(50)]
    async with penstock.connect(f"{tmp_path / 'data'}?mode=ro") as bus:
        batches = [batch async for batch in bus.engine.read("orders", 0, 0, None)]
    found = [event.payload for batch in batches for event in batch]
    assert found == [b"event %d" % number for number in range(50)]
    caller.close()
    await daemon.stop()


async def test_events_are_leased_and_acked(daemon: Daemon, caller: Caller) -> None:
    caller.tell(*(legacy.LegacyPublish("orders.created", b"%d" % number) for number in range(5)))
    for _ in range(5):
        assert isinstance(await caller.reply(), legacy.Ok)
    assert await caller.call(
        legacy.LegacySubscribe("billing", "orders.*", 2)
    ) == legacy.Ok.subscribed(1)
    seen = []
    for _ in range(2):
        both = await caller.events(2)
        assert await caller.quiet(0.1), "no more than two are outstanding"
        for event in both:
            assert (event.topic, event.attempt, event.key) == ("orders.created", 1, None)
            seen.append(event.payload)
            assert await caller.call(legacy.Ack(event.tag)) == legacy.Ok()
    [last] = await caller.events(1)
    await caller.call(legacy.Ack(last.tag))
    assert [*seen, last.payload] == [b"0", b"1", b"2", b"3", b"4"]
    group = await daemon.engine.ask(penstock.engines.requests.DescribeGroup("billing"))
    assert group is not None


async def test_nack_brings_it_again(caller: Caller) -> None:
    await caller.call(legacy.LegacyPublish("orders", b"x"))
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    [first] = await caller.events(1)
    assert await caller.call(legacy.Nack(first.tag, 20, "busy")) == legacy.Ok()
    [second] = await caller.events(1)
    assert (second.payload, second.attempt, second.tag != first.tag) == (b"x", 2, True)
    assert await caller.call(legacy.Nack(second.tag, legacy.LADDER_DELAY, "")) == legacy.Ok()
    [third] = await caller.events(1)
    assert third.attempt == 3


async def test_a_late_ack_is_noticed(caller: Caller) -> None:
    """The lease runs from when the event is sent; then it comes again."""
    await caller.call(legacy.LegacyPublish("orders", b"x"))
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    [first] = await caller.events(1)
    [again] = await caller.events(1)
    assert again.attempt == 2
    assert await caller.call(legacy.Ack(first.tag)) == legacy.Ok()
    notice = await caller.notice()
    assert (notice.tag, notice.code) == (first.tag, "delivery.lease-expired")
    assert await caller.call(legacy.Ack(again.tag)) == legacy.Ok()


async def test_tags_are_settled_once(caller: Caller) -> None:
    await caller.call(legacy.LegacyPublish("orders", b"x"))
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    [event] = await caller.events(1)
    assert await caller.call(legacy.Ack(event.tag)) == legacy.Ok()
    for tag in (event.tag, 0, 2**64 - 1):
        assert (await caller.call(legacy.Ack(tag))).code == "delivery.not-leased"


async def test_what_a_client_held_returns_when_it_goes(daemon: Daemon, caller: Caller) -> None:
    await caller.call(legacy.LegacyPublish("orders", b"x"))
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    await caller.events(1)
    caller.close()
    other = await Caller().open(daemon.ports["tcp"])
    await other.call(legacy.LegacySubscribe("billing", "orders", 10))
    [event] = await other.events(1)
    assert event.payload == b"x"
    other.close()


async def test_replies_keep_the_order_of_commands(caller: Caller) -> None:
    """A ping behind a publish waits for the publish."""
    caller.tell(
        legacy.Ping(b"0"), legacy.LegacyPublish("orders", b"x"), legacy.Ping(b"1"), legacy.LegacyPublish("bad topic", b""),
        legacy.Ping(b"2"), legacy.Create("orders.made", 2), legacy.Ack(5), legacy.Ping(b"3"),
    )  # fmt: skip
    replies = [await caller.reply() for _ in range(8)]
    assert [
        reply.code if isinstance(reply, legacy.Error) else bytes(reply.body[:1])
        for reply in replies
    ] == [b"0", b"\0", b"1", "invalid.topic", b"2", b"", "delivery.not-leased", b"3"]


async def test_an_idle_client_stays(daemon: Daemon, caller: Caller) -> None:
    """Old commands know no heartbeats; the transport answers for the client."""
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    await asyncio.sleep(1.5)  # seven heartbeats
    async with penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}") as bus:
        await bus.publish("orders", b"late")
    assert (await caller.events(1))[0].payload == b"late"


async def test_with_new_clients_on_one_bus(daemon: Daemon, caller: Caller) -> None:
    async with penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}") as bus:
        await caller.call(legacy.LegacyPublish("orders", b"from the old one"))
        async with bus.subscribe("orders", group="new") as events:
            event = await events.get(5)
            assert event is not None
            assert event.payload == b"from the old one"
            await event.ack()
        await caller.call(legacy.LegacySubscribe("old", "orders.*", 10))
        await bus.publish("orders.created", {"id": 7}, key="k", headers={"a": "b"})
        [event] = await caller.events(1)
        assert (event.payload, event.key, event.topic) == (b'{"id":7}', b"k", "orders.created")


async def test_a_deleted_group_is_noticed(daemon: Daemon, caller: Caller) -> None:
    await caller.call(legacy.LegacySubscribe("billing", "orders", 10))
    await daemon.engine.ask(penstock.engines.requests.DeleteGroup("billing", confirm="DELETE"))
    notice = await caller.notice()
    assert (notice.tag, notice.code.split(".")[0]) == (0, "notfound")


async def test_a_token_is_wanted(tmp_path: Path) -> None:
    daemon = broker_on(tmp_path / "data", auth__admin_token="open sesame")
    await daemon.start()
    port = daemon.ports["tcp"]
    stranger = await Caller().open(port)
    assert (
        await stranger.call(legacy.LegacyPublish("orders", b"x"))
    ).code == "access.unauthenticated"
    assert await stranger.reply() is None
    liar = await Caller().open(port)
    assert (await liar.call(legacy.LegacyAuth("guess", "", ""))).code == "access.unauthenticated"
    friend = await Caller().open(port)
    assert await friend.call(legacy.LegacyAuth("open sesame", "", "till-3")) == legacy.Ok()
    assert isinstance(await friend.call(legacy.LegacyPublish("orders", b"x")), legacy.Ok)
    twice = await friend.call(legacy.LegacyAuth("open sesame", "", "till-3"))
    assert twice.code == "connection.protocol"
    for caller in (stranger, liar, friend):
        caller.close()
    await daemon.stop()


@pytest.mark.parametrize(
    "data", [b"\x09\0\0\0\0", b"\x04\x01\0\0\0\xff", b"\x04\xff\xff\xff\xff", b"\x06\0\0\0\0"]
)
async def test_nonsense_is_answered_and_ended(daemon: Daemon, caller: Caller, data: bytes) -> None:
    assert await caller.call(legacy.Ping(b"")) == legacy.Ok()
    caller._writer.write(data)
    assert (await caller.reply()).code == "connection.protocol"
    assert await caller.reply() is None


async def test_a_flood_of_commands_is_slowed_down(
    daemon: Daemon, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the limit is begun; of the rest one read waits, and what is behind stays in the socket."""
    monkeypatch.setattr(legacy_transport, "MAX_WAITING", 8)
    waiting: list[int] = []
    command = legacy_transport.OldClient.command

    def counted(self: Any, *message: Any) -> None:
        command(self, *message)
        waiting.append(len(self._slots))

    monkeypatch.setattr(legacy_transport.OldClient, "command", counted)
    caller.tell(*(legacy.LegacyPublish("orders", bytes(10_000)) for _ in range(500)))
    replies = [await caller.reply() for _ in range(500)]
    assert replies[-1] == legacy.Ok.stored(0, 499)
    assert max(waiting) == 8


async def test_a_flood_of_large_events_is_slowed_down(
    daemon: Daemon, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1, Q7: while the disk stalls, so many bytes are taken in and no more, as from other clients."""
    monkeypatch.setattr(legacy_transport, "UNANSWERED_BYTES", 4 * MIB)
    stalls = asyncio.Event()
    publish, begun = PublishHandler.publish, 0

    async def stalled(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        await stalls.wait()
        return await publish(*args)

    monkeypatch.setattr(PublishHandler, "publish", stalled)
    assert await caller.call(legacy.Ping(b"hi")) == legacy.Ok(b"hi")
    caller.tell(*(legacy.LegacyPublish("orders", bytes(MIB)) for _ in range(30)))
    assert await caller.quiet(0.5)
    assert begun == 5, "four fill it, and the fifth is what goes beyond"
    stalls.set()
    replies = [await caller.reply() for _ in range(30)]
    assert replies == [legacy.Ok.stored(0, offset) for offset in range(30)]


async def test_a_large_delivery_does_not_end_the_connection(daemon: Daemon, caller: Caller) -> None:
    """Q1: one delivery may be as large as it likes; a client that reads it is not cut off."""
    assert await caller.call(
        legacy.LegacySubscribe("billing", "orders", 0)
    ) == legacy.Ok.subscribed(1)
    async with penstock.connect(f"penstock://127.0.0.1:{daemon.ports['tcp']}") as bus:
        await bus.publish_many("orders", [bytes(MIB) for _ in range(60)])
    for leased in await caller.events(60):
        assert leased.attempt == 1
        caller.tell(legacy.Ack(leased.tag))
    for _ in range(60):
        assert await caller.reply() == legacy.Ok()


async def test_commands_that_come_in_one_read_are_all_carried_out(caller: Caller) -> None:
    """Q1: a client may send many before it reads; more than the broker works on at a time wait."""
    assert await caller.call(legacy.Ping(b"hi")) == legacy.Ok(b"hi")
    caller.tell(*(legacy.LegacyPublish("orders", b"%d" % number) for number in range(9_000)))
    replies = [await caller.reply() for _ in range(9_000)]
    assert replies == [legacy.Ok.stored(0, offset) for offset in range(9_000)]


async def test_a_large_payload_takes_the_fast_path(daemon: Daemon, caller: Caller) -> None:
    """Row T13: an old command has no parts, and its payload leaves the loop all the same."""
    large = bytes(300 << 10)
    assert isinstance(await caller.call(legacy.LegacyPublish("orders", large)), legacy.Ok)
    assert daemon.broker.fastpath.taken == 1
    caller.tell(legacy.LegacySubscribe("g", "orders", 0))
    [event] = await caller.events(1)
    assert event.payload == large

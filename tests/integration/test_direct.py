"""Direct delivery: a client that registers with subscriptions, over the bare protocol (row T4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.bench.process import memory_mb
from penstock.core.entry import GroupSpec
from penstock.engines.broker import engine_for
from penstock.engines.broker.tcp import TcpLink
from penstock.model.batch import EventBatch
from penstock.model.event import Identity
from penstock.model.settings_loader import load
from penstock.server.transports.tcp import HANDSHAKE_S
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import decode

DIRECT_FEED = 0
TOPIC = "orders.created"
DEADLINE_S = 30.0
# Longer than any wait here: nothing that is seen came because a session's time was up.
FLAGS: dict[str, Any] = {"admission__max_per_topic_queue": 20, "server__session_s": 120.0}


class Till:
    """A client that only registers, and gets what it registered for."""

    def __init__(self, broker: BrokerProcess, name: str = "till", **hello: Any) -> None:
        address = f"127.0.0.1:{broker.ports['tcp']}"
        settings = load(None, {}, {"client.heartbeat_s": 0.5})
        self.channel = engine_for("penstock", address, settings, Identity(), name).channel
        registered = {"subscriptions": ["orders.*"], "max_inflight": 10, **hello}
        self.channel.hello = msgspec.structs.replace(self.channel.hello, **registered)
        self.channel.on_push = self._pushed
        self._got: asyncio.Queue[tuple[say.Deliver, list[bytes]]] = asyncio.Queue()
        self.channel.held = lambda: []
        self.refused: list[say.Refused] = []
        self._in_hand: dict[int, say.Held] = {}

    def _pushed(self, frame: Frame) -> None:
        if frame.kind == Kind.DELIVER:
            batch = EventBatch.decode(frame.parts[0])
            payloads = [batch.event(at).payload for at in range(batch.count)]
            deliver = decode(frame.meta, say.Deliver)
            self._in_hand[deliver.delivery] = say.Held(
                deliver.delivery, batch.topic, batch.partition, batch.base_offset, batch.count,
                deliver.attempt, batch.count,
            )  # fmt: skip
            self._got.put_nowait((deliver, payloads))
        elif frame.kind == Kind.REFUSED:
            self.refused.append(decode(frame.meta, say.Refused))

    def hold(self, *delivers: say.Deliver) -> None:
        """Name these, and no others, when it comes back to a broker."""
        held = [self._in_hand[each.delivery] for each in delivers]
        self.channel.held = lambda: [each.delivery for each in held]
        self.channel.hello = msgspec.structs.replace(self.channel.hello, held=held)

    def lose_welcomes(self, count: int) -> None:
        """The next connections break when the broker welcomes it."""
        channel: Any = self.channel
        received, left = channel._received, [None] * count

        def cut(frame: Frame) -> None:
            if frame.kind != Kind.WELCOME or not left:
                received(frame)
                return
            left.pop()
            channel._link.close()
            channel._lost("the cable was cut")

        channel._received = cut

    @property
    def welcome(self) -> say.Welcome:
        assert self.channel.welcome is not None
        return self.channel.welcome

    async def __aenter__(self) -> Till:
        await self.channel.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def get(self) -> tuple[say.Deliver, list[bytes]]:
        async with asyncio.timeout(DEADLINE_S):
            return await self._got.get()

    async def ack(self, deliver: say.Deliver, count: int) -> None:
        settlement = say.Settlement(deliver.delivery, count, [0, count])
        self.channel.settle([settlement])
        await self.channel.flush()


class Visit:
    """One connection, and the frames that came over it."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._link = TcpLink("127.0.0.1", broker.ports["tcp"])
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def open(self) -> None:
        await self._link.open(self._frames.put_nowait, lambda _: None)

    async def greet(self, hello: say.Hello) -> say.Welcome:
        await self.open()
        self.send(Kind.HELLO, hello)
        welcome: say.Welcome = decode((await self.frame(Kind.WELCOME)).meta, say.Welcome)
        return welcome

    def send(self, kind: Kind, message: say.Message, request: int = 0) -> None:
        self._link.send(Frame(kind, request, say.encode(message)))

    async def frame(self, kind: Kind) -> Frame:
        async with asyncio.timeout(DEADLINE_S):
            frame = await self._frames.get()
        assert frame.kind == kind, frame
        return frame

    def listen(self, on: bool) -> None:
        transport = self._link._transport
        assert transport is not None
        transport.resume_reading() if on else transport.pause_reading()

    def close(self) -> None:
        self._link.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data").start(**FLAGS) as running:
        yield running


async def lag(bus: penstock.Bus) -> int:
    return int((await bus.groups.info("direct.till")).lag)


async def test_a_registered_client_is_served(broker: BrokerProcess) -> None:
    """T4: feed 0, a group of its own that is known by its name, from the moment it registered."""
    async with penstock.connect(broker.url()) as bus:
        await bus.publish(TOPIC, b"before")
        async with Till(broker) as till:
            await bus.publish(TOPIC, b"one")
            await bus.publish("mails.sent", b"not wanted")
            await bus.publish(TOPIC, b"two")
            deliver, payloads = await till.get()
            assert (deliver.feed, deliver.attempt, payloads) == (DIRECT_FEED, 1, [b"one"])
            await till.ack(deliver, 1)
            deliver, payloads = await till.get()
            assert payloads == [b"two"]
            await till.ack(deliver, 1)
            assert await lag(bus) == 0


async def test_it_goes_on_after_the_broker_was_killed(broker: BrokerProcess) -> None:
    """T4, T5: what was acked does not come again; what was not, and what came meanwhile, does."""
    async with Till(broker) as till:
        async with penstock.connect(broker.url()) as bus:
            await bus.publish(TOPIC, b"one")
            deliver, _ = await till.get()
            await till.ack(deliver, 1)
            await bus.publish(TOPIC, b"two")
            await till.get()
            session = till.welcome.session
        broker.kill()
        broker.start(**FLAGS)
        async with penstock.connect(broker.url()) as bus:
            await bus.publish(TOPIC, b"three")
            found: dict[bytes, int] = {}
            while found.keys() != {b"two", b"three"}:
                deliver, payloads = await till.get()
                found |= dict.fromkeys(payloads, deliver.attempt)
                await till.ack(deliver, len(payloads))
            assert found == {b"two": 1, b"three": 1}, "nothing was said to be handed out"
            assert await lag(bus) == 0
        assert till.welcome.session == session


@pytest.mark.parametrize("welcomes", [1, 2])
async def test_it_keeps_what_it_holds_when_the_broker_was_killed(
    broker: BrokerProcess, welcomes: int
) -> None:
    """T4, T5: what it names stays leased to it, and the rest comes again at once.

    Also when the first Welcome is lost with its connection: the second says the same.
    """
    async with Till(broker) as till, penstock.connect(broker.url()) as bus:
        got: dict[bytes, say.Deliver] = {}
        for payload in (b"done", b"kept", b"lost"):
            await bus.publish(TOPIC, payload)
            got[payload], [found] = await till.get()
            assert found == payload
        await till.ack(got[b"done"], 1)
        till.hold(got[b"kept"])
        till.lose_welcomes(welcomes - 1)
        broker.kill()
        broker.start(**FLAGS)
        again, payloads = await till.get()
        assert payloads == [b"lost"], "a delivery that was not named"
        assert again.attempt == 1, "it was not said to be handed out"
        assert again.delivery > got[b"kept"].delivery
        assert (till.welcome.resumed, till.welcome.lost) == (False, [])
        assert till.welcome.adopted == {got[b"kept"].delivery: [0]}
        assert await lag(bus) == 2
        await till.ack(got[b"kept"], 1)
        assert await lag(bus) == 1, "it was still leased to the client"
        await till.ack(again, 1)
        assert await lag(bus) == 0
        assert till.refused == []


async def test_a_welcome_that_did_not_arrive_is_said_again(broker: BrokerProcess) -> None:
    """T4: a client that does not know of the restart would wait for feeds that are gone."""
    hello = say.Hello("till", subscriptions=["orders.*"])
    first = Visit(broker)
    session = (await first.greet(hello)).session
    async with penstock.connect(broker.url()) as bus:
        await bus.publish(TOPIC, b"one")
    deliver = decode((await first.frame(Kind.DELIVER)).meta, say.Deliver)
    broker.kill()
    broker.start(**FLAGS)
    number = deliver.delivery
    held = [say.Held(number, TOPIC, 0, 0, 1, deliver.attempt, 1)]
    hello = msgspec.structs.replace(hello, session=session, deliveries=[number], held=held)
    for _ in range(3):  # the client hears the last of these only
        visit = Visit(broker)
        welcome = await visit.greet(hello)
        assert (welcome.session, welcome.resumed) == (session, False)
        assert welcome.adopted == {number: [0]}
        visit.close()
    visit = Visit(broker)
    await visit.greet(hello)
    visit.send(Kind.SETTLE, say.Settle(1, [say.Settlement(number, 1, [0, 1])]))
    visit.send(Kind.FLUSH, say.Beat(), 1)
    await visit.frame(Kind.RESULT)
    visit.close()
    visit = Visit(broker)
    assert (await visit.greet(msgspec.structs.replace(hello, held=[]))).resumed
    visit.close()
    async with penstock.connect(broker.url()) as bus:
        assert await lag(bus) == 0


async def test_a_delivery_that_was_settled_is_not_adopted(broker: BrokerProcess) -> None:
    """T4: and what names no delivery at all harms nobody."""
    async with Till(broker) as till, penstock.connect(broker.url()) as bus:
        await bus.publish(TOPIC, b"done")
        done, _ = await till.get()
        await till.ack(done, 1)
        till.hold(done)
        held = till.channel.hello.held
        for start, count in ((-5, -1), (0, 0), (1 << 62, 1 << 62), (0, 1_000_000)):
            held.append(say.Held(7, TOPIC, 0, start, count, 1, -1))
        held.append(say.Held(8, "no.such", 99, 0, 1, 1, 0))
        broker.kill()
        broker.start(**FLAGS)
        await bus.publish(TOPIC, b"next")
        deliver, payloads = await till.get()
        assert (deliver.attempt, payloads) == (1, [b"next"])
        assert till.welcome.adopted == {}
        assert done.delivery in till.welcome.lost


async def test_a_client_that_was_restarted_with_its_broker(broker: BrokerProcess) -> None:
    """T4: it comes back under its name, with no session and nothing in its hands."""
    async with Till(broker) as till, penstock.connect(broker.url()) as bus:
        await bus.publish(TOPIC, b"one")
        await till.get()
        broker.kill()
    broker.start(**FLAGS)
    async with Till(broker) as till:
        deliver, payloads = await till.get()
        assert (deliver.attempt, payloads) == (1, [b"one"])


async def test_a_feed_that_was_stopped_stays_so_in_its_session(broker: BrokerProcess) -> None:
    """T4: a client that was told twice that it gets nothing is sent nothing; a new session is served."""
    hello = say.Hello("till", subscriptions=["orders.*"])
    visit = Visit(broker)
    session = (await visit.greet(hello)).session
    async with penstock.connect(broker.url()) as bus:
        await bus.groups.delete("direct.till", confirm="DELETE")
        await visit.frame(Kind.STOPPED)
        visit.close()
        visit = Visit(broker)
        assert (await visit.greet(msgspec.structs.replace(hello, session=session))).resumed
        await visit.frame(Kind.STOPPED)
        assert "direct.till" not in {group.name for group in await bus.groups.list()}
        visit.close()
        visit = Visit(broker)
        await visit.greet(hello)
        await bus.publish(TOPIC, b"one")
        await visit.frame(Kind.DELIVER)
        visit.close()


async def test_a_hello_that_nobody_could_serve_is_refused(broker: BrokerProcess) -> None:
    """T4: a client is not welcomed to wait for ever."""
    visit = Visit(broker)
    await visit.open()
    visit.send(Kind.HELLO, say.Hello("till", subscriptions=["orders.*"], max_inflight=-1))
    fault: say.Fault = decode((await visit.frame(Kind.FAULT)).meta, say.Fault)
    assert (fault.code, "max_inflight" in fault.message) == ("invalid", True)
    visit.close()


async def test_a_hello_that_cannot_be_read_may_be_said_again(broker: BrokerProcess) -> None:
    """Q1: it costs an answer, over TCP as over ZeroMQ, and no ten seconds of silence."""
    visit = Visit(broker)
    await visit.open()
    visit.send(Kind.HELLO, say.Beat(), 1)
    assert (await visit.frame(Kind.FAULT)).request == 1
    began = time.monotonic()
    visit.send(Kind.HELLO, say.Hello("till"))
    await visit.frame(Kind.WELCOME)
    assert time.monotonic() - began < HANDSHAKE_S / 2
    visit.close()


async def test_a_client_that_cannot_ack(broker: BrokerProcess) -> None:
    """T4: what was sent to it counts as done; it comes once."""
    async with penstock.connect(broker.url()) as bus:
        async with Till(broker, supports_ack=False) as till:
            for number in range(30):  # three times its max_inflight
                await bus.publish(TOPIC, b"%d" % number)
                _, payloads = await till.get()
                assert payloads == [b"%d" % number]
            await bus.flush()
            assert await lag(bus) == 0
        async with Till(broker) as till:
            await bus.publish(TOPIC, b"last")
            _, payloads = await till.get()
            assert payloads == [b"last"]


async def test_large_events_for_a_client_that_does_not_read_wait_in_the_log(tmp_path: Path) -> None:
    """Q7: its credit counts events, of whatever size; the broker's memory does not."""
    events, payload = 60, bytes(1 << 20)
    with BrokerProcess(tmp_path / "data").start(server__heartbeat_s=60) as broker:
        visit = Visit(broker)
        await visit.greet(say.Hello("till", subscriptions=["orders.*"], max_inflight=2 * events))
        visit.listen(False)
        async with penstock.connect(broker.url()) as bus:
            for _ in range(events):
                await bus.publish(TOPIC, payload)
            waiting = await bus.groups.info("direct.till")
            assert waiting.lag == events
            assert waiting.outstanding < events / 2, "a send buffer, and what the sockets hold"
            visit.listen(True)
            for _ in range(events):
                await visit.frame(Kind.DELIVER)
        visit.close()


@pytest.mark.parametrize(
    ("behind", "reads"), [(False, True), (True, True), (True, False)], ids=["live", "late", "deaf"]
)
async def test_large_events_that_nobody_settles_do_not_stay_in_memory(
    tmp_path: Path, behind: bool, reads: bool
) -> None:
    """Q7, T11: credit for them all, and the broker keeps offsets; the events lie in the log."""
    events, payload = 256, bytes(1_000_000)
    flags = {"server__heartbeat_s": 60, "limits__cache_bytes": 8 << 20}
    with BrokerProcess(tmp_path / "data").start(**flags) as broker:
        before_mb = memory_mb(broker.pid)
        visit = Visit(broker)
        await visit.greet(say.Hello("till"))
        async with penstock.connect(broker.url()) as bus:
            for number in range(events + 1):
                if number == (events if behind else 0):
                    spec = GroupSpec(("orders.*",))
                    wish = say.Subscribe(1, "g", spec, "till", 2 * events)
                    visit.send(Kind.SUBSCRIBE, wish, request=1)
                    await visit.frame(Kind.RESULT)
                    visit.listen(reads)
                if number < events:
                    await bus.publish(TOPIC, payload)
            got = 0
            while reads and got < events:
                got += EventBatch.decode((await visit.frame(Kind.DELIVER)).parts[0]).count
            async with asyncio.timeout(DEADLINE_S):
                while (await bus.groups.info("g")).outstanding < events:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0 if reads else 0.5)  # what would be read is read by then
        assert memory_mb(broker.pid) - before_mb < events / 2, "the peak, of 256 MB"
        visit.close()


async def test_what_a_client_came_back_without_comes_again_in_order(broker: BrokerProcess) -> None:
    """T4, Y3: what it names stays leased to it; only what it said it was at costs an attempt."""
    hello = say.Hello("till", subscriptions=["orders.*"], max_inflight=20)
    visit = Visit(broker)
    session = (await visit.greet(hello)).session
    async with penstock.connect(broker.url()) as bus:
        numbers = []
        for name in (b"kept", b"at it", b"lost", b"lost too"):
            await bus.publish(TOPIC, name)
            numbers.append(decode((await visit.frame(Kind.DELIVER)).meta, say.Deliver).delivery)
        visit.send(Kind.SETTLE, say.Settle(1, [say.Settlement(each, 1) for each in numbers[:2]]))
        visit.send(Kind.FLUSH, say.Beat(), 1)
        await visit.frame(Kind.RESULT)
        visit.close()
        await bus.publish(TOPIC, b"came meanwhile")
        visit = Visit(broker)
        back = msgspec.structs.replace(hello, session=session, deliveries=numbers[:1])
        assert (await visit.greet(back)).resumed
        found = []
        while len(found) < 4:
            frame = await visit.frame(Kind.DELIVER)
            deliver, batch = decode(frame.meta, say.Deliver), EventBatch.decode(frame.parts[0])
            found += [(payload, deliver.attempt) for payload in batch.payloads()]
            assert deliver.delivery > numbers[-1]
            numbers.append(deliver.delivery)
        assert found == [(b"at it", 2), (b"lost", 1), (b"lost too", 1), (b"came meanwhile", 1)]
        acks = [say.Settlement(each, 1, [0, 1]) for each in (numbers[0], *numbers[4:])]
        visit.send(Kind.SETTLE, say.Settle(2, acks))
        visit.send(Kind.FLUSH, say.Beat(), 2)
        await visit.frame(Kind.RESULT)
        assert await lag(bus) == 0
    visit.close()


async def test_a_client_too_far_behind_stops_its_publishers(broker: BrokerProcess) -> None:
    """T4, T11: its queue of one topic is bounded; an ack makes room."""
    async with Till(broker, max_inflight=5) as till, penstock.connect(broker.url()) as bus:
        with pytest.raises(penstock.errors.Rejected) as refused:
            for number in range(100):
                await bus.publish(TOPIC, b"%d" % number)
        assert refused.value.data["limit"] == "max_per_topic_queue"
        taken = number
        assert 20 <= taken <= 25, "20 wait, and up to 5 are in its hands"
        while await lag(bus):
            deliver, payloads = await till.get()
            await till.ack(deliver, len(payloads))
        await bus.publish(TOPIC, b"again")

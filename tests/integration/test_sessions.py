"""Sessions: what a client keeps when its connection breaks, or the broker does (T4, T5)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock import errors
from penstock.testing.broker_process import BrokerProcess
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Beat, encode

DEADLINE_S = 20.0
PATIENT = penstock.Retry(ladder_ms=(0,), max_attempts=50)


class Cable:
    """A TCP proxy that can be cut and plugged in again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.plugged = True
        self.connections = 0
        self.swallows = False
        """Nothing that the broker says arrives."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.plugged:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        with contextlib.suppress(asyncio.CancelledError):  # the loop of the test is ending
            await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer, answers=True))

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if answers and self.swallows:
                    continue
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        self.plugged = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def plug(self) -> None:
        self.plugged = True

    async def stop(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data").start(server__session_s=8.0, server__lease_grace_s=8.0) as broker:
        yield broker


@pytest_asyncio.fixture
async def cable(broker: BrokerProcess) -> AsyncIterator[Cable]:
    cable = Cable(broker.ports["tcp"])
    await cable.start()
    yield cable
    await cable.stop()


async def lag(bus: penstock.Bus, group: str) -> int:
    await bus.flush()
    return int((await bus.groups.info(group)).lag)


async def take(sub: penstock.Subscription, count: int) -> list[penstock.Event]:
    events = []
    for _ in range(count):
        event = await sub.get(timeout_s=DEADLINE_S)
        assert event is not None
        events.append(event)
    return events


async def test_a_session_goes_on_over_a_new_connection_with_its_leases(
    broker: BrokerProcess, cable: Cable
) -> None:
    async with penstock.connect(f"penstock://127.0.0.1:{cable.port}") as bus:
        await bus.publish_many("orders.created", [b"%d" % n for n in range(10)])
        async with (
            bus.subscribe("orders.*", group="g", retry=PATIENT) as sub,
            penstock.connect(broker.url()) as other_bus,
            other_bus.subscribe("orders.*", group="g", retry=PATIENT) as other,
        ):
            events = await take(sub, 5)
            before = cable.connections
            cable.cut()
            await events[0].ack()
            await asyncio.sleep(0.3)
            cable.plug()
            for event in events[1:]:
                await event.ack()
            handed = {event.offset for event in events}
            rest = []
            while len(rest) + len(events) < 10:
                event = await sub.get(timeout_s=0.2) or await other.get(timeout_s=0.2)
                if event is not None:
                    await event.ack()
                    rest.append(event)
            await bus.flush()
            assert cable.connections > before
            assert not handed & {event.offset for event in rest}
            assert {event.attempt for event in rest} == {1}
            assert await lag(other_bus, "g") == 0


async def test_a_publish_while_the_connection_is_down_succeeds_once_it_is_back(
    broker: BrokerProcess, cable: Cable
) -> None:
    async with penstock.connect(f"penstock://127.0.0.1:{cable.port}") as bus:
        await bus.publish("a.b", b"0")
        numbers = iter(range(1, 300))

        async def produce() -> None:
            for number in numbers:
                await bus.publish("a.b", b"%d" % number)

        producing = asyncio.gather(*(produce() for _ in range(4)))
        for _ in range(5):
            await asyncio.sleep(0.05)
            cable.cut()
            await asyncio.sleep(0.05)
            cable.plug()
        await producing
        stored = [int(event.payload) async for event in bus.replay("a.b")]
        assert sorted(stored) == list(range(300))


@pytest.mark.parametrize("megabytes", [1, 40], ids=["small", "more-than-is-kept"])
async def test_a_log_goes_on_where_it_was_when_an_answer_was_lost(
    broker: BrokerProcess, cable: Cable, megabytes: int
) -> None:
    """Q6, T4: the broker's reader is past a batch that never arrived; the commit must not cover it."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with (
        penstock.connect(broker.url()) as bus,
        penstock.connect(url) as away,
        away.subscribe("orders.*", group="g", mode="log") as sub,
    ):
        await bus.publish("orders.created", b"0", codec="raw")
        assert [event.payload for event in await take(sub, 1)] == [b"0"]
        coming = asyncio.create_task(take(sub, megabytes + 1))
        await asyncio.sleep(0.2)  # the fetch is there
        cable.swallows = True
        large = [b"%d" % number + os.urandom(1 << 20) for number in range(1, megabytes + 1)]
        await bus.publish_many("orders.created", large, codec="raw")
        await asyncio.sleep(0.5)  # the answer is on its way
        await bus.publish("orders.created", b"last", codec="raw")
        cable.cut()
        cable.swallows = False
        cable.plug()
        assert [event.payload for event in await coming] == [*large, b"last"]
        await sub.commit()
        assert await lag(bus, "g") == 0


async def test_nothing_hangs_when_no_broker_comes_back(cable: Cable) -> None:
    url = f"penstock://127.0.0.1:{cable.port}"
    async with penstock.connect(url, client__deadline_s=1.0) as bus:
        await bus.publish("a.b", b"x")
        cable.cut()
        await asyncio.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(errors.ConnectionFailed) as raised:
            await bus.publish("a.b", b"y")
        assert time.monotonic() - started < 3.0
        assert raised.value.outcome in ("not sent", "unknown")
        cable.plug()


async def test_nobody_waits_longer_than_its_deadline_however_many_wait(cable: Cable) -> None:
    """T4: also those for whom there was no place in a frame yet."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with penstock.connect(url, client__deadline_s=1.0) as bus:
        await bus.publish("a.b", b"x")
        cable.cut()
        await asyncio.sleep(0.1)

        async def one() -> float:
            started = time.monotonic()
            with pytest.raises(errors.BrokerUnreachable) as raised:
                await bus.publish("a.b", b"y")
            assert raised.value.outcome == "not sent"
            return time.monotonic() - started

        waiting = []
        for _ in range(200):
            waiting.append(asyncio.create_task(one()))
            for _ in range(5):
                await asyncio.sleep(0)
        assert max(await asyncio.gather(*waiting)) < 1.6
        cable.plug()


async def test_rejects_that_are_called_durable_are_dead_letters(broker: BrokerProcess) -> None:
    """T5, T8: the client reports nothing again that a Beat has confirmed."""
    async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
        await bus.publish_many("orders.created", [b"%d" % n + bytes(2_000) for n in range(50)])
        async with bus.subscribe("orders.*", group="g", max_inflight=50, lease_s=60) as sub:
            events = await take(sub, 50)
            await bus.flush()
            for event in events:
                await event.reject("poison")
            await asyncio.sleep(0)  # the report goes out
            channel: Any = bus.engine.channel
            channel._link.send(Frame(Kind.HEARTBEAT, 0, encode(Beat())))
            async with asyncio.timeout(DEADLINE_S):
                while channel._settles:
                    await asyncio.sleep(0)
            broker.kill()
            await asyncio.to_thread(broker.start, server__session_s=8.0)
            assert len(await bus.dead_letters.list(consumer="g")) == 50
            assert await sub.get(timeout_s=0.5) is None


async def test_leases_survive_a_broker_that_was_killed(broker: BrokerProcess) -> None:
    """T4: resumption after a restart, from the journal; the holder goes on, nobody else is served."""
    async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
        await bus.publish_many("orders.created", [b"%d" % n for n in range(6)])
        async with bus.subscribe("orders.*", group="g", retry=PATIENT) as sub:
            events = await take(sub, 4)
            await events[0].ack()
            await bus.flush()
            broker.kill()
            await events[1].ack()
            await asyncio.to_thread(broker.start, server__session_s=30.0)
            async with (
                penstock.connect(broker.url()) as other_bus,
                other_bus.subscribe("orders.*", group="g", retry=PATIENT) as other,
            ):
                await bus.topics.list()  # the first call that gets through: we are back
                await asyncio.sleep(0.3)
                for event in events[2:]:
                    await event.ack()
                rest = await take(sub, 2)
                for event in rest:
                    await event.ack()
                assert await other.get(timeout_s=0.5) is None
                assert [event.attempt for event in rest] == [1, 1]
                assert await lag(bus, "g") == 0


@pytest.mark.parametrize("stop", ["kill", "stop"])
@pytest.mark.parametrize("order", ["any", "key", "single"])
async def test_leases_outlive_the_broker_however_it_ends(
    tmp_path: Path, order: str, stop: str
) -> None:
    """B17: the holder goes on with its attempt; what is behind it waits for it, or is another's."""
    settings = {"server__session_s": 60.0, "server__drain_s": 0.2}
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
            await bus.publish_many("orders.created", [b"0", b"1"], keys=["k", "k"])
            options: dict[str, Any] = {"group": "g", "order": order, "lease_s": 60}
            async with bus.subscribe("orders.*", retry=penstock.Retry.none(), **options) as sub:
                [held] = await take(sub, 1)
                await asyncio.to_thread(getattr(broker, stop))
                await asyncio.to_thread(broker.start, **settings)
                await bus.topics.list()  # we are back
                if order == "key":
                    assert await sub.get(timeout_s=1.0) is None
                await held.ack()
                [following] = await take(sub, 1)
                assert (following.payload, following.attempt) == (b"1", 1)
                await following.ack()
                assert await sub.get(timeout_s=0.3) is None
                assert await lag(bus, "g") == 0
                assert await bus.dead_letters.list() == []


async def test_a_client_that_was_busy_while_its_broker_stopped_keeps_what_it_has(
    tmp_path: Path,
) -> None:
    """B17: its loop stood still all the while, so the broker heard nothing of the event."""
    settings = {"server__session_s": 60.0, "server__drain_s": 0.2}
    with BrokerProcess(tmp_path / "data").start(**settings) as broker:
        async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
            await bus.publish("orders.created", b"0")
            async with bus.subscribe("orders.*", group="g", retry=penstock.Retry.none()) as sub:
                [held] = await take(sub, 1)
                broker.stop()
                broker.start(**settings)
                assert await sub.get(timeout_s=1.0) is None
                await held.ack()
                assert await lag(bus, "g") == 0
                assert await bus.dead_letters.list() == []


async def lose_on_the_way(
    broker: BrokerProcess, cable: Cable, bus: penstock.Bus, payloads: list[bytes]
) -> None:
    """Kill the broker when events are leased, durably, and have not arrived; start it again."""
    cable.swallows = True
    await bus.publish_many("orders.created", payloads)
    await asyncio.sleep(0.3)
    await asyncio.to_thread(broker.kill)
    cable.cut()
    cable.swallows = False
    cable.plug()
    await asyncio.to_thread(broker.start, server__session_s=60.0)


async def test_what_never_arrived_comes_at_once_after_a_kill(
    broker: BrokerProcess, cable: Cable
) -> None:
    """T4, T5, T6: the lease is in the journal, its consumer is back and does not hold it."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with (
        penstock.connect(broker.url(), client__deadline_s=60.0) as bus,
        penstock.connect(url, client__deadline_s=60.0) as away,
        away.subscribe("orders.*", group="g", retry=PATIENT, lease_s=60) as sub,
    ):
        await bus.publish_many("orders.created", [b"0", b"1"])
        held, settled = await take(sub, 2)
        await settled.ack()
        await away.flush()
        await lose_on_the_way(broker, cable, bus, [b"2", b"3"])
        events = await take(sub, 2)
        assert [(event.payload, event.attempt) for event in events] == [(b"2", 1), (b"3", 1)]
        for event in (held, *events):
            await event.ack()
        await away.flush()
        assert await lag(bus, "g") == 0


async def test_with_one_attempt_what_never_arrived_comes_again(
    broker: BrokerProcess, cable: Cable
) -> None:
    """T5, B21: an attempt counts when the event was handed out; nothing is lost, and nothing waits."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with (
        penstock.connect(broker.url(), client__deadline_s=60.0) as bus,
        penstock.connect(url, client__deadline_s=60.0) as away,
        away.subscribe("orders.*", group="g", retry=penstock.Retry.none(), lease_s=60) as sub,
    ):
        await bus.publish("orders.created", b"0")
        (event,) = await take(sub, 1)
        await event.ack()
        await away.flush()
        await lose_on_the_way(broker, cable, bus, [b"1"])
        (event,) = await take(sub, 1)
        assert (event.payload, event.attempt) == (b"1", 1)
        await event.ack()
        await away.flush()
        assert await lag(bus, "g") == 0


async def test_what_was_settled_in_vain_comes_again_at_once_as_another_attempt(
    broker: BrokerProcess, cable: Cable
) -> None:
    """T4, T5: the broker died before it heard of the ack; the event was in somebody's hands."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with penstock.connect(url, client__deadline_s=60.0) as bus:
        await bus.publish("orders.created", b"0")
        async with bus.subscribe("orders.*", group="g", retry=PATIENT, lease_s=60) as sub:
            (event,) = await take(sub, 1)
            await asyncio.sleep(0.2)  # the broker hears that it was handed out
            cable.cut()
            await event.ack()
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start, server__session_s=60.0)
            cable.plug()
            (again,) = await take(sub, 1)
            assert (again.payload, again.attempt) == (b"0", 2)
            await again.ack()


async def test_who_lost_its_place_does_not_take_it_back_after_a_restart(
    broker: BrokerProcess, cable: Cable
) -> None:
    """T4: a consumer that another one of its name replaced has ended, whatever the broker does."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with (
        penstock.connect(broker.url(), client__deadline_s=60.0) as first,
        penstock.connect(url, client__deadline_s=60.0) as second,
        first.subscribe("orders.*", group="g", retry=PATIENT, member="m") as ended,
        second.subscribe("orders.*", group="g", retry=PATIENT, member="m") as sub,
    ):
        with pytest.raises(errors.Fenced):
            await ended.get(timeout_s=DEADLINE_S)
        await first.publish("orders.created", b"0")
        (event,) = await take(sub, 1)
        await asyncio.to_thread(broker.kill)
        cable.cut()
        await asyncio.to_thread(broker.start, server__session_s=60.0)
        await first.topics.list()  # the first is back before the second
        await asyncio.sleep(0.3)
        cable.plug()
        await second.topics.list()
        await event.ack()
        await second.flush()
        assert await lag(second, "g") == 0


async def test_what_was_returned_waits_for_nobody_after_a_restart(broker: BrokerProcess) -> None:
    """T4: only what somebody held is kept for him, and somebody else's session is no reason."""
    bus = penstock.connect(broker.url())
    await bus.open()
    async with penstock.connect(broker.url()) as other, other.subscribe("else.#", group="other"):
        await bus.publish_many("orders.a", [b"0", b"1", b"2"])
        async with bus.subscribe("orders.a", group="g", max_inflight=2) as sub:
            await sub.get(timeout_s=DEADLINE_S)
        await bus.close()
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(broker.start)  # keeps sessions for 30 s
        began = time.monotonic()
        async with (
            penstock.connect(broker.url()) as again,
            again.subscribe("orders.a", group="g") as sub,
        ):
            back = {}
            for event in await take(sub, 3):
                back[event.payload] = event.attempt
                await event.ack()
    assert back == {b"0": 2, b"1": 1, b"2": 1}
    assert time.monotonic() - began < DEADLINE_S / 2


async def test_what_a_dead_consumer_held_goes_to_another_after_its_session(
    broker: BrokerProcess, cable: Cable
) -> None:
    bus = await penstock.connect(f"penstock://127.0.0.1:{cable.port}").open()
    await bus.publish_many("orders.created", [b"1", b"2"])
    sub = await bus.subscribe("orders.*", group="g", retry=PATIENT, lease_s=600).open()
    await take(sub, 1)
    await asyncio.sleep(0.2)  # the broker hears that one was handed out
    cable.cut()  # and never back
    async with (
        penstock.connect(broker.url()) as other_bus,
        other_bus.subscribe("orders.*", group="g", retry=PATIENT) as other,
    ):
        events = await take(other, 2)
        assert sorted((event.payload, event.attempt) for event in events) == [(b"1", 2), (b"2", 1)]
        for event in events:
            await event.ack()
    await bus.engine.channel.close()


@pytest.mark.parametrize("bounded", [True, False], ids=["penstock", "of-another-make"])
async def test_transactions_happen_once_however_many_are_under_way(
    broker: BrokerProcess, cable: Cable, bounded: bool
) -> None:
    """Q13, T4: a client repeats them after kill -9, and each is recognised or refused."""
    url = f"penstock://127.0.0.1:{cable.port}"
    async with penstock.connect(url, client__deadline_s=30.0) as bus:
        await bus.publish("a.b", -1)
        engine: Any = bus.engine
        if not bounded:
            engine._transactions = asyncio.Semaphore(1_000)
        cable.swallows = True

        async def one(number: int) -> None:
            async with bus.transaction() as transaction:
                transaction.publish("a.b", number)

        tasks = []
        for number in range(400):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0.002)  # the broker has answered most, and refuses none
        await asyncio.sleep(0.5)
        await asyncio.to_thread(broker.kill)
        cable.cut()
        cable.swallows = False
        cable.plug()
        await asyncio.to_thread(broker.start, server__session_s=8.0)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        stored = [event.value() async for event in bus.replay("a.b")]
        assert len(stored) == len(set(stored)), "something happened twice"
        assert {number for number in range(400) if answers[number] is None} <= set(stored)
        refused = [error for error in answers if error is not None]
        if bounded:
            assert refused == []
        assert {type(error) for error in refused} <= {errors.ConnectionLost, errors.Deferred}


async def test_publishes_are_stored_once_however_often_the_broker_is_killed(
    broker: BrokerProcess,
) -> None:
    """T4: a publish that is sent again after kill -9 is recognised by its sequence."""
    url = broker.url()
    confirmed: list[int] = []
    async with penstock.connect(url, client__deadline_s=60.0) as bus:
        await bus.publish("a.b", b"0")
        numbers = iter(range(1, 2_000))
        stop = asyncio.Event()

        async def produce() -> None:
            for number in numbers:
                if stop.is_set():
                    return
                await bus.publish("a.b", b"%d" % number)
                confirmed.append(number)

        producing = asyncio.gather(*(produce() for _ in range(8)))
        for _ in range(3):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start, server__session_s=8.0)
        stop.set()
        await producing
        stored = [int(event.payload) async for event in bus.replay("a.b")]
        assert len(stored) == len(set(stored)), "something was stored twice"
        assert set(confirmed) <= set(stored)
        assert len(confirmed) > 50

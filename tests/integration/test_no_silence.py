"""Nobody waits for ever for something that cannot come: publishes, handlers, dead letters (T4, T8, Q7)."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.stream import encode_frame, encode_message

DEADLINE_S = 30.0
TOPIC = "orders.created"


async def test_what_cannot_be_sent_fails_alone(broker: BrokerProcess) -> None:
    """A number that fits into no message fails at once, and its neighbours in the frame are stored."""
    async with penstock.connect(broker.url()) as bus, asyncio.timeout(DEADLINE_S):
        await bus.topics.create(TOPIC)
        good, bad, last = await asyncio.gather(
            bus.publish(TOPIC, b"1"),
            bus.publish(TOPIC, b"2", partition=2**70),
            bus.publish(TOPIC, b"3"),
            return_exceptions=True,
        )
        assert isinstance(bad, errors.InvalidInput)
        assert (good.offset, last.offset) == (0, 1)


@pytest.mark.parametrize(
    "odd",
    [
        {"ttl_s": 1e300}, {"ttl_s": math.inf}, {"ttl_s": math.nan}, {"delay_s": 1e17},
        {"delay_s": math.nan}, {"event_time": 2**70},
    ],
    ids=str,
)  # fmt: skip
async def test_times_beyond_all_measure_are_refused(odd: dict) -> None:
    async with penstock.connect("mem:") as bus:
        with pytest.raises(errors.InvalidInput):
            await bus.publish(TOPIC, b"1", **odd)


async def test_a_handler_whose_group_is_deleted_says_so(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with penstock.connect(broker.url()) as bus, asyncio.timeout(DEADLINE_S):

        @bus.handler("orders.*", group="billing")
        async def bill(payload: bytes) -> None: ...

        await bus.ready()
        serving = asyncio.create_task(bus.run())
        async with penstock.connect(broker.url()) as operator:
            await operator.groups.delete("billing", confirm="DELETE")
        with pytest.raises(errors.PenstockError):
            await serving
        assert any("bill has ended" in line for line in caplog.messages)


async def test_a_handler_that_is_not_let_in_any_more_says_so(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that comes back and wants a token ends its old clients' subscriptions, aloud."""
    async with penstock.connect(broker.url()) as bus, asyncio.timeout(DEADLINE_S):

        @bus.handler("orders.*", group="billing")
        async def bill(payload: bytes) -> None: ...

        await bus.ready()
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start, auth__admin_token="secret-of-the-operator")
        while not any("bill has ended" in line for line in caplog.messages):
            await asyncio.sleep(0.05)
        refusal = [each for each in caplog.records if "not asked again" in each.message]
        assert [each.levelno for each in refusal] == [logging.ERROR]
        with pytest.raises(errors.AccessDenied):
            await bus.publish(TOPIC, b"1")


@pytest.mark.parametrize("mode", ["queue", "log"])
async def test_a_consumer_whose_welcome_was_lost_subscribes_again(
    broker: BrokerProcess, mode: str
) -> None:
    """T4: a restarted broker has resumed nothing until its client knows that it was restarted."""
    async with (
        penstock.connect(broker.url()) as bus,
        asyncio.timeout(DEADLINE_S),
        bus.subscribe("orders.*", group="billing", mode=mode) as sub,
    ):
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        received, lost = channel._received, []

        def cut(frame: Frame) -> None:
            if frame.kind != Kind.WELCOME or lost:
                received(frame)
                return
            lost.append(frame)
            channel._link.close()
            channel._lost("the cable was cut before the Welcome arrived")

        channel._received = cut
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await bus.publish(TOPIC, b"1")
        assert lost
        assert await sub.get() is not None


async def test_the_topic_of_dead_letters_cannot_be_deleted(broker: BrokerProcess) -> None:
    """T8: they go by purge, which wants its word, and leaves what the list shows readable."""
    async with penstock.connect(broker.url()) as bus, asyncio.timeout(DEADLINE_S):
        await bus.publish(TOPIC, b"1")
        async with bus.subscribe(TOPIC, group="billing") as sub:
            event = await sub.get(timeout_s=DEADLINE_S)
            assert event is not None
            await event.reject("no")
            await bus.flush()
        [letter] = await bus.dead_letters.list(consumer="billing")
        with pytest.raises(errors.Refused, match="dlq purge"):
            await bus.topics.delete("_dlq.default", confirm="DELETE")
        assert [each.id for each in await bus.dead_letters.list(consumer="billing")] == [letter.id]
        refused = [
            record for record in await bus.audit.query() if record.operation == "topic.delete"
        ]
        assert [record.result["status"] for record in refused] == ["refused"]


def test_a_client_that_never_waits_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Q7: Hello and, before any answer, heartbeats without end: it is cut off."""
    broker = BrokerProcess(tmp_path / "data").start()
    try:
        hello = say.encode(say.Hello("eager", resumable=False))
        beats = b"".join(encode_frame(Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat())))) * 2_000
        with socket.create_connection(("127.0.0.1", broker.ports["tcp"])) as client:
            client.settimeout(DEADLINE_S)
            client.sendall(encode_message(0xFE, b'{"versions":[1]}'))
            client.sendall(b"".join(encode_frame(Frame(Kind.HELLO, 0, hello))) + beats)
            reader = threading.Thread(target=_read_all, args=(client,), daemon=True)
            reader.start()
            with pytest.raises(ConnectionError):
                for _ in range(2_000):  # 48 MB, in a quarter of a minute when nobody cuts it off
                    client.sendall(beats)
    finally:
        broker.stop()


def _read_all(client: socket.socket) -> None:
    try:
        while client.recv(1 << 16):
            pass
    except OSError:
        return

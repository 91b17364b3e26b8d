"""What `/metrics` and `/pressure` of a real broker say after a known amount of work (X10, T15)."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import zmq

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Fault, decode
from penstock.wire.negotiation import offer
from penstock.wire.stream import encode_message

TOPIC = "orders.created.v1.acme"
PAIR = f'{{tenant="acme",topic="{TOPIC}"}}'


def fetch(broker: BrokerProcess, path: str) -> str:
    """What the broker answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.ports['http']}{path}") as answer:
        return str(answer.read().decode())


def scrape(broker: BrokerProcess) -> dict[str, float]:
    """Every sample by its name and labels."""
    lines = fetch(broker, "/metrics").splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def work(broker: BrokerProcess) -> None:
    """Six events, one of them twice; four acks, a nack, its ack, a reject; one replay of all."""
    async with penstock.connect(broker.url()) as bus, bus.subscribe(TOPIC, group="g") as events:
        for number in [0, 1, 2, 3, 4, 5, 5]:
            await bus.publish(TOPIC, b"12345678", idempotency_key=f"order-{number}")
        for number in range(6):
            event = await events.get(timeout_s=30)
            assert event is not None
            if number == 4:
                await event.nack(delay_s=0)
            elif number == 5:
                await event.reject("bad")
            else:
                await event.ack()
        event = await events.get(timeout_s=30)
        assert event is not None
        assert event.attempt == 2
        await event.ack()
        await bus.flush()
        assert len([event async for event in bus.replay(TOPIC)]) == 6


async def take(events: Any, count: int) -> None:
    """Receive so many events."""
    for _ in range(count):
        assert await events.get(timeout_s=30) is not None


async def test_bytes_are_those_of_payloads_however_they_are_packed(tmp_path: Path) -> None:
    """Row X10: what comes in and goes out is counted alike, in batches, alone and in side files."""
    with BrokerProcess(tmp_path / "data").start(journal__side_file_bytes=2_000) as broker:
        async with penstock.connect(broker.url()) as bus, bus.subscribe(TOPIC, group="g") as events:
            await bus.publish_many(TOPIC, [b"x" * 10] * 200, keys=["k"] * 200, codec="raw")
            await bus.publish(TOPIC, b"x" * 100, headers={"a": "b"}, codec="raw")
            await bus.publish(TOPIC, b"x" * 3_000, codec="raw")
            for _ in range(202):
                event = await events.get(timeout_s=30)
                assert event is not None
                await event.ack()
            found = scrape(broker)
    assert found[f"penstock_published_bytes_total{PAIR}"] == 5_100
    assert found[f"penstock_delivered_bytes_total{PAIR}"] == 5_100


async def test_figures_after_known_work(tmp_path: Path) -> None:
    """Row X10: each metric means what the catalogue says, in a broker of its own process."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        assert scrape(broker)["penstock_connections"] == 0
        await work(broker)
        async with penstock.connect(broker.url()) as bus:
            await bus.publish(TOPIC, b"12345678", idempotency_key="order-0")
            with pytest.raises(penstock.errors.UnknownTopic):
                await bus.topics.info("nowhere")
            found = scrape(broker)
    expected = {
        f"penstock_published_events_total{PAIR}": 6,
        f"penstock_published_bytes_total{PAIR}": 48,
        f"penstock_duplicate_events_total{PAIR}": 2,
        f"penstock_delivered_events_total{PAIR}": 7,
        f"penstock_replayed_events_total{PAIR}": 6,
        'penstock_settled_events_total{kind="ack"}': 5,
        'penstock_settled_events_total{kind="nack"}': 1,
        'penstock_settled_events_total{kind="reject"}': 1,
        'penstock_failed_deliveries_total{cause="nacked"}': 1,
        f"penstock_dead_letters_total{PAIR}": 1,
        "penstock_dead_letters_kept": 1,
        "penstock_connections": 1,
        "penstock_connections_opened_total": 2,
        'penstock_frame_errors_total{code="notfound.topic"}': 1,
        'penstock_group_lag_events{group="g"}': 0,
    }
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("mode", ["queue", "log"])
async def test_what_is_read_again_is_no_late_delivery(tmp_path: Path, mode: str) -> None:
    """Row X10: delivery latency is taken when an event is sent for the first time, once for each."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        async with penstock.connect(broker.url()) as bus:
            async with bus.subscribe(TOPIC, group="g", mode=mode, start="earliest") as events:
                await bus.publish_many(TOPIC, [b"1", b"2", b"3"])
                await take(events, 3)
                await bus.groups.reset("g", "earliest", confirm="RESET")
                await take(events, 3)
                await bus.publish(TOPIC, b"4")
                await take(events, 1)
            found = scrape(broker)
    assert found[f"penstock_delivered_events_total{PAIR}"] == 7
    assert found['penstock_delivery_seconds_count{tenant="acme"}'] == 4


async def test_a_replayed_dead_letter_is_no_late_delivery(tmp_path: Path) -> None:
    """Row X10: it was delivered before it died."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        async with penstock.connect(broker.url()) as bus, bus.subscribe(TOPIC, group="g") as events:
            await bus.publish(TOPIC, b"1")
            event = await events.get(timeout_s=30)
            assert event is not None
            await event.reject("bad")
            await bus.flush()
            while not (letters := await bus.dead_letters.list()):
                await asyncio.sleep(0.01)
            await bus.dead_letters.replay(
                [letters[0].id], target_consumer="g", target_topic=TOPIC, actor="ann",
                reason="again", confirm="REPLAY",
            )  # fmt: skip
            await take(events, 1)
            found = scrape(broker)
    assert found[f"penstock_delivered_events_total{PAIR}"] == 2
    assert found['penstock_delivery_seconds_count{tenant="acme"}'] == 1


async def test_pressure_rises_with_what_nobody_took(tmp_path: Path) -> None:
    """Row T15: an autoscaler sees the lag of a group and for how long it has waited."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        async with penstock.connect(broker.url()) as bus:
            async with bus.subscribe(TOPIC, group="g"):
                assert json.loads(fetch(broker, "/pressure"))["groups"]["g"]["lag"] == 0
            await bus.publish_many(TOPIC, [b"12345678"] * 7)
            await asyncio.sleep(0.05)
            found = json.loads(fetch(broker, "/pressure"))
    assert found["lag"] == found["groups"]["g"]["lag"] == 7
    assert found["groups"]["g"]["waiting_s"] >= 0.05
    assert 0 <= found["pressure"] < 1


# No frame at all; a command nobody knows, after a proper beginning; a frame that claims 4 GB.
BROKEN_BYTES = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "unknown": offer() + encode_message(0x77, b"what is this"),
    "huge": offer() + b"\x01\xff\xff\xff\xff",
}


def say_over_tcp(port: int, data: bytes) -> bytes:
    """Send bytes and read until the broker hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(65_536):
            answer += more
    return answer


def say_over_zmq(port: int, message: list[bytes]) -> Fault:
    """Send a message of parts and take the error it is answered with."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        client.set(zmq.RCVTIMEO, 30_000)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send_multipart(message)
        frame = Frame.of_multipart(client.recv_multipart())
    assert frame.kind == Kind.FAULT
    fault: Fault = decode(frame.meta, Fault)
    return fault


def test_what_is_no_frame_is_counted(tmp_path: Path) -> None:
    """Row X10: each is counted once, whichever transport could not read it."""
    counted = 'penstock_frame_errors_total{code="connection.protocol"}'
    with BrokerProcess(tmp_path / "data").start() as broker:
        for number, (name, data) in enumerate(BROKEN_BYTES.items(), 1):
            assert b"connection.protocol" in say_over_tcp(broker.ports["tcp"], data), name
            assert scrape(broker)[counted] == number, name
        fault = say_over_zmq(broker.ports["zmq"], [b"no envelope"])
        assert fault.code == "connection.protocol"
        assert scrape(broker)[counted] == len(BROKEN_BYTES) + 1


def test_the_document_of_a_real_broker_lists_them(tmp_path: Path) -> None:
    """T10, T15: what the daemon adds to the admin API stands in its OpenAPI document, and is served."""
    with BrokerProcess(tmp_path / "data") as broker:
        paths = json.loads(fetch(broker, "/openapi.json"))["paths"]
        for path in ("/pressure", "/metrics", "/health", "/ready", "/api/admin/topics"):
            assert paths[path]["get"]["summary"], path
            assert fetch(broker, path), path

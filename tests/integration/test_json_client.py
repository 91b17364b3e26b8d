"""A client without msgpack and batches uses a real broker in JSON or protobuf (row Q1)."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from penstock.model.settings_loader import load
from penstock.server import fastpath
from penstock.server.daemon import Daemon
from penstock.server.session import Session
from penstock.wire.encodings import MESSAGES, wire
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.negotiation import chosen, offer
from penstock.wire.stream import StreamReader, decode_frame, encode_frame

MIB = 1 << 20
LARGE = 300 << 10  # over fastpath.cutover_bytes


class Foreigner:
    """A client as another language would write it: plain values in, plain values out."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self._stream = StreamReader(64 * MIB)
        self._frames: list[Frame] = []
        self._request = 0

    async def open(self, port: int) -> Foreigner:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._writer.write(offer("lz4", [self.mark.name.lower()]))
        messages: list[Any] = []
        while not messages:
            messages = self._stream.feed(await self._reader.read(4096))
        assert chosen(messages[0][1]).mark == self.mark.name.lower()
        self.tell(Kind.HELLO, {"client": "foreigner"}, request=0)
        _, self.welcome = await self.hear(Kind.WELCOME)
        return self

    def tell(self, kind: Kind, value: dict[str, Any] | None, *, request: int) -> None:
        if value is None:
            meta = b""
        elif self.mark == Mark.JSON:
            meta = msgspec.json.encode(value)
        else:
            meta = wire().encode(MESSAGES[kind], value)
        self.send(Frame(kind, request, meta, mark=self.mark))

    def send(self, frame: Frame) -> None:
        self._writer.writelines(encode_frame(frame))

    async def hear(self, kind: Kind) -> tuple[Frame, Any]:
        """The next frame of a kind; others are dropped."""
        frame = await self._next(kind, Kind.FAULT)
        assert frame.kind == kind, frame.meta
        return frame, self._plain(frame)

    async def fault(self) -> Frame:
        """The next error."""
        return await self._next(Kind.FAULT)

    async def _next(self, *kinds: Kind) -> Frame:
        async with asyncio.timeout(10):
            while True:
                while not self._frames:
                    for message in self._stream.feed(await self._reader.read(65_536)):
                        self._frames.append(decode_frame(message, 64 * MIB))
                frame = self._frames.pop(0)
                assert frame.mark == self.mark
                assert frame.parts == ()
                if frame.kind in kinds:
                    return frame

    async def call(self, kind: Kind, value: dict[str, Any] | None) -> Any:
        self._request += 1
        self.tell(kind, value, request=self._request)
        frame, found = await self.hear(Kind.RESULT)
        assert frame.request == self._request
        return found

    def _plain(self, frame: Frame) -> Any:
        if self.mark == Mark.PROTOBUF:
            found = wire().decode(MESSAGES[frame.kind], frame.meta)
            return json.loads(found["json"]) if "json" in found else found
        found = json.loads(frame.meta)
        events = found.get("events") if isinstance(found, dict) else None
        for event in events if isinstance(events, list) else ():
            event["payload"] = base64.b64decode(event["payload"])
        return found

    def close(self) -> None:
        self._writer.close()


@pytest_asyncio.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    off = {f"server.{name}": "" for name in ("zmq", "pub", "http")}
    daemon = Daemon(
        tmp_path / "data", load(None, {}, {**off, "server.tcp": "127.0.0.1:0", "server.drain_s": 1})
    )
    await daemon.start()
    yield daemon
    await daemon.stop()


@pytest_asyncio.fixture(params=[Mark.JSON, Mark.PROTOBUF], ids=["json", "protobuf"])
async def client(daemon: Daemon, request: pytest.FixtureRequest) -> AsyncIterator[Foreigner]:
    client = await Foreigner(request.param).open(daemon.ports["tcp"])
    yield client
    client.close()


def publish(sequence: int, payloads: list[bytes], **columns: Any) -> dict[str, Any]:
    draft = {"topic": "orders.created", "payloads": payloads, **columns}
    return {"sequence": sequence, "drafts": [draft]}


async def test_publish_lease_and_settle(client: Foreigner) -> None:
    keys = [b"k", None, b""]
    headers = [{"a": "b"}, None, None]
    wish = publish(1, [b"one", b"two", b"\x00\xff"], keys=keys, headers=headers)
    published = await client.call(Kind.PUBLISH, wish)
    [receipt] = published["receipts"]
    assert (receipt["topic"], receipt["offset"], receipt["count"]) == ("orders.created", 0, 3)
    spec = {"patterns": ["orders.*"], "retry": {"ladder_ms": [10], "max_attempts": 3}}
    wanted = {"feed": 1, "group": "g", "spec": spec, "member": "m", "max_inflight": 10}
    await client.call(Kind.SUBSCRIBE, wanted)
    got: dict[int, tuple[int, dict[str, Any]]] = {}
    while len(got) < 3:
        _, delivery = await client.hear(Kind.DELIVER)
        for event in delivery["events"]:
            got[event["offset"]] = (delivery["delivery"], event)
    assert [got[offset][1]["payload"] for offset in range(3)] == [b"one", b"two", b"\x00\xff"]
    assert got[0][1]["headers"] == {"a": "b"}
    assert "key" not in got[1][1]
    settlements = [
        {"delivery": delivery, "handed": 3, "acks": [event["index"], 1]}
        if offset < 2
        else {"delivery": delivery, "handed": 3, "nacks": [[event["index"], 0.0, "again"]]}
        for offset, (delivery, event) in got.items()
    ]
    client.tell(Kind.SETTLE, {"sequence": 1, "settlements": settlements}, request=0)
    _, again = await client.hear(Kind.DELIVER)
    assert again["attempt"] == 2
    assert [event["payload"] for event in again["events"]] == [b"\x00\xff"]


async def test_the_same_sequence_is_the_same_publish(client: Foreigner) -> None:
    first = await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    again = await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    assert again["receipts"][0]["offset"] == first["receipts"][0]["offset"] == 0
    assert again["receipts"][0]["duplicate"]


async def test_the_same_publish_has_its_places_when_its_events_are_gone(client: Foreigner) -> None:
    """T4, found by review: it was refused as if an offset had been asked for, and what came with it."""
    first = await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    gone = {"request": "DeleteTopic", "fields": {"topic": "orders.created", "confirm": "DELETE"}}
    await client.call(Kind.ASK, gone)
    again = await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    [receipt] = again["receipts"]
    assert receipt["offset"] == first["receipts"][0]["offset"] == 0
    assert receipt["duplicate"]
    assert (await client.call(Kind.PUBLISH, publish(2, [b"y"])))["receipts"][0]["offset"] == 1


async def test_logs_and_reads(client: Foreigner) -> None:
    await client.call(Kind.PUBLISH, publish(1, [b"one", b"two"]))
    wanted = {
        "feed": 2, "group": "log", "member": "m", "max_inflight": 1,
        "spec": {"patterns": ["orders.*"], "mode": "log"},
    }  # fmt: skip
    await client.call(Kind.SUBSCRIBE, wanted)
    fetched = await client.call(Kind.FETCH, {"feed": 2})
    assert [event["payload"] for event in fetched["events"]] == [b"one", b"two"]
    place = ["orders.created", 0, 2]
    assert not await client.call(Kind.COMMIT, {"feed": 2, "marks": [place]})
    read = await client.call(Kind.READ, {"topic": "orders.created", "partition": 0, "start": 1})
    assert [event["payload"] for event in read["events"] if event["offset"] >= 1] == [b"two"]
    assert read["end"]


async def test_asking(client: Foreigner) -> None:
    await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    topics = await client.call(Kind.ASK, {"request": "ListTopics", "fields": {}})
    assert [topic["name"] for topic in topics] == ["orders.created"]
    schedule = {"id": "s", "topic": "orders.created", "codec": "raw", "every_us": 10**12}
    payload = base64.b64encode(b"tick").decode()
    made = await client.call(
        Kind.ASK, {"request": "PutSchedule", "fields": {**schedule, "payload": payload}}
    )
    assert made["id"] == "s"
    assert await client.call(Kind.FLUSH, None) == {}


async def test_an_error_has_its_code(client: Foreigner) -> None:
    published = await client.call(Kind.PUBLISH, publish(1, [b"x"], topic="not a topic"))
    fault = published["faults"].get("0") or published["faults"][0]
    assert fault["code"] == "invalid.topic"


# -- large frames ------------------------------------------------------------------------------------


async def test_a_large_message_is_translated_beside_the_loop_in_its_order(
    client: Foreigner, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row T13: a thread reads it, what came behind it waits, and nothing more is read meanwhile."""
    began, go_on = threading.Event(), threading.Event()
    threads: list[int] = []
    taken: list[int] = []
    from_mark, received = fastpath.from_mark, Session.received

    def slow(frame: Frame) -> Frame:
        if frame.size_bytes >= LARGE:
            threads.append(threading.get_ident())
            began.set()
            assert go_on.wait(10)
        return from_mark(frame)

    def noted(session: Session, frame: Frame) -> None:
        taken.append(frame.request)
        received(session, frame)

    monkeypatch.setattr(fastpath, "from_mark", slow)
    monkeypatch.setattr(Session, "received", noted)
    try:
        client.tell(Kind.PUBLISH, publish(1, [bytes(LARGE)]), request=1)
        client.tell(Kind.FLUSH, None, request=2)
        assert await asyncio.to_thread(began.wait, 10)
        [link] = [each.link for each in daemon.broker.connections]
        assert link.holding
        assert not taken
        go_on.set()
        answers = [await client.hear(Kind.RESULT) for _ in range(2)]
    finally:
        go_on.set()
    assert taken == [1, 2]
    assert {frame.request for frame, _ in answers} == {1, 2}
    assert threads
    assert threading.get_ident() not in threads
    assert not link.holding
    assert daemon.broker.fastpath.taken >= 2, "the frame, and the draft in it"


async def test_a_large_message_that_cannot_be_read_costs_an_answer(
    client: Foreigner, daemon: Daemon
) -> None:
    """Row T13: an error in the thread is the client's, and its connection goes on."""
    broken = Frame(Kind.PUBLISH, 7, b"\xff" * LARGE, mark=client.mark)
    client.send(broken)
    fault = await client.fault()
    assert (fault.request, daemon.broker.fastpath.taken) == (7, 1)
    assert b"connection.protocol" in fault.meta
    published = await client.call(Kind.PUBLISH, publish(1, [b"x"]))
    assert published["receipts"][0]["offset"] == 0

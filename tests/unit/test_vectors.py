"""The test vectors of the protocol, both ways (row Q1): what another language may rely on."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.model.batch import EventBatch
from penstock.model.errors import PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.transports.fanout import Fanout
from penstock.wire import legacy as oldcommand
from penstock.wire import message as say
from penstock.wire import negotiation
from penstock.wire.encodings import MESSAGES, for_mark, from_mark, marks, wire
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.protobuf import Result, proto_text
from penstock.wire.stream import COMPRESSORS, StreamReader, decode_frame, encode_frame

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
DOCS = VECTORS.parents[1] / "docs" / "reference"
LIMIT_BYTES = 1 << 20
FROM_CLIENTS = 0x40  # kinds below it


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / name).read_text())
    return found


def cases(name: str, key: str = "vectors") -> list[Any]:
    return [
        pytest.param(each, id=each.get("name", each.get("compressor", str(number))))
        for number, each in enumerate(load(name)[key])
    ]


def one_frame(data: str) -> Frame:
    [message] = StreamReader(LIMIT_BYTES).feed(bytes.fromhex(data))
    return decode_frame(message, LIMIT_BYTES)


def hexed(frame: Frame) -> str:
    return b"".join(encode_frame(frame)).hex()


def raw_frame(vector: dict[str, Any]) -> Frame:
    """The frame a vector describes, built from its description alone."""
    kind = Kind[vector["kind"]]
    if vector["message"] is None:
        meta = b""
    elif kind == Kind.RESULT:
        meta = result_meta(vector["message"])
    else:
        # The keys of a JSON map are text, whatever they stand for.
        meta = say.encode(msgspec.convert(vector["message"], MESSAGES[kind], strict=False))
    return Frame(kind, vector["request"], meta, tuple(map(bytes.fromhex, vector["parts"])))


def result_meta(message: dict[str, Any]) -> bytes:
    if "receipts" in message:
        return say.encode(msgspec.convert(message, say.Published, strict=False))
    if "adopted" in message:
        return say.encode(msgspec.convert(message, say.Joined, strict=False))
    if "end" in message:
        return say.encode(msgspec.convert(message, say.Chunk))
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize("vector", cases("frames.json"))
def test_raw_frames_over_tcp(vector: dict[str, Any]) -> None:
    expected = raw_frame(vector)
    assert hexed(expected) == vector["tcp"]["raw"]
    assert one_frame(vector["tcp"]["raw"]) == expected


@pytest.mark.parametrize("vector", cases("frames.json"))
def test_frames_over_zeromq(vector: dict[str, Any]) -> None:
    """T1: the same frames as multipart messages."""
    expected = raw_frame(vector)
    assert [bytes(part).hex() for part in expected.multipart()] == vector["zeromq"]
    assert Frame.of_multipart([bytes.fromhex(part) for part in vector["zeromq"]]) == expected


@pytest.mark.parametrize("mark", [Mark.JSON, Mark.PROTOBUF])
@pytest.mark.parametrize("vector", cases("frames.json"))
def test_marked_frames(vector: dict[str, Any], mark: Mark) -> None:
    data = vector["tcp"][mark.name.lower()]
    expected = raw_frame(vector)
    assert hexed(for_mark(expected, mark)) == data
    found = one_frame(data)
    assert found.mark == mark
    if expected.kind < FROM_CLIENTS:
        assert from_mark(found) == expected


@pytest.mark.parametrize("vector", cases("frames.json"))
def test_events_in_messages_are_those_of_the_parts(vector: dict[str, Any]) -> None:
    if Kind[vector["kind"]] < FROM_CLIENTS or not vector["parts"]:
        return
    batches = [EventBatch.decode(bytes.fromhex(part)) for part in vector["parts"]]
    skip = (vector["message"] or {}).get("skip", [])
    expected = [
        (number, event.index, event.offset, event.payload, event.key, dict(event.headers))
        for number, batch in enumerate(batches)
        for event in batch
        if event.index not in skip
    ]
    listed = json.loads(one_frame(vector["tcp"]["json"]).meta)["events"]
    assert [
        (
            each.get("part", 0), each["index"], each["offset"], base64.b64decode(each["payload"]),
            base64.b64decode(each["key"]) if "key" in each else None, each.get("headers", {}),
        )
        for each in listed
    ] == expected  # fmt: skip
    assert one_frame(vector["tcp"]["json"]).parts == ()


def test_every_kind_has_a_vector() -> None:
    kinds = {vector["kind"] for vector in load("frames.json")["vectors"]}
    assert kinds == set(Kind.__members__)


@pytest.mark.parametrize("vector", cases("batch.json"))
def test_batches(vector: dict[str, Any]) -> None:
    batch = EventBatch.decode(bytes.fromhex(vector["hex"]))
    assert batch.encode().hex() == vector["hex"]
    for name in ("topic", "tenant", "codec", "partition", "base_offset"):
        assert getattr(batch, name) == vector[name]
    for event, expected in zip(batch, vector["events"], strict=True):
        assert event.payload == base64.b64decode(expected["payload"])
        assert (None if event.key is None else b64(event.key)) == expected["key"]
        assert b64(batch.token(event.index)) == expected["token"]
        for name in ("index", "offset", "time_us", "append_time_us", "expires_us", "priority"):
            assert getattr(event, name) == expected[name]
        assert dict(event.headers) == expected["headers"]


@pytest.mark.parametrize("vector", cases("fanout.json"))
def test_fanned_out_batches(vector: dict[str, Any]) -> None:
    """T1: the message of the PUB socket, as the broker makes it and as a subscriber reads it."""
    topic, envelope, encoded = map(bytes.fromhex, vector["zeromq"])
    [batch] = [each for each in load("batch.json")["vectors"] if each["name"] == vector["name"]]
    assert encoded.hex() == batch["hex"]
    assert topic.decode() == vector["topic"] == EventBatch.decode(encoded).topic
    frame = Frame.of_multipart([envelope, b"", encoded])
    assert (Kind(frame.kind).name, frame.request) == (vector["kind"], vector["request"])
    sent: list[Any] = []
    fanout = Fanout(Settings())
    fanout._socket = SimpleNamespace(send=lambda part, *_, **__: sent.append(bytes(part)))  # type: ignore[assignment]
    fanout._send(EventBatch.decode(encoded))
    assert sent == [topic, envelope, encoded]


@pytest.mark.parametrize("vector", cases("compressed.json"))
def test_compressed_frames(vector: dict[str, Any]) -> None:
    plain = one_frame(load("compressed.json")["plain"])
    assert one_frame(vector["hex"]) == plain
    assert len(vector["hex"]) < len(hexed(plain))
    again = encode_frame(plain, COMPRESSORS.index(vector["compressor"]))
    assert one_frame(b"".join(again).hex()) == plain


@pytest.mark.parametrize("vector", cases("negotiation.json"))
def test_negotiations(vector: dict[str, Any]) -> None:
    limit = load("negotiation.json")["max_frame_bytes"]
    body = bytes.fromhex(vector["offer"])[5:]
    assert vector["offer"].startswith("fe")
    if "error" in vector:
        with pytest.raises(PenstockError) as raised:
            negotiation.choose(body, limit, marks())
        assert raised.value.code == vector["error"]
        return
    choice = negotiation.choose(body, limit, marks())
    assert negotiation.answer(choice).hex() == vector["choice"]
    assert negotiation.chosen(bytes.fromhex(vector["choice"])[5:]) == choice


@pytest.mark.parametrize("vector", cases("broken.json"))
def test_broken_messages(vector: dict[str, Any]) -> None:
    reader = StreamReader(LIMIT_BYTES)
    messages = reader.feed(bytes.fromhex(vector["hex"]))
    if reader.broken is not None:
        assert (messages, reader.broken.code) == ([], vector["code"])
        return
    [message] = messages
    with pytest.raises(ProtocolViolation) as raised:
        decode_frame(message, LIMIT_BYTES)
    assert raised.value.code == vector["code"]


@pytest.mark.parametrize("vector", cases("old.json", "commands") + cases("old.json", "replies"))
def test_old_commands(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    command = "command" in vector
    parse = oldcommand.parse_command if command else oldcommand.parse_reply
    found = parse(*oldcommand.split(data))
    name = type(found).__name__.removeprefix("Legacy")
    assert name == vector["command" if command else "reply"]
    fields = {
        name: b64(value) if isinstance(value, bytes) else value
        for name, value in found._asdict().items()
    }
    assert fields == vector["fields"]
    assert found.message() == data


def test_every_old_command_has_a_vector() -> None:
    found = load("old.json")
    commands = {bytes.fromhex(each["hex"])[0] for each in found["commands"]}
    replies = {bytes.fromhex(each["hex"])[0] for each in found["replies"]}
    assert commands == set(oldcommand.Command)
    assert replies == set(oldcommand.LegacyReply)


def test_the_proto_file_is_up_to_date() -> None:
    """Print it anew with penstock.wire.protobuf.proto_text when a message has learned a field."""
    assert (DOCS / "penstock.proto").read_text() == proto_text(wire().schema)


def test_answers_in_protobuf() -> None:
    """An answer to Ask is JSON inside; receipts, end and events have fields."""
    frame = Frame(Kind.RESULT, 1, msgspec.msgpack.encode([{"topic": "orders"}]))
    value = wire().decode(Result, for_mark(frame, Mark.PROTOBUF).meta)
    assert value == {"json": '[{"topic":"orders"}]'}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()

"""Messages in JSON and protobuf equal those in msgpack; hostile ones are refused in each (row Q1)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidInput, MissingExtra, ProtocolViolation
from penstock.wire import encodings, protobuf
from penstock.wire import message as say
from penstock.wire.encodings import MAX_EVENTS, MESSAGES, for_mark, from_mark, marks
from penstock.wire.frame import Frame, Kind, Mark

CLIENT_KINDS = [kind for kind in MESSAGES if kind < 0x40]
OTHER_MARKS = [Mark.JSON, Mark.PROTOBUF]

json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=10,
)


def fields_of(kind: int) -> Any:
    return st.sampled_from([field.name for field in msgspec.structs.fields(MESSAGES[kind])])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CLIENT_KINDS), st.data())
def test_random_json_raises_nothing_else(kind: int, data: st.DataObject) -> None:
    value = data.draw(st.dictionaries(fields_of(kind), json_values, max_size=5))
    try:
        found = from_mark(Frame(kind, 1, json.dumps(value).encode(), mark=Mark.JSON))
    except (ProtocolViolation, InvalidInput):
        return
    assert found.mark == Mark.RAW
    say.decode(found.meta, MESSAGES[kind])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CLIENT_KINDS), st.sampled_from(OTHER_MARKS), st.binary(max_size=80))
def test_random_bytes_raise_nothing_else(kind: int, mark: Mark, meta: bytes) -> None:
    try:
        found = from_mark(Frame(kind, 1, meta, mark=mark))
    except (ProtocolViolation, InvalidInput):
        return
    say.decode(found.meta, MESSAGES[kind])


@pytest.mark.parametrize(
    "fields",
    [
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        '{"a":' + "9" * 400 + "}",
        '{"a":"\\ud800"}',
        '{"a":1e999}',
    ],
)
@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_deep_and_huge_values_are_refused(fields: str, mark: Mark) -> None:
    """Nesting without end, numbers without end, half a character."""
    if mark == Mark.JSON:
        meta = f'{{"request":"x","fields":{fields}}}'.encode()
    else:
        raw = fields.encode()
        size = bytes([len(raw) & 0x7F | 0x80, len(raw) >> 7 & 0x7F | 0x80, len(raw) >> 14])
        meta = b"\x0a\x01x\x12" + size + raw
    with pytest.raises(ProtocolViolation):
        from_mark(Frame(Kind.ASK, 1, meta, mark=mark))


@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_what_is_absent_has_its_default(mark: Mark) -> None:
    meta = b'{"client":"c"}' if mark == Mark.JSON else b"\x0a\x01c"
    hello = say.decode(from_mark(Frame(Kind.HELLO, 0, meta, mark=mark)).meta, say.Hello)
    assert hello == say.Hello("c")
    assert (hello.resumable, hello.heartbeat_s) == (True, 5.0)


@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_what_is_needed_must_be_there(mark: Mark) -> None:
    with pytest.raises(ProtocolViolation):
        from_mark(Frame(Kind.HELLO, 0, b"", mark=mark))


@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_an_empty_heartbeat_and_a_bye(mark: Mark) -> None:
    assert from_mark(Frame(Kind.HEARTBEAT, 0, b"", mark=mark)).mark == Mark.RAW
    assert from_mark(Frame(Kind.BYE, 0, b"{}", mark=mark)) == Frame(Kind.BYE, 0, b"")


@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_unknown_fields_are_ignored(mark: Mark) -> None:
    meta = b'{"feed":3,"colour":"blue"}' if mark == Mark.JSON else b"\x08\x03\xfa\x3f\x01x"
    assert say.decode(from_mark(Frame(Kind.FETCH, 1, meta, mark=mark)).meta, say.Feed) == say.Feed(
        3
    )


def deliver(batch: EventBatch, skip: list[int]) -> Frame:
    return Frame(Kind.DELIVER, 0, say.encode(say.Deliver(1, 2, 1, skip)), (batch.encode(),))


def test_compressed_batches_are_listed_too() -> None:
    batch = EventBatch.build("orders", [b"spam " * 2_000] * 3)
    batch.compressor = "lz4"
    value = json.loads(for_mark(deliver(batch, [1]), Mark.JSON).meta)
    assert [each["index"] for each in value["events"]] == [0, 2]


@pytest.mark.parametrize("mark", OTHER_MARKS)
@pytest.mark.parametrize("payloads", [[b"x" * (17 << 20)], [b""] * (MAX_EVENTS + 1)])
def test_what_would_outgrow_a_message_stays_a_part(mark: Mark, payloads: list[bytes]) -> None:
    frame = deliver(EventBatch.build("orders", payloads), [])
    found = for_mark(frame, mark)
    assert found.parts == frame.parts
    assert len(found.meta) < 100


@pytest.mark.parametrize("meta", [b"", msgspec.msgpack.encode(None), msgspec.msgpack.encode([1])])
@pytest.mark.parametrize("mark", OTHER_MARKS)
def test_answers_without_a_message(meta: bytes, mark: Mark) -> None:
    found = for_mark(Frame(Kind.RESULT, 1, meta), mark)
    if mark == Mark.JSON:
        assert json.loads(found.meta) == ({} if not meta else msgspec.msgpack.decode(meta))
    else:
        assert (found.meta == b"") == (meta == b"")


def test_without_the_library_the_mark_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    assert marks() == ("raw", "json", "protobuf")
    for name in [name for name in sys.modules if name.startswith("google.protobuf")]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "google.protobuf.message_factory", None)  # type: ignore[arg-type]
    assert marks() == ("raw", "json")
    encodings.wire.cache_clear()
    with pytest.raises(MissingExtra, match=r"penstock\[protobuf\]"):
        protobuf.Wire([say.Feed])


def test_a_client_cannot_use_a_mark_the_broker_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> protobuf.Wire:
        raise MissingExtra("no library", extra="protobuf")

    monkeypatch.setattr(encodings, "wire", absent)
    with pytest.raises(MissingExtra):
        from_mark(Frame(Kind.FETCH, 1, b"\x08\x03", mark=Mark.PROTOBUF))

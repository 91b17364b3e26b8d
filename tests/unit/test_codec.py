"""Codecs (row T3): round trips, typed values, and failures that say where."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import subprocess
import sys
import timeit
from typing import Any, TypedDict

import msgspec
import pyarrow as pa
import pydantic
import pytest
from google.protobuf import struct_pb2, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import codec as codec_module
from penstock.model.codec import (
    ArrowCodec,
    JsonCodec,
    MsgpackCodec,
    ProtobufCodec,
    RawCodec,
    codecs,
    encode_many,
)
from penstock.model.errors import DecodeFailed, EncodeFailed, MissingExtra, UnknownCodec


class Item(msgspec.Struct):
    price: float
    note: Any = None


class Order(msgspec.Struct):
    id: int
    items: list[Item]


@dataclasses.dataclass
class Plain:
    id: int
    note: Any = None


class Typed(TypedDict):
    id: int


class Model(pydantic.BaseModel):
    id: int
    tags: list[int] = []


class Holder(msgspec.Struct):
    model: Model


STRUCTURED = ["json", "msgpack"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", STRUCTURED)
@given(value=VALUES)
def test_values_come_back(name: str, value: Any) -> None:
    codec = codecs.get(name)
    data = codec.encode(value)
    assert codec.decode(data) == value
    assert codec.decode(memoryview(data)) == value
    assert encode_many(codec, [value, value]) == [data, data]


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Order(7, [Item(1.5)]), Order),
        (Plain(7), Plain),
        (Typed(id=7), Typed),
        (Model(id=7, tags=[1]), Model),
        ([Model(id=7)], list[Model]),
        (Holder(Model(id=7)), Holder),
    ],
    ids=["struct", "dataclass", "typeddict", "pydantic", "pydantic-list", "pydantic-nested"],
)
def test_typed_values_come_back_as_their_type(name: str, value: Any, kind: Any) -> None:
    """T3 and issue 2 item 6: msgspec Struct, dataclass, TypedDict, pydantic."""
    codec = codecs.get(name)
    assert codec.decode(codec.encode(value), kind) == value
    assert codec.decode(memoryview(codec.encode(value)), kind) == value


def test_pydantic_and_protobuf_are_not_imported_by_us() -> None:
    program = (
        "import sys; from penstock.model.codec import codecs; codecs.get('json').encode({});"
        "print(sorted({'pydantic', 'google.protobuf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "$"),
        ({"a": [1, {"b": object()}]}, "$.a[1].b"),
        (Order(1, [Item(1.0), Item(2.0, note=object())]), "$.items[1].note"),
        (Plain(1, note=(1, object())), "$.note[1]"),
        ({"a": {object(): 3}}, "$.a"),
        ({"a": "\ud800"}, "$.a"),
    ],
)
def test_a_value_that_cannot_be_encoded_is_named_by_path(name: str, value: Any, path: str) -> None:
    with pytest.raises(EncodeFailed) as caught:
        codecs.get(name).encode(value)
    assert caught.value.path == path
    assert caught.value.codec == name
    assert path in str(caught.value)


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_cycle_is_an_encode_failure(name: str) -> None:
    with pytest.raises(EncodeFailed):
        codecs.get(name).encode(cyclic())


@pytest.mark.parametrize("name", STRUCTURED)
def test_encode_many_names_the_index(name: str) -> None:
    with pytest.raises(EncodeFailed) as caught:
        encode_many(codecs.get(name), [1, {"x": object()}, 3])
    assert caught.value.path == "$[1].x"


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ({"id": 1, "items": [{"price": "dear"}]}, Order, "$.items[0].price"),
        ({"id": "one"}, Plain, "$.id"),
        ({}, Typed, "$"),
        ({"model": {"id": "x"}}, Holder, "$.model"),
    ],
)
def test_a_wrong_type_is_named_by_path(name: str, value: Any, kind: Any, path: str) -> None:
    codec = codecs.get(name)
    with pytest.raises(DecodeFailed) as caught:
        codec.decode(codec.encode(value), kind)
    assert caught.value.path == path
    assert pickle.loads(pickle.dumps(caught.value)).path == path


def test_a_pydantic_failure_is_named_by_path() -> None:
    with pytest.raises(DecodeFailed) as caught:
        JsonCodec().decode(b'{"id":1,"tags":[1,"x"]}', Model)
    assert caught.value.path == "$.tags[1]"


@pytest.mark.parametrize("name", STRUCTURED)
@given(data=st.binary(max_size=200))
def test_garbage_decodes_or_is_decode_failed(name: str, data: bytes) -> None:
    with contextlib.suppress(DecodeFailed):
        codecs.get(name).decode(data)


@pytest.mark.parametrize(
    ("name", "data"), [("json", b"[" * 1_000_000), ("msgpack", b"\x91" * 1_000_000)]
)
def test_deep_nesting_is_refused_without_a_crash(name: str, data: bytes) -> None:
    """Issue 2, bad input: a bomb of nesting."""
    with pytest.raises(DecodeFailed):
        codecs.get(name).decode(data)


def test_a_type_that_no_library_can_build_is_decode_failed() -> None:
    with pytest.raises(DecodeFailed, match="no way to read"):
        JsonCodec().decode(b"{}", ProtobufCodec)


def test_ready_decoders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "MAX_DECODERS", 8)
    codec = MsgpackCodec()
    for index in range(50):
        kind = msgspec.defstruct(f"Kind{index}", [("id", int)])
        assert codec.decode(codec.encode({"id": index}), kind).id == index
        assert len(codec._decoders) <= 8
    assert codec.decode(codec.encode([1])) == [1]


def test_raw_gives_back_the_same_bytes() -> None:
    codec = RawCodec()
    data = b"\x00\xff"
    assert codec.encode(data) is data
    assert codec.encode(bytearray(data)) == codec.encode(memoryview(data)) == data
    assert codec.decode(memoryview(data)) == data
    assert isinstance(codec.decode(data, memoryview), memoryview)
    assert isinstance(codec.decode(data, bytearray), bytearray)
    assert codec.encode_many([data, bytearray(data)]) == [data, data]
    assert all(type(item) is bytes for item in codec.encode_many([data, bytearray(data)]))


def test_raw_refuses_text_and_says_why() -> None:
    with pytest.raises(EncodeFailed, match=r"\.encode\(\)"):
        RawCodec().encode("text")
    with pytest.raises(EncodeFailed, match="json"):
        RawCodec().encode_many([b"fine", {"id": 1}])
    with pytest.raises(DecodeFailed):
        RawCodec().decode(b"text", str)


TABLE = pa.table({"id": [1, 2, None], "word": pa.array(["a", "b", "a"]).dictionary_encode()})


def ipc(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def test_arrow_tables_and_batches_come_back() -> None:
    codec = ArrowCodec()
    chunked = pa.concat_tables([TABLE.select(["id"]), TABLE.select(["id"])])
    for value in (TABLE, TABLE.slice(1), TABLE.schema.empty_table(), chunked):
        assert codec.decode(codec.encode(value)).equals(value)
    batch = TABLE.to_batches()[0]
    assert codec.decode(memoryview(codec.encode(batch)), pa.RecordBatch).equals(batch)
    assert codec.decode(codec.encode(chunked), pa.RecordBatch).num_rows == 6
    assert codec.decode(codec.encode(TABLE.schema.empty_table()), pa.RecordBatch).num_rows == 0


def test_arrow_refuses_other_values() -> None:
    with pytest.raises(EncodeFailed, match="not dict"):
        ArrowCodec().encode({"id": [1]})
    with pytest.raises(DecodeFailed):
        ArrowCodec().decode(ipc(TABLE), dict)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_arrow_refuses_a_bomb_in_compressed_buffers(compression: str) -> None:
    """T3: buffers inside a stream could expand without a bound."""
    data = ipc(pa.table({"bomb": ["x" * 1000] * 20_000}), compression)
    assert len(data) < 500_000
    with pytest.raises(DecodeFailed, match="compressed"):
        ArrowCodec().decode(data)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_arrow_refuses_a_bomb_in_a_dictionary_alone(compression: str) -> None:
    """T3: a compressed dictionary spliced before an ordinary batch."""
    words = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), ["x" * 1000] * 20_000)
    table = pa.table({"bomb": words})
    parts = [
        message
        for form, kinds in ((compression, {"schema", "dictionary"}), (None, {"record batch"}))
        for message in pa.ipc.MessageReader.open_stream(ipc(table, form))
        if message.type in kinds
    ]
    spliced = b"".join(bytes(message.serialize()) for message in parts)
    assert pa.ipc.open_stream(spliced).read_all().equals(table)
    with pytest.raises(DecodeFailed, match="compressed"):
        ArrowCodec().decode(spliced)


@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_damaged_arrow_stream_never_leaves_its_buffer(where: float, flip: int) -> None:
    data = bytearray(ipc(TABLE))
    data[int(where * len(data))] ^= flip
    try:
        table = ArrowCodec().decode(data)
    except DecodeFailed:
        return
    if table.num_rows < 1000:
        table.validate(full=True)


def test_arrow_offsets_that_point_outside_are_refused() -> None:
    good = ipc(pa.table({"word": ["aaaa", "bbbb"]}))
    offsets = b"\x00\x00\x00\x00\x04\x00\x00\x00\x08\x00\x00\x00"
    assert good.count(offsets) == 1
    with pytest.raises(DecodeFailed):
        ArrowCodec().decode(good.replace(offsets, offsets[:8] + b"\x00\x00\xff\x7f"))


def test_protobuf_messages_come_back() -> None:
    codec = codecs.get("protobuf")
    message = struct_pb2.Struct()
    message.update({"id": 7})
    assert codec.decode(memoryview(codec.encode(message)), struct_pb2.Struct) == message


@pytest.mark.parametrize("kind", [None, dict, "Order"])
def test_protobuf_needs_the_message_class(kind: Any) -> None:
    with pytest.raises(DecodeFailed, match="message class"):
        ProtobufCodec().decode(b"", kind)


def test_protobuf_failures_are_typed() -> None:
    with pytest.raises(DecodeFailed):
        ProtobufCodec().decode(b"\xff\xff\xff", wrappers_pb2.StringValue)
    with pytest.raises(EncodeFailed, match="not dict"):
        ProtobufCodec().encode({})


def test_a_missing_extra_gives_the_exact_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2, bad input: a codec that is not there."""
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    with pytest.raises(MissingExtra) as caught:
        ProtobufCodec()
    assert "pip install 'penstock[protobuf]'" in str(caught.value)
    assert caught.value.extra == "protobuf"


def test_an_unknown_codec_says_what_there_is() -> None:
    """Issue 2, bad input: a codec that is not there."""
    with pytest.raises(UnknownCodec, match="arrow, json, msgpack, protobuf, raw") as caught:
        codecs.get("yaml")
    assert caught.value.name == "yaml"


def test_a_codec_without_a_fast_path_is_called_one_by_one() -> None:
    class Upper:
        name = "upper"

        def encode(self, value: Any) -> bytes:
            return str(value).upper().encode()

        def decode(self, data: bytes | bytearray | memoryview, type: Any = None) -> Any:
            return bytes(data).decode()

    assert encode_many(Upper(), ["a", "b"]) == [b"A", b"B"]


def test_json_costs_little_more_than_the_library() -> None:
    value = {"id": 7, "name": "abc", "amount": 1.5}
    ours, bare = JsonCodec().encode, msgspec.json.Encoder().encode
    runs = 20_000

    def best(call: Any) -> float:
        return min(timeit.repeat(lambda: call(value), number=runs, repeat=5)) / runs

    assert best(ours) - best(bare) < 1.5e-6

"""Typed payloads: what fits becomes columns, what does not gets a reason (S1)."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types

from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput
from penstock.pipelines.payload import Decoder
from penstock.pipelines.source import PenstockSource

FIELDS = pa.struct(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("ok", pa.bool_()),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
        ("in", pa.struct([("deep", pa.int64())])),
    ]
)


def decoded(*payloads: bytes, codec: str = "json") -> tuple[list[Any], list[str | None]]:
    value, fault = Decoder(FIELDS).decode(pa.array(payloads, pa.binary()), [codec] * len(payloads))
    assert value.type == FIELDS
    return value.to_pylist(), fault.to_pylist()


def test_missing_fields_are_null_and_unknown_ones_are_left_out() -> None:
    [value], [fault] = decoded(b'{"n": 1, "zzz": 2, "in": {"deep": 3, "er": 4}}')
    assert fault is None
    assert value == {
        "n": 1, "x": None, "s": None, "ok": None, "at": None, "tags": None, "in": {"deep": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "empty"),
        (b"nope", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"n": 1', "not a JSON object"),
        (b'{"n": "1"}', "does not fit"),
        (b'{"n": 99999999999999999999}', "does not fit"),
        (b'{"at": "yesterday"}', "does not fit"),
        (b'{"tags": "a"}', "does not fit"),
        (b'{"in": {"deep": []}}', "does not fit"),
        (b"\xff\xfe", "not a JSON object"),
    ],
)
def test_one_bad_payload_costs_its_neighbours_nothing(bad: bytes, why: str) -> None:
    values, faults = decoded(b'{"n": 1}', bad, b'{"n": 3}')
    assert [value and value["n"] for value in values] == [1, None, 3]
    assert faults[0] is faults[2] is None
    assert why in str(faults[1])


def test_white_space_and_line_ends_inside_a_payload_do_no_harm() -> None:
    values, faults = decoded(b'{\n "n":\n 1 }', b' {"n": 2}\n', b'{"n": 3}')
    assert [value["n"] for value in values] == [1, 2, 3]
    assert faults == [None] * 3


def test_two_objects_in_one_payload_are_one_fault_not_two_rows() -> None:
    values, faults = decoded(b'{"n": 1}\n{"n": 2}', b'{"n": 3}')
    assert [value and value["n"] for value in values] == [None, 3]
    assert "not a JSON object" in str(faults[0])


@given(
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"n": st.integers(-(2**63), 2**63 - 1)}).map(json.dumps),
            st.fixed_dictionaries({"s": st.text()}).map(json.dumps),
            st.text(),
        ).map(lambda text: text.encode("utf-8", "surrogatepass")),
        max_size=20,
    )
)
def test_every_payload_gets_a_value_or_a_fault_and_never_both(payloads: list[bytes]) -> None:
    values, faults = decoded(*payloads)
    assert len(values) == len(faults) == len(payloads)
    for payload, value, fault in zip(payloads, values, faults, strict=True):
        assert (value is None) == (fault is not None)
        if value is not None:
            assert value["n"] == json.loads(payload).get("n")


def test_arrow_payloads_of_one_row_are_values_too() -> None:
    encode = codecs.get("arrow").encode
    values, faults = decoded(
        encode(pa.table({"n": pa.array([5], pa.int32()), "s": ["a"]})),
        encode(pa.table({"n": [1, 2]})),
        b"nothing",
        codec="arrow",
    )
    assert [value and (value["n"], value["s"]) for value in values] == [(5, "a"), None, None]
    assert "2 rows" in str(faults[1])
    assert "does not fit" in str(faults[2])


def arrow(*batches: pa.RecordBatch, compressed: bool = False) -> bytes:
    """A stream of these batches."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd" if compressed else None)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write(batch)
    return bytes(sink.getvalue().to_pybytes())


def row(**fields: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([fields])


SCHEMA_OF_N = row(n=0).schema.serialize().to_pybytes()
NONE = row(n=0).slice(0, 0)
DOUBLE = pa.RecordBatch.from_pylist([{"n": 1}, {"n": 2}])
UNREADABLE = arrow(row(n=5, s="abc")).replace(b"abc", b"\xff\xfe\xfd")
DICTIONARY = row(n=9).append_column("s", pa.array(["d"]).dictionary_encode())
MADE_UP = (  # states that its metadata has one byte: everything else would look like it
    SCHEMA_OF_N + b"\xff\xff\xff\xff\x01\0\0\0" + bytes(8) + b"\xff\xff\xff\xff\0\0\0\0"
)  # fmt: skip
ARROW_SAMPLES: list[tuple[bytes, Any]] = [
    (arrow(row(n=1)), 1),
    (arrow(row(n=-1)), -1),  # its data looks like the mark of a message
    (arrow(row(n=2, s="x" * 40)), 2),
    (arrow(row(s="only", other=7)), None),
    (arrow(row(n=3.0)), 3),
    (arrow(DICTIONARY), 9),
    (arrow(row(n=4))[:-8], 4),  # without its end, which Arrow allows
]
ARROW_FAULTS: list[tuple[bytes, str]] = [
    (arrow(NONE), "0 rows"),
    (codecs.get("arrow").encode(pa.table({"n": pa.array([], pa.int64())})), "0 rows"),
    (MADE_UP, "does not fit"),
    (arrow(DOUBLE), "2 rows"),
    (arrow(row(n=1), row(n=2)), "2 rows"),
    (arrow(row(n=1, s="x" * 4_000), compressed=True), "compressed"),
    (arrow(row(n=1.5)), "does not fit"),
    (arrow(row(n=1))[:-20], "does not fit"),
    (arrow(row(n=1))[:40], "does not fit"),
    (UNREADABLE, "does not fit"),
    (b"\xff\xff\xff\xff", "does not fit"),
    (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"\xff\xff\xff\xff\0\0\0\0", "does not fit"),
    (b"", "does not fit"),
]


@given(st.lists(st.sampled_from([*ARROW_SAMPLES, *ARROW_FAULTS, (b'{"n": 6}', 6)]), max_size=40))
def test_arrow_payloads_of_any_kind_beside_each_other(chosen: list[tuple[bytes, Any]]) -> None:
    codec = ["json" if payload.startswith(b"{") else "arrow" for payload, _ in chosen]
    payloads = pa.array([payload for payload, _ in chosen], pa.binary())
    values, faults = Decoder(FIELDS).decode(payloads, codec)
    found = zip(values.to_pylist(), faults.to_pylist(), chosen, strict=True)
    for value, fault, (_, expected) in found:
        if isinstance(expected, str):
            assert value is None
            assert expected in fault
        else:
            assert fault is None, fault
            assert value["n"] == expected


def test_two_rows_in_one_payload_do_not_become_those_of_an_empty_neighbour() -> None:
    """Joined blindly they would be two rows of two payloads."""
    _, faults = decoded(arrow(row(n=1), row(n=2)), arrow(NONE), codec="arrow")
    assert [str(fault).partition(";")[0] for fault in faults] == [
        "an Arrow payload of 2 rows", "an Arrow payload of 0 rows",
    ]  # fmt: skip


def test_arrow_payloads_are_decoded_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: not row by row."""

    def alone(self: Decoder, payload: bytes) -> Any:
        raise AssertionError("a payload was decoded alone")

    monkeypatch.setattr(Decoder, "_arrow_alone", alone)
    values, faults = decoded(
        *(arrow(row(n=number, s="x" * (number % 7))) for number in range(500)), codec="arrow"
    )
    assert [value["n"] for value in values] == list(range(500))
    assert set(faults) == {None}


@pytest.mark.parametrize("small", [pa.int32(), pa.int64()])
def test_metadata_that_somebody_made_up_does_not_shift_the_others(small: pa.DataType) -> None:
    one = arrow(pa.record_batch({"n": pa.array([7], small)}))
    two = arrow(pa.record_batch({"n": pa.array([8, 9], small)}))
    schema = pa.schema([("n", small)]).serialize().to_pybytes()
    odd = schema + MADE_UP[len(SCHEMA_OF_N) :]
    values, faults = decoded(odd, one, two, odd, codec="arrow")
    assert [value and value["n"] for value in values] == [None, 7, None, None]
    assert [fault is None for fault in faults] == [False, True, False, False]


@pytest.mark.parametrize(
    "payloads",
    [
        [b'{"n":1}\n{"n":2}', b""],
        [b'{"n":1} {"n":2}', b" "],
        [b'{"n":', b'1} {"n":2}'],
        [b'{"n":1} {"n":2}', b'{"s":"}', b'"}'],
    ],
)
def test_json_that_only_adds_up_is_no_row_of_a_neighbour(payloads: list[bytes]) -> None:
    values, faults = decoded(*payloads, b'{"n": 5}')
    assert [value and value["n"] for value in values] == [None] * len(payloads) + [5]
    assert [fault is None for fault in faults] == [False] * len(payloads) + [True]


def test_white_space_around_payloads_is_no_reason_to_go_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(self: Decoder, payload: bytes) -> Any:
        raise AssertionError("a payload was decoded alone")

    monkeypatch.setattr(Decoder, "_json_alone", alone)
    values, _ = decoded(b'{"n": 1}\n', b' {"n": 2}', b'{"n": \n3}\r\n')
    assert [value["n"] for value in values] == [1, 2, 3]


def test_a_codec_that_is_not_decoded_is_named() -> None:
    """S1: the reader learns that it is msgpack, not that it is bad JSON; its neighbours are as they were."""
    codec = ["json", "msgpack", "raw", "arrow", "protobuf"]
    payloads = [
        b'{"n": 1}', codecs.get("msgpack").encode({"n": 2}), b'{"n": 3}', arrow(row(n=4)), b"\x08\x05",
    ]  # fmt: skip
    value, fault = Decoder(FIELDS).decode(pa.array(payloads, pa.binary()), codec)
    assert [each and each["n"] for each in value.to_pylist()] == [1, None, 3, 4, None]
    faults = fault.to_pylist()
    assert [each and each.partition(";")[0] for each in faults] == [
        None, "codec msgpack is not decoded", None, None, "codec protobuf is not decoded",
    ]  # fmt: skip


def test_payloads_that_all_are_of_another_codec_get_the_reason_each() -> None:
    """Even one that looks like JSON: a codec says what the bytes are."""
    values, faults = decoded(b'{"n": 1}', b"", codec="msgpack")
    assert values == [None, None]
    assert all(str(fault).startswith("codec msgpack is not decoded; ") for fault in faults)


def typed(kind: pa.DataType, *values: bytes) -> tuple[list[Any], list[bool]]:
    """What JSON values become as a type, and which of them are faults."""
    payloads = [b'{"v": %b, "other": 1.0}' % each for each in values]
    found, faults = Decoder(pa.struct([("v", kind)])).decode(
        pa.array(payloads), ["json"] * len(payloads)
    )
    return [each and each["v"] for each in found.to_pylist()], faults.is_valid().to_pylist()


def test_numbers_are_read_as_text_where_a_text_is_wanted() -> None:
    """F5: digit by digit as they were written, as Spark's from_json does."""
    values, faults = typed(pa.string(), b"5", b'"5"', b"1.10", b"-1e5", b"true", b"null", b"[1]")
    assert values == ["5", "5", "1.10", "-1e5", "true", None, None]
    assert faults == [False] * 6 + [True]
    deep = pa.list_(pa.struct([("s", pa.string()), ("n", pa.int64())]))
    assert typed(deep, b'[{"s": 7, "n": 7}, null]') == ([[{"s": "7", "n": 7}, None]], [False])


def test_base64_is_decoded_where_bytes_are_wanted() -> None:
    """F5: what is none is a fault, and its neighbours are not."""
    values, faults = typed(pa.binary(), b'"AAH/"', b"null", b'"%%"', b'"aGk="', b"7")
    assert values == [b"\x00\x01\xff", None, None, b"hi", None]
    assert faults == [False, False, True, False, True]
    assert typed(pa.list_(pa.binary()), b'["aGk=", null]', b"[]") == (
        [[b"hi", None], []],
        [False] * 2,
    )


def test_dates_are_read() -> None:
    values, faults = typed(pa.date32(), b'"2026-01-02"', b'"soon"', b"null")
    assert values == [datetime.date(2026, 1, 2), None, None]
    assert faults == [False, True, False]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (types.MapType(types.StringType(), types.IntegerType()), "MAP<STRING,INT>"),
        (types.VariantType(), "VARIANT"),
        (types.DayTimeIntervalType(), "INTERVAL"),
        (types.TimeType(), "TIME"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda kind: kind, types.ArrayType])
def test_types_that_no_payload_is_read_as_are_refused_with_the_schema(
    kind: Any, name: str, wrap: Any
) -> None:
    """F5: they were taken, and each row was a fault."""
    value = types.StructType([types.StructField("deep", wrap(kind))])
    schema = types.StructType([types.StructField("value", value)])
    with pytest.raises(InvalidInput, match=rf"value\.deep.* is {name}.*from_json"):
        PenstockSource({"url": "data"}).streamReader(schema)

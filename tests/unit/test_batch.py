"""EventBatch: every combination of columns comes back, slices share memory, hostile bytes are refused."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.model.batch import HEAD, MAX_BODY_BYTES, BatchHead, EventBatch, check_columns
from penstock.model.compressor import compressors
from penstock.model.errors import (
    DecodeFailed,
    FormatTooNew,
    InvalidBatch,
    InvalidHeaders,
    PenstockError,
    UnknownCompressor,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
TIMES = st.integers(-(2**62), 2**62)


@st.composite
def batches(draw, max_count: int = 20):
    """A batch with any set of columns, and the same as plain lists."""
    count = draw(st.integers(1, max_count))

    def column(values):
        return draw(st.none() | st.lists(values, min_size=count, max_size=count))

    rows = {
        "payloads": draw(st.lists(st.binary(max_size=30), min_size=count, max_size=count)),
        "keys": column(st.none() | st.binary(max_size=9)),
        "headers": column(st.none() | st.dictionaries(TEXT, TEXT, max_size=3)),
        "tokens": column(st.binary(min_size=16, max_size=16)),
        "expires_us": column(st.integers(0, 2**62)),
        "priority": column(st.integers(0, 9)),
    }
    times = draw(TIMES | st.lists(TIMES, min_size=count, max_size=count))
    batch = EventBatch.build(
        "orders.created.v1.acme", rows.pop("payloads"), times_us=times, tenant="acme",
        codec="json", schema_id=draw(st.integers(0, 2**32 - 1)),
        token_base=draw(st.binary(min_size=16, max_size=16).filter(lambda b: b < b"\xff")), **rows,
    )  # fmt: skip
    batch.partition = draw(st.integers(0, 2**32 - 1))
    batch.base_offset = draw(st.integers(0, 2**63))
    batch.append_time_us = draw(TIMES)
    if draw(st.booleans()):
        batch.append_times = np.array(
            draw(st.lists(TIMES, min_size=count, max_size=count)), dtype=np.int64
        )
    return batch


def rows(batch: EventBatch) -> list[tuple]:
    """Everything a batch says about each event."""
    return [
        (
            event.key, event.payload, dict(event.headers), event.token.bytes, event.time_us,
            batch.append_time(event.index), event.expires_us, event.priority, event.offset,
            event.topic, event.tenant, event.partition, event.codec, batch.schema_id,
        )
        for event in batch
    ]  # fmt: skip


@given(batches(), st.sampled_from(["none", "lz4", "zstd", "snappy"]))
def test_every_column_combination_comes_back(batch: EventBatch, compressor: str) -> None:
    batch.compressor = compressor
    again = EventBatch.decode(batch.encode())
    check_columns(again)
    assert rows(again) == rows(batch)
    assert again.explicit_tokens == batch.explicit_tokens
    assert bytes(again.token_bytes()) == bytes(batch.token_bytes())
    if compressor == "none":
        assert again.encode() == batch.encode()


@given(batches(), st.data())
def test_slices_of_slices_are_the_same_events_and_encode_on_their_own(batch, data) -> None:
    expected = rows(batch)
    for _ in range(3):
        start = data.draw(st.integers(0, len(expected) - 1))
        stop = data.draw(st.integers(start + 1, len(expected)))
        batch, expected = batch.slice(start, stop), expected[start:stop]
        assert rows(batch) == expected
        assert rows(EventBatch.decode(batch.encode())) == expected


@given(batches())
def test_one_event_is_the_same_alone_and_in_the_iteration(batch: EventBatch) -> None:
    for event in batch:
        alone = batch.event(event.index, attempt=3)
        assert (alone.key, alone.payload, dict(alone.headers)) == (
            event.key, event.payload, dict(event.headers)
        )  # fmt: skip
        assert alone.attempt == 3
    assert list(batch.keys()) == [event.key for event in batch]


def test_decoding_copies_nothing() -> None:
    data = EventBatch.build("orders", [b"x" * 1_000, b"y" * 1_000], keys=[b"a", b"b"]).encode()
    whole = np.frombuffer(data, dtype=np.uint8)
    batch = EventBatch.decode(data)
    for part in (batch.payload_column.data, batch.key_column.data, batch.payload_column.offsets):
        assert np.shares_memory(whole, np.frombuffer(part, dtype=np.uint8))
    sliced = batch.slice(1, 2)
    assert np.shares_memory(whole, np.frombuffer(sliced.payload_column.data, dtype=np.uint8))


def test_a_batch_of_one_costs_little_more_than_its_payload() -> None:
    one = EventBatch.build("orders.created.v1.acme", [b"x" * 100], token_base=b"t" * 16)
    assert len(one.encode()) <= 100 + HEAD.size + 48
    assert len(one.encode()) < 240


def test_columns_that_say_the_same_for_all_events_are_stored_once() -> None:
    many = EventBatch.build("orders", [b""] * 1_000, token_base=b"t" * 16, times_us=7)
    assert len(many.encode()) < HEAD.size + 100 + 4 * 1_001


def test_every_buffer_of_a_body_is_aligned_to_eight_bytes() -> None:
    batch = EventBatch.build("orders", [b"a", b"bcd"], keys=[b"k", None], priority=[1, 2])
    head, body = batch.encode_parts()
    assert len(head) % 8 == 0
    assert len(body) % 8 == 0


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["keys", "headers", "tokens", "expires_us", "priority"])
def test_columns_of_different_length_are_refused_by_name(column: str) -> None:
    values = {"keys": [b"k"], "headers": [{}], "tokens": [b"t" * 16], "expires_us": [1],
              "priority": [1]}  # fmt: skip
    with pytest.raises(InvalidBatch) as caught:
        EventBatch.build("orders", [b"a", b"b"], **{column: values[column]})
    assert caught.value.column == column


def test_times_of_another_length_and_empty_batches_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="times_us"):
        EventBatch.build("orders", [b"a", b"b"], times_us=[1])
    with pytest.raises(InvalidBatch, match="at least one"):
        EventBatch.build("orders", [])


@pytest.mark.parametrize("payloads", [["text"], [b"fine", 7], [None, b"x"], [b"a", "b"]])
def test_payloads_that_are_not_bytes_are_refused(payloads) -> None:
    with pytest.raises(InvalidBatch) as caught:
        EventBatch.build("orders", payloads).encode()
    assert caught.value.column == "payloads"


def test_keys_that_are_not_bytes_and_tokens_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="keys"):
        EventBatch.build("orders", [b"a", b"b"], keys=[b"k", 3])
    with pytest.raises(InvalidBatch, match="16 bytes"):
        EventBatch.build("orders", [b"a"], tokens=[b"short"])
    with pytest.raises(InvalidHeaders):
        EventBatch.build("orders", [b"a"], headers=[{"a": 1}])


# -- hostile bytes --------------------------------------------------------------------------------

REFUSALS = (InvalidBatch, FormatTooNew, DecodeFailed, UnknownCompressor)


def use(data: bytes) -> None:
    """Decode, check and read everything; only typed refusals may come out."""
    batch = EventBatch.decode(data, limit_bytes=1 << 20)
    check_columns(batch)
    for event in batch:
        assert len(event.payload) <= len(data) + (1 << 20)
        assert event.token is not None
        assert event.expires_us is None or event.expires_us
    batch.slice(0, 1).encode()


@pytest.fixture(scope="module", params=["none", "lz4", "zstd", "snappy"])
def sample(request) -> bytes:
    batch = EventBatch.build(
        "orders.created", [b"payload" * 3, b"", b"x"], keys=[b"k", None, b"kk"],
        headers=[{"a": "b"}, None, {"c": "d", "e": "f"}], tokens=[bytes([n]) * 16 for n in range(3)],
        times_us=[1, 2, 3], expires_us=[0, 5, 6], priority=[1, 2, 3],
    )  # fmt: skip
    batch.compressor = request.param
    return batch.encode()


def test_a_batch_cut_short_anywhere_is_refused(sample: bytes) -> None:
    for length in range(len(sample)):
        try:
            use(sample[:length])
        except REFUSALS:
            continue
        # Only padding behind the last column may be missing.
        assert len(sample) - length < 8


def test_a_batch_with_any_bit_flipped_is_refused_or_read_inside_its_bytes(sample: bytes) -> None:
    for place in range(len(sample) * 8):
        broken = bytearray(sample)
        broken[place >> 3] ^= 1 << (place & 7)
        try:
            use(bytes(broken))
        except REFUSALS:
            continue


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.integers(0, 10),
    st.sampled_from([0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFE]),
)
def test_a_lying_head_is_refused(field: int, lie: int) -> None:
    data = bytearray(EventBatch.build("orders", [b"a", b"b"], headers=[{"a": "b"}, None]).encode())
    values = list(HEAD.unpack_from(data))
    targets = [1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14]
    try:
        values[targets[field]] = lie
        HEAD.pack_into(data, 0, *values)
    except struct.error:
        return
    with contextlib.suppress(REFUSALS):
        use(bytes(data))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PenstockError):
        use(data)
    with pytest.raises(PenstockError):
        use(b"\x01" + data)


def test_a_version_of_the_future_says_so() -> None:
    data = bytearray(EventBatch.build("orders", [b"a"]).encode())
    data[0] = 2
    with pytest.raises(FormatTooNew) as caught:
        EventBatch.decode(bytes(data))
    assert caught.value.version == 2


@pytest.mark.parametrize("name", ["lz4", "zstd", "snappy"])
def test_a_bomb_is_refused_before_it_expands(name: str) -> None:
    batch = EventBatch.build("orders", [b"\0" * 4_000_000])
    batch.compressor = name
    data = batch.encode()
    assert len(data) < 400_000
    with pytest.raises(DecodeFailed):
        EventBatch.decode(data, limit_bytes=1_000_000)
    lying = bytearray(data)
    values = list(HEAD.unpack_from(lying))
    values[9] = 1_000  # says that it is small, and is not
    HEAD.pack_into(lying, 0, *values)
    with pytest.raises(PenstockError):
        EventBatch.decode(bytes(lying), limit_bytes=1_000_000)


def test_the_bound_on_a_body_holds_three_full_columns() -> None:
    assert MAX_BODY_BYTES == 3 << 30


def test_check_columns_refuses_offsets_that_run_backwards() -> None:
    batch = EventBatch.build("orders", [b"abc", b"def", b"ghi"])
    offsets = np.array([0, 6, 3, 9], dtype=np.int32)
    batch.payload_column.offsets = offsets.data.cast("B")
    with pytest.raises(InvalidBatch, match="backwards"):
        check_columns(EventBatch.decode(batch.encode()))


def test_check_columns_refuses_headers_that_are_no_text() -> None:
    batch = EventBatch.build("orders", [b"a", b"b"], headers=[{"name": "text"}, None])
    data = batch.encode().replace(b"text", b"\xff\xfe\xfd\xfc")
    with pytest.raises(InvalidBatch, match="text"):
        check_columns(EventBatch.decode(data))


def test_a_head_can_be_read_without_its_columns() -> None:
    batch = EventBatch.build("orders", [b"a", b"b"], tenant="acme", codec="json")
    batch.base_offset, batch.partition, batch.append_time_us = 41, 3, 99
    head = BatchHead.parse(memoryview(batch.encode()))
    assert (head.topic, head.tenant, head.codec, head.count) == ("orders", "acme", "json", 2)
    assert (head.base_offset, head.partition, head.append_time_us) == (41, 3, 99)
    assert head.compressor in compressors


def test_a_batch_that_came_over_a_wire_can_be_compressed_and_read_back() -> None:
    """What was decoded holds its stored bytes already; choosing a compressor must replace them."""
    batch = EventBatch.decode(EventBatch.build("t", [b"x" * 500] * 40).encode())
    batch.compress_with("lz4")
    stored = batch.encode()
    assert len(stored) < 1_000
    assert EventBatch.decode(stored).payloads() == [b"x" * 500] * 40

"""Limits of protocol messages: the values inside are counted before decoding, never too low (rows Q1, Q7)."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.broker.engine import subscribe_message
from penstock.engines.engine import Subscribe
from penstock.model.errors import ProtocolViolation
from penstock.wire import limits
from penstock.wire import message as say
from penstock.wire.encodings import MESSAGES, for_mark, wire
from penstock.wire.frame import Frame, Kind, Mark
from penstock.wire.limits import check_message, json_values, protobuf_values, raw_values

MANY = 1 << 30

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=4), inner, max_size=20)
    ),
    max_leaves=60,
)


def made(value: Any) -> int:
    """What a reader makes of a value."""
    if isinstance(value, dict):
        return 1 + sum(made(key) + made(each) for key, each in value.items())
    if isinstance(value, list):
        return 1 + sum(map(made, value))
    return 1


@given(plain)
def test_raw_values_are_counted_to_the_last(value: Any) -> None:
    assert raw_values(msgspec.msgpack.encode(value), MANY) == made(value)


@pytest.mark.parametrize("count", [15, 16, 70_000])
@pytest.mark.parametrize("make", [list, dict.fromkeys], ids=["list", "map"])
def test_raw_lists_and_maps_of_every_length(make: Any, count: int) -> None:
    value = make(range(count))
    assert raw_values(msgspec.msgpack.encode(value), MANY) == made(value)


@pytest.mark.parametrize("size", [31, 32, 255, 256, 65_536])
@pytest.mark.parametrize("kind", ["text", "bytes", "extension"])
def test_raw_texts_and_bytes_of_every_length(kind: str, size: int) -> None:
    one: Any = {"text": "x" * size, "bytes": bytes(size)}.get(
        kind, msgspec.msgpack.Ext(5, bytes(size))
    )
    assert raw_values(msgspec.msgpack.encode([one, one]), MANY) == 3


@given(st.binary(max_size=200), st.integers(0, 50))
def test_raw_garbage_is_no_trouble(data: bytes, most: int) -> None:
    assert raw_values(data, most) <= most + 1
    assert raw_values(memoryview(data), most) == raw_values(data, most)


@given(plain.filter(lambda value: not isinstance(value, bytes)))
def test_json_values_are_never_fewer(value: Any) -> None:
    assert json_values(msgspec.json.encode(value)) >= made(value)


def test_protobuf_values_are_never_fewer() -> None:
    """As many as there are fields and numbers, in messages inside messages, maps, lists and JSON."""
    settle = say.Settle(1, [say.Settlement(2, 3, [1, 2] * 50, [(1, None, "x")], [(2, "y")])] * 20)
    publish = say.Publish(
        1, [say.DraftMeta("a", headers=[{"a": "b", "c": "d"}, None])] * 5, {"x": 1}
    )
    ask = say.Ask("x", {"a": [[]] * 100})
    for kind, message, least in (
        (Kind.SETTLE, settle, 20 * 107), (Kind.PUBLISH, publish, 5 * 8 + 3), (Kind.ASK, ask, 100)
    ):  # fmt: skip
        meta = bytes(for_mark(Frame(kind, 1, say.encode(message)), Mark.PROTOBUF).meta)
        assert protobuf_values(meta, wire().schema.table(MESSAGES[kind]), MANY) >= least


@given(st.sampled_from([kind for kind in MESSAGES if kind < 0x40]), st.binary(max_size=200))
def test_protobuf_garbage_is_no_trouble(kind: Kind, data: bytes) -> None:
    with contextlib.suppress(ProtocolViolation):
        assert protobuf_values(data, wire().schema.table(MESSAGES[kind]), MANY) >= 0


@pytest.mark.parametrize("hidden", [b"\x0b", b"\x0c", b"\x0f"], ids=["group", "its end", "nothing"])
def test_nothing_hides_behind_what_protobuf_skips(hidden: bytes) -> None:
    """Inside a group a length could lead the count past what a reader then finds."""
    with pytest.raises(ProtocolViolation):
        protobuf_values(hidden + b"\x12\x7f", wire().schema.table(say.Settle), MANY)


def test_a_number_without_end_is_none() -> None:
    with pytest.raises(ProtocolViolation):
        protobuf_values(b"\x08" + b"\xff" * 1_000, wire().schema.table(say.Settle), MANY)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind < 0x40])
def test_every_kind_has_its_limit(kind: Kind) -> None:
    large = {Kind.PUBLISH: 16, Kind.TRANSACT: 16, Kind.ASK: 16, Kind.SUBSCRIBE: 4}
    limit = large.get(kind, 1) << 20
    check_message(Frame(kind, 1, bytes(limit)))
    with pytest.raises(ProtocolViolation) as raised:
        check_message(Frame(kind, 1, bytes(limit + 1)))
    assert raised.value.data == {"size_bytes": limit + 1, "limit_bytes": limit}


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (Kind.PUBLISH, limits.MAX_VALUES),
        (Kind.HELLO, limits.MAX_VALUES),
        (Kind.SETTLE, limits.MAX_SETTLE_VALUES),
    ],
)
def test_a_message_holds_so_many_values(kind: Kind, most: int) -> None:
    check_message(Frame(kind, 1, msgspec.msgpack.encode([0] * (most - 1))))
    with pytest.raises(ProtocolViolation) as raised:
        check_message(Frame(kind, 1, msgspec.msgpack.encode([0] * most)))
    assert raised.value.data == {"limit_values": most}


def test_a_client_that_holds_very_much_can_join_again() -> None:
    """T4: it names as many deliveries as fit; the others come again."""
    topic = "t" * 255
    held = say.Held(1 << 40, topic, 1_023, 1 << 60, 1 << 20, 1 << 10, 1 << 20)

    class Delivery:
        def in_hand(self) -> say.Held:
            return held

    class Feed:
        number = 1
        wanted = Subscribe("g" * 128, say.GroupSpec((topic,) * 1_024), "m" * 128, 1 << 20)

    message = subscribe_message(Feed(), [Delivery()] * 20_000)  # type: ignore[arg-type, list-item]
    assert len(message.held) == say.MAX_HELD
    check_message(Frame(Kind.SUBSCRIBE, 1, say.encode(message)))
    least = 1 << 20  # of the frames that this broker takes
    message = subscribe_message(Feed(), [Delivery()] * 20_000, least)  # type: ignore[arg-type, list-item]
    assert len(message.held) > 1_000
    assert len(say.encode(message)) < least

"""Messages of a client that means harm: every field of every message, with values that hurt.

Half of the values are such as an honest client sends, so that the others get far enough to do
damage: the names of things that exist, deliveries that were made, feeds that are open.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fuzz_targets import CONTROL, GROUP, SPEC, TOPIC
from hypothesis import strategies as st
from msgspec import inspect

from penstock.core.entry import GroupSpec
from penstock.engines.answers import REQUESTS
from penstock.model.batch import EventBatch
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.mark import MESSAGES

HUGE = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)]
INTEGERS = st.one_of(st.integers(0, 6), st.sampled_from(HUGE), st.just(10**12))
FLOATS = st.sampled_from([0.0, 1.0, 0.01, -1.0, 1e-9, 1e9, 1e300, float("inf"), float("-inf"), float("nan")])  # fmt: skip
WORDS = [TOPIC, CONTROL, GROUP, "idle", "control", "guest", "orders.#", "#", "_audit.events", "_scheduled",
         "_inbox.x", "raw", "json", "queue", "log", "any", "key", "single", "earliest", "latest",
         "offset:1", "offset:99999999999999999999", "time:-5", "REPLAY", "PURGE", "", " ", ".", "a..b",
         "x" * 300, "ü" * 200, "\x00", "a/b", "../../etc"]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
BINARIES = st.one_of(st.sampled_from([b"", b"x", b"k" * 16, b"z" * 5_000]), st.binary(max_size=20))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS, BINARIES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)

SCALARS: dict[type, Any] = {
    inspect.IntType: INTEGERS,
    inspect.FloatType: st.one_of(FLOATS, INTEGERS),
    inspect.StrType: TEXTS,
    inspect.BytesType: BINARIES,
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
    inspect.AnyType: ANYTHING,
}
MAX_DEPTH = 4


def values(kind: inspect.Type, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a field of this type could be given."""
    if type(kind) in SCALARS:
        return SCALARS[type(kind)]
    if depth > MAX_DEPTH:
        return st.none()
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.UnionType):
        return st.one_of([values(each, depth) for each in kind.types])
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return st.lists(values(kind.item_type, depth + 1), max_size=3)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*[values(each, depth + 1) for each in kind.item_types])
    if isinstance(kind, inspect.DictType):
        keys, each = values(kind.key_type, depth + 1), values(kind.value_type, depth + 1)
        return st.dictionaries(keys, each, max_size=3)
    assert isinstance(kind, inspect.StructType), kind
    return st.one_of([structs(kind, depth)] + ([st.just(SPEC)] if kind.cls is GroupSpec else []))


def structs(kind: inspect.StructType, depth: int = 0) -> st.SearchStrategy[Any]:
    """Maps that look like a struct; fields that have a default may be left out."""
    needed = {field.encode_name: values(field.type, depth + 1) for field in kind.fields if field.required}  # fmt: skip
    others = {field.encode_name: values(field.type, depth + 1) for field in kind.fields if not field.required}  # fmt: skip
    return st.fixed_dictionaries(needed, optional=others)


def _struct_of(cls: type) -> inspect.StructType:
    found = inspect.type_info(cls)
    assert isinstance(found, inspect.StructType)
    return found


def metas(cls: type) -> st.SearchStrategy[bytes]:
    """Messages of a kind, encoded."""
    return structs(_struct_of(cls)).map(msgspec.msgpack.encode)


def asks() -> st.SearchStrategy[bytes]:
    """Administrative requests with fields of the right names."""
    each = [
        st.builds(
            lambda fields, name=name: msgspec.msgpack.encode({"request": name, "fields": fields}),
            structs(_struct_of(cls)),
        )
        for name, cls in REQUESTS.items()
    ]
    return st.one_of(each)


def batches() -> st.SearchStrategy[bytes]:
    """Batches to publish, whole and damaged."""

    def build(count: int, topic: str, damage: list[tuple[int, int]]) -> bytes:
        whole = EventBatch.build(
            topic, [b"p"] * count, keys=[b"k"] * count, headers=[{"a": "b"}] * count,
            tokens=[bytes([number]) * 16 for number in range(count)], expires_us=[1] * count, priority=[9] * count,
        )  # fmt: skip
        data = bytearray(whole.encode())
        for at, byte in damage:
            data[at % len(data)] = byte
        return bytes(data)

    damage = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)
    return st.one_of(
        st.builds(build, st.integers(1, 5), st.sampled_from([TOPIC, "other.topic"]), damage),
        st.binary(max_size=40),
    )


# What honest clients send, to bring the broker into states where the rest bites.
GOOD = [
    Frame(Kind.SUBSCRIBE, 901, say.encode(say.Subscribe(1, GROUP, SPEC, "guest", 10))),
    Frame(Kind.SUBSCRIBE, 902, say.encode(say.Subscribe(2, "log", GroupSpec((TOPIC,), "log"), "guest", 10))),
    Frame(Kind.SETTLE, 0, say.encode(say.Settle(1, [say.Settlement(1, 3, [0, 1], [(1, 0.0, "no")], [(2, "bad")])]))),
    Frame(Kind.FETCH, 903, say.encode(say.Feed(2))),
    Frame(Kind.PUBLISH, 904, say.encode(say.Publish(1, [say.DraftMeta(TOPIC, payloads=[b"x"])]))),
    Frame(Kind.UNSUBSCRIBE, 905, say.encode(say.Feed(1))),
    Frame(Kind.FLUSH, 906, b""),
    Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat(10))),
    Frame(Kind.BYE, 0, b""),
]  # fmt: skip


def hostile_frames() -> st.SearchStrategy[Frame]:
    """One frame, of any kind that clients send."""
    requests = st.integers(0, 4)
    kinds = [kind for kind in MESSAGES if kind < Kind.WELCOME]
    each: list[st.SearchStrategy[Frame]] = [
        st.builds(Frame, st.just(int(kind)), requests, metas(MESSAGES[kind])) for kind in kinds
    ]
    each.append(st.builds(Frame, st.just(int(Kind.ASK)), requests, asks()))
    parts = st.lists(batches(), max_size=2).map(tuple)
    topics = st.sampled_from([TOPIC, "other.topic"])
    drafts = st.lists(
        st.builds(lambda topic, part: {"topic": topic, "part": part}, topics, st.integers(0, 2)),
        min_size=1, max_size=2,
    )  # fmt: skip
    publishes = st.builds(
        lambda sequence, drafts: msgspec.msgpack.encode({"sequence": sequence, "drafts": drafts}),
        INTEGERS, drafts,
    )  # fmt: skip
    each.append(st.builds(Frame, st.just(int(Kind.PUBLISH)), requests, publishes, parts))
    each.append(st.builds(Frame, st.sampled_from([int(kind) for kind in Kind]), requests, BINARIES))
    each.append(st.sampled_from(GOOD))
    return st.one_of(each)


def conversations() -> st.SearchStrategy[list[Frame]]:
    """What one client sends, one after another; often with a subscription first."""
    rest = st.lists(hostile_frames(), min_size=1, max_size=6)
    return st.builds(lambda first, rest: [*first, *rest], st.sampled_from([[], GOOD[:1], GOOD[:2]]), rest)  # fmt: skip

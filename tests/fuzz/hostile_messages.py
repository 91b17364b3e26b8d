"""What a client sends that means harm: honest messages in which a value or two were replaced.

Honest, so that they get far enough to do damage: they name things that exist, deliveries that were
made, feeds that are open. The values are those that hurt: numbers at the edges of their types and
far beyond what they count, times that are no numbers, names that are too long or no names.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fuzz_targets import CONTROL, SPEC, TOPIC
from hypothesis import strategies as st

from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.model.batch import EventBatch
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind

HUGE = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63), 10**12]
INTEGERS = st.one_of(st.sampled_from(HUGE), st.integers(-2, 300))
FLOATS = st.sampled_from(
    [0.0, 1e-9, -1.0, 0.5, 1e9, 1e18, 1e300, float("inf"), float("-inf"), float("nan")]
)
WORDS = [
    TOPIC, CONTROL, "billing", "idle", "control", "guest", "direct.guest", "orders.#", "#", "*", "_scheduled",
    "_audit.events", "_dlq.default", "_inbox.x", "raw", "json", "queue", "log", "any", "key", "single",
    "earliest", "latest", "offset:1", "offset:99999999999999999999", "time:-5", "time:--5", "time:9e9",
    "REPLAY", "PURGE", "* * * * *", "", " ", ".", "a..b", "x" * 300, "ü" * 200, "\x00", "a/b", "../../etc",
    "orders.created/0/1", "orders.created/0/99999999999999999999", "orders.created/-1/0",
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
BINARIES = st.one_of(st.sampled_from([b"", b"k" * 16, b"z" * 5_000]), st.binary(max_size=20))
ANYTHING = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS, BINARIES)

FULL = say.DraftMeta(
    TOPIC, payloads=[b"a", b"b"], keys=[b"k", None], headers=[{"h": "v"}, None], times_us=[5, 6],
    tokens=[b"t" * 16, b"u" * 16], expires_us=[9, 10], priority=[1, 2], partition=0,
)  # fmt: skip
LATER = say.DraftMeta(TOPIC, payloads=[b"a"], expires_us=[10**16], priority=[1], deliver_at_us=1)
SETTLEMENT = say.Settlement(1, 5, [0, 1], [(1, 0.5, "no")], [(2, "bad")], [(3, 1.0)], [4])
HELD = say.Held(7, TOPIC, 0, 0, 5, 1, 5)
LOG_HELD = say.LogHeld(TOPIC, 0, 0, 2, 1)
LOG = GroupSpec((TOPIC,), "log")
FIRM = GroupSpec((TOPIC,), "queue", "key", Retry((1, 10), 3), 1.0, {"h": "v"}, "offset:1")

HONEST: list[tuple[Kind, say.Message | None]] = [
    (Kind.SUBSCRIBE, say.Subscribe(1, "billing", SPEC, "guest", 10)),
    (Kind.SUBSCRIBE, say.Subscribe(2, "reading", LOG, "guest", 10, [], [LOG_HELD])),
    (Kind.SUBSCRIBE, say.Subscribe(3, "firm", FIRM, "guest", 10, [HELD])),
    (Kind.PUBLISH, say.Publish(1, [FULL])),
    (Kind.PUBLISH, say.Publish(2, [LATER, say.DraftMeta(TOPIC, payloads=[b"x"])])),
    (Kind.TRANSACT, say.Transact(3, [FULL], [(1, 0)], [say.Commit(2, [(TOPIC, 0, 1)])], bytes(16))),
    (Kind.SETTLE, say.Settle(1, [SETTLEMENT])),
    (Kind.SETTLE, say.Settle(2, [say.Settlement(1, 5, [4, 1])])),
    (Kind.FETCH, say.Feed(2)),
    (Kind.COMMIT, say.Commit(2, [(TOPIC, 0, 1)])),
    (Kind.UNSUBSCRIBE, say.Feed(1)),
    (Kind.READ, say.Read(TOPIC, 0, 0, 3, 1_000)),
    (Kind.HEARTBEAT, say.Beat(10)),
    (Kind.FLUSH, None),
    (Kind.BYE, None),
]
HELLO = say.Hello("guest", tenant="default", subject="me", subscriptions=[TOPIC], max_inflight=5,
                  deliveries=[1], pending=[1])  # fmt: skip
ACTOR: dict[str, Any] = {"actor": "me", "reason": "why"}
SPECIFIED = {
    "partitions": 2,
    "retention_age_s": 60.0,
    "retention_bytes": 1_000_000,
    "write_once": False,
}
ROUTE = {"pattern": "orders.#", "destination": "billing", "tenant": "default"}
RECURRING = {"id": "s", "topic": TOPIC, "payload": b"p", "codec": "raw", "headers": {"h": "v"}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("ListTopics", {"system": True}),
    ("DescribeTopic", {"topic": TOPIC}),
    ("CreateTopic", {"topic": "new.topic", "spec": SPECIFIED}),
    ("ConfigureTopic", {"topic": TOPIC, "partitions": 3, "retention_age_s": 60.0, "actor": "me"}),
    ("DeleteTopic", {"topic": TOPIC, "actor": "me", "confirm": "DELETE"}),
    ("Seal", {"before": 5, "actor": "me"}),
    ("Seal", {}),
    ("FindOffset", {"topic": TOPIC, "partition": 0, "time_us": 5}),
    ("AdmitReplay", {"tenant": "default"}),
    ("ListGroups", {}),
    ("DescribeGroup", {"group": "idle"}),
    ("ResetGroup", {"group": "idle", "to": "offset:1", "topic": TOPIC, "actor": "me", "confirm": "RESET"}),
    ("DeleteGroup", {"group": "idle", "actor": "me", "confirm": "DELETE"}),
    ("ListDead", {"consumer": "billing", "topic": TOPIC, "limit": 5, "offset": 1}),
    ("InspectDead", {"id": "x"}),
    ("ReplayDead", {"ids": ["x"], "target_consumer": "billing", "target_topic": TOPIC, "confirm": "REPLAY", **ACTOR}),
    ("Quarantine", {"id": "orders.created/0/0", "consumer": "billing", "topic": TOPIC, **ACTOR}),
    ("Quarantine", {"id": "x", "consumer": "billing", "topic": TOPIC, "payload": b"p", **ACTOR}),
    ("PurgeDead", {"ids": ["x@billing"], "confirm": "PURGE", **ACTOR}),
    ("QueryAudit", {"message": "x", "actor": "me", "since_us": 0, "until_us": 10, "operation": "dlq.purge"}),
    ("VerifyAudit", {}),
    ("ListRoutes", {}),
    ("PutRoute", {"route": ROUTE, "actor": "me"}),
    ("RemoveRoute", {"pattern": "orders.#", "destination": "billing", "actor": "me", "confirm": "REMOVE"}),
    ("SwitchRoute", {"pattern": "orders.#", "destination": "billing", "enabled": False, "actor": "me"}),
    ("ResolveRoute", {"topic": TOPIC, "tenant": "default"}),
    ("ListSchedules", {}),
    ("PutSchedule", {**RECURRING, "every_us": 3_000_000}),
    ("PutSchedule", {**RECURRING, "cron": "* * * * *"}),
    ("RemoveSchedule", {"id": "s", "confirm": "REMOVE"}),
    ("ListSessions", {}),
    ("ListTenants", {}),
    ("Pressure", {}),
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a message."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, each in value.items():
            found += _places(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            found += _places(each, (*path, index))
    return found


def _harm(value: Any) -> st.SearchStrategy[Any]:
    """Something else in place of a value, mostly of its type."""
    if isinstance(value, bool) or value is None:
        return ANYTHING
    if isinstance(value, list):
        return st.one_of(st.just([]), st.just(value * 3), ANYTHING.map(lambda one: [one]), ANYTHING)
    if isinstance(value, dict):
        return st.one_of(st.just({}), ANYTHING)
    kinds = {int: INTEGERS, float: st.one_of(FLOATS, INTEGERS), str: TEXTS, bytes: BINARIES}
    return st.one_of(kinds[type(value)], kinds[type(value)], ANYTHING)


@st.composite
def twisted(draw: st.DrawFn, honest: Any) -> bytes:
    """A message with up to three values replaced, encoded."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(honest))
    for _ in range(draw(st.integers(0, 3))):
        places = _places(value)
        if not places:
            break
        *way, last = draw(st.sampled_from(places))
        inside = value
        for step in way:
            inside = inside[step]
        inside[last] = draw(_harm(inside[last]))
    return msgspec.msgpack.encode(value)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """A batch to publish, whole or damaged."""
    count = draw(st.integers(1, 5))
    whole = EventBatch.build(
        draw(st.sampled_from([TOPIC, "other.topic"])), [b"p"] * count, keys=[b"k"] * count,
        headers=[{"a": "b"}] * count, tokens=[bytes([number]) * 16 for number in range(count)],
        expires_us=[1] * count, priority=[9] * count,
    )  # fmt: skip
    data = bytearray(whole.encode())
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)):
        data[at % len(data)] = byte
    return bytes(data)


NUMBERS = st.integers(0, 30)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    """One frame of a client that is past its Hello."""
    choice = draw(st.integers(0, 9))
    if choice < 5:
        kind, honest = draw(st.sampled_from(HONEST))
        meta = b"" if honest is None else draw(twisted(honest))
        return Frame(int(kind), draw(NUMBERS), meta)
    if choice < 8:
        name, fields = draw(st.sampled_from(ASKED))
        meta = draw(twisted({"request": name, "fields": fields}))
        return Frame(int(Kind.ASK), draw(NUMBERS), meta)
    if choice == 8:
        drafts = [
            {
                "topic": draw(st.sampled_from([TOPIC, "other.topic"])),
                "part": draw(st.integers(0, 1)),
            }
        ]
        meta = draw(twisted({"sequence": draw(st.integers(1, 3)), "drafts": drafts}))
        return Frame(int(Kind.PUBLISH), draw(NUMBERS), meta, (draw(batches()),))
    return Frame(draw(st.sampled_from([int(kind) for kind in Kind])), draw(NUMBERS), draw(BINARIES))


@st.composite
def conversations(draw: st.DrawFn) -> list[Frame]:
    """What one client sends, one frame after another; often with subscriptions first."""
    said: list[Frame] = []
    if draw(st.booleans()):
        said.append(Frame(int(Kind.HELLO), 0, draw(twisted(HELLO))))
    opened = draw(st.integers(0, 3))
    for number, (kind, honest) in enumerate(HONEST[:opened], 100):
        assert honest is not None
        said.append(Frame(int(kind), number, say.encode(honest)))
    return said + draw(st.lists(frames(), min_size=1, max_size=5))

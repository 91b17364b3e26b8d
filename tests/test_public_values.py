"""Wrong values for every parameter of the public surface, on every engine (A1 to A9).

The calls come from the signatures of the public classes, the values from the annotation of each
parameter, and the administrative requests from the types of their fields. A parameter whose kind is
not in the tables below fails the test, and so does a call that is not listed: new ones join here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import penstock
from penstock.bus.admin import Audit, DeadLetters, Groups, Routes, Schedules, Topics
from penstock.bus.sync import (
    SyncAudit,
    SyncBus,
    SyncDeadLetters,
    SyncEvent,
    SyncGroups,
    SyncRoutes,
    SyncSchedules,
    SyncSubscription,
    SyncTopics,
    SyncTransaction,
)
from penstock.core.entry import GroupSpec, TopicSpec
from penstock.engines import requests as ask
from penstock.engines.engine import Subscribe
from penstock.engines.requests import REQUESTS
from penstock.model import parameter
from penstock.model.errors import InvalidInput, MissingPart
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import Kind

NAN, INF = math.nan, math.inf
HUGE = 10**400
LONE = "\ud800"  # half a character: UTF-8 cannot hold it
TOPIC = "values.kept"


class Opaque:
    """A value of no known type, whose description fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no description")


ODD = [Opaque(), object, 1j]
"""Wrong everywhere."""
NO_NUMBER = [True, "x", b"5", [5], {}, NAN, INF, -INF, HUGE, *ODD]
NO_DURATION = [-1, True, "", "soon", "-5s", b"5s", [5], {}, NAN, INF, -INF, 1e30, HUGE, LONE,
               timedelta(seconds=-1), timedelta.max, datetime(2026, 1, 1), *ODD]  # fmt: skip
NO_TIME = [5, 1_767_225_600, 2.5, True, "", "42", "soon", b"2026-01-01", [], {}, NAN, INF, HUGE, LONE,
           timedelta(seconds=1), *ODD]  # fmt: skip
NO_SIZE = [0, -1, 2.0, True, "", "much", b"1GB", [5], NAN, INF, 10**30, HUGE, LONE, *ODD]
NO_COUNT = [-1, 2.0, 2.5, "2", 1 << 64, *NO_NUMBER]
NO_TEXT = [5, 2.5, True, b"x", ["x"], {}, LONE, "x" * 2_000_000, *ODD]
NO_FLAG = [0, 1, "yes", "True", b"x", [], NAN, *ODD]
NO_KEY = [5, 2.5, True, ["x"], {}, LONE, "x" * 1_000_000, *ODD]
NO_MAPPING = [5, True, "ab", b"ab", [("a", "b")], {"a": 1}, {1: "a"}, {"a": None}, {"a": LONE}, {LONE: "a"},
              *ODD]  # fmt: skip
NO_LIST = [5, True, "ab", b"ab", {"a": "b"}, {"a", "b"}, NAN, *ODD]
NO_RETRY = [3, 2.5, True, "5", (100,), {}, penstock.Retry, *ODD]

WRONG: dict[str, list[Any]] = {
    "Seconds": NO_DURATION,
    "Moment": NO_TIME,
    "Size": NO_SIZE,
    "int": NO_COUNT,
    "str": NO_TEXT,
    "bool": NO_FLAG,
    "bytes": [5, "text", ["x"], True, *ODD],
    "Key": NO_KEY,
    "Token": [5, True, "x", b"short", LONE, ["x"], *ODD],
    "Mapping[str, str]": NO_MAPPING,
    "Retry": NO_RETRY,
    "Strategy": ["x", 5, True, LONE, [], *ODD],
    "Route": [
        5,
        "a",
        {},
        penstock.Route("a", "b", priority=2.5),
        penstock.Route("a", LONE),
        penstock.Route(5, "b"),
        penstock.Route("a", "b", enabled="yes"),
        *ODD,
    ],
    "Event": [5, "a", {}, *ODD],
    "Subscription": [5, "a", {}, *ODD],
    "Iterable[Event]": [5, "ab", [5], {"a": 1}, *ODD],
    "Request": [5, "ListTopics", {}, *ODD],
    "Settings": [5, "a", {}, *ODD],
    "Identity": [5, "a", {}, penstock.Identity(tenant=5), penstock.Identity(subject=LONE), *ODD],
    "str | Path": [5, 2.5, True, b"x", ["x"], {}, "", LONE, "a\0b", *ODD],
    "Sequence[Key | None]": [*NO_LIST, [5, 5], ["a", LONE], ["a"]],
    "Sequence[Token]": [*NO_LIST, [5, 5], ["a", "b"]],
    "Sequence[str]": [*NO_LIST, [5, 5], ["a", LONE]],
    "Sequence[int]": [*NO_LIST, [2.0, 1], [True, 1], [-1, 1], [10, 1], [1], [NAN, 1]],
    "Sequence[Moment | None]": [*NO_LIST, [5, 5], ["soon", None], [None]],
    "Sequence[Mapping[str, str] | None]": [*NO_LIST, [5, 5], [{"a": 1}, None], [None]],
}
"""Wrong values by annotation, `| None` left out."""

ANY_VALUE = [Opaque(), {"a": NAN}, [INF], {"a": {1, 2}}, {"a": LONE}]
BY_NAME: dict[tuple[str, str], list[Any] | None] = {
    ("publish", "value"): ANY_VALUE,
    ("publish_many", "values"): [5, "ab", b"ab", {"a": 1}, {1, 2}, [], [Opaque()], [{"a": NAN}], [{1}], *ODD],
    ("put", "value"): ANY_VALUE,
    ("request", "value"): ANY_VALUE,
    ("reply", "value"): None,  # it is looked at once the request is known to be one
    ("value", "type"): None,  # any type there is
    ("request", "type"): None,
    ("nack", "reason"): [each for each in NO_TEXT if not (isinstance(each, str) and each.isascii())],
    ("reject", "reason"): [each for each in NO_TEXT if not (isinstance(each, str) and each.isascii())],
    ("transaction", "idempotency_key"): [*NO_TEXT, ""],
}  # fmt: skip
"""Parameters of which the name says more than the annotation; None: every value is allowed.

A reason is cut to its length, not refused: it often is the text of an error.
"""
NO_VALUES = {"bus.open", "bus.ready", "bus.flush", "bus.wall_us", "sub.open", "sub.close", "sub.batches",
             "sub.commit", "sub.cursor", "sub.at_hand", "event.ack", "bus.topics.seal"}  # fmt: skip
"""Calls that take nothing."""
ELSEWHERE = {"bus.need", "bus.draft", "bus.draft_many"}
"""`publish` and `publish_many` pass what they take to `draft`; `need` asks for a name in the code."""


class Scene(NamedTuple):
    """A bus, a subscription with an event in hand, and a folder to write to."""

    bus: penstock.Bus
    sub: penstock.Subscription
    event: penstock.Event
    folder: Path


Made = Callable[[Scene], Any]
OBJECTS: dict[str, tuple[type, Made]] = {
    "bus": (penstock.Bus, lambda scene: scene.bus),
    "bus.topics": (Topics, lambda scene: scene.bus.topics),
    "bus.groups": (Groups, lambda scene: scene.bus.groups),
    "bus.dead_letters": (DeadLetters, lambda scene: scene.bus.dead_letters),
    "bus.audit": (Audit, lambda scene: scene.bus.audit),
    "bus.routes": (Routes, lambda scene: scene.bus.routes),
    "bus.schedules": (Schedules, lambda scene: scene.bus.schedules),
    "tx": (penstock.Transaction, lambda scene: scene.bus.transaction()),
    "sub": (penstock.Subscription, lambda scene: scene.sub),
    "event": (penstock.Event, lambda scene: scene.event),
}
RIGHT: dict[str, dict[str, Any]] = {
    "bus.close": {},
    "bus.run": {},
    "bus.publish": {"topic": "values.none", "value": {"a": 1}},
    "bus.publish_many": {"topic": "values.none", "values": [b"x", b"y"]},
    "bus.transaction": {},
    "bus.subscribe": {"pattern": "values.none", "group": "none"},
    "bus.handler": {"pattern": "values.none", "group": "none"},
    "bus.replay": {"pattern": TOPIC},
    "bus.replay_batches": {"pattern": TOPIC},
    "bus.request": {"topic": "values.none", "value": {"a": 1}, "timeout_s": 0.1},
    "bus.reply": {"request": None, "value": 1},
    "bus.ask": {"request": ask.ListTopics()},
    "bus.topics.list": {},
    "bus.topics.info": {"name": TOPIC},
    "bus.topics.create": {"name": "values.none"},
    "bus.topics.configure": {"name": TOPIC},
    "bus.topics.grow": {"name": TOPIC, "partitions": 1},
    "bus.topics.delete": {"name": "values.none"},
    "bus.groups.list": {},
    "bus.groups.info": {"name": "kept"},
    "bus.groups.reset": {"name": "kept", "to": "earliest"},
    "bus.groups.delete": {"name": "none"},
    "bus.dead_letters.list": {},
    "bus.dead_letters.inspect": {"id": "none"},
    "bus.dead_letters.replay": {"ids": ["a"], "target_consumer": "g", "target_topic": "t", "reason": "r",
                                "confirm": "no", "actor": "ann"},
    "bus.dead_letters.dead_letter": {"id": "none", "consumer": "g", "topic": "t", "reason": "r",
                                     "actor": "ann"},
    "bus.dead_letters.purge": {"ids": ["a"], "reason": "r", "confirm": "no", "actor": "ann"},
    "bus.audit.query": {},
    "bus.audit.verify": {},
    "bus.audit.export": {"folder": "/nowhere"},
    "bus.routes.list": {},
    "bus.routes.put": {"route": None},
    "bus.routes.remove": {"pattern": "none", "destination": "none"},
    "bus.routes.enable": {"pattern": "none", "destination": "none"},
    "bus.routes.disable": {"pattern": "none", "destination": "none"},
    "bus.routes.resolve": {"topic": TOPIC},
    "bus.schedules.list": {},
    "bus.schedules.put": {"id": "s", "topic": "values.none", "value": {"a": 1}, "every": "1h"},
    "bus.schedules.remove": {"id": "none"},
    "tx.publish": {"topic": "values.none", "value": {"a": 1}},
    "tx.publish_many": {"topic": "values.none", "values": [b"x", b"y"]},
    "tx.ack": {"event": None},
    "tx.commit": {"subscription": None},
    "sub.get": {"timeout_s": 0.0},
    "sub.ack": {"events": []},
    "sub.nack": {"events": None},
    "event.nack": {},
    "event.extend": {},
    "event.reject": {},
    "event.value": {},
}  # fmt: skip
"""Right values for what a call must be given; each wrong value takes the place of one of them."""


class Case(NamedTuple):
    """One call with one wrong value."""

    name: str
    parameter: str
    value: Any

    @property
    def text(self) -> str:
        return f"{self.name}({self.parameter}={parameter.shown(self.value)})"


def public_calls() -> Iterator[tuple[str, Any]]:
    for prefix, (kind, _) in OBJECTS.items():
        for name, function in inspect.getmembers(kind, callable):
            if not name.startswith("_"):
                yield f"{prefix}.{name}", function


def wrong_values(call: str, name: str, annotation: str) -> list[Any]:
    known = BY_NAME.get((call.rpartition(".")[2], name), ...)
    if known is None:
        return []
    if known is not ...:
        return known
    kind, _, rest = annotation.rpartition(" | ")
    optional = bool(kind) and rest == "None"
    return [*WRONG[kind if optional else annotation], *([] if optional else [None])]


def cases() -> Iterator[Case]:
    for name, function in public_calls():
        if name in NO_VALUES | ELSEWHERE:
            continue
        for each in list(inspect.signature(function).parameters.values())[1:]:
            if each.kind is not inspect.Parameter.VAR_KEYWORD:  # the options of `publish` again
                for value in wrong_values(name, each.name, each.annotation):
                    yield Case(name, each.name, value)


def test_every_public_call_is_tried() -> None:
    listed = dict(public_calls())
    assert set(listed) - NO_VALUES - ELSEWHERE == set(RIGHT), (
        "new or gone: say what it must be given"
    )
    for name in NO_VALUES:
        assert not inspect.signature(listed[name]).parameters.keys() - {"self"}, name


def test_every_engine_is_asked_the_same_requests() -> None:
    """What operators may ask is listed once, and each field has a converter with wrong values here."""
    assert {case.kind for case in wrong_requests()} == {
        kind for kind in REQUESTS.values() if parameter.converters(kind)
    }


def test_every_parameter_has_a_kind() -> None:
    """A KeyError names the annotation that has no wrong values yet."""
    assert len(list(cases())) > 1_000


# -- the engines -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def scene(bus: penstock.Bus, folder: Path) -> AsyncIterator[Scene]:
    await bus.publish_many(TOPIC, [b"1", b"2", b"3"])
    async with bus.subscribe(TOPIC, group="kept", lease_s="5m", max_inflight=1) as sub:
        event = await sub.get(timeout_s="30s")
        assert event is not None
        yield Scene(bus, sub, event, folder)
        await event.ack()  # whatever was tried, it is still in our hands


async def held(bus: penstock.Bus) -> dict[str, Any]:
    """All that a refused call could have left behind."""
    return {
        "topics": [(each.name, each.events) for each in await bus.topics.list()],
        "groups": [each.name for each in await bus.groups.list() if not each.name.startswith("_")],
        "routes": await bus.routes.list(),
        "schedules": await bus.schedules.list(),
        "dead letters": await bus.dead_letters.list(everything=True),
        "audit": len(await bus.audit.query()),
    }


async def carried_out(case: Case, scene: Scene) -> str:
    """What became of a call: the error, as its type, code and words."""
    prefix, _, name = case.name.rpartition(".")
    method = getattr(OBJECTS[prefix][1](scene), name)
    given = RIGHT[case.name] | {case.parameter: case.value}
    if case.name == "sub.nack" and case.parameter == "delay_s":
        given["events"] = [scene.event]
    try:
        result = method(**given)
        if isinstance(result, AsyncIterator):
            async for _ in result:
                break
        elif isinstance(result, Awaitable):
            await result
    except InvalidInput as error:
        return f"{type(error).__name__} [{error.code}] {error.message}"
    except MissingPart as error:  # a name that no installed part has
        return f"{type(error).__name__} [{error.code}]"
    except Exception as error:
        return f"!! {type(error).__name__}: {error}"
    return "!! taken"


async def outcomes(bus: penstock.Bus, folder: Path) -> dict[str, str]:
    async with scene(bus, folder) as made:
        before = await held(bus)
        found = {
            f"{at} {case.text}": await carried_out(case, made) for at, case in enumerate(cases())
        }
        requests = [*wrong_requests()]
        found |= {f"{at} {case.text}": await asked(bus, case) for at, case in enumerate(requests)}
        after = await held(bus)
        found |= {
            f"what is kept of {name}": "the same" if after[name] == each else f"!! {after[name]}"
            for name, each in before.items()
        }
    receipt = await bus.publish(TOPIC, b"4")
    found["the next offset"] = str(receipt.offset) if receipt.offset == 3 else f"!! {receipt}"
    await bus.flush()
    return found


# -- administrative requests, by the types of their fields -------------------------------------------

BY_CONVERTER: dict[Callable[..., Any], list[Any]] = {
    parameter.count: [True, 2.0, 2.5, "2", 1 << 70, HUGE, NAN, INF, -(1 << 70), [5], None, *ODD],
    parameter.seconds: NO_DURATION,
    parameter.size_bytes: NO_SIZE,
    parameter.milliseconds: [2.5, -1, True, "x", NAN, INF, HUGE, None, *ODD],
    parameter.text: [*NO_TEXT, None],
    parameter.path: [*NO_TEXT, "", "a\0b", None],
    parameter.flag: [*NO_FLAG, None],
    parameter.choice: ["x", 5, True, LONE, None, *ODD],
    parameter.octets: [5, "text", [5], None, *ODD],
    parameter.texts: [*NO_MAPPING, None],
    parameter.many: [*NO_LIST, [Opaque()], [LONE], None],
    parameter.engine_place: ["", "x", "offset:-1", "time:x", 42, NAN, LONE, None, *ODD],
    parameter._struct: [5, "x", {}, None, *ODD],
}
SPECIMENS: dict[Callable[..., Any], Any] = {
    parameter.count: 1_000_000, parameter.seconds: 1.0, parameter.size_bytes: 1, parameter.text: "x",
    parameter.path: "/nowhere", parameter.flag: False, parameter.octets: b"x", parameter.texts: {},
    parameter.engine_place: "earliest",
}  # fmt: skip


def plain(convert: Any) -> tuple[Callable[..., Any], dict[str, Any], bool]:
    """A converter without what is around it: its function, its bounds, whether None is allowed."""
    bounds: dict[str, Any] = {}
    optional = False
    while isinstance(convert, partial):
        if convert.func is parameter._optional:
            optional, convert = True, convert.keywords["convert"]
        else:
            bounds, convert = {**convert.keywords, **bounds}, convert.func
    return convert, bounds, optional


def specimen(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Right values for the fields that a request must be given."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            function, bounds, _ = plain(parameter.converters(kind)[field.name])
            if function is parameter._struct:
                found[field.name] = bounds["kind"](**specimen(bounds["kind"]))
            elif function is parameter.many:
                found[field.name] = bounds.get("make", list)(["x"])
            elif function is parameter.count:
                found[field.name] = max(1, bounds.get("least", 1))
            else:
                found[field.name] = SPECIMENS[function]
    return found


def wrong_fields(kind: type[msgspec.Struct]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Fields of which one is wrong, its name, and its value; those of inner structs too."""
    right = specimen(kind)
    for name, convert in parameter.converters(kind).items():
        function, bounds, optional = plain(convert)
        if function is parameter.untouched:
            continue
        for value in BY_CONVERTER[function]:
            if value is not None or not optional:
                yield right | {name: value}, name, value
        for bound, step in (("least", -1), ("most", 1)):
            if function is parameter.count and abs(bounds.get(bound, 1 << 63)) < 1 << 62:
                value = bounds[bound] + step
                yield right | {name: value}, name, value
        if function is parameter._struct and bounds["kind"] is not penstock.Retry:
            for inner, inner_name, value in wrong_fields(bounds["kind"]):
                yield right | {name: bounds["kind"](**inner)}, inner_name, value


class Asked(NamedTuple):
    """A request with one wrong field."""

    kind: type[msgspec.Struct]
    fields: dict[str, Any]
    name: str
    value: Any

    @property
    def text(self) -> str:
        return f"{self.kind.__name__}({self.name}={parameter.shown(self.value)})"


def wrong_requests() -> Iterator[Asked]:
    for kind in REQUESTS.values():
        for fields, name, value in wrong_fields(kind):
            yield Asked(kind, fields, name, value)


async def asked(bus: penstock.Bus, case: Asked) -> str:
    try:
        await bus.ask(case.kind(**case.fields))
    except InvalidInput as error:
        wanted = error.data.get("parameter", "")
        named = case.name in wanted
        return f"{error.code} {error.message}" if named else f"!! names {wanted!r}: {error.message}"
    except Exception as error:
        return f"!! {type(error).__name__}: {error}"
    return "!! taken"


# -- the tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data").start() as process:
        yield process


async def test_a_wrong_value_is_the_same_typed_error_on_every_engine(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    """A1 to A9: nothing is stored, the bus goes on, and the folder opens again."""
    found: dict[str, dict[str, str]] = {}
    places = {"memory": "mem:", "folder": str(tmp_path / "data"), "broker": broker.url()}
    for name, url in places.items():
        async with penstock.connect(url) as bus:
            found[name] = await outcomes(bus, tmp_path)
    taken = [f"{name}: {case}: {outcome}" for name in found
             for case, outcome in found[name].items() if outcome.startswith("!!")]  # fmt: skip
    assert not taken, f"{len(taken)} of {3 * len(found['memory'])}:\n" + "\n".join(taken[:60])
    for name in ("folder", "broker"):
        assert found[name] == found["memory"]
    broker.stop()
    for folder in (tmp_path / "data", broker.folder):
        async with penstock.connect(folder) as bus:
            kept = [event.payload async for event in bus.replay(TOPIC)]
        assert kept == [b"1", b"2", b"3", b"4"]
    broker.start()


@pytest.mark.parametrize("value", WRONG["str | Path"], ids=parameter.shown)
def test_a_url_that_is_none(value: Any) -> None:
    with pytest.raises(InvalidInput):
        penstock.connect(value)


CONNECTING = {
    "settings": ("mem:", WRONG["Settings"]),
    "identity": ("mem:", WRONG["Identity"]),
    "token": ("penstock://127.0.0.1:1", [5, True, b"x", ["x"], {}, "", "x" * 100_000, LONE, 1j, Opaque()]),
}  # fmt: skip
"""Wrong values for what `connect` takes beside a URL and settings, and a URL that takes it."""


@pytest.mark.parametrize("connect", [penstock.connect, penstock.connect_sync])
def test_options_of_connect(connect: Callable[..., Any]) -> None:
    taken = set(inspect.signature(connect).parameters)
    assert taken == {"url", "flags", *CONNECTING}, "a parameter is new: say what is wrong for it"
    for name, (url, values) in CONNECTING.items():
        for value in values:
            with pytest.raises(InvalidInput, match=f"{name}|tenant|subject"):
                connect(url, **{name: value})


@pytest.mark.parametrize("name", ["ladder_ms", "max_attempts"])
def test_a_retry_checks_itself(name: str) -> None:
    function, _, _ = plain(parameter.converters(penstock.Retry)[name])
    for value in [*BY_CONVERTER[function], (500.0,), 0, 1_001, [NAN]]:
        with pytest.raises(InvalidInput, match=name):
            penstock.Retry(**{name: value})


@pytest.mark.parametrize("value", [*NO_TEXT[:7], "", "a", "a/b/c", "a/0/-1"], ids=parameter.shown)
def test_a_message_id_that_is_none(value: Any) -> None:
    with pytest.raises(InvalidInput):
        penstock.MessageId.parse(value)


# -- the blocking bus ------------------------------------------------------------------------------

BLOCKING: dict[str, tuple[type, Callable[[Scene], Any]]] = {
    "bus": (SyncBus, lambda scene: scene.bus),
    "bus.topics": (SyncTopics, lambda scene: scene.bus.topics),
    "bus.groups": (SyncGroups, lambda scene: scene.bus.groups),
    "bus.dead_letters": (SyncDeadLetters, lambda scene: scene.bus.dead_letters),
    "bus.audit": (SyncAudit, lambda scene: scene.bus.audit),
    "bus.routes": (SyncRoutes, lambda scene: scene.bus.routes),
    "bus.schedules": (SyncSchedules, lambda scene: scene.bus.schedules),
    "tx": (SyncTransaction, lambda scene: scene.bus.transaction()),
    "sub": (SyncSubscription, lambda scene: scene.sub),
    "event": (SyncEvent, lambda scene: scene.event),
}
ASYNCHRONOUS_ONLY = {"bus.draft", "bus.draft_many", "bus.wall_us", "sub.cursor", "sub.at_hand"}


def test_the_blocking_bus_has_every_call_with_the_same_parameters() -> None:
    for name, function in public_calls():
        if name in ASYNCHRONOUS_ONLY:
            continue
        prefix, _, method = name.rpartition(".")
        twin = getattr(BLOCKING[prefix][0], method)
        assert (
            list(inspect.signature(twin).parameters)[1:]
            == list(inspect.signature(function).parameters)[1:]
        ), name


def done_blocking(case: Case, scene: Scene) -> str:
    prefix, _, name = case.name.rpartition(".")
    given = RIGHT[case.name] | {case.parameter: case.value}
    if case.name == "sub.nack" and case.parameter == "delay_s":
        given["events"] = [scene.event]
    try:
        result = getattr(BLOCKING[prefix][1](scene), name)(**given)
        if isinstance(result, Iterator):
            next(result, None)
    except InvalidInput as error:
        return f"{type(error).__name__} [{error.code}] {error.message}"
    except MissingPart as error:
        return f"{type(error).__name__} [{error.code}]"
    except Exception as error:
        return f"!! {type(error).__name__}: {error}"
    return "!! taken"


def test_a_wrong_value_is_the_same_typed_error_on_a_blocking_bus(tmp_path: Path) -> None:
    """A1 to A9, D1: what the asynchronous bus says is what the blocking one says."""
    expected = asyncio.run(_said_by_memory(tmp_path))
    with penstock.connect_sync("mem:") as bus:
        bus.publish_many(TOPIC, [b"1", b"2", b"3"])
        with bus.subscribe(TOPIC, group="kept", lease_s="5m", max_inflight=1) as sub:
            event = sub.get(timeout_s="30s")
            made = Scene(bus, sub, event, tmp_path)  # type: ignore[arg-type]
            found = {
                f"{at} {case.text}": done_blocking(case, made) for at, case in enumerate(cases())
            }
            assert found == expected
            event.ack()  # type: ignore[union-attr]
        with pytest.raises(InvalidInput, match="nothing to run"):
            bus.run()
        assert bus.publish(TOPIC, b"4").offset == 3
        assert [each.payload for each in bus.replay(TOPIC)] == [b"1", b"2", b"3", b"4"]


async def _said_by_memory(folder: Path) -> dict[str, str]:
    async with penstock.connect("mem:") as bus, scene(bus, folder) as made:
        return {
            f"{at} {case.text}": await carried_out(case, made) for at, case in enumerate(cases())
        }


# -- foreign clients -------------------------------------------------------------------------------


class Wish(msgspec.Struct):
    """A Subscribe as a foreign client may write it: anything in any field."""

    feed: Any = 1
    group: Any = "foreign"
    spec: Any = {}
    member: Any = "m"
    max_inflight: Any = 1


def writable(value: Any) -> bool:
    """Whether a foreign client can write a value, and writes something wrong by it."""
    if isinstance(value, set | timedelta | datetime | complex):
        return False  # written as a list or as text, which may be right
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return True


async def refusal(work: Awaitable[Any]) -> str:
    try:
        await work
    except InvalidInput as error:
        return error.code
    except Exception as error:
        return f"!! {type(error).__name__}: {error}"
    return "!! taken"


async def test_a_broker_refuses_the_same_from_any_client(broker: BrokerProcess) -> None:
    """A1, A2, A4: what no library would send is refused at the wire, and the broker goes on."""
    wrong: list[str] = []
    async with penstock.connect(broker.url()) as bus:
        before = await held(bus)
        channel = bus.engine.channel  # type: ignore[attr-defined]
        for case in wrong_requests():
            fields = {name: _as_written(value) for name, value in case.fields.items()}
            if not writable(case.value) or not writable(fields) or _right_on_a_wire(case.value):
                continue
            outcome = await refusal(channel.call(Kind.ASK, say.Ask(case.kind.__name__, fields)))
            if outcome.startswith("!!"):
                wrong.append(f"{case.text}: {outcome}")
        right = _as_written(GroupSpec(patterns=("values.none",)))
        for fields, name, value in wrong_fields(GroupSpec):
            spec = right | {name: _as_written(fields.get(name))}
            if writable(value) and writable(spec) and not _right_on_a_wire(value):
                outcome = await refusal(channel.call(Kind.SUBSCRIBE, Wish(spec=spec)))
                if outcome.startswith("!!"):
                    wrong.append(f"Subscribe {name}={parameter.shown(value)}: {outcome}")
        for name, converted in parameter.converters(Subscribe).items():
            if name in ("group", "member", "max_inflight"):
                for value in filter(writable, BY_CONVERTER[plain(converted)[0]]):
                    outcome = await refusal(
                        channel.call(Kind.SUBSCRIBE, Wish(spec=right, **{name: value}))
                    )
                    if outcome.startswith("!!"):
                        wrong.append(f"Subscribe {name}={parameter.shown(value)}: {outcome}")
        assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:60])
        assert await held(bus) == before


def _as_written(value: Any) -> Any:
    return (
        msgspec.structs.asdict(value)
        if isinstance(value, TopicSpec | GroupSpec | penstock.Route)
        else value
    )


def _right_on_a_wire(value: Any) -> bool:
    """2.0 is 2 there, a struct is a map, and bytes may be written in base64."""
    return value in ({}, "text") or (isinstance(value, float) and value.is_integer())

"""What cannot be written to the journal is refused to its caller alone; the bus goes on (A1, A3).

The drafts and requests here pass the checks of the public surface by, as a defect there would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import InvalidInput, PenstockError, Retry
from penstock.core.entry import GroupSpec, TopicSpec
from penstock.core.routes import Route
from penstock.engines import requests as ask
from penstock.engines.engine import Subscribe, Transaction
from penstock.model.draft import Draft
from penstock.model.event import Identity

HALF = "half \udc80"
Call = Callable[[penstock.Bus], Awaitable[Any]]


def draft(topic: str = "orders", **columns: Any) -> Draft:
    made = Draft(topic, columns.pop("payloads", [b"wrong"]), tenant="default", codec="raw")
    for name, value in columns.items():
        setattr(made, name, value)
    return made


def publishing(**columns: Any) -> Call:
    return lambda bus: bus.engine.publish(draft(**columns))


def subscribing(name: Any = "wrong", member: Any = "m", **spec: Any) -> Call:
    spec.setdefault("patterns", ("orders",))

    async def call(bus: penstock.Bus) -> None:
        await bus.engine.subscribe(Subscribe(name, GroupSpec(**spec), member, 10, Identity()))

    return call


def retrying(**wrong: Any) -> Call:
    async def call(bus: penstock.Bus) -> None:
        await subscribing(retry=Retry(**wrong))(bus)

    return call


def asking(request: Any) -> Call:
    return lambda bus: bus.engine.ask(request)


def dead_letter(**changes: Any) -> ask.Quarantine:
    values = {"id": "x", "consumer": "c", "topic": "orders", "actor": "ann", "reason": "r", "payload": b"x"}  # fmt: skip
    return ask.Quarantine(**(values | changes))


WRONG: dict[str, Call] = {
    "partition": publishing(partition=0.0),
    "partition of a table": publishing(partition=0.0, payloads=[b"a"] * 100),
    "priority too large": publishing(priority=[10**30]),
    "time": publishing(times_us=["now"]),
    "time to live": publishing(expires_us=[1e30]),
    "key": publishing(keys=[5]),
    "headers": publishing(headers=[{"a": 1}]),
    "header with half a character": publishing(headers=[{"a": HALF}]),
    "tokens": publishing(tokens=["text"]),
    "tokens too short": publishing(tokens=[b"abc"]),
    "delivery time": publishing(deliver_at_us=1e300),
    "delivery time with a fraction": publishing(deliver_at_us=2.5e15),
    "group": subscribing(HALF),
    "group of a number": subscribing(5),
    "member": subscribing(member=HALF),
    "member of a number": subscribing(member=5),
    "retry": subscribing(retry=3),
    "ladder": retrying(ladder_ms=(500.0,)),
    "attempts": retrying(max_attempts=2.5),
    "filter": subscribing(filter={"region": 1}),
    "filter with half a character": subscribing(filter={"region": HALF}),
    "lease": subscribing(lease_s="30"),
    "start": subscribing(start=5),
    "partitions": asking(ask.CreateTopic("wrong", TopicSpec(2.0))),  # type: ignore[arg-type]
    "partitions as text": asking(ask.CreateTopic("wrong", TopicSpec("2"))),  # type: ignore[arg-type]
    "retention": asking(ask.CreateTopic("wrong", TopicSpec(1, "7d"))),  # type: ignore[arg-type]
    "retention below zero": asking(ask.CreateTopic("wrong", TopicSpec(1, -1.0))),
    "size": asking(ask.CreateTopic("wrong", TopicSpec(1, None, "1GB"))),  # type: ignore[arg-type]
    "write-once": asking(ask.CreateTopic("wrong", TopicSpec(1, None, None, "yes"))),  # type: ignore[arg-type]
    "growth": asking(ask.ConfigureTopic("orders", 4.0)),  # type: ignore[arg-type]
    "actor of a change": asking(ask.ConfigureTopic("orders", 2, actor=HALF)),
    "actor of a reset": asking(ask.ResetGroup("good", "earliest", actor=HALF)),
    "actor of a removal": asking(ask.DeleteGroup("good", actor=HALF)),
    "schedule": asking(ask.PutSchedule(HALF, "orders", b"x", "raw", every_us=10**9)),
    "period": asking(ask.PutSchedule("s", "orders", b"x", "raw", every_us=1.5e9)),  # type: ignore[arg-type]
    "codec of a schedule": asking(ask.PutSchedule("s", "orders", b"x", HALF, every_us=10**9)),
    "id of a dead letter": asking(dead_letter(id=HALF)),
    "consumer of a dead letter": asking(dead_letter(consumer=HALF)),
    "reason of a dead letter": asking(dead_letter(reason=HALF)),
    "actor of a dead letter": asking(dead_letter(actor=HALF)),
    "route": asking(ask.PutRoute(Route("orders", "good"), actor=HALF)),
}


@pytest.mark.parametrize("case", WRONG)
async def test_one_caller_is_refused_and_the_folder_opens_again(case: str, tmp_path: Path) -> None:
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish("orders", b"before")
        async with bus.subscribe("orders", group="good"):
            pass
        before = await seen(bus)
        refused, *others = await asyncio.gather(
            WRONG[case](bus),
            *(bus.publish("orders", f"beside {n}".encode()) for n in range(3)),
            return_exceptions=True,
        )
        assert isinstance(refused, PenstockError | TypeError | AttributeError), refused
        assert [other.offset for other in others] == [1, 2, 3]  # type: ignore[union-attr]
        receipt = await bus.publish("orders", b"after")
        assert receipt.offset == 4
        assert await seen(bus) == before
    async with penstock.connect(tmp_path / "data") as bus:
        events = [event.payload async for event in bus.replay("orders")]
        assert events == [b"before", b"beside 0", b"beside 1", b"beside 2", b"after"]
        assert await seen(bus) == before
        assert (await bus.audit.verify()).ok


async def seen(bus: penstock.Bus) -> Any:
    """What a refused call must leave alone."""
    return (
        [(topic.name, len(topic.partitions)) for topic in await bus.topics.list()],
        [group.name for group in await bus.groups.list()],
        await bus.schedules.list(),
        await bus.routes.list(),
        await bus.dead_letters.list(),
    )


async def test_a_transaction_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    async with penstock.connect(tmp_path / "data") as bus:
        engine = bus.engine
        await bus.publish("orders", b"before")
        token = b"t" * 16
        first, second = draft(tokens=[token]), draft("paid", partition=0.0)
        with pytest.raises(InvalidInput):
            await engine.transact(
                Transaction(drafts=[first, second], acks=[], cursors=[], tenant="default")
            )  # type: ignore[call-arg]
        receipt = await engine.publish(draft(tokens=[token]))
        assert (receipt.offset, receipt.duplicate) == (1, False)
        again = await engine.publish(draft(tokens=[token]))
        assert (again.offset, again.duplicate) == (1, True)
    async with penstock.connect(tmp_path / "data") as bus:
        assert [event.payload async for event in bus.replay("orders")] == [b"before", b"wrong"]


@pytest.mark.parametrize("seconds", [1e30, float("inf"), float("nan"), -1e30, "soon"])
async def test_a_duration_that_cannot_be_written_leaves_the_event_with_its_holder(
    seconds: Any, bus: penstock.Bus
) -> None:
    await bus.publish("orders", b"one")
    async with bus.subscribe("orders", group="g") as events:
        event = await anext(events)
        for call in (event.nack, event.extend):
            with pytest.raises(PenstockError):
                await call(seconds)
        await event.ack()
        await bus.flush()
    assert (await bus.groups.info("g")).lag == 0


async def test_a_reason_that_cannot_be_written_leaves_the_event_with_its_holder(
    bus: penstock.Bus,
) -> None:
    await bus.publish("orders", b"one")
    async with bus.subscribe("orders", group="g") as events:
        event = await anext(events)
        with pytest.raises(InvalidInput, match="reason"):
            await event.reject(f"cannot read {HALF}")
        await event.reject("cannot read it")
        await bus.flush()
    (letter,) = await bus.dead_letters.list()
    assert letter.reason == "cannot read it"

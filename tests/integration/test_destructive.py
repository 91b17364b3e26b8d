"""What destroys something: it restates its verb, and a dry run tells what would go (row D2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.model.errors import ConfirmationNeeded, WriteOnce
from penstock.testing.broker_process import BrokerProcess

ID = "penstock.example"
EVENTS = 5


@pytest.fixture(params=["mem", "folder", "broker"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    """A bus with a topic of five events, a group that has read two, a dead letter, a route, a schedule."""
    process = BrokerProcess(tmp_path / "data")
    if request.param == "broker":
        url = process.start().url()
    else:
        url = "mem:" if request.param == "mem" else str(tmp_path / "data")
    try:
        async with penstock.connect(url) as made:
            await _fill(made)
            yield made
    finally:
        if request.param == "broker":
            process.stop()


async def _fill(bus: penstock.Bus) -> None:
    await bus.publish_many("orders", [{"n": n} for n in range(EVENTS)])
    async with bus.subscribe("orders", group="billing", max_inflight=2) as subscription:
        await (await subscription.get(timeout_s=20)).ack()
        await (await subscription.get(timeout_s=20)).reject("broken")
        await bus.flush()
    await bus.routes.put(penstock.Route("orders", "billing"))
    await bus.schedules.put(ID, "orders", {"tick": 1}, every="1h")


async def _letters(bus: penstock.Bus) -> list[str]:
    return [letter.id for letter in await bus.dead_letters.list()]


async def _state(bus: penstock.Bus) -> Any:
    """Everything a destructive call could change."""
    return (
        [(each.name, each.partitions) for each in await bus.topics.list()],
        [(each.name, each.lag, each.lanes) for each in await bus.groups.list()],
        [(letter.id, letter.status) for letter in await bus.dead_letters.list(everything=True)],
        await bus.routes.list(),
        [each.id for each in await bus.schedules.list()],
        [record.operation for record in await bus.audit.query()],
    )


Act = Callable[..., Awaitable[Any]]
ACTS: dict[str, tuple[str, Act]] = {
    "topic delete": ("DELETE", lambda bus, **how: bus.topics.delete("orders", **how)),
    "group delete": ("DELETE", lambda bus, **how: bus.groups.delete("billing", **how)),
    "group reset": ("RESET", lambda bus, **how: bus.groups.reset("billing", "earliest", **how)),
    "route remove": ("REMOVE", lambda bus, **how: bus.routes.remove("orders", "billing", **how)),
    "schedule remove": ("REMOVE", lambda bus, **how: bus.schedules.remove(ID, **how)),
}


async def _replay(bus: penstock.Bus, **how: Any) -> Any:
    return await bus.dead_letters.replay(
        await _letters(bus), target_consumer="billing", target_topic="orders", reason="why",
        actor="ann", **how,
    )  # fmt: skip


async def _purge(bus: penstock.Bus, **how: Any) -> Any:
    return await bus.dead_letters.purge(await _letters(bus), reason="why", actor="ann", **how)


ACTS |= {"dlq replay": ("REPLAY", _replay), "dlq purge": ("PURGE", _purge)}


@pytest.mark.parametrize("name", ACTS)
async def test_a_destructive_call_wants_its_verb(bus: penstock.Bus, name: str) -> None:
    """D2: without the word nothing happens, a dry run needs none and changes nothing, with it it is done."""
    word, act = ACTS[name]
    before = await _state(bus)
    for given in ("", word.lower(), "YES"):
        with pytest.raises(ConfirmationNeeded, match=f"{word}.*dry_run") as refused:
            await act(bus, **({"confirm": given} if given else {}))
        assert refused.value.data["wanted"] == word
    await act(bus, dry_run=True)
    assert await _state(bus) == before
    await act(bus, confirm=word)
    assert await _state(bus) != before


async def test_a_dry_run_tells_what_would_go(bus: penstock.Bus) -> None:
    """D2: events, groups and their lag before and after; afterwards the same numbers, done."""
    lag = (await bus.groups.info("billing")).lag
    told = await bus.topics.delete("orders", dry_run=True)
    assert (told.done, told.events, told.topics) == (False, EVENTS, ["orders"])
    assert [(each.name, each.lag_before, each.lag_after) for each in told.groups] == [
        ("billing", lag, 0)
    ]
    moved = await bus.groups.reset("billing", "earliest", dry_run=True)
    assert (moved.lag, moved.lanes[0].cursor) == (EVENTS, 0)
    skipped = await bus.groups.reset("billing", "latest", dry_run=True)
    assert (skipped.lag, skipped.lanes[0].cursor) == (0, EVENTS)
    assert (await bus.groups.delete("billing", dry_run=True)).groups[0].lag_before == lag
    assert (await bus.routes.remove("orders", "billing", dry_run=True)).topics == ["orders"]
    assert (await bus.schedules.remove(ID, dry_run=True)).topics == ["orders"]
    outcome = await _purge(bus, dry_run=True)
    assert (outcome.requested, outcome.done, outcome.failures) == (1, 1, [])
    wrong = await bus.dead_letters.replay(
        await _letters(bus), target_consumer="other", target_topic="orders", reason="", dry_run=True
    )
    assert (wrong.done, wrong.failures[0]["code"]) == (0, "refused.target-mismatch")
    done = await bus.topics.delete("orders", confirm="DELETE")
    assert (done.done, done.events, done.groups) == (True, EVENTS, told.groups)


async def test_a_dry_run_of_what_is_forbidden_is_refused_and_leaves_no_trace(
    bus: penstock.Bus,
) -> None:
    """D2: a write-once topic cannot be deleted; only a real attempt is in the audit log."""
    await bus.topics.create("kept", write_once=True)
    with pytest.raises(WriteOnce):
        await bus.topics.delete("kept", dry_run=True)
    assert "topic.delete" not in [each.operation for each in await bus.audit.query()]
    with pytest.raises(WriteOnce):
        await bus.topics.delete("kept", confirm="DELETE")
    assert "topic.delete" in [each.operation for each in await bus.audit.query()]

"""The embedded engine on a folder: restarts, boundaries, races, and what operators may and may not do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.requests import FindOffset

BY: dict[str, Any] = {"actor": "ann", "reason": "tested"}
NOW = penstock.Retry((0,), 2)  # a retry at once, then dead
# What no compressor makes smaller, in events that stay in the journal.
FILLER = [random.Random(n).randbytes(8_000) for n in range(40)]


@contextlib.asynccontextmanager
async def opened(path: Path, small: Any, **flags: Any) -> AsyncIterator[penstock.Bus]:
    async with penstock.connect(path, settings=small(**flags)) as bus:
        yield bus


async def read(bus: penstock.Bus, pattern: str, **where: Any) -> list[bytes]:
    return [event.payload async for event in bus.replay(pattern, **where)]


async def drain(
    bus: penstock.Bus, pattern: str, group: str, **options: Any
) -> list[penstock.Event]:
    """Everything a group is owed now, acked."""
    found = []
    async with bus.subscribe(pattern, group=group, **options) as sub:
        while (event := await sub.get(timeout_s=0.3)) is not None:
            found.append(event)
            await event.ack()
    return found


async def until(probe: Any, what: str) -> Any:
    for _ in range(500):
        if found := await probe():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen")


async def dead(bus: penstock.Bus, count: int, **where: Any) -> list[Any]:
    async def enough() -> list[Any]:
        found = await bus.dead_letters.list(**where)
        return found if len(found) >= count else []

    return await until(enough, f"{count} dead letters")


def engine(bus: penstock.Bus) -> EmbeddedEngine:
    assert isinstance(bus.engine, EmbeddedEngine)
    return bus.engine


async def sealed(bus: penstock.Bus, topic: str = "filler.topic") -> None:
    """Fill the journal file up, and let everything in it be sealed."""
    before = engine(bus).journal.base
    while engine(bus).journal.base == before:
        await bus.publish_many(topic, FILLER)
    at = engine(bus).journal.base

    async def done() -> bool:
        await engine(bus).maintenance.settle()
        return engine(bus).log.manifest.sealed_to >= at

    await until(done, "sealing")


# -- restarts -------------------------------------------------------------------------------------


async def test_events_groups_and_topics_are_there_after_a_restart(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("orders", partitions=3)
        receipt = await bus.publish_many("orders", [b"%d" % n for n in range(30)],
                                         keys=[f"k{n % 7}" for n in range(30)])  # fmt: skip
        first = {str(place) for place in receipt.ids()}
        await drain(bus, "orders", "billing")
        await bus.publish("orders", b"new", key="k1")
    async with opened(tmp_path, small) as bus:
        assert len((await bus.topics.info("orders")).partitions) == 3
        events = [event async for event in bus.replay("orders")]
        assert {str(event.id) for event in events if event.payload != b"new"} == first
        assert [event.payload for event in await drain(bus, "orders", "billing")] == [b"new"]


async def test_unfinished_deliveries_come_back_with_their_attempt(tmp_path, small) -> None:
    """T6: id, consumer, topic, payload and attempt preserved; what was acked stays acked."""
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("orders", [b"acked", b"open", b"nacked", b"unseen"])
        sub = await bus.subscribe("orders", group="billing", max_inflight=3).open()
        events = [await sub.get(timeout_s=5) for _ in range(3)]
        await events[0].ack()
        await events[2].nack(delay_s=0.0)
        await bus.flush()
    async with opened(tmp_path, small) as bus:
        came = {event.payload: event for event in await drain(bus, "orders", "billing")}
        assert {name: event.attempt for name, event in came.items()} == {
            b"open": 2, b"nacked": 2, b"unseen": 1
        }  # fmt: skip
        assert came[b"open"].offset == 1


def test_waits_of_the_ladder_go_on_after_a_restart(world) -> None:
    here = world(1)

    async def fail(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"a")
        async with bus.subscribe("orders", group="g", retry=penstock.Retry((10_000,), 3)) as sub:
            await (await sub.get(timeout_s=5)).nack()

    here.run(fail)

    async def again(bus: penstock.Bus) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with bus.subscribe("orders", group="g", retry=penstock.Retry((10_000,), 3)) as sub:
            event = await sub.get(timeout_s=60)
            assert event.attempt == 2
            return loop.time() - start

    assert 9.9 <= here.run(again) <= 10.5


def test_the_ladder_keeps_its_exact_times_and_ends_in_a_dead_letter(world) -> None:
    """X4: 100 ms, 1 s, 10 s, 60 s, then dead after five attempts."""

    async def fail(bus: penstock.Bus) -> list[float]:
        loop = asyncio.get_running_loop()
        await bus.publish("orders.created.v1.acme", b"a")
        times = []
        async with bus.subscribe("orders.#", group="g") as sub:
            for attempt in range(1, 6):
                event = await sub.get(timeout_s=100)
                assert event.attempt == attempt
                times.append(loop.time())
                await event.nack(reason=f"no {attempt}")
            assert await sub.get(timeout_s=500) is None
        (letter,) = await bus.dead_letters.list()
        assert (letter.attempts, letter.reason, letter.tenant) == (5, "no 5", "acme")
        return times

    times = world(2).run(fail)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    for gap, step in zip(gaps, (0.1, 1.0, 10.0, 60.0), strict=True):
        assert step <= gap <= step + 0.05


async def test_offsets_are_never_reused_by_a_topic_that_is_made_again(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("orders", [b"old"] * 5)
        await sealed(bus)
        await bus.publish_many("orders", [b"old"] * 2)
        before = datetime.now(UTC) - timedelta(minutes=1)
        await bus.topics.delete("orders", confirm="DELETE")
        with pytest.raises(penstock.UnknownTopic):
            await read(bus, "orders")
    async with opened(tmp_path, small) as bus:
        receipt = await bus.publish("orders", b"new")
        assert receipt.offset == 7
        assert await read(bus, "orders") == [b"new"]
        assert await read(bus, "orders", since=before) == [b"new"]
        assert [e.payload for e in await drain(bus, "orders", "late")] == [b"new"]
        with pytest.raises(penstock.OffsetExpired):
            await read(bus, "orders", from_offset=3)
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "orders") == [b"new"]


async def test_a_topic_deleted_while_its_events_are_out_does_not_spoil_the_journal(
    tmp_path, small
) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("orders", [b"%d" % n for n in range(6)])
        async with bus.subscribe("orders", group="g") as sub:
            events = [await sub.get(timeout_s=5) for _ in range(6)]
            for event in events[:2]:
                await event.ack()
            await events[2].nack()
            await bus.topics.delete("orders", confirm="DELETE")
            with pytest.raises(penstock.DeliveryError):
                await events[3].ack()
            await bus.flush()
            await bus.publish("orders", b"new")
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "orders") == [b"new"]
        assert [e.payload for e in await drain(bus, "orders", "g")] == [b"new"]


async def test_a_topic_that_is_deleted_makes_room_for_others_at_once(tmp_path, small) -> None:
    """Y3, found by review: what waited for the room came when the lease ran out, or with news."""
    async with opened(tmp_path, small) as bus:
        await bus.publish("orders", b"first")
        async with bus.subscribe("*", group="g", max_inflight=1) as sub:
            assert await sub.get(timeout_s=5) is not None
            await bus.publish("others", b"next")
            assert await sub.get(timeout_s=0.1) is None
            await bus.topics.delete("orders", confirm="DELETE")
            following = await sub.get(timeout_s=5)
            assert following is not None
            assert following.payload == b"next"


async def test_a_group_deleted_while_its_events_are_out_does_not_spoil_the_journal(
    tmp_path, small
) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("orders", [b"0", b"1"])
        sub = await bus.subscribe("orders", group="g").open()
        event = await sub.get(timeout_s=5)
        other = await sub.get(timeout_s=5)
        await other.ack()
        await bus.groups.delete("g", confirm="DELETE")
        with contextlib.suppress(penstock.PenstockError):
            await event.ack()
        with contextlib.suppress(penstock.PenstockError):
            async with bus.transaction() as tx:
                tx.ack(event)
                tx.publish("orders", b"tx")
        await bus.flush()
        await bus.publish("orders", b"after")
    async with opened(tmp_path, small) as bus:
        assert (await read(bus, "orders"))[-1] == b"after"
        assert len(await drain(bus, "orders", "g")) >= 3


async def test_resets_and_deletions_of_a_group_may_race(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        for mode in ("queue", "log"):
            await bus.publish("orders", b"a")
            async with bus.subscribe("orders", group="g", mode=mode):
                pass
            results = await asyncio.gather(
                bus.groups.delete("g", confirm="DELETE"),
                bus.groups.reset("g", "earliest", confirm="RESET"),
                return_exceptions=True,
            )
            failures = [each for each in results if isinstance(each, BaseException)]
            assert all(isinstance(each, penstock.PenstockError) for each in failures)
            await asyncio.wait_for(bus.publish("orders", b"b"), 5)
    async with opened(tmp_path, small) as bus:
        assert len(await read(bus, "orders")) == 4


# -- dead letters (T8, X4) ------------------------------------------------------------------------


async def give_up(bus: penstock.Bus, topic: str, count: int, group: str = "g") -> list[Any]:
    await bus.publish_many(topic, [b"%d" % n for n in range(count)])
    async with bus.subscribe(topic, group=group, retry=NOW) as sub:
        for _ in range(count * 2):
            await (await sub.get(timeout_s=5)).nack()
        return await dead(bus, count, topic=topic)


async def test_a_transaction_whose_partition_is_taken_away_does_not_happen(
    tmp_path, small, monkeypatch
) -> None:
    """Found by the simulator, seed 278: it happened, and left the cursor out."""
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("in", partitions=2)
        await bus.topics.create("out")
        for partition in (0, 1):
            await bus.publish("in", b"x", partition=partition)
        first = await bus.subscribe("in", group="g", mode="log").open()
        assert {(await first.get(timeout_s=5)).partition for _ in range(2)} == {0, 1}
        prepare = engine(bus).publisher.prepare

        async def slow(draft) -> int:
            second = await bus.subscribe("in", group="g", mode="log").open()
            assert await first.get(timeout_s=0.1) is None  # gives a partition back
            assert await second.get(timeout_s=5) is not None
            return await prepare(draft)

        monkeypatch.setattr(engine(bus).publisher, "prepare", slow)
        with pytest.raises(penstock.Fenced):
            async with bus.transaction() as tx:
                tx.publish("out", b"never")
                tx.commit(first)
        assert await read(bus, "out") == []
        assert {lane.cursor for lane in (await bus.groups.info("g")).lanes} == {0}


async def test_a_commit_behind_a_reset_does_not_undo_it(tmp_path, small, monkeypatch) -> None:
    """Found by the simulator, seed 22: the group went on at the old place after a restart."""
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("in", [b"0", b"1", b"2"])
        async with bus.subscribe("in", group="g", mode="log") as sub:
            for _ in range(2):
                await sub.get(timeout_s=5)
            group = engine(bus).groups.logs["g"]
            write = group.write

            async def overtaken(entries) -> None:
                await bus.groups.reset("g", "earliest", confirm="RESET")
                await write(entries)

            monkeypatch.setattr(group, "write", overtaken)
            await sub.commit()
            monkeypatch.undo()
            await sub.commit()
    async with opened(tmp_path, small) as bus:
        assert (await bus.groups.info("g")).lag == 3


async def test_a_commit_that_was_given_up_does_not_undo_the_next(
    tmp_path, small, monkeypatch
) -> None:
    """Found by the simulator, seed 173: written late, it moved the group's place back."""
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("in", [b"0", b"1", b"2"])
        async with bus.subscribe("in", group="g", mode="log") as sub:
            await sub.get(timeout_s=5)
            group = engine(bus).groups.logs["g"]
            write, late = group.write, []

            async def given_up(entries) -> None:
                late.extend(entries)
                raise asyncio.CancelledError

            monkeypatch.setattr(group, "write", given_up)
            with pytest.raises(asyncio.CancelledError):
                await sub.commit()
            monkeypatch.undo()
            await sub.get(timeout_s=5)
            async with bus.transaction() as tx:
                tx.commit(sub)
            await write(late)
            assert (await bus.groups.info("g")).lag == 1
    async with opened(tmp_path, small) as bus:
        assert (await bus.groups.info("g")).lag == 1


async def test_a_commit_is_of_what_was_handed_out_when_it_was_called(tmp_path, small) -> None:
    """What is handed out while it waits is not processed yet."""
    async with opened(tmp_path, small) as bus:
        await bus.publish("in", b"0")
        async with bus.subscribe("in", group="g", mode="log") as sub:
            batches = sub.batches()
            await anext(batches)
            await bus.publish("in", b"1")
            commit = asyncio.create_task(sub.commit())
            await anext(batches)
            await commit
            assert (await bus.groups.info("g")).lag == 1


async def test_a_partition_that_comes_back_is_read_and_brings_no_old_commit(
    tmp_path, small, monkeypatch
) -> None:
    """It was taken by force from a slow member, reset meanwhile, and given to it again."""
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("in", partitions=2)
        for partition in (0, 1):
            for number in range(3):
                await bus.publish("in", str(number).encode(), partition=partition)
        slow = await bus.subscribe("in", group="g", mode="log").open()
        for _ in range(6):
            await slow.get(timeout_s=5)
        other = await bus.subscribe("in", group="g", mode="log").open()
        group = engine(bus).groups.logs["g"]
        later_s = engine(bus).runtime.now() + 31
        monkeypatch.setattr(group, "runtime", SimpleNamespace(now=lambda: later_s))
        group._tick()
        monkeypatch.undo()
        await bus.groups.reset("g", "earliest", confirm="RESET")
        await other.close()
        await slow.commit()
        assert (await bus.groups.info("g")).lag == 6
        again = [await slow.get(timeout_s=5) for _ in range(6)]
        assert sorted((event.partition, event.payload) for event in again if event) == [
            (partition, str(number).encode()) for partition in (0, 1) for number in range(3)
        ]
        await slow.commit()
        assert (await bus.groups.info("g")).lag == 0


async def test_a_reset_that_was_given_up_and_fails_does_no_harm(
    tmp_path, small, monkeypatch
) -> None:
    """Found by the simulator, seed 166: an error for nobody stopped the commit loop."""
    async with opened(tmp_path, small) as bus:
        await bus.publish("in", b"0")

        def refuses(_) -> list[Any]:
            call.cancel()
            raise penstock.Fenced("too late")

        call = asyncio.create_task(engine(bus).publisher.submit([], when_taken=refuses))
        await asyncio.gather(call, return_exceptions=True)
        await bus.publish("in", b"1")


async def test_a_transaction_behind_a_reset_does_not_happen(tmp_path, small, monkeypatch) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("out")
        await bus.publish_many("in", [b"0", b"1"])
        sub = await bus.subscribe("in", group="g", mode="log").open()
        await sub.get(timeout_s=5)
        prepare = engine(bus).publisher.prepare

        async def slow(draft) -> int:
            await bus.groups.reset("g", "latest", confirm="RESET")
            return await prepare(draft)

        monkeypatch.setattr(engine(bus).publisher, "prepare", slow)
        with pytest.raises(penstock.Fenced):
            async with bus.transaction() as tx:
                tx.publish("out", b"never")
                tx.commit(sub)
        assert await read(bus, "out") == []
        assert (await bus.groups.info("g")).lag == 0


async def test_a_transaction_that_begins_after_a_reset_is_told_once(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("out")
        await bus.publish_many("in", [b"0", b"1"])
        sub = await bus.subscribe("in", group="g", mode="log").open()
        await sub.get(timeout_s=5)
        await bus.groups.reset("g", "earliest", confirm="RESET")
        for told in (True, False):
            with pytest.raises(penstock.Fenced) if told else contextlib.nullcontext():
                async with bus.transaction() as tx:
                    tx.publish("out", b"of what was read")
                    tx.commit(sub)
        assert len(await read(bus, "out")) == 1
        assert (await bus.groups.info("g")).lag == 2


def test_what_a_group_does_not_want_never_dies_in_it(world) -> None:
    """Found by the simulator, seed 124: crashes had used up the attempts before the filter's word."""
    here = world(3)
    wants = {"group": "reds", "filter": {"colour": "red"}, "retry": penstock.Retry(max_attempts=1)}

    async def lease(bus: penstock.Bus) -> None:
        await bus.subscribe("orders", **wants).open()
        colours = [{"colour": "blue"}, {"colour": "red"}]
        await bus.publish_many("orders", [b"blue", b"red"], headers=colours)  # and dies at once

    async def look(bus: penstock.Bus) -> list[bytes]:
        await asyncio.sleep(5)
        letters = await bus.dead_letters.list()
        return [(await bus.dead_letters.inspect(each.id)).payload for each in letters]

    here.run_and_die(lease, power=False)
    assert here.run(look) == [b"red"]


async def test_dead_letters_lie_on_a_topic_of_their_tenant(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        for tenant in ("acme", "globex"):
            await give_up(bus, f"orders.created.v1.{tenant}", 2, f"g-{tenant}")
        for tenant in ("acme", "globex"):
            events = [event async for event in bus.replay(f"_dlq.{tenant}")]
            assert sorted(event.payload for event in events) == [b"0", b"1"]
            headers = dict(events[0].headers)
            assert headers["penstock-topic"] == f"orders.created.v1.{tenant}"
            assert headers["penstock-consumer"] == f"g-{tenant}"
            assert headers["penstock-attempts"] == "2"
        assert len(await bus.dead_letters.list(tenant="acme")) == 2


async def test_replays_are_counted_across_restarts_and_deaths(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        (letter,) = await give_up(bus, "orders", 1)
    async with opened(tmp_path, small) as bus:
        outcome = await bus.dead_letters.replay(
            [letter.id], target_consumer="g", target_topic="orders", confirm="REPLAY", **BY
        )
        assert (outcome.requested, outcome.done, outcome.failures) == (1, 1, [])
        assert await bus.dead_letters.list() == []
    async with opened(tmp_path, small) as bus:
        async with bus.subscribe("orders", group="g", retry=NOW) as sub:
            for attempt in (1, 2):
                event = await sub.get(timeout_s=5)
                assert event.attempt == attempt, "a replay has a fresh budget"
                await event.nack()
            (again,) = await dead(bus, 1)
        assert (again.id, again.replay_count, again.status) == (letter.id, 1, "dead")


def test_a_replay_is_in_the_journal_as_one(world) -> None:
    """The event goes back to its group in the same entry that says so: no crash can lose it."""
    for seed in range(4):
        here = world(seed)

        async def replay(bus: penstock.Bus) -> None:
            (letter,) = await give_up(bus, "orders", 1)
            await bus.dead_letters.replay(
                [letter.id], target_consumer="g", target_topic="orders", confirm="REPLAY", **BY
            )

        here.run_and_die(replay, power=True)

        async def rest(bus: penstock.Bus) -> int:
            return len(await drain(bus, "orders", "g", retry=NOW))

        assert here.run(rest) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"confirm": "replay"}, penstock.ConfirmationNeeded),
        ({"actor": ""}, penstock.InvalidInput),
        ({"reason": ""}, penstock.InvalidInput),
    ],
)
async def test_a_replay_without_its_words_is_refused(mem, change, error) -> None:
    (letter,) = await give_up(mem, "orders", 1)
    options = {
        "target_consumer": "g",
        "target_topic": "orders",
        "confirm": "REPLAY",
        **BY,
        **change,
    }
    with pytest.raises(error):
        await mem.dead_letters.replay([letter.id], **options)
    assert len(await mem.dead_letters.list()) == 1


async def test_each_record_of_a_replay_has_its_own_result(mem) -> None:
    letters = await give_up(mem, "orders", 3)
    ids = [each.id for each in letters]
    outcome = await mem.dead_letters.replay(
        [ids[0], "nobody@g", ids[0], ids[1]],
        target_consumer="g", target_topic="orders", confirm="REPLAY", **BY,
    )  # fmt: skip
    assert (outcome.requested, outcome.done) == (4, 2)
    assert [each["code"] for each in outcome.failures] == [
        "notfound.dead-letter",
        "refused.replayed",
    ]
    for wrong in ({"target_consumer": "h"}, {"target_topic": "payments"}):
        target = {"target_consumer": "g", "target_topic": "orders", **wrong}
        outcome = await mem.dead_letters.replay([ids[2]], confirm="REPLAY", **target, **BY)
        assert [each["code"] for each in outcome.failures] == ["refused.target-mismatch"]


async def test_replays_and_purges_of_one_letter_may_race(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        letters = await give_up(bus, "orders", 4)
        target = {"target_consumer": "g", "target_topic": "orders", "confirm": "REPLAY", **BY}
        for letter in letters[:2]:
            await asyncio.wait_for(
                asyncio.gather(
                    bus.dead_letters.purge([letter.id], confirm="PURGE", **BY),
                    bus.dead_letters.replay([letter.id], **target),
                ),
                5,
            )
        both = await asyncio.gather(
            *(bus.dead_letters.replay([letters[2].id], **target) for _ in range(2))
        )
        assert sorted(each.done for each in both) == [0, 1], "it was given back twice"
        await asyncio.wait_for(bus.publish("orders", b"alive"), 5)
        came = [event.payload for event in await drain(bus, "orders", "g")]
        assert came.count(b"%d" % letters[2].offset) == 1
    async with opened(tmp_path, small) as bus:
        assert b"alive" in await read(bus, "orders")


async def test_an_unknown_message_id_is_refused(mem) -> None:
    await mem.publish("orders", b"a")
    for id, error in [
        ("orders/0/99", penstock.UnknownMessage), ("orders/0/-1", penstock.InvalidInput),
        ("nonsense", penstock.InvalidInput), ("payments/0/0", penstock.TargetMismatch),
        ("orders/7/0", penstock.UnknownMessage),
    ]:  # fmt: skip
        with pytest.raises(error):
            await mem.dead_letters.dead_letter(id, consumer="g", topic="orders", **BY)
    assert ("orders", 7) not in engine(mem).log.partitions


@pytest.mark.parametrize("order", ["any", "key"])
async def test_a_dead_lettered_event_is_taken_from_whoever_holds_it(mem, order: str) -> None:
    await mem.publish_many("orders", [b"0", b"1", b"2"], keys=["k", "k", "k"])
    async with mem.subscribe("orders", group="g", order=order, max_inflight=2) as sub:
        held = await sub.get(timeout_s=5)
        await mem.dead_letters.dead_letter("orders/0/1", consumer="g", topic="orders", **BY)
        await held.ack()
        seen = []
        while (event := await sub.get(timeout_s=0.3)) is not None:
            seen.append(event.payload)
            with contextlib.suppress(penstock.DeliveryError):
                await event.ack()
        assert b"2" in seen
        if order == "key":
            assert b"1" not in seen
    assert (await mem.groups.info("g")).lag == 0


# -- dedup, delays, transactions ------------------------------------------------------------------


async def test_a_key_is_remembered_across_restarts_and_sealing(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        first = await bus.publish("orders", b"a", idempotency_key="job-7")
    async with opened(tmp_path, small) as bus:
        again = await bus.publish("orders", b"a", idempotency_key="job-7")
        assert (again.duplicate, again.offset) == (True, first.offset)
        await sealed(bus)
        again = await bus.publish("orders", b"a", idempotency_key="job-7")
        assert (again.duplicate, again.offset) == (True, first.offset)
    async with opened(tmp_path, small) as bus:
        again = await bus.publish("orders", b"a", idempotency_key="job-7")
        assert (again.duplicate, again.offset) == (True, first.offset)
        assert await read(bus, "orders") == [b"a"]


def test_delayed_and_recurring_events_wait_through_a_restart(world) -> None:
    """T7: not before their time, in the order of their times, once."""
    here = world(5)

    async def schedule(bus: penstock.Bus) -> None:
        await bus.publish("jobs", b"second", delay_s=60)
        await bus.publish("jobs", b"first", delay_s=50, key="k", headers={"a": "b"}, priority=3)
        await bus.publish("jobs", b"now")
        await bus.schedules.put("tick", "ticks", b"tick", every=40)

    here.run_and_die(schedule, power=True)

    async def early(bus: penstock.Bus) -> None:
        await asyncio.sleep(30)
        assert await read(bus, "jobs") == [b"now"]

    here.run(early)
    here.loop.advance(15)

    async def due(bus: penstock.Bus) -> None:
        await asyncio.sleep(3)
        assert await read(bus, "jobs") == [b"now"]
        await asyncio.sleep(30)
        events = [event async for event in bus.replay("jobs")]
        assert [event.payload for event in events] == [b"now", b"first", b"second"]
        assert (events[1].key, dict(events[1].headers), events[1].priority) == (b"k", {"a": "b"}, 3)
        assert len(await read(bus, "ticks")) >= 1

    here.run(due)

    async def once(bus: penstock.Bus) -> None:
        await asyncio.sleep(100)
        assert len(await read(bus, "jobs")) == 3
        assert 3 <= len(await read(bus, "ticks")) <= 5

    here.run(once)


async def test_a_transaction_moves_events_acks_and_cursors_together(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        await bus.publish_many("in", [b"0", b"1"])
        async with (
            bus.subscribe("in", group="q") as queue,
            bus.subscribe("in", group="l", mode="log") as log,
        ):
            event = await queue.get(timeout_s=5)
            await log.get(timeout_s=5)
            with pytest.raises(RuntimeError, match="changed my mind"):
                async with bus.transaction() as tx:
                    tx.publish("out", b"never")
                    tx.ack(event)
                    raise RuntimeError("changed my mind")
            async with bus.transaction() as tx:
                tx.publish("out", b"yes")
                tx.ack(event)
                tx.commit(log)
            assert tx.receipts[0].offset == 0
            with pytest.raises(penstock.AlreadySettled):
                async with bus.transaction() as tx:
                    tx.ack(event)
                    tx.publish("out", b"no")
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "out") == [b"yes"]
        assert [e.payload for e in await drain(bus, "in", "q")] == [b"1"]
        (lane,) = (await bus.groups.info("l")).lanes
        assert lane.cursor == 1


# -- reading across boundaries --------------------------------------------------------------------


async def test_replay_crosses_segments_journal_and_memory(tmp_path, small) -> None:
    async with opened(tmp_path, small, limits__cache_bytes=20_000) as bus:
        marks = []
        number = 0
        for stage in range(4):
            for _ in range(25):
                await bus.publish(
                    "orders",
                    b"%d" % number,
                    event_time=datetime(1970, 1, 1, tzinfo=UTC)
                    + timedelta(microseconds=number + 1),
                )
                number += 1
            marks.append((number, datetime.now(UTC)))
            await asyncio.sleep(0.002)
            if stage in (0, 2):
                await sealed(bus)
        sources = {
            type(s).__name__
            for at in range(0, 100, 5)
            for s in engine(bus).log.plan("orders", 0, at, 1)
        }
        assert {"InSegment", "InMemory"} <= sources
        everything = [b"%d" % n for n in range(100)]
        assert await read(bus, "orders") == everything
        for start, stop in ((0, 100), (10, 30), (24, 26), (49, 75), (99, 99), (60, 500)):
            assert (
                await read(bus, "orders", from_offset=start, to_offset=stop)
                == everything[start:stop]
            )
        for count, when in marks[:-1]:
            assert await read(bus, "orders", since=when) == everything[count:]
            assert await read(bus, "orders", until=when) == everything[:count]
        assert await read(bus, "orders", since=marks[0][1], until=marks[2][1]) == everything[25:75]
        events = [event async for event in bus.replay("orders")]
        assert [event.offset for event in events] == list(range(100))
        assert [event.time_us for event in events] == list(range(1, 101))
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "orders") == everything


async def test_sealing_while_reading_changes_nothing_for_the_reader(tmp_path, small) -> None:
    async with opened(tmp_path, small, limits__cache_bytes=0, sealing__grace_s=5.0) as bus:
        for number in range(50):
            await bus.publish("orders", b"%d" % number)
        seen = []
        async for event in bus.replay("orders"):
            seen.append(event.payload)
            if len(seen) == 10:
                await sealed(bus)
        assert seen == [b"%d" % n for n in range(50)]


async def test_a_queue_reads_on_through_sealing(tmp_path, small) -> None:
    async with opened(tmp_path, small, limits__cache_bytes=0) as bus:
        await bus.publish_many("orders", [b"%d" % n for n in range(40)], keys=[b"k"] * 40)
        async with bus.subscribe("orders", group="g", order="key") as sub:
            seen = []
            for at in range(40):
                if at == 20:
                    await sealed(bus)
                event = await sub.get(timeout_s=5)
                seen.append(event.payload)
                await event.ack()
            assert seen == [b"%d" % n for n in range(40)]


async def test_large_payloads_lie_beside_the_journal_until_they_are_sealed(tmp_path, small) -> None:
    async with opened(tmp_path, small, journal__side_file_bytes=10_000) as bus:
        big = bytes(range(256)) * 100
        await bus.publish("orders", big, key="k", headers={"a": "b"})
        assert len(list((tmp_path / "side").iterdir())) == 1
        (event,) = [event async for event in bus.replay("orders")]
        assert (event.payload, event.key, dict(event.headers)) == (big, b"k", {"a": "b"})
        await sealed(bus)
        assert await read(bus, "orders") == [big]

        async def gone() -> bool:
            await engine(bus).maintenance.round()
            return len(list((tmp_path / "side").iterdir())) <= 3

        await until(gone, "the side file going")
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "orders") == [big]


@pytest.mark.parametrize("partition", [2, 7])
@pytest.mark.parametrize("query", ["", "?mode=ro"])
async def test_looking_for_a_partition_that_is_not_there_leaves_no_trace(
    tmp_path, small, query: str, partition: int
) -> None:
    """Q7, found by review: each number that a client asked for was remembered."""
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("orders", partitions=2)
        await bus.publish_many("orders", [b"a", b"b"], keys=["a", "b"])
    async with penstock.connect(f"{tmp_path}{query}") as bus:
        known = set(bus.engine.log.partitions)
        words = f"'orders' has partitions 0 to 1, not {partition}"
        with pytest.raises(penstock.UnknownTopic, match=words):
            async for _ in bus.engine.read("orders", partition, 0, None):
                pass
        with pytest.raises(penstock.UnknownTopic, match=words):
            await bus.ask(FindOffset("orders", partition, 0))
        with pytest.raises(penstock.UnknownTopic, match="no topic 'others'"):
            await bus.ask(FindOffset("others", 0, 0))
        assert set(bus.engine.log.partitions) == known


# -- retention, write-once ------------------------------------------------------------------------


def test_retention_by_age_and_what_is_told_afterwards(world) -> None:
    here = world(6, retention__age_s=100.0)

    async def age(bus: penstock.Bus) -> None:
        await bus.publish_many("orders", [b"old"] * 5)
        await sealed(bus)
        for _ in range(40):
            await asyncio.sleep(10)
            await engine(bus).maintenance.settle()
        await bus.publish("orders", b"new")
        assert await read(bus, "orders") == [b"new"]
        with pytest.raises(penstock.OffsetExpired) as caught:
            await read(bus, "orders", from_offset=2)
        assert (caught.value.first_offset, caught.value.end_offset) == (5, 6)
        # A group that had not read them goes on with what is there.
        assert [e.payload for e in await drain(bus, "orders", "late")] == [b"new"]

    here.run(age)


def test_retention_leaves_a_delayed_event_until_its_time(world) -> None:
    """T7: a delay may be longer than what the log keeps (found by the simulator, seed 34)."""
    here = world(6, retention__age_s=100.0)

    async def age(bus: penstock.Bus) -> None:
        await bus.publish("orders", b"later", delay_s=1_000)
        await sealed(bus)
        for _ in range(99):
            await asyncio.sleep(10)
            await engine(bus).maintenance.settle()
        assert await read(bus, "orders") == []
        await asyncio.sleep(20)
        assert await read(bus, "orders") == [b"later"]
        await asyncio.sleep(300)
        await sealed(bus)
        for _ in range(40):
            await asyncio.sleep(10)
            await engine(bus).maintenance.settle()
        assert engine(bus).log.manifest.ranges("_scheduled", 0) == []

    here.run(age)


async def test_retention_by_size_keeps_the_newest(tmp_path, small) -> None:
    async with opened(tmp_path, small, sealing__target_segment_bytes=1 << 16) as bus:
        await bus.topics.create("orders", retention_bytes=200_000)
        dice = random.Random(1)
        for _ in range(6):
            for _ in range(8):
                await bus.publish("orders", dice.randbytes(20_000))
            await sealed(bus)
        await engine(bus).maintenance.settle()
        info = await bus.topics.info("orders")
        first, end = info.partitions[0].first_offset, info.partitions[0].end_offset
        assert end == 48
        assert 0 < first < 48
        assert len(await read(bus, "orders")) == 48 - first


async def test_write_once_refuses_and_audits_every_attempt(tmp_path, small) -> None:
    """X5: nothing inside retention can be deleted; the attempt is in the audit chain."""
    async with opened(tmp_path, small) as bus:
        await bus.topics.create("ledger", write_once=True, retention_age_s=1_000.0)
        await bus.publish("ledger", b"entry")
        with pytest.raises(penstock.WriteOnce):
            await bus.topics.delete("ledger", confirm="DELETE")
        with pytest.raises(penstock.WriteOnce):
            await bus.topics.configure("ledger", retention_age_s=10.0)
        with pytest.raises(penstock.WriteOnce):
            await bus.topics.configure("ledger", write_once=False)
        await bus.topics.configure("ledger", retention_age_s=2_000.0)
        records = await bus.audit.query()
        refused = [r for r in records if r.result.get("status") == "refused"]
        assert [r.operation for r in refused] == [
            "topic.delete",
            "topic.configure",
            "topic.configure",
        ]
        assert {r.result["code"] for r in refused} == {"refused.write-once"}
        assert (await bus.audit.verify()).ok
        assert await read(bus, "ledger") == [b"entry"]
    async with opened(tmp_path, small) as bus:
        assert len(await bus.audit.query(operation="topic.delete")) == 1
        assert await read(bus, "ledger") == [b"entry"]


async def test_purging_a_dead_letter_removes_it_from_the_view_not_from_the_log(mem) -> None:
    (letter,) = await give_up(mem, "orders", 1)
    outcome = await mem.dead_letters.purge([letter.id], confirm="PURGE", **BY)
    assert outcome.done == 1
    assert await mem.dead_letters.list() == []
    assert await read(mem, "orders") == [b"0"]
    assert await read(mem, "_dlq.default") == [b"0"]


# -- many topics, many tenants --------------------------------------------------------------------


async def test_thousands_of_topics_leave_few_files(tmp_path, small) -> None:
    """The short version: a bounded number of files whatever the number of topics."""
    async with opened(tmp_path, small, durability__fsync="never") as bus:
        for start in range(0, 3_000, 1_500):
            await asyncio.gather(
                *(bus.publish(f"quiet.t{number}", b"x") for number in range(start, start + 1_500))
            )
        await sealed(bus)
        assert len(await bus.topics.list()) >= 3_000
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) < 60, "files grow with topics"
        assert await read(bus, "quiet.t1777") == [b"x"]
    async with opened(tmp_path, small) as bus:
        assert await read(bus, "quiet.t2999") == [b"x"]


async def test_a_noisy_tenant_does_not_hold_up_the_others(tmp_path, small) -> None:
    """By the composition of commits, not by time: a flood costs the others one quantum of each."""
    async with opened(
        tmp_path, small, journal__file_bytes=128 << 20, journal__pending_max_bytes=128 << 20,
        sealing__backlog_max_bytes=1 << 40,
    ) as bus:  # fmt: skip
        await bus.publish("flood.created.v1.noisy", b"")
        await bus.publish("drip.created.v1.quiet", b"")
        commits = engine(bus).commits
        pending = commits._pending
        sizes: list[dict[str, int]] = []
        take = pending.take

        def watched(*args: Any) -> Any:
            taken = take(*args)
            mix: dict[str, int] = {}
            for each in taken:
                mix[each.tenant] = mix.get(each.tenant, 0) + each.size
            sizes.append(mix)
            return taken

        pending.take = watched  # type: ignore[method-assign]
        flood = [
            asyncio.create_task(bus.publish("flood.created.v1.noisy", b"x" * 900_000))
            for _ in range(72)
        ]
        await asyncio.sleep(0)
        before = commits.commits
        await bus.publish("drip.created.v1.quiet", b"please")
        assert commits.commits - before <= 3
        waiting = sum(not each.done() for each in flood)
        assert waiting > 30, "the flood was written first"
        shared = next(mix for mix in sizes if "quiet" in mix)
        assert shared.get("noisy", 0) <= bus.settings.journal.tenant_quantum_bytes
        await asyncio.gather(*flood)


def test_an_event_for_a_consumer_that_waits_costs_one_commit(world) -> None:
    """Its lease is in the commit of the event itself, and both are durable before it is handed over."""

    async def commits(bus: penstock.Bus) -> int:
        async with bus.subscribe("orders", group="g", max_inflight=5) as sub:
            await bus.publish("orders", b"makes the topic")
            await (await sub.get()).ack()
            await bus.flush()
            waiting = asyncio.create_task(sub.get())
            await asyncio.sleep(1)
            before = engine(bus).commits.commits
            await bus.publish("orders", b"here")
            assert (await waiting).payload == b"here"
            return engine(bus).commits.commits - before

    assert world().run(commits) == 1


def test_acks_ride_the_commits_of_events_and_cost_none_of_their_own(world) -> None:
    """Also those that arrive while a commit is being written: they do not follow it at once."""

    async def commits(bus: penstock.Bus) -> int:
        async with bus.subscribe("orders", group="g", max_inflight=50) as sub:
            await bus.publish("orders", b"makes the topic")
            await (await sub.get()).ack()
            await bus.flush()
            before = engine(bus).commits.commits

            async def consume() -> None:
                for _ in range(20):
                    await (await sub.get()).ack()

            consumer = asyncio.create_task(consume())
            for _ in range(20):
                await bus.publish("orders", b"x")
                await asyncio.sleep(0.001)
            await consumer
            return engine(bus).commits.commits - before

    assert world().run(commits) <= 21


# -- small print ----------------------------------------------------------------------------------


async def test_settling_twice_and_too_late(mem) -> None:
    await mem.publish_many("orders", [b"0", b"1"])
    async with mem.subscribe("orders", group="g", lease_s=0.1) as sub:
        event = await sub.get(timeout_s=5)
        await event.ack()
        with pytest.raises(penstock.AlreadySettled):
            await event.ack()
        late = await sub.get(timeout_s=5)
        await asyncio.sleep(0.15)
        with pytest.raises(penstock.LeaseExpired):
            await late.ack()
        again = await sub.get(timeout_s=5)
        assert (again.offset, again.attempt) == (late.offset, 2)
        await again.ack()


async def test_the_bus_survives_a_publish_that_is_cancelled(tmp_path, small) -> None:
    async with opened(tmp_path, small) as bus:
        tasks = [asyncio.create_task(bus.publish("orders", b"%d" % n)) for n in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        acked = {r.offset for r in results if isinstance(r, penstock.Receipt)}
        assert len(acked) == 25
        await bus.publish("orders", b"last")
        stored = {event.offset async for event in bus.replay("orders")}
        assert acked <= stored


async def test_a_wait_that_was_given_up_may_fail_with_nobody_to_hear_it(monkeypatch) -> None:
    """asyncio does not report its error as forgotten, and the next call still gets it."""
    reported: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with penstock.connect("mem:") as bus:
        await bus.publish("orders", b"x")
        for ask_again in (True, False):
            async with bus.subscribe("orders", mode="log", group=f"g{ask_again}") as sub:
                await sub.get()

                async def fail() -> None:
                    await asyncio.sleep(0.02)
                    raise penstock.OffsetExpired("gone")

                monkeypatch.setattr(sub._feed, "receive", fail)
                assert await sub.get(timeout_s=0.001) is None
                await asyncio.sleep(0.05)
                if ask_again:
                    with pytest.raises(penstock.OffsetExpired):
                        await sub.get()
    gc.collect()
    assert reported == []


async def test_a_closed_bus_says_so(tmp_path, small) -> None:
    bus = penstock.connect(tmp_path, settings=small())
    with pytest.raises(penstock.BusClosed):
        await bus.publish("orders", b"a")
    await bus.open()
    sub = await bus.subscribe("orders", group="g").open()
    waiting = asyncio.create_task(sub.get())
    await asyncio.sleep(0.01)
    await bus.close()
    await bus.close()
    with pytest.raises(penstock.BusClosed):
        await waiting
    with pytest.raises(penstock.BusClosed):
        await bus.publish("orders", b"a")
    with pytest.raises(penstock.BusClosed):
        await bus.open()


async def test_group_info_tells_lag_and_outstanding(mem) -> None:
    await mem.publish_many("orders", [b"x"] * 10)
    async with mem.subscribe("orders", group="g", max_inflight=4) as sub:
        for _ in range(4):
            event = await sub.get(timeout_s=5)
        await event.ack()
        info = await mem.groups.info("g")
        assert (info.lag, info.members != []) == (9, True)
    assert (await mem.groups.info("g")).members == []


# -- members that fail ----------------------------------------------------------------------------


async def test_a_member_that_cannot_read_leaves_its_group_and_its_successor_stays(mem) -> None:
    """Found by review: it stayed as a ghost, and when its successor left the writer died."""
    await mem.publish("orders", b"1")
    first = mem.subscribe("orders", group="g", member="m")
    await first.open()
    group = engine(mem).dispatcher.groups["g"]
    first._feed.stop(penstock.errors.Corrupted("unreadable", path="a", position=0))
    second = await mem.subscribe("orders", group="g", member="m").open()
    successor = group.members["m"]
    await first.close()
    assert group.members == {"m": successor}
    event = await second.get(timeout_s=10)
    assert event.payload == b"1"
    await event.ack()
    second._feed.stop(penstock.errors.Corrupted("unreadable", path="a", position=0))
    await second.close()
    assert group.members == {}
    await mem.publish("orders", b"2")
    assert [event.payload for event in await drain(mem, "orders", "g")] == [b"2"]


async def test_who_joins_under_the_name_of_another_takes_its_place(mem) -> None:
    await mem.publish("orders", b"1")
    async with mem.subscribe("orders", group="g", member="m") as first:
        held = await first.get(timeout_s=10)
        async with mem.subscribe("orders", group="g", member="m") as second:
            again = await second.get(timeout_s=10)
            assert (again.payload, again.attempt) == (held.payload, 2)
            with pytest.raises(penstock.Fenced, match="another consumer joined 'g' as 'm'"):
                await first.get(timeout_s=10)
            with pytest.raises(penstock.errors.DeliveryError):
                await held.ack()
                await mem.flush()
            await again.ack()
    assert engine(mem).dispatcher.groups["g"].members == {}


async def test_a_reader_that_leaves_late_does_not_take_its_successor_with_it(mem) -> None:
    """A member of a log group is known by itself, not by its name."""
    await mem.publish("orders", b"1")
    first = await mem.subscribe("orders", group="g", mode="log", member="m").open()
    assert (await first.get(timeout_s=10)).payload == b"1"
    waiting = asyncio.create_task(first.get(timeout_s=30))
    async with mem.subscribe("orders", group="g", mode="log", member="m") as second:
        assert (await second.get(timeout_s=10)).payload == b"1"
        with pytest.raises(penstock.Fenced, match="another consumer joined 'g' as 'm'"):
            await waiting
        group = engine(mem).groups.logs["g"]
        group.left(first._feed)  # however late it comes
        await first.close()
        assert list(group.readers) == group.rebalance.members == ["m"]
        await mem.publish("orders", b"2")
        assert (await second.get(timeout_s=10)).payload == b"2"
        await second.commit()
    assert group.rebalance.members == []


@pytest.mark.parametrize("to", ["time:--5", "time:-", "time:" + "9" * 30, "offset:-1", "offset:" + "9" * 5_000])  # fmt: skip
async def test_a_reset_to_no_place_is_refused(tmp_path, small, to: str) -> None:
    """X4: with an error of the tree, whatever stands where a number should."""
    async with opened(tmp_path, small) as bus:
        await bus.publish("orders", b"1")
        async with bus.subscribe("orders", group="g"):
            pass
        with pytest.raises(penstock.errors.InvalidInput):
            await bus.groups.reset("g", to, confirm="RESET")

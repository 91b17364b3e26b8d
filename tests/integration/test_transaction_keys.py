"""Transactions with an idempotency key: at most once, whatever fails, for each tenant (rows Q13, S2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engines.embedded.publisher import marker_topic
from penstock.engines.engine import Transaction
from penstock.model.token import token_of_key
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import Kind

TOPICS = ("left", "right")


async def once(bus: penstock.Bus, key: str, payload: bytes = b"x") -> bool:
    """One transaction over two topics; whether it was repeated."""
    async with bus.transaction(idempotency_key=key) as tx:
        for topic in TOPICS:
            tx.publish(topic, payload)
    return tx.repeated


async def stored(bus: penstock.Bus) -> list[list[bytes]]:
    return [[event.payload async for event in bus.replay(topic)] for topic in TOPICS]


async def prepared(bus: penstock.Bus) -> None:
    """Topics are there, the one of the markers too: what follows is one commit."""
    await once(bus, "first of all", b"before")


# -- in one process --------------------------------------------------------------------------------


def test_nobody_hears_of_a_transaction_that_the_power_took_back(world) -> None:
    """S2: "repeated" means that the first one is durable, also while that one is being written."""
    answers = set()
    for step in range(1, 16):
        here = world(step)
        heard: list[bool] = []

        async def try_it(bus: penstock.Bus, heard: list[bool] = heard) -> None:
            heard.append(await once(bus, "job-7"))

        async def transact(bus: penstock.Bus, here: Any = here, step: int = step) -> None:
            await prepared(bus)
            here.disk.crash_at(here.disk.operations + step)
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(try_it(bus))
                    await asyncio.sleep(0)

        here.run_and_die(transact, power=True)
        left, right = here.run(stored)
        assert left == right
        assert len(left) in (1, 2)
        assert len(left) == 2 or not heard, f"step {step}: {heard}, and nothing is there"
        assert here.run(lambda bus: once(bus, "job-7")) == (len(left) == 2)
        assert len(here.run(stored)[0]) == 2
        answers.add((len(left), bool(heard)))
    assert {(1, False), (2, True)} <= answers


async def test_a_repeated_one_waits_for_the_commit_of_the_first(tmp_path, monkeypatch) -> None:
    """Both are in the same commit: the second is refused when it is taken, and answered behind it."""
    async with penstock.connect(tmp_path / "data") as bus:
        await prepared(bus)
        engine: Any = bus.engine
        log = engine.log.partition(marker_topic("default"), 0)
        write, ends = engine.commits._writer._write, []
        monkeypatch.setattr(
            engine.commits._writer, "_write", lambda *args: (ends.append(log.end), write(*args))
        )

        async def attempt() -> tuple[bool, int]:
            return await once(bus, "job-7"), log.end

        found = await asyncio.gather(*(attempt() for _ in range(3)))
        assert sorted(found) == [(False, 2), (True, 2), (True, 2)]
        assert ends[0] == 1


def test_a_key_is_known_for_the_window_of_dedup(world) -> None:
    here = world(1, dedup__window_s=60.0)

    async def later(bus: penstock.Bus) -> list[bool]:
        found = [await once(bus, "job-7")]
        await asyncio.sleep(50)
        found.append(await once(bus, "job-7"))
        await asyncio.sleep(100)
        await once(bus, "another one lets time pass")
        return [*found, await once(bus, "job-7")]

    assert here.run(later) == [False, True, False]


async def test_an_empty_transaction_uses_its_key(mem) -> None:
    """S2: a task without rows is as done as one with many."""
    found = []
    for _ in range(2):
        async with mem.transaction(idempotency_key="job-7") as tx:
            pass
        found.append((tx.repeated, tx.receipts))
    assert found == [(False, []), (True, [])]


async def test_a_failed_rival_does_not_take_the_key_along(tmp_path) -> None:
    """Tried at the same time: one that acks what it does not hold, and one that can happen."""
    async with penstock.connect(tmp_path / "data") as bus:
        await prepared(bus)
        await bus.publish("in", b"x")
        async with bus.subscribe("in", group="g") as sub:
            event = await sub.get(timeout_s=5)

            async def rival() -> bool:
                async with bus.transaction(idempotency_key="job-7") as tx:
                    tx.publish("left", b"never")
                    tx.ack(event)
                    await event.ack()
                return tx.repeated

            lost, done = await asyncio.gather(
                rival(), once(bus, "job-7", b"done"), return_exceptions=True
            )
        assert done is False
        assert lost is True or isinstance(lost, penstock.errors.AlreadySettled)
        assert await stored(bus) == [[b"before", b"done"]] * 2


async def test_what_is_repeated_needs_no_lease(tmp_path) -> None:
    """After an answer that was lost, the same again says that it is done: its event is acked by now."""
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish("in", b"x")
        async with bus.subscribe("in", group="g") as sub:
            event = await sub.get(timeout_s=5)
            for repeated in (False, True):
                async with bus.transaction(idempotency_key="job-7") as tx:
                    tx.ack(event)
                assert tx.repeated == repeated


async def test_a_repeated_one_leaves_no_file_behind(tmp_path) -> None:
    """A huge payload goes to a file of its own before its commit; not when there will be none."""
    async with penstock.connect(tmp_path / "data", journal__side_file_bytes=1 << 20) as bus:
        for _ in range(2):
            await once(bus, "job-7", bytes(1 << 20))
        assert bus.engine.publisher.aside_bytes == 2 << 20  # type: ignore[attr-defined]


async def test_a_key_belongs_to_its_tenant(mem) -> None:
    key = token_of_key("job-7")
    for tenant in ("acme", "bolt"):
        assert await mem.engine.transact(Transaction(key=key, tenant=tenant)) == []
        assert await mem.engine.transact(Transaction(key=key, tenant=tenant)) is None
    assert {info.name for info in await mem.topics.list()} == set()
    assert {info.name for info in await mem.topics.list(system=True)} == {
        "_transactions.acme",
        "_transactions.bolt",
    }


def test_the_blocking_bus_has_keys_too() -> None:
    with penstock.connect_sync("mem:") as bus:
        for repeated in (False, True):
            with bus.transaction(idempotency_key="job-7") as tx:
                tx.publish("orders", b"x")
            assert tx.repeated == repeated
            assert len(tx.receipts) == (not repeated)


# -- through a broker ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data").start() as broker:
        yield broker


async def test_tenants_of_a_broker_do_not_take_each_others_keys(broker) -> None:
    found = []
    for tenant in ("acme", "bolt", "acme"):
        async with (
            penstock.connect(broker.url(), identity__tenant=tenant) as bus,
            bus.transaction(idempotency_key="shared-name") as tx,
        ):
            tx.publish(f"jobs.done.v1.{tenant}", b"x")
        found.append(tx.repeated)
    assert found == [False, False, True]


@pytest.mark.parametrize("size", [0, 15, 17, 5_000])
async def test_a_broker_refuses_a_key_that_fits_no_table(broker, size: int) -> None:
    """And lives on: such a key in a commit would stop the writer of everybody."""
    async with penstock.connect(broker.url()) as bus:
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        draft = say.DraftMeta("odd.keys", payloads=[b"x"])
        with pytest.raises(penstock.InvalidInput, match="16 bytes"):
            await channel.call(Kind.TRANSACT, say.Transact(1, [draft], key=b"k" * size))
        with pytest.raises(penstock.UnknownTopic):
            await bus.topics.info("odd.keys")
        assert (await bus.publish("lives.on", b"x")).count == 1


async def test_the_same_frame_again_is_answered_with_the_same_places(broker) -> None:
    """It is no repetition by its key: the client has only lost the answer. Keys spread its events."""
    async with penstock.connect(broker.url()) as bus:
        await bus.topics.create("spread.out", partitions=4)
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        payloads = [b"%d" % number for number in range(12)]
        wish = say.Transact(
            900,
            [
                say.DraftMeta("spread.out", payloads=payloads, keys=list(payloads)),
                say.DraftMeta("plain.one", payloads=[b"x", b"y"]),
            ],
            key=token_of_key("resent"),
        )
        first, again, other = [
            say.decode((await channel.call(Kind.TRANSACT, each)).meta, say.Published)
            for each in (wish, wish, say.Transact(901, wish.drafts, key=wish.key))
        ]
        assert not first.key_known
        assert [receipt.count for receipt in first.receipts] == [12, 2]
        assert not again.key_known
        assert [set(each.ids()) for each in again.receipts] == [
            set(each.ids()) for each in first.receipts
        ]
        assert other.key_known
        assert other.receipts == []
        assert len([event async for event in bus.replay("spread.out")]) == 12


async def test_a_client_does_not_trust_a_broker_that_ignores_keys(broker) -> None:
    """An older broker would do everything again, and say nothing."""
    async with penstock.connect(broker.url()) as bus:
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        assert say.TRANSACTION_KEYS in channel.welcome.capabilities
        channel.welcome = say.Welcome("s", "b", capabilities=["transactions", "idempotency"])
        with pytest.raises(penstock.Unsupported, match="too old"):
            await once(bus, "job-7")
        async with bus.transaction() as tx:
            tx.publish("left", b"no key, no need")
        assert len(tx.receipts) == 1


def test_the_markers_have_a_topic_of_the_bus(tmp_path: Path) -> None:
    with penstock.connect_sync(tmp_path / "data") as bus:
        with bus.transaction(idempotency_key="job-7") as tx:
            tx.publish("orders", b"x")
        with pytest.raises(penstock.InvalidTopic):
            bus.publish(marker_topic("default"), b"forged")
        assert [info.name for info in bus.topics.list()] == ["orders"]

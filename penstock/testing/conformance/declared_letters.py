"""The capability dead-letter-replay: sending dead letters back, making them by hand, purging them."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import (
    Harness,
    dead_letters,
    nothing,
    numbers,
    payloads,
    read,
    take,
)

BY: dict[str, Any] = {"actor": "ann", "reason": "the printer has paper again"}


async def give_up(bus: penstock.Bus, topic: str, group: str, count: int = 1) -> list[str]:
    """Make dead letters, and say their ids in the order of their payloads."""
    await bus.publish_many(topic, numbers(count))
    async with bus.subscribe(topic, group=group) as sub:
        for event in await take(sub, count, ack=False):
            await event.reject()
    letters = await dead_letters(bus, group, count)
    return [letter.id for letter in sorted(letters, key=lambda letter: letter.offset)]


class TestDeadLetterReplay(Declared):
    """Dead letters, by hand"""

    capability = "dead-letter-replay"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Replay a dead letter."""
        ids = await give_up(bus, topic, group)
        await bus.dead_letters.replay(
            ids, target_consumer=group, target_topic=topic, confirm="REPLAY", **BY
        )

    async def test_replay(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A replayed dead letter goes back to its own group, and to no other, with its attempts begun anew."""
        ids = await give_up(bus, topic, group, 2)
        other = f"{group}-other"
        async with bus.subscribe(topic, group=other) as sub:
            await take(sub, 2)
        outcome = await bus.dead_letters.replay(
            ids[:1], target_consumer=group, target_topic=topic, confirm="REPLAY", **BY
        )
        assert (outcome.requested, outcome.done, list(outcome.failures)) == (1, 1, [])
        async with bus.subscribe(topic, group=other) as sub:
            await nothing(sub)
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1)
            await nothing(sub)
        assert (event.payload, event.attempt) == (b"0", 1)
        assert event.token == (await read(bus, topic))[0].token

    async def test_replay_count(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A dead letter that fails again says how often it was replayed."""
        [id] = await give_up(bus, topic, group)
        await bus.dead_letters.replay(
            [id], target_consumer=group, target_topic=topic, confirm="REPLAY", **BY
        )
        async with bus.subscribe(topic, group=group) as sub:
            [event] = await take(sub, 1, ack=False)
            await event.reject()
        [letter] = await dead_letters(bus, group, 1)
        assert (letter.id, letter.replay_count) == (id, 1)

    async def test_confirmation(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Replay and purge need their word of confirmation; without it nothing happens."""
        ids = await give_up(bus, topic, group)
        with pytest.raises(errors.ConfirmationNeeded):
            await bus.dead_letters.replay(
                ids, target_consumer=group, target_topic=topic, confirm="replay", **BY
            )
        with pytest.raises(errors.ConfirmationNeeded):
            await bus.dead_letters.purge(ids, confirm="", **BY)
        await dead_letters(bus, group, 1)

    @pytest.mark.parametrize("wrong", ["consumer", "topic"])
    async def test_restated_target(
        self, bus: penstock.Bus, topic: str, group: str, wrong: str
    ) -> None:
        """A replay whose restated group or topic is not the original one fails for that record."""
        ids = await give_up(bus, topic, group)
        outcome = await bus.dead_letters.replay(
            ids,
            target_consumer=f"{group}-x" if wrong == "consumer" else group,
            target_topic=f"{topic}.x" if wrong == "topic" else topic,
            confirm="REPLAY",
            **BY,
        )
        assert outcome.done == 0
        assert [failure["code"] for failure in outcome.failures] == ["refused.target-mismatch"]
        await dead_letters(bus, group, 1)

    async def test_each_record(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """One record that fails does not stop the others; the outcome names it and why."""
        [id] = await give_up(bus, topic, group)
        unknown = f"00000000-0000-0000-0000-000000000000@{group}"
        outcome = await bus.dead_letters.replay(
            [unknown, id], target_consumer=group, target_topic=topic, confirm="REPLAY", **BY
        )
        assert (outcome.requested, outcome.done) == (2, 1)
        [failure] = outcome.failures
        assert (failure["id"], failure["code"]) == (unknown, "notfound.dead-letter")

    async def test_purge(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A purged dead letter leaves the list; its event stays in its topic."""
        ids = await give_up(bus, topic, group, 2)
        outcome = await bus.dead_letters.purge(ids[:1], confirm="PURGE", **BY)
        assert (outcome.requested, outcome.done) == (1, 1)
        [letter] = await dead_letters(bus, group, 1)
        assert letter.id == ids[1]
        with pytest.raises(errors.UnknownDeadLetter):
            await bus.dead_letters.inspect(ids[0])
        assert payloads(await read(bus, topic)) == numbers(2)

    async def test_by_hand(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """An event that waits can be made a dead letter by hand, and is then not delivered any more."""
        receipt = await bus.publish_many(topic, numbers(2))
        async with bus.subscribe(topic, group=group):
            pass
        await bus.dead_letters.dead_letter(
            str(receipt.ids()[0]), consumer=group, topic=topic, actor="ann", reason="known bad"
        )
        [letter] = await dead_letters(bus, group, 1)
        assert (await bus.dead_letters.inspect(letter.id)).payload == b"0"
        assert "known bad" in letter.reason
        async with bus.subscribe(topic, group=group) as sub:
            assert payloads(await take(sub, 1)) == [b"1"]
            await nothing(sub)

    async def test_unknown_message(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Making a dead letter of a message that is not there raises UnknownMessage."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group):
            pass
        with pytest.raises(errors.UnknownMessage):
            await bus.dead_letters.dead_letter(
                f"{topic}/0/999999", consumer=group, topic=topic, actor="ann", reason="none"
            )

    async def test_audited(
        self, harness: Harness, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """Where audit is declared too, replay and purge are on record with actor and reason."""
        if "audit" not in harness.capabilities:
            pytest.skip("audit is not declared")
        ids = await give_up(bus, topic, group, 2)
        await bus.dead_letters.purge(ids[:1], actor=f"ann-{group}", reason="old", confirm="PURGE")
        records = list(await bus.audit.query(actor=f"ann-{group}"))
        assert [record.reason for record in records] == ["old"]
        assert ids[0] in records[0].targets

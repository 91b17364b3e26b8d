"""Two events with one token are two dead letters (T8, X4)."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock


@pytest.mark.parametrize("where", ["mem:", "folder"])
async def test_one_key_on_two_topics_makes_two_dead_letters(where: str, tmp_path: Path) -> None:
    url = where if where == "mem:" else str(tmp_path / "data")
    async with penstock.connect(url) as bus:
        for topic in ("orders", "payments"):
            await bus.publish(topic, topic.encode(), idempotency_key="same", codec="raw")
        async with bus.subscribe("*", group="billing", retry=penstock.Retry.none()) as events:
            for _ in range(2):
                await (await anext(events)).reject("no such customer")
            await bus.flush()
        letters = await bus.dead_letters.list()
        assert {letter.topic for letter in letters} == {"orders", "payments"}
        for letter in letters:
            assert (await bus.dead_letters.inspect(letter.id)).payload == letter.topic.encode()
        done = await bus.dead_letters.replay(
            [letter.id for letter in letters if letter.topic == "orders"],
            target_consumer="billing", target_topic="orders", reason="mended", confirm="REPLAY", actor="ann",
        )  # fmt: skip
        assert (done.done, done.failures) == (1, [])
        async with bus.subscribe("*", group="billing") as events:
            again = await anext(events)
            assert (again.topic, again.payload) == ("orders", b"orders")
            await again.reject("still none")
            await bus.flush()
        assert len(await bus.dead_letters.list()) == 2

"""What a reset of one topic leaves alone: the attempts of what was handed out of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import penstock


async def test_a_reset_of_one_topic_does_not_forget_attempts_of_another(tmp_path: Path) -> None:
    """B21: after a crash, what a consumer was handed is its second attempt."""
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish("t.a", b"1")
        await bus.publish("t.b", b"2")
        async with bus.subscribe("t.*", group="g", start="earliest") as events:
            assert {(await anext(events)).topic for _ in range(2)} == {"t.a", "t.b"}
            await bus.groups.reset("g", "latest", topic="t.a", confirm="RESET")
            await bus.flush()
            # A copy is what a kill leaves: everything that was written.
            shutil.copytree(tmp_path / "data", tmp_path / "killed")
    (tmp_path / "killed" / "lock").unlink()
    async with (
        penstock.connect(tmp_path / "killed") as bus,
        bus.subscribe("t.*", group="g") as events,
    ):
        again = await events.get(timeout_s=30)
        assert again is not None
        assert (again.topic, again.attempt) == ("t.b", 2)

"""Who is gone holds nothing: closed, cancelled and refused subscriptions, deleted groups (T4, T5, Q6, T11)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import penstock
from penstock import errors

DEADLINE_S = 20.0
SOON_S = 5.0
TOPIC = "orders.created"


async def test_a_deleted_group_leaves_nothing_to_settle(tmp_path: Path) -> None:
    """T5: an ack that comes after the group was made anew does not settle the new group's event."""
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish(TOPIC, b"1")
        async with bus.subscribe(TOPIC, group="billing") as former:
            event = await former.get(timeout_s=DEADLINE_S)
            assert event is not None
            await bus.groups.delete("billing")
            async with bus.subscribe(TOPIC, group="billing") as sub:
                again = await sub.get(timeout_s=DEADLINE_S)
                assert again is not None
                with pytest.raises(errors.Fenced):
                    await event.ack()
                await bus.flush()
                shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    async with (
        penstock.connect(tmp_path / "crashed") as bus,
        bus.subscribe(TOPIC, group="billing") as sub,
    ):
        assert await sub.get(timeout_s=SOON_S) is not None

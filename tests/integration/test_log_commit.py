"""What a log subscription commits when the topics it reads change."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.testing.broker_process import BrokerProcess


@pytest.mark.parametrize("engine", ["memory", "folder", "broker"])
async def test_a_commit_leaves_out_a_topic_that_was_deleted(engine: str, tmp_path: Path) -> None:
    if engine == "broker":
        with BrokerProcess(tmp_path / "data").start() as broker:
            return await read_and_delete(broker.url())
    return await read_and_delete("mem:" if engine == "memory" else str(tmp_path / "data"))


async def read_and_delete(url: str) -> None:
    async with penstock.connect(url) as bus:
        async with bus.subscribe("s.*", group="log", mode="log", start="earliest") as events:
            await bus.publish("s.gone", b"1")
            await bus.publish("s.kept", b"2")
            read = {(await anext(events)).topic for _ in range(2)}
            assert read == {"s.gone", "s.kept"}
            await bus.topics.delete("s.gone", confirm="DELETE")
            await events.commit()
        assert (await bus.groups.info("log")).lag == 0

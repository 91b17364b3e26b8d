"""Small commits are synced on the loop while the disk is quick, and by a thread when it is not (Y1)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engines.runtime import SLOW_WRITES, STALLED_WRITES, Haste
from penstock.log.journal import Journal

LIMIT_S = 0.001


def test_one_slow_write_takes_the_thread_for_some_and_a_stall_for_many() -> None:
    haste = Haste(LIMIT_S)
    for seconds, writes in ((LIMIT_S * 2, SLOW_WRITES), (LIMIT_S * 5, STALLED_WRITES)):
        haste.took(seconds)
        for _ in range(writes):
            assert not haste.quick
            haste.took(LIMIT_S / 2)
        assert haste.quick


def test_without_a_limit_the_thread_does_it_all() -> None:
    haste = Haste(0.0)
    for _ in range(2 * STALLED_WRITES):
        haste.took(0.0)
    assert not haste.quick


class Writers:
    """Which threads wrote, and a disk that stalls when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.stall_s = 0.0
        write = Journal.write

        def noted(journal: Journal, *args: Any, **more: Any) -> None:
            self.names.append(threading.current_thread().name)
            time.sleep(self.stall_s)
            write(journal, *args, **more)

        monkeypatch.setattr(Journal, "write", noted)

    async def publish(self, bus: penstock.Bus, times: int, size: int = 10) -> set[str]:
        self.names.clear()
        for _ in range(times):
            await bus.publish("t", os.urandom(size))
        return set(self.names)


async def test_a_quick_disk_needs_no_thread_and_one_that_stalls_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, loop, thread = Writers(monkeypatch), threading.current_thread().name, "penstock-writer"
    # As if it were quick, whatever else the machine does.
    async with penstock.connect(tmp_path, durability__quick_sync_us=100_000) as bus:
        await writers.publish(bus, 2 * SLOW_WRITES)
        assert await writers.publish(bus, 10) == {loop}
        assert await writers.publish(bus, 1, size=200_000) == {thread}
        writers.stall_s = 0.15
        await writers.publish(bus, 1)
        writers.stall_s = 0.0
        assert await writers.publish(bus, SLOW_WRITES - 1) == {thread}
        assert await writers.publish(bus, 3) >= {loop}
        assert len([event async for event in bus.replay("t")]) == 3 * SLOW_WRITES + 14


@pytest.mark.parametrize("settings", [{"quick_sync_us": 0}, {"fsync": "interval"}])
async def test_who_asks_for_the_thread_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    writers = Writers(monkeypatch)
    chosen = {f"durability__{name}": value for name, value in settings.items()}
    async with penstock.connect(tmp_path, **chosen) as bus:
        assert await writers.publish(bus, 3 * SLOW_WRITES) == {"penstock-writer"}

"""Detours of large frames by way of a thread (row T13)."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.model.settings import FastPath as FastPathSettings
from penstock.server.fastpath import FastPath, ThreadLane


def broken() -> None:
    raise ValueError("no frame")


async def test_work_that_failed_for_nobody_is_not_complained_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Q1: a connection that has ended meanwhile does not look; a client cannot fill the log so."""
    fastpath = FastPath(FastPathSettings())
    thread_lane: ThreadLane[str, None] = ThreadLane(fastpath, lambda work, item, behind: None)
    assert thread_lane.begin("frame", 1 << 20, broken)
    async with asyncio.timeout(5):
        while thread_lane.busy:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    gc.collect()
    fastpath.close()
    assert "never retrieved" not in caplog.text

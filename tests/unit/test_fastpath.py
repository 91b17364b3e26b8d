"""Large payloads are handled in threads above the cut-over, as the settings say (T13)."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from queue import Queue

import pytest

from penstock.model.errors import Deferred
from penstock.model.settings import FastPath as Settings
from penstock.server.fastpath import FastPath, ThreadLane

LARGE = 256 << 10


async def test_large_work_leaves_the_loop_and_small_work_stays() -> None:
    """T13: the cut-over decides which thread does the work."""
    path = FastPath(Settings())
    here = threading.get_ident()
    assert await path.run(LARGE, threading.get_ident) != here
    assert await path.run(LARGE - 1, threading.get_ident) == here
    assert path.taken == 1
    path.close()


async def test_switched_off_everything_stays_on_the_loop() -> None:
    path = FastPath(Settings(enabled=False))
    assert await path.run(LARGE, threading.get_ident) == threading.get_ident()


async def occupied(settings: Settings) -> tuple[FastPath, asyncio.Task[None]]:
    path = FastPath(settings)
    work = asyncio.create_task(path.run(LARGE, time.sleep, 0.2))
    await asyncio.sleep(0.02)
    return path, work


async def test_when_it_is_busy_the_loop_does_the_work_or_waits() -> None:
    """T13: `fall_back` chooses between the loop now and a thread later."""
    path, work = await occupied(Settings(threads=1))
    assert await path.run(LARGE, threading.get_ident) == threading.get_ident()
    assert path.fallen_back == 1
    await work
    path.close()
    path, work = await occupied(Settings(threads=1, fall_back=False))
    assert await path.run(LARGE, threading.get_ident) != threading.get_ident()
    await work
    path.close()


async def test_when_it_is_required_and_busy_the_publisher_is_told_to_wait() -> None:
    path, work = await occupied(Settings(threads=1, require=True))
    with pytest.raises(Deferred) as raised:
        await path.run(LARGE, threading.get_ident)
    assert raised.value.retry_after_s > 0
    await work
    path.close()


async def test_an_error_comes_back_and_frees_the_thread() -> None:
    path = FastPath(Settings(threads=1, fall_back=False))
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            await path.run(LARGE, int, "x")
    path.close()


class Large:
    """Tells which thread let go of it."""

    def __init__(self, told: Queue[int]) -> None:
        self._told = told

    def __del__(self) -> None:
        self._told.put(threading.get_ident())


async def test_what_is_large_is_let_go_of_by_a_thread_and_what_is_small_here() -> None:
    """T13: giving memory back takes time too; without threads the loop does it."""
    path, here = FastPath(Settings()), threading.get_ident()

    def dropped_by(size_bytes: int) -> int:
        told: Queue[int] = Queue()
        held = [Large(told)]
        path.drop(held, size_bytes)
        return told.get(timeout=10)

    assert dropped_by(LARGE) == here, "no thread was needed yet, and none is started for this"
    await path.run(LARGE, int)
    assert dropped_by(LARGE - 1) == here
    assert dropped_by(LARGE) != here
    path.close()


def fails() -> None:
    raise ValueError("no frame")


async def test_an_error_of_a_closed_connection_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Q1: a connection that ended meanwhile does not read the error; a client cannot fill the log so."""
    fastpath = FastPath(Settings())
    thread_lane: ThreadLane[str, None] = ThreadLane(fastpath, lambda work, item, behind: None)
    assert thread_lane.begin("frame", 1 << 20, fails)
    async with asyncio.timeout(5):
        while thread_lane.busy:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    gc.collect()
    fastpath.close()
    assert "never retrieved" not in caplog.text

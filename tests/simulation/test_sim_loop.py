"""Virtual time, one schedule per seed, and processes that die quietly (Y2)."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from penstock.testing.simulation.disk import SimCrash, SimDisk
from penstock.testing.simulation.loop import (
    EPOCH_US,
    SimClock,
    SimDeadlock,
    SimLoop,
    SimStepLimit,
    kill,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def test_a_day_passes_in_no_time() -> None:
    loop = SimLoop()
    seen: list[float] = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(10, lambda: seen.append(loop.time()))
        await asyncio.sleep(86_400)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()

    began = time.perf_counter()
    loop.run_until_complete(main())
    assert time.perf_counter() - began < 1
    assert seen == [10]
    assert loop.time() == 86_460


def test_cancelled_timers_do_not_move_time() -> None:
    loop = SimLoop(start_s=5.0)

    async def main() -> None:
        asyncio.get_running_loop().call_later(1_000, print).cancel()
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert loop.time() == 6


def test_a_deadlock_is_named() -> None:
    loop = SimLoop()

    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="the stuck one")

    with pytest.raises(SimDeadlock, match="the stuck one"):
        loop.run_until_complete(main())
    kill(loop)


def test_spinning_is_bounded() -> None:
    loop = SimLoop(max_steps=1_000)

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimStepLimit):
        loop.run_until_complete(spin())
    kill(loop)


def race(seed: int, *, shuffle: bool) -> list[int]:
    """The order in which ten tasks that are ready together, some through threads, get to run."""
    order: list[int] = []

    async def runner(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            order.append(number)
        await asyncio.to_thread(order.append, 100 + number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(runner(number))

    SimLoop(seed, shuffle=shuffle).run_until_complete(main())
    return order


def test_one_seed_is_one_schedule() -> None:
    assert race(1, shuffle=True) == race(1, shuffle=True)
    assert race(1, shuffle=True)[:30] != race(2, shuffle=True)[:30]


def test_without_shuffle_tasks_take_turns() -> None:
    assert race(1, shuffle=False)[:30] == list(range(10)) * 3
    assert race(1, shuffle=False)[30:] != race(2, shuffle=False)[30:]


def test_cancelling_a_group_wakes_its_tasks_in_a_stable_order() -> None:
    """Sets of tasks hash by number, so that even their order is part of the seed."""

    def run() -> list[int]:
        order: list[int] = []

        async def child(number: int) -> None:
            try:
                await asyncio.sleep(1_000)
            finally:
                order.append(number)

        async def main() -> None:
            ballast.append(bytearray(len(ballast) * 100))  # moves addresses between runs
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    for number in range(50):
                        group.create_task(child(number))
                    await asyncio.sleep(1)
                    raise ValueError

        SimLoop().run_until_complete(main())
        return order

    ballast: list[bytearray] = []
    assert len({tuple(run()) for _ in range(20)}) == 1


def test_shuffle_leaves_plain_callbacks_in_order() -> None:
    for seed in range(20):
        loop = SimLoop(seed, shuffle=True)
        order: list[int] = []

        async def main(loop: SimLoop = loop, order: list[int] = order) -> None:
            others = [asyncio.create_task(asyncio.sleep(0)) for _ in range(5)]
            for number in range(20):
                loop.call_soon(order.append, number)
                loop.call_soon_threadsafe(order.append, number)
            await asyncio.gather(*others)

        loop.run_until_complete(main())
        assert order == sorted(order)
        assert len(order) == 40


def test_executor_work_takes_time_and_reports_back() -> None:
    loop = SimLoop(3)

    def fail() -> None:
        raise ValueError("from the thread")

    async def main() -> None:
        assert await loop.run_in_executor(None, lambda: 7) == 7
        with pytest.raises(ValueError, match="from the thread"):
            await loop.run_in_executor(None, fail)

    loop.run_until_complete(main())
    assert loop.time() > 0


def test_an_executor_of_one_worker_keeps_its_order_and_a_pool_does_not() -> None:
    async def main(executor: ThreadPoolExecutor | None) -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(executor, order.append, number) for number in range(20)]
        await asyncio.gather(*jobs)
        return order

    for seed in range(20):
        with ThreadPoolExecutor(max_workers=1) as one:
            assert SimLoop(seed).run_until_complete(main(one)) == list(range(20))
    assert SimLoop(1).run_until_complete(main(None)) != list(range(20))


def test_work_that_is_cancelled_sometimes_happened_anyway() -> None:
    def happened(seed: int) -> bool:
        done: list[int] = []

        async def main() -> None:
            job = asyncio.get_running_loop().run_in_executor(None, done.append, 1)
            job.cancel()
            await asyncio.sleep(1)

        SimLoop(seed).run_until_complete(main())
        return bool(done)

    assert {happened(seed) for seed in range(20)} == {True, False}


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not() -> None:
    loop = SimLoop()
    clock = SimClock(loop)
    loop.run_until_complete(asyncio.sleep(2))
    clock.advance(0.5)
    assert (clock.monotonic(), clock.wall_us()) == (2.5, EPOCH_US + 2_500_000)
    clock.jump(-3600)
    assert (clock.monotonic(), clock.wall_us()) == (2.5, EPOCH_US - 3_597_500_000)
    clock.loop = SimLoop(start_s=loop.time())
    assert clock.monotonic() == 2.5


def test_a_power_cut_ends_the_run_at_once() -> None:
    """Tasks store a SimCrash like any error; halting the loop is what stops the others."""
    disk, loop = SimDisk(), SimLoop()
    disk.on_power_off = loop.halt
    disk.crash_at(3)
    ran: list[str] = []

    async def writer() -> None:
        file = disk.open("a", create=True)
        try:
            file.append([b"x"])
            await loop.run_in_executor(None, file.sync)
            ran.append("synced")
        except Exception:
            ran.append("swallowed")

    async def main() -> None:
        task = asyncio.create_task(writer())
        await asyncio.sleep(1)
        ran.append("went on")
        await task

    with pytest.raises(SimCrash):
        loop.run_until_complete(main())
    kill(loop)
    assert ran == []


def test_a_killed_process_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Stubborn finally blocks, groups, generators, threads and unstarted tasks: no write, no noise."""
    disk, loop = SimDisk(), SimLoop()
    file = disk.open("a", create=True)
    swallowed: list[type[BaseException]] = []

    @asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(1)
            file.append([b"context"])

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            file.append([b"generator"])

    async def stubborn() -> None:
        try:
            async with resource(), asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(1_000))
                async for _ in numbers():
                    await asyncio.sleep(1_000)
        finally:
            try:
                disk.open("b", create=True)
            except BaseException as error:
                swallowed.append(type(error))
            never_awaited = asyncio.sleep(1)
            try:
                async with asyncio.timeout(1):  # refuses: there is no task any more
                    await never_awaited
            finally:
                asyncio.create_task(asyncio.sleep(1))  # noqa: RUF006

    async def failing() -> None:
        raise ValueError("never looked at")

    async def main() -> None:
        tasks = [asyncio.create_task(stubborn()) for _ in range(3)]
        tasks.append(asyncio.create_task(failing()))
        await asyncio.sleep(10)
        tasks.append(asyncio.create_task(stubborn()))  # never gets to start
        asyncio.get_running_loop().run_in_executor(None, file.append, [b"thread"])
        disk.on_power_off = loop.halt
        disk.power_off()

    with pytest.raises(SimCrash):
        loop.run_until_complete(main())
    kill(loop)
    gc.collect()
    assert loop.is_closed()
    assert disk.crash().snapshot() in ({}, {"a": b""})
    assert swallowed == [SimCrash] * 3
    assert caplog.records == []


def test_a_running_loop_cannot_be_killed() -> None:
    loop = SimLoop()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="from outside"):
            kill(loop)

    loop.run_until_complete(main())

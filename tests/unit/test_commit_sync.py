"""Commits are synced on the loop, by the kernel beside it, or in a thread (Y1, T6)."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engines.embedded import runtime
from penstock.engines.embedded.runtime import (
    AT_ONCE,
    SLOW_WRITES,
    STALLED_WRITES,
    Haste,
    KernelSync,
    Runtime,
)
from penstock.log.disk import RealDisk
from penstock.log.journal import Journal, Watermark
from penstock.model.draft import Draft
from penstock.model.errors import WriterFailed

LIMIT_S = 0.001
PATIENCE_S = 0.1  # a busy machine holds up everybody for longer than a disk does
THREAD = "penstock-writer"


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
    """Who wrote and who synced, and a disk that stalls when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.beside = 0
        self.stall_s = 0.0
        write, sync = Journal.write, Runtime.sync

        def noted(journal: Journal, *args: Any, **more: Any) -> None:
            self.names.append(threading.current_thread().name)
            time.sleep(self.stall_s)
            write(journal, *args, **more)

        async def counted(runtime: Runtime, descriptor: int) -> None:
            self.beside += 1
            await sync(runtime, descriptor)

        monkeypatch.setattr(Journal, "write", noted)
        monkeypatch.setattr(Runtime, "sync", counted)
        monkeypatch.setattr(runtime, "HELD_UP_S", PATIENCE_S)

    async def publish(self, bus: penstock.Bus, times: int, size: int = 10) -> set[str]:
        self.names.clear()
        self.beside = 0
        for _ in range(times):
            await bus.publish("t", os.urandom(size))
        return set(self.names)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Writers:
    return Writers(monkeypatch)


@pytest.fixture
def loop_thread() -> str:
    return threading.current_thread().name


async def test_a_quick_disk_needs_no_thread_and_one_that_stalls_gets_it_back(
    tmp_path: Path, writers: Writers, loop_thread: str
) -> None:
    # As if it were quick, whatever else the machine does.
    async with penstock.connect(tmp_path, durability__quick_sync_us=int(PATIENCE_S * 1e6)) as bus:
        await writers.publish(bus, 2 * SLOW_WRITES)
        assert await writers.publish(bus, 10) == {loop_thread}
        assert not writers.beside
        assert await writers.publish(bus, 1, size=200_000) == {THREAD}
        writers.stall_s = 1.5 * PATIENCE_S
        await writers.publish(bus, 1)
        writers.stall_s = 0.0
        await writers.publish(bus, SLOW_WRITES - 1)
        assert writers.beside == SLOW_WRITES - 1
        assert await writers.publish(bus, 3) == {loop_thread}
        assert writers.beside < 3
        assert len([event async for event in bus.replay("t")]) == 3 * SLOW_WRITES + 14


async def test_the_kernel_syncs_beside_a_loop_that_may_not_wait(
    tmp_path: Path, writers: Writers, loop_thread: str
) -> None:
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        assert await writers.publish(bus, SLOW_WRITES) == {THREAD}
        assert await writers.publish(bus, 10) == {loop_thread}
        assert writers.beside == 10
        writers.stall_s = 1.5 * PATIENCE_S
        assert await writers.publish(bus, 1) == {loop_thread}
        writers.stall_s = 0.0
        assert await writers.publish(bus, SLOW_WRITES) == {THREAD}
        assert len([event async for event in bus.replay("t")]) == 2 * SLOW_WRITES + 11
    async with penstock.connect(tmp_path) as bus:
        assert len([event async for event in bus.replay("t")]) == 2 * SLOW_WRITES + 11


async def test_nothing_is_answered_before_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = asyncio.Event(), asyncio.Event()

    async def gated(runtime: Runtime, descriptor: int) -> None:
        asked.set()
        await gate.wait()

    monkeypatch.setattr(runtime, "HELD_UP_S", PATIENCE_S)
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        monkeypatch.setattr(Runtime, "sync", gated)
        waiting = asyncio.ensure_future(bus.publish("t", b""))
        await asked.wait()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert bus.engine.journal.durable < bus.engine.journal.position
        gate.set()
        await waiting
        assert bus.engine.journal.durable == bus.engine.journal.position


class Kernel:
    """A bus whose small commits wait for a sync that ends when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        monkeypatch.setattr(runtime, "HELD_UP_S", PATIENCE_S)
        monkeypatch.setattr(KernelSync, "sync", self._sync)

    def _sync(self, descriptor: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(future)
        return future

    async def publish(self, bus: penstock.Bus) -> tuple[asyncio.Task[Any], asyncio.Future[None]]:
        """A publish that waits, and what it waits for."""
        task = asyncio.create_task(bus.publish("t", b""))
        synced = await asyncio.wait_for(self.asked.get(), 10)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        return task, synced


async def test_a_publish_waits_for_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        kernel = Kernel(monkeypatch)
        task, synced = await kernel.publish(bus)
        assert bus.engine.journal.durable < bus.engine.journal.position
        synced.set_result(None)
        assert (await task).offset == SLOW_WRITES
        task, synced = await kernel.publish(bus)
        synced.set_exception(OSError(errno.EIO, "Input/output error"))
        with pytest.raises(WriterFailed, match="could not make events durable"):
            await task


async def test_the_kernel_says_that_a_sync_failed_and_nobody_else_misses_theirs(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    kernel = KernelSync(loop)
    futures = {number: loop.create_future() for number in (101, 102, 103)}
    kernel._waiting.update(futures)
    futures[101].cancel()
    kernel._tell([(101, 0), (102, -errno.EIO), (103, 0)])
    kernel.close()
    with pytest.raises(OSError, match="Input/output error") as caught:
        await futures[102]
    assert caught.value.errno == errno.EIO
    assert futures[103].done()
    assert await futures[103] is None
    assert not kernel._waiting


async def test_a_sync_the_kernel_reports_as_failed_ends_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(kernel: KernelSync, completions: list[tuple[int, int]]) -> None:
        tell(kernel, [(number, -errno.EIO) for number, _ in completions])

    tell = KernelSync._tell
    monkeypatch.setattr(runtime, "HELD_UP_S", PATIENCE_S)
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        monkeypatch.setattr(KernelSync, "_tell", failed)
        with pytest.raises(WriterFailed, match="could not make events durable"):
            await bus.publish("t", b"")


async def test_a_watermark_that_takes_long_counts_as_a_slow_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: Writers, loop_thread: str
) -> None:
    def slow(watermark: Watermark, *args: Any, **more: Any) -> None:
        time.sleep(1.5 * PATIENCE_S)
        publish(watermark, *args, **more)

    publish = Watermark.publish
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        await writers.publish(bus, SLOW_WRITES)
        with monkeypatch.context() as patch:
            patch.setattr(Watermark, "publish", slow)
            assert await writers.publish(bus, 1) == {loop_thread}
        assert await writers.publish(bus, 1) == {THREAD}


@pytest.mark.parametrize(
    ("error", "lasts"), [(errno.EAGAIN, False), (errno.ENOMEM, False), (errno.EINVAL, True)]
)
async def test_a_kernel_that_is_busy_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: Writers, error: int, lasts: bool
) -> None:
    def refused(kernel: KernelSync, descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        await writers.publish(bus, SLOW_WRITES + 1)
        with monkeypatch.context() as patch:
            patch.setattr(KernelSync, "sync", refused)
            await writers.publish(bus, 1)
            assert writers.beside == 1
        await writers.publish(bus, 2)
        assert writers.beside == (0 if lasts else 2)
        assert len([event async for event in bus.replay("t")]) == SLOW_WRITES + 4


async def test_a_sync_that_fails_is_the_end_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(runtime: Runtime, descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(runtime, "HELD_UP_S", PATIENCE_S)
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        monkeypatch.setattr(Runtime, "sync", broken)
        with pytest.raises(WriterFailed, match="could not make events durable"):
            await bus.publish("t", b"")
        monkeypatch.undo()
        with pytest.raises(WriterFailed):
            await bus.publish("t", b"")


async def test_readers_that_cannot_be_told_are_the_end_of_writing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(watermark: Watermark, *args: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        with monkeypatch.context() as patch:
            patch.setattr(Watermark, "publish", broken)
            with pytest.raises(WriterFailed, match="could not make events durable"):
                await bus.publish("t", b"")
        assert bus.engine.journal.failed is not None


def _no_such_call(*_: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize("lacks", ["calls", "readers"])
async def test_a_system_without_syncs_of_its_own_uses_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: Writers, lacks: str
) -> None:
    if lacks == "calls":
        monkeypatch.setattr(runtime, "CALLS", {})
    else:
        monkeypatch.setattr(type(asyncio.get_running_loop()), "add_reader", _no_such_call)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, NotImplementedError)):
        KernelSync(asyncio.get_running_loop())
    assert len(os.listdir("/proc/self/fd")) == before
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        await writers.publish(bus, SLOW_WRITES + 1)
        assert writers.beside == 1
        assert await writers.publish(bus, 3) == {THREAD}
        assert not writers.beside
        assert len([event async for event in bus.replay("t")]) == SLOW_WRITES + 4


async def test_intervals_are_the_threads(tmp_path: Path, writers: Writers) -> None:
    async with penstock.connect(tmp_path, durability__fsync="interval") as bus:
        assert await writers.publish(bus, 3 * SLOW_WRITES) == {THREAD}


async def test_several_files_at_once_and_one_that_is_none(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kernel = KernelSync(asyncio.get_running_loop())
    descriptors = [os.open(tmp_path / str(n), os.O_CREAT | os.O_RDWR) for n in range(AT_ONCE)]
    try:
        for descriptor in descriptors:
            os.write(descriptor, b"x" * 5_000)
        for _ in range(5):  # more than a ring holds
            await asyncio.gather(*map(kernel.sync, descriptors))
        with pytest.raises(OSError, match="Bad file descriptor"):
            await kernel.sync(max(descriptors) + 1_000)
        given_up = kernel.sync(descriptors[0])
        given_up.cancel()
        await kernel.sync(descriptors[1])
        while kernel._waiting:  # the kernel finishes syncs of several files in any order
            await asyncio.sleep(0.001)
    finally:
        kernel.close()
        for descriptor in descriptors:
            os.close(descriptor)
    for _ in range(200):  # the system takes its time
        if len(os.listdir("/proc/self/fd")) == before:
            break
        await asyncio.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_request_the_system_does_not_take_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(kernel: KernelSync, number: int, *arguments: Any) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    kernel = KernelSync(asyncio.get_running_loop())
    with (tmp_path / "file").open("wb") as file:
        with monkeypatch.context() as patch:
            patch.setattr(KernelSync, "_call", busy)
            with pytest.raises(OSError, match="temporarily"):
                kernel.sync(file.fileno())
        await asyncio.wait_for(kernel.sync(file.fileno()), 10)
        assert not kernel._waiting
    kernel.close()


# -- commits of several tenants side by side (T11) ------------------------------------------------


class Branch:
    """Two tenants on one engine whose syncs end when a test says so."""

    def __init__(self, bus: penstock.Bus, kernel: Kernel) -> None:
        self.kernel = kernel
        self.engine = bus.engine

    async def publish(self, tenant: str) -> asyncio.Task[Any]:
        draft = Draft("t", [tenant.encode()], tenant=tenant, codec="raw")
        task = asyncio.create_task(self.engine.publish(draft))
        await _turns()
        return task

    async def synced(self) -> asyncio.Future[None]:
        return await asyncio.wait_for(self.kernel.asked.get(), 10)


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Branch]:
    async with penstock.connect(tmp_path, durability__quick_sync_us=0) as bus:
        for _ in range(SLOW_WRITES):
            await bus.publish("t", b"")
        with monkeypatch.context() as patch:
            yield Branch(bus, Kernel(patch))


async def test_a_tenant_does_not_wait_for_the_commit_of_another(branch: Branch) -> None:
    loud, quiet = await branch.publish("loud"), await branch.publish("quiet")
    first, second = await branch.synced(), await branch.synced()
    more = await branch.publish("loud")
    assert branch.kernel.asked.empty(), "a tenant's own commits come one after another"
    first.set_result(None)
    await _turns()
    assert loud.done()
    assert not quiet.done()
    second.set_result(None)
    third = await branch.synced()
    third.set_result(None)
    receipts = await asyncio.gather(loud, quiet, more)
    assert [each.offset for each in receipts] == [SLOW_WRITES + n for n in range(3)]


async def test_what_is_synced_first_becomes_true_in_its_order(branch: Branch) -> None:
    loud, quiet = await branch.publish("loud"), await branch.publish("quiet")
    first, second = await branch.synced(), await branch.synced()
    second.set_result(None)
    await _turns()
    assert not quiet.done(), "behind one that may be lost"
    assert branch.engine.log.bounds("t", 0)[1] == SLOW_WRITES
    first.set_result(None)
    assert [each.offset for each in await asyncio.gather(loud, quiet)] == [32, 33]


async def test_a_commit_behind_one_that_failed_is_not_true(branch: Branch) -> None:
    loud, quiet = await branch.publish("loud"), await branch.publish("quiet")
    first, second = await branch.synced(), await branch.synced()
    second.set_result(None)
    first.set_exception(OSError(errno.EIO, "Input/output error"))
    for task in (loud, quiet):
        with pytest.raises(WriterFailed, match="could not make events durable"):
            await task
    assert branch.engine.log.bounds("t", 0)[1] == SLOW_WRITES
    with pytest.raises(WriterFailed):
        await (await branch.publish("quiet"))


async def test_a_large_commit_waits_until_nothing_is_under_way(branch: Branch) -> None:
    loud = await branch.publish("loud")
    first = await branch.synced()
    large = Draft("t", [os.urandom(100_000)] * 2, tenant="quiet", codec="raw")
    waiting = asyncio.create_task(branch.engine.publish(large))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    first.set_result(None)
    assert [each.offset for each in await asyncio.gather(loud, waiting)] == [32, 33]


def test_openings_of_a_file_are_the_same_file_and_not_each_other(tmp_path: Path) -> None:
    # Linux tells each opening of its own once that a write failed.
    disk = RealDisk(tmp_path)
    file = disk.open("a", create=True)
    first, second = file.descriptors(2)
    assert os.fstat(first).st_ino == os.fstat(second).st_ino
    os.lseek(second, 5, os.SEEK_SET)
    assert os.lseek(first, 0, os.SEEK_CUR) == 0, "duplicates would share their place"
    assert list(file.descriptors(2)) == [first, second]
    file.close()
    for descriptor in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

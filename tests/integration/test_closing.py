"""A bus that is closed while it writes: what was accepted is stored and answered, and the folder opens again (Y1)."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.core.entry import TopicGone
from penstock.engines.embedded import runtime as runtime_module
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.runtime import SLOW_WRITES, Runtime
from penstock.log.disk import RealFile
from penstock.log.journal import Journal

PATIENCE_S = 10.0
# For how long something on the writer's thread waits for what must not happen meanwhile.
MEANWHILE_S = 0.3
COMMIT_BYTES = 16_384
WAITING = 40


def connect(path: Path, **more: Any) -> penstock.Bus:
    return penstock.connect(
        path, durability__quick_sync_us=0, journal__commit_max_bytes=COMMIT_BYTES,
        journal__tenant_quantum_bytes=COMMIT_BYTES, journal__side_file_bytes=COMMIT_BYTES, **more,
    )  # fmt: skip


def engine(bus: penstock.Bus) -> EmbeddedEngine:
    assert isinstance(bus.engine, EmbeddedEngine)
    return bus.engine


class Gate:
    """Holds up whoever comes through, on a thread or on the loop, until it is opened."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._reached = asyncio.Event()

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._reached.set)
        assert self._open.wait(PATIENCE_S)

    async def hold_task(self) -> None:
        self._reached.set()
        while not self._open.is_set():
            await asyncio.sleep(0.001)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def gated_write(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Journal.write

    def slow(journal: Journal, *args: Any, **more: Any) -> None:
        gate.hold()
        write(journal, *args, **more)

    monkeypatch.setattr(Journal, "write", slow)


def gated_sync(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Runtime.sync

    async def slow(runtime: Runtime, descriptor: int) -> None:
        await gate.hold_task()
        await sync(runtime, descriptor)

    monkeypatch.setattr(Runtime, "sync", slow)


async def stored(path: Path) -> int:
    async with connect(path) as bus:
        return len([event async for event in bus.replay("t")])


@pytest.mark.parametrize(("hold", "writes"), [(gated_write, 1), (gated_sync, SLOW_WRITES + 1)])
async def test_everything_that_waits_is_stored_and_answered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Callable[[Gate, pytest.MonkeyPatch], None],
    writes: int,
) -> None:
    """Many commits wait behind one that a thread writes, or the kernel syncs."""
    monkeypatch.setattr(runtime_module, "HELD_UP_S", 1.0)
    bus, gate = connect(tmp_path), Gate()
    await bus.open()
    for _ in range(writes):
        await bus.publish("t", b"")
    hold(gate, monkeypatch)
    payloads = [os.urandom(COMMIT_BYTES // 4) for _ in range(WAITING)]
    tasks = [asyncio.create_task(bus.publish("t", each)) for each in payloads]
    await gate.reached()
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0.01)
    with pytest.raises(penstock.BusClosed):  # or it might never end
        await engine(bus).publisher.submit([], entries=[TopicGone("none", ())])
    assert not closing.done()
    gate.open()
    receipts = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    await asyncio.wait_for(closing, PATIENCE_S)
    assert sorted(each.offset for each in receipts) == list(range(writes, writes + WAITING))
    monkeypatch.undo()
    assert await stored(tmp_path) == writes + WAITING


@pytest.mark.parametrize("under_way", ["write", "sync"])
async def test_the_journal_is_closed_behind_what_the_writer_still_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: str
) -> None:
    """A close that is given up cannot stop a write; a close never stops a sync of `interval`."""
    loop, begun, closed = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    meanwhile: list[bool] = []
    real, close = getattr(Journal, under_way), Journal.close

    def slow(journal: Journal, *args: Any, **more: Any) -> None:
        if not meanwhile:
            meanwhile.append(False)
            loop.call_soon_threadsafe(begun.set)
            meanwhile[0] = closed.wait(MEANWHILE_S)
        real(journal, *args, **more)

    def noted(journal: Journal) -> None:
        closed.set()
        close(journal)

    fsync = "always" if under_way == "write" else "interval"
    bus = connect(tmp_path, durability__fsync=fsync)
    await bus.open()
    await bus.publish("t", b"")
    monkeypatch.setattr(Journal, under_way, slow)
    monkeypatch.setattr(Journal, "close", noted)
    last = asyncio.create_task(bus.publish("t", b""))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    if under_way == "write":
        closing.cancel()
    await asyncio.wait_for(asyncio.gather(closing, last, return_exceptions=True), PATIENCE_S)
    assert closed.is_set()
    assert meanwhile == [False]
    monkeypatch.undo()
    assert await stored(tmp_path) == 2


async def test_what_waits_on_a_full_disk_is_refused_and_the_bus_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(journal: Journal, size: int) -> None:
        raise penstock.DiskFull("no room", retry_after_s=1.0, needed_bytes=size)

    bus, gate = connect(tmp_path), Gate()
    await bus.open()
    await bus.publish("t", b"")
    gated_write(gate, monkeypatch)
    first = asyncio.create_task(bus.publish("t", b""))
    await gate.reached()
    monkeypatch.setattr(Journal, "spare_wanted", lambda journal, size: size)
    monkeypatch.setattr(Journal, "fits", lambda *args, **more: False)
    monkeypatch.setattr(Journal, "prepare", full)
    tasks = [asyncio.create_task(bus.publish("t", b"")) for _ in range(WAITING)]
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0.01)
    gate.open()
    await asyncio.wait_for(closing, PATIENCE_S)
    await first
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert {type(each) for each in results} == {penstock.DiskFull}
    monkeypatch.undo()
    assert await stored(tmp_path) == 2


async def test_a_disk_that_fails_at_the_end_keeps_no_thread_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: RealFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    bus = connect(tmp_path)
    await bus.open()
    await bus.publish("t", b"")
    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "sync", broken)
        with pytest.raises(penstock.errors.WriterFailed, match="could not make events durable"):
            await bus.close()
    with pytest.raises(RuntimeError, match="closed"):
        await engine(bus).runtime.write(int)
    assert await stored(tmp_path) == 1


async def test_a_flush_ends_when_what_follows_a_commit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(taken: Any) -> None:
        raise ValueError("no such thing")

    async with connect(tmp_path) as bus:
        await bus.publish("t", b"")
        commits = engine(bus).commits
        monkeypatch.setattr(commits, "_committed", broken)
        publish = asyncio.create_task(bus.publish("t", b""))
        await asyncio.wait_for(commits.flush(), PATIENCE_S)  # it is durable all the same
        assert (await publish).offset == 1
        with pytest.raises(penstock.errors.WriterFailed, match="no such thing"):
            await bus.publish("t", b"")


async def test_a_bus_that_cannot_open_leaves_nothing_behind_and_may_try_again(tmp_path) -> None:
    """Y1: a locked folder, a file in the way: no thread and no descriptor stays, and a later try works."""
    before = threading.active_count()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((OSError, penstock.PenstockError)):
        await penstock.connect(tmp_path / "file" / "data").open()
    with pytest.raises(penstock.PenstockError):
        await penstock.connect(f"{tmp_path / 'nothing'}?mode=ro").open()
    assert threading.active_count() == before
    late = penstock.connect(tmp_path / "data")
    async with penstock.connect(tmp_path / "data"):
        with pytest.raises(penstock.FolderLocked):
            await late.open()
    await late.open()
    await late.publish("orders", b"at last")
    await late.close()
    assert threading.active_count() == before


def children() -> set[str]:
    """The processes that this one has started."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.5])
async def test_no_sealing_process_outlives_the_bus(tmp_path: Path, after_s: float) -> None:
    """Closed while its journal is rewritten: in the middle of a job, or while the process starts."""
    before = children()
    settings: dict[str, Any] = {"journal__file_bytes": 1 << 20}
    async with penstock.connect(tmp_path / "data", sealing__enabled=False, **settings) as bus:
        for _ in range(8):
            await bus.publish_many("orders", [os.urandom(1_000) for _ in range(1_000)])
    async with penstock.connect(tmp_path / "data", **settings):
        await asyncio.sleep(after_s)
    assert children() <= before

"""`SealerProcess` returns results and errors, replaces a process that died, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from penstock.log import sealing as module
from penstock.log.disk import RealDisk
from penstock.log.memory_disk import MemoryDisk
from penstock.log.sealing import InlineSealer, Job, JournalInput, SealerProcess, packed
from penstock.log.segment_reader import SegmentReader
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, StorageError
from penstock.model.settings import Sealing

READER = """
import errno, os, time
from penstock.log.sealing import packed
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted

def batches(disk, base, end):
    if base == 1:
        raise Corrupted("the journal is bad", path="x")
    if base == 2:
        raise OSError(errno.ENOSPC, "no room")
    if base == 3:
        os._exit(7)
    if base == 4:
        time.sleep(60)
    if base == 5:
        raise ZeroDivisionError("surprise")
    print("noise on standard output", flush=True)
    yield from packed([EventBatch.build("orders", [str(os.getpriority(os.PRIO_PROCESS, 0)).encode()] * (end - base))])
"""


def job(base, end=10) -> Job:
    return Job(first_id=1, settings=Sealing(), journal=[JournalInput(base, end)])


@pytest.fixture
async def sealer(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.05)
    disk = RealDisk(tmp_path / "data")
    disk.make_dir("segments")
    made = SealerProcess(disk, reader="stand_in:batches")
    yield made
    await made.close()


async def test_a_job_is_done_by_another_process_at_low_priority(sealer, tmp_path):
    result = await sealer.run(job(0))
    assert sealer.pid not in (None, os.getpid())
    disk = RealDisk(tmp_path / "data")
    (batch,) = SegmentReader(disk, result.added[0]).batches()
    assert batch.count == result.events == 10
    assert int(batch.payloads()[0]) >= os.getpriority(os.PRIO_PROCESS, 0) + module.NICENESS
    assert result.sealed_to == 10


async def test_errors_come_back_as_what_they_were(sealer):
    await sealer.run(job(0))
    pid = sealer.pid
    with pytest.raises(Corrupted, match="the journal is bad"):
        await sealer.run(job(1))
    with pytest.raises(OSError, match="no room") as caught:
        await sealer.run(job(2))
    assert caught.value.errno == 28
    with pytest.raises(StorageError, match="surprise"):
        await sealer.run(job(5))
    assert sealer.pid == pid
    assert (await sealer.run(job(0))).events == 10


async def test_a_death_is_told_and_the_next_job_gets_a_new_process(sealer):
    for _ in range(2):
        with pytest.raises(StorageError, match="exit code 7"):
            await sealer.run(job(3))
    started = time.monotonic()
    assert (await sealer.run(job(0))).events == 10
    assert time.monotonic() - started >= 0.1  # the second step of the backoff


async def test_cancelling_gives_up_the_process(sealer):
    await sealer.run(job(0))
    pid = sealer.pid
    task = asyncio.create_task(sealer.run(job(4)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sealer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (await sealer.run(job(0))).events == 10


def test_the_process_dies_with_its_parent(tmp_path):
    (tmp_path / "stand_in.py").write_text(READER)
    (tmp_path / "data" / "segments").mkdir(parents=True)
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from test_job import job
        from penstock.log.disk import RealDisk
        from penstock.log.sealing import SealerProcess

        async def main():
            sealer = SealerProcess(RealDisk({str(tmp_path / "data")!r}), reader="stand_in:batches")
            await sealer.run(job(0))
            print(sealer.pid, flush=True)
            await sealer.run(job(4))

        asyncio.run(main())
        """
    )
    (tmp_path / "test_job.py").write_text(
        "from penstock.log.sealing import Job, JournalInput\nfrom penstock.model.settings import Sealing\n"
        "def job(base):\n    return Job(first_id=1, settings=Sealing(), journal=[JournalInput(base, 10)])\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=module._environment(),
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if b") Z " in Path(f"/proc/{child}/stat").read_bytes():
            return  # dead, and waiting for whoever adopted it
        time.sleep(0.05)
    pytest.fail("the sealing process outlived its parent")


async def test_inline_sealing_has_the_same_interface():
    disk = MemoryDisk()
    disk.make_dir("segments")
    seen = []

    async def execute(work):
        seen.append(work)
        return work()

    for run_in in (None, execute):
        sealer = InlineSealer(disk, lambda *_: packed([EventBatch.build("a", [b"1"])]), run_in)
        assert (await sealer.run(job(0))).events == 1
        await sealer.close()
    assert len(seen) == 1

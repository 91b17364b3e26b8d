"""Where rewrites run: in a process of their own, so that publishing keeps its core, or in line.

The process is ours to the last byte: started with the same interpreter, fed length-prefixed
msgpack through its standard input, and gone when that ends, which it does when the parent dies.
A job that fails leaves nothing behind that counts, so it may simply be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import queue
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.log import rewrite
from penstock.log.disk import Disk, RealDisk
from penstock.log.rewrite import BatchesOf, Job, Result
from penstock.model.errors import PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

JOURNAL_READER = "penstock.log.journal:sealed_batches"
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30  # far above any job; a length beyond it is not one of ours
NICENESS = 10  # sealing takes what publishing leaves
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0  # a sealer that cannot start is tried again twice a minute
STOP_TIMEOUT_S = 5.0


class Sealer(Protocol):
    """Something that runs rewrites."""

    async def run(self, job: Job) -> Result:
        """Do one rewrite; one at a time."""
        ...

    async def close(self) -> None:
        """Stop, giving up a rewrite under way."""
        ...


class InlineSealer:
    """Runs rewrites right here, or wherever `execute` puts them: `mem:`, the simulator, tests."""

    def __init__(
        self,
        disk: Disk,
        batches_of: BatchesOf,
        execute: Callable[[Callable[[], Result]], Awaitable[Result]] | None = None,
    ) -> None:
        self._disk = disk
        self._batches_of = batches_of
        self._execute = execute

    async def run(self, job: Job) -> Result:
        """Do one rewrite."""

        def work() -> Result:
            return rewrite.run(self._disk, job, self._batches_of)

        return work() if self._execute is None else await self._execute(work)

    async def close(self) -> None:
        """Nothing to stop."""


class Start(msgspec.Struct, frozen=True):
    """First message to the process: where the data is and how to read its journal."""

    root: str
    reader: str


class Reply(msgspec.Struct, frozen=True):
    """What the process answers to a job: a result, or why there is none."""

    result: Result | None = None
    code: str = ""
    message: str = ""
    errno: int = 0


class SealerProcess:
    """Runs rewrites in a child process, started on first use and again after it died."""

    def __init__(self, disk: RealDisk, reader: str = JOURNAL_READER) -> None:
        self._start = Start(str(disk.root.absolute()), reader)
        self._child: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._child is None else self._child.pid

    async def run(self, job: Job) -> Result:
        """Do one rewrite; raises what it raised, or StorageError when the process died."""
        async with self._lock:
            if self._child is None and self._deaths:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (self._deaths - 1), MAX_BACKOFF_S))
            try:
                reply = await self._ask(job)
            except (OSError, asyncio.IncompleteReadError) as error:
                self._deaths += 1
                code = await self._stop()
                raise StorageError(
                    f"the sealing process died (exit code {code}). Nothing was lost: the journal "
                    "keeps what was not sealed, and the next attempt starts a new process",
                    exit_code=code,
                ) from error
            except BaseException:
                await self._stop()  # an answer that nobody waits for would be taken for the next
                raise
            self._deaths = 0
        if reply.result is None:
            raise _rebuild(reply)
        return reply.result

    async def _ask(self, job: Job) -> Reply:
        if self._child is None:
            start = asyncio.create_subprocess_exec(
                sys.executable, "-c", "from penstock.log.sealer import main; main()",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
            )  # fmt: skip
            starting = asyncio.ensure_future(start)
            try:
                self._child = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._child = await starting  # half started it could not be stopped
                raise
            self._send(self._start)
        self._send(job)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        await child.stdin.drain()
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await child.stdout.readexactly(length), type=Reply)

    def _send(self, message: Start | Job) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        data = msgspec.msgpack.encode(message)
        self._child.stdin.write(LENGTH.pack(len(data)) + data)

    async def _stop(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin is not None
        child.stdin.close()  # the end of its input is the end of the process, even in mid-job
        try:
            await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return child.returncode

    async def close(self) -> None:
        """End the process; a rewrite under way is given up and will be done again."""
        await self._stop()


def _environment() -> dict[str, str]:
    """The child finds the package where the parent found it."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *(os.path.abspath(path) for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _rebuild(reply: Reply) -> Exception:
    if reply.errno:
        return OSError(reply.errno, reply.message)
    kinds: list[type[PenstockError]] = [PenstockError]
    for kind in kinds:
        if kind.code == reply.code:
            return kind(reply.message)
        kinds += kind.__subclasses__()
    return StorageError(f"sealing failed; the journal keeps everything. It said: {reply.message}")


# -- the child ---------------------------------------------------------------------------------


def main() -> None:
    """The sealing process: take jobs from standard input until it ends."""
    os.nice(NICENESS)
    # Anything printed by accident must not land between replies.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox,), daemon=True).start()
    start = msgspec.msgpack.decode(inbox.get(), type=Start)
    disk = RealDisk(start.root)
    module, _, name = start.reader.partition(":")
    batches_of: BatchesOf = getattr(importlib.import_module(module), name)
    while True:
        job = msgspec.msgpack.decode(inbox.get(), type=Job)
        data = msgspec.msgpack.encode(_attempt(disk, job, batches_of))
        out.write(LENGTH.pack(len(data)) + data)
        out.flush()


def _receive(inbox: queue.SimpleQueue[bytes]) -> None:
    """Read messages beside the work, so that the parent's end is noticed in the middle of a job."""
    source = sys.stdin.buffer
    while True:
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            os._exit(0)
        (length,) = LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            os._exit(1)
        inbox.put(source.read(length))


def _attempt(disk: Disk, job: Job, batches_of: BatchesOf) -> Reply:
    try:
        return Reply(result=rewrite.run(disk, job, batches_of))
    except PenstockError as error:
        return Reply(code=error.code, message=error.message)
    except OSError as error:
        return Reply(errno=error.errno or 5, message=error.strerror or str(error))
    except Exception:
        return Reply(message=traceback.format_exc(limit=8))

"""Clients in processes of their own: a benchmark gives orders, each client carries them out.

The child is `python -c ... module:Class`. It makes one object of that class and then reads orders,
one line of JSON each: the name of a method and its arguments. Each is answered with one line. When
its input ends, because the parent closed it or died in any way, the child is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

# The answers of a thousand consumers are a few hundred kilobytes.
MAX_LINE_BYTES = 16 << 20
STOP_TIMEOUT_S = 5.0  # an end of input is noticed in milliseconds; more means a stuck machine
START_IN_S = 0.05  # from the order to the first measured call, so that all parts begin together
LOG_TAIL_CHARS = 2_000


class ClientProcess:
    """A client that runs elsewhere; made with the place of its class, such as `module:Class`."""

    def __init__(self, part: str, log: Path) -> None:
        self.part = part
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        """Start it; it imports what it needs while the caller goes on."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                "from penstock.bench.client_process import main; main()",
                self.part,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C on the terminal is for the benchmark
                limit=MAX_LINE_BYTES,
                env=clean_environment(),
            )
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, "start() it first"
        return self._process.pid

    async def order(self, name: str, **given: Any) -> Any:
        """Have a method called there; returns its result, raises when it failed.

        An order that failed or was given up costs the process; the next one starts another.
        """
        try:
            return await self._call(name, given)
        except BaseException:
            await self.stop(wait_s=0.0)
            raise

    async def _call(self, name: str, given: dict[str, Any]) -> Any:
        if self._process is None:
            await self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, given]).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the missing answer says it better
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise PenstockError(
                f"the client process {self.part} ended in {name!r}; the end of its log: "
                f"{self._log_tail()}",
                part=self.part,
            )
        answer = json.loads(line)
        if "fault" in answer:
            raise PenstockError(
                f"the client process {self.part} failed in {name!r}: {answer['fault']}",
                part=self.part,
            )
        return answer["result"]

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return "(no log)"

    async def stop(self, wait_s: float = STOP_TIMEOUT_S) -> None:
        """End it: by the end of its input, and by force after so long. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        ended = asyncio.ensure_future(process.wait())
        # Not asyncio.timeout: in a task that was given up, Python 3.11.2 takes its end for another giving up.
        await asyncio.wait([ended], timeout=wait_s)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                process.kill()
        await ended


class Crew:
    """Several clients, started together and stopped on every way out."""

    def __init__(self, folder: Path, *parts: str) -> None:
        self.clients = [
            ClientProcess(part, folder / f"client-{number}.log")
            for number, part in enumerate(parts)
        ]

    async def start(self) -> None:
        """Start all; they import what they need while the caller goes on."""
        for client in self.clients:
            await client.start()

    async def stop(self) -> None:
        """End all. Safe to call twice."""
        await asyncio.gather(*(client.stop() for client in self.clients))

    async def __aenter__(self) -> list[ClientProcess]:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self.clients

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


async def all_of(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; when one fails the others are given up, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of a bus, and with this package to import."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2])}


def start_soon() -> float:
    """When the parts of a case shall begin: on the clock that all processes of a machine share."""
    return time.perf_counter() + START_IN_S


async def until(at_s: float) -> None:
    """Sleep until that time on the shared clock."""
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


# -- the child -------------------------------------------------------------------------------------


def main() -> None:
    """Carry out orders until the input ends."""
    from penstock.bench.runner import loop_factory

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    module, _, name = sys.argv[1].partition(":")
    part = getattr(importlib.import_module(module), name)()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(part, answers))


async def _serve(part: Any, answers: IO[bytes]) -> None:
    orders: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(orders.put_nowait, line)
        os._exit(0)  # nothing of a client is worth keeping, and no lock may hold it up

    threading.Thread(target=listen, daemon=True).start()
    while True:
        name, given = json.loads(await orders.get())
        try:
            answer = {"result": await getattr(part, name)(**given)}
        except Exception as error:
            traceback.print_exc()
            answer = {"fault": describe(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def describe(error: BaseException) -> str:
    """One line about an error: of a group, its first member.

    >>> describe(ExceptionGroup("tasks", [ValueError("no")]))
    'ValueError: no'
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

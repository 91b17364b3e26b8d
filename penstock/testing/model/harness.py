"""How the model test reaches one engine: a Protocol, and what there is of it.

Memory and folder run on the simulator's loop, where an hour passes at once and the same seed gives
the same run. A broker is a process of its own, and its time is real: its sequences use short waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Protocol, Self

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.model.proxy import Proxy
from penstock.testing.simulation.loop import LoopRuntime, SimClock, SimLoop

SMALL: dict[str, Any] = {
    "journal__file_bytes": 1 << 20,
    "sealing__process": False,
    "durability__fsync": "never",
    "journal__reserve_bytes": 1 << 16,
    "journal__roll_after_s": 20.0,
}
"""Settings for short lives: small files, sealed inside the process."""


class Harness(Protocol):
    """One engine under test. A client is a bus: `open("bus")` and perhaps `open("other")`."""

    name: str
    cannot: frozenset[str]
    """Kinds of steps that this engine has no meaning for."""
    keeps: bool
    """Whether events outlive the closing of the bus."""
    outlived: bool
    """Whether clients, with what they hold, outlive a stop of the engine."""
    slack_s: float
    """How much later than promised something may be seen before it is a contradiction."""
    pause_s: float
    """What passes between two steps: longer than a commit takes."""
    quiet_s: float
    """How long a consumer waits where nothing needs to come."""
    unwritten_s: float
    """What was settled so shortly before a kill may be forgotten by it."""
    session_s: float
    """How long the engine keeps the place of a client that vanished."""

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on this engine's loop, and clean up behind it."""
        ...

    def now(self) -> float:
        """Seconds on the clock that the engine goes by."""
        ...

    async def open(self, client: str = "bus") -> penstock.Bus:
        """A client, connected."""
        ...

    async def restart(self) -> None:
        """Stop the engine politely and start it again, its clients being connected."""
        ...

    async def kill(self) -> None:
        """End the engine's process without warning, and start it again."""
        ...

    async def cut(self, client: str) -> None:
        """Break the connection of a client, which may connect again at once."""
        ...

    async def die(self, client: str) -> None:
        """Let the process of a client vanish."""
        ...


class VirtualRuntime(LoopRuntime):
    """The runtime of an engine on the simulator's loop, with its wall clock and its dice."""

    def __init__(self, clock: SimClock, rng: Random) -> None:
        super().__init__()
        self._clock = clock
        self._rng = rng

    def wall_us(self) -> int:
        """Microseconds since 1970, simulated."""
        return self._clock.wall_us()

    def entropy(self, count: int) -> bytes:
        """Bytes from the seed."""
        return self._rng.randbytes(count)


class EmbeddedHarness:
    """`mem:` and a folder, in virtual time. A kill leaves what was written, in a copy of the folder."""

    outlived = False
    slack_s = 0.2
    pause_s = 0.05
    quiet_s = 0.05
    unwritten_s = 0.02
    session_s = 0.0

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.keeps = name == "folder"
        self.cannot = frozenset({"restart", "cut", "die"} | (set() if self.keeps else {"kill"}))
        self._seed = seed

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run on a loop of virtual time, in a folder that is gone afterwards."""
        self._loop = SimLoop(self._seed)
        self._clock, self._rng = SimClock(self._loop), Random(self._seed)
        self._lives, self._bus = 0, None
        with tempfile.TemporaryDirectory(prefix="penstock-model-") as folder:
            self._folder = Path(folder)

            async def life() -> Any:
                try:
                    return await main()
                finally:
                    if self._bus is not None:
                        await self._bus.close()

            try:
                return self._loop.run_until_complete(life())
            finally:
                self._loop.close()

    _bus: penstock.Bus | None = None

    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    async def open(self, client: str = "bus") -> penstock.Bus:
        """The one client there can be."""
        url = str(self._place()) if self.keeps else "mem:"
        bus = penstock.connect(url, **SMALL)
        engine: Any = bus.engine
        engine.runtime = VirtualRuntime(self._clock, self._rng)
        bus.wall_us = self._clock.wall_us  # type: ignore[method-assign]
        self._bus = await bus.open()
        return bus

    def _place(self) -> Path:
        return self._folder / f"life{self._lives}"

    async def restart(self) -> None:
        """A client and its engine are one process here: close the bus instead."""
        raise NotImplementedError

    async def kill(self) -> None:
        """What was written stays; the process that wrote it goes on for nobody, and is ended."""
        before, old = self._place(), self._bus
        self._lives += 1
        shutil.copytree(before, self._place())
        (self._place() / "lock").unlink(missing_ok=True)
        if old is not None:
            with contextlib.suppress(penstock.errors.PenstockError):
                await old.close()
        shutil.rmtree(before)

    async def cut(self, client: str) -> None:
        """There is no connection."""
        raise NotImplementedError

    async def die(self, client: str) -> None:
        """A client dies with its engine here: kill it."""
        raise NotImplementedError


class BrokerHarness:
    """A broker in a process of its own; each client comes through a proxy that can cut it off."""

    name = "broker"
    cannot: frozenset[str] = frozenset()
    keeps = outlived = True
    slack_s = 8.0
    pause_s = 0.02
    quiet_s = 0.1
    unwritten_s = 3.0
    session_s = 2.0

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._proxies: dict[str, Proxy] = {}
        self._buses: dict[str, penstock.Bus] = {}
        self._dead: list[penstock.Bus] = []

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Settings of the broker that this harness goes with."""
        return {"server__session_s": cls.session_s, "server__drain_s": 1.0, "server__heartbeat_s": 1.0,
                **SMALL}  # fmt: skip

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run on a loop of its own, and disconnect all clients afterwards."""

        async def life() -> Any:
            try:
                return await main()
            finally:
                await self._disconnect()

        return asyncio.run(life())

    async def _disconnect(self) -> None:
        for bus, seconds in [(bus, 0.1) for bus in self._dead] + [
            (bus, 10.0) for bus in self._buses.values()
        ]:
            with contextlib.suppress(penstock.errors.PenstockError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await bus.close()
        for proxy in self._proxies.values():
            await proxy.close()

    def now(self) -> float:
        """Real seconds."""
        return time.monotonic()

    async def open(self, client: str = "bus") -> penstock.Bus:
        """A client, behind a proxy of its own."""
        if client not in self._proxies:
            self._proxies[client] = await Proxy(self._broker.ports["tcp"]).start()
        url = f"penstock://127.0.0.1:{self._proxies[client].port}"
        bus = penstock.connect(url, client__heartbeat_s=1.0, client__reconnect_max_s=0.2,
                               client__deadline_s=30.0)  # fmt: skip
        self._buses[client] = await bus.open()
        return bus

    async def restart(self) -> None:
        """SIGTERM, and start it again."""
        await self._again(self._broker.stop)

    async def kill(self) -> None:
        """kill -9, and start it again."""
        await self._again(self._broker.kill)

    async def _again(self, end: Callable[[], Any]) -> None:
        await asyncio.to_thread(end)
        await asyncio.to_thread(self._broker.start, **self.flags())

    async def cut(self, client: str) -> None:
        """Close its connections; the next one is let through."""
        await self._proxies[client].cut()

    async def die(self, client: str) -> None:
        """Close its connections and let none through any more."""
        await self._proxies.pop(client).close()
        self._dead.append(self._buses.pop(client))


class BrokerRuns:
    """One broker for many sequences; a context manager."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-model-")
        self._broker = BrokerProcess(Path(self._folder.name) / "data").start(
            **BrokerHarness.flags()
        )
        return self

    def __call__(self, seed: int) -> BrokerHarness:
        return BrokerHarness(self._broker)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._broker.__exit__(kind, error, trace)
        self._folder.cleanup()


class EmbeddedRuns:
    """Memory or a folder, anew for each sequence; a context manager like `BrokerRuns`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __call__(self, seed: int) -> EmbeddedHarness:
        return EmbeddedHarness(self._name, seed)

    def __exit__(self, *_: object) -> None:
        """Nothing is left."""


ENGINES = ("mem", "folder", "broker")


def runs_on(engine: str) -> EmbeddedRuns | BrokerRuns:
    """What makes harnesses of an engine, one for each sequence."""
    return BrokerRuns() if engine == "broker" else EmbeddedRuns(engine)


@contextlib.contextmanager
def harness_of(engine: str, seed: int) -> Iterator[Harness]:
    """One harness, for a script."""
    with runs_on(engine) as runs:
        yield runs(seed)

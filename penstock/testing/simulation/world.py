"""The world of one seed: one machine, its disk and clock, and one life of the process after another.

Each life opens the production engine on what the last one left, checks it, runs the workload, and
ends by a crash in the middle of a disk operation, a power cut, a kill, a failed fsync or a polite
close. Time, threads, disk and randomness come from the seed, so a seed is a failure's address.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from penstock.bus.bus import Bus
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.runtime import SIDE_BY_SIDE
from penstock.model.errors import BusClosed, Rejected, WriterFailed
from penstock.model.event import Identity
from penstock.testing.simulation.audience import Checks
from penstock.testing.simulation.consumers import Consumer, Reader
from penstock.testing.simulation.cursors import CursorWatch
from penstock.testing.simulation.damage import Damage
from penstock.testing.simulation.deliveries import ACKED, GroupWatch
from penstock.testing.simulation.disk import SimCrash, SimDisk
from penstock.testing.simulation.faults import Ending, Troubles
from penstock.testing.simulation.loop import (
    EPOCH_US,
    LoopRuntime,
    SimClock,
    SimDeadlock,
    SimLoop,
    SimStepLimit,
    kill,
)
from penstock.testing.simulation.operators import Follower, Operator
from penstock.testing.simulation.oracle import ABSENT, Finding, Oracle, Sent
from penstock.testing.simulation.plan import Plan
from penstock.testing.simulation.producers import Producer

DAMAGE_SHARE = 0.5  # of the closed folders are damaged, on a copy, and looked at
HANG_S = 8.0  # a publish takes milliseconds, and a slow disk seconds
TENANTS = ("acme", "bolt")  # beside the default one: their commits are under way side by side
MAX_LIVES = 400  # a seed that needs more is not getting anywhere


class SimRuntime(LoopRuntime):
    """The engine's seam to the world, with the seed's clock and dice. `SimLoop` runs the threads."""

    def __init__(self, clock: SimClock, rng: Random, disk: SimDisk) -> None:
        super().__init__()
        self.syncs_alone = True
        self._clock = clock
        self._rng = rng
        self._disk = disk
        self._kernel_lanes = ThreadPoolExecutor(SIDE_BY_SIDE, "kernel")

    def wall_us(self) -> int:
        """What the machine believes the time is."""
        return self._clock.wall_us()

    def entropy(self, count: int) -> bytes:
        """Bytes from the seed."""
        return self._rng.randbytes(count)

    def sync(self, descriptor: int) -> Awaitable[None]:
        """As the kernel does it beside the loop: some time later, and the power may fail before.

        Of two that are under way the second may be the first to end.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._kernel_lanes, self._disk.sync_opening, descriptor)


class SimBus(Bus):
    """The public API on the simulated clock."""

    clock: SimClock

    def wall_us(self) -> int:  # type: ignore[override]
        """What the machine believes the time is."""
        return self.clock.wall_us()


class World:
    """One seed."""

    def __init__(self, plan: Plan, verbose: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.loop = SimLoop(0)
        self.clock = SimClock(self.loop, EPOCH_US)
        self.disk = SimDisk(Random(plan.seed + 1), self.clock)
        self.oracle = Oracle(plan.topics, self._halt)
        self.oracle.verbose = verbose
        self.oracle.now = lambda: self.loop.time()  # noqa: PLW0108 - the loop changes with each life
        self.watches = {
            g.name: GroupWatch(g, self.oracle) for g in plan.groups if g.mode == "queue"
        }
        self.cursors = {g.name: CursorWatch(g, self.oracle) for g in plan.groups if g.mode == "log"}
        if plan.retention_s is not None:
            for watch in self.watches.values():
                watch.first_of = lambda place: self.engine.log.bounds(*place)[0]
        self.life = 0
        self.crashes = 0
        self.pause_s = 0.01
        self.dead_writer = False
        """An fsync failed in this life: nothing may be accepted any more."""
        self.sync_fails = False
        self.crashed = False
        """How the last life ended."""
        self.bus: SimBus
        self.tenants: list[SimBus]
        """What producers publish by: each tenant's own."""
        self.engine: EmbeddedEngine
        self.doubtful: list[Sent] = []
        self.tokens: list[Sent] = []
        self.delayed: list[Sent] = []
        self.audit: dict[str, str] = {}
        """What became of each operator's action."""
        self.calls: dict[str, float] = {}
        """Publishes that have not returned, and since when."""
        self.checks = Checks(self)
        self._stray: str | None = None

    def _halt(self, error: BaseException) -> None:
        self.loop.halt(error)

    def check_hangs(self) -> None:
        """A call that neither returns nor fails is a finding."""
        limit = self.oracle.now() - HANG_S
        for what, since in self.calls.items():
            if since < limit:
                self.oracle.fail("hang", f"{what} waits since {since}")

    def runtime(self) -> SimRuntime:
        """Threads, clock and dice for one engine."""
        return SimRuntime(self.clock, self.rng, self.disk)

    # -- the whole seed ------------------------------------------------------------------------

    def run(self) -> None:
        """Live and die until enough has happened, then let everything come to rest and look."""
        while self.oracle.steps < self.plan.operations or self.crashes < self.plan.crashes:
            if self.life >= MAX_LIVES:
                self.oracle.fail(
                    "stuck", f"{self.life} lives, and only {self.oracle.steps} operations"
                )
            self._one_life(Ending.draw(self.rng, relapse=self.sync_fails and not self.crashed))
        self._one_life(Ending("rest"))

    def _one_life(self, ending: Ending) -> None:
        self.life += 1
        now = self.loop.time()
        self.loop = SimLoop(Random(self.rng.random()), start_s=now)
        self.loop.set_exception_handler(self._stray_error)
        self.clock.loop = self.loop
        self.disk.on_power_off = self.loop.halt
        self.oracle.note("life", f"{self.life} {ending.kind}")
        self.dead_writer = self.sync_fails = False
        self.calls.clear()
        self.pause_s = self.rng.choice((0.01, 0.03, 0.1))
        for watch in self.watches.values():
            watch.began(self.life)
        for cursors in self.cursors.values():
            cursors.began()
        troubles = Troubles(self, ending)
        self.crashed = False
        try:
            self.loop.run_until_complete(self._live(troubles))
        except SimCrash:
            self.crashed = True
        except (SimDeadlock, SimStepLimit) as error:
            raise Finding("stuck", str(error)) from error
        except Finding:
            self._abandon()
            raise
        except Exception as error:
            self._abandon()
            where = "".join(traceback.format_exception(error)[-3:])
            raise Finding("unexpected-error", f"{type(error).__name__}: {error} {where}") from error
        if self._stray is not None:
            raise Finding("stray-error", self._stray)
        self._end(troubles)

    def _stray_error(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Finding | SimCrash | BusClosed) or self._stray is not None:
            return
        where = traceback.format_exception(error)[-3:] if error is not None else []
        self._stray = f"{context.get('message')}: {error!r} {''.join(where)}"
        self.loop.halt(Finding("stray-error", self._stray))

    def _abandon(self) -> None:
        self.disk.power_off()
        kill(self.loop)

    def _end(self, troubles: Troubles) -> None:
        self.crashes += self.crashed
        self.disk = troubles.next_disk(self.crashed)
        kill(self.loop)
        self.disk.clock = self.clock
        closed = not self.crashed and not self.sync_fails and troubles.closed
        if closed and self.rng.random() < DAMAGE_SHARE:
            Damage(self, Random(self.rng.random())).strike()
        self.oracle.ended()
        for watch in self.watches.values():
            watch.ended(polite=not self.crashed and not self.sync_fails)

    # -- one life ------------------------------------------------------------------------------

    async def _live(self, troubles: Troubles) -> None:
        troubles.before_open()
        settings = self.plan.settings
        self.engine = EmbeddedEngine(self.disk, settings, self.runtime())
        self.bus = self._bus("default")
        try:
            await self.bus.open()
        except Exception as error:
            if not troubles.may_fail_to_open(error):
                self.oracle.fail(
                    "recovery", f"the folder does not open: {type(error).__name__}: {error}"
                )
            self.oracle.note("open failed", type(error).__name__)
            return
        self.tenants = [self.bus, *(self._bus(tenant) for tenant in TENANTS)]
        for tenant in self.tenants:
            tenant._state = "open"  # the engine is, and they share it
        early = asyncio.ensure_future(self._guard(self._producer(0).at_once()))
        await self.checks.after_recovery()
        self.doubtful += [s for s in self.checks.newly_absent if s.token and s.status == ABSENT]
        for topic, partitions in self.plan.topics.items():
            if topic not in self.engine.state.topics:
                await self.bus.topics.create(topic, partitions=partitions)
        if troubles.ending.kind == "rest":
            await early
            await self.checks.at_rest()
            await troubles.close()
            return
        tasks = [asyncio.ensure_future(self._guard(actor.run())) for actor in self._actors()]
        tasks.append(early)
        await troubles.run()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await troubles.close()

    def _bus(self, tenant: str) -> SimBus:
        identity = Identity(tenant=tenant)
        bus = SimBus(self.engine, self.plan.settings, identity, self.engine.capabilities)
        bus.clock = self.clock
        return bus

    def _producer(self, number: int) -> Producer:
        return Producer(self, Random(self.rng.random()), number)

    def _actors(self) -> list[Any]:
        def draw() -> Random:
            return Random(self.rng.random())

        actors: list[Any] = [self._producer(number) for number in range(6)]
        for group in self.plan.groups:
            for number in range(group.members):
                kind: Any = Consumer if group.mode == "queue" else Reader
                actors.append(kind(self, draw(), group, number))
        actors += [Operator(self, draw()), Follower(self, draw())]
        return actors

    async def flush(self, *watches: GroupWatch) -> bool:
        """Ask for everything settled so far to be durable, and hold the engine to its answer."""
        covered = [track for watch in watches for track in watch.flushing()]
        try:
            await self.bus.flush()
        except (BusClosed, WriterFailed, Rejected) as error:
            self.oracle.counts[f"flush {error.code}"] += 1
            return False
        for track in covered:
            track.durable = track.state == ACKED
        return True

    async def _guard(self, work: Any) -> None:
        """An error that the workload does not expect is a finding."""
        try:
            await work
        except (asyncio.CancelledError, Finding):
            raise
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])
            self.oracle.fail("unexpected-error", f"{type(error).__name__}: {error} {where}")

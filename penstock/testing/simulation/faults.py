"""Troubles: how each life of the process goes wrong, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from penstock.model.errors import DiskFull, PenstockError, WriterFailed
from penstock.testing.simulation.disk import Faults, SimDisk
from penstock.testing.simulation.producers import Producer

if TYPE_CHECKING:
    from penstock.testing.simulation.world import World

LIFE_OPERATIONS = (50, 150, 300, 500)
CRASH_WITHIN = (40, 200, 600, 1_500)  # disk operations after the start of a life
# Disk operations after which a disk that failed an fsync fails for good: when recovery believes to
# have repaired it, and before what it recovered lies elsewhere too.
RELAPSE = (10, 60)
LOOK_S = 0.02  # how often the world is looked at, in virtual seconds
FLUSH_S = 0.2  # a flush that has room, or is refused for want of it, takes milliseconds
MOMENT_S = 0.0005  # a commit takes milliseconds: looking for one has to be quicker
MOMENTS = 1_000  # looks in which a transaction is nearly always seen


class Ending:
    """How a life ends, and, where that is not left to chance, between which disk operations."""

    def __init__(self, kind: str, between: tuple[int, int] | None = None) -> None:
        self.kind = kind
        self.between = between

    @classmethod
    def draw(cls, rng: Random, *, relapse: bool = False) -> Ending:
        """Choose one; after a failed fsync that nobody cut the power for, often a relapse."""
        if relapse and rng.random() < 0.8:
            return cls("crash", RELAPSE)
        kinds = ("crash", "power", "kill", "clean", "fsync", "full")
        return cls(rng.choices(kinds, (44, 12, 12, 10, 10, 12))[0])


class Troubles:
    """The faults of one life."""

    def __init__(self, world: World, ending: Ending) -> None:
        self.world = world
        self.ending = ending
        self.rng = Random(world.rng.random())
        self.counts = world.oracle.counts
        self.closed = False

    def before_open(self) -> None:
        """Arrange what may already strike while the folder is opened."""
        disk, rng = self.world.disk, self.rng
        disk.faults = Faults()
        disk.capacity_bytes = None
        if self.ending.kind == "crash":
            first, last = self.ending.between or (1, rng.choice(CRASH_WITHIN))
            disk.crash_at(disk.operations + rng.randint(first, last))
        if self.ending.kind != "rest" and rng.random() < 0.1:
            disk.faults = Faults(slow=0.02, slow_s=rng.choice((0.05, 0.4)))

    def may_fail_to_open(self, error: Exception) -> bool:
        """Whether a folder may refuse to open because of a fault of ours."""
        return False

    async def run(self) -> None:
        """Let the workload run, with interruptions, for a while."""
        world, rng = self.world, self.rng
        enough = world.oracle.steps > world.plan.operations
        target = world.oracle.steps + (50 if enough else rng.choice(LIFE_OPERATIONS))
        first = world.oracle.steps + (target - world.oracle.steps) // 2
        await self._until(first)
        if rng.random() < 0.15:
            seconds = rng.choice((-3600.0, -5.0, 5.0, 3600.0))
            world.oracle.latest_us = max(world.oracle.latest_us, world.clock.wall_us())
            world.clock.jump(seconds)
            self.counts["clock_jump"] += 1
            world.oracle.note("clock jump", str(seconds))
        if rng.random() < 0.1:
            world.clock.advance(rng.choice((0.3, 3.0)))
            self.counts["pause"] += 1
        if self.ending.kind == "full":
            await self._full()
        if self.ending.kind == "fsync":
            await self._failed_sync()
            return
        await self._until(target)
        if self.ending.kind == "power":
            await self._in_a_transaction()
        if self.ending.kind in ("crash", "power", "kill"):
            await self._die()

    async def _until(self, steps: int) -> None:
        while self.world.oracle.steps < steps:
            await asyncio.sleep(LOOK_S)
            self.world.check_hangs()
            self.world.checks.machines()

    async def _die(self) -> None:
        self.world.disk.power_off()
        await asyncio.sleep(0)

    async def _in_a_transaction(self) -> None:
        """The worst moment: the power fails in a write while a transaction waits to be durable."""
        disk = self.world.disk
        for _ in range(MOMENTS):
            if any(call.startswith("transaction") for call in self.world.calls):
                disk.crash_at(disk.operations + self.rng.randint(1, 3))
                await asyncio.sleep(LOOK_S)
                return
            await asyncio.sleep(MOMENT_S)

    # -- no room -------------------------------------------------------------------------------

    async def _full(self) -> None:
        """The disk has no room for a while; the journal soon has none either, or much later."""
        world, disk, rng = self.world, self.world.disk, self.rng
        for watch in world.watches.values():
            watch.full = True
        world.oracle.note("disk full")
        self.counts["full_episode"] += 1
        disk.capacity_bytes = disk._used_bytes + rng.choice((0, 100, 5_000))
        if rng.random() < 0.6:
            await self._fill()
            if rng.random() < 0.6:
                await self._die_flushed()
        await self._no_room(rng.choice((0.3, 1.5)))
        disk.capacity_bytes = None
        world.oracle.note("disk has room")
        world.calls.clear()  # they had to wait; only what is asked from now on is judged
        await asyncio.sleep(1.3)
        await world.checks.nothing_late()

    async def _fill(self) -> None:
        """Use up the room that the journal had allocated, so that nothing can be written at all."""
        world = self.world
        work = Producer(world, Random(self.rng.random()), -1).fill()
        filling = asyncio.ensure_future(world._guard(work))
        while not filling.done():
            await self._no_room(LOOK_S)
        await filling

    async def _no_room(self, seconds: float) -> None:
        """Whatever the bus gives back, somebody else on the machine takes at once."""
        disk, until = self.world.disk, self.world.oracle.now() + seconds
        while self.world.oracle.now() < until:
            await asyncio.sleep(LOOK_S)
            assert disk.capacity_bytes is not None
            disk.capacity_bytes = min(disk.capacity_bytes, disk._used_bytes)

    async def _die_flushed(self) -> None:
        """The power fails after flushes that had no room: what they said must be true all the same."""
        watches = self.world.watches.values()
        with contextlib.suppress(TimeoutError):  # a flush waits for burials, and those for room
            for _ in range(self.rng.choice((3, 20))):
                await self._no_room(LOOK_S)
                async with asyncio.timeout(FLUSH_S):
                    await self.world.flush(*watches)
        await self._die()

    async def _failed_sync(self) -> None:
        """An fsync fails: the writer must never accept anything again."""
        world = self.world
        world.sync_fails = True
        world.disk.faults = replace(world.disk.faults, failed_sync=1.0)
        for _ in range(1_000):
            await asyncio.sleep(0.02)
            if world.engine.commits.failed is not None:
                break
        else:
            return
        world.disk.faults = replace(world.disk.faults, failed_sync=0.0)
        world.dead_writer = True
        world.oracle.note("writer failed")
        for _ in range(3):
            try:
                await world.bus.publish("scratch.pad", b"0|")
            except WriterFailed:
                continue
            world.oracle.fail("writer-alive", "a publish was accepted after a failed fsync")
        await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End the life politely, where that is the plan."""
        world = self.world
        if self.ending.kind == "fsync" and self.rng.random() < 0.3:
            world.disk.power_off()
            await asyncio.sleep(0)
        try:
            await world.bus.close()
        except (WriterFailed, DiskFull) as error:
            if self.ending.kind != "fsync":
                raise
            world.oracle.note("close", error.code)
        except PenstockError:
            raise
        self.closed = True
        world.oracle.note("closed")

    def next_disk(self, crashed: bool) -> SimDisk:
        """The disk as the next life finds it."""
        disk = self.world.disk
        if not crashed:
            return disk
        self.counts[f"end_{self.ending.kind}"] += 1
        if self.ending.kind == "kill":
            # Only the process died: what it wrote is in the page cache, synced or not.
            after = disk.fork(self.rng.getrandbits(32))
            after._dead = False
            after.counts = disk.counts
            return after
        return disk.crash()

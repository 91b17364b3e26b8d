"""Damage at rest: flips bits and loses files of a closed folder, and sees that nobody is fooled.

It works on a twin of the disk, so the seed goes on with the good one. A closed folder has proof of
all it holds, so whatever was acknowledged must either read back unchanged or be refused.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.log.journal import file_bases, file_name
from penstock.model.errors import Corrupted, OffsetExpired, PenstockError
from penstock.testing.simulation.disk import SimDisk
from penstock.testing.simulation.loop import SimLoop, kill
from penstock.testing.simulation.oracle import Finding

if TYPE_CHECKING:
    from penstock.testing.simulation.world import World

FOLDERS = ("journal/", "segments/", "state/", "side/", "audit/")


class Damage:
    """One episode."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.oracle = world.oracle
        self.rng = rng

    def strike(self) -> None:
        """Damage a twin of the closed folder and open it."""
        disk = self.world.disk.fork(self.rng.getrandbits(32))
        what = self._damage(disk)
        if what is None:
            return
        self.oracle.note("damage", what)
        loop = SimLoop(self.rng.getrandbits(32), start_s=self.world.loop.time())
        before, self.world.clock.loop = self.world.clock.loop, loop
        disk.on_power_off = loop.halt
        try:
            seen = loop.run_until_complete(self._look(disk, what))
        except Finding as finding:
            raise Finding("corruption-served", f"{what}: {finding}") from finding
        except Exception as error:
            raise Finding("corruption-crash", f"{what}: {error!r} is no typed error") from error
        finally:
            disk.power_off()
            kill(loop)
            self.world.clock.loop = before
        self.oracle.counts["corruption_detected" if seen else "corruption_harmless"] += 1
        self.oracle.note("damage seen", str(seen))

    def _damage(self, disk: SimDisk) -> str | None:
        prefix = self.rng.choice(FOLDERS)
        if prefix == "journal/" and self.rng.random() < 0.5:
            prefix = file_name(file_bases(disk)[-1])  # not sealed yet: the only copy
        if self.rng.random() < 0.75 or prefix not in FOLDERS:
            hit = disk.flip_random(prefix)
            if hit is None:
                return None
            self.oracle.counts["bit_flip"] += 1
            return f"bit {hit[2]} of byte {hit[1]} of {hit[0]} flipped"
        names = [name for name in disk.list(prefix.rstrip("/")) if name != "watermark"]
        if not names:
            return None
        path = prefix + self.rng.choice(names)
        disk.lose(path)
        self.oracle.counts["lost_file"] += 1
        return f"{path} lost"

    async def _look(self, disk: SimDisk, what: str) -> bool:
        """Whether the damage was noticed; raises when it was served."""
        engine = EmbeddedEngine(disk, self.world.plan.settings, self.world.runtime())
        try:
            await engine.open()
            seen = False
            for topic, partitions in self.world.plan.topics.items():
                for partition in range(partitions):
                    seen = await self._read(engine, topic, partition) or seen
            return await self._audit(engine) or seen
        except (PenstockError, OSError):
            return True

    async def _read(self, engine: EmbeddedEngine, topic: str, partition: int) -> bool:
        place = (topic, partition)
        if topic not in engine.state.topics:
            if self.oracle.ends.get(place, 0):
                raise Finding("lost", f"{topic} is unknown, and nothing was said")
            return False
        retention = self.world.plan.retention_s is not None
        first, end = engine.log.bounds(topic, partition)
        if end < self.oracle.ends.get(place, 0) or (not retention and first > 0):
            raise Finding(
                "lost", f"{place} holds {first} to {end}, {self.oracle.ends.get(place)} expected"
            )
        # What the twin appends itself, a delayed event that came due, never happened here.
        end = min(end, self.oracle.ends.get(place, 0))
        start, seen = first, False
        while start < end:
            try:
                async for batch in engine.read(topic, partition, start, end):
                    self.oracle.read(batch)
                    start = batch.end_offset
            except Corrupted:
                seen = True
                start += 256
            except OffsetExpired:
                if not retention:
                    raise
                return seen
        return seen

    async def _audit(self, engine: EmbeddedEngine) -> bool:
        from penstock.engines import requests as ask

        verdict = await engine.ask(ask.VerifyAudit())
        if not verdict.ok:
            return True
        found = {record.actor for record in await engine.ask(ask.QueryAudit())}
        missing = [
            a for a, status in self.world.audit.items() if status == "done" and a not in found
        ]
        if missing:
            raise Finding("audit", f"{missing[:3]} are gone, and the chain verifies")
        return False

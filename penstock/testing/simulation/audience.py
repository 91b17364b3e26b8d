"""Checks that look at the whole bus: after every recovery, and when everything came to rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.engines import requests as ask
from penstock.model.errors import OffsetExpired
from penstock.testing.simulation.deliveries import ACKED, DEAD
from penstock.testing.simulation.oracle import STORED, UNKNOWN, Place, Sent

if TYPE_CHECKING:
    from penstock.testing.simulation.world import World

REST_S = 600.0  # virtual seconds in which everything must have come to rest
LATE_S = 12.0  # a due event that could not be published is tried again every second
GLANCE_EVENTS = 5
EVERYTHING = 1_000_000


class Checks:
    """Looks at the bus the way an auditor would."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.oracle = world.oracle
        self.newly_absent: list[Sent] = []
        self._verified: dict[Place, int] = {}

    # -- after a recovery ----------------------------------------------------------------------

    async def after_recovery(self) -> None:
        """Everything known is there, nothing else is, and the unknown is settled."""
        before = [sent for sent in self.oracle.open.values() if sent.status == UNKNOWN]
        thorough = self.world.rng.random() < 0.15
        known = [
            topic for topic in self.world.plan.topics if topic in self.world.engine.state.topics
        ]
        await asyncio.gather(*(self._glance(topic) for topic in known))
        for topic in known:
            await self._read_topic(topic, everything=thorough)
        self.oracle.resolve()
        self.newly_absent = [sent for sent in before if sent.status != STORED]
        for watch in self.world.watches.values():
            watch.recovered()
        self.oracle.note("recovered")

    async def _glance(self, topic: str) -> None:
        """Look at the newest events, before anything else is done with them: they must stay."""
        log = self.world.engine.log
        for partition in range(self.world.engine.state.topics[topic].partitions):
            first, end = log.bounds(topic, partition)
            await self._read_range((topic, partition), max(first, end - GLANCE_EVENTS), end)

    async def _read_topic(self, topic: str, *, everything: bool) -> None:
        engine = self.world.engine
        for partition in range(engine.state.topics[topic].partitions):
            place = (topic, partition)
            first, end = engine.log.bounds(topic, partition)
            self.oracle.bounds(place, first, end, retention=self.world.plan.retention_s is not None)
            start = max(first, 0 if everything else self._verified.get(place, 0))
            await self._read_range(place, start, end)
            self._verified[place] = end

    async def _read_range(self, place: Place, start: int, end: int) -> None:
        expected = start
        try:
            async for batch in self.world.engine.read(*place, start, end):
                if batch.base_offset != expected:
                    self.oracle.fail(
                        "order", f"{place}: {batch.base_offset} follows {expected - 1}"
                    )
                expected = batch.end_offset
                self.oracle.read(batch)
        except OffsetExpired:
            if expected >= self.world.engine.log.bounds(*place)[0]:
                self.oracle.fail("gap", f"{place}: {expected} is gone, and older events are not")
            return
        if expected != end:
            self.oracle.fail("lost", f"{place}: nothing between {expected} and {end}")

    # -- while it lives ------------------------------------------------------------------------

    def machines(self) -> None:
        """A look into the delivery machines: nobody holds a lease on nothing."""
        for name, group in self.world.engine.dispatcher.groups.items():
            for lease in group.leases.values():
                if not lease.open:
                    self.oracle.fail("empty-lease", f"group {name}: {lease.lane}, at {lease.start}")

    async def nothing_late(self) -> None:
        """There was room for a while: what fell due when there was none must have come."""
        world = self.world
        if world.plan.retention_s is not None:
            return  # what came may have expired before anybody looked
        now_us = world.clock.wall_us()
        owed = [sent for sent in world.delayed if sent.place is None and sent.due_us < now_us]
        until = self.oracle.now() + LATE_S
        while True:
            for topic in world.plan.topics:
                await self._read_topic(topic, everything=False)
            owed = [sent for sent in owed if sent.place is None]
            if not owed:
                return
            if self.oracle.now() > until:
                self.oracle.fail("late", f"{owed[0]} was due at {owed[0].due_us}, it is {now_us}")
            await asyncio.sleep(LATE_S / 8)

    # -- at rest -------------------------------------------------------------------------------

    async def at_rest(self) -> None:
        """No more faults: everything must be delivered, settled, sealed and provable."""
        world = self.world
        latest_us = max(self.oracle.latest_us, world.clock.wall_us())
        waiting = [sent for sent in world.delayed if sent.due_us > latest_us]
        workers = [
            asyncio.ensure_future(world._guard(self._drain(group)))
            for group in world.plan.groups
            if group.mode == "queue"
        ]
        # The clock may have been set back on the way: let everything that is delayed come due.
        world.clock.jump(86_400.0)
        started = self.oracle.now()
        while busy := await self._busy():
            if self.oracle.now() - started > REST_S:
                problem = world.engine.maintenance.problem
                self.oracle.fail("stuck", f"after {REST_S} s: {busy}; the engine says {problem}")
            await asyncio.sleep(2.0)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for topic in world.plan.topics:
            await self._read_topic(topic, everything=True)
        await self._all_settled()
        # What had come before may have expired unseen; what still had to wait cannot.
        self._all_came(world.delayed if world.plan.retention_s is None else waiting)
        await self._audit()
        await self._tidy()

    async def _drain(self, group: Any) -> None:
        watch = self.world.watches[group.name]
        member = f"{group.name}-last"
        sub = self.world.bus.subscribe(
            group.pattern, group=group.name, order=group.order, retry=group.retry,
            lease_s=group.lease_s, member=member, max_inflight=50,
            filter=dict([group.filter]) if group.filter else None,
        )  # fmt: skip
        async with sub:
            watch.members[member] = self.oracle.now()
            while True:
                asked_at = self.oracle.now()
                event = await sub.get(timeout_s=5.0)
                if event is not None:
                    held = watch.delivered(member, event, asked_at)
                    await event.ack()
                    watch.settled(held, ACKED)

    async def _busy(self) -> str:
        """What is not at rest yet, or nothing."""
        engine = self.world.engine
        infos = await self.world.bus.groups.list()
        lag = {info.name: info.lag for info in infos if info.mode == "queue" and info.lag}
        if lag:
            return f"groups have not settled everything: {lag}"
        due_us = engine.state.schedule.next_due_us()
        if due_us is not None:
            return f"delayed events wait, the next for {due_us - self.world.clock.wall_us()} us"
        return ""

    async def _all_settled(self) -> None:
        """Every event a queue group had to deliver was acked or is a dead letter."""
        letters = await self.world.bus.ask(ask.ListDead(limit=EVERYTHING, everything=True))
        dead = {
            (each.consumer, each.topic, each.partition, each.offset)
            for each in letters
            if each.status == "dead"
        }
        for name, watch in self.world.watches.items():
            for at, track in watch.tracks.items():
                if track.state == ACKED or (name, *at) in dead:
                    continue
                if at in watch.touched or at[2] < self.oracle.firsts.get(at[:2], 0):
                    continue
                self.oracle.fail(
                    "unsettled", f"group {name}: {at} is {track.state}, neither acked nor dead"
                )
            self._all_delivered(name, watch, dead)
        for each in letters:
            at = (each.topic, each.partition, each.offset)
            if each.status == "replayed" and each.consumer in self.world.watches:
                found = self.world.watches[each.consumer].tracks.get(at)
                if (
                    found is not None
                    and found.state not in (ACKED, DEAD)
                    and at[2] >= self.oracle.firsts.get(at[:2], 0)
                ):
                    self.oracle.fail("unsettled", f"{each.id} was given back and never came")

    def _all_delivered(self, name: str, watch: Any, dead: set[Any]) -> None:
        for place, seen in self.oracle.places.items():
            if not watch.reads(place[0]):
                continue
            floor = max(watch.floors.get(place, 0), self.oracle.firsts.get(place, 0))
            for offset, sent in seen.items():
                if (
                    offset < floor
                    or (*place, offset) in watch.tracks
                    or (name, *place, offset) in dead
                ):
                    continue
                if (
                    watch.group.filter is not None
                    and sent.headers.get(watch.group.filter[0]) != watch.group.filter[1]
                ):
                    continue
                if (*place, offset) not in watch.touched:
                    self.oracle.fail(
                        "undelivered", f"group {name} never got {place}/{offset}, {sent}"
                    )

    def _all_came(self, delayed: list[Sent]) -> None:
        for sent in delayed:
            if sent.place is None:
                self.oracle.fail("delayed-lost", f"{sent} was due at {sent.due_us}")

    async def _audit(self) -> None:
        verdict = await self.world.bus.audit.verify()
        if not verdict.ok:
            self.oracle.fail("audit", f"the chain does not verify: {verdict.broken}")
        found: dict[str, int] = {}
        for record in await self.world.bus.audit.query():
            found[record.actor] = found.get(record.actor, 0) + 1
        for actor, count in found.items():
            if count > 1 or self.world.audit.get(actor, "refused") == "refused":
                self.oracle.fail(
                    "audit",
                    f"{actor}: {count} records, the action was {self.world.audit.get(actor)}",
                )
        for actor, status in self.world.audit.items():
            if status == "done" and actor not in found:
                self.oracle.fail("audit", f"the confirmed action of {actor} is not in the chain")

    async def _tidy(self) -> None:
        """Space was given back: a few journal files are left, and no file that nobody needs."""
        engine = self.world.engine
        await asyncio.sleep(30.0)
        files = [name for name in engine.disk.list("journal") if name.endswith(".jnl")]
        if len(files) > 3:
            self.oracle.fail(
                "folder", f"{len(files)} journal files are left: {engine.maintenance.problem}"
            )
        if engine.maintenance.problem:
            self.oracle.fail("housekeeping", engine.maintenance.problem)
        live = {info.path for info in engine.log.manifest.segments()}
        left = [
            n
            for n in engine.disk.list("segments")
            if n.endswith(".parquet") and f"segments/{n}" not in live
        ]
        if left:
            self.oracle.fail("folder", f"segments nobody needs: {left[:3]}")

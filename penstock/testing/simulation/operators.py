"""Operators and onlookers of the workload: resets, dead letters, topics, and read-only followers."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from penstock.core.entry import TopicSpec
from penstock.engines import requests as ask
from penstock.engines.embedded.follower import FollowerEngine
from penstock.model.errors import (
    BusClosed,
    InvalidInput,
    NotFound,
    OffsetExpired,
    Refused,
    Rejected,
    WriterFailed,
)

if TYPE_CHECKING:
    from penstock.testing.simulation.world import World

QUEUES = ("billing", "ledger", "runner", "worker", "reds")


class Operator:
    """Does what the audit chain must tell of."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.oracle = world.oracle
        self.rng = rng

    async def run(self) -> None:
        """One action after another, each under a name of its own."""
        acts = (
            self._reset,
            self._replay,
            self._replay,
            self._purge,
            self._configure,
            self._create,
            self._look,
            self._quarantine,
        )
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / (self.world.pause_s * 8)))
            await self.rng.choice(acts)()

    async def _ask(self, request: Any, actor: str | None = None) -> Any:
        """Ask, and remember what the audit chain owes us; None when it was refused."""
        audit = self.world.audit
        if actor is not None:
            audit[actor] = "unknown"
        try:
            answer = await self.world.bus.ask(request)
        except (Rejected, BusClosed, NotFound, InvalidInput, Refused) as error:
            if actor is not None:
                audit[actor] = "refused"
            self.oracle.note("operator refused", f"{type(request).__name__} {error.code}")
            return None
        except WriterFailed:
            return None
        if actor is not None:
            audit[actor] = "done"
        self.oracle.note("operator", repr(request))
        return answer

    def _actor(self) -> str:
        return f"op-{len(self.world.audit)}"

    async def _reset(self) -> None:
        if self.rng.random() < 0.6:
            return
        group = self.rng.choice(self.world.plan.groups)
        to = self.rng.choice(("earliest", "latest", "latest", f"offset:{self.rng.randrange(500)}"))
        watch: Any = self.world.watches.get(group.name) or self.world.cursors[group.name]
        watch.moving += 1
        answer = await self._ask(
            ask.ResetGroup(group.name, to, None, actor := self._actor(), "RESET"), actor
        )
        if self.world.audit[actor] == "unknown":
            return  # the writer failed: the group may be anywhere until the restart
        if answer is not None:
            if group.mode == "log":
                watch.forget({(each.topic, each.partition): each.cursor for each in answer.lanes})
            else:
                watch.forget()
                watch.floors = {
                    (lane.topic, lane.partition): 0 if to == "earliest" else lane.cursor
                    for lane in answer.lanes
                }
        watch.moving -= 1

    async def _letters(self) -> list[Any]:
        wanted = ask.ListDead(consumer=self.rng.choice(QUEUES), limit=5)
        return await self._ask(wanted) or []

    async def _replay(self) -> None:
        letters = await self._letters()
        if not letters:
            return
        letter = self.rng.choice(letters)
        if not letter.offset >= 0:
            return
        watch = self.world.watches[letter.consumer]
        at = (letter.topic, letter.partition, letter.offset)
        watch.revive(at)
        actor = self._actor()
        answer = await self._ask(
            ask.ReplayDead(
                [letter.id], letter.consumer, letter.topic, actor, "try again", "REPLAY"
            ),
            actor,
        )
        if answer is not None and not answer.done:
            self.world.audit[actor] = (
                "refused" if answer.failures[0]["code"] != WriterFailed.code else "unknown"
            )
        watch.touched.add(at)

    async def _purge(self) -> None:
        letters = await self._letters()
        if letters and self.rng.random() < 0.3:
            letter, actor = self.rng.choice(letters), self._actor()
            at = (letter.topic, letter.partition, letter.offset)
            self.world.watches[letter.consumer].touched.add(at)  # before: it may be done in a crash
            answer = await self._ask(ask.PurgeDead([letter.id], actor, "of no use", "PURGE"), actor)
            if answer is not None and not answer.done:
                self.world.audit[actor] = (
                    "refused" if answer.failures[0]["code"] != WriterFailed.code else "unknown"
                )

    async def _quarantine(self) -> None:
        group = self.world.watches[self.rng.choice(QUEUES)]
        if not group.tracks or self.rng.random() < 0.5:
            return
        at = self.rng.choice(list(group.tracks))
        group.withdrawn(at)
        actor = self._actor()
        await self._ask(
            ask.Quarantine(f"{at[0]}/{at[1]}/{at[2]}", group.group.name, at[0], actor, "poison"),
            actor,
        )

    async def _configure(self) -> None:
        topic, actor = self.rng.choice(list(self.world.plan.topics)), self._actor()
        await self._ask(ask.ConfigureTopic(topic, retention_bytes=1 << 30, actor=actor), actor)

    async def _create(self) -> None:
        name = f"extra.n{self.rng.randrange(1000)}"
        await self._ask(ask.CreateTopic(name, TopicSpec(partitions=self.rng.randint(1, 3))))

    async def _look(self) -> None:
        await self._ask(ask.ListGroups())


class Follower:
    """Another process that reads the folder: it must see committed events only."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.oracle = world.oracle
        self.rng = rng

    async def run(self) -> None:
        """Open, read a while, close, again."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / (self.world.pause_s * 20)))
            engine = FollowerEngine(self.world.disk, self.world.plan.settings, self.world.runtime())
            try:
                await engine.open()
            except OffsetExpired:
                continue
            try:
                for _ in range(self.rng.randint(1, 6)):
                    await asyncio.sleep(self.rng.random() * 0.1)
                    await self._read(engine)
            except OffsetExpired:
                self.oracle.counts["follower_overtaken"] += 1
            finally:
                await engine.close()

    async def _read(self, engine: FollowerEngine) -> None:
        engine._advance()
        names = [name for name in self.world.plan.topics if name in engine.state.topics]
        if not names:
            return
        topic = self.rng.choice(names)
        for partition in range(engine.state.topics[topic].partitions):
            first, end = engine.log.bounds(topic, partition)
            start = max(first, end - self.rng.choice((5, 50, 500)))
            async for batch in engine.read(topic, partition, start, None):
                self.oracle.read(batch)
        self.oracle.note("follow", topic)

"""Consumers of the workload: they ack, nack, extend, reject, stall, die and commit."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

from penstock.bus.subscription import Subscription
from penstock.model.errors import (
    BusClosed,
    DeliveryError,
    Fenced,
    OffsetExpired,
    PenstockError,
    Rejected,
    WriterFailed,
)
from penstock.testing.simulation.deliveries import ACKED, DEAD, OPEN, GroupWatch, Held
from penstock.testing.simulation.oracle import ABSENT, STORED, Deal

if TYPE_CHECKING:
    from penstock.testing.simulation.plan import Group
    from penstock.testing.simulation.world import World


class Consumer:
    """A member of a queue group that comes, works, and goes in one way or another."""

    def __init__(self, world: World, rng: Random, group: Group, number: int) -> None:
        self.world = world
        self.oracle = world.oracle
        self.rng = rng
        self.group = group
        self.watch: GroupWatch = world.watches[group.name]
        self.number = number
        self.held: list[Held] = []

    async def run(self) -> None:
        """One membership after another."""
        session = 0
        while True:
            session += 1
            member = f"{self.group.name}-{self.number}-{self.world.life}-{session}"
            try:
                async with self._subscribe(member) as sub:
                    self.watch.members[member] = self.oracle.now()
                    try:
                        await self._work(sub, member)
                    finally:
                        self.watch.members.pop(member, None)
                        self.watch.returned(self.held)
            except BusClosed:
                return
            except (Rejected, WriterFailed):
                await asyncio.sleep(0.1)
            self.held = []
            self.oracle.note("leave", member)
            await asyncio.sleep(self.rng.random() * 0.05)

    def _subscribe(self, member: str) -> Subscription:
        group = self.group
        return self.world.bus.subscribe(
            group.pattern, group=group.name, order=group.order, retry=group.retry,
            lease_s=group.lease_s, member=member, max_inflight=self.rng.choice((1, 4, 12)),
            filter=dict([group.filter]) if group.filter else None,
        )  # fmt: skip

    async def _work(self, sub: Subscription, member: str) -> None:
        for _ in range(self.rng.choice((20, 100, 400))):
            asked_at = self.oracle.now()
            event = await sub.get(timeout_s=0.3)
            if event is None:
                if self.rng.random() < 0.1:
                    return
                if self.rng.random() < 0.5:
                    await self._finish()
                continue
            held = self.watch.delivered(member, event, asked_at)
            self.held.append(held)
            await self._treat(held)
            if len(self.held) > 10 and self.rng.random() < 0.3:
                await self._finish()
        if self.rng.random() < 0.5:
            await self._finish()

    async def _finish(self) -> None:
        held, self.held = self.held, []
        for each in held:
            if each.open:
                await self._settle(each, "ack")
        if self.rng.random() < 0.5:
            await self._flush()

    async def _flush(self) -> None:
        if await self.world.flush(self.watch):
            self.oracle.note("flush", self.group.name)

    async def _treat(self, held: Held) -> None:
        dice = self.rng.random()
        if dice < 0.62:
            await self._settle(held, "ack")
        elif dice < 0.72:
            return  # later, with others
        elif dice < 0.80:
            await self._settle(held, "nack")
        elif dice < 0.84:
            await self._settle(held, "nack", self.rng.choice((0.0, 0.02, 0.4)))
        elif dice < 0.86:
            await self._settle(held, "reject")
        elif dice < 0.89:
            await self._settle(held, "extend", self.rng.choice((0.2, 3.0)))
        elif dice < 0.92:
            await self._settle(held, "ack")
            await self._settle(held, "ack")  # must be refused
        elif dice < 0.95:
            await self._in_transaction(held)
        elif dice < 0.97:
            await self._settle(held, "ack")
            await self._flush()
        else:
            await asyncio.sleep(self.group.lease_s * self.rng.choice((0.5, 1.0, 1.3)))
            await self._settle(held, "ack")

    async def _settle(self, held: Held, verb: str, number: float | None = None) -> None:
        event, watch = held.event, self.watch
        try:
            if verb == "ack":
                await event.ack()
                watch.settled(held, ACKED)
            elif verb == "nack":
                await event.nack(number)
                watch.settled(held, OPEN, number)
            elif verb == "reject":
                await event.reject("the workload says so")
                watch.settled(held, DEAD)
            else:
                await event.extend(number)
                watch.extended(held, number or 0.0)
        except DeliveryError as error:
            watch.refused(held, error)
            verb += " refused"
        self.oracle.note(verb, f"{self.group.name} {held.at}")

    async def _in_transaction(self, held: Held) -> None:
        """Consume, transform, produce: the ack and the new event happen together."""
        deal = Deal()
        topic = "scratch.pad"
        others = [each for each in self.held if each.open and each is not held][:2]
        try:
            async with self.world.bus.transaction() as tx:
                for each in (held, *others):
                    tx.ack(each.event)
                    deal.acks.append(each)
                sent = self.oracle.submit(topic, b"made from another")
                sent.tx = deal
                deal.sent.append(sent)
                tx.publish(topic, sent.payload)
                self.oracle.deals.append(deal)
                for each in deal.acks:
                    each.in_doubt()
        except DeliveryError as error:
            deal.status = ABSENT
            self.oracle.settle(deal.sent, "refused")
            for each in deal.acks:
                each.decided(acked=False)
            self.oracle.note("tx refused", f"{held.at} {error.code}")
            return
        except (Rejected, BusClosed):
            deal.status = ABSENT
            self.oracle.settle(deal.sent, "refused")
            for each in deal.acks:
                each.decided(acked=False)
            return
        except WriterFailed:
            deal.status = "unknown"
            self.oracle.settle(deal.sent, "unknown")
            self.watch.returned(deal.acks)
            return
        deal.status = STORED
        self.oracle.stored(deal.sent, tx.receipts[0])
        for each in deal.acks:
            if each.version == self.watch.version:
                if each.event.attempt != each.track.attempt and not each.track.revived:
                    why = f"{each.at} was acked in a transaction after it had come again"
                    self.oracle.fail("stale-settle", f"{self.group.name}: {why}")
                each.open = False
                each.track.state, each.track.durable = ACKED, True
                self.watch.landed(each)
        self.oracle.note("tx ack", f"{[each.at for each in deal.acks]}")


class Reader:
    """A member of a log group."""

    def __init__(self, world: World, rng: Random, group: Group, number: int) -> None:
        self.world = world
        self.oracle = world.oracle
        self.rng = rng
        self.group = group
        self.number = number
        self.watch = world.cursors[group.name]

    async def run(self) -> None:
        """One membership after another."""
        session = 0
        while True:
            session += 1
            member = f"{self.group.name}-{self.number}-{self.world.life}-{session}"
            try:
                sub = self.world.bus.subscribe(
                    self.group.pattern, group=self.group.name, mode="log", member=member
                )
                await sub.open()
                feed = sub.cursor()
                await self._read(sub, member)
                await sub.close()
                await self._stale_commit(feed)
            except BusClosed:
                return
            except (Rejected, WriterFailed):
                await asyncio.sleep(0.1)
            await asyncio.sleep(self.rng.random() * 0.05)

    async def _read(self, sub: Subscription, member: str) -> None:
        session = self.watch.session()
        batches = sub.batches()
        for _ in range(self.rng.choice((5, 30, 100))):
            try:
                # Not wait_for: on 3.11 it forgets a cancellation that comes with the batch.
                async with asyncio.timeout(0.3):
                    batch = await anext(batches)
            except TimeoutError:
                batch, batches = None, sub.batches()
            except OffsetExpired:
                if self.world.plan.retention_s is None:
                    raise
                return
            if batch is not None:
                self.watch.received(session, batch)
                self.oracle.note(
                    "read",
                    f"{member} {batch.topic}/{batch.partition} {batch.base_offset}+{batch.count}",
                )
            if self.rng.random() < 0.3:
                await self._commit(sub, session, member)
            if self.rng.random() < 0.02:
                await asyncio.sleep(1.0)

    async def _commit(self, sub: Subscription, session: Any, member: str) -> None:
        wanted = self.watch.committing(session, self._countable(sub.cursor()))
        try:
            if self.rng.random() < 0.05:
                await self._give_up_a_commit(sub)
                return  # it may have happened
            if self.rng.random() < 0.3:
                await self._commit_in_transaction(sub, wanted)
            else:
                await sub.commit()
        except (Fenced, Rejected):
            self.oracle.note("commit refused", member)
            return
        except (WriterFailed, BusClosed):
            return
        self.watch.committed(session, wanted)
        self.oracle.note("commit", f"{member} {sorted(wanted.items())}")

    async def _give_up_a_commit(self, sub: Subscription) -> None:
        commit = asyncio.ensure_future(sub.commit())
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001)))
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)

    def _countable(self, feed: Any) -> set[tuple[str, int]]:
        """The partitions whose marks are not of before a reset: those of before are void."""
        epochs = self.world.engine.state.groups[self.group.name].epochs
        return {place for place, (_, epoch) in feed._marked.items() if epoch == epochs.get(place)}

    async def _commit_in_transaction(self, sub: Subscription, wanted: dict[Any, int]) -> None:
        deal = Deal()
        sent = self.oracle.submit("scratch.pad", b"read so far")
        sent.tx = deal
        deal.sent.append(sent)
        deal.cursors = [(self.group.name, place, offset) for place, offset in wanted.items()]
        try:
            async with self.world.bus.transaction() as tx:
                tx.publish("scratch.pad", sent.payload)
                tx.commit(sub)
                self.oracle.deals.append(deal)
        except (PenstockError, BusClosed) as error:
            doubt = isinstance(error, WriterFailed)
            deal.status = "unknown" if doubt else ABSENT
            self.oracle.settle(deal.sent, "unknown" if doubt else "refused")
            raise
        deal.status = STORED
        self.oracle.stored([sent], tx.receipts[0])

    async def _stale_commit(self, feed: Any) -> None:
        """Somebody who left the group tries to commit what it read."""
        pending = bool(feed._marked)
        try:
            await feed.commit()
        except PenstockError:
            return
        if pending:
            self.oracle.fail(
                "stale-settle", f"{self.group.name}: commit accepted from one who left"
            )

"""Producers of the workload: every way to publish, and what a careful client does about doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any

from penstock.model.errors import BusClosed, DiskFull, Rejected, WriterFailed
from penstock.model.event import Receipt
from penstock.testing.simulation.oracle import REFUSED, STORED, UNKNOWN, Deal, Oracle, Sent
from penstock.testing.simulation.plan import COLOURS, KEYS

if TYPE_CHECKING:
    from penstock.testing.simulation.world import World

# Payload sizes: most small, some over the compression and side-file limits of the plan.
SIZES = (0, 10, 60, 60, 60, 100, 100, 300, 1_000, 5_000, 20_000)
# What fills a disk up: large pieces as long as they fit, then smaller ones.
FILLING_BYTES = (60_000, 6_000, 600, 60, 0)
FILLING_PIECES = 100  # a journal file, its spare and what is left of the disk take fewer


class Producer:
    """Publishes until its process dies."""

    def __init__(self, world: World, rng: Random, number: int) -> None:
        self.world = world
        self.oracle: Oracle = world.oracle
        self.rng = rng
        self.number = number
        self.bus = world.tenants[number % len(world.tenants)]
        self.topics = list(world.plan.topics)
        self._acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (50, self._one),
            (14, self._many),
            (10, self._with_token),
            (8, self._resend),
            (5, self._delayed),
            (12, self._transaction),
            (2, self._aborted),
        ]

    async def run(self) -> None:
        """Publish, pause, publish."""
        weights = [weight for weight, _ in self._acts]
        acts = [act for _, act in self._acts]
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.world.pause_s))
            await self.rng.choices(acts, weights)[0]()

    # -- ways to publish -----------------------------------------------------------------------

    def _draw(self, topic: str, *, small: bool = False, size: int | None = None) -> Sent:
        rng = self.rng
        if size is None:
            size = rng.choice(SIZES[:7] if small else SIZES)
        filler = rng.randbytes(16) * (size // 16 + 1) if rng.random() < 0.5 else rng.randbytes(size)
        sent = self.oracle.submit(topic, filler[:size])
        if self.world.plan.topics.get(topic, 1) > 1 or rng.random() < 0.5:
            sent.key = rng.choice(KEYS)
        if rng.random() < 0.5:
            sent.headers = {"colour": rng.choice(COLOURS)}
        return sent

    def _options(self, sent: Sent) -> dict[str, Any]:
        options: dict[str, Any] = {"key": sent.key, "headers": sent.headers or None}
        if sent.topic.startswith("jobs"):
            if self.rng.random() < 0.3:
                options["priority"] = self.rng.randint(1, 9)
            if self.rng.random() < 0.2:
                options["ttl_s"] = self.rng.choice((0.2, 5.0, 60.0))
        return options

    async def _one(self) -> None:
        sent = self._draw(self.rng.choice(self.topics))
        await self._settle(
            [sent],
            self.bus.publish(sent.topic, sent.payload, **self._options(sent)),
            "publish",
        )

    async def _many(self) -> None:
        topic = self.rng.choice(self.topics)
        count = 70 if self.rng.random() < 0.05 else self.rng.choice((2, 3, 4, 8))
        sents = [self._draw(topic, small=True) for _ in range(count)]
        tokens = None
        if self.rng.random() < 0.3:
            for sent in sents:
                sent.token = f"t{sent.number}"
            tokens = [sent.token for sent in sents]
        if self.world.plan.topics[topic] == 1 and self.rng.random() < 0.3:
            for sent in sents:
                sent.key = None
        await self._settle(sents, self._publish_many(topic, sents, tokens), "publish_many")

    def _publish_many(self, topic: str, sents: list[Sent], tokens: Any) -> Awaitable[Receipt]:
        return self.bus.publish_many(
            topic,
            [sent.payload for sent in sents],
            keys=[sent.key for sent in sents],
            headers=[sent.headers or None for sent in sents],
            idempotency_keys=tokens,
        )

    async def _with_token(self) -> None:
        sent = self._draw(self.rng.choice(self.topics))
        sent.token = f"t{sent.number}"
        await self._send_token(sent)

    async def _send_token(self, sent: Sent) -> None:
        known = sent.status == STORED and not sent.due_us
        call = self.bus.publish(
            sent.topic,
            sent.payload,
            key=sent.key,
            headers=sent.headers or None,
            idempotency_key=sent.token,
        )
        receipt = await self._settle([sent], call, "publish_token")
        if receipt is not None and known and not receipt.duplicate:
            self.oracle.fail("dedup", f"{sent} was stored once more")

    async def _resend(self) -> None:
        """A client that was left in doubt, or did not hear the answer, sends again."""
        doubtful = self.world.doubtful
        if doubtful:
            sent = doubtful.pop(self.rng.randrange(len(doubtful)))
        else:
            tokens = self.world.tokens
            if not tokens:
                return
            sent = self.rng.choice(tokens)
            if sent.status != STORED:
                return
        self.oracle.again(sent)
        await self._send_token(sent)

    async def _delayed(self) -> None:
        sent = self._draw(self.rng.choice(self.topics), small=True)
        delay_s = self.rng.choice((0.0, 0.01, 0.5, 3.0, 20.0, 150.0))
        sent.due_us = self.world.clock.wall_us() + round(delay_s * 1e6)
        if self.rng.random() < 0.3:
            sent.token = f"t{sent.number}"
        call = self.bus.publish(
            sent.topic, sent.payload, key=sent.key, headers=sent.headers or None,
            idempotency_key=sent.token, delay_s=delay_s,
        )  # fmt: skip
        await self._settle([sent], call, "publish_delayed")

    async def _transaction(self) -> None:
        deal = Deal()

        async def commit() -> Receipt | None:
            async with self.bus.transaction() as tx:
                for topic in self.rng.sample(self.topics, self.rng.randint(2, 4)):
                    sent = self._draw(topic, small=self.rng.random() < 0.9)
                    sent.tx = deal
                    deal.sent.append(sent)
                    tx.publish(topic, sent.payload, key=sent.key, headers=sent.headers or None)
                self.oracle.deals.append(deal)
            for sent, receipt in zip(deal.sent, tx.receipts, strict=True):
                self.oracle.stored([sent], receipt)
            return None

        await self._settle(deal.sent, commit(), "transaction")
        if deal.sent[0].status == STORED:
            deal.status = STORED

    async def _aborted(self) -> None:
        """A transaction that its owner gives up stores nothing."""
        sents = [self._draw(topic, small=True) for topic in self.rng.sample(self.topics, 2)]
        try:
            async with self.bus.transaction() as tx:
                for sent in sents:
                    tx.publish(sent.topic, sent.payload)
                raise LookupError
        except LookupError:
            self.oracle.settle(sents, REFUSED)

    async def at_once(self) -> None:
        """Publish large payloads as soon as the bus is open, while it may still be tidying up."""
        known = [topic for topic in self.topics if topic in self.world.engine.state.topics]
        for size in SIZES[-2:] if known else ():
            sent = self._draw(self.rng.choice(known), size=size)
            call = self.bus.publish(sent.topic, sent.payload, **self._options(sent))
            await self._settle([sent], call, "publish")

    async def fill(self) -> None:
        """Publish until nothing fits any more, however small."""
        sizes = list(FILLING_BYTES)
        for _ in range(FILLING_PIECES):
            # Two at a time: a large payload alone would not go to the journal.
            sents = [self._draw("scratch.pad", size=sizes[0]) for _ in range(2)]
            call = self._publish_many("scratch.pad", sents, None)
            if await self._settle(sents, call, "publish_many") is None and not sizes.pop(0):
                return

    # -- what came of it -----------------------------------------------------------------------

    async def _settle(
        self, sents: list[Sent], call: Awaitable[Receipt | None], kind: str
    ) -> Receipt | None:
        receipt: Receipt | None = None
        result = "ok"
        name = f"{kind} {sents[0].number if sents else self.oracle.steps}"
        self.world.calls[name] = self.oracle.now()
        try:
            receipt = await call
        except (Rejected, BusClosed) as error:
            if isinstance(error, DiskFull):
                self.oracle.counts["refused_full"] += 1
            self.oracle.settle(sents, REFUSED)
            result = error.code
        except WriterFailed as error:
            if not self.world.sync_fails:
                self.oracle.fail("writer-died", f"without a failed fsync: {error}")
            self.oracle.settle(sents, UNKNOWN)
            result = error.code
        else:
            if self.world.dead_writer:
                self.oracle.fail("writer-alive", f"{sents[0]} was accepted after a failed fsync")
            if receipt is not None and not receipt.scheduled:
                self.oracle.stored(sents, receipt)
            elif receipt is not None:
                for sent in sents:
                    sent.status = STORED
                    self.oracle.open.pop(sent.number, None)
                    self.world.delayed.append(sent)
            for sent in sents:
                if sent.token and not sent.due_us and len(self.world.tokens) < 2_000:
                    self.world.tokens.append(sent)
        self.world.calls.pop(name, None)
        self.oracle.note(
            kind, f"{sents[0].number}+{len(sents)} {sents[0].topic} {sents[0].place} {result}"
        )
        return receipt

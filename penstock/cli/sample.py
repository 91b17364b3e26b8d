"""A small shop with three tenants: the producers and consumers that `penstock demo` runs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

import penstock

TENANTS = {"acme": 0.6, "globex": 0.3, "initech": 0.1}
"""Each tenant and its share of the events."""
ORDERS = "orders.created.v1"
PARCELS = "parcels.scanned.v1"
TURNS_PER_S = 20  # batches a producer publishes a second: small enough to look alive
TIMEOUT_CHANCE = 0.01  # of one attempt: shows retries that succeed
DECLINED_CHANCE = 0.0005  # of an order: fails on every attempt and shows a dead letter
STOLEN_CHANCE = 0.0002  # of an order: rejected at once
RETRY = penstock.Retry(ladder_ms=(100, 400), max_attempts=3)  # short, so that a demo sees its end


class Order(msgspec.Struct):
    """What a customer bought."""

    number: int
    amount: float
    card: str = "good"


class Parcel(msgspec.Struct):
    """A parcel that passed a scanner."""

    number: int
    place: str


@dataclass
class Books:
    """What went in and what came out, for one tenant; only this run counts."""

    published: int = 0
    read: int = 0
    retried: int = 0
    revenue: float = 0.0
    handled: dict[str, set[int]] = field(default_factory=dict)
    """Offsets handled, by topic: an event that is handled twice counts once."""

    @property
    def done(self) -> int:
        """Events that a handler finished."""
        return sum(map(len, self.handled.values()))


class Shop:
    """Producers, two handler groups and a log consumer on one bus."""

    def __init__(self, bus: penstock.Bus, rate: float, seed: int | None = None) -> None:
        self.bus = bus
        self.books = {tenant: Books() for tenant in TENANTS}
        self.dead: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.stopping = asyncio.Event()
        self._rate = rate
        self._random = random.Random(seed)
        self._first: dict[str, int] = {}
        self._analyst: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Remember where this run begins, and start the consumers."""
        for tenant in TENANTS:
            for subject in (ORDERS, PARCELS):
                topic = f"{subject}.{tenant}"
                try:
                    info = await self.bus.topics.info(topic)
                except penstock.UnknownTopic:
                    info = await self.bus.topics.create(topic)
                self._first[topic] = info.partitions[0].end_offset
                self.books[tenant].handled[topic] = set()
        self.bus.handler(f"{ORDERS}.*", group="billing", retry=RETRY)(self._bill)
        self.bus.handler(f"{PARCELS}.*", group="tracking", retry=RETRY)(self._track)
        await self.bus.ready()
        self._analyst = asyncio.create_task(self._analyse())

    async def close(self) -> None:
        """Stop the log consumer; the bus stops the handlers."""
        if self._analyst is not None:
            self._analyst.cancel()
            await asyncio.gather(self._analyst, return_exceptions=True)

    async def produce(self) -> None:
        """Publish for all tenants until `stopping` is set."""
        async with asyncio.TaskGroup() as group:
            for tenant, share in TENANTS.items():
                group.create_task(self._produce(tenant, share * self._rate / TURNS_PER_S))

    # -- producers -----------------------------------------------------------------------------

    async def _produce(self, tenant: str, per_turn: float) -> None:
        loop = asyncio.get_running_loop()
        due, owed, number = loop.time(), 0.0, 0
        books = self.books[tenant]
        while not self.stopping.is_set():
            owed += per_turn
            count, owed = int(owed), owed % 1
            orders = [self._order(number + index) for index in range(count)]
            number += count
            if orders:
                receipt = await self.bus.publish_many(f"{ORDERS}.{tenant}", orders)
                books.published += receipt.count
            parcel = Parcel(number, self._random.choice(("Lagos", "Lima", "Lyon")))
            await self.bus.publish(f"{PARCELS}.{tenant}", parcel, key=parcel.place)
            books.published += 1
            due += 1 / TURNS_PER_S
            try:
                await asyncio.wait_for(self.stopping.wait(), max(0.0, due - loop.time()))
            except TimeoutError:
                continue

    def _order(self, number: int) -> Order:
        draw = self._random.random()
        card = "good"
        if draw < STOLEN_CHANCE or number == 0:
            card = "stolen"
        elif draw < STOLEN_CHANCE + DECLINED_CHANCE or number == 1:
            card = "declined"
        return Order(number, round(self._random.uniform(5, 500), 2), card)

    # -- consumers -----------------------------------------------------------------------------

    async def _bill(self, order: Order, event: penstock.Event) -> None:
        books = self.books[event.tenant]
        if event.attempt > 1:
            books.retried += 1
        if order.card == "stolen":
            raise penstock.Reject("the card was reported stolen")
        if order.card == "declined":
            raise ValueError("the bank declined the card")
        if self._random.random() < TIMEOUT_CHANCE:
            raise TimeoutError("the bank did not answer")
        self._handled(event)

    async def _track(self, parcel: Parcel, event: penstock.Event) -> None:
        self._handled(event)

    def _handled(self, event: penstock.Event) -> None:
        if event.offset >= self._first[event.topic]:
            self.books[event.tenant].handled[event.topic].add(event.offset)

    async def _analyse(self) -> None:
        """Add up revenue in order, committing the cursor with each batch."""
        async with self.bus.subscribe("*.*.v1.*", group="analytics", mode="log") as log:
            async for batch in log.batches():
                books = self.books.get(batch.tenant)
                if books is not None and batch.topic in self._first:
                    new = max(
                        0, batch.end_offset - max(batch.base_offset, self._first[batch.topic])
                    )
                    books.read += new
                    if batch.topic.startswith(ORDERS):
                        orders = (event.value(Order) for event in batch)
                        books.revenue += sum(order.amount for order in orders)
                await log.commit()

    # -- taking stock --------------------------------------------------------------------------

    async def count_dead(self) -> None:
        """Bring `dead` up to date."""
        letters: list[Any] = []
        for group in ("billing", "tracking"):
            letters += await self.bus.dead_letters.list(consumer=group, limit=1_000_000)
        self.dead = dict.fromkeys(TENANTS, 0)
        for letter in letters:
            if letter.offset >= self._first.get(letter.topic, letter.offset + 1):
                self.dead[letter.tenant] += 1

    def settled(self) -> bool:
        """Whether everything published was handled or is dead, and was read in order."""
        return all(
            books.published == books.done + self.dead[tenant] == books.read
            for tenant, books in self.books.items()
        )

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; whether the books then balance."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self.count_dead()
            if self.settled():
                return True
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.05)

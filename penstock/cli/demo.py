"""`penstock demo`: a bus with sample producers and consumers, and what happens on it, live.

`Shop` is the sample: a small shop with three tenants, their producers, two handler groups and a log
consumer. The command runs it, shows its numbers and checks at the end that every event is accounted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import penstock
from penstock.cli import output
from penstock.cli.arguments import Duration
from penstock.cli.invocation import DEFAULT_URL, FAILED, Invocation, folder_of, leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from penstock.model.settings import Settings

FOLDER = "./demo-data"
LOOK_S = 0.5  # between two updates of the numbers on a terminal
LINE_S = 2.0  # between two lines in a pipe
DRAIN_S = 30.0  # longest wait for retries after the producers stopped; the ladder takes under 1 s
# Small and short-lived journal files, so that a demo of seconds shows sealing too.
JOURNAL_FILE_BYTES = 4 * 1024 * 1024
JOURNAL_ROLL_S = 4.0
GRACE_S = 4.0

TENANTS = {"acme": 0.6, "globex": 0.3, "initech": 0.1}
"""Each tenant and its share of the events."""
ORDERS = "orders.created.v1"
PARCELS = "parcels.scanned.v1"
TURNS_PER_S = 20  # batches a producer publishes a second: small enough to look alive
TIMEOUT_CHANCE = 0.01  # of one attempt: shows retries that succeed
DECLINED_CHANCE = 0.0005  # of an order: fails on every attempt and shows a dead letter
STOLEN_CHANCE = 0.0002  # of an order: rejected at once
RETRY = penstock.Retry(ladder_ms=(100, 400), max_attempts=3)  # short, so that a demo sees its end


@leaf("demo")
@click.option(
    "--seconds",
    type=Duration(least=0.1),
    default="20s",
    show_default=True,
    help="How long the producers publish.",
)
@click.option(
    "--rate",
    type=click.FloatRange(1, 1_000_000),
    default=3_000.0,
    show_default=True,
    help="Events a second, all tenants together.",
)
@click.pass_obj
def command(invocation: Invocation, seconds: float, rate: float) -> None:
    """Run a bus with producers of three tenants, handlers that sometimes fail, and a log consumer.

    Lives in ./demo-data unless --url says otherwise. Ends by itself, or with Ctrl-C, and checks
    that every event published was handled or is a dead letter; ends with 1 when one is not.
    """  # fmt: skip
    result = asyncio.run(_run(invocation, seconds, rate))
    if invocation.json:
        output.print_json(result)
    else:
        _print_summary(result)
    if not result["balanced"]:
        raise click.exceptions.Exit(FAILED)


async def _run(invocation: Invocation, seconds: float, rate: float) -> dict[str, Any]:
    url = FOLDER if invocation.url == DEFAULT_URL else invocation.url
    folder = folder_of(url)
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    async with penstock.connect(url, settings=_demo_settings(invocation.settings())) as bus:
        shop = Shop(bus, rate)
        await shop.open()
        began = time.monotonic()
        with _stopped_by_signal(shop):
            watching = asyncio.create_task(_watch(shop, folder, quiet=invocation.json))
            timer = asyncio.get_running_loop().call_later(seconds, shop.stopping.set)
            try:
                await shop.produce()
                took_s = time.monotonic() - began
                balanced = await shop.drain(DRAIN_S)
            finally:
                timer.cancel()
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
                await shop.close()
        return {"url": url, "seconds": round(took_s, 1), "balanced": balanced, **_totals(shop)}


def _demo_settings(settings: Settings) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        journal=replace(
            settings.journal, file_bytes=JOURNAL_FILE_BYTES, roll_after_s=JOURNAL_ROLL_S
        ),
        sealing=replace(settings.sealing, grace_s=GRACE_S),
    )


@contextlib.contextmanager
def _stopped_by_signal(shop: Shop) -> Iterator[None]:
    """The first Ctrl-C stops the producers, and consumers finish; the second one ends the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        shop.stopping.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _totals(shop: Shop) -> dict[str, Any]:
    rows = [
        {
            "tenant": tenant,
            "published": books.published,
            "handled": books.done,
            "retried": books.retried,
            "dead": shop.dead[tenant],
            "read": books.read,
            "revenue": round(books.revenue, 2),
        }
        for tenant, books in shop.books.items()
    ]
    names = ("published", "handled", "retried", "dead", "read")
    return {**{name: sum(row[name] for row in rows) for name in names}, "tenants": rows}


# -- the numbers ----------------------------------------------------------------------------------


async def _watch(shop: Shop, folder: Path | None, *, quiet: bool) -> None:
    """Show the numbers until cancelled: a table on a terminal, a line now and then in a pipe."""
    if quiet:
        return
    meter = _Meter(shop, folder)
    if not sys.stdout.isatty():
        await _repeat(meter, LINE_S, lambda: output.print_text(meter.line()))
        return
    from rich.live import Live

    with Live(meter.table(), refresh_per_second=4, transient=True) as live:
        await _repeat(meter, LOOK_S, lambda: live.update(meter.table()))


async def _repeat(meter: _Meter, every_s: float, show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        await meter.look()
        show()
        sys.stdout.flush()


class _Meter:
    """The numbers of the demo, and rates between two updates."""

    def __init__(self, shop: Shop, folder: Path | None) -> None:
        self._shop = shop
        self._folder = folder
        self._at = self._began = time.monotonic()
        self._before: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._disk = "in memory"

    async def look(self) -> None:
        """Update the numbers."""
        await self._shop.count_dead()
        now = time.monotonic()
        for tenant, books in self._shop.books.items():
            new = books.published - self._before.get(tenant, 0)
            self._rates[tenant] = new / (now - self._at)
            self._before[tenant] = books.published
        self._at = now
        if self._folder is not None:
            self._disk = await asyncio.to_thread(_disk_use, self._folder)

    def line(self) -> str:
        """One line for a pipe."""
        totals = _totals(self._shop)
        lag = totals["published"] - totals["handled"] - totals["dead"]
        return (
            f"{self._at - self._began:5.1f} s  {sum(self._rates.values()):8,.0f}/s  "
            f"published {totals['published']:,}  handled {totals['handled']:,}  lag {lag:,}  "
            f"retried {totals['retried']:,}  dead {totals['dead']:,}  {self._disk}"
        )

    def table(self) -> Table:
        """A table for a terminal."""
        from rich.table import Table

        headings = ("tenant", "per s", "published", "handled", "lag", "retried", "dead", "read in order", "revenue")  # fmt: skip
        table = Table(title=f"Penstock: {self._at - self._began:.0f} s, Ctrl-C ends it")
        table.caption = self._disk
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "tenant" else "right")
        for row in _totals(self._shop)["tenants"]:
            lag = row["published"] - row["handled"] - row["dead"]
            table.add_row(
                row["tenant"], f"{self._rates.get(row['tenant'], 0.0):,.0f}",
                f"{row['published']:,}", f"{row['handled']:,}", f"{lag:,}", f"{row['retried']:,}",
                f"{row['dead']:,}", f"{row['read']:,}", f"{row['revenue']:,.2f}",
            )  # fmt: skip
        return table


def _disk_use(folder: Path) -> str:
    parts = []
    for name in ("journal", "segments"):
        sizes = []
        for path in (folder / name).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sealed and removed meanwhile
                sizes.append(path.stat().st_blocks * 512)
        parts.append(f"{name} {sum(sizes) / 1e6:.1f} MB in {len(sizes)} files")
    return ", ".join(parts)


def _print_summary(result: dict[str, Any]) -> None:
    rows = [{**row, "revenue": f"{row['revenue']:,.2f}"} for row in result["tenants"]]
    output.show_rows(Invocation(), rows, list(rows[0]))
    output.print_text(
        f"{result['seconds']} s: published {result['published']:,} = handled {result['handled']:,} "
        f"+ dead {result['dead']:,}; read in order {result['read']:,}"
        if result["balanced"]
        else f"NOT balanced: published {result['published']:,}, handled {result['handled']:,}, "
        f"dead {result['dead']:,}, read in order {result['read']:,}"
    )
    if result["url"] != "mem:":
        output.print_text(
            f"It is all in {result['url']}: try `penstock --url {result['url']} dlq list`, or "
            f"`penstock --url {result['url']} replay 'orders.#' --limit 3`"
        )


# -- the sample -----------------------------------------------------------------------------------


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
    """Counts of one tenant's events that were published, handled and read; only this run counts."""

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

    # -- opening and closing -----------------------------------------------------------------

    async def open(self) -> None:
        """Note the offsets at which this run begins, and start the consumers."""
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

    # -- producers ---------------------------------------------------------------------------

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

    # -- consumers ---------------------------------------------------------------------------

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

    # -- counting ----------------------------------------------------------------------------

    async def count_dead(self) -> None:
        """Update `dead`."""
        letters: list[Any] = []
        for group in ("billing", "tracking"):
            letters += await self.bus.dead_letters.list(consumer=group, limit=1_000_000)
        self.dead = dict.fromkeys(TENANTS, 0)
        for letter in letters:
            if letter.offset >= self._first.get(letter.topic, letter.offset + 1):
                self.dead[letter.tenant] += 1

    def settled(self) -> bool:
        """Whether every published event was handled or is a dead letter, and was read in order."""
        return all(
            books.published == books.done + self.dead[tenant] == books.read
            for tenant, books in self.books.items()
        )

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every event is accounted for; False when the time is over first."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self.count_dead()
            if self.settled():
                return True
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.05)

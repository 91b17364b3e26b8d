"""A read model in SQLite, kept up to date by a consumer and rebuilt from the log every night.

The balance of each account is a table. The place in the log is stored beside it, in the same transaction of SQLite, so
that the two never disagree: whoever stops in the middle goes on where they were. The rebuild reads with `bus.replay`
and needs no group; its result is the same as that of the live consumer, and takes its place by renaming a file.

python examples/read_model.py [FOLDER]
"""

import asyncio
import os
import random
import sqlite3
import sys
import tempfile
from pathlib import Path

import penstock

TOPIC = "payments.booked.v1.acme"
PARTITIONS = 3
TABLES = """
    CREATE TABLE IF NOT EXISTS balances (account TEXT PRIMARY KEY, bookings INTEGER, cents INTEGER);
    CREATE TABLE IF NOT EXISTS places (partition INTEGER PRIMARY KEY, next_offset INTEGER);
"""
BOOK = """
    INSERT INTO balances VALUES (?, 1, ?)
    ON CONFLICT (account) DO UPDATE SET bookings = bookings + 1, cents = cents + excluded.cents
"""


class Model:
    """Balances, and how far in the log they are."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(path)
        self.connection.executescript(TABLES)

    def place(self, partition: int) -> int:
        """The first offset of a partition that is not in the balances."""
        query = "SELECT next_offset FROM places WHERE partition = ?"
        found = self.connection.execute(query, (partition,)).fetchone()
        return found[0] if found else 0

    def book(self, batch: penstock.EventBatch) -> int:
        """Take in what is new in a batch, and the place behind it, or nothing of both."""
        known = self.place(batch.partition)
        new = [event.value() for event in batch if event.offset >= known]
        with self.connection:
            rows = [(booking["account"], booking["cents"]) for booking in new]
            self.connection.executemany(BOOK, rows)
            place = (batch.partition, max(known, batch.end_offset))
            self.connection.execute("INSERT OR REPLACE INTO places VALUES (?, ?)", place)
        return len(new)

    def balances(self) -> dict[str, tuple[int, int]]:
        """Bookings and cents of each account."""
        rows = self.connection.execute("SELECT account, bookings, cents FROM balances")
        return {account: (bookings, cents) for account, bookings, cents in rows}


async def follow(bus: penstock.Bus, model: Model, events: int) -> None:
    """Keep a model up to date until it has so many events."""
    seen = 0
    async with bus.subscribe(TOPIC, group="balances", mode="log") as log:
        async for batch in log.batches():
            seen += model.book(batch)
            await log.commit()  # after SQLite's commit: what comes twice is known by its place
            if seen == events:
                return


async def rebuild(bus: penstock.Bus, path: Path, stop_after: int | None = None) -> int:
    """Read the whole log into a new model, from where the last attempt ended; returns what it read."""
    model, read = Model(path), 0
    try:
        for partition in range(PARTITIONS):
            start = model.place(partition)
            async for batch in bus.replay_batches(TOPIC, partition=partition, from_offset=start):
                read += model.book(batch)
                if stop_after is not None and read >= stop_after:
                    raise InterruptedError(f"the machine was restarted after {read} events")
    finally:
        model.connection.close()
    return read


async def main(folder: str) -> None:
    chance = random.Random(7)
    bookings = [
        {"account": f"account-{chance.randrange(50)}", "cents": chance.randint(-5_000, 9_000)}
        for _ in range(6_000)
    ]
    live_path, new_path = Path(folder, "balances.db"), Path(folder, "balances.new.db")
    async with penstock.connect(Path(folder, "bus")) as bus:
        await bus.topics.create(TOPIC, partitions=PARTITIONS)
        live = Model(live_path)
        following = asyncio.create_task(follow(bus, live, len(bookings)))
        for start in range(0, len(bookings), 500):
            some = bookings[start : start + 500]
            await bus.publish_many(TOPIC, some, keys=[each["account"] for each in some])
        await following
        balances = live.balances()
        live.connection.close()
        print(f"live: {sum(count for count, _ in balances.values())} bookings")

        try:
            await rebuild(bus, new_path, stop_after=2_500)
        except InterruptedError as error:
            print(f"rebuild: {error}")
        rest = await rebuild(bus, new_path)
        print(f"rebuild: the other {rest} events")

    rebuilt = Model(new_path)
    assert rebuilt.balances() == balances
    assert sum(cents for _, cents in balances.values()) == sum(each["cents"] for each in bookings)
    rebuilt.connection.close()
    os.replace(new_path, live_path)
    print(f"{len(balances)} balances are equal to the cent")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

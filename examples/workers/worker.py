"""A worker that ships orders. Start as many as you like, and stop them as you like: each order has its effect once.

penstock up ./data                                                     # a broker, in one terminal
python examples/workers/worker.py penstock://127.0.0.1 shipped.db      # a worker, in two or three more

An event is delivered at least once: a worker that dies after the effect and before the ack leaves its event to another. So
the effect is keyed by the id of the event, and done twice it is still one.
"""

import asyncio
import os
import sqlite3
import sys
import time

import penstock

TOPIC, GROUP = "orders.placed.v1.acme", "shipping"
TABLES = """
    CREATE TABLE IF NOT EXISTS shipped (event TEXT PRIMARY KEY, number INTEGER, worker INTEGER);
    CREATE TABLE IF NOT EXISTS deliveries (event TEXT, worker INTEGER, attempt INTEGER);
"""


def database(path: str) -> sqlite3.Connection:
    """The database that all workers share."""
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(TABLES)
    return connection


async def main(url: str, path: str) -> None:
    shipped, me = database(path), os.getpid()
    bus = penstock.connect(url)

    # SQLite waits for its disk, so this is a plain function: it runs in a thread, and the loop goes on.
    @bus.handler(TOPIC, group=GROUP, lease_s=5, max_inflight=20)
    def ship(order: dict, event: penstock.Event) -> None:
        time.sleep(0.005)  # the label is printed
        with shipped:
            shipped.execute(
                "INSERT INTO deliveries VALUES (?, ?, ?)", (str(event.id), me, event.attempt)
            )
            shipped.execute(
                "INSERT OR IGNORE INTO shipped VALUES (?, ?, ?)",
                (str(event.id), order["number"], me),
            )

    await bus.open()
    await bus.ready()
    print("ready", flush=True)
    await bus.run()  # until SIGTERM: then the order in work is finished first
    print("bye", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))

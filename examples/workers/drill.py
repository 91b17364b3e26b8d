"""Three workers on one broker, and then the worst: a worker is killed, and the broker is killed, while orders come in.

Nothing is lost and nothing is shipped twice; the drill counts, and fails when it is not so.

python examples/workers/drill.py [FOLDER]
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from worker import GROUP, TOPIC, database

import penstock
from penstock.testing.broker_process import BrokerProcess

ORDERS, BURST = 600, 50
ATTEMPTS = 30
PATIENCE_S = 90


def start_worker(url: str, path: Path) -> subprocess.Popen[str]:
    """Another worker; returns when it is subscribed."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), url, str(path)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n", "the worker did not start"
    return worker


async def place(bus: penstock.Bus, number: int) -> None:
    """Publish an order, again and again if need be: by its key the broker knows it."""
    for _ in range(ATTEMPTS):
        try:
            await bus.publish(TOPIC, {"number": number}, idempotency_key=f"order-{number}")
            return
        except penstock.ConnectionFailed:
            await asyncio.sleep(0.1)
    raise TimeoutError(f"order {number} could not be placed")


async def all_shipped(bus: penstock.Bus) -> None:
    """Return when the group has nothing left to do."""
    for _ in range(20 * PATIENCE_S):
        if not (await bus.groups.info(GROUP)).lag:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("the orders are not shipped")


async def main(folder: Path) -> None:
    path = folder / "shipped.db"
    database(path).close()
    broker = BrokerProcess(folder / "data").start(server__session_s=2)
    workers = [start_worker(broker.url(), path) for _ in range(3)]
    try:
        async with penstock.connect(broker.url()) as bus:
            for first in range(0, ORDERS, BURST):
                placing = [asyncio.create_task(place(bus, first + n)) for n in range(BURST)]
                if first == ORDERS // 3:
                    workers[0].kill()
                    print("a worker was killed")
                if first == ORDERS // 2:
                    workers.append(await asyncio.to_thread(start_worker, broker.url(), path))
                    print("another one came")
                if first == ORDERS * 2 // 3:
                    broker.kill()
                    await asyncio.to_thread(broker.start, server__session_s=2)
                    print("the broker was killed, and started again")
                await asyncio.gather(*placing)
            await all_shipped(bus)
            stored = sum(part.end_offset for part in (await bus.topics.info(TOPIC)).partitions)
            dead = await bus.dead_letters.list(consumer=GROUP)
        for worker in workers[1:]:
            worker.terminate()
        codes = [worker.wait(PATIENCE_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        broker.stop()

    shipped = database(path)
    numbers = [row[0] for row in shipped.execute("SELECT number FROM shipped ORDER BY number")]
    deliveries = shipped.execute("SELECT count(*) FROM deliveries").fetchone()[0]
    shipped.close()
    assert numbers == list(range(ORDERS)), "an order is missing, or was shipped twice"
    assert deliveries >= ORDERS
    print(f"{stored} orders stored, {len(numbers)} shipped, {len(dead)} dead")
    print(f"the workers ended with {codes}")
    print(f"deliveries: {deliveries}")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(folder))

"""Read a topic in order and write results exactly once: the cursor and the result in one transaction.

python examples/totals.py [FOLDER]
"""

import asyncio
import random
import sys
import tempfile

import penstock

READINGS = 1_000


async def main(folder: str) -> None:
    async with penstock.connect(folder) as bus:
        values = [{"meter": n % 3, "kwh": random.randint(1, 9)} for n in range(READINGS)]
        await bus.publish_many("meters.read.v1.acme", values)

        totals = {0: 0, 1: 0, 2: 0}
        seen = 0
        async with bus.subscribe("meters.read.v1.*", group="totals", mode="log") as log:
            async for batch in log.batches():
                for event in batch:
                    reading = event.value()
                    totals[reading["meter"]] += reading["kwh"]
                seen += len(batch)
                # If this crashes, neither the total nor the cursor has moved.
                async with bus.transaction() as tx:
                    tx.publish("meters.total.v1.acme", {"seen": seen, "totals": totals})
                    tx.commit(log)
                if seen == READINGS:
                    break

        results = [event.value() async for event in bus.replay("meters.total.v1.acme")]
        print(f"{seen} readings in {len(results)} results")
        assert sum(results[-1]["totals"].values()) == sum(value["kwh"] for value in values)
        print("the totals add up")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

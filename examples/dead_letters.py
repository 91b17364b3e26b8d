"""A handler that fails: retries, a dead letter, an operator who looks and replays it, the audit trail.

python examples/dead_letters.py [FOLDER]
"""

import asyncio
import sys
import tempfile

import penstock

TOPIC = "invoices.due.v1.acme"


async def main(folder: str) -> None:
    printer_works = False
    printed = asyncio.Event()
    async with penstock.connect(folder) as bus:

        @bus.handler(
            TOPIC, group="printing", retry=penstock.Retry(ladder_ms=(10, 50), max_attempts=3)
        )
        async def print_invoice(invoice: dict, event: penstock.Event) -> None:
            if not printer_works:
                raise OSError(f"out of paper at attempt {event.attempt}")
            print(f"invoice {invoice['number']} printed at attempt {event.attempt}")
            printed.set()

        # Every dead letter is also an event, on a topic of its tenant: wait for it there.
        async with bus.subscribe("_dlq.acme", mode="log") as failures:
            await bus.publish(TOPIC, {"number": 12})
            await failures.get(timeout_s=5.0)
        letter = (await bus.dead_letters.list(consumer="printing"))[0]
        print(f"dead after {letter.attempts} attempts: {letter.reason}")

        printer_works = True
        outcome = await bus.dead_letters.replay(
            [letter.id], target_consumer="printing", target_topic=TOPIC,
            actor="ann@example.com", reason="paper refilled", confirm="REPLAY",
        )  # fmt: skip
        await printed.wait()
        print(f"replayed {outcome.done} of {outcome.requested}")

        for record in await bus.audit.query(actor="ann@example.com"):
            print(f"audit: {record.operation} because {record.reason!r}")
        print(f"audit chain whole: {(await bus.audit.verify()).ok}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

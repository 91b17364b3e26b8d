"""A consumer that works until Ctrl-C; there is no paper for order 9, so that it becomes a dead letter.

python examples/billing.py [URL]
"""

import asyncio
import sys

import penstock


async def main(url: str) -> None:
    async with penstock.connect(url) as bus:

        @bus.handler(
            "orders.created.*",
            group="billing",
            retry=penstock.Retry(ladder_ms=(50,), max_attempts=2),
        )
        async def bill(order: dict, event: penstock.Event) -> None:
            if order["id"] == 9:
                raise OSError(f"no paper for order 9 at attempt {event.attempt}")
            print(f"billing order {order['id']}", flush=True)

        await bus.ready()
        print("waiting for orders", flush=True)
        await bus.run()  # until Ctrl-C, or until there is nothing to wait for any more


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "penstock://127.0.0.1"))
    except KeyboardInterrupt:
        print("bye")

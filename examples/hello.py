"""A durable publish and a handler: the smallest useful program.

python examples/hello.py [FOLDER]
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass

import penstock


@dataclass
class Order:
    id: int
    amount: float


async def main(folder: str) -> None:
    billed = asyncio.Event()
    async with penstock.connect(folder) as bus:

        @bus.handler("orders.created.v1.*", group="billing")
        async def bill(order: Order, event: penstock.Event) -> None:
            print(f"{event.tenant} owes {order.amount} for order {order.id}")
            billed.set()

        receipt = await bus.publish("orders.created.v1.acme", Order(7, 99.5))
        print(f"on disk as {receipt.ids()[0]}")
        await billed.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

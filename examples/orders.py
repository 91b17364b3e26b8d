"""A shop that charges its orders: pydantic models, a flaky payment service, and an order that nobody can charge yet.

Each order is charged once, however often it is tried: the service is called with the token of the event, which is
the same at every attempt, and the result is published in the transaction that acks the order.

python examples/orders.py [FOLDER]
"""

import asyncio
import sys
import tempfile
from decimal import Decimal

import pydantic

import penstock

PLACED, PAID = "orders.placed.v1.acme", "orders.paid.v1.acme"
ORDERS = 100
QUICK = penstock.Retry(ladder_ms=(20, 50, 100), max_attempts=4)


class Order(pydantic.BaseModel):
    id: int
    amount: Decimal = pydantic.Field(gt=0)
    currency: str = "EUR"


class Paid(pydantic.BaseModel):
    id: int
    euros: Decimal


class PaymentService:
    """Takes money. For one order in five the answer is lost the first time, although the money was taken."""

    def __init__(self) -> None:
        self.calls = 0
        self.charged: dict[str, Decimal] = {}

    async def charge(self, key: str, order: Order, euros: Decimal) -> None:
        self.calls += 1
        new = key not in self.charged
        self.charged[key] = euros
        await asyncio.sleep(0.001)
        if new and order.id % 5 == 0:
            raise ConnectionError("the connection to the payment service broke")


async def main(folder: str) -> None:
    payments = PaymentService()
    unpaid, all_paid = set(range(ORDERS)), asyncio.Event()
    rates = {"EUR": Decimal(1), "USD": Decimal("0.9")}
    async with penstock.connect(folder) as bus:

        @bus.handler(PLACED, group="payments", retry=QUICK, concurrency=8)
        async def charge(order: Order, event: penstock.Event) -> None:
            if order.currency not in rates:
                raise penstock.Reject(f"no rate for {order.currency}")
            euros = order.amount * rates[order.currency]
            await payments.charge(str(event.token), order, euros)
            async with bus.transaction() as tx:
                tx.publish(PAID, Paid(id=order.id, euros=euros))
                tx.ack(event)
            unpaid.discard(order.id)
            if not unpaid:
                all_paid.set()

        currencies = {7: "USD", 42: "SEK"}
        placed = [Order(id=n, amount=10, currency=currencies.get(n, "EUR")) for n in range(ORDERS)]
        async with bus.subscribe("_dlq.acme", mode="log") as failures:
            await bus.publish_many(PLACED, placed)
            await bus.publish(PLACED, {"id": ORDERS, "amount": "-1"})  # by an old client, unchecked
            for _ in range(2):
                assert await failures.get(timeout_s=30.0) is not None
        dead = {
            letter.offset: letter for letter in await bus.dead_letters.list(consumer="payments")
        }
        print(f"no rate yet: {dead[42].reason}")
        print(f"no order: {'greater than 0' in dead[ORDERS].reason}")

        rates["SEK"] = Decimal("0.1")
        operator = {"actor": "ann@example.com", "confirm": "REPLAY"}
        await bus.dead_letters.replay(
            [dead[42].id], target_consumer="payments", target_topic=PLACED,
            reason="SEK has a rate", **operator,
        )  # fmt: skip
        await all_paid.wait()

        paid = [event.value(Paid) async for event in bus.replay(PAID)]
        assert sorted(each.id for each in paid) == list(range(ORDERS))
        assert sum(each.euros for each in paid) == sum(payments.charged.values())
        print(f"{len(paid)} orders are paid, {sum(each.euros for each in paid)} euros in all")
        print(f"{len(payments.charged)} charges in {payments.calls} calls")
        still = await bus.dead_letters.list(consumer="payments")
        print(f"{len(still)} dead letter is left, of order {still[0].offset}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

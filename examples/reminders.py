"""Events that wait for their time, and events that come again and again.

python examples/reminders.py [FOLDER]
"""

import asyncio
import sys
import tempfile

import penstock


async def main(folder: str) -> None:
    async with penstock.connect(folder) as bus:
        async with bus.subscribe("reminders.*", group="phone") as reminders:
            await bus.publish("reminders.tea", "the tea is ready", delay_s=0.3)
            await bus.publish("reminders.now", "put the kettle on")
            await bus.schedules.put("stretch", "reminders.stretch", "stretch", every="400ms")

            seen = []
            while len(seen) < 4:
                event = await reminders.get(timeout_s=5.0)
                assert event is not None, "a reminder is late"
                await event.ack()
                seen.append(event.value())
                print(event.value())
        await bus.schedules.remove("stretch", confirm="REMOVE")
        assert seen[:2] == ["put the kettle on", "the tea is ready"]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

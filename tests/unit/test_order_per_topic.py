"""`TopicOrder` keeps the publishes of a session to one topic in the order they arrived (X2)."""

from __future__ import annotations

import asyncio

from penstock.server.publish import TopicOrder


async def test_each_waits_for_those_before_it_at_its_topics() -> None:
    order, seen = TopicOrder(), []

    async def publish(name: str, *topics: str, prepare: asyncio.Event | None = None) -> None:
        with order.join(topics) as turn:
            if prepare is not None:
                await prepare.wait()
            await turn.turn()
            seen.append(name)

    slow, slower = asyncio.Event(), asyncio.Event()
    tasks = [
        asyncio.create_task(publish("a", "x", prepare=slow)),
        asyncio.create_task(publish("b", "y", prepare=slower)),
        asyncio.create_task(publish("c", "x", "y")),
        asyncio.create_task(publish("d", "y")),
        asyncio.create_task(publish("e", "z")),
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["e"]
    assert order.last.keys() == {"x", "y"}
    slow.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["e", "a"]
    slower.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert seen == ["e", "a", "b", "c", "d"]
    assert not order.last, "nothing is left behind"


async def test_who_gives_up_lets_nobody_pass_those_before_it() -> None:
    order, first = TopicOrder(), None
    first = order.join(["x"])
    with order.join(["x"]):
        pass  # refused before its turn
    last = order.join(["x"])
    waiting = asyncio.create_task(last.turn())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.leave()
    await asyncio.wait_for(waiting, 10)
    last.leave()
    assert not order.last


async def test_a_cancelled_wait_leaves_the_others_alone() -> None:
    order = TopicOrder()
    first, second, third = (order.join(["x"]) for _ in range(3))
    gone = asyncio.create_task(second.turn())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    second.leave()
    waiting = asyncio.create_task(third.turn())
    await asyncio.sleep(0)
    assert not waiting.done()
    first.leave()
    await asyncio.wait_for(waiting, 10)

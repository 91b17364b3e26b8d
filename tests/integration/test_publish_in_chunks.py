"""A frame of a tenant over its rate is stored in chunks: nothing lost, nothing twice (T11, X2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import penstock
from penstock.engines.embedded.batching import COMPANY_BYTES
from penstock.engines.embedded.publisher import Answer, Bundle
from penstock.server.publish import HELPING_BYTES
from penstock.testing.broker_process import BrokerProcess, broker_inside

TOPIC = "orders.created.v1.acme"
OTHERS = "orders.created.v1.other"
RATE_PER_S = 20_000  # never used up here, only used ahead of time
QUOTA = {"admission.tenants.acme.events_per_s": RATE_PER_S}
BATCHES, EVENTS, PAYLOAD_BYTES = 24, 70, 200  # one frame of some 400 KB, a part for each batch
MOST_KILLS = 8
SLACK_BYTES = 8 << 10  # a batch is measured before and after it is taken apart
DEADLINE_S = 30.0


@asynccontextmanager
async def busy(url: str) -> AsyncIterator[None]:
    """Another tenant's publisher, all the time: tenants over their rate wait for it."""

    async def publish(bus: penstock.Bus) -> None:
        while True:
            with contextlib.suppress(penstock.PenstockError):
                await bus.publish(OTHERS, b"x")

    async with penstock.connect(url, client__deadline_s=DEADLINE_S) as bus:
        tasks = [asyncio.create_task(publish(bus)) for _ in range(4)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def batches(number: int) -> list[list[bytes]]:
    return [
        [b"%d.%d.%d." % (number, at, n) + os.urandom(PAYLOAD_BYTES) for n in range(EVENTS)]
        for at in range(BATCHES)
    ]


async def stored(bus: penstock.Bus) -> int:
    return int((await bus.topics.info(TOPIC)).partitions[0].end_offset)


def told_apart(payload: bytes) -> bytes:
    return b".".join(payload.split(b".", 3)[:3])


async def test_a_frame_is_stored_in_chunks_that_go_with_commits_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    publish = Bundle.publish

    async def watched(
        self: Bundle,
        drafts: list,
        note: Callable,
        ready: Callable[[], None] = lambda: None,
        patience_s: float = 0.0,
    ) -> list[Answer]:
        if drafts[0].topic == TOPIC and patience_s:
            chunks.append(sum(draft.batch.size_bytes for draft in drafts))
        return await publish(self, drafts, note, ready, patience_s)

    monkeypatch.setattr(Bundle, "publish", watched)
    daemon = broker_inside(tmp_path, QUOTA)
    await daemon.start()
    try:
        url = f"penstock://127.0.0.1:{daemon.ports['tcp']}"
        async with penstock.connect(url) as bus, busy(url):
            await bus.publish_many(TOPIC, [b"x"] * (RATE_PER_S // 2))  # now it is ahead
            before = daemon.engine.commits.commits
            receipts = await asyncio.gather(
                *(bus.publish_many(TOPIC, payloads) for payloads in batches(0))
            )
            commits = daemon.engine.commits.commits - before
        offsets = [receipt.offset for receipt in receipts]
        assert offsets == list(range(RATE_PER_S // 2, RATE_PER_S // 2 + BATCHES * EVENTS, EVENTS))
        assert len(chunks) >= 3
        assert max(chunks) <= HELPING_BYTES + SLACK_BYTES < COMPANY_BYTES
        assert commits >= len(chunks), "each with one of others, or alone"
    finally:
        await daemon.stop()


async def test_of_a_frame_in_chunks_nothing_is_lost_or_stored_twice(tmp_path: Path) -> None:
    """Q13: the broker is killed after some of them; the client sends the frame again."""
    flags = {"admission__tenants": {"acme": {"events_per_s": RATE_PER_S}}}
    with BrokerProcess(tmp_path / "data").start(**flags) as broker:
        async with (
            busy(broker.url()),
            penstock.connect(broker.url(), client__deadline_s=DEADLINE_S) as bus,
        ):
            expected: list[bytes] = []
            in_part = 0
            for number in range(MOST_KILLS):
                await bus.publish_many(TOPIC, [b"ahead.%d.0." % number] * (RATE_PER_S // 4))
                before, made = await stored(bus), batches(number)
                calls = [asyncio.create_task(bus.publish_many(TOPIC, each)) for each in made]
                while await stored(bus) <= before:  # not yet the first chunk
                    await asyncio.sleep(0)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start, **flags)
                receipts = await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)
                told = [receipt.duplicate for receipt in receipts]
                in_part += True in told and False in told
                expected += [told_apart(payload) for each in made for payload in each]
                if in_part > 1:
                    break
                await asyncio.sleep(0.5)  # enough of the rate is back
            found = [told_apart(event.payload) async for event in bus.replay(TOPIC)]
        assert [each for each in found if not each.startswith(b"ahead")] == expected
        if not in_part:
            pytest.skip("the machine is too busy: no kill fell between two chunks")

"""What a tenant has stored: the same number while a bus runs and after it was started anew (T11)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.quota_simulation import read_traffic
from penstock.model.batch import BatchHead, EventBatch, event_bytes, measured
from penstock.model.settings import Settings

TOPIC = "orders.created.v1.acme"
PLAIN: dict[str, Any] = {"sealing__enabled": False, "media__compressor": "none"}
LZ4: dict[str, Any] = {"sealing__enabled": False, "media__compress_min_bytes": 1}
ASIDE: dict[str, Any] = {**PLAIN, "journal__side_file_bytes": 2_000}
SEALED: dict[str, Any] = {"journal__side_file_bytes": 2_000}
KEPT = 64 * 51 + 50 * 110 + sum(len(f"k{n}") for n in range(50)) + 3_000 + len("tracé") + 1 + 3


async def fill(bus: penstock.Bus) -> None:
    for number in range(50):
        key = f"k{number}"
        await bus.publish(TOPIC, b"spam and eggs" * 8 + b"123456", key=key, codec="raw")
    await bus.publish(TOPIC, bytes(3_000), headers={"trac\u00e9": "yes"}, codec="raw")


def stored(bus: penstock.Bus, tenant: str = "acme") -> int:
    return int(bus.engine.admission.use()[tenant][0])


@pytest.mark.parametrize("flags", [PLAIN, LZ4, ASIDE, SEALED], ids=["plain", "lz4", "aside", "sealed"])  # fmt: skip
async def test_a_restart_keeps_the_number(
    flags: dict[str, Any], tmp_path: Path, small: Callable[..., Settings]
) -> None:
    """T11: a quota is as full after a restart as before, and empty when everything was deleted."""
    folder, settings = tmp_path / "data", small(**flags)
    async with penstock.connect(folder, settings=settings) as bus:
        await fill(bus)
        assert stored(bus) == KEPT
    async with penstock.connect(folder, settings=settings) as bus:
        assert stored(bus) == KEPT
        await bus.engine.maintenance.settle()
        assert stored(bus) == KEPT
    sizes = read_traffic(folder, settings, 3_600)
    assert sum(batch.event_bytes for batch in sizes.batches) == pytest.approx(KEPT, abs=50)
    assert sizes.stored_bytes["acme"] <= 50, "all of it was published within the window"
    emptied = small(retention__age_s=0.0)
    async with penstock.connect(folder, settings=emptied) as bus:
        assert stored(bus) in (KEPT, 0)  # the first round of maintenance may have run
        await bus.engine.maintenance.settle()
        await bus.engine.maintenance.settle()
        assert stored(bus) == 0


async def test_tenants_of_one_topic_are_charged_and_given_back_the_same(
    tmp_path: Path, small: Callable[..., Settings]
) -> None:
    """T11: each is charged for all of a sealed range it has a part in, so each gets back as much."""
    folder, settings = tmp_path / "data", small()
    for tenant in ("acme", "globex"):
        own = small(identity__tenant=tenant, sealing__enabled=False)
        async with penstock.connect(folder, settings=own) as bus:
            await bus.publish_many("orders", [bytes(100)] * 10, codec="raw")
            assert stored(bus, tenant) == 1_640
    for _ in range(2):
        async with penstock.connect(folder, settings=settings) as bus:
            await bus.engine.maintenance.settle()
            assert (stored(bus), stored(bus, "globex")) == (3_280, 3_280)
    async with penstock.connect(folder, settings=small(retention__age_s=0.0)) as bus:
        await bus.engine.maintenance.settle()
        assert (stored(bus), stored(bus, "globex")) == (0, 0)


@pytest.mark.parametrize("compressor", ["none", "lz4", "unheard"])
def test_an_encoded_batch_measures_as_the_batch_does(compressor: str) -> None:
    """T11: whatever columns it has; where its compressor is missing, a bound."""
    for flags in range(64):
        count = 1 + flags % 9
        batch = EventBatch.build(
            "orders",
            [b"p" * (n * 7 % 23) for n in range(count)],
            keys=[b"k" * n if n % 3 else None for n in range(count)] if flags & 1 else None,
            headers=[{"a": "\u00e9" * n} if n % 2 else None for n in range(count)]
            if flags & 2
            else None,
            tokens=[bytes([n]) * 16 for n in range(count)] if flags & 4 else None,
            times_us=list(range(count)) if flags & 8 else 5,
            expires_us=[9] * count if flags & 16 else None,
            priority=[1] * count if flags & 32 else None,
        )
        known = "lz4" if compressor == "unheard" else compressor
        batch.compress_with(known)
        encoded = memoryview(batch.encode())
        head = BatchHead.parse(encoded)
        if compressor == "unheard":
            assert measured(head._replace(compressor="unheard"), encoded).events >= event_bytes(batch)  # fmt: skip
        else:
            payload = sum(map(len, batch.payloads()))
            assert measured(head, encoded) == (payload, event_bytes(batch))

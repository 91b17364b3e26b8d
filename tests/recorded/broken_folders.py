"""Records data folders that an earlier release left unreadable: wrong values went into its journal.

Run it with the code of commit 74d98c9 on PYTHONPATH. It writes broken_folders.tar.xz beside itself:
a folder for each case, and what that release said was in it while it was still open.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import penstock
from penstock import Bus, Retry, WriterFailed

HERE = Path(__file__).resolve().parent
Call = Callable[[Bus], Awaitable[None]]


def subscribing(**options: Any) -> Call:
    async def call(bus: Bus) -> None:
        async with bus.subscribe("orders.*", group="wrong", **options) as events:
            if "filter" not in options:
                for _ in range(2):
                    await (await anext(events)).ack()
        await bus.flush()

    return call


def creating(topic: str = "orders.wrong", **options: Any) -> Call:
    async def call(bus: Bus) -> None:
        await bus.topics.create(topic, **options)

    return call


def growing(count: Any) -> Call:
    async def call(bus: Bus) -> None:
        await bus.topics.create("stock.items")
        await bus.publish("stock.items", {"n": 0})
        await bus.topics.grow("stock.items", count)

    return call


async def several(bus: Bus) -> None:
    await CASES["retry as int"](bus)
    for name in ("retention age as text", "partitions grown to a float"):
        try:
            await CASES[name](bus)
        except Exception as error:
            print("   ", name, repr(error))
    await CASES["ladder of floats"](bus)


CASES: dict[str, Call] = {
    "ladder of floats": subscribing(retry=Retry(ladder_ms=(0.5 * 1000,))),  # type: ignore[arg-type]
    "ladder with a fraction": subscribing(retry=Retry(ladder_ms=(100, 200.5))),  # type: ignore[arg-type]
    "attempts as a float": subscribing(retry=Retry(max_attempts=2.5)),  # type: ignore[arg-type]
    "attempts as a bool": subscribing(retry=Retry(max_attempts=True)),
    "retry as int": subscribing(retry=3),
    "filter with an int": subscribing(filter={"region": 1}),
    "filter with None": subscribing(filter={"region": None}),
    "lease as a bool": subscribing(lease_s=True),
    "partitions as a float": creating("stock.wrong", partitions=2.0),
    "partitions as a bool": creating(partitions=True),
    "partitions grown to a float": growing(4.0),
    "retention age as text": creating(retention_age_s="7d"),
    "retention age as a timedelta": creating(retention_age_s=timedelta(days=7)),
    "retention bytes as text": creating(retention_bytes="1GB"),
    "retention bytes as a float": creating(retention_bytes=1e9),
    "retention bytes as a bool": creating(retention_bytes=True),
    "write-once as text": creating(write_once="yes"),
    "write-once as an int": creating(write_once=1),
    "several": several,
}


async def consume(bus: Bus, count: int) -> None:
    async with bus.subscribe("orders.*", group="billing", lease_s=60.0) as events:
        for _ in range(count):
            event = await anext(events)
            if event.value()["n"] == 3:
                await event.reject("cannot be booked")
            else:
                await event.ack()
    await bus.flush()


async def record(case: str, folder: Path) -> dict[str, Any]:
    """What is in the folder when its writer ends: by itself, or at the wrong value."""
    known: dict[str, Any] = {}
    with contextlib.suppress(WriterFailed):
        async with penstock.connect(str(folder)) as bus:
            await fill(bus, case, known)
    return known


async def fill(bus: Bus, case: str, known: dict[str, Any]) -> None:
    known |= {"said": "", "events": [], "groups": {}}

    async def publish(topic: str, n: int, **options: Any) -> None:
        receipt = await bus.publish(topic, {"n": n}, **options)
        place = [topic, receipt.partition, receipt.offset, receipt.token.hex()]
        known["events"].append([*place, {"n": n}, options.get("headers", {})])

    await bus.topics.create("orders.created", partitions=2)
    for n in range(6):
        await publish("orders.created", n, key=str(n), headers={"region": "eu"})
    await consume(bus, 5)
    await bus.publish("orders.paid", {"n": 100}, delay_s=30 * 86_400.0)
    try:
        await CASES[case](bus)
    except Exception as error:
        known["said"] = f"{type(error).__name__}: {error}"
    try:
        for n in range(10, 14):
            await publish("orders.paid", n)
            await publish("orders.created", n, key=str(n))
        await consume(bus, 4)
    except Exception as error:
        known["said"] += f" {type(error).__name__}: {error}"
    for group in await bus.groups.list():
        lanes = [
            [lane.topic, lane.partition, lane.cursor, lane.outstanding, lane.lag]
            for lane in group.lanes
        ]
        known["groups"][group.name] = lanes
    known["dead"] = [[d.id, d.consumer, d.reason] for d in await bus.dead_letters.list()]
    known["audited"] = [record.operation for record in await bus.audit.query()]


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        tarfile.open(HERE / "broken_folders.tar.xz", "w:xz") as archive,
    ):
        for case in CASES:
            folder = Path(place) / case.replace(" ", "-")
            known = asyncio.run(record(case, folder))
            (folder / "lock").unlink()  # it names this machine
            said = json.dumps(known).encode()
            about = tarfile.TarInfo(f"{folder.name}.json")
            about.size = len(said)
            archive.addfile(about, io.BytesIO(said))
            archive.add(folder, folder.name, filter=_nameless)
            size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            print(f"{case}: {size} bytes; {known['said'][:70]}")


def _nameless(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uname = info.gname = ""
    info.uid = info.gid = 0
    return info


if __name__ == "__main__":
    main()

"""docs/architecture.md walks one event through the code; this walks the same way and compares."""

from __future__ import annotations

import asyncio
import difflib
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import penstock
from penstock.engines.embedded.runtime import WorkerThread
from penstock.testing.broker_process import broker_inside

ROOT = Path(penstock.__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
CODE = str(ROOT / "penstock") + "/"
MOST_FILES = 12
"""Files of a chapter, outside `model` (the vocabulary) and the chapter Commit, where every writing walk ends."""
LONGER = {"Subscribe": 13}
"""Chapters that are longer, and by how much: may only get shorter."""
EVERYWHERE = ("model/errors.py", "model/settings.py", "model/column.py", "model/registry.py")
"""Vocabulary and configuration that the document explains once, at its top."""
COMMIT = (
    "engines/embedded/batching.py", "engines/embedded/commit.py", "engines/embedded/runtime.py",
    "log/journal.py", "log/event_log.py", "log/disk.py",
)  # fmt: skip
MACHINE = ("core/delivery.py", "core/lease.py", "core/ordering.py")
"""The delivery machine: a subscription makes it, the chapter Deliver tells of it."""
SNAPSHOT = (
    "log/snapshot.py", "log/unreadable.py", "core/state.py", "core/schedule.py", "core/entry.py", "core/retry.py",
)  # fmt: skip
"""What sealing does first, in a chapter of its own."""
FLAGS: dict[str, Any] = {"sealing__process": False, "sealing__enabled": False}

Walks = dict[str, list[str]]


@contextmanager
def traced(walks: Walks, chapter: str, runtime: Any) -> Iterator[None]:
    """Files of Penstock in the order in which they are first entered, in any thread."""
    order: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(CODE):
            order.setdefault(name.removeprefix(CODE))

    threading.setprofile(profile)
    _renew_threads(runtime)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        _renew_threads(runtime)
        walks[chapter] = [name for name in order if name not in EVERYWHERE]


def _renew_threads(runtime: Any) -> None:
    """A thread takes over the profile when it starts, and only then."""
    runtime._writer.close()
    runtime._writer = WorkerThread("writer")
    runtime._readers.shutdown()
    runtime._readers = ThreadPoolExecutor(1)


async def embedded_walks(folder: Path) -> Walks:
    """An event published, delivered, acked; another one rejected; the journal sealed."""
    walks: Walks = {}
    async with penstock.connect(folder, **FLAGS) as bus:
        runtime = bus.engine.runtime
        await bus.publish("orders.created", {"id": 6})  # makes the topic
        with traced(walks, "Publish", runtime):
            await bus.publish("orders.created", {"id": 7})
        once = penstock.Retry.none()
        subscription = bus.subscribe("orders.*", group="billing", start="latest", retry=once)
        with traced(walks, "Subscribe", runtime):
            await subscription.open()
        waiting = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0.05)
        with traced(walks, "Deliver", runtime):
            await bus.publish("orders.created", {"id": 8})
            event = await waiting
        walks["Deliver"] = [name for name in walks["Deliver"] if name not in walks["Publish"]]
        walks["Subscribe"] = [name for name in walks["Subscribe"] if name not in MACHINE]
        with traced(walks, "Ack", runtime):
            await event.ack()
            await bus.flush()
        for number in (9, 10):
            await bus.publish("orders.created", {"id": number})
            event = await anext(subscription)
            if number == 9:  # makes the topic of dead letters
                await event.reject("no such customer")
                await bus.flush()
        with traced(walks, "Dead letter", runtime):
            await event.reject("no such customer")
            await bus.flush()
        await subscription.close()
    async with penstock.connect(folder, **FLAGS) as bus:
        await bus.publish("orders.created", {"id": 11})  # each start begins a new journal file
        maintenance = bus.engine.maintenance
        maintenance._settings = msgspec.structs.replace(maintenance._settings, enabled=True)
        with traced(walks, "Seal", bus.engine.runtime):
            await maintenance.settle()
    walks["Snapshot"] = [name for name in walks["Seal"] if name in SNAPSHOT]
    walks["Seal"] = [name for name in walks["Seal"] if name not in SNAPSHOT]
    return walks


@asynccontextmanager
async def broker(folder: Path) -> AsyncIterator[tuple[Any, str]]:
    daemon = broker_inside(
        folder, {name.replace("__", "."): value for name, value in FLAGS.items()}
    )
    await daemon.start()
    try:
        yield daemon, f"penstock://127.0.0.1:{daemon.ports['tcp']}"
    finally:
        await daemon.stop()


async def broker_walks(folder: Path) -> Walks:
    """A publish through a broker: the client's part, the door's, and the engine's as above."""
    walks: Walks = {}
    async with broker(folder) as (daemon, url), penstock.connect(url) as bus:
        await bus.publish("orders.created", {"id": 6})
        with traced(walks, "all", daemon.engine.runtime):
            await bus.publish("orders.created", {"id": 7})
    client = ("bus/", "engines/broker/", "transport/", "wire/")
    inside = [name for name in walks["all"] if name.startswith("engines/embedded/")]
    return {
        "Publish through a broker: the client": [
            name for name in walks["all"] if name.startswith((*client, "model/"))
        ],
        "Publish through a broker: the door": [
            name for name in walks["all"] if name.startswith("server/")
        ],
        "engine": inside,
    }


def stations(chapter: str) -> list[str]:
    """The files a chapter of the document names as stations, in order."""
    text = PAGE.read_text()
    part = re.search(rf"^## {chapter}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert part is not None, f"no chapter {chapter!r}"
    return re.findall(r"^\d+\. \*\*`penstock/([\w/]+\.py)`\*\*", part[1], re.MULTILINE)


def compare(chapter: str, order: list[str]) -> None:
    change = difflib.unified_diff(stations(chapter), order, "page", "code", lineterm="")
    text = "\n".join(change)
    assert not text, f"correct the chapter {chapter!r} of {PAGE.name}:\n{text}"


def own(order: list[str]) -> list[str]:
    return [name for name in order if name not in COMMIT]


async def test_the_document_walks_the_way_of_an_event(tmp_path: Path) -> None:
    """Row Y13: the chapters of docs/architecture.md name the files in the order of the event."""
    walks = await embedded_walks(tmp_path / "data")
    compare("Commit", [name for name in walks["Publish"] if name in COMMIT])
    for chapter, order in walks.items():
        compare(chapter, own(order))


async def test_the_document_walks_the_way_through_a_broker(tmp_path: Path) -> None:
    walks = await broker_walks(tmp_path)
    del walks["engine"]
    for chapter, order in walks.items():
        compare(chapter, order)


async def test_walks_are_short(tmp_path: Path) -> None:
    """Who follows an event reads a dozen files a chapter, and no more."""
    walks = await embedded_walks(tmp_path / "data") | await broker_walks(tmp_path)
    lengths = {
        chapter: len([name for name in own(order) if not name.startswith("model/")])
        for chapter, order in walks.items()
    }
    assert {name: files for name, files in lengths.items() if files > MOST_FILES} == LONGER


def test_every_package_is_introduced() -> None:
    """The document says of every package what it is."""
    text = PAGE.read_text()
    packages = {path.parent.name for path in (ROOT / "penstock").glob("*/__init__.py")}
    assert not {name for name in packages if f"`{name}`" not in text}

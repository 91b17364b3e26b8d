"""docs/architecture.md walks one event through the code; this walks the same way and compares."""

from __future__ import annotations

import difflib
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import penstock
from penstock.engines.embedded.runtime import WorkerThread

ROOT = Path(penstock.__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
CODE = str(ROOT / "penstock") + "/"
# Vocabulary and configuration are everywhere; the document explains them once, at its top.
VOCABULARY = ("model/errors.py", "model/settings.py", "model/column.py", "model/registry.py")


@contextmanager
def traced(bus: penstock.Bus) -> Iterator[list[str]]:
    """Files of Penstock in the order in which they are first entered, in any thread."""
    order: list[str] = []
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name not in seen:
            seen.add(name)
            if name.startswith(CODE):
                order.append(name.removeprefix(CODE))

    threading.setprofile(profile)
    _renew_threads(bus.engine.runtime)
    sys.setprofile(profile)
    try:
        yield order
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        _renew_threads(bus.engine.runtime)


def _renew_threads(runtime: Any) -> None:
    """A thread takes over the profile when it starts, and only then."""
    runtime._writer.close()
    runtime._writer = WorkerThread("writer")
    runtime._readers.shutdown()
    runtime._readers = ThreadPoolExecutor(1)


def stations(chapter: str) -> list[str]:
    """The files a chapter of the document names as stations, in order."""
    text = PAGE.read_text()
    part = re.search(rf"^## {chapter}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert part is not None, f"no chapter {chapter!r}"
    return re.findall(r"^\d+\. \*\*`penstock/([\w/]+\.py)`\*\*", part[1], re.MULTILINE)


def walked(order: list[str]) -> list[str]:
    return [name for name in order if name not in VOCABULARY]


async def walk(folder: Path) -> dict[str, list[str]]:
    """One event: published, delivered and acked, sealed."""
    flags = {"sealing__process": False, "sealing__enabled": False}
    async with penstock.connect(folder, **flags) as bus:
        await bus.publish("orders.created", {"id": 6})  # makes the topic
        with traced(bus) as published:
            await bus.publish("orders.created", {"id": 7})
        subscription = bus.subscribe("orders.*", group="billing")
        with traced(bus) as delivered:
            async with subscription as events:
                async for event in events:
                    await event.ack()
                    if event.offset == 1:
                        break
                await bus.flush()
    async with penstock.connect(folder, **flags) as bus:
        await bus.publish("orders.created", {"id": 8})  # each start begins a new journal file
        maintenance = bus.engine.maintenance
        maintenance._settings = msgspec.structs.replace(maintenance._settings, enabled=True)
        with traced(bus) as sealed:
            await maintenance.settle()
    return {"Publish": published, "Deliver": delivered, "Seal": sealed}


async def test_the_document_walks_the_way_of_an_event(tmp_path: Path) -> None:
    """Row Y13: the chapters of docs/architecture.md name the files in the order of the event."""
    for chapter, order in (await walk(tmp_path / "data")).items():
        change = difflib.unified_diff(stations(chapter), walked(order), "page", "code", lineterm="")
        text = "\n".join(change)
        assert not text, f"correct the chapter {chapter!r} of {PAGE.name}:\n{text}"


def test_every_package_is_introduced() -> None:
    """The document says of every package what it is."""
    text = PAGE.read_text()
    packages = {path.parent.name for path in (ROOT / "penstock").glob("*/__init__.py")}
    assert not {name for name in packages if f"`{name}`" not in text}

"""Coming back after a crash: from the folder to the first event in a consumer's hands."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.cases.workload import embedded, expect, open_bus
from penstock.bench.crash import GROUP, LEASE_S, SETTINGS, TOPIC, crash

if TYPE_CHECKING:
    from penstock.bench.case import Window
    from penstock.bench.measure import Sample

LEASED_EVENTS = 1_000_000
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PAGE_CACHE = "1"


async def recover(window: Window) -> Sample:
    """Open a folder with a million unacked leases, cold, and wait for the first delivery."""
    folder = window.folder / "bus"
    await crash(folder, LEASED_EVENTS)
    forget_cached(folder)
    bus = open_bus(folder, SETTINGS)
    subscription = bus.subscribe(TOPIC, group=GROUP, lease_s=LEASE_S)
    try:
        with window.meter() as meter:
            start = time.perf_counter()
            await bus.open()
            opened_s = time.perf_counter() - start
            await subscription.open()
            event = await anext(subscription)
            journal_bytes = embedded(bus).recovered.position
            meter.add(time.perf_counter() - start, 0, journal_bytes)
        expect((await bus.groups.info(GROUP)).lag, LEASED_EVENTS, "unacked")
        expect(event.attempt, 2, "deliveries of the first event")
    finally:
        await subscription.close()
        await bus.close()
    return meter.sample(leases=LEASED_EVENTS, open_ms=opened_s * 1000)


def forget_cached(folder: Path) -> None:
    """Make the next read come from the disk: drop the page cache, or just these files from it."""
    os.sync()
    try:
        DROP_CACHES.write_text(PAGE_CACHE)
    except OSError:  # not root, or in a container: the kernel does as much for single files
        for path in filter(Path.is_file, folder.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

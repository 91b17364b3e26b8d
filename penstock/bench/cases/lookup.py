"""Finding the patterns of a topic among a million."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.bench import route

if TYPE_CHECKING:
    from penstock.bench.case import Window
    from penstock.bench.measure import Sample


async def look_up(window: Window) -> Sample:
    """Random look-ups at a thousand and at a million patterns, in a process of its own.

    The latencies are the mean time of one look-up: single ones are shorter than the clock is fine.
    """
    with window.meter() as meter:
        figures = await asyncio.to_thread(route.measure)
        meter.add(1 / figures["per_s"])
    per_s = figures.pop("per_s")
    return replace(meter.sample(**figures), per_s=per_s)

"""Which engine declares which capability: docs/reference/capabilities.md."""

from __future__ import annotations

import tempfile
from pathlib import Path

import penstock
from penstock.testing import capabilities


async def page() -> str:
    """The Markdown of the page; makes a data folder and removes it."""
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            "mem:": await _declared("mem:"),
            "./path": await _declared(str(Path(folder) / "data")),
            "penstock://": penstock.connect("penstock://127.0.0.1").capabilities,
        }
    return capabilities.page(engines)


async def _declared(url: str) -> frozenset[str]:
    async with penstock.connect(url) as bus:
        return bus.capabilities

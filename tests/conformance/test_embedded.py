"""The embedded engine on a folder, held to the conformance suite (Y3, Y4)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance import *  # noqa: F403
from penstock.testing.conformance import UrlHarness


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[UrlHarness]:
    async with UrlHarness(str(tmp_path / "data"), CAPABILITIES) as harness:
        yield harness

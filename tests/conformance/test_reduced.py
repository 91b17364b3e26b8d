"""An engine without any capability: the core still holds, and each missing one is refused (Y3)."""

from collections.abc import AsyncIterator

import pytest_asyncio

from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance import *  # noqa: F403
from penstock.testing.conformance import UrlHarness


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[UrlHarness]:
    async with UrlHarness("mem:?without=" + ",".join(CAPABILITIES), ()) as harness:
        yield harness

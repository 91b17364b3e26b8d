"""The memory engine, held to the conformance suite (Y3, Y4)."""

from collections.abc import AsyncIterator

import pytest_asyncio

from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance import *  # noqa: F403
from penstock.testing.conformance import UrlHarness


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[UrlHarness]:
    async with UrlHarness("mem:", set(CAPABILITIES) - {"durable"}) as harness:
        yield harness

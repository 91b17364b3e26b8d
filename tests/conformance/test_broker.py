"""The broker engine against a real broker process, held to the conformance suite (Y3, Y4, T1, Q1).

Every test runs over TCP; `test_broker_zmq.py` runs them over ZeroMQ. One broker serves the whole
file: names are fresh in each test. A test that needs other settings gets a restarted broker.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance import *  # noqa: F403


class BrokerHarness:
    """Connections to one broker process."""

    capabilities = frozenset(CAPABILITIES)
    supports_second_connection = True

    def __init__(self, broker: BrokerProcess, transport: str) -> None:
        self.broker = broker
        self.transport = transport
        self._flags: dict[str, Any] = {}
        self._open: list[penstock.Bus] = []

    async def connect(self, **flags: Any) -> penstock.Bus:
        if flags != self._flags and flags:
            await self._again(flags)
        bus = await penstock.connect(self.broker.url(self.transport), **flags).open()
        self._open.append(bus)
        return bus

    async def restart(self) -> None:
        await self._again(self._flags)

    async def _again(self, flags: dict[str, Any]) -> None:
        await self.close()
        assert self.broker.stop() == 0
        self.broker.start(**flags)
        self._flags = flags

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker


@pytest_asyncio.fixture
async def harness(broker: BrokerProcess) -> AsyncIterator[BrokerHarness]:
    harness = BrokerHarness(broker, "tcp")
    yield harness
    await harness.close()
    if harness._flags:
        await harness._again({})

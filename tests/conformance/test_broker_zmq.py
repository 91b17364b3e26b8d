"""The broker engine over ZeroMQ, held to the conformance suite (T1, Y3)."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from penstock.testing.broker_harness import BrokerHarness
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.conformance import *  # noqa: F403


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker


@pytest_asyncio.fixture
async def harness(broker: BrokerProcess) -> AsyncIterator[BrokerHarness]:
    harness = BrokerHarness(broker, "zmq")
    yield harness
    await harness.close()
    await harness.plain()

"""The broker engine against a real broker process, held to the conformance suite (Y3, Y4, T1, Q1).

Every test runs over TCP; `test_broker_zmq.py` runs them over ZeroMQ. One broker serves the whole
file: names are fresh in each test. A test that needs other settings gets a restarted broker.
"""

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
    harness = BrokerHarness(broker, "tcp")
    yield harness
    await harness.close()
    await harness.plain()

"""The conformance suite: what every engine promises, as tests that anyone can run.

An engine's test module brings a fixture named `harness` (see `Harness`) and imports the classes:

    import pytest_asyncio
    from penstock.testing.conformance import *

    @pytest_asyncio.fixture
    async def harness():
        async with UrlHarness("mem:", capabilities={"ttl", "priority"}) as harness:
            yield harness

Classes without a capability are the mandatory core. The others run where their capability is
declared; where it is not, one test of each checks that the engine refuses with `Unsupported`.
docs/reference/conformance.md lists every sentence the suite proves.
"""

import pkgutil

import pytest

# Failing asserts of the suite explain themselves in every engine's tests, not only in ours.
pytest.register_assert_rewrite(
    *(f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__))
)

# ruff: noqa: E402
from penstock.testing.conformance.cursors import TestCursors, TestReplay
from penstock.testing.conformance.declared_admin import (
    TestAudit,
    TestGroupReset,
    TestGrowPartitions,
    TestRoutes,
    TestWriteOnce,
)
from penstock.testing.conformance.declared_durable import TestDurable
from penstock.testing.conformance.declared_letters import TestDeadLetterReplay
from penstock.testing.conformance.declared_order import (
    TestFilters,
    TestKeyOrder,
    TestPriority,
    TestSingleActive,
)
from penstock.testing.conformance.declared_publish import TestIdempotency, TestRequestReply
from penstock.testing.conformance.declared_time import (
    TestDelayed,
    TestSchedules,
    TestTimeReplay,
    TestTtl,
)
from penstock.testing.conformance.declared_transactions import TestTransactions
from penstock.testing.conformance.groups import TestConnections, TestCredit, TestGroups
from penstock.testing.conformance.handling import TestHandlers
from penstock.testing.conformance.harness import Harness, UrlHarness
from penstock.testing.conformance.lifecycle import (
    TestGroupAdministration,
    TestLifecycle,
    TestTopics,
)
from penstock.testing.conformance.publishing import TestPublishing
from penstock.testing.conformance.refusals import TestRefusals
from penstock.testing.conformance.retrying import TestRetrying
from penstock.testing.conformance.settling import TestSettling

__all__ = [
    "Harness",
    "TestAudit",
    "TestConnections",
    "TestCredit",
    "TestCursors",
    "TestDeadLetterReplay",
    "TestDelayed",
    "TestDurable",
    "TestFilters",
    "TestGroupAdministration",
    "TestGroupReset",
    "TestGroups",
    "TestGrowPartitions",
    "TestHandlers",
    "TestIdempotency",
    "TestKeyOrder",
    "TestLifecycle",
    "TestPriority",
    "TestPublishing",
    "TestRefusals",
    "TestReplay",
    "TestRequestReply",
    "TestRetrying",
    "TestRoutes",
    "TestSchedules",
    "TestSettling",
    "TestSingleActive",
    "TestTimeReplay",
    "TestTopics",
    "TestTransactions",
    "TestTtl",
    "TestWriteOnce",
    "UrlHarness",
]

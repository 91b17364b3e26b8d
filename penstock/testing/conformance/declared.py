"""The two sides of a capability: it works where declared, and is refused by name where it is not."""

from __future__ import annotations

from typing import ClassVar

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.harness import Contract, Harness

REFUSAL = "test_refused_when_not_declared"


class Declared(Contract):
    """Tests of one capability. Subclasses name it and say which call needs it."""

    capability: ClassVar[str]

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """The call that an engine without the capability refuses."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest, harness: Harness) -> None:
        declared = self.capability in harness.capabilities
        refusal = request.node.originalname == REFUSAL
        if declared == refusal:
            pytest.skip(f"{self.capability} is {'' if declared else 'not '}declared")

    async def test_refused_when_not_declared(
        self, bus: penstock.Bus, topic: str, group: str
    ) -> None:
        """An engine that does not declare it raises Unsupported from the call that needs it."""
        with pytest.raises(errors.Unsupported) as refused:
            await self.call(bus, topic, group)
        assert refused.value.code == "refused.unsupported"

"""How the conformance suite reaches a broker: a real process, over either transport."""

from __future__ import annotations

from typing import Any

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.capabilities import CAPABILITIES


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
        """A new connection; settings that the broker does not have yet restart it."""
        if flags != self._flags and flags:
            await self._again(flags)
        bus = await penstock.connect(self.broker.url(self.transport), **flags).open()
        self._open.append(bus)
        return bus

    async def restart(self) -> None:
        """Close every connection, drain the broker and start it again."""
        await self._again(self._flags)

    async def _again(self, flags: dict[str, Any]) -> None:
        await self.close()
        code = self.broker.stop()
        if code:
            raise RuntimeError(f"the broker ended with {code}")
        self.broker.start(**flags)
        self._flags = flags

    async def plain(self) -> None:
        """Back to the settings the other tests expect."""
        if self._flags:
            await self._again({})

    async def close(self) -> None:
        """Close every connection."""
        while self._open:
            await self._open.pop().close()

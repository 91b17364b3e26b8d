"""Daemon: everything `penstock up` runs, started and stopped in order."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.engines.embedded import EmbeddedEngine
from penstock.log.disk import RealDisk
from penstock.model.errors import InvalidSettings
from penstock.model.settings import Settings
from penstock.server.auth import Doorkeeper
from penstock.server.broker import Broker
from penstock.server.metrics_counters import Counters
from penstock.server.reload import broker_settings
from penstock.server.tcp import TcpServer

log = logging.getLogger("penstock.server")


class Daemon:
    """A broker on a folder, with its listeners."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self.folder = Path(folder)
        self.settings = broker_settings(settings)
        self.ports: dict[str, int] = {}
        self.ready = False
        self.engine = EmbeddedEngine(RealDisk(self.folder), self.settings)
        self.engine.lease_hold_s = self.settings.server.session_s
        self.counters = Counters()
        self.doorkeeper = Doorkeeper(self.settings.auth)
        self.broker = Broker(self.engine, self.settings, self.doorkeeper, self.counters)
        self._tcp = TcpServer(self.settings, self.broker)

    async def start(self) -> None:
        """Recover the folder, then listen."""
        await self.engine.open()
        try:
            self.broker.start()
            server = self.settings.server
            if server.tcp:
                self.ports["tcp"] = await self._tcp.start(*address(server.tcp))
        except BaseException:
            await self.stop()
            raise
        self.ready = True

    async def stop(self) -> None:
        """Drain: no new clients, answers to what was asked, then everything down."""
        self.ready = False
        await self.broker.drain(self.settings.server.drain_s)
        await self._tcp.stop()
        await self.engine.close()


def address(text: str) -> tuple[str, int]:
    """Host and port of an address.

    >>> address("127.0.0.1:5557"), address("[::1]:0")
    (('127.0.0.1', 5557), ('::1', 0))
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise InvalidSettings(
            f"{text!r} is no address; write host:port, such as 127.0.0.1:5557", value=text
        )
    return host.strip("[]"), int(port)

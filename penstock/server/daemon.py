"""Everything that `penstock up` runs, started and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from penstock.bus import tracing
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.runtime import Runtime
from penstock.log.disk import RealDisk
from penstock.model.errors import DiskFull
from penstock.model.settings import Settings
from penstock.server import readiness as descriptors
from penstock.server.admin.endpoint import AdminContext
from penstock.server.admin.http import HttpServer, build_app
from penstock.server.auth import Authenticator
from penstock.server.broker import Broker
from penstock.server.metrics.counters import Counters
from penstock.server.metrics.engine_stats import Troubles
from penstock.server.metrics.pressure import PressureMonitor, pressure_routes
from penstock.server.metrics.prometheus import Metrics, metrics_routes
from penstock.server.ports import parse_address
from penstock.server.readiness import obstacles
from penstock.server.reload import broker_settings
from penstock.server.transports.fanout import Fanout
from penstock.server.transports.tcp import TcpServer
from penstock.server.transports.zeromq import ZmqServer

log = logging.getLogger("penstock.server")


class Daemon:
    """A broker on a folder, with its listeners."""

    def __init__(self, folder: str | Path, settings: Settings) -> None:
        self.folder = Path(folder)
        self.settings, self._client_room = descriptors.within_limit(broker_settings(settings))
        if self.settings.server.max_connections < settings.server.max_connections:
            log.warning(
                "open files leave room for fewer clients",
                extra={"clients": self._client_room, "allowed": settings.server.max_connections},
            )
        self.ports: dict[str, int] = {}
        self.ready = False
        # The loop never waits for a sync: the broker must answer probes even while the disk hangs.
        self.engine = EmbeddedEngine(RealDisk(self.folder), self.settings, runtime=Runtime())
        self.engine.lease_hold_s = self.settings.server.session_s
        self.counters = Counters()
        self.authenticator = Authenticator(self.settings.auth)
        self.broker = Broker(self.engine, self.settings, self.authenticator, self.counters)
        self.broker.obstacles = self.obstacles
        self._tcp = TcpServer(
            self.settings, self.broker, self.broker.fastpath, self.broker.courtesy,
            self.broker.client_bytes,
        )  # fmt: skip
        self._zmq = ZmqServer(self.settings, self.broker, self.broker.client_bytes)
        self._fanout = Fanout(self.settings, self.counters)
        self._http: HttpServer | None = None
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Recover the folder, then listen: HTTP first, so that probes see the broker starting."""
        telemetry = self.settings.telemetry
        if telemetry.otlp_endpoint:
            tracing.configure(telemetry.otlp_endpoint, "penstock", telemetry.sample_ratio)
        await self.engine.open()
        try:
            with contextlib.suppress(DiskFull):  # `/ready` reports it; stored events can be read
                await self.engine.flush()  # allocates the first journal file
            self.broker.start()
            self._run_in_background(Troubles().watch(self.engine), "penstock-troubles")
            server = self.settings.server
            if server.http:
                self.ports["http"] = await self._serve_http(server.http)
            if server.pub:
                self.ports["pub"] = self._fanout.start(*parse_address(server.pub, "server.pub"))
                self.engine.on_commit = self._fanout.committed
            if server.zmq:
                address = parse_address(server.zmq, "server.zmq")
                self.ports["zmq"] = await self._zmq.start(*address)
            if server.tcp:
                address = parse_address(server.tcp, "server.tcp")
                self.ports["tcp"] = await self._tcp.start(*address)
        except BaseException:
            await self.stop()
            raise
        self.ready = True

    async def _serve_http(self, listen: str) -> int:
        monitor = PressureMonitor(self.engine, self.counters)
        self._run_in_background(monitor.run(), "penstock-gauge")
        metrics = Metrics(
            self.engine, self.counters, monitor, self.broker.fastpath, self.broker.client_bytes
        )
        context = AdminContext(
            self.engine, self.settings, self.authenticator,
            obstacles=self.obstacles,
            ask=self.broker.ask,
        )  # fmt: skip
        app = build_app(context, [*metrics_routes(metrics.collect), *pressure_routes(monitor.read)])
        host, port = parse_address(listen, "server.http")
        server = self.settings.server
        self._http = HttpServer(
            app, host, port, tls_certificate=server.tls_certificate, tls_key=server.tls_key,
            tls_client_ca=server.tls_client_ca,
        )  # fmt: skip
        return await self._http.start()

    def obstacles(self) -> list[str]:
        """The reasons why a client cannot publish at the moment."""
        if not self.ready or self.broker.draining:
            return ["draining" if self.broker.draining else "starting"]
        return obstacles(
            self.engine, clients=len(self.broker.connections),
            most_clients=self.settings.server.max_connections, room=self._client_room,
        )  # fmt: skip

    def _run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._background.append(asyncio.create_task(work, name=name))

    async def stop(self) -> None:
        """Drain (no new clients, answers to open requests), then stop everything."""
        self.ready = False
        await self.broker.drain(self.settings.server.drain_s)
        await self._tcp.stop()
        await self._zmq.stop()
        self.engine.on_commit = None
        self._fanout.stop()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        await self.engine.close()
        if self.settings.telemetry.otlp_endpoint:
            await asyncio.to_thread(tracing.shutdown)

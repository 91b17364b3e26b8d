"""The TCP transport of the broker: it listens, and keeps the connections."""

from __future__ import annotations

import asyncio
import logging

from penstock.model.errors import InvalidSettings
from penstock.model.settings import Settings
from penstock.server.client_bytes import ClientBytes, limit_of
from penstock.server.courtesy import Courtesy
from penstock.server.descriptors import STRANGERS, most_sockets
from penstock.server.fastpath import FastPath
from penstock.server.link import Connections
from penstock.server.log_quota import LogQuota
from penstock.server.tcp_link import HANDSHAKE_S, LINGER_S, TcpLink
from penstock.server.tls import server_tls
from penstock.server.tls_listener import TlsListener
from penstock.wire.stream import SCRATCH_BYTES

log = logging.getLogger("penstock.server.tcp")

BACKLOG = 512
# Connections that are still shaking hands, beyond server.max_connections.
MAX_STRANGERS = STRANGERS
LOOK_AGAIN_S = 0.01


class TcpServer:
    """Listens, and keeps the links."""

    def __init__(
        self,
        settings: Settings,
        broker: Connections,
        fastpath: FastPath | None = None,
        courtesy: Courtesy | None = None,
        client_bytes: ClientBytes | None = None,
    ) -> None:
        self.settings = settings
        self.fastpath = fastpath
        self.courtesy = courtesy
        self.broker = broker
        self.client_bytes = client_bytes or ClientBytes(limit_of(settings.server))
        self.links: set[TcpLink] = set()
        self.scratch = bytearray(SCRATCH_BYTES)
        self.refusals = LogQuota(log)
        self._server: asyncio.Server | TlsListener | None = None
        self._most = most_sockets(settings.server.max_connections, MAX_STRANGERS)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which port 0 leaves to the operating system."""
        context = server_tls(self.settings.server)
        try:
            if context is not None:
                secure = TlsListener(context, lambda: TcpLink(self), self._crowded, self.refusals)
                await secure.start(host, port, BACKLOG, HANDSHAKE_S)
                self._server = secure
                return secure.port
            self._server = await asyncio.get_running_loop().create_server(
                lambda: TcpLink(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            raise InvalidSettings(
                f"server.tcp: cannot listen on {host}:{port}: {error}. Stop whoever has the port, "
                "or set another address; port 0 takes any free one",
                key="server.tcp",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and end every connection, sending what is queued."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for link in list(self.links):
            link.close()
        for _ in range(int(LINGER_S / LOOK_AGAIN_S)):
            if not self.links:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        for link in list(self.links):
            link.abort("the broker stops")
        await server.wait_closed()

    @property
    def full(self) -> bool:
        """Whether so many sockets are open that no stranger is let in."""
        return self._crowded(0)

    def _crowded(self, shaking: int) -> bool:
        """The same, beside those who are still shaking hands for TLS."""
        return len(self.links) + shaking >= self._most

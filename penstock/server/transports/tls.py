"""TLS of the broker: its settings as a context, and a listener that limits open handshakes.

asyncio reports a connection when its handshake is done. Until then a client that sends nothing would cost
a descriptor and 50 KB, and there could be any number of them. So `TlsListener` accepts connections itself,
and closes new ones when too many are open.
"""

from __future__ import annotations

import asyncio
import logging
import socket as net
import ssl
from collections.abc import Callable

from penstock.model.errors import InvalidSettings
from penstock.model.settings import Server
from penstock.server.logs import LogQuota

log = logging.getLogger("penstock.server.tcp")

# Accepting pauses for this long when the system has no descriptor left.
PAUSE_S = 0.1


def server_tls(server: Server) -> ssl.SSLContext | None:
    """A context with the configured certificate; None when there is none."""
    if not server.tls_certificate:
        if server.tls_key or server.tls_client_ca:
            raise InvalidSettings(
                "server.tls_key and server.tls_client_ca need server.tls_certificate; set it, or "
                "clear them to speak plain TCP",
                key="server.tls_certificate",
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would ask the terminal for one, and wait.
        context.load_cert_chain(server.tls_certificate, server.tls_key or None, password="")
        if server.tls_client_ca:
            context.load_verify_locations(server.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettings(
            f"TLS cannot start: {error}; look at server.tls_certificate, server.tls_key and "
            "server.tls_client_ca: PEM files that belong together, the key without a password",
            key="server.tls_certificate",
        ) from error
    return context


class TlsListener:
    """Accepts connections and does their handshakes; `make` is called for each that succeeds."""

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.BaseProtocol],
        full: Callable[[int], bool],
        refusals: LogQuota,
    ) -> None:
        self.port = 0
        self._context = context
        self._make = make
        self._full = full
        """Told the number of open handshakes; True when no more connections are accepted."""
        self._refusals = refusals
        self._listening: list[net.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, backlog: int, handshake_s: float) -> None:
        """Listen on every address of the host; raises OSError."""
        loop = asyncio.get_running_loop()
        self.port = port
        found = await loop.getaddrinfo(
            host or None, port, type=net.SOCK_STREAM, flags=net.AI_PASSIVE
        )
        try:
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                place = (address[0], self.port, *address[2:])
                listening = net.create_server(place, family=family, backlog=backlog)
                listening.setblocking(False)
                self._listening.append(listening)
                self.port = int(listening.getsockname()[1])
        except BaseException:
            for listening in self._listening:
                listening.close()
            raise
        self._accepting = [
            loop.create_task(self._accept(each, handshake_s)) for each in self._listening
        ]

    def close(self) -> None:
        """Accept no more connections, and drop open handshakes."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is under way."""
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self, listening: net.socket, handshake_s: float) -> None:
        with listening:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                except OSError as error:
                    self._refusals.warning("no connection can be accepted", reason=str(error))
                    await asyncio.sleep(PAUSE_S)
                    continue
                self._admit(connection, handshake_s)
                await asyncio.sleep(0)  # many connections may wait, and other tasks need the loop

    def _admit(self, connection: net.socket, handshake_s: float) -> None:
        if self._full(len(self._handshakes)):
            connection.close()
            return
        task = asyncio.create_task(self._handshake(connection, handshake_s))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, connection: net.socket, handshake_s: float) -> None:
        peer = _peer(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:  # among them errors of TLS and timeouts
            connection.close()
            if isinstance(error, ssl.SSLError):  # the client spoke TLS, and is rejected
                self._refusals.warning("client refused", peer=peer, reason=str(error))
            else:
                log.debug("no handshake", extra={"reason": str(error)})


def _peer(connection: net.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # the client has gone
        return "?"
    return f"{host}:{port}"

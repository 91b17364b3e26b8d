"""TLS of the broker, as its settings want it.

Listening with TLS: who is still shaking hands counts, too.

asyncio tells its protocol of a connection when the handshake is done. Until then a client that says
nothing would cost a descriptor and 50 KB, and there could be any number of them; so connections are
accepted here, and turned away when too many are open.
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

# -- tls ------------------------------------------------------------------------------------------


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


# -- tls_listener ---------------------------------------------------------------------------------


log = logging.getLogger("penstock.server.tcp")

# No more is accepted for this long when the system has no descriptor left.
PAUSE_S = 0.1


class TlsListener:
    """Accepts connections and shakes hands; `make` is called for each that comes so far."""

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
        """Told how many are shaking hands, says whether nobody more is let in."""
        self._refusals = refusals
        self._listening: list[net.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()

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
        """Take nobody new, and let go of those who are not in yet."""
        for task in (*self._accepting, *self._shaking):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is under way."""
        await asyncio.gather(*self._accepting, *self._shaking, return_exceptions=True)

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
                await asyncio.sleep(0)  # the next may be there already, and others want the loop

    def _admit(self, connection: net.socket, handshake_s: float) -> None:
        if self._full(len(self._shaking)):
            connection.close()
            return
        task = asyncio.create_task(self._shake(connection, handshake_s))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _shake(self, connection: net.socket, handshake_s: float) -> None:
        peer = _peer(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:  # those of TLS and of time are some, too
            connection.close()
            if isinstance(error, ssl.SSLError):  # it spoke, and is not let in
                self._refusals.warning("client refused", peer=peer, reason=str(error))
            else:
                log.debug("no handshake", extra={"reason": str(error)})


def _peer(connection: net.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it is gone again
        return "?"
    return f"{host}:{port}"

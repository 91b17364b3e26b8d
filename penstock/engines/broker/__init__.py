"""The engine of a bus behind a broker, over TCP, TLS or ZeroMQ.

`engine.py` has the methods of `Engine`, answers to administration among them, since the broker gives
those; `channel.py` is the session, `tcp.py` and `zeromq.py` its connections, `publisher.py` sends drafts,
`consumer.py` holds what was delivered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.model.errors import UnknownScheme

if TYPE_CHECKING:  # imported on use: most programs that connect to a folder need none of it
    from penstock.engines.broker.engine import BrokerEngine
    from penstock.engines.broker.tcp import ClientLink
    from penstock.engines.credential import Token
    from penstock.model.event import Identity
    from penstock.model.settings import Settings

__all__ = ["engine_for"]


def engine_for(
    scheme: str,
    address: str,
    settings: Settings,
    identity: Identity,
    client: str,
    token: Token | None = None,
) -> BrokerEngine:
    """An engine for the broker at an address; it connects when it is opened.

    Raises MissingExtra, which names the pip command, when ZeroMQ is wanted and pyzmq is missing.
    """
    from penstock.engines.broker.engine import BrokerEngine
    from penstock.engines.credential import Credential

    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UnknownScheme(f"{address!r} is no host and port: {error}", url=address) from None
    name = client or f"{socket.gethostname()}.{os.getpid()}"
    make_link = _links(scheme, host, port, settings)
    return BrokerEngine(make_link, settings, identity, name, Credential(settings.client, token))


def _links(
    scheme: str, host: str, port: int | None, settings: Settings
) -> Callable[[], ClientLink]:
    """A function that makes a new, unopened connection at each call."""
    client = settings.client
    if scheme == "penstock+zmq":
        from penstock.engines.broker import zeromq

        return lambda: zeromq.ZmqLink(
            host, port or zeromq.DEFAULT_PORT, server_key=client.curve_server_key,
            secret_key=client.curve_secret_key,
        )  # fmt: skip
    from penstock.engines.broker import tcp

    context = None
    if scheme == "penstocks":
        context = tcp.client_tls(client.tls_ca, client.tls_certificate, client.tls_key)
    return lambda: tcp.TcpLink(
        host, port or tcp.DEFAULT_PORT, compressor=client.compressor, tls_context=context
    )

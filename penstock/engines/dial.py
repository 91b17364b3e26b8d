"""Dialling: from the address of a broker to an engine that talks to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from penstock.engines.broker import BrokerEngine
from penstock.engines.credential import Credential, Token
from penstock.engines.link import ClientLink
from penstock.engines.link_tcp import TcpLink, client_tls
from penstock.model.errors import UnknownScheme
from penstock.model.event import Identity
from penstock.model.settings import Settings

TCP_PORT = 5557
ZMQ_PORT = 5555


def broker_engine(
    scheme: str,
    address: str,
    settings: Settings,
    identity: Identity,
    client: str,
    token: Token | None = None,
) -> BrokerEngine:
    """An engine for a broker; nothing is connected before it is opened."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UnknownScheme(f"{address!r} is no host and port: {error}", url=address) from None
    name = client or f"{socket.gethostname()}.{os.getpid()}"
    make_link = _dialler(scheme, host, port, settings)
    return BrokerEngine(make_link, settings, identity, name, Credential(settings.client, token))


def _dialler(
    scheme: str, host: str, port: int | None, settings: Settings
) -> Callable[[], ClientLink]:
    client = settings.client
    if scheme == "penstock+zmq":
        from penstock.engines.link_zmq import ZmqLink

        return lambda: ZmqLink(
            host, port or ZMQ_PORT, server_key=client.curve_server_key,
            secret_key=client.curve_secret_key,
        )  # fmt: skip
    tls = None
    if scheme == "penstocks":
        tls = client_tls(client.tls_ca, client.tls_certificate, client.tls_key)
    return lambda: TcpLink(host, port or TCP_PORT, compressor=client.compressor, tls_context=tls)

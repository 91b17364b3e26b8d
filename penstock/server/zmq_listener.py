"""Listening with ZeroMQ: the options that all our bound sockets share, and binding them."""

from __future__ import annotations

import ipaddress
import socket as net

from penstock.engines.zmq_library import Socket, endpoint, keep_alive, zmq
from penstock.model.errors import InvalidSettings

BACKLOG = 512
# From connecting to the end of the handshake.
HANDSHAKE_S = 10.0
# A client that takes nothing at all for so long loses its connection, and so does one behind a
# cable that was pulled.
STALLED_S = 60.0


def configure(socket: Socket) -> None:
    """What holds for every listener; call it before `bind`."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.BACKLOG, BACKLOG)
    socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1_000))
    socket.set(zmq.TCP_MAXRT, int(STALLED_S * 1_000))
    keep_alive(socket)
    # No limit to what libzmq reads ahead either: it would end the process in answering a PING that
    # came before the connection broke. Peers look after what is ahead.
    socket.set(zmq.RCVHWM, 0)


def bind(socket: Socket, host: str, port: int, setting: str) -> int:
    """Listen on an address; returns the port, which port 0 leaves to the operating system."""
    try:
        address = _address(host)
        socket.set(zmq.IPV6, int(":" in address))
        socket.bind(endpoint(address, port))
    except (OSError, zmq.ZMQError) as error:
        raise InvalidSettings(
            f"{setting}: cannot listen on {host}:{port}: {error}. Stop whoever has the port, or "
            "set another address; port 0 takes any free one",
            key=setting,
        ) from error
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return int(bound.decode().rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Whether an address is reached without a network.

    >>> is_loopback("127.0.0.1"), is_loopback("::ffff:127.0.0.1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _address(host: str) -> str:
    """libzmq binds to numbers and interfaces, not to names."""
    if not host or host == "*":
        return "*"
    found = net.getaddrinfo(host, None, type=net.SOCK_STREAM, flags=net.AI_PASSIVE)
    return str(min(found, key=lambda each: each[0] != net.AF_INET)[4][0])

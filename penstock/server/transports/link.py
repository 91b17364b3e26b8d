"""The seam between transports and the broker: a link to a client, and the broker's side of it.

A transport implements `Link` for each client, asks the broker (`Connections`) for a `Connection`, and
passes frames to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Protocol

from penstock.model.errors import Rejected
from penstock.wire.frame import Frame

# Bytes of one client's requests without an answer. Above that, reading from it pauses over TCP; over
# ZeroMQ, where reading from one client cannot pause, requests are refused.
UNANSWERED_BYTES = 64 << 20


class Link(Protocol):
    """One client, as its transport shows it to the broker."""

    peer: str
    """Where the client is, for logs."""
    loopback: bool
    """Whether the client is on this host, reached without a network."""

    def send(self, frame: Frame) -> None:
        """Queue a frame; never waits. After `close` it does nothing."""
        ...

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        ...

    def rest(self, seconds: float) -> None:
        """Read nothing from the client for a while, where it has a connection to itself."""
        ...

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        ...


class Connection(Protocol):
    """One client, as the broker shows it to the transport."""

    @property
    def tenant(self) -> str:
        """The client's tenant; "" before its Welcome."""
        ...

    def received(self, frame: Frame) -> None:
        """A frame arrived."""
        ...

    def lost(self, reason: str, *, closed: bool = False) -> None:
        """The connection is gone; called once for each connection.

        `closed`: the client's side has ended it, at least its operating system.
        """
        ...


class Connections(Protocol):
    """The part of the broker that a transport uses."""

    def connected(self, link: Link) -> Connection:
        """A connection for a link; raises when there are too many."""
        ...

    def failed(self, error: Exception) -> None:
        """Count a message that a transport answers with an error, because it cannot read or accept it."""
        ...

    def refused(self, error: Rejected) -> None:
        """The same for a message over a limit, which also counts as a refusal."""
        ...


def peer_of(transport: asyncio.Transport) -> tuple[str, bool]:
    """Where a client is, and whether that is this host."""
    name = transport.get_extra_info("peername")
    if not name:
        return "?", False
    host, port = name[0], name[1]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return f"{host}:{port}", False
    return f"{host}:{port}", address.is_loopback

"""Link: one connection of one client, whatever carries it."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Protocol

from penstock.model.errors import Rejected
from penstock.wire.frame import Frame

# Of one client's requests that wait for answers: beyond, no more is read from it over TCP, and over
# ZeroMQ, where nobody can stop reading from one client, it is told to come again.
UNANSWERED_BYTES = 64 << 20


class Link(Protocol):
    """What the broker asks of a transport."""

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
    """What the broker gives for a link."""

    @property
    def tenant(self) -> str:
        """Whom the client speaks for; nobody before its welcome."""
        ...

    def received(self, frame: Frame) -> None:
        """A frame arrived."""
        ...

    def lost(self, reason: str, *, closed: bool = False) -> None:
        """The connection is gone; called once for each connection.

        `closed`: the client's side has ended it, its operating system at the least.
        """
        ...


class Connections(Protocol):
    """What a transport asks of the broker."""

    def connected(self, link: Link) -> Connection:
        """A connection for a link; raises when there are too many."""
        ...

    def failed(self, error: Exception) -> None:
        """Count what a transport answers with an error because it could not read or take it."""
        ...

    def refused(self, error: Rejected) -> None:
        """The same for what it did not take because of a limit: it is a refusal, too."""
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

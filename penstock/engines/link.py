"""ClientLink: the way from a client engine to a broker, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.wire.frame import Frame


class ClientLink(Protocol):
    """What the client engine asks of a transport. One object is one connection; it is not reused."""

    async def open(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """Connect; raises BrokerUnreachable, ProtocolViolation or WrongProtocolVersion.

        `on_lost` is called once when the connection breaks, and not after `close`.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame; never waits. After the connection is gone it does nothing."""
        ...

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...

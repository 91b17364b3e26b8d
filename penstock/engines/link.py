"""ClientLink: the way from a client engine to a broker, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.model.errors import PayloadTooLarge, ProtocolViolation
from penstock.wire.bound import check_message
from penstock.wire.frame import MAX_PARTS, Frame

# As the default of server.max_frame_bytes: what holds until the broker says otherwise.
MAX_FRAME_BYTES = 320 << 20


class ClientLink(Protocol):
    """What the client engine asks of a transport. One object is one connection; it is not reused."""

    max_frame_bytes: int
    """Largest frame the broker takes; the engine sets what its Welcome says."""

    async def open(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """Connect; raises BrokerUnreachable, ProtocolViolation or WrongProtocolVersion.

        `on_lost` is called once when the connection breaks, and not after `close`.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame; never waits. After the connection is gone it does nothing.

        Raises PayloadTooLarge where the broker would cut the connection: the frame would be sent
        again over the next one, and cut that as well.
        """
        ...

    def push(self) -> None:
        """Let the operating system have what is queued now, so that it goes out if the process dies.

        ZeroMQ sends in a thread of its own, a moment later.
        """
        ...

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


def check_size(frame: Frame, size_bytes: int, limit_bytes: int) -> None:
    """Raise PayloadTooLarge for a frame that takes more, with all its lengths, than a broker reads.

    So is one whose message does: it would be refused there, and its settlements or events with it.
    """
    if size_bytes > limit_bytes:
        raise PayloadTooLarge(
            f"a frame of {size_bytes} bytes is over the broker's server.max_frame_bytes of "
            f"{limit_bytes}; nothing was sent. Publish less at once",
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
        )
    if len(frame.parts) > MAX_PARTS:
        raise PayloadTooLarge(
            f"a frame of {len(frame.parts)} batches is over the {MAX_PARTS} that a broker reads; nothing "
            "was sent. Publish less at once",
            parts=len(frame.parts),
            limit_parts=MAX_PARTS,
        )
    try:
        check_message(frame)
    except ProtocolViolation as error:
        raise PayloadTooLarge(f"nothing was sent: {error.message}", **error.data) from None

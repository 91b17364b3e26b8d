"""RouterLink: one client of the ZeroMQ server, known by its routing identity."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.engines.zmq_outbox import ZmqOutbox
from penstock.model.errors import Deferred
from penstock.server.link import UNANSWERED_BYTES
from penstock.server.zmq_peers import Peer
from penstock.wire.fault import to_fault
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import encode

if TYPE_CHECKING:
    from penstock.server.zeromq import ZmqServer

# Unread bytes of a client, as a multiple of server.send_buffer_bytes, at which it is cut off.
ABORT_FACTOR = 4
# Requests of this size are counted until they are answered.
COUNTED_BYTES = 4 << 10
UNANSWERED_LIMIT = "unanswered_bytes"  # its name in errors and counters
RETRY_AFTER_S = 0.1
# What the last frames of a link get to leave: at most, and after libzmq seems to have sent them.
LINGER_S = 2.0
SETTLE_S = 0.1


class RouterLink:
    """What the broker knows of a client over ZeroMQ: a Link."""

    __slots__ = (
        "_largest_bytes", "_limit_bytes", "_loop", "_outbox", "_reason", "_server", "_timer",
        "_unanswered", "_unanswered_bytes", "closed", "connection", "identity", "leaving", "loopback", "peer", "source",
    )  # fmt: skip

    def __init__(
        self, server: ZmqServer, outbox: ZmqOutbox, identity: bytes, source: Peer, loopback: bool
    ) -> None:
        self.identity = identity
        self.source = source
        self.peer = source.name
        self.loopback = loopback
        self.connection: Any = None
        self.closed = False
        """Frames neither go out nor come in any more."""
        self.leaving = False
        """Its connection has ended; what it sent before is still being read."""
        self._server = server
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._limit_bytes = ABORT_FACTOR * server.settings.server.send_buffer_bytes
        self._largest_bytes = 0
        self._unanswered: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def send(self, frame: Frame) -> None:
        """Queue a frame; a client that leaves too much unread is cut off instead."""
        if self.closed or self.leaving:
            return
        if frame.request in self._unanswered:
            self._unanswered_bytes -= self._unanswered.pop(frame.request)
        if frame.kind == Kind.WELCOME and self.source.stranger:
            self._server.peers.welcome(self.source)
        self._outbox.put(frame.multipart())
        pending = self._outbox.pending_bytes()
        # One frame may be as large as it likes; it is what piles up behind it that counts.
        self._largest_bytes = max(frame.size_bytes, self._largest_bytes) if pending else 0
        if pending - self._largest_bytes > self._limit_bytes:
            self.closed = True
            self._reason = f"the client left {pending} bytes unread"
            self._cut(gently=False)

    def received(self, frame: Frame) -> None:
        """Pass a frame on to the broker, unless too much of this client waits there already."""
        if frame.request and frame.size_bytes >= COUNTED_BYTES:
            if self._unanswered_bytes > UNANSWERED_BYTES:
                error = Deferred(
                    f"{self._unanswered_bytes} bytes of this client's requests wait for answers; "
                    "this one was not taken. Wait for some, then send it again",
                    retry_after_s=RETRY_AFTER_S,
                    limit=UNANSWERED_LIMIT,
                    tenant=self.connection.tenant,
                )
                self._server.broker.refused(error)
                self.send(Frame(Kind.FAULT, frame.request, encode(to_fault(error))))
                return
            if frame.request not in self._unanswered:
                self._unanswered[frame.request] = frame.size_bytes
                self._unanswered_bytes += frame.size_bytes
        self.connection.received(frame)

    def rest(self, seconds: float) -> None:
        """All clients share one socket: none can be made to wait alone."""

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        return self._outbox.pending_bytes()

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        self.end("the broker closed the connection")

    def end(self, reason: str) -> None:
        """Close, with a reason for the log."""
        if self.closed:
            return
        self.closed = True
        self._reason = reason
        self._settle(self._loop.time() + LINGER_S)

    def lost(self, reason: str) -> None:
        """The connection is no more: tell the broker, once."""
        by_client, self.closed = not self.closed, True
        self._outbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.lost(self._reason or reason, closed=by_client)

    def _settle(self, until_s: float) -> None:
        taken = not self._outbox.pending_bytes()
        if taken or self._loop.time() > until_s:
            self._timer = self._loop.call_later(SETTLE_S, self._cut, taken)
        else:
            self._timer = self._loop.call_later(SETTLE_S, self._settle, until_s)

    def _cut(self, gently: bool) -> None:
        self._outbox.clear()
        self._server.peers.cut(self.source, self._reason, gently=gently)

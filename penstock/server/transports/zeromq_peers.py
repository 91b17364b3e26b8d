"""The connections of a listening ZeroMQ socket, and the means to end one of them.

libzmq neither lists its clients nor disconnects one; it checks the size of parts but not of messages, and
holds a message back until it is complete. `Peers` adds all of that through the socket's monitor and the
connections' descriptors: it ends connections that send no Hello in time, or a message without end.
A peer is unwelcomed until it has the Welcome of the broker.
"""

from __future__ import annotations

import asyncio
import logging
import socket as net
import struct
from collections.abc import Callable

from penstock.server.logs import LogQuota
from penstock.server.readiness import UNWELCOMED, most_sockets
from penstock.transport.zeromq import Context, Monitor, Socket, zmq

log = logging.getLogger("penstock.server.zmq")

# From connecting to the Welcome; until then a peer costs a descriptor and a little memory.
UNWELCOMED_S = 10.0
# Bytes that a peer may send until then: room for a Hello that resumes a large session.
UNWELCOMED_BYTES = 1 << 20
# Connections without a Welcome, beyond server.max_connections.
MAX_UNWELCOMED = UNWELCOMED
# How often unwelcomed peers are checked, while there are any: a flood grows no longer than this.
UNWELCOMED_LOOK_S = 0.1
# How often other peers are checked.
LOOK_S = 1.0
# Bytes that libzmq may have read of one peer beyond the frame that is arriving, while the broker does not
# keep up with all peers; and how often that is checked then.
AHEAD_BYTES = 64 << 20
AHEAD_LOOK_S = 0.1
# Bytes a message needs on the wire besides its parts: lengths, CURVE, heartbeats.
WIRE_COST_BYTES = 1 << 20

# SO_LINGER: on, for no time at all
_RESET = struct.pack("ii", 1, 0)
# tcpi_bytes_acked, tcpi_bytes_received and tcpi_notsent_bytes in struct tcp_info of Linux
_TRAFFIC = struct.Struct("=120xQQ8xI")
WATCHED = int(
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Peer:
    """One connection, with or without a Welcome."""

    __slots__ = (
        "acked_bytes", "ahead_bytes", "base_bytes", "ending", "fd", "messages", "name", "seen",
        "since_s", "taken_bytes", "unwelcomed", "violations",
    )  # fmt: skip

    def __init__(self, fd: int, name: str, since_s: float) -> None:
        self.fd = fd
        self.name = name
        self.since_s = since_s
        self.unwelcomed = True
        self.messages = 0
        """Complete messages read from it."""
        self.violations = 0
        self.taken_bytes = 0
        """Bytes on the wire of the complete messages read from it."""
        self.ahead_bytes = 0
        """Bytes that had arrived beyond those when the broker began to fall behind."""
        self.ending = False
        self.seen = 0
        self.base_bytes = 0
        self.acked_bytes = 0


class Peers:
    """The connections of one bound socket, by descriptor."""

    def __init__(
        self,
        context: Context,
        socket: Socket,
        max_connections: int,
        max_frame_bytes: int | None,
        on_gone: Callable[[int], None] = lambda fd: None,
    ) -> None:
        """Without `max_frame_bytes` peers need no Hello, and are not checked."""
        self._loop = asyncio.get_running_loop()
        self._max_peers = most_sockets(max_connections, MAX_UNWELCOMED)
        self._max_message_bytes = max_frame_bytes
        self._on_gone = on_gone
        self._refusals = LogQuota(log)
        self._peers: dict[int, Peer] = {}
        self._unwelcomed: dict[int, Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = self._ahead_looked_s = self._loop.time()
        self._caught_up = True
        self._monitor = Monitor(context, socket, WATCHED, self._on_event)

    def __len__(self) -> int:
        return len(self._peers)

    def at(self, fd: int) -> Peer:
        """The peer behind a descriptor; a nameless one when its connection has ended already."""
        self._monitor.drain()  # what happened to the descriptor before this message
        return self._peers.get(fd) or Peer(-1, "?", self._loop.time())

    def welcome(self, peer: Peer) -> None:
        """The peer has its Welcome: it may be slow, and send large frames."""
        peer.unwelcomed = False
        self._unwelcomed.pop(peer.fd, None)

    def cut(self, peer: Peer, reason: str, *, gently: bool = False) -> None:
        """End a connection now; `gently` lets bytes arrive that the operating system has taken."""
        self._monitor.drain()
        if self._peers.get(peer.fd) is not peer or peer.ending:
            return
        peer.ending = True
        if gently:
            log.info("connection cut: %s", reason, extra={"peer": peer.name})
        else:
            self._refusals.warning(f"connection cut: {reason}", peer=peer.name)
        # A copy of the descriptor: libzmq may close the original, and another file get its number.
        try:
            with net.fromfd(peer.fd, net.AF_INET, net.SOCK_STREAM) as connection:
                if _name(connection) == peer.name:
                    if not gently:
                        connection.setsockopt(net.SOL_SOCKET, net.SO_LINGER, _RESET)
                    connection.shutdown(net.SHUT_RDWR)
        except OSError as error:
            log.info("it was gone already: %s", error, extra={"peer": peer.name})

    def slowest(self) -> Peer | None:
        """The peer with unread bytes that has read least since the last call.

        None while a connection is being ended: the memory that this frees may be enough.
        """
        self._monitor.drain()
        slowest, least = None, 0
        for peer in self._peers.values():
            acked, _, unsent = _traffic(peer.fd)
            progress, peer.acked_bytes = acked - peer.acked_bytes, acked
            if peer.ending:
                return None
            if unsent and (slowest is None or progress < least):
                slowest, least = peer, progress
        return slowest

    def caught_up(self) -> None:
        """Everything that had arrived is read."""
        self._caught_up = True

    def look_ahead(self) -> None:
        """More arrived than one turn could read: end connections far ahead of what the broker reads.

        libzmq has no limit of its own here, because its limit would let a client end the broker
        (`configure`).
        """
        now_s = self._loop.time()
        if now_s - self._ahead_looked_s < AHEAD_LOOK_S:
            return
        self._ahead_looked_s = now_s
        begins, self._caught_up = self._caught_up, False
        limit = AHEAD_BYTES + (self._max_message_bytes or 0)
        self._monitor.drain()
        for peer in list(self._peers.values()):
            ahead = _traffic(peer.fd)[1] - peer.taken_bytes
            if begins:
                peer.ahead_bytes = ahead
            elif ahead - peer.ahead_bytes > limit:
                self.cut(peer, f"{ahead - peer.ahead_bytes} bytes ahead of what the broker reads")

    def close(self) -> None:
        """Stop watching; call it before the socket is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._peers.clear()
        self._unwelcomed.clear()
        self._monitor.close()

    # -- events of the monitor -------------------------------------------------------------------

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._unwelcomed.pop(value, None)
            if self._peers.pop(value, None) is not None:
                self._on_gone(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refusals.warning("a client failed to authenticate")
        else:
            self._refusals.warning("a client broke the handshake: wrong key, or no ZeroMQ at all")

    def _accepted(self, fd: int) -> None:
        try:
            with net.fromfd(fd, net.AF_INET, net.SOCK_STREAM) as connection:
                name = _name(connection)
        except OSError:  # it is gone already; an event of the monitor follows
            name = "?"
        peer = Peer(fd, name, self._loop.time())
        alone = not self._unwelcomed
        self._peers[fd] = peer
        if self._max_message_bytes is not None:
            self._unwelcomed[fd] = peer
        if len(self._peers) > self._max_peers:
            self._loop.call_soon(self.cut, peer, "too many connections")
        if alone and self._unwelcomed:
            self._schedule_check()

    # -- checks --------------------------------------------------------------------------------------

    def _check_peers(self) -> None:
        self._monitor.drain()
        now_s = self._loop.time()
        for peer in list(self._unwelcomed.values()):
            if now_s - peer.since_s > UNWELCOMED_S:
                self.cut(peer, f"not welcomed within {UNWELCOMED_S:g} s")
            elif _traffic(peer.fd)[1] > UNWELCOMED_BYTES:
                self.cut(peer, f"more than {UNWELCOMED_BYTES} bytes before it was welcomed")
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            for peer in list(self._peers.values()):
                self._check_progress(peer)
        self._schedule_check()

    def _schedule_check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pause_s = UNWELCOMED_LOOK_S if self._unwelcomed else LOOK_S
        self._timer = self._loop.call_later(pause_s, self._check_peers) if self._peers else None

    def _check_progress(self, peer: Peer) -> None:
        """End a connection whose message grows without end: bytes arrive, but no message completes."""
        limit = self._max_message_bytes
        if limit is None or peer.unwelcomed:  # unwelcomed peers have closer limits
            return
        if peer.messages != peer.seen:
            peer.seen = peer.messages
            peer.base_bytes = _traffic(peer.fd)[1]
        elif _traffic(peer.fd)[1] - peer.base_bytes > limit + WIRE_COST_BYTES:
            self.cut(peer, "a message over server.max_frame_bytes")


def _name(connection: net.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"{host}:{port}"


def _traffic(fd: int) -> tuple[int, int, int]:
    """Bytes that a connection sent, received, and has still to send; zeros where the system has none."""
    try:
        connection = net.socket(net.AF_INET, net.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return 0, 0, 0
    try:
        info = connection.getsockopt(net.IPPROTO_TCP, net.TCP_INFO, _TRAFFIC.size)
        acked, received, unsent = _TRAFFIC.unpack(info)
    except (OSError, struct.error):
        return 0, 0, 0
    finally:
        connection.detach()  # libzmq owns the descriptor, and closes it
    return acked, received, unsent

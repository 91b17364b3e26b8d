"""ZeroMQ: frames from a ROUTER socket to the broker and back.

`ZmqServer` listens. A client is a routing identity, and has a `RouterLink`. libzmq's threads read, write
and encrypt; the server takes whole messages from them, a limited number in each turn of the loop. A
client that breaks the protocol gets the reason, and is disconnected when it goes on. All clients share one
socket, so reading from one of them cannot pause: requests beyond its limit are refused.

`configure` and `bind` are for every listening ZeroMQ socket of the broker, also that of `fanout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket as net
from contextlib import ExitStack
from typing import Any

from penstock.model.errors import Deferred, InvalidSettings, PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.client_bytes import LIMIT, REQUESTS, UNREAD, ClientBytes, limit_of
from penstock.server.logs import LogQuota
from penstock.server.transports.curve import CurveAuthenticator
from penstock.server.transports.link import UNANSWERED_BYTES, Connections
from penstock.server.transports.zeromq_peers import UNWELCOMED_BYTES, Peer, Peers
from penstock.transport.zeromq import (
    COPY_BELOW_BYTES,
    NOBLOCK,
    Context,
    Pump,
    Socket,
    ZmqOutbox,
    endpoint,
    keep_alive,
    zmq,
)
from penstock.wire.frame import ENVELOPE, MAGIC, MAX_PARTS, Bytes, Frame, Kind
from penstock.wire.limits import check_message
from penstock.wire.message import encode, to_fault

log = logging.getLogger("penstock.server.zmq")

# Connections that the operating system accepts before the broker does.
BACKLOG = 512
# From connecting to the end of the handshake.
HANDSHAKE_S = 10.0
# A client that reads nothing at all for so long loses its connection, and so does one behind a
# cable that was pulled.
STALLED_S = 60.0
# Unread bytes of a client, as a multiple of server.send_buffer_bytes, at which it is disconnected.
ABORT_FACTOR = 4
# A request below this is accepted even when too many bytes wait for answers.
SMALL_BYTES = 4 << 10
UNANSWERED_LIMIT = "unanswered_bytes"  # its name in errors and counters
# A refused request is repeated after this: some answers have left by then.
RETRY_AFTER_S = 0.1
# The last frames of a link have this long to leave: at most, and after libzmq seems to have sent them.
LINGER_S = 2.0
SETTLE_S = 0.1
# Bytes that ZeroMQ adds to a part on the wire, without and with CURVE.
PART_BYTES, CURVE_PART_BYTES = 9, 42
# Parts read before other work of the loop gets its turn; a few milliseconds.
PARTS_PER_TURN = 1_024
# Broken messages after which a client is disconnected.
MAX_VIOLATIONS = 16
# The notice that a connection ended arrives before its last messages; these get this long.
LAST_MESSAGES_S = 0.01


class ZmqServer:
    """Listens, and keeps the links of all clients."""

    def __init__(
        self, settings: Settings, broker: Connections, client_bytes: ClientBytes | None = None
    ) -> None:
        self.settings = settings
        self.client_bytes = client_bytes or ClientBytes(limit_of(settings.server))
        self.broker = broker
        self.links: dict[bytes, RouterLink] = {}
        self.peers: Peers
        self._by_fd: dict[int, RouterLink] = {}
        self._leaving: list[RouterLink] = []
        self._skipping = False
        self._part_bytes = CURVE_PART_BYTES if settings.server.curve_secret_key else PART_BYTES
        self._refusals = LogQuota(log)
        self._emptied: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop
        self._socket: Socket
        self._pump: Pump
        self._opened: ExitStack | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which port 0 leaves to the operating system."""
        server = self.settings.server
        self._loop = asyncio.get_running_loop()
        context: Context = zmq.Context()
        with ExitStack() as opened:  # closed in reverse order at the end
            opened.callback(context.destroy, linger=0)
            gate = CurveAuthenticator(context, server)
            opened.callback(gate.close)
            self._socket = context.socket(zmq.ROUTER)
            configure(self._socket)
            largest_bytes = min(server.max_frame_bytes, self.client_bytes.largest)
            self._socket.set(zmq.MAXMSGSIZE, largest_bytes)
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.SNDHWM, 0)  # each ZmqOutbox counts bytes instead
            gate.guard(self._socket)
            self.peers = Peers(
                context, self._socket, server.max_connections, largest_bytes, self._gone
            )
            opened.callback(self.peers.close)
            bound = bind(self._socket, host, port, "server.zmq")
            self._pump = Pump(self._socket, self._receive)
            opened.callback(self._pump.stop)
            self._opened = opened.pop_all()
        return bound

    async def stop(self) -> None:
        """Accept no clients, and end every connection, sending what is queued."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        for link in list(self.links.values()):
            link.end("the broker stops")
        self._emptied = asyncio.Event()
        if self.links:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._emptied.wait()
        for link in list(self.links.values()):
            self._remove(link, "the broker stopped")
        opened.close()

    # -- messages ------------------------------------------------------------------------------

    def _receive(self) -> bool:
        recv = self._socket.recv
        budget = PARTS_PER_TURN
        while budget > 0:
            if self._skipping:
                self._skipping = recv(NOBLOCK, False).more
                budget -= 1
                continue
            try:
                identity = recv(NOBLOCK)
            except zmq.Again:
                self.peers.caught_up()
                while self._leaving:
                    self._remove(self._leaving.pop(), "the connection ended")
                return False
            message: list[Bytes] = []
            more = True
            while (
                more and len(message) <= MAX_PARTS + 2
            ):  # one part too many is enough to refuse it
                part = recv(NOBLOCK, False)
                more = part.more
                message.append(part.bytes if len(part) < COPY_BELOW_BYTES else part.buffer)
            self._skipping = more
            budget -= len(message) + 1
            self._take(identity, message, part)
        self.peers.look_ahead()
        return True

    def _take(self, identity: bytes, message: list[Bytes], part: zmq.Frame) -> None:
        link = self.links.get(identity)
        if link is None and self._opened is None:  # the server stops
            return
        try:
            frame = Frame.of_multipart(message)
            if frame.mark:
                raise ProtocolViolation(
                    "over ZeroMQ the mark is 0, raw; JSON and protobuf need TCP"
                )
            check_message(frame)
            # The next connection of a client that keeps its routing identity begins with HELLO.
            if link is None or (link.leaving and frame.kind == Kind.HELLO):
                link = self._admit(identity, frame.request, part)
            self._count(link.source, message)
            self._check_unwelcomed(link.source)
        except PenstockError as error:
            self._refuse_message(identity, message, part, error)
            return
        if link.closed:
            return
        try:
            link.received(frame)
        except Exception as error:
            log.exception("the broker failed on a frame", extra={"peer": link.peer})
            self.broker.failed(error)
            link.send(Frame(Kind.FAULT, frame.request, encode(to_fault(error))))
            link.end("the broker failed on a frame")

    def _count(self, source: Peer, message: list[Bytes]) -> None:
        source.messages += 1
        source.taken_bytes += sum(map(len, message)) + self._part_bytes * len(message)

    @staticmethod
    def _check_unwelcomed(source: Peer) -> None:
        if source.unwelcomed and source.taken_bytes > UNWELCOMED_BYTES:
            source.violations = MAX_VIOLATIONS
            raise ProtocolViolation(
                f"more than {UNWELCOMED_BYTES} bytes before the broker's welcome; wait for it"
            )

    def _refuse_message(
        self, identity: bytes, message: list[Bytes], part: zmq.Frame, error: PenstockError
    ) -> None:
        """Answer a message that is not a frame; a client that keeps sending such is disconnected."""
        self.broker.failed(error)
        link = self.links.get(identity)
        source = self._source(part) if link is None else link.source
        self._count(source, message)
        source.violations += 1
        if source.ending or source.fd < 0:  # the client is gone
            return
        if source.violations == 1:
            self._refusals.warning(str(error), peer=source.name)
        fault = Frame(Kind.FAULT, _request(message), encode(to_fault(error)))
        if link is None:
            send_buffer = ZmqOutbox(self._socket, self._pump.nudge, lambda: None, identity)
            send_buffer.put(fault.multipart())
        else:
            link.send(fault)
        if source.violations > MAX_VIOLATIONS:
            if link is None:
                self.peers.cut(source, "too many broken messages")
            else:
                link.end("too many broken messages")

    # -- clients -------------------------------------------------------------------------------

    def _admit(self, identity: bytes, request: int, part: zmq.Frame) -> RouterLink:
        source = self._source(part)
        for former in (self.links.get(identity), self._by_fd.get(source.fd)):
            if (
                former is not None
            ):  # its identity or descriptor is in use again, so it must have gone
                self._remove(former, "the connection ended")
        send_buffer = ZmqOutbox(
            self._socket, self._pump.nudge, lambda: self._unroutable(link), identity
        )
        link = RouterLink(
            self, send_buffer, identity, source, is_loopback(_property(part, "Peer-Address"))
        )
        self.links[identity] = link
        if source.fd >= 0:
            self._by_fd[source.fd] = link
        else:
            self._unroutable(link)
        try:
            link.connection = self.broker.connected(link)
        except PenstockError as error:
            self.broker.failed(error)
            link.send(Frame(Kind.FAULT, request, encode(to_fault(error))))
            link.end(error.message)
        return link

    def _source(self, part: zmq.Frame) -> Peer:
        """The connection of a message: libzmq attaches the descriptor until the connection is closed."""
        return self.peers.at(int(_property(part, "__fd") or -1))

    def _gone(self, fd: int) -> None:
        link = self._by_fd.pop(fd, None)
        if link is not None:
            self._unroutable(link)

    def _unroutable(self, link: RouterLink) -> None:
        """A connection has ended: remove its link once everything it sent is read."""
        if not link.leaving:
            link.leaving = True
            self._loop.call_later(LAST_MESSAGES_S, self._leave, link)

    def _leave(self, link: RouterLink) -> None:
        if self.links.get(link.identity) is link:
            self._leaving.append(link)
            self._pump.nudge()

    def _remove(self, link: RouterLink, reason: str) -> None:
        if self.links.get(link.identity) is link:
            del self.links[link.identity]
        if self._by_fd.get(link.source.fd) is link:
            del self._by_fd[link.source.fd]
        link.lost(reason)
        if not self.links and self._emptied is not None:
            self._emptied.set()


class RouterLink:
    """The Link of one client over ZeroMQ, known by its routing identity."""

    __slots__ = (
        "_account", "_largest_bytes", "_limit_bytes", "_loop", "_outbox", "_reason", "_server", "_timer",
        "_unanswered", "_unanswered_bytes", "closed", "connection", "identity", "leaving", "loopback", "peer", "source",
    )  # fmt: skip

    def __init__(
        self,
        server: ZmqServer,
        send_buffer: ZmqOutbox,
        identity: bytes,
        source: Peer,
        loopback: bool,
    ) -> None:
        self.identity = identity
        self.source = source
        self.peer = source.name
        self.loopback = loopback
        self.connection: Any = None
        self.closed = False
        """Frames are neither sent nor received any more."""
        self.leaving = False
        """The connection has ended; frames sent before are still being read."""
        self._server = server
        self._outbox = send_buffer
        self._loop = asyncio.get_running_loop()
        self._limit_bytes = ABORT_FACTOR * server.settings.server.send_buffer_bytes
        self._largest_bytes = 0
        self._unanswered: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._account = server.client_bytes.account(self._count_unread, self._exceeded)
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def send(self, frame: Frame) -> None:
        """Queue a frame; a client that leaves too much unread is disconnected instead."""
        if self.closed or self.leaving:
            return
        if frame.request in self._unanswered:
            size = self._unanswered.pop(frame.request)
            self._unanswered_bytes -= size
            self._account.add(REQUESTS, -size)
        if frame.kind == Kind.WELCOME and self.source.unwelcomed:
            self._server.peers.welcome(self.source)
        self._outbox.put(frame.multipart())
        self._count_unread()
        pending = self._outbox.pending_bytes()
        # A single frame may have any size; the bytes that pile up behind it are limited.
        self._largest_bytes = max(frame.size_bytes, self._largest_bytes) if pending else 0
        if pending - self._largest_bytes > self._limit_bytes:
            self.closed = True
            self._reason = f"the client left {pending} bytes unread"
            self._cut(gently=False)

    def received(self, frame: Frame) -> None:
        """Pass a frame to the broker, unless too many bytes of this client wait there already."""
        if frame.request:
            size = frame.size_bytes
            many = size >= SMALL_BYTES and self._unanswered_bytes > UNANSWERED_BYTES
            if many or self._account.waits(size):
                error = Deferred(
                    f"{self._unanswered_bytes} bytes of this client's requests wait for answers"
                    f"{'' if many else ', and others have their share of what the broker holds'}; "
                    "this one was not taken. Wait for some, then send it again",
                    retry_after_s=RETRY_AFTER_S,
                    limit=UNANSWERED_LIMIT if many else LIMIT,
                    tenant=self.connection.tenant,
                )
                self._server.broker.refused(error)
                self.send(Frame(Kind.FAULT, frame.request, encode(to_fault(error))))
                return
            if frame.request not in self._unanswered:
                self._unanswered[frame.request] = size
                self._unanswered_bytes += size
                self._account.add(REQUESTS, size)
        self.connection.received(frame)

    def rest(self, seconds: float) -> None:
        """Does nothing: all clients share one socket, so reading from one cannot pause."""

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
        self._wait_until_sent(self._loop.time() + LINGER_S)

    def lost(self, reason: str) -> None:
        """The connection is gone: tell the broker, once."""
        by_client, self.closed = not self.closed, True
        self._account.close()
        self._outbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.lost(self._reason or reason, closed=by_client)

    def _count_unread(self) -> None:
        self._account.hold(UNREAD, self._outbox.pending_bytes())

    def _exceeded(self, error: Deferred) -> None:
        """Disconnect a client that holds most of the bytes that all clients may hold."""
        self._server.broker.refused(error)
        self._outbox.clear()
        self.send(Frame(Kind.FAULT, 0, encode(to_fault(error))))
        self.end(error.message)

    def _wait_until_sent(self, until_s: float) -> None:
        taken = not self._outbox.pending_bytes()
        if taken or self._loop.time() > until_s:
            self._timer = self._loop.call_later(SETTLE_S, self._cut, taken)
        else:
            self._timer = self._loop.call_later(SETTLE_S, self._wait_until_sent, until_s)

    def _cut(self, gently: bool) -> None:
        self._outbox.clear()
        self._server.peers.cut(self.source, self._reason, gently=gently)


def _property(part: zmq.Frame, name: str) -> str:
    try:
        return str(part.get(name))
    except zmq.ZMQError:
        return ""


def _request(message: list[Bytes]) -> int:
    """The request number in a broken message; 0 where it cannot be read."""
    envelope = message[0]
    if len(envelope) != ENVELOPE.size or bytes(envelope[:2]) != MAGIC:
        return 0
    return int(ENVELOPE.unpack(envelope)[4])


def configure(socket: Socket) -> None:
    """Set the options of every listening socket; call it before `bind`."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.BACKLOG, BACKLOG)
    socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1_000))
    socket.set(zmq.TCP_MAXRT, int(STALLED_S * 1_000))
    keep_alive(socket)
    # No limit to what libzmq reads ahead: with one, libzmq would end the process when it answers a PING
    # of a connection that has broken since. `Peers` limits the bytes ahead instead.
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
    """The numeric address of a host: libzmq does not bind to names."""
    if not host or host == "*":
        return "*"
    found = net.getaddrinfo(host, None, type=net.SOCK_STREAM, flags=net.AI_PASSIVE)
    return str(min(found, key=lambda each: each[0] != net.AF_INET)[4][0])

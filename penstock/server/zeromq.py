"""The ZeroMQ transport of the broker: frames from a ROUTER socket to the broker and back.

A client is a routing identity. Whoever breaks the protocol hears why, and is cut off when it goes
on. libzmq's threads do the reading, writing and encrypting; this takes whole messages from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import ExitStack

from penstock.engines.zmq_library import Context, Socket, zmq
from penstock.engines.zmq_outbox import COPY_BELOW_BYTES, ZmqOutbox
from penstock.engines.zmq_pump import NOBLOCK, Pump
from penstock.model.errors import PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.client_bytes import ClientBytes, limit_of
from penstock.server.curve import Gate
from penstock.server.link import Connections
from penstock.server.log_quota import LogQuota
from penstock.server.zmq_link import LINGER_S, RouterLink
from penstock.server.zmq_listener import bind, configure, is_loopback
from penstock.server.zmq_peers import STRANGER_BYTES, Peer, Peers
from penstock.wire.bound import check_message
from penstock.wire.fault import to_fault
from penstock.wire.frame import ENVELOPE, MAGIC, MAX_PARTS, Bytes, Frame, Kind
from penstock.wire.message import encode

log = logging.getLogger("penstock.server.zmq")

# What ZeroMQ adds to a part on the wire, without and with CURVE.
PART_BYTES, CURVE_PART_BYTES = 9, 42
# Parts taken before other work of the loop gets its turn; a few milliseconds.
PARTS_PER_TURN = 1_024
# Broken messages after which a client is cut off.
MAX_VIOLATIONS = 16
# The sign that a connection ended overtakes its last messages; they get this long to arrive.
LAST_MESSAGES_S = 0.01


class ZmqServer:
    """Listens, and keeps the links."""

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
        with ExitStack() as opened:  # taken back to front at the end
            opened.callback(context.destroy, linger=0)
            gate = Gate(context, server)
            opened.callback(gate.close)
            self._socket = context.socket(zmq.ROUTER)
            configure(self._socket)
            largest_bytes = min(server.max_frame_bytes, self.client_bytes.largest)
            self._socket.set(zmq.MAXMSGSIZE, largest_bytes)
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            self._socket.set(zmq.SNDHWM, 0)  # the outboxes count bytes instead
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
        """Take nobody new and end every connection, sending what is queued."""
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
            self._bury(link, "the broker stopped")
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
                    self._bury(self._leaving.pop(), "the connection ended")
                return False
            message: list[Bytes] = []
            more = True
            while more and len(message) <= MAX_PARTS + 2:  # one too many is enough to see it
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
            # The next connection of a client that insists on its identity begins with HELLO.
            if link is None or (link.leaving and frame.kind == Kind.HELLO):
                link = self._admit(identity, frame.request, part)
            self._count(link.source, message)
            self._check_stranger(link.source)
        except PenstockError as error:
            self._object(identity, message, part, error)
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
    def _check_stranger(source: Peer) -> None:
        if source.stranger and source.taken_bytes > STRANGER_BYTES:
            source.violations = MAX_VIOLATIONS
            raise ProtocolViolation(
                f"more than {STRANGER_BYTES} bytes before the broker's welcome; wait for it"
            )

    def _object(
        self, identity: bytes, message: list[Bytes], part: zmq.Frame, error: PenstockError
    ) -> None:
        """Answer a message that is no frame; who goes on sending such is cut off."""
        self.broker.failed(error)
        link = self.links.get(identity)
        source = self._source(part) if link is None else link.source
        self._count(source, message)
        source.violations += 1
        if source.ending or source.fd < 0:  # there is nobody left to hear it
            return
        if source.violations == 1:
            self._refusals.warning(str(error), peer=source.name)
        fault = Frame(Kind.FAULT, _request(message), encode(to_fault(error)))
        if link is None:
            outbox = ZmqOutbox(self._socket, self._pump.nudge, lambda: None, identity)
            outbox.put(fault.multipart())
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
            if former is not None:  # its place is taken, so it must have gone
                self._bury(former, "the connection ended")
        outbox = ZmqOutbox(self._socket, self._pump.nudge, lambda: self._unroutable(link), identity)
        link = RouterLink(
            self, outbox, identity, source, is_loopback(_property(part, "Peer-Address"))
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
        """The connection a message came from: libzmq notes the descriptor, until it is closed."""
        return self.peers.at(int(_property(part, "__fd") or -1))

    def _gone(self, fd: int) -> None:
        link = self._by_fd.pop(fd, None)
        if link is not None:
            self._unroutable(link)

    def _unroutable(self, link: RouterLink) -> None:
        """A connection has ended; forget its link once everything it sent is read."""
        if not link.leaving:
            link.leaving = True
            self._loop.call_later(LAST_MESSAGES_S, self._leave, link)

    def _leave(self, link: RouterLink) -> None:
        if self.links.get(link.identity) is link:
            self._leaving.append(link)
            self._pump.nudge()

    def _bury(self, link: RouterLink, reason: str) -> None:
        if self.links.get(link.identity) is link:
            del self.links[link.identity]
        if self._by_fd.get(link.source.fd) is link:
            del self._by_fd[link.source.fd]
        link.lost(reason)
        if not self.links and self._emptied is not None:
            self._emptied.set()


def _property(part: zmq.Frame, name: str) -> str:
    try:
        return str(part.get(name))
    except zmq.ZMQError:
        return ""


def _request(message: list[Bytes]) -> int:
    """The number of the request in a broken message, where it can be made out."""
    envelope = message[0]
    if len(envelope) != ENVELOPE.size or bytes(envelope[:2]) != MAGIC:
        return 0
    return int(ENVELOPE.unpack(envelope)[4])

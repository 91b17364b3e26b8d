"""TCP: the broker listens, and keeps one `TcpLink` for each connection of a client.

The first byte of a connection decides: 0xFE opens a negotiation, an old command makes the client an
old one (`penstock.server.transports.legacy`). A client has HANDSHAKE_S until the broker welcomes it, and
until then may send only small frames. A client that breaks the protocol gets the reason, and is
disconnected.

Bytes in both directions are bounded: reading pauses while too many requests of a client wait for
answers, and a client that leaves too much unread is disconnected. Large frames are expanded, and made
ready for sending, by threads (`penstock.server.fastpath`); frames keep their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from penstock.model.errors import Deferred, InvalidSettings, PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.client_bytes import ARRIVING, EXPANDED, REQUESTS, UNREAD, ClientBytes, limit_of
from penstock.server.fastpath import (
    Expansion,
    FastPath,
    Read,
    ThreadLane,
    expanded_bytes,
    expands,
    read_frame,
    translated,
)
from penstock.server.logs import LogQuota
from penstock.server.publish import Courtesy
from penstock.server.readiness import UNWELCOMED, most_sockets
from penstock.server.transports.legacy import OldClient
from penstock.server.transports.link import UNANSWERED_BYTES, Connection, Connections, peer_of
from penstock.server.transports.tls import TlsListener, server_tls
from penstock.transport.tcp import WRITE_BYTES, SendBuffer, keep_alive, large_room
from penstock.wire import legacy as oldcommand
from penstock.wire.encodings import for_mark, marks
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.message import encode, to_fault
from penstock.wire.negotiation import MARKS, NEGOTIATE, answer, choose, refuse
from penstock.wire.stream import (
    COMPRESSORS,
    SCRATCH_BYTES,
    Message,
    StreamReader,
    decode_frame,
    encode_frame,
)

log = logging.getLogger("penstock.server.tcp")

Handle = Callable[[Message], None]
Buffers = Sequence[Bytes]

HELLO, WELCOME = int(Kind.HELLO), int(Kind.WELCOME)  # compared with each frame; enums are slower
# From connecting to the Welcome: a client that sends nothing costs a socket for this long.
HANDSHAKE_S = 10.0
# Largest frame of a client before its Welcome: room for a Hello that resumes a large session.
UNWELCOMED_FRAME_BYTES = 1 << 20
# Unread bytes of a client, as a multiple of server.send_buffer_bytes, at which it is disconnected.
ABORT_FACTOR = 4
# After a request of this size the limits of reading are checked; smaller requests are checked with them.
CHECKED_BYTES = 4 << 10
# A large frame arrives piece by piece, with a pause after each read of this much: other clients
# wait for a piece, not for the frame, and one connection still carries 100 MB/s and more.
YIELD_BYTES = 128 << 10
YIELD_S = 0.001
# A client that is disconnected gets the reason: the last frames have this long to arrive, and this much
# of what the client still sends is read and discarded, since closing with unread bytes would lose them.
LINGER_S = 2.0
LINGER_BYTES = 4 << 20
# Connections that the operating system accepts before the broker does.
BACKLOG = 512
# Connections without a Welcome, beyond server.max_connections.
MAX_UNWELCOMED = UNWELCOMED
# How often `stop` looks whether all connections have ended.
LOOK_AGAIN_S = 0.01


class TcpServer:
    """Listens, and keeps the links of all connections."""

    def __init__(
        self,
        settings: Settings,
        broker: Connections,
        fastpath: FastPath | None = None,
        courtesy: Courtesy | None = None,
        client_bytes: ClientBytes | None = None,
    ) -> None:
        self.settings = settings
        self.fastpath = fastpath
        self.courtesy = courtesy
        self.broker = broker
        self.client_bytes = client_bytes or ClientBytes(limit_of(settings.server))
        self.links: set[TcpLink] = set()
        self.scratch = bytearray(SCRATCH_BYTES)
        self.refusals = LogQuota(log)
        self._server: asyncio.Server | TlsListener | None = None
        self._most = most_sockets(settings.server.max_connections, MAX_UNWELCOMED)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which port 0 leaves to the operating system."""
        context = server_tls(self.settings.server)
        try:
            if context is not None:
                secure = TlsListener(context, lambda: TcpLink(self), self._crowded, self.refusals)
                await secure.start(host, port, BACKLOG, HANDSHAKE_S)
                self._server = secure
                return secure.port
            self._server = await asyncio.get_running_loop().create_server(
                lambda: TcpLink(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            raise InvalidSettings(
                f"server.tcp: cannot listen on {host}:{port}: {error}. Stop whoever has the port, "
                "or set another address; port 0 takes any free one",
                key="server.tcp",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and end every connection, sending what is queued."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for link in list(self.links):
            link.close()
        for _ in range(int(LINGER_S / LOOK_AGAIN_S)):
            if not self.links:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        for link in list(self.links):
            link.abort("the broker stops")
        await server.wait_closed()

    @property
    def full(self) -> bool:
        """Whether too many sockets are open to accept another connection."""
        return self._crowded(0)

    def _crowded(self, shaking: int) -> bool:
        """The same, counting connections in the middle of their TLS handshake."""
        return len(self.links) + shaking >= self._most


class Host(Protocol):
    """The part of `TcpServer` that a link uses."""

    settings: Settings
    broker: Connections
    links: set[TcpLink]
    scratch: bytearray
    fastpath: FastPath | None
    courtesy: Courtesy | None
    refusals: LogQuota
    client_bytes: ClientBytes

    @property
    def full(self) -> bool:
        """Whether too many sockets are open to accept another connection."""
        ...


class TcpLink(asyncio.BufferedProtocol):
    """One connection of one client over TCP."""

    def __init__(self, server: Host) -> None:
        self.peer = "?"
        self.loopback = False
        self.holding = False
        """The broker reads nothing from the client at the moment, so silence is no reason to drop it."""
        self._server = server
        self._settings = server.settings.server
        self._largest_bytes = min(self._settings.max_frame_bytes, server.client_bytes.largest)
        limit_bytes = min(UNWELCOMED_FRAME_BYTES, self._largest_bytes)
        self._reader = StreamReader(limit_bytes, server.scratch, large_room)
        self._connection: Connection | None = None
        self._old_client: OldClient | None = None
        self._first = True
        self._handle: Handle = self._negotiate
        self._awaiting_welcome = self._outgoing_full = False
        self._expansion: Expansion = ThreadLane(server.fastpath, self._expanded)
        self._unanswered: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._ending = False
        self._discarded_bytes = 0
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        self._account = server.client_bytes.account(lambda: self.hold(False), self._cut)
        self._rest = ReadPause(lambda: self.hold(False), server.courtesy)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._outbox: SendBuffer
        self._outgoing: FrameWriter

    # -- what asyncio calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._outbox = SendBuffer(self._loop, transport)
        self._outgoing = FrameWriter(
            self._outbox, self._server.fastpath, self._unsendable, self._bound
        )
        self.peer, self.loopback = peer_of(transport)
        keep_alive(transport.get_extra_info("socket"))
        if self._server.full:
            self.abort("too many connections")
            return
        self._server.links.add(self)
        self._timer = self._loop.call_later(HANDSHAKE_S, self._too_slow)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived."""
        if self._ending:
            self._discard(nbytes)
            return
        if self._first:
            self._first = False
            self._classify(self._server.scratch[0])
        messages = self._reader.filled(nbytes)
        arrived = self._reader.arrived_bytes
        self._account.hold(ARRIVING, arrived)
        self._take_all(messages)
        if self._reader.large and nbytes >= YIELD_BYTES:
            self.rest(YIELD_S)
        elif arrived:
            self.hold(False)

    def eof_received(self) -> bool:
        """The client will send no more: the connection ends."""
        self._reason = self._reason or "the client closed the connection"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._server.links.discard(self)
        # Any other error comes from the network: the client may be alive, and reconnect.
        closed = not self._ending and (exc is None or isinstance(exc, ConnectionError))
        self._ending = True
        self._reader.drop()
        self._account.close()
        self._expansion.leave()
        self._outgoing.clear()
        self._rest.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._reason = self._reason or (str(exc) if exc else "the connection was closed")
        self._lose(closed=closed)

    def pause_writing(self) -> None:
        """The client reads slower than the broker writes."""
        self._outbox.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._outbox.resume()
        self._count_unread()

    # -- what the broker calls -----------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Queue a frame; a client that leaves too much unread is disconnected instead."""
        if self._ending:
            return
        if frame.request in self._unanswered:
            self._answered(frame.request)
        if frame.kind == WELCOME:
            self.welcomed()
        elif self._awaiting_welcome:  # an error: the client may send another Hello
            self._awaiting_welcome = False
            self.hold(False)
        self._outgoing.send(frame)
        self._bound()

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        return self._outgoing.pending_bytes()

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        self._end("the broker closed the connection")

    def abort(self, reason: str) -> None:
        """End the connection now; what is queued is lost."""
        self._ending = True
        self._reason = self._reason or reason
        self._outgoing.clear()
        self._transport.abort()

    def rest(self, seconds: float) -> None:
        """Read nothing from the client for a while, so that it collects events into larger frames."""
        if not self._rest.on and not self._ending:
            self._rest.begin(seconds, courteous=self._reader.large)
            self.hold(True)

    # -- what OldClient calls ------------------------------------------------------------------

    def write(self, *data: bytes) -> None:
        """Queue bytes that are not a frame; all of one call count as one message."""
        if not self._ending:
            self._outgoing.put(data)
            self._bound()
            if self._old_client is not None:
                self._account.hold(REQUESTS, self._old_client.waiting_bytes)

    def welcomed(self) -> None:
        """The client has its Welcome: large frames are accepted from now on."""
        self._reader.limit_bytes = self._largest_bytes
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaiting_welcome = False
        self.hold(False)

    def hold(self, stop: bool) -> None:
        """Stop or go on reading from the client."""
        stop = (
            stop
            or self._awaiting_welcome
            or self._rest.on
            or self._expansion.busy
            or self._unanswered_bytes > UNANSWERED_BYTES
            or self._outgoing_full
            or self._account.waits()
            or (self._old_client is not None and self._old_client.full)
        )
        if stop == self.holding or self._ending:
            return
        self.holding = stop
        if stop:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # -- frames from the client ----------------------------------------------------------------

    def _classify(self, first: int) -> None:
        """Tell an old client, a current one and a wrong protocol apart by the first byte."""
        if first in oldcommand.COMMANDS:
            self._old_client = OldClient(self, self._server.settings)
            self._handle = self._command
        elif first != NEGOTIATE:
            words = f"a connection does not begin with byte 0x{first:02x}; is it TLS, or HTTP?"
            self._fail(ProtocolViolation(words))

    def _take_all(self, messages: list[Message], handle: Handle | None = None) -> None:
        try:
            for message in messages:
                if self._ending:
                    return
                if not self._expansion.waits(message):
                    (handle or self._handle)(message)
        except PenstockError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the broker failed on a frame", extra={"peer": self.peer})
            self._fail(error)
        if self._reader.broken is not None:
            self._fail(self._reader.broken)

    def _command(self, message: Message) -> None:
        assert self._old_client is not None
        if self._connection is None:
            self._connection = self._old_client.start(self._server.broker.connected)
            self._awaiting_welcome = True
            self.hold(True)
        self._old_client.command(*message)
        self._account.hold(REQUESTS, self._old_client.waiting_bytes)

    def _negotiate(self, message: Message) -> None:
        _, body = message
        choice = choose(body, self._largest_bytes, marks())
        self._connection = self._server.broker.connected(self)
        self._handle = self._receive
        self._outgoing.put([answer(choice)])
        self._outgoing.mark = MARKS[choice.mark]
        self._outgoing.compressor = COMPRESSORS.index(choice.compressor)

    def _receive(self, message: Message) -> None:
        raw_bytes = expanded_bytes(message, self._reader.limit_bytes)
        if raw_bytes and self._account.waits(raw_bytes):
            work = self._loop.create_task(self._expand_later(message, raw_bytes))
            self._expansion.follow(message, raw_bytes, work)
            self.hold(True)
            return
        self._account.add(EXPANDED, raw_bytes)
        if expands(self._expansion, message, self._reader.limit_bytes):
            self.hold(True)
            return
        try:
            frame = decode_frame(message, self._reader.limit_bytes)
            self._accept(message[1], *translated(frame))
        finally:
            self._account.add(EXPANDED, -raw_bytes)

    async def _expand_later(self, message: Message, raw_bytes: int) -> Read:
        await self._account.room(EXPANDED, raw_bytes)
        fastpath = self._server.fastpath
        if fastpath is None:
            return read_frame(message, self._reader.limit_bytes)
        return await fastpath.run(raw_bytes, read_frame, message, self._reader.limit_bytes)

    def _expanded(
        self, work: asyncio.Future[Read], message: Message, behind: list[Message]
    ) -> None:
        self._take_all([message], lambda _: self._accept(message[1], *work.result()))
        self._account.hold(EXPANDED, 0)
        self._take_all(behind)
        self.hold(False)

    def _accept(self, body: Bytes, frame: Frame, error: PenstockError | None) -> None:
        if frame.request:
            self._count(frame.request, frame.size_bytes)
        if frame.kind == HELLO and self._timer is not None:
            # Frames that follow the Hello wait in the socket.
            self._awaiting_welcome = True
            self.hold(True)
        if error is not None:
            self._server.broker.failed(error)
            self.send(Frame(Kind.FAULT, frame.request, encode(to_fault(error))))
            return
        assert self._connection is not None
        self._connection.received(frame)

    def _count(self, request: int, size: int) -> None:
        if request not in self._unanswered:
            self._unanswered[request] = size
            self._unanswered_bytes += size
            self._account.add(REQUESTS, size)
            if size >= CHECKED_BYTES or self._unanswered_bytes > UNANSWERED_BYTES:
                self.hold(False)

    def _answered(self, request: int) -> None:
        size = self._unanswered.pop(request)
        self._unanswered_bytes -= size
        self._account.add(REQUESTS, -size)
        if self.holding:
            self.hold(False)

    def _discard(self, nbytes: int) -> None:
        self._discarded_bytes += nbytes
        if self._discarded_bytes > LINGER_BYTES:
            self._transport.abort()

    # -- frames to the client ------------------------------------------------------------------

    def _bound(self) -> None:
        """Disconnect a client that leaves too much unread; stop reading while frames wait for a thread."""
        outgoing, limit_bytes = self._outgoing, self._settings.send_buffer_bytes
        if self._ending:
            return
        self._count_unread()
        if outgoing.piled_bytes > ABORT_FACTOR * limit_bytes:
            self.abort(f"the client left {outgoing.pending_bytes()} bytes unread")
        elif self._outgoing_full != (outgoing.waiting_bytes > limit_bytes):
            self._outgoing_full = not self._outgoing_full
            self.hold(False)

    def _count_unread(self) -> None:
        # The transport calls `resume_writing` when it has written what is above this.
        pending = self._outgoing.pending_bytes()
        self._account.hold(UNREAD, pending if pending > WRITE_BYTES else 0)

    def _cut(self, error: Deferred) -> None:
        """Disconnect a client that holds most of the bytes that all clients may hold."""
        self._server.broker.refused(error)
        self._reader.drop()
        if (
            self._outgoing.pending_bytes() > WRITE_BYTES
        ):  # it reads nothing, and would not read the error
            self.abort(error.message)
        else:
            self._fail(error)

    def _unsendable(self, frame: Frame, error: Exception) -> None:
        """A frame does not fit the client's mark, or its compressor failed."""
        log.error("a frame of kind 0x%02x cannot be sent", frame.kind, exc_info=error)
        if frame.kind == Kind.FAULT:
            self.abort("not even an error can be sent")
        elif frame.request:
            self._server.broker.failed(error)
            self._outgoing.send(Frame(Kind.FAULT, frame.request, encode(to_fault(error))))
        else:
            self._fail(error)

    # -- the end -------------------------------------------------------------------------------

    def _too_slow(self) -> None:
        self._fail(ProtocolViolation(f"no handshake within {HANDSHAKE_S:g} s; the broker hangs up"))

    def _fail(self, error: Exception) -> None:
        if self._ending:
            return
        fault = to_fault(error)
        self._server.broker.failed(error)
        self._server.refusals.warning("client refused", peer=self.peer, reason=fault.message)
        if self._old_client is not None:
            self.write(oldcommand.Error(fault.code, fault.message).message())
        elif self._connection is None:
            self.write(refuse(error))
        else:
            self.send(Frame(Kind.FAULT, 0, encode(fault)))
        self._end(fault.message)

    def _lose(self, *, closed: bool = False) -> None:
        """Tell the broker once, without waiting until the last frames have arrived."""
        if self._old_client is not None:
            self._old_client.stop()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lost(self._reason, closed=closed)

    def _end(self, reason: str) -> None:
        if self._ending:
            return
        self._loop.call_soon(self._lose)
        self._reason = self._reason or reason
        self._rest.cancel()
        if self._timer is not None:
            self._timer.cancel()
        # Reading goes on, so that the end from the client's side is noticed.
        self._awaiting_welcome = self._outgoing_full = False
        self._unanswered_bytes = 0
        self.hold(False)
        self._ending = True
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
        self._outgoing.finish(self._hang_up)

    def _hang_up(self) -> None:
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
        except OSError:  # the client has reset the connection; `connection_lost` follows
            self._transport.abort()


class FrameWriter:
    """Frames on their way to one client, in its mark and through its compressor.

    A thread encodes a large frame that has to be translated or compressed; the frames behind it wait, so
    that frames leave in the order in which they were sent.
    """

    def __init__(
        self,
        send_buffer: SendBuffer,
        fastpath: FastPath | None,
        failed: Callable[[Frame, Exception], None],
        moved: Callable[[], None],
    ) -> None:
        self.mark = 0
        self.compressor = 0
        self.piled_bytes = 0
        """Bytes pending when something was last queued, without the largest frame among them."""
        self._outbox = send_buffer
        self._failed = failed
        """Called with a frame that cannot be encoded; what it sends goes out in place of the frame."""
        self._moved = moved
        """Called when frames that waited for a thread have left."""
        self._lane: ThreadLane[Frame, Buffers] = ThreadLane(fastpath, self._ready)
        self._largest_bytes = 0
        self._finished = False
        self._then: Callable[[], None] | None = None

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        if self._finished:
            return
        try:
            if not self.mark and not self.compressor:
                self.put(encode_frame(frame))
            elif not self._by_thread(frame):
                self.put(_buffers(frame, self.mark, self.compressor))
        except Exception as error:
            self._failed(frame, error)

    def _by_thread(self, frame: Frame) -> bool:
        size = frame.size_bytes
        lane = self._lane
        if lane.waits(frame, size) or lane.begin(
            frame, size, _buffers, frame, self.mark, self.compressor
        ):
            self._count(size)
            return True
        return False

    def put(self, buffers: Buffers) -> None:
        """Queue bytes as they are."""
        self._count(self._outbox.put(buffers))

    def _count(self, size: int) -> None:
        pending = self.pending_bytes()
        # A single frame may have any size; the bytes that pile up behind it are limited.
        if pending == size or size > self._largest_bytes:
            self._largest_bytes = size
        self.piled_bytes = pending - self._largest_bytes

    def pending_bytes(self) -> int:
        """Bytes that wait for a thread, or for the operating system to take them."""
        return self._outbox.pending_bytes() + self._lane.waiting_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for a thread of the broker, not for the client."""
        return self._lane.waiting_bytes

    def finish(self, then: Callable[[], None]) -> None:
        """Give everything to the transport, now or as soon as it is ready, and call `then`."""
        if self._lane.busy:
            self._then = then
        else:
            self._finished = True
            self._outbox.finish()
            then()

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._finished, self._then = True, None
        self._lane.leave()
        self._outbox.clear()

    def _ready(self, work: asyncio.Future[Buffers], frame: Frame, behind: list[Frame]) -> None:
        try:
            self.put(work.result())
        except Exception as error:
            self._failed(frame, error)
        for each in behind:
            self.send(each)
        if self._then is not None:
            self.finish(self._then)
        self._moved()


def _buffers(frame: Frame, mark: int, compressor: int) -> Buffers:
    """A frame in a client's mark, through its compressor. Runs in a thread when it is large."""
    if mark:
        frame = for_mark(frame, mark)
    # An error is small, and must leave even when the compressor fails.
    return encode_frame(frame, 0 if frame.kind == Kind.FAULT else compressor)


class ReadPause:
    """Pauses of reading from one client, one at a time; `over` is called at the end of each."""

    def __init__(self, over: Callable[[], None], courtesy: Courtesy | None = None) -> None:
        self._over = over
        self._courtesy = courtesy
        self._task: asyncio.Task[None] | None = None

    @property
    def on(self) -> bool:
        """Whether a pause is under way."""
        return self._task is not None

    def begin(self, seconds: float, *, courteous: bool = False) -> None:
        """Pause for a while; `courteous` pauses end after publishes of other tenants (`Courtesy.turn`)."""
        self._task = asyncio.create_task(self._rest(seconds, courteous))

    async def _rest(self, seconds: float, courteous: bool) -> None:
        await asyncio.sleep(seconds)
        if courteous and self._courtesy is not None:
            await self._courtesy.turn()
        self._task = None
        self._over()

    def cancel(self) -> None:
        """End the pause without calling `over`."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

"""TcpLink: one connection of a client over TCP, as the broker sees it.

The first byte of a connection decides: 0xFE opens a negotiation, an old command makes the client an
old one (penstock.server.oldclient). A client has HANDSHAKE_S until the broker welcomes it, and until
then may send only small frames. Whoever breaks the protocol hears why, and is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from penstock.engines.outbox import Outbox, keep_alive
from penstock.engines.room import large_room
from penstock.model.errors import PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.courtesy import Courtesy
from penstock.server.detour import Detour
from penstock.server.expanding import Expansion, Read, expands, translated
from penstock.server.fastpath import FastPath
from penstock.server.link import UNANSWERED_BYTES, Connection, Connections, peer_of
from penstock.server.log_quota import LogQuota
from penstock.server.oldclient import OldClient
from penstock.server.outgoing import Outgoing
from penstock.server.rest import Rest
from penstock.wire import oldcommand
from penstock.wire.fault import to_fault
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.mark import marks
from penstock.wire.message import encode
from penstock.wire.negotiation import MARKS, NEGOTIATE, answer, choose, refuse
from penstock.wire.stream import COMPRESSOR_AT, COMPRESSORS, Message, StreamReader, decode_frame

log = logging.getLogger("penstock.server.tcp")

Handle = Callable[[Message], None]

HELLO, WELCOME = int(Kind.HELLO), int(Kind.WELCOME)  # compared with each frame; enums are slower
# From connecting to being welcomed; a client that says nothing costs a socket for this long.
HANDSHAKE_S = 10.0
# Largest frame of a client that was not welcomed yet: room for a Hello that resumes a large session.
STRANGER_FRAME_BYTES = 1 << 20
# Unread bytes of a client, as a multiple of server.send_buffer_bytes, at which it is cut off.
ABORT_FACTOR = 4
# Requests of this size, and compressed ones, are counted until they are answered.
COUNTED_BYTES = 4 << 10
# A large frame comes in piece by piece, with a pause after each that read this much: other clients
# wait for a piece, not for the frame, and one connection still carries 100 MB/s and more.
YIELD_BYTES = 128 << 10
YIELD_S = 0.001
# A connection that ends hears why: its last words get this long to arrive, and of what it still
# sends this much is read and thrown away, since closing with unread bytes would destroy them.
LINGER_S = 2.0
LINGER_BYTES = 4 << 20


class Host(Protocol):
    """What a link asks of the server that made it."""

    settings: Settings
    broker: Connections
    links: set[TcpLink]
    scratch: bytearray
    fastpath: FastPath | None
    courtesy: Courtesy | None
    refusals: LogQuota

    @property
    def full(self) -> bool:
        """Whether so many sockets are open that no stranger is let in."""
        ...


class TcpLink(asyncio.BufferedProtocol):
    """One connection of one client over TCP."""

    def __init__(self, server: Host) -> None:
        self.peer = "?"
        self.loopback = False
        self.holding = False
        """Nothing is read from the client at the moment; it cannot be blamed for its silence."""
        self._server = server
        self._settings = server.settings.server
        limit_bytes = min(STRANGER_FRAME_BYTES, self._settings.max_frame_bytes)
        self._reader = StreamReader(limit_bytes, server.scratch, large_room)
        self._connection: Connection | None = None
        self._old: OldClient | None = None
        self._first = True
        self._handle: Handle = self._negotiate
        self._greeting = self._crowded = False
        self._expansion: Expansion = Detour(server.fastpath, self._expanded)
        self._unanswered: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._ending = False
        self._discarded_bytes = 0
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        self._rest = Rest(lambda: self.hold(False), server.courtesy)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._outbox: Outbox
        self._outgoing: Outgoing

    # -- what asyncio calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._outbox = Outbox(self._loop, transport)
        self._outgoing = Outgoing(
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
            self._meet(self._server.scratch[0])
        self._take_all(self._reader.filled(nbytes))
        if self._reader.large and nbytes >= YIELD_BYTES:
            self.rest(YIELD_S)

    def eof_received(self) -> bool:
        """The client will send no more: the connection ends."""
        self._reason = self._reason or "the client closed the connection"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._server.links.discard(self)
        # Any other error is the network's: the client may be well and come back.
        closed = not self._ending and (exc is None or isinstance(exc, ConnectionError))
        self._ending = True
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
        """It caught up."""
        self._outbox.resume()

    # -- what the broker calls -----------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Queue a frame; a client that leaves too much unread is cut off instead."""
        if self._ending:
            return
        if frame.request in self._unanswered:
            self._answered(frame.request)
        if frame.kind == WELCOME:
            self.welcomed()
        elif self._greeting:  # an error: the next Hello may do better
            self._greeting = False
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
        """Read nothing from the client for a while: what it sends meanwhile comes in larger frames."""
        if not self._rest.on and not self._ending:
            self._rest.begin(seconds, courteous=self._reader.large)
            self.hold(True)

    # -- what an old client calls --------------------------------------------------------------

    def write(self, *data: bytes) -> None:
        """Queue bytes that are no frame; those of one call count as one."""
        if not self._ending:
            self._outgoing.put(data)
            self._bound()

    def welcomed(self) -> None:
        """The broker knows who this is: large frames are welcome from now on."""
        self._reader.limit_bytes = self._settings.max_frame_bytes
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._greeting = False
        self.hold(False)

    def hold(self, stop: bool) -> None:
        """Stop or go on reading from the client."""
        stop = (
            stop
            or self._greeting
            or self._rest.on
            or self._expansion.busy
            or self._unanswered_bytes > UNANSWERED_BYTES
            or self._crowded
            or (self._old is not None and self._old.full)
        )
        if stop == self.holding or self._ending:
            return
        self.holding = stop
        if stop:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # -- what comes in -------------------------------------------------------------------------

    def _meet(self, first: int) -> None:
        """Judge a client by its first byte."""
        if first in oldcommand.COMMANDS:
            self._old = OldClient(self, self._server.settings)
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
        assert self._old is not None
        if self._connection is None:
            self._connection = self._old.start(self._server.broker.connected)
            self._greeting = True
            self.hold(True)
        self._old.command(*message)

    def _negotiate(self, message: Message) -> None:
        _, body = message
        choice = choose(body, self._settings.max_frame_bytes, marks())
        self._connection = self._server.broker.connected(self)
        self._handle = self._receive
        self._outgoing.put([answer(choice)])
        self._outgoing.mark = MARKS[choice.mark]
        self._outgoing.compressor = COMPRESSORS.index(choice.compressor)

    def _receive(self, message: Message) -> None:
        if expands(self._expansion, message, self._reader.limit_bytes):
            self.hold(True)
        else:
            frame = decode_frame(message, self._reader.limit_bytes)
            self._accept(message[1], *translated(frame))

    def _expanded(
        self, work: asyncio.Future[Read], message: Message, behind: list[Message]
    ) -> None:
        self._take_all([message], lambda _: self._accept(message[1], *work.result()))
        self._take_all(behind)
        self.hold(False)

    def _accept(self, body: Bytes, frame: Frame, error: PenstockError | None) -> None:
        if frame.request and (len(body) >= COUNTED_BYTES or body[COMPRESSOR_AT]):
            self._count(frame.request, frame.size_bytes)
        if frame.kind == HELLO and self._timer is not None:
            # What an eager client sends behind its Hello waits in the socket.
            self._greeting = True
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
            self.hold(False)

    def _answered(self, request: int) -> None:
        self._unanswered_bytes -= self._unanswered.pop(request)
        if self.holding:
            self.hold(False)

    def _discard(self, nbytes: int) -> None:
        self._discarded_bytes += nbytes
        if self._discarded_bytes > LINGER_BYTES:
            self._transport.abort()

    # -- what goes out -------------------------------------------------------------------------

    def _bound(self) -> None:
        """Cut off a client that leaves too much unread; one that waits for our threads asks no more."""
        outgoing, limit_bytes = self._outgoing, self._settings.send_buffer_bytes
        if self._ending:
            return
        if outgoing.piled_bytes > ABORT_FACTOR * limit_bytes:
            self.abort(f"the client left {outgoing.pending_bytes()} bytes unread")
        elif self._crowded != (outgoing.waiting_bytes > limit_bytes):
            self._crowded = not self._crowded
            self.hold(False)

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
        if self._old is not None:
            self.write(oldcommand.Error(fault.code, fault.message).message())
        elif self._connection is None:
            self.write(refuse(error))
        else:
            self.send(Frame(Kind.FAULT, 0, encode(fault)))
        self._end(fault.message)

    def _lose(self, *, closed: bool = False) -> None:
        """Tell the broker, once; it need not wait for last words to arrive."""
        if self._old is not None:
            self._old.stop()
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
        # Nothing holds the reading any more: the client's own end must be seen.
        self._greeting = self._crowded = False
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
        except OSError:  # the client has reset the connection; asyncio is about to say so
            self._transport.abort()

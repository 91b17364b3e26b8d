"""ZeroMQ sockets on the asyncio loop, for client and broker.

`Pump` calls a function when a socket may have something to read, `Monitor` reports what happens to its
connections, and `ZmqOutbox` sends messages and knows how many bytes are not sent yet. This module alone
imports pyzmq, and names the extra to install when it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from penstock.model.errors import InvalidSettings, MissingExtra
from penstock.transport.tcp import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES
from penstock.wire.frame import Bytes

try:
    import zmq
    from zmq.utils import z85
except ImportError as error:
    raise MissingExtra(
        "ZeroMQ needs the pyzmq package. Install it with: pip install 'penstock[server]'",
        extra="server",
    ) from error

__all__ = [
    "COPY_BELOW_BYTES", "MARK_BYTES", "NOBLOCK", "WINDOW_BYTES", "Context", "Monitor", "Pump", "Socket",
    "ZmqOutbox", "client_context", "curve_key", "endpoint", "keep_alive", "zmq",
]  # fmt: skip

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

CURVE_KEY_BYTES = 32
# A client connection takes two sockets of libzmq, whose default limit is 1,023.
MAX_SOCKETS = 65_536

_context: tuple[int, Context] | None = None


def client_context() -> Context:
    """The context that all client connections of this process share: one thread for all of them."""
    global _context
    pid = os.getpid()
    if _context is None or _context[0] != pid:  # a forked child has none of the threads
        context: Context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _context = (pid, context)
    return _context[1]


def curve_key(text: str, setting: str) -> bytes:
    """A CURVE key in the form that libzmq takes; raises InvalidSettings on anything but Z85 text.

    >>> curve_key("too short", "server.curve_secret_key")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: server.curve_secret_key is no CURVE key...
    """
    try:
        key = text.encode("ascii")
        if len(key) != 40 or len(z85.decode(key)) != CURVE_KEY_BYTES:
            raise ValueError("wrong length")
    except (ValueError, KeyError, struct.error) as error:
        raise InvalidSettings(
            f"{setting} is no CURVE key: give 40 characters of Z85, as penstock.server.transports.curve.make_keys makes them",
            key=setting,
        ) from error
    return key


def endpoint(host: str, port: int) -> str:
    """An address in the notation of libzmq.

    >>> endpoint("::1", 5555), endpoint("", 5555)
    ('tcp://[::1]:5555', 'tcp://*:5555')
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host or '*'}:{port}"


def keep_alive(socket: Socket) -> None:
    """Let the operating system notice a peer that is gone, not the heartbeats of libzmq.

    libzmq 4.3.5 aborts the process ("Assertion failed: !_io_error") when it sends a PING on a connection
    that broke while its queue was full.
    """
    socket.set(zmq.HEARTBEAT_IVL, 0)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)


# -- receiving ------------------------------------------------------------------------------------


NOBLOCK = int(zmq.NOBLOCK)
# event, value; a second part holds the endpoint
_EVENT = struct.Struct("=Hi")
_numbers = itertools.count()


class Pump:
    """Calls `receive` whenever a socket may have something to read.

    `receive` reads until zmq.Again and returns False, or stops early, so that other tasks run, and
    returns True.

    The descriptor of a ZeroMQ socket becomes readable when the socket has any work, not only messages,
    and any call on the socket, `send` included, may clear that signal. So every sender calls `nudge`,
    and after a `receive` that stopped early the pump calls it again.
    """

    __slots__ = ("_fd", "_loop", "_nudged", "_receive", "_running")

    def __init__(self, socket: Socket, receive: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._fd = int(socket.get(zmq.FD))
        self._nudged = False
        self._running = True
        self._loop.add_reader(self._fd, self._turn)
        self.nudge()

    def nudge(self) -> None:
        """Check the socket in this or the next turn of the loop, because it was used."""
        if not self._nudged and self._running:
            self._nudged = True
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Stop watching; call it before the socket is closed."""
        if self._running:
            self._running = False
            self._loop.remove_reader(self._fd)

    def _turn(self) -> None:
        self._nudged = False
        if self._running and self._receive():
            self.nudge()


class Monitor:
    """Calls `on_event(event, value)` on the loop for what happens to the connections of a socket."""

    def __init__(
        self, context: Context, socket: Socket, events: int, on_event: Callable[[int, int], None]
    ) -> None:
        address = f"inproc://penstock-monitor-{next(_numbers)}"
        self._watched = socket
        self._on_event = on_event
        socket.monitor(address, events)
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.RCVHWM, 0)  # with a limit, libzmq's own thread would wait for the loop
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._pump = Pump(self._socket, self.drain)

    def drain(self) -> bool:
        """Report everything that has happened so far."""
        while not self._socket.closed:
            try:
                event, value = _EVENT.unpack(self._socket.recv(NOBLOCK))
                self._socket.recv(NOBLOCK)
            except zmq.Again:
                break
            self._on_event(event, value)
        return False

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed."""
        if not self._socket.closed:
            self._pump.stop()
            self._watched.monitor(None, 0)
            self._socket.close()


# -- sending --------------------------------------------------------------------------------------


# Copying a part of this size takes as long as sending it without a copy does (about 15 us).
COPY_BELOW_BYTES = 32 << 10
# Once this many bytes were sent unmarked, a small part is marked, too; up to so much is not counted.
MARK_BYTES = 256 << 10
# Bytes inside libzmq at once: a millisecond or two of a fast network.
WINDOW_BYTES = 2 << 20
# Memory that libzmq needs for a part besides its bytes.
PART_COST_BYTES = 96
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
GONE = frozenset({zmq.EHOSTUNREACH, zmq.EAGAIN})


class _Mark(weakref.ref[memoryview]):
    """A part that libzmq holds, and how many bytes are sent when libzmq releases it."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class ZmqOutbox:
    """Sends messages through a socket, to the peer `identity` if the socket is a ROUTER.

    libzmq takes any message and tells neither how much it holds nor when a message is sent, and its own
    limits count messages of any size. So some parts are marked: a part that is sent without a copy stays
    alive until libzmq has written it, and everything before it, to the connection. Bytes before the
    oldest living mark are sent, bytes behind it are pending. Only a window of bytes is inside libzmq; the
    rest waits here.
    """

    __slots__ = (
        "_held_bytes", "_identity", "_loop", "_marks", "_nudge", "_open", "_queue",
        "_queued_bytes", "_socket", "_unmarked_bytes", "_unreachable", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        socket: Socket,
        nudge: Callable[[], None],
        unreachable: Callable[[], None],
        identity: bytes = b"",
    ) -> None:
        self._socket = socket
        self._nudge = nudge
        self._unreachable = unreachable
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Sequence[Bytes]] = deque()
        self._queued_bytes = 0
        self._marks: deque[_Mark] = deque()
        self._held_bytes = 0
        self._unmarked_bytes = 0
        self._waiting = False
        self._open = True

    def put(self, message: Sequence[Bytes]) -> None:
        """Send a message now, or as soon as there is room."""
        if not self._open:
            return
        if not self._queue and not self._full():
            self._transmit(message)
            return
        self._queue.append(message)
        self._queued_bytes += sum(map(len, message))
        self._waiting = True
        # A mark may have died after `_full` and before `_waiting` was set.
        if not self._full():
            self.flush()

    def pending_bytes(self) -> int:
        """Bytes that wait here or inside libzmq, up to the last MARK_BYTES."""
        self._full()
        return self._queued_bytes + self._held_bytes

    def flush(self) -> None:
        """Send what there is room for."""
        while self._queue and not self._full():
            message = self._queue.popleft()
            self._queued_bytes -= sum(map(len, message))
            self._transmit(message)
        self._waiting = bool(self._queue)

    def finish(self) -> None:
        """Hand everything to libzmq, beyond the window, too: the socket is about to close."""
        while self._queue:
            self._transmit(self._queue.popleft())
        self.clear()

    def clear(self) -> None:
        """Drop what waits and take no more: the connection is gone."""
        self._open = self._waiting = False
        self._queue.clear()
        self._queued_bytes = 0

    def _full(self) -> bool:
        marks = self._marks
        while marks and marks[0]() is None:
            self._held_bytes -= marks.popleft().size_bytes
        return self._held_bytes >= WINDOW_BYTES

    def _transmit(self, message: Sequence[Bytes]) -> None:
        send = self._socket.send
        try:
            if self._identity:
                send(self._identity, MORE)
            last = len(message) - 1
            for index, part in enumerate(message):
                flags = MORE if index < last else NOBLOCK
                size = len(part)
                self._unmarked_bytes += size + PART_COST_BYTES
                if size >= COPY_BELOW_BYTES or (
                    index == last and size and self._unmarked_bytes >= MARK_BYTES
                ):
                    send(self._marked(part), flags, copy=False)
                else:
                    send(part, flags)
        except zmq.ZMQError as error:
            if error.errno not in GONE:
                raise
            self.clear()
            self._unreachable()
        self._nudge()

    def _marked(self, part: Bytes) -> zmq.Frame:
        view = memoryview(part)  # a new one, even of a view: only libzmq holds it
        mark = _Mark(view, self._released)
        mark.size_bytes = self._unmarked_bytes
        self._marks.append(mark)
        self._held_bytes += self._unmarked_bytes
        self._unmarked_bytes = 0
        return zmq.Frame(view, copy=False)

    def _released(self, _: weakref.ref[memoryview]) -> None:
        """Send more: libzmq has released a part. Runs in a thread of pyzmq, or in any other."""
        if self._waiting:
            # RuntimeError: the loop has ended, and there is nothing left to send.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.flush)

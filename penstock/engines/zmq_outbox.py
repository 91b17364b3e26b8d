"""ZmqOutbox: frames on their way into one ZeroMQ connection, counted in bytes.

libzmq takes whatever it is given and says neither how much it holds nor when it is gone, and its
own limits count messages, of whatever size. So the outbox marks some of the parts: a part that is
sent without copying stays alive until libzmq has written it, and everything before it, to the
connection. Bytes before the oldest living mark are gone; what is behind is pending. Only a window
of bytes is inside libzmq; the rest waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from penstock.engines.zmq_library import Socket, zmq
from penstock.engines.zmq_pump import NOBLOCK
from penstock.wire.frame import Bytes

# Copying a part of this size takes as long as sending it without a copy does (about 15 us).
COPY_BELOW_BYTES = 32 << 10
# Small parts are marked, too, once this many bytes went out unmarked; so much is not counted.
MARK_BYTES = 256 << 10
# Bytes inside libzmq at once: a millisecond or two of a fast network.
WINDOW_BYTES = 2 << 20
# What libzmq needs for a part besides its bytes.
PART_COST_BYTES = 96
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
GONE = frozenset({zmq.EHOSTUNREACH, zmq.EAGAIN})


class _Mark(weakref.ref[memoryview]):
    """A part that libzmq holds, and the bytes that are gone when it is."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class ZmqOutbox:
    """Sends messages through a socket, to the peer `identity` if the socket is a ROUTER."""

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
        # A mark may have died after the look and before it could know that somebody waits.
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
        """Give everything to libzmq, window or not: the socket is about to close."""
        while self._queue:
            self._transmit(self._queue.popleft())
        self.clear()

    def clear(self) -> None:
        """Forget what waits and take no more: the connection is gone."""
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
        view = memoryview(part)  # a new one, even of a view: nobody else holds it
        mark = _Mark(view, self._released)
        mark.size_bytes = self._unmarked_bytes
        self._marks.append(mark)
        self._held_bytes += self._unmarked_bytes
        self._unmarked_bytes = 0
        return zmq.Frame(view, copy=False)

    def _released(self, _: weakref.ref[memoryview]) -> None:
        """libzmq is through with a part. Runs in a thread of pyzmq, or anywhere."""
        if self._waiting:
            # After the loop has ended there is nobody left to send for.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.flush)

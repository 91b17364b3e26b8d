"""TCP for client and broker: the send buffer of a connection, keep-alive, and memory for large messages.

The send buffer writes the first message of a loop turn at once, since it is mostly the only one and its
receiver should start early. It joins the rest of the turn into one write.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import queue
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from penstock.wire.frame import Bytes

# Bytes of one write: enough to make calls rare, few enough that little is copied when the operating
# system takes only part of them.
WRITE_BYTES = 256 << 10
# Buffers from this size on are written as they are; joining them to others would copy them.
ALONE_BYTES = 64 << 10
# A peer that is gone without closing is noticed after a minute.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3


class SendBuffer:
    """Sends the buffers of one loop turn in two writes, and holds them while the peer is slow."""

    __slots__ = ("_loop", "_paused", "_queue", "_queued_bytes", "_scheduled", "_transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._queue: deque[Bytes] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._scheduled = False
        transport.set_write_buffer_limits(high=WRITE_BYTES)

    def put(self, buffers: Sequence[Bytes]) -> int:
        """Write buffers now, or with others at the end of this turn; returns their size."""
        self._queue.extend(buffers)
        size = sum(map(len, buffers))
        self._queued_bytes += size
        if not self._scheduled and not self._paused:
            self.flush()
            self._scheduled = True
            self._loop.call_soon(self.flush)
        return size

    def pending_bytes(self) -> int:
        """Bytes queued here or in the transport."""
        return self._queued_bytes + self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Hold buffers back: the transport's own buffer is full. Called by its protocol."""
        self._paused = True

    def resume(self) -> None:
        """Write again: the transport has room. Called by its protocol."""
        self._paused = False
        self.flush()

    def push(self) -> None:
        """Hand everything to the operating system now, as far as the peer reads it."""
        # uvloop writes at once only above its limit; asyncio always does.
        self._transport.set_write_buffer_limits(high=0)
        self.flush()
        self._transport.set_write_buffer_limits(high=WRITE_BYTES)

    def flush(self) -> None:
        """Write as much as the transport takes."""
        self._scheduled = False
        while self._queue and not self._paused:
            self._write_some()

    def finish(self) -> None:
        """Hand everything to the transport, which is about to close."""
        self._paused = False
        while self._queue:
            self._write_some()

    def clear(self) -> None:
        """Drop everything: the connection is gone."""
        self._queue.clear()
        self._queued_bytes = 0
        self._paused = True

    def _write_some(self) -> None:
        queue = self._queue
        size = len(queue[0])
        if size >= ALONE_BYTES:
            view = memoryview(queue.popleft())
            if size > WRITE_BYTES:
                queue.appendleft(view[WRITE_BYTES:])
                view = view[:WRITE_BYTES]
            self._queued_bytes -= len(view)
            self._transport.write(view)
            return
        joined = []
        total = 0
        while queue and total < WRITE_BYTES and len(queue[0]) < ALONE_BYTES:
            buffer = queue.popleft()
            total += len(buffer)
            joined.append(buffer)
        self._queued_bytes -= total
        self._transport.writelines(joined)


def keep_alive(sock: socket.socket) -> None:
    """Send small packets at once, and let the operating system notice a peer that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


# -- memory for large messages --------------------------------------------------------------------


FAILED = ctypes.c_void_p(-1).value  # the result of a failed mmap
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
# Memory to unmap: address and size. A finalizer may call `put` of this queue in any thread.
_released: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def large_room(size: int) -> memoryview:
    """Writable memory, all zero, meant for a MiB and more; raises OSError when there is none.

    Python holds the interpreter while it unmaps memory: 2.6 ms for 16 MiB, in whichever thread drops the
    last reference, and all other threads wait. Here a thread unmaps it without the interpreter.

    >>> room = large_room(1 << 20)
    >>> room[:3] = b"abc"
    >>> bytes(room[:4]), len(room)
    (b'abc\\x00', 1048576)
    """
    _start()
    address = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    room = (ctypes.c_ubyte * size).from_address(address)
    # Called when no view of it is left, in any thread.
    weakref.finalize(room, _released.put, (address, size)).atexit = False
    return memoryview(room).cast("B")


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():  # a child of a fork has no threads
            _thread = threading.Thread(target=_unmap, name="penstock-room", daemon=True)
            _thread.start()


def _unmap() -> None:
    while True:
        address, size = _released.get()
        _libc.munmap(address, size)

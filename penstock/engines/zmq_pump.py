"""Pump: a raw ZeroMQ socket driven by the asyncio loop, and the events of such a socket.

The descriptor of a ZeroMQ socket does not say that there is something to read. It becomes readable
when the socket has anything to look at, and any call on the socket, `send` included, may swallow
that sign. So whoever sends nudges the pump, and a turn that stops early comes again by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable

from penstock.engines.zmq_library import Context, Socket, zmq

NOBLOCK = int(zmq.NOBLOCK)
# event, value; a second part holds the endpoint
_EVENT = struct.Struct("=Hi")
_numbers = itertools.count()


class Pump:
    """Calls `receive` whenever a socket may have something to read.

    `receive` reads until zmq.Again and returns False, or stops early to let others have the loop
    and returns True.
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
        """The socket was used: have a look in this or the next turn of the loop."""
        if not self._nudged and self._running:
            self._nudged = True
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Look no more; call it before the socket is closed."""
        if self._running:
            self._running = False
            self._loop.remove_reader(self._fd)

    def _turn(self) -> None:
        self._nudged = False
        if self._running and self._receive():
            self.nudge()


class Monitor:
    """What happens to the connections of a socket: calls `on_event(event, value)` on the loop."""

    def __init__(
        self, context: Context, socket: Socket, events: int, on_event: Callable[[int, int], None]
    ) -> None:
        address = f"inproc://penstock-monitor-{next(_numbers)}"
        self._watched = socket
        self._on_event = on_event
        socket.monitor(address, events)
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.RCVHWM, 0)  # with a limit, libzmq's own thread would wait for us
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
        """Watch no more; call it before the watched socket is closed."""
        if not self._socket.closed:
            self._pump.stop()
            self._watched.monitor(None, 0)
            self._socket.close()

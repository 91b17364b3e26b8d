"""Every committed batch, sent to all subscribers over a PUB socket.

Delivery is at most once: a subscriber that is not connected misses batches, and a slow one loses some, or
its connection. Each batch is a message of three parts: its topic, an envelope and the encoded batch.
ZeroMQ subscribes by prefix.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidSettings
from penstock.model.settings import Settings
from penstock.server.metrics.counters import Counters
from penstock.server.transports.curve import CurveAuthenticator
from penstock.server.transports.zeromq import bind, configure, is_loopback
from penstock.server.transports.zeromq_peers import Peers
from penstock.transport.zeromq import NOBLOCK, Context, Pump, Socket, zmq
from penstock.wire.frame import ENVELOPE, MAGIC, VERSION, Kind, Mark

# Batches that wait for one subscriber; it loses batches beyond that.
AHEAD_BATCHES = 1_000
# Bytes that wait for all subscribers together. Above that the slowest loses its connection, and one
# more with every step. At twice as many, nothing is sent.
BUFFER_BYTES = 64 << 20
STEP_BYTES = 8 << 20
# Distinct prefixes that are told apart; with more, every batch is sent to libzmq, which filters.
MAX_PREFIXES = 16_384
# A subscription is a prefix of a topic; libzmq ends a connection that sends more.
MAX_SUBSCRIPTION_BYTES = 4_096
# Topics for which it is remembered whether they have subscribers.
MAX_KNOWN_TOPICS = 16_384
# Subscriptions read before other work of the loop gets its turn.
SUBSCRIPTIONS_PER_TURN = 1_024
ENVELOPE_BYTES = ENVELOPE.pack(MAGIC, VERSION, Kind.DELIVER, Mark.RAW, 0)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# Time for libzmq to send the last batches when the fan-out stops.
LINGER_MS = 100


class _Held(weakref.ref[memoryview]):
    """An encoded batch that libzmq holds for a subscriber."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class Fanout:
    """Sends committed batches to subscribers."""

    def __init__(self, settings: Settings, counters: Counters | None = None) -> None:
        self.settings = settings
        self._counters = counters or Counters()
        self._prefixes: set[bytes] = set()
        self._all = False
        self._wanted: dict[str, bool] = {}
        self._held: dict[int, _Held] = {}
        self._held_bytes = 0
        self._freed: deque[weakref.ref[memoryview]] = deque()
        self._limit_bytes = 0
        self._peers: Peers
        self._socket: Socket
        self._pump: Pump
        self._opened: ExitStack | None = None

    def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which port 0 leaves to the operating system."""
        server = self.settings.server
        if not is_loopback(host) and not (server.curve_secret_key and server.curve_clients):
            raise InvalidSettings(
                f"server.pub: {host}:{port} can be reached from other hosts, and a subscriber shows "
                "no token: anybody could read every event. Set server.curve_secret_key and "
                "server.curve_clients, or bind it to 127.0.0.1, or leave it empty",
                key="server.pub",
            )
        context: Context = zmq.Context()
        with ExitStack() as opened:  # closed in reverse order at the end
            opened.callback(context.destroy, linger=LINGER_MS)
            gate = CurveAuthenticator(context, server)
            opened.callback(gate.close)
            self._socket = context.socket(zmq.XPUB)
            configure(self._socket)
            self._socket.set(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            self._socket.set(zmq.SNDHWM, AHEAD_BATCHES)
            gate.guard(self._socket)
            self._peers = Peers(context, self._socket, server.max_connections, None)
            opened.callback(self._peers.close)
            bound = bind(self._socket, host, port, "server.pub")
            self._pump = Pump(self._socket, self._receive)
            opened.callback(self._pump.stop)
            self._opened = opened.pop_all()
        return bound

    def stop(self) -> None:
        """Stop listening; batches on their way have LINGER_MS."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def committed(self, batches: Sequence[EventBatch]) -> None:
        """Send batches that were just committed; costs nothing for topics without subscribers."""
        if self._opened is None or not (self._prefixes or self._all):
            return
        for batch in batches:
            if self._listened(batch.topic):
                self._send(batch)
        self._pump.nudge()

    def held_bytes(self) -> int:
        """Bytes that libzmq holds for subscribers that have not read them yet."""
        while self._freed:
            held = self._held.pop(id(self._freed.popleft()))
            self._held_bytes -= held.size_bytes
        return self._held_bytes

    def _listened(self, topic: str) -> bool:
        known = self._wanted.get(topic)
        if known is None:
            if len(self._wanted) >= MAX_KNOWN_TOPICS:
                self._wanted.clear()
            known = self._all or topic.encode().startswith(tuple(self._prefixes))
            self._wanted[topic] = known
        return known

    def _send(self, batch: EventBatch) -> None:
        if not self._room():
            self._counters.backpressure("fan-out")
            return
        encoded = memoryview(batch.encode())
        held = _Held(encoded, self._freed.append)  # called in a thread of pyzmq
        held.size_bytes = len(encoded)
        self._held[id(held)] = held
        self._held_bytes += len(encoded)
        self._socket.send(batch.topic.encode(), MORE)
        self._socket.send(ENVELOPE_BYTES, MORE)
        self._socket.send(zmq.Frame(encoded, copy=False), NOBLOCK, copy=False)

    def _room(self) -> bool:
        """Whether there is room for another batch; makes room by disconnecting the slowest subscriber."""
        held = self.held_bytes()
        if held <= BUFFER_BYTES:
            self._limit_bytes = BUFFER_BYTES
        elif held > self._limit_bytes:
            self._limit_bytes = held + STEP_BYTES
            slowest = self._peers.slowest()
            if slowest is not None:
                self._peers.cut(slowest, f"{held} bytes wait for subscribers; it is the slowest")
        return held <= 2 * BUFFER_BYTES

    def _receive(self) -> bool:
        for _ in range(SUBSCRIPTIONS_PER_TURN):
            try:
                message = self._socket.recv(NOBLOCK)
            except zmq.Again:
                self._peers.caught_up()
                return False
            self._wanted.clear()
            if message[:1] == b"\x01":
                self._all = self._all or len(self._prefixes) >= MAX_PREFIXES
                if not self._all:
                    self._prefixes.add(message[1:])
            elif message[:1] == b"\x00":
                self._prefixes.discard(message[1:])
        self._peers.look_ahead()
        return True

"""ZmqLink: a client's connection to a broker over ZeroMQ, with or without CURVE keys."""

from __future__ import annotations

import asyncio
import ipaddress
import socket as net
from collections.abc import Callable

from penstock.engines.broker.tcp import MAX_FRAME_BYTES, check_size
from penstock.model.errors import BrokerUnreachable, PenstockError
from penstock.transport.zeromq import (
    COPY_BELOW_BYTES,
    NOBLOCK,
    Monitor,
    Pump,
    Socket,
    ZmqOutbox,
    client_context,
    curve_key,
    endpoint,
    keep_alive,
    zmq,
)
from penstock.wire.frame import MAX_PARTS, Bytes, Frame

DEFAULT_PORT = 5555
# Frames that libzmq reads ahead of the application; credit bounds what they hold.
AHEAD_FRAMES = 1_000
# Parts read before other work of the loop gets its turn.
PARTS_PER_TURN = 1_024
# Time for the last frames to leave after `close`.
LINGER_MS = 1_000
# The event that a connection has ended overtakes its last frames; they get this long to arrive.
LAST_FRAMES_S = 0.01
# libzmq reconnects by itself, and drops unread frames when that is switched off, so it waits a day.
RECONNECT_MS = 24 * 3_600 * 1_000

WATCHED = int(
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
NOT_LISTED = "the broker refuses this client's key: add its public key to server.curve_clients"
WRONG_KEY = (
    "it hung up during the handshake, most likely because of the keys: client.curve_server_key must "
    "be the public key that belongs to server.curve_secret_key, and empty when the broker has none"
)
NO_HANDSHAKE = (
    "it hung up during the handshake: it speaks no ZeroMQ, or wants CURVE keys; see "
    "client.curve_server_key"
)


class ZmqLink:
    """One connection to a broker: a ClientLink over a DEALER socket."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        server_key: str = "",
        secret_key: str = "",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.host = host
        self.port = port
        self.max_frame_bytes = max_frame_bytes
        """Largest frame the broker sends; after its Welcome, the largest it takes."""
        self._server_key = server_key
        self._secret_key = secret_key
        self._connect_timeout_s = connect_timeout_s
        self._socket: Socket | None = None
        self._monitor: Monitor
        self._pump: Pump
        self._outbox: ZmqOutbox
        self._opening: asyncio.Future[None] | None = None
        self._on_frame: Callable[[Frame], None]
        self._on_lost: Callable[[str], None] | None = None
        self._parts: list[Bytes] = []
        self._leaving = ""

    async def open(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """Connect and shake hands; raises BrokerUnreachable, which names the likely cause."""
        self._on_frame = on_frame
        self._opening = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                self._connect(await _resolve(self.host, self.port))
                await self._opening
        except (OSError, zmq.ZMQError) as error:  # a timeout is an OSError, too
            self.close()
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise self._unreachable(
                f"{reason}. Start it with `penstock up`, or look at the address"
            ) from error
        except BaseException:
            self.close()
            raise
        self._on_lost = on_lost

    def send(self, frame: Frame) -> None:
        """Queue a frame; raises PayloadTooLarge when the broker would end the connection for it."""
        if self._socket is None:
            return
        check_size(frame, frame.size_bytes, self.max_frame_bytes)
        self._outbox.put(frame.multipart())

    def push(self) -> None:
        """Do nothing: libzmq has all frames already, and sends them in a thread of its own."""

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        return 0 if self._socket is None else self._outbox.pending_bytes()

    def close(self) -> None:
        """End the connection; frames that libzmq holds are sent first."""
        socket, self._socket = self._socket, None
        self._on_lost = None
        if socket is None:
            return
        self._outbox.finish()
        self._pump.stop()
        self._monitor.close()
        socket.close(LINGER_MS)

    # -- connecting ------------------------------------------------------------------------------

    def _connect(self, host: str) -> None:
        context = client_context()
        socket = context.socket(zmq.DEALER)
        try:
            self._configure(socket)
            socket.set(zmq.IPV6, int(":" in host))
        except BaseException:
            socket.close(0)
            raise
        self._socket = socket
        self._pump = Pump(socket, self._receive)
        self._monitor = Monitor(context, socket, WATCHED, self._happened)
        self._outbox = ZmqOutbox(socket, self._pump.nudge, self._unroutable)
        socket.connect(endpoint(host, self.port))

    def _configure(self, socket: Socket) -> None:
        timeout_ms = max(1, int(self._connect_timeout_s * 1_000))
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)  # the channel makes the next connection
        socket.set(zmq.CONNECT_TIMEOUT, timeout_ms)
        socket.set(zmq.HANDSHAKE_IVL, timeout_ms)
        keep_alive(socket)
        socket.set(zmq.MAXMSGSIZE, self.max_frame_bytes)
        socket.set(zmq.SNDHWM, 0)  # the outbox counts bytes instead
        socket.set(zmq.RCVHWM, AHEAD_FRAMES)
        if self._server_key:
            secret = self._secret_key and curve_key(self._secret_key, "client.curve_secret_key")
            public, secret = (zmq.curve_public(secret), secret) if secret else zmq.curve_keypair()
            socket.set(zmq.CURVE_SERVERKEY, curve_key(self._server_key, "client.curve_server_key"))
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)

    def _happened(self, event: int, _: int) -> None:
        opening = self._opening
        if opening is None:
            loop = asyncio.get_running_loop()
            loop.call_later(LAST_FRAMES_S, self._leave, "the broker closed the connection")
            return
        if opening.done():
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._opening = None
            opening.set_result(None)
        else:
            opening.set_exception(self._unreachable(self._cause(event)))

    def _cause(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return NOT_LISTED
        if event == zmq.EVENT_CLOSED:
            return "nothing listens there. Start it with `penstock up`, or look at the address"
        return WRONG_KEY if self._server_key else NO_HANDSHAKE

    def _unreachable(self, why: str) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"no broker answers at {self.host}:{self.port}: {why}", host=self.host, port=self.port
        )

    # -- frames ----------------------------------------------------------------------------------

    def _receive(self) -> bool:
        parts = self._parts
        for _ in range(PARTS_PER_TURN):
            socket = self._socket
            if socket is None:
                return False
            try:
                frame = socket.recv(NOBLOCK, False)
            except zmq.Again:
                if self._leaving:
                    self._gone(self._leaving)
                return False
            if len(parts) <= MAX_PARTS + 2:  # one too many, so that the check refuses the message
                parts.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer)
            if not frame.more:
                message, self._parts = parts, []
                parts = self._parts
                self._take(message)
        return True

    def _take(self, message: list[Bytes]) -> None:
        try:
            frame = Frame.of_multipart(message)
        except PenstockError as error:
            self._gone(f"the broker sent something else than a frame: {error.message}")
            return
        self._on_frame(frame)

    def _unroutable(self) -> None:
        self._leave("the connection is gone")

    def _leave(self, reason: str) -> None:
        """Close after reading everything that has arrived."""
        if self._socket is not None:
            self._leaving = reason
            self._pump.nudge()

    def _gone(self, reason: str) -> None:
        on_lost = self._on_lost
        self.close()
        if on_lost is not None:
            on_lost(reason)


async def _resolve(host: str, port: int) -> str:
    """The address of a name, IPv4 first; resolved by libzmq, it would delay every other connection."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=net.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != net.AF_INET)[4][0])

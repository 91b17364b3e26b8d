"""ClientLink, a client's connection to a broker, and TcpLink: the same over TCP, with or without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from penstock.model.errors import (
    BrokerUnreachable,
    InvalidSettings,
    PayloadTooLarge,
    PenstockError,
    ProtocolViolation,
)
from penstock.transport.tcp import SendBuffer, keep_alive, large_room
from penstock.wire.frame import BODY_HEAD, MAX_PARTS, PART_LENGTH, Frame
from penstock.wire.limits import check_message
from penstock.wire.negotiation import MAX_NEGOTIATION_BYTES, NEGOTIATE, Choice, chosen, offer
from penstock.wire.stream import COMPRESSORS, Message, StreamReader, decode_frame, encode_frame

DEFAULT_PORT = 5557
# The default of server.max_frame_bytes; it holds until the broker's Welcome gives another number.
MAX_FRAME_BYTES = 320 << 20
# To connect, shake hands for TLS and negotiate, all together; the channel tries again after it.
OPEN_S = 10.0
# Queued bytes get this long to leave after `close`, in case the broker does not read.
LINGER_S = 2.0


class ClientLink(Protocol):
    """What the channel needs of a transport. One object is one connection; it is not reused."""

    max_frame_bytes: int
    """Largest frame the broker takes; the channel sets what its Welcome says."""

    async def open(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """Connect; raises BrokerUnreachable, ProtocolViolation or WrongProtocolVersion.

        `on_lost` is called once when the connection breaks, and not after `close`.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame; never waits. After the connection is gone it does nothing.

        Raises PayloadTooLarge when the broker would end the connection for it: the channel would send
        the frame again over the next connection, and lose that as well.
        """
        ...

    def push(self) -> None:
        """Hand what is queued to the operating system, so that it is sent even if the process dies.

        ZeroMQ sends in a thread of its own, a moment later.
        """
        ...

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class TcpLink(asyncio.BufferedProtocol):
    """One connection to a broker: a ClientLink."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        compressor: str = "none",
        tls_context: ssl.SSLContext | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.host = host
        self.port = port
        self.max_frame_bytes = max_frame_bytes
        """Largest frame the broker sends; after `open`, also the largest it takes."""
        self._offered = compressor
        self._tls = tls_context
        self._accepts_bytes = max_frame_bytes
        self._reader = StreamReader(MAX_NEGOTIATION_BYTES, room=large_room)
        self._compressor = 0
        self._on_frame: Callable[[Frame], None]
        self._on_lost: Callable[[str], None] | None = None
        self._opening: asyncio.Future[Choice] | None = None
        self._transport: asyncio.Transport | None = None
        self._send_buffer: SendBuffer | None = None

    # -- called by the channel ---------------------------------------------------------------

    async def open(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        """Connect and negotiate; raises BrokerUnreachable, ProtocolViolation or the broker's error."""
        loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        # `_take` clears it when the answer is there, which may be before `create_connection` returns.
        opening = self._opening = loop.create_future()
        try:
            async with asyncio.timeout(OPEN_S):
                await loop.create_connection(lambda: self, self.host, self.port, ssl=self._tls)
                await opening
                if self._transport is None:
                    raise ConnectionResetError("it closed the connection at once")
        except (OSError, TimeoutError) as error:
            self.close()
            raise BrokerUnreachable(
                f"no broker answers at {self.host}:{self.port}: {error or 'timed out'}. {self._advice(error)}",
                host=self.host,
                port=self.port,
            ) from error
        except BaseException:
            self.close()
            raise
        self._on_lost = on_lost

    def _advice(self, error: OSError) -> str:
        """What the user can do about a failed attempt to connect."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                "Give the broker a certificate that is valid for this address, or name its authority "
                "with client.tls_ca"
            )
        if isinstance(error, ssl.SSLError):
            return "Where the broker has no TLS the URL begins with penstock://"
        start = "Start it with `penstock up`, or look at the address: it is that of server.tcp"
        if isinstance(error, ConnectionResetError):
            if self._tls is None:
                return f"{start}; where the broker has TLS the URL begins with penstocks://"
            # With TLS 1.3 the broker refuses a client without a certificate only after the client's
            # handshake, and mostly the client sees no more than the end of the connection.
            return (
                "If it asks clients for certificates, set client.tls_certificate and client.tls_key"
            )
        return start

    def send(self, frame: Frame) -> None:
        """Queue a frame; raises PayloadTooLarge when the broker would end the connection for it."""
        if self._send_buffer is None:
            return
        size = BODY_HEAD.size + frame.size_bytes + PART_LENGTH.size * len(frame.parts)
        check_size(frame, size, self.max_frame_bytes)
        self._send_buffer.put(encode_frame(frame, self._compressor))

    def push(self) -> None:
        """Hand what is queued to the operating system now."""
        if self._send_buffer is not None:
            self._send_buffer.push()

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        return 0 if self._send_buffer is None else self._send_buffer.pending_bytes()

    def close(self) -> None:
        """End the connection; what is queued goes out first."""
        self._on_lost = None
        transport, send_buffer = self._transport, self._send_buffer
        self._transport = self._send_buffer = None
        if transport is not None and send_buffer is not None:
            send_buffer.finish()
            transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    # -- called by asyncio -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: negotiate."""
        keep_alive(transport.get_extra_info("socket"))
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._send_buffer = SendBuffer(asyncio.get_running_loop(), self._transport)
        self._send_buffer.put([offer(self._offered)])

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes arrived."""
        for message in self._reader.filled(nbytes):
            if self._transport is None:
                return
            try:
                self._take(message)
            except PenstockError as error:
                self._broken(error)
        if self._reader.broken is not None:
            # A broken first message is not one that is too long: the other end is no broker.
            self._broken(self._reader.broken if self._opening is None else self._no_broker())

    def eof_received(self) -> bool:
        """The broker will send no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._gone(str(exc) if exc else "the broker closed the connection")

    def pause_writing(self) -> None:
        """The broker reads slower than this side writes."""
        if self._send_buffer is not None:
            self._send_buffer.pause()

    def resume_writing(self) -> None:
        """The broker has caught up."""
        if self._send_buffer is not None:
            self._send_buffer.resume()

    # -- messages and the end ----------------------------------------------------------------

    def _take(self, message: Message) -> None:
        opening = self._opening
        if opening is None:
            self._on_frame(decode_frame(message, self._accepts_bytes))
            return
        command, body = message
        if command != NEGOTIATE:
            raise self._no_broker()
        choice = chosen(body)
        self._compressor = COMPRESSORS.index(choice.compressor)
        self._reader.limit_bytes = self._accepts_bytes
        self.max_frame_bytes = choice.max_frame_bytes
        self._opening = None
        if not opening.done():
            opening.set_result(choice)

    def _no_broker(self) -> ProtocolViolation:
        return ProtocolViolation(
            f"what answers at {self.host}:{self.port} does not speak the broker's protocol. Name the "
            "port of server.tcp, not that of HTTP or ZeroMQ: `penstock up` prints them, and they "
            "stand in ports.json; with TLS the URL begins with penstocks://",
            host=self.host,
            port=self.port,
        )

    def _broken(self, error: PenstockError) -> None:
        transport, opening = self._transport, self._opening
        if opening is not None and not opening.done():
            opening.set_exception(error)
        else:
            self._gone(error.message)
        if transport is not None:
            transport.abort()

    def _gone(self, reason: str) -> None:
        if self._send_buffer is not None:
            self._send_buffer.clear()
        self._transport = self._send_buffer = None
        opening = self._opening
        if opening is not None and not opening.done():
            opening.set_exception(ConnectionResetError(reason))
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(reason)


def client_tls(ca_file: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """A TLS context that checks the broker's certificate with the system's authorities or a PEM file.

    `certificate` is shown to a broker that asks clients for one.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettings(
            f"client.tls_ca {ca_file!r} cannot be used: {error}; name a PEM file",
            key="client.tls_ca",
        ) from error
    if key and not certificate:
        raise InvalidSettings(
            "client.tls_key needs client.tls_certificate; set it, or clear the key",
            key="client.tls_certificate",
        )
    if certificate:
        try:
            # Without a password OpenSSL would ask the terminal for one, and wait.
            context.load_cert_chain(certificate, key or None, password="")
        except (OSError, ssl.SSLError) as error:
            raise InvalidSettings(
                f"client.tls_certificate {certificate!r} and client.tls_key {key!r} cannot be used: "
                f"{error}; name PEM files that belong together, the key without a password",
                key="client.tls_certificate",
            ) from error
    return context


def check_size(frame: Frame, size_bytes: int, limit_bytes: int) -> None:
    """Raise PayloadTooLarge for a frame, or a message in it, that is larger than a broker reads.

    `size_bytes` includes the lengths that frame its parts. The broker would refuse the whole message,
    and with it all its settlements or events.
    """
    if size_bytes > limit_bytes:
        raise PayloadTooLarge(
            f"a frame of {size_bytes} bytes is over the broker's server.max_frame_bytes of "
            f"{limit_bytes}; nothing was sent. Publish less at once",
            size_bytes=size_bytes,
            limit_bytes=limit_bytes,
        )
    if len(frame.parts) > MAX_PARTS:
        raise PayloadTooLarge(
            f"a frame of {len(frame.parts)} batches is over the {MAX_PARTS} that a broker reads; nothing "
            "was sent. Publish less at once",
            parts=len(frame.parts),
            limit_parts=MAX_PARTS,
        )
    try:
        check_message(frame)
    except ProtocolViolation as error:
        raise PayloadTooLarge(f"nothing was sent: {error.message}", **error.data) from None

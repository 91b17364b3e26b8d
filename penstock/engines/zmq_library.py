"""Where pyzmq comes in: one import, one message when it is missing, one check of keys."""

from __future__ import annotations

import os
import struct

from penstock.engines.outbox import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES
from penstock.model.errors import InvalidSettings, MissingExtra

try:
    import zmq
    from zmq.utils import z85
except ImportError as error:
    raise MissingExtra(
        "ZeroMQ needs the pyzmq package. Install it with: pip install 'penstock[server]'",
        extra="server",
    ) from error

__all__ = ["client_context", "curve_key", "endpoint", "keep_alive", "zmq"]

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

CURVE_KEY_BYTES = 32
# A client connection takes two sockets of libzmq, whose own default stops at 1,023.
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
    """A CURVE key as libzmq takes it; raises InvalidSettings on anything but Z85 text.

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
            f"{setting} is no CURVE key: give 40 characters of Z85, as penstock.server.curve.make_keys makes them",
            key=setting,
        ) from error
    return key


def endpoint(host: str, port: int) -> str:
    """The address as libzmq spells it.

    >>> endpoint("::1", 5555), endpoint("", 5555)
    ('tcp://[::1]:5555', 'tcp://*:5555')
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host or '*'}:{port}"


def keep_alive(socket: Socket) -> None:
    """No heartbeats of libzmq: the operating system notices a peer that is gone.

    To send a PING on a connection that broke while its queue was full, libzmq 4.3.5 ends the whole
    process ("Assertion failed: !_io_error").
    """
    socket.set(zmq.HEARTBEAT_IVL, 0)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)

"""CURVE for ZeroMQ: which client keys may connect, decided before any frame is read.

libzmq encrypts. When `server.curve_clients` lists keys, libzmq asks about each client's public key (ZAP,
https://rfc.zeromq.org/spec/27); without a list every key may connect, and only tokens are checked.
"""

from __future__ import annotations

import logging

from penstock.model.settings import Server
from penstock.server.logs import LogQuota
from penstock.transport.zeromq import NOBLOCK, Context, Pump, Socket, curve_key, zmq

log = logging.getLogger("penstock.server.curve")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"penstock"
# version, request, domain, address, identity, mechanism, credentials
ZAP_PARTS = 7
# Handshakes answered before other work of the loop gets its turn.
QUESTIONS_PER_TURN = 64


def make_keys() -> tuple[str, str]:
    """A new pair of keys, public and secret, as Z85 text.

    >>> public, secret = make_keys()
    >>> public_key(secret) == public
    True
    """
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_key(secret: str, setting: str = "server.curve_secret_key") -> str:
    """The public key of a secret one; clients have it as `client.curve_server_key`."""
    return zmq.curve_public(curve_key(secret, setting)).decode()


class CurveAuthenticator:
    """Makes sockets of one context CURVE servers, and answers libzmq's questions about client keys."""

    def __init__(self, context: Context, server: Server) -> None:
        self._secret = server.curve_secret_key and curve_key(
            server.curve_secret_key, "server.curve_secret_key"
        )
        self._listed = frozenset(
            curve_key(key, "server.curve_clients") for key in server.curve_clients
        )
        self._refusals = LogQuota(log)
        self._socket: Socket | None = None
        if self._secret and self._listed:
            self._socket = context.socket(zmq.REP)
            self._socket.set(zmq.LINGER, 0)
            self._socket.bind(ZAP_ADDRESS)
            self._pump = Pump(self._socket, self._answer)

    def guard(self, socket: Socket) -> None:
        """Let only clients with the right keys connect to a socket that is not bound yet."""
        if not self._secret:
            return
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        if self._listed:
            socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no client can connect

    def close(self) -> None:
        """Stop answering: no more clients can connect."""
        if self._socket is not None and not self._socket.closed:
            self._pump.stop()
            self._socket.close()

    def _answer(self) -> bool:
        assert self._socket is not None
        for _ in range(QUESTIONS_PER_TURN):
            try:
                question = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                return False
            request = question[1] if len(question) > 1 else b""
            status, text = self._judge(question)
            self._socket.send_multipart([ZAP_VERSION, request, status, text, b"", b""], NOBLOCK)
        return True

    def _judge(self, question: list[bytes]) -> tuple[bytes, bytes]:
        if len(question) != ZAP_PARTS or question[0] != ZAP_VERSION or question[5] != b"CURVE":
            return b"400", b"not a question about a CURVE key"
        key = zmq.utils.z85.encode(question[6])
        if key in self._listed:
            return b"200", b"welcome"
        self._refusals.warning(
            "a client with a key that is not in server.curve_clients was turned away",
            peer=question[3].decode(errors="replace"),
            key=key.decode(),
        )
        return b"400", b"this key is not listed"

"""Errors of the way to a broker: part of the tree in penstock.model.errors."""

from __future__ import annotations

from penstock.model.error import PenstockError


class ConnectionFailed(PenstockError):
    """The way to a broker."""

    code = "connection"


class BrokerUnreachable(ConnectionFailed):
    """No broker answered within the deadline; nothing was sent."""

    code = "connection.unreachable"


class ConnectionLost(ConnectionFailed):
    """The connection broke and the broker could not be asked again in time; `outcome` says what is known."""

    code = "connection.lost"


class ProtocolViolation(ConnectionFailed):
    """Bytes that are no frame of the protocol, or a frame at the wrong time."""

    code = "connection.protocol"


class WrongProtocolVersion(ConnectionFailed):
    """The other side speaks no version of the protocol that this side speaks."""

    code = "connection.version"


class SessionExpired(ConnectionFailed):
    """The broker has forgotten this session: it was silent for too long."""

    code = "connection.session-expired"

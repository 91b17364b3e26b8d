"""The commands and replies of old clients, which never negotiate.

The stream is the same: COMMAND, BODY_SIZE, BODY. Each command gets one OK or ERROR, in the order of
the commands; MESSAGE and NOTICE may come in between. Numbers are little-endian; a text is its length
(u16) and its bytes in UTF-8.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from penstock.model.errors import ProtocolViolation
from penstock.wire.frame import Bytes
from penstock.wire.stream import encode_message

MAX_TEXT_BYTES = (1 << 16) - 1
MAX_PING_BYTES = 1_024
LADDER_DELAY = (1 << 32) - 1  # NACK: the delay is the next step of the group's retry ladder
DEFAULT_OUTSTANDING = 256  # when the client names no limit
NO_KEY = -1

_U16 = struct.Struct("<H")
_U64 = struct.Struct("<Q")
_NACK = struct.Struct("<QI")
_STORED = struct.Struct("<IQ")  # partition, offset
# subscription, tag, attempt, partition, offset, event time in microseconds, bytes of the key
_MESSAGE = struct.Struct("<HQHIQqi")


class Command(enum.IntEnum):
    """The commands of a client."""

    AUTH = 0x01
    PING = 0x02
    CREATE = 0x03
    PUBLISH = 0x04
    SUBSCRIBE = 0x05
    ACK = 0x06
    NACK = 0x07


class LegacyReply(enum.IntEnum):
    """The replies of the broker."""

    OK = 0x80
    ERROR = 0x81
    MESSAGE = 0x82
    NOTICE = 0x83


COMMANDS = frozenset(map(int, Command))


class LegacyAuth(NamedTuple):
    """Identifies the client; only as the first command, and only when the broker wants a token."""

    token: str
    tenant: str
    client: str

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(Command.AUTH, b"".join(map(_text, self)))


class Ping(NamedTuple):
    """Checks the connection; OK holds the same bytes."""

    data: bytes

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(Command.PING, self.data)


class Create(NamedTuple):
    """Make a topic."""

    topic: str
    partitions: int

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(Command.CREATE, _text(self.topic) + _U16.pack(self.partitions))


class LegacyPublish(NamedTuple):
    """Store an event; OK holds its partition and offset, once it is durable."""

    topic: str
    payload: bytes

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(Command.PUBLISH, _text(self.topic) + self.payload)


class LegacySubscribe(NamedTuple):
    """Receive the events of a pattern as a member of a queue group; OK holds the subscription's number."""

    group: str
    pattern: str
    max_outstanding: int

    def message(self) -> bytes:
        """The command as bytes."""
        body = _text(self.group) + _text(self.pattern) + _U16.pack(self.max_outstanding)
        return encode_message(Command.SUBSCRIBE, body)


class Ack(NamedTuple):
    """The client has processed an event."""

    tag: int

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(Command.ACK, _U64.pack(self.tag))


class Nack(NamedTuple):
    """Deliver an event again, after `delay_ms` or after the next step of the retry ladder."""

    tag: int
    delay_ms: int
    reason: str

    def message(self) -> bytes:
        """The command as bytes."""
        return encode_message(
            Command.NACK, _NACK.pack(self.tag, self.delay_ms) + _text(self.reason)
        )


AnyCommand = LegacyAuth | Ping | Create | LegacyPublish | LegacySubscribe | Ack | Nack


class Ok(NamedTuple):
    """A command was executed."""

    body: bytes = b""

    @classmethod
    def stored(cls, partition: int, offset: int) -> Ok:
        """The answer to PUBLISH."""
        return cls(_STORED.pack(partition, offset))

    @classmethod
    def subscribed(cls, number: int) -> Ok:
        """The answer to SUBSCRIBE."""
        return cls(_U16.pack(number))

    def message(self) -> bytes:
        """The reply as bytes."""
        return encode_message(LegacyReply.OK, self.body)


class Error(NamedTuple):
    """A command was not executed; docs/reference/errors.md lists the codes."""

    code: str
    words: str

    def message(self) -> bytes:
        """The reply as bytes."""
        return encode_message(LegacyReply.ERROR, _text(self.code) + _text(self.words))


class LegacyLeased(NamedTuple):
    """An event for the client; its lease starts now."""

    subscription: int
    tag: int
    attempt: int
    partition: int
    offset: int
    time_us: int
    topic: str
    key: bytes | None
    payload: bytes

    def message(self) -> bytes:
        """The reply as bytes."""
        key = self.key or b""
        head = _MESSAGE.pack(*self[:6], NO_KEY if self.key is None else len(key))
        return encode_message(
            LegacyReply.MESSAGE, b"".join((head, _text(self.topic), key, self.payload))
        )


class Notice(NamedTuple):
    """A notice without a command: an ACK that came too late (tag), a subscription that ended (0)."""

    tag: int
    code: str
    words: str

    def message(self) -> bytes:
        """The reply as bytes."""
        body = _U64.pack(self.tag) + _text(self.code) + _text(self.words)
        return encode_message(LegacyReply.NOTICE, body)


AnyReply = Ok | Error | LegacyLeased | Notice


def parse_command(command: int, body: Bytes) -> AnyCommand:
    """Read a client's command; raises ProtocolViolation on anything else.

    >>> parse_command(*split(LegacyPublish("orders", b"hi").message()))
    LegacyPublish(topic='orders', payload=b'hi')
    """
    cursor = _Cursor(body)
    found: AnyCommand
    if command == Command.PUBLISH:
        found = LegacyPublish(cursor.text(), cursor.rest())
    elif command == Command.ACK:
        found = Ack(*cursor.numbers(_U64))
    elif command == Command.NACK:
        tag, delay_ms = cursor.numbers(_NACK)
        found = Nack(tag, delay_ms, cursor.text())
    elif command == Command.SUBSCRIBE:
        found = LegacySubscribe(cursor.text(), cursor.text(), *cursor.numbers(_U16))
    elif command == Command.PING and len(body) <= MAX_PING_BYTES:
        found = Ping(cursor.rest())
    elif command == Command.CREATE:
        found = Create(cursor.text(), *cursor.numbers(_U16))
    elif command == Command.AUTH:
        found = LegacyAuth(cursor.text(), cursor.text(), cursor.text())
    else:
        raise ProtocolViolation(f"no command 0x{command:02x} with a body of {len(body)} bytes")
    cursor.end()
    return found


def parse_reply(command: int, body: Bytes) -> AnyReply:
    """Read a broker's reply, as a client does; raises ProtocolViolation on anything else.

    >>> parse_reply(*split(Notice(7, "delivery.lease-expired", "too late").message())).tag
    7
    """
    cursor = _Cursor(body)
    found: AnyReply
    if command == LegacyReply.OK:
        found = Ok(cursor.rest())
    elif command == LegacyReply.ERROR:
        found = Error(cursor.text(), cursor.text())
    elif command == LegacyReply.NOTICE:
        (tag,) = cursor.numbers(_U64)
        found = Notice(tag, cursor.text(), cursor.text())
    elif command == LegacyReply.MESSAGE:
        number, tag, attempt, partition, offset, time_us, key_bytes = cursor.numbers(_MESSAGE)
        topic = cursor.text()
        key = None if key_bytes == NO_KEY else cursor.take(key_bytes)
        found = LegacyLeased(
            number, tag, attempt, partition, offset, time_us, topic, key, cursor.rest()
        )
    else:
        raise ProtocolViolation(f"no reply 0x{command:02x}")
    cursor.end()
    return found


def split(message: bytes) -> tuple[int, bytes]:
    """Command and body of one whole message."""
    return message[0], message[5:]


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > MAX_TEXT_BYTES:
        raise ProtocolViolation(f"a text of {len(raw)} bytes is over {MAX_TEXT_BYTES}")
    return _U16.pack(len(raw)) + raw


class _Cursor:
    """Reads the fields of a body one after another."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._body):
            raise ProtocolViolation("a body ends before its fields do")
        self._at += size
        return bytes(self._body[self._at - size : self._at])

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        (size,) = self.numbers(_U16)
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise ProtocolViolation("a text is not UTF-8") from None

    def rest(self) -> bytes:
        return self.take(len(self._body) - self._at)

    def end(self) -> None:
        if self._at != len(self._body):
            raise ProtocolViolation("a body goes on behind its last field")

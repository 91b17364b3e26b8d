"""Messages: the content of each kind of frame, as structs; and errors as messages (`Fault`).

They are the same in msgpack (raw), JSON and protobuf. Fields that have their default are left out,
unknown fields are ignored, so either side may be newer.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from penstock.core.entry import GroupSpec
from penstock.model import errors
from penstock.model.errors import PenstockError, ProtocolViolation
from penstock.model.event import Receipt
from penstock.model.parameter import wrong_type

TRANSACTION_KEYS = "transaction-keys"
"""A capability in Welcome: this broker obeys the key of a Transact."""
MAX_NAMED = 65_536
"""Deliveries that the client's Hello names, half of what fits; further ones are delivered again."""
MAX_HELD = 8_192
"""Deliveries that one Subscribe names in `held`; further ones are delivered again."""
MAX_REASON_CHARACTERS = 4_096
"""Of the reason of a nack or reject: kept with a dead letter, in the journal and in its headers."""
MAX_LOG_HELD = 1_024
"""Partitions that one Subscribe names in `log_held`: all partitions of the largest topic."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The base of all messages."""


class Held(Message, frozen=True):
    """A delivery that a client still works on."""

    delivery: int
    topic: str
    partition: int
    start: int
    count: int
    attempt: int
    handed: int
    left_s: float | None = None
    """Seconds left of the leases of events that were handed out; null: as many as a new lease has."""


class LogHeld(Message, frozen=True):
    """Events of one partition that a log feed was handed, one behind another without a gap."""

    topic: str
    partition: int
    start: int
    stop: int
    """Behind the last of them."""
    epoch: int = 0
    """As Fetched said with them."""


class Hello(Message, frozen=True):
    """The first frame of a client: who it is, and which session it wants to go on with."""

    client: str
    """A name the client keeps over restarts; consumers are known by it."""
    session: str = ""
    """The session to resume; empty begins a new one."""
    token: str = ""
    tenant: str = ""
    subject: str = ""
    agent: str = ""
    resumable: bool = True
    """Keep the session, leases and all, when the connection breaks."""
    supports_ack: bool = True
    max_inflight: int = 0
    """Most events of `subscriptions` that are not settled; 0 leaves it to the broker."""
    subscriptions: list[str] = []
    """Patterns for direct delivery to this client."""
    heartbeat_s: float = 5.0
    deliveries: list[int] = []
    """Resuming: deliveries the client still holds."""
    pending: list[int] = []
    """Resuming: requests it has no answer to."""
    held: list[Held] = []
    """Resuming: deliveries of `subscriptions`, to be taken up again if the broker was restarted."""


class Welcome(Message, frozen=True):
    """The answer to Hello."""

    session: str
    broker: str
    """Changes with every start of the broker."""
    resumed: bool = False
    heartbeat_s: float = 5.0
    session_s: float = 30.0
    tenant: str = ""
    subject: str = ""
    capabilities: list[str] = []
    max_frame_bytes: int = 0
    settled: int = 0
    """Resuming: the last Settle that arrived."""
    unknown: list[int] = []
    """Resuming: of the pending requests, those that never arrived."""
    lost: list[int] = []
    """Resuming: of the client's deliveries, those the broker holds no more."""
    bus: str = ""
    """Which log the broker serves: the same after every start, and another for every other folder."""
    adopted: dict[int, list[int]] = {}
    """After a restart, of each delivery that Hello named in `held`, the indices that are leased again."""
    now_us: int = 0
    """The broker's wall clock, in microseconds since 1970 UTC; an older broker does not say."""
    max_message_bytes: int = 0
    """The largest message it reads, that of Publish, Transact and Ask; an older broker does not say."""
    max_values: int = 0
    """Most values that it reads in one message; an older broker does not say."""


class Fault(Message, frozen=True):
    """An error as it crosses the wire: docs/reference/errors.md lists the codes."""

    code: str
    message: str
    data: dict[str, Any] = {}


class DraftMeta(Message, frozen=True):
    """Events to publish to one topic: in a part as an encoded batch, or here as lists."""

    topic: str
    tenant: str = ""
    codec: str = "raw"
    part: int = -1
    """Which part of the frame holds the batch; -1 when the lists below hold the events."""
    payloads: list[bytes] = []
    keys: list[bytes | None] | None = None
    headers: list[dict[str, str] | None] | None = None
    tokens: list[bytes] | None = None
    times_us: list[int] | None = None
    expires_us: list[int] | None = None
    priority: list[int] | None = None
    partition: int | None = None
    deliver_at_us: int | None = None


class Publish(Message, frozen=True):
    """Drafts to store. The sequence only grows; the same one again is the same publish."""

    sequence: int
    drafts: list[DraftMeta]
    withheld: dict[str, int] = {}
    """Batches refused by the client itself since the last Publish, by limit and tenant."""


class Published(Message, frozen=True):
    """One answer for each draft."""

    receipts: list[Receipt | None]
    faults: dict[int, Fault] = {}
    """By index of the draft; its receipt is null then."""
    key_known: bool = False
    """Of Transact: its key was known, and nothing of it happened."""


class Subscribe(Message, frozen=True):
    """Open a feed; the client chooses its number."""

    feed: int
    group: str
    spec: GroupSpec
    member: str
    max_inflight: int
    held: list[Held] = []
    """Deliveries from before the broker was restarted, to be taken up again."""
    log_held: list[LogHeld] = []
    """Mode `log`: what was handed out before the broker was restarted, not to be handed out again."""


class Joined(Message, frozen=True):
    """The answer to Subscribe: of each delivery that was held, the indices that are leased again."""

    adopted: dict[int, list[int]] = {}


class Deliver(Message, frozen=True):
    """Leased events: one part, a batch."""

    feed: int
    delivery: int
    attempt: int
    skip: list[int] = []
    """Indices in the batch that are not leased to this feed."""


class Settlement(Message, frozen=True):
    """What became of the events of one delivery since the last one."""

    delivery: int
    handed: int = 0
    """How many events, from the first, the consumer was given so far: their leases run."""
    acks: list[int] = []
    """Start and count of each run, one after another."""
    nacks: list[tuple[int, float | None, str]] = []
    rejects: list[tuple[int, str]] = []
    extends: list[tuple[int, float | None]] = []
    returns: list[int] = []
    """Indices whose work was not finished: they are delivered again, and no attempt is counted."""


class Settle(Message, frozen=True):
    """Settlements; there is no answer, but the broker sends Refused for each that it refuses."""

    sequence: int
    settlements: list[Settlement]


class Refused(Message, frozen=True):
    """A settlement that came too late: its delivery, its index and why."""

    delivery: int
    index: int
    fault: Fault


class Feed(Message, frozen=True):
    """Unsubscribe from a feed, fetch from it, or (from the broker) hear that it has ended."""

    feed: int
    fault: Fault | None = None


class Commit(Message, frozen=True):
    """A log feed has processed everything before these offsets."""

    feed: int
    marks: list[tuple[str, int, int]] = []
    epochs: list[int] = []
    """Of the batches that the marks refer to, in the same order. Empty: of the newest ones."""


class Fetched(Message, frozen=True):
    """The answer to Fetch; the batch is its part."""

    epoch: int = 0
    """Grows when the group is reset. A commit names it: one of an earlier epoch is void."""


class Transact(Message, frozen=True):
    """Publishes, acks (delivery and index) and cursors: all or nothing."""

    sequence: int
    drafts: list[DraftMeta] = []
    acks: list[tuple[int, int]] = []
    cursors: list[Commit] = []
    key: bytes | None = None
    """16 bytes; it happens at most once for its key. Brokers that know it say TRANSACTION_KEYS."""


class Read(Message, frozen=True):
    """Stored batches of a partition from `start` on, at most about `max_bytes` of them."""

    topic: str
    partition: int
    start: int
    stop: int | None = None
    max_bytes: int = 4 << 20


class Chunk(Message, frozen=True):
    """The answer to Read; the batches are its parts."""

    end: bool = False


class Ask(Message, frozen=True):
    """An administrative request: its name in penstock.engines.requests, and its fields."""

    request: str
    fields: dict[str, Any] = {}


class Beat(Message, frozen=True):
    """A sign of life. From clients: all answers before request `answered` have arrived."""

    answered: int = 0
    settled: int = 0


def encode(message: Message) -> bytes:
    """The message as msgpack.

    >>> decode(encode(Feed(3)), Feed)
    Feed(feed=3, fault=None)
    """
    return _encoder.encode(message)


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, Any] = {}


def decode(meta: bytes | bytearray | memoryview, kind: Any) -> Any:
    """A message from msgpack; raises ProtocolViolation on anything else.

    A Subscribe with a value of a wrong type is InvalidInput, as from the API.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(meta)
    except msgspec.ValidationError as error:
        if kind is Subscribe:
            raise wrong_type(error) from None
        raise _unreadable(kind, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(kind, error) from None


def _unreadable(kind: Any, error: Exception) -> ProtocolViolation:
    name = getattr(kind, "__name__", str(kind))
    return ProtocolViolation(f"a {name} message cannot be read: {error}")


# -- errors ---------------------------------------------------------------------------------------


_BY_CODE: dict[str, type[PenstockError]] = {
    getattr(errors, name).code: getattr(errors, name) for name in errors.__all__
}
MAX_TEXT = 4_096  # characters of a text in a fault, so that no error carries a payload back


def to_fault(error: BaseException) -> Fault:
    """An error as a message; one outside the tree of errors becomes the root, with its type only.

    >>> to_fault(errors.UnknownTopic("no topic", topic="orders"))
    Fault(code='notfound.topic', message='no topic', data={'topic': 'orders'})
    """
    if not isinstance(error, PenstockError):
        return Fault("error", f"the broker failed: {type(error).__name__}; its log says more")
    data = {name: _plain(value) for name, value in error.data.items()}
    return Fault(error.code, error.message[:MAX_TEXT], data)


def to_error(fault: Fault) -> PenstockError:
    """The error that a fault represents; an unknown code becomes its family or the root.

    >>> type(to_error(Fault("notfound.brandnew", "?"))).__name__
    'NotFound'
    """
    family = fault.code.partition(".")[0]
    kind = _BY_CODE.get(fault.code) or _BY_CODE.get(family) or PenstockError
    # A name that the error's own constructor uses cannot be data; a peer may send anything.
    data = {name: value for name, value in fault.data.items() if name not in ("message", "self")}
    return kind(fault.message, **data)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value[:MAX_TEXT]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value[:100]]
    return str(value)[:MAX_TEXT]

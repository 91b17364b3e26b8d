"""Entries: every change of state as a value, the way it is written to the journal.

Replaying entries in order rebuilds the state; nothing else changes it. Durations, never deadlines,
are stored, so a clock that jumped while the process was down moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from penstock.core.assignment import Strategy
from penstock.core.retry import Retry
from penstock.core.schedule import Definition
from penstock.model.errors import InvalidInput, PenstockError
from penstock.model.parameter import (
    MAX_TOPIC_CHARACTERS,
    Span,
    choice,
    count,
    engine_place,
    many,
    seconds,
    size_bytes,
    text,
)

FIRST_FENCE = 1
MODES = ("queue", "log")
ORDERS = ("any", "key", "single")
MAX_TOPIC_PARTITIONS = 1_024  # of one topic in one folder; more belongs on a cluster
MAX_PATTERNS = 1_024  # of one client or group: each is a place in the routing tree
MIN_LEASE_S = 0.001  # leases are looked at this often; a shorter one would keep the loop busy

_pattern = partial(text, least=1, most=MAX_TOPIC_CHARACTERS)
Partitions = Annotated[int, partial(count, least=1, most=MAX_TOPIC_PARTITIONS)]
RetentionBytes = Annotated[int, size_bytes]


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False, omit_defaults=False):
    """One change; subclasses say which."""


class TopicSpec(msgspec.Struct, frozen=True):
    """What is configured for one topic; None means the bus-wide setting."""

    partitions: Partitions = 1
    retention_age_s: Span | None = None
    retention_bytes: RetentionBytes | None = None
    write_once: bool | None = None
    ephemeral: bool = False
    """Belongs to one connection and goes with it: reply inboxes."""
    floors: tuple[int, ...] = ()
    """Offsets below these belong to a deleted topic of the same name, one for each partition."""


class GroupSpec(msgspec.Struct, frozen=True):
    """What a consumer group reads and how it is served."""

    patterns: Annotated[
        tuple[str, ...], partial(many, item=_pattern, least=1, most=MAX_PATTERNS, make=tuple)
    ]
    mode: Annotated[str, partial(choice, allowed=MODES)] = "queue"
    order: Annotated[str, partial(choice, allowed=ORDERS)] = "any"
    retry: Retry = Retry()
    lease_s: Annotated[float, partial(seconds, least=MIN_LEASE_S)] = 30.0
    filter: dict[str, str] = {}
    start: Annotated[str, engine_place] = "earliest"
    ephemeral: bool = False
    assignment: Strategy = "sticky"

    def wants(self, headers: Mapping[str, str]) -> bool:
        """Whether the group takes an event with these headers."""
        return self.filter.items() <= headers.items()


class TopicPut(Entry, frozen=True, tag="topic"):
    """A topic was made or its configuration changed."""

    topic: str
    spec: TopicSpec


class TopicGone(Entry, frozen=True, tag="topic-gone"):
    """A topic was deleted; `ends` are the offsets a topic of that name would go on with."""

    topic: str
    ends: tuple[int, ...]


class GroupPut(Entry, frozen=True, tag="group"):
    """A group was made or its specification changed."""

    group: str
    spec: GroupSpec


class GroupGone(Entry, frozen=True, tag="group-gone"):
    """A group was deleted, with all its cursors."""

    group: str


class LaneSet(Entry, frozen=True, tag="lane"):
    """A group starts reading a partition at `offset`: first sight, or a reset."""

    group: str
    topic: str
    partition: int
    offset: int


class Leased(Entry, frozen=True, tag="leased"):
    """Events are handed to a member; written before they are."""

    group: str
    topic: str
    partition: int
    start: int
    count: int
    attempt: int
    fence: int
    member: str


class Acked(Entry, frozen=True, tag="acked"):
    """Events are done: start and count of each run, one after another."""

    group: str
    topic: str
    partition: int
    runs: list[int]


class Retried(Entry, frozen=True, tag="retried"):
    """Events come again after `delay_ms`; `made` attempts count against the budget."""

    group: str
    topic: str
    partition: int
    start: int
    count: int
    made: int
    delay_ms: int


class Dead(Entry, frozen=True, tag="dead"):
    """An event became a dead letter, stored at `stored` of the tenant's dead-letter topic."""

    id: str
    group: str
    topic: str
    partition: int
    offset: int
    tenant: str
    attempts: int
    reason: str
    at_us: int
    stored: int


class DeadReplayed(Entry, frozen=True, tag="dead-replayed"):
    """A dead letter goes back to its group, with a new budget."""

    id: str


class DeadPurged(Entry, frozen=True, tag="dead-purged"):
    """A dead letter left the view; its event stays in the log."""

    id: str


class Committed(Entry, frozen=True, tag="committed"):
    """A log group has read a partition up to `offset`."""

    group: str
    topic: str
    partition: int
    offset: int
    generation: int
    epoch: int = -1
    """How often the group had been set to a place there when it read: a later reset wins. Journals
    of before it was counted say -1."""


class Delayed(Entry, frozen=True, tag="delayed"):
    """Stored events wait for their time: offset and due time of each, one after another."""

    pairs: list[int]


class Fired(Entry, frozen=True, tag="fired"):
    """Delayed events were published."""

    offsets: list[int]


class RecurringPut(Entry, frozen=True, tag="recurring"):
    """A recurring event was defined or moved to its next time."""

    id: str
    definition: bytes


class RecurringGone(Entry, frozen=True, tag="recurring-gone"):
    """A recurring event was removed."""

    id: str


class Audited(Entry, frozen=True, tag="audited"):
    """An operator's action; copied from here into the audit chain."""

    at_us: int
    actor: str
    operation: str
    targets: list[str]
    reason: str
    prior: dict[str, str | int | None]
    result: dict[str, str | int | None]


class SessionPut(Entry, frozen=True, tag="session"):
    """A client began a session that outlives its connection."""

    session: str
    client: str
    tenant: str
    subject: str
    roles: tuple[str, ...]
    subscriptions: tuple[str, ...] = ()
    max_inflight: int = 0
    supports_ack: bool = True


class SessionGone(Entry, frozen=True, tag="session-gone"):
    """A session ended, or was silent for too long."""

    session: str


class Produced(Entry, frozen=True, tag="produced"):
    """What became of one publish of a session, stored together with its events.

    Draft, partition, offset and count of each stretch, one after another.
    """

    session: str
    sequence: int
    places: list[int]


AnyEntry = (
    TopicPut | TopicGone | GroupPut | GroupGone | LaneSet | Leased | Acked | Retried | Dead
    | DeadReplayed | DeadPurged | Committed | Delayed | Fired | RecurringPut | RecurringGone
    | Audited | SessionPut | SessionGone | Produced
)  # fmt: skip

MADE_OF_NUMBERS = frozenset({Leased, Acked, Retried, Committed, Fired, Produced})
"""Entries that the engine makes itself, many a second: whole numbers that it counted, and the names
of groups, topics, members and sessions that were checked when these were made. They are written
without being read back first."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyEntry])
_one = msgspec.msgpack.Decoder(AnyEntry)
_Kind = TypeVar("_Kind", bound=Entry)


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Entries as the body of a control frame.

    >>> decode_entries(encode_entries([Acked("billing", "orders", 0, [5, 3])]))
    [Acked(group='billing', topic='orders', partition=0, runs=[5, 3])]
    """
    return _encoder.encode(entries)


def decode_entries(body: bytes | memoryview) -> list[AnyEntry]:
    """The entries of a control frame."""
    return _decoder.decode(body)


def decode_entry(data: bytes | memoryview | msgspec.Raw) -> AnyEntry:
    """One entry, with everything in it that is encoded itself; raises what is wrong with it."""
    entry: AnyEntry = _one.decode(data)
    if isinstance(entry, RecurringPut):
        msgspec.msgpack.decode(entry.definition, type=Definition)
    return entry


def as_recovered(entry: _Kind) -> _Kind:
    """An entry as recovery would read it from the journal; InvalidInput where it could not.

    Whatever a caller's values become an entry of goes through here before anything changes, so that
    the running bus has what the next one will have.

    >>> as_recovered(TopicPut("orders", TopicSpec(partitions=2.0)))
    Traceback (most recent call last):
    penstock.model.errors.InvalidInput: topic cannot be stored: Expected `int`, got `float` - at \
`$[2].partitions`. Nothing was changed; pass a value of the type that is expected [invalid]
    """
    if type(entry) in MADE_OF_NUMBERS:
        return entry
    try:
        read = decode_entry(_encoder.encode(entry))
        if isinstance(read, Audited):
            _check_recordable(read)
        return read  # type: ignore[return-value]
    except (msgspec.MsgspecError, PenstockError, ValueError, TypeError, OverflowError) as error:
        kind = kind_of(entry)
        why = error.message if isinstance(error, PenstockError) else str(error)
        raise InvalidInput(
            f"{kind} cannot be stored: {why}. Nothing was changed; pass a value of the type that is "
            "expected",
            entry=kind,
        ) from None


def _check_recordable(entry: Audited) -> None:
    """Raise InvalidInput for what the audit chain could not take: later it would stop the chain."""
    from penstock.core.audit import AuditChain  # its cryptography: no client needs it

    AuditChain().append(
        at_us=entry.at_us, actor=entry.actor, operation=entry.operation, targets=entry.targets,
        reason=entry.reason, prior=entry.prior, result=entry.result, ref=0,
    )  # fmt: skip


def encode_checked(entries: Sequence[Entry]) -> bytes:
    """The same as `encode_entries`, for entries that callers cause: each of them is read back."""
    for entry in entries:
        as_recovered(entry)
    return _encoder.encode(entries)


def check_name(name: str) -> None:
    """Raise InvalidInput for the name of a member that leases could not be written with.

    >>> check_name("worker-1")
    """
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidInput(
            f"{name!r} is no name of a member ({error}); nothing was changed. Pass text", name=name
        ) from None


def kind_of(entry: Entry) -> str:
    """What an entry is called in the journal.

    >>> kind_of(GroupGone("billing"))
    'group-gone'
    """
    return str(type(entry).__struct_config__.tag)

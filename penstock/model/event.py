"""Event, and the small values that travel with it: message id, receipt, identity."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput, NotLeased
from penstock.model.parameter import MAX_TEXT_CHARACTERS, Seconds
from penstock.model.parameter import seconds as in_seconds
from penstock.model.parameter import text as parameter_text
from penstock.model.topic import MAX_WORD_BYTES

if TYPE_CHECKING:
    from penstock.model.batch import EventBatch

# Headers of requests and replies.
REPLY_TO = "penstock-reply-to"
"""The inbox that a request wants its reply in."""
CORRELATION = "penstock-correlation"
"""The request that it is, or answers."""
REJECTED = "penstock-rejected"
"""The request that it answers with the reason why that became a dead letter."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# -- events ---------------------------------------------------------------------------------------


class MessageId(NamedTuple):
    """Where an event lies: its topic, partition and offset. As text: `topic/partition/offset`.

    >>> MessageId.parse("orders.created/0/42")
    MessageId(topic='orders.created', partition=0, offset=42)
    >>> str(MessageId("orders", 0, 7))
    'orders/0/7'
    """

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Read the text form."""
        topic, _, rest = parameter_text("id", text).partition("/")
        partition, _, offset = rest.partition("/")
        if not topic or not partition.isdecimal() or not offset.isdecimal():
            raise InvalidInput(
                f"{text!r} is no message id; it looks like orders.created/0/42", id=text
            )
        return cls(topic, int(partition), int(offset))


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a publish returns once the events are durable: the offsets they got.

    >>> Receipt("orders", 0, 10, 3, bytes(16)).ids()[-1]
    MessageId(topic='orders', partition=0, offset=12)
    """

    topic: str
    partition: int
    offset: int
    """Offset of the first event; -1 when the event waits for its time and has none yet."""
    count: int
    token: bytes
    """Token of the first event."""
    duplicate: bool = False
    """The tokens were seen before; the offsets are those of the first publish."""
    scheduled: bool = False
    """The event is stored and will be published at its time."""
    parts: tuple[Receipt, ...] = ()
    """One receipt for each partition, where a publish went to several."""

    def ids(self) -> list[MessageId]:
        """The message id of every event."""
        if self.parts:
            return [each for part in self.parts for each in part.ids()]
        return [MessageId(self.topic, self.partition, self.offset + i) for i in range(self.count)]


class Event(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """One event: a view into a batch, and the handle to settle it when it was leased.

    >>> from penstock.model.batch import EventBatch
    >>> event = EventBatch.build("orders", [b'{"id": 7}'], codec="json").event(0)
    >>> event.value()
    {'id': 7}
    """

    batch: EventBatch
    index: int
    key: bytes | None
    payload: bytes
    headers: Mapping[str, str]
    attempt: int = 0
    """Which delivery this is, from 1; 0 for events that were read, not leased."""
    delivery: Any = None

    @property
    def topic(self) -> str:
        """The topic it was published to."""
        return self.batch.topic

    @property
    def tenant(self) -> str:
        """The tenant it belongs to."""
        return self.batch.tenant

    @property
    def partition(self) -> int:
        """The partition it lies in."""
        return self.batch.partition

    @property
    def offset(self) -> int:
        """Its place in the partition."""
        return self.batch.base_offset + self.index

    @property
    def id(self) -> MessageId:
        """Topic, partition and offset."""
        batch = self.batch
        return MessageId(batch.topic, batch.partition, batch.base_offset + self.index)

    @property
    def token(self) -> uuid.UUID:
        """The 128-bit token that identifies the event wherever it goes."""
        return uuid.UUID(bytes=self.batch.token(self.index))

    @property
    def codec(self) -> str:
        """Name of the codec the payload was encoded with."""
        return self.batch.codec

    @property
    def time_us(self) -> int:
        """Event time in microseconds since 1970 UTC: when it happened."""
        return self.batch.time(self.index)

    @property
    def append_time_us(self) -> int:
        """When the log took it, in microseconds since 1970 UTC."""
        return self.batch.append_time(self.index)

    @property
    def time(self) -> datetime:
        """Event time as a datetime in UTC."""
        return datetime.fromtimestamp(self.time_us / 1e6, tz=UTC)

    @property
    def expires_us(self) -> int | None:
        """When the event is of no use any more, or None."""
        column = self.batch.expires
        return int(column[self.index]) or None if column is not None else None

    @property
    def priority(self) -> int:
        """0 (default) to 9; higher goes first in a queue."""
        column = self.batch.priority
        return 0 if column is None else int(column[self.index])

    def value(self, type: Any = None) -> Any:
        """The payload decoded by its codec, into `type` when one is given."""
        return codecs.get(self.batch.codec).decode(self.payload, type)

    async def ack(self) -> None:
        """Done: never deliver this event to this group again."""
        self._leased().ack(self.index)

    async def nack(self, delay_s: Seconds | None = None, reason: str = "nacked") -> None:
        """Not done: deliver again after `delay_s`, or after the ladder's next step."""
        delivery = self._leased()
        delay = None if delay_s is None else in_seconds("delay_s", delay_s)
        delivery.nack(self.index, delay, _reason(reason))

    async def extend(self, seconds: Seconds | None = None) -> None:
        """Still working: move the deadline of this delivery."""
        delivery = self._leased()
        delivery.extend(self.index, None if seconds is None else in_seconds("seconds", seconds))

    async def reject(self, reason: str = "rejected") -> None:
        """Hopeless: put it among the dead letters now."""
        self._leased().reject(self.index, _reason(reason))

    def _leased(self) -> Any:
        if self.delivery is None:
            raise NotLeased(
                f"event {self.id} was read, not leased; only events of a queue subscription "
                "are acked, nacked, extended or rejected",
                id=str(self.id),
            )
        return self.delivery


def _reason(reason: str) -> str:
    """A reason is cut to what a dead letter keeps of it: it often is the text of an error."""
    cut = reason[:MAX_TEXT_CHARACTERS] if isinstance(reason, str) else reason
    return parameter_text("reason", cut)


# -- identities -----------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """Who calls: the tenant it belongs to, its name and its roles.

    >>> Identity(tenant="acme", subject="billing", roles=("reader",)).tenant
    'acme'
    """

    tenant: Annotated[str, partial(parameter_text, least=1, most=MAX_WORD_BYTES)] = "default"
    subject: str = "local"
    roles: tuple[str, ...] = ()

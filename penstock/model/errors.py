"""Every error Penstock raises, in one tree.

    PenstockError                       code               what it is for
    ├── InvalidInput                    invalid.*          the caller's data breaks a written rule
    │   ├── InvalidTopic                invalid.topic
    │   ├── InvalidPattern              invalid.pattern
    │   ├── InvalidHeaders              invalid.headers
    │   ├── InvalidBatch                invalid.batch
    │   ├── InvalidSettings             invalid.settings
    │   ├── InvalidSchedule             invalid.schedule
    │   ├── PayloadTooLarge             invalid.too-large
    │   ├── EncodeFailed                invalid.encode
    │   └── DecodeFailed                invalid.decode
    ├── MissingPart                     missing.*          something asked for is not installed
    │   ├── UnknownCodec                missing.codec
    │   ├── UnknownCompressor           missing.compressor
    │   ├── MissingExtra                missing.extra
    │   └── UnknownScheme               missing.scheme
    ├── NotFound                        notfound.*         a name or id that does not exist
    │   ├── UnknownTopic                notfound.topic
    │   ├── UnknownGroup                notfound.group
    │   ├── UnknownRoute                notfound.route
    │   ├── UnknownSchedule             notfound.schedule
    │   ├── UnknownMessage              notfound.message
    │   ├── UnknownDeadLetter           notfound.dead-letter
    │   └── OffsetExpired               notfound.offset-expired
    ├── DeliveryError                   delivery.*         a settle call that cannot be taken
    │   ├── NotLeased                   delivery.not-leased
    │   ├── AlreadySettled              delivery.already-settled
    │   ├── LeaseExpired                delivery.lease-expired
    │   ├── Fenced                      delivery.fenced
    │   └── SomeNotSettled              delivery.some-not-settled
    ├── Refused                         refused.*          understood, and not allowed
    │   ├── WriteOnce                   refused.write-once
    │   ├── ConfirmationNeeded          refused.confirmation
    │   ├── TargetMismatch              refused.target-mismatch
    │   ├── AlreadyExists               refused.exists
    │   ├── AlreadyReplayed             refused.replayed
    │   ├── RequestRejected             refused.request
    │   └── Unsupported                 refused.unsupported
    ├── Rejected                        rejected.*         a limit was reached; carries retry_after_s
    │   ├── Deferred                    rejected.deferred
    │   ├── Throttled                   rejected.throttled
    │   ├── Dropped                     rejected.dropped
    │   ├── ReplayLimited               rejected.replay-limited
    │   ├── RetentionFull               rejected.retention-full
    │   └── DiskRefused                 rejected.disk-refused
    │       └── DiskFull                rejected.disk-full
    ├── StorageError                    storage.*          the folder or the disk
    │   ├── FolderLocked                storage.locked
    │   ├── FormatTooNew                storage.format-too-new
    │   ├── Corrupted                   storage.corrupted
    │   ├── UnreadableEntry             storage.unreadable-entry
    │   ├── WriterFailed                storage.writer-failed
    │   └── NotADataFolder              storage.not-a-folder
    ├── ConnectionFailed                connection.*       the way to a broker
    │   ├── BrokerUnreachable           connection.unreachable
    │   ├── ConnectionLost              connection.lost
    │   ├── ProtocolViolation           connection.protocol
    │   ├── WrongProtocolVersion        connection.version
    │   └── SessionExpired              connection.session-expired
    ├── AccessDenied                    access.*           who you are, and what you may do
    │   └── NotAuthenticated            access.unauthenticated
    ├── PipelineError                   pipeline.*         pipelines on Spark
    │   ├── UnfitEnvironment            pipeline.environment
    │   ├── PipelineFailed              pipeline.failed
    │   └── BatchChanged                pipeline.batch-changed
    ├── TableError                      table.*            a warehouse or one of its tables
    │   ├── UnknownTable                table.unknown
    │   ├── CommitConflict              table.conflict
    │   ├── SchemaMismatch              table.schema
    │   ├── TableChanged                table.changed
    │   └── WarehouseFailed             table.warehouse
    ├── RequestTimedOut                 timeout.request
    └── BusClosed                       closed

The code is the contract: it crosses wires, stands in the docs (docs/reference/errors.md) and
never changes. The wording is free to improve. Data travels as attributes, and each message ends
with what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AlreadyReplayed",
    "AlreadySettled",
    "BatchChanged",
    "BrokerUnreachable",
    "BusClosed",
    "CommitConflict",
    "ConfirmationNeeded",
    "ConnectionFailed",
    "ConnectionLost",
    "Corrupted",
    "DecodeFailed",
    "Deferred",
    "DeliveryError",
    "DiskFull",
    "DiskRefused",
    "Dropped",
    "EncodeFailed",
    "Fenced",
    "FolderLocked",
    "FormatTooNew",
    "InvalidBatch",
    "InvalidHeaders",
    "InvalidInput",
    "InvalidPattern",
    "InvalidSchedule",
    "InvalidSettings",
    "InvalidTopic",
    "LeaseExpired",
    "MissingExtra",
    "MissingPart",
    "NotADataFolder",
    "NotAuthenticated",
    "NotFound",
    "NotLeased",
    "OffsetExpired",
    "PayloadTooLarge",
    "PenstockError",
    "PipelineError",
    "PipelineFailed",
    "ProtocolViolation",
    "Refused",
    "Rejected",
    "ReplayLimited",
    "RequestRejected",
    "RequestTimedOut",
    "RetentionFull",
    "SchemaMismatch",
    "SessionExpired",
    "SomeNotSettled",
    "StorageError",
    "TableChanged",
    "TableError",
    "TargetMismatch",
    "Throttled",
    "UnfitEnvironment",
    "UnknownCodec",
    "UnknownCompressor",
    "UnknownDeadLetter",
    "UnknownGroup",
    "UnknownMessage",
    "UnknownRoute",
    "UnknownSchedule",
    "UnknownScheme",
    "UnknownTable",
    "UnknownTopic",
    "UnreadableEntry",
    "Unsupported",
    "WarehouseFailed",
    "WriteOnce",
    "WriterFailed",
    "WrongProtocolVersion",
]


class PenstockError(Exception):
    """The root: catch this to catch everything Penstock raises on purpose.

    >>> error = PenstockError("no topic 'orders'", topic="orders")
    >>> error.code, error.topic
    ('error', 'orders')
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data = data

    def __getattr__(self, name: str) -> Any:
        data: dict[str, Any] = self.__dict__.get("data", {})
        try:
            return data[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.data))

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


def _rebuild(kind: type[PenstockError], message: str, data: dict[str, Any]) -> PenstockError:
    return kind(message, **data)


# -- invalid input ---------------------------------------------------------------------------------


class InvalidInput(PenstockError):
    """The caller's data breaks a written rule; nothing was stored."""

    code = "invalid"


class InvalidTopic(InvalidInput):
    """A topic name outside the grammar of docs/reference/topics.md."""

    code = "invalid.topic"


class InvalidPattern(InvalidInput):
    """A subscription or route pattern outside the grammar."""

    code = "invalid.pattern"


class InvalidHeaders(InvalidInput):
    """Headers must map text to text within the size limit."""

    code = "invalid.headers"


class InvalidBatch(InvalidInput):
    """Columns of different length, a wrong column type, or bytes that are no batch."""

    code = "invalid.batch"


class InvalidSettings(InvalidInput):
    """A setting with an unknown name, a wrong type or a value out of range."""

    code = "invalid.settings"


class InvalidSchedule(InvalidInput):
    """A cron expression, interval or time that cannot be scheduled."""

    code = "invalid.schedule"


class PayloadTooLarge(InvalidInput):
    """A payload is over `limits.max_payload_bytes`, or a frame or its message over what a broker reads."""

    code = "invalid.too-large"


class EncodeFailed(InvalidInput):
    """The codec cannot turn this value into bytes."""

    code = "invalid.encode"


class DecodeFailed(InvalidInput):
    """The bytes are not what their codec or compressor says, or expand past the bound."""

    code = "invalid.decode"


def over_limit(
    kind: type[InvalidInput], name: str, value: int, found: str, advice: str
) -> InvalidInput:
    """The error for data that is larger than a setting of `limits` allows.

    >>> over_limit(InvalidInput, "max_key_bytes", 8, "a key of 20 bytes", "Shorten it").data["setting"]
    'limits.max_key_bytes'
    """
    setting = f"limits.{name}"
    return kind(
        f"{found} is over the limit ({setting} = {value}); nothing was stored. {advice}, or raise "
        "the setting",
        limit=name,
        setting=setting,
        value=value,
    )


# -- missing parts ---------------------------------------------------------------------------------


class MissingPart(PenstockError):
    """Something asked for by name is not installed."""

    code = "missing"


class UnknownCodec(MissingPart):
    """No codec of that name is registered under the `penstock.codecs` entry points."""

    code = "missing.codec"


class UnknownCompressor(MissingPart):
    """No compressor of that name is registered under `penstock.compressors`."""

    code = "missing.compressor"


class MissingExtra(MissingPart):
    """An optional dependency is needed; the message holds the exact pip command."""

    code = "missing.extra"


class UnknownScheme(MissingPart):
    """A bus URL whose scheme no engine serves."""

    code = "missing.scheme"


# -- not found -------------------------------------------------------------------------------------


class NotFound(PenstockError):
    """A name or id that does not exist."""

    code = "notfound"


class UnknownTopic(NotFound):
    """No such topic, and topics are not created on first publish here."""

    code = "notfound.topic"


class UnknownGroup(NotFound):
    """No such consumer group."""

    code = "notfound.group"


class UnknownRoute(NotFound):
    """No such route in the catalogue."""

    code = "notfound.route"


class UnknownSchedule(NotFound):
    """No such recurring schedule."""

    code = "notfound.schedule"


class UnknownMessage(NotFound):
    """No event with that message id in that topic."""

    code = "notfound.message"


class UnknownDeadLetter(NotFound):
    """No dead letter with that id."""

    code = "notfound.dead-letter"


class OffsetExpired(NotFound):
    """The offset or time asked for lies before what retention kept."""

    code = "notfound.offset-expired"


# -- delivery --------------------------------------------------------------------------------------


class DeliveryError(PenstockError):
    """A settle call (ack, nack, extend, reject) that cannot be taken."""

    code = "delivery"


class NotLeased(DeliveryError):
    """The event was read, not leased: only events of a queue subscription are settled."""

    code = "delivery.not-leased"


class AlreadySettled(DeliveryError):
    """The delivery was already acked, nacked or rejected."""

    code = "delivery.already-settled"


class LeaseExpired(DeliveryError):
    """The lease ran out before the call; the event has been or will be delivered again."""

    code = "delivery.lease-expired"


class Fenced(DeliveryError):
    """A newer holder exists; this one may no longer change anything."""

    code = "delivery.fenced"


class SomeNotSettled(DeliveryError):
    """Of many events settled in one call, some could not be; the others are settled.

    `failures` has a pair for each that could not: the event, and the error that settling it alone
    would have raised.
    """

    code = "delivery.some-not-settled"


# -- refused ---------------------------------------------------------------------------------------


class Refused(PenstockError):
    """Understood, and not allowed."""

    code = "refused"


class WriteOnce(Refused):
    """The change would remove or rewrite events inside write-once retention."""

    code = "refused.write-once"


class ConfirmationNeeded(Refused):
    """A destructive operation without its confirmation word."""

    code = "refused.confirmation"


class TargetMismatch(Refused):
    """A dead-letter replay whose restated consumer or topic is not the original one."""

    code = "refused.target-mismatch"


class AlreadyExists(Refused):
    """The name is taken."""

    code = "refused.exists"


class AlreadyReplayed(Refused):
    """The dead letter is back with its consumer: it was replayed before."""

    code = "refused.replayed"


class RequestRejected(Refused):
    """The handler of a request rejected it, or failed at its last attempt; `reason` says why."""

    code = "refused.request"


class Unsupported(Refused):
    """This engine does not have the capability; docs/reference/capabilities.md lists which do."""

    code = "refused.unsupported"


# -- limits ----------------------------------------------------------------------------------------


class Rejected(PenstockError):
    """A limit was reached. `retry_after_s` says when to try again."""

    code = "rejected"


class Deferred(Rejected):
    """Too much waits for dispatch; publish again after `retry_after_s`."""

    code = "rejected.deferred"


class Throttled(Rejected):
    """The tenant's rate is used up; publish again after `retry_after_s`."""

    code = "rejected.throttled"


class Dropped(Rejected):
    """The event was not taken and will not be retried by the bus."""

    code = "rejected.dropped"


class ReplayLimited(Rejected):
    """Replays of this tenant come too often."""

    code = "rejected.replay-limited"


class RetentionFull(Rejected):
    """A write-once topic is at a size limit, and its events may not be deleted yet."""

    code = "rejected.retention-full"


class DiskRefused(Rejected):
    """The system does not let the bus write: `errno` says why; reads go on, and it is tried again."""

    code = "rejected.disk-refused"


class DiskFull(DiskRefused):
    """The disk has no room for more events; reads go on, publishing resumes with space."""

    code = "rejected.disk-full"


# -- storage ---------------------------------------------------------------------------------------


class StorageError(PenstockError):
    """The data folder or the disk below it."""

    code = "storage"


class FolderLocked(StorageError):
    """Another process writes this folder; `holder` names it."""

    code = "storage.locked"


class FormatTooNew(StorageError):
    """The folder was written by a newer Penstock."""

    code = "storage.format-too-new"


class Corrupted(StorageError):
    """Stored bytes fail their checksum or a file is missing; nothing was deleted."""

    code = "storage.corrupted"


class UnreadableEntry(StorageError):
    """A journal entry is whole and cannot be read; `path`, `offset` and `kind` name it."""

    code = "storage.unreadable-entry"


class WriterFailed(StorageError):
    """The disk refused to make data durable; the writer stopped for good."""

    code = "storage.writer-failed"


class NotADataFolder(StorageError):
    """The path holds something else than a Penstock folder."""

    code = "storage.not-a-folder"


# -- connection ------------------------------------------------------------------------------------


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


# -- access ----------------------------------------------------------------------------------------


class AccessDenied(PenstockError):
    """This identity may not do that."""

    code = "access.denied"


class NotAuthenticated(AccessDenied):
    """A token is missing, expired or not from here."""

    code = "access.unauthenticated"


# -- pipelines -------------------------------------------------------------------------------------


class PipelineError(PenstockError):
    """A pipeline on Spark, or what it needs to run."""

    code = "pipeline"


class UnfitEnvironment(PipelineError):
    """Java or a package is missing or of a version that Spark does not take; nothing was started."""

    code = "pipeline.environment"


class PipelineFailed(PipelineError):
    """A query ended with an error; its checkpoint holds the last batch that was done."""

    code = "pipeline.failed"


class BatchChanged(PipelineError):
    """A batch of the sink was published in part, and its next attempt has other rows."""

    code = "pipeline.batch-changed"


# -- tables ----------------------------------------------------------------------------------------


class TableError(PenstockError):
    """A warehouse or one of its tables."""

    code = "table"


class UnknownTable(TableError):
    """No table of that name in this warehouse."""

    code = "table.unknown"


class CommitConflict(TableError):
    """Other writers kept changing the table while a commit was tried; nothing of it was added."""

    code = "table.conflict"


class SchemaMismatch(TableError):
    """A change of columns that the table or its format cannot make."""

    code = "table.schema"


class TableChanged(TableError):
    """The files of a table are not those that its own properties list."""

    code = "table.changed"


class WarehouseFailed(TableError):
    """The catalogue or the storage of a warehouse does not answer."""

    code = "table.warehouse"


# -- the rest --------------------------------------------------------------------------------------


class RequestTimedOut(PenstockError):
    """No reply came within the deadline."""

    code = "timeout.request"


class BusClosed(PenstockError):
    """The bus was closed; connect again."""

    code = "closed"

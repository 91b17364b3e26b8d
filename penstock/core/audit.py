"""The audit chain: who did what to which message, each record bound to the one before it.

A record's hash covers its content and the previous record's hash, so nothing in the middle can
change without every later hash changing too; Ed25519-signed checkpoints pin the hashes
themselves. `penstock.core.auditproof` checks a chain, `penstock.log.auditlog` stores it, and
docs/reference/audit.md gives the bytes so that any language can verify.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from penstock.model.errors import InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

State = dict[str, str | int | None]

FORMAT = 1
GENESIS = "0" * 64  # what the first record names as its predecessor
CHECKPOINT_EVERY_RECORDS = 100  # a signature takes about as long as ten records; this is 10 %
MAX_RECORD_BYTES = 1 << 20  # about 30,000 message ids: more than one line should ask of a reader
KEY_BYTES = 32  # an Ed25519 seed, and also an Ed25519 public key

_RECORD_TAG = b"penstock.audit.record.1\n"
_CHECKPOINT_TAG = b"penstock.audit.checkpoint.1\n"
_SEQUENCES = struct.Struct(">QQqq")
_LENGTH = struct.Struct(">I")
_INTEGER = struct.Struct(">q")
_SIGNED = struct.Struct(">QQq")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, before it has a place in the chain.

    `ref` is the position of the event journal that caused it; 0 means none. Times are UTC
    microseconds. `targets` are message ids or names.
    """

    at_us: int
    actor: str
    operation: str
    targets: list[str]
    reason: str
    prior: State
    result: State
    ref: int = 0


class AuditRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="record"
):
    """One link of the chain. `batch` is the sequence of the first record stored in the same write.

    >>> AuditRecord(1, 1, 0, 0, "ann", "topic.delete", ["orders"], "", {}, {}, GENESIS, "").actor
    'ann'
    """

    sequence: int
    batch: int
    ref: int
    at_us: int
    actor: str
    operation: str
    targets: list[str]
    reason: str
    prior: State
    result: State
    prev_hash: str
    hash: str


class Checkpoint(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="checkpoint"
):
    """A signed statement that record `sequence` had this hash; `previous` is the checkpoint before."""

    sequence: int
    hash: str
    at_us: int
    previous: int
    public_key: str
    signature: str


class FileHeader(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="header"
):
    """The first line of an audit file: ties it to the file before (`previous_file` 0: there is none)."""

    format: int
    first_sequence: int
    prev_hash: str
    previous_file: int
    last_ref: int
    last_ref_count: int


class Head(msgspec.Struct, frozen=True):
    """A position worth keeping elsewhere: with it, even a cut-off tail is noticed.

    `checkpoint` is the sequence of the newest checkpoint at that time.
    """

    sequence: int
    hash: str
    file: str | None = None
    checkpoint: int = 0


Entry = AuditRecord | Checkpoint | FileHeader

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Entry)


def encode_line(entry: Entry) -> bytes:
    r"""One line of an audit file, newline included.

    >>> encode_line(FileHeader(1, 1, "00", 0, 0, 0))
    b'{"kind":"header","format":1,"first_sequence":1,"prev_hash":"00","previous_file":0,"last_ref":0,"last_ref_count":0}\n'
    """
    return _encoder.encode(entry) + b"\n"


def decode_line(line: bytes) -> Entry:
    """The entry a line holds; ValueError unless it is byte for byte what `encode_line` writes.

    Being strict about bytes leaves no room for a second value that only some readers see.
    """
    entry: Entry = _decoder.decode(line)
    if encode_line(entry) != line:
        raise ValueError("the line is not in canonical form")
    return entry


def _text(value: str) -> bytes:
    data = value.encode()
    return _LENGTH.pack(len(data)) + data


def _state(state: Mapping[str, str | int | None]) -> Iterator[bytes]:
    yield _LENGTH.pack(len(state))
    for key, value in sorted((key.encode(), value) for key, value in state.items()):
        yield _LENGTH.pack(len(key)) + key
        if value is None:
            yield b"n"
        elif isinstance(value, str):
            yield b"s" + _text(value)
        elif type(value) is int:
            yield b"i" + _INTEGER.pack(value)
        else:
            raise TypeError(f"{type(value).__name__} in a state: use text, whole numbers or None")


def canonical(record: AuditRecord) -> bytes:
    """The bytes a record's hash covers (docs/reference/audit.md has them one by one)."""
    return b"".join(
        (
            _RECORD_TAG,
            bytes.fromhex(record.prev_hash),
            _SEQUENCES.pack(record.sequence, record.batch, record.ref, record.at_us),
            _text(record.actor),
            _text(record.operation),
            _text(record.reason),
            _LENGTH.pack(len(record.targets)),
            *map(_text, record.targets),
            *_state(record.prior),
            *_state(record.result),
        )
    )


def is_intact(record: AuditRecord) -> bool:
    """Whether a record still has the hash of its own content."""
    try:
        return hashlib.sha256(canonical(record)).hexdigest() == record.hash
    except (ValueError, TypeError, struct.error):
        return False


class Signer:
    """An Ed25519 key that signs checkpoints; the 32 seed bytes come from outside.

    >>> signer = Signer(bytes(32))
    >>> is_signed(b"text", signer.public_key, signer.sign(b"text"))
    True
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise InvalidSettings(
                f"an audit key has {KEY_BYTES} bytes, this one {len(seed)}. "
                f"Give {KEY_BYTES} random bytes",
                size_bytes=len(seed),
            )
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: str = self._key.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> str:
        """The signature over the bytes, in hex."""
        return self._key.sign(data).hex()


def is_signed(data: bytes, public_key: str, signature: str) -> bool:
    """Whether the signature over the bytes was made with that key; hex in lower case only."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        raw = bytes.fromhex(signature)
        key.verify(raw, data)
    except (InvalidSignature, ValueError):
        return False
    return raw.hex() == signature


def signed_bytes(checkpoint: Checkpoint) -> bytes:
    """The bytes a checkpoint's signature covers."""
    return b"".join(
        (
            _CHECKPOINT_TAG,
            _SIGNED.pack(checkpoint.sequence, checkpoint.previous, checkpoint.at_us),
            bytes.fromhex(checkpoint.hash),
            bytes.fromhex(checkpoint.public_key),
        )
    )


class AuditChain:
    """The growing end of the chain: gives each record its sequence, predecessor and hash.

    >>> chain = AuditChain()
    >>> one = chain.append(at_us=1, actor="ann", operation="dlq.purge", targets=["orders/0/7"],
    ...                    reason="test data", prior={"state": "dead"}, result={"state": "purged"}, ref=12)
    >>> one.sequence, one.prev_hash == GENESIS, chain.hash == one.hash, chain.last_ref
    (1, True, True, 12)
    """

    def __init__(
        self, *, sequence: int = 0, hash: str = GENESIS, last_ref: int = 0, last_ref_count: int = 0
    ) -> None:
        self.sequence = sequence
        self.hash = hash
        self.last_ref = last_ref
        self.last_ref_count = last_ref_count
        self.last_checkpoint = sequence

    def copy(self) -> AuditChain:
        """A second chain at the same place, so that a failed write can be forgotten."""
        twin = AuditChain.__new__(AuditChain)
        twin.__dict__.update(self.__dict__)
        return twin

    def append(
        self,
        *,
        at_us: int,
        actor: str,
        operation: str,
        targets: Sequence[str],
        reason: str,
        prior: Mapping[str, str | int | None],
        result: Mapping[str, str | int | None],
        ref: int,
        batch: int | None = None,
    ) -> AuditRecord:
        """Add one record. `ref` never goes down; several records may share one.

        InvalidInput when something in it cannot be encoded; the chain is then as it was.
        """
        if ref < 0 or 0 < ref < self.last_ref:
            raise InvalidInput(
                f"audit ref {ref} comes after {self.last_ref}; nothing was recorded. "
                "Append in the order of the journal, 0 for entries without a place in it",
                ref=ref,
                last_ref=self.last_ref,
            )
        sequence = self.sequence + 1
        record = AuditRecord(
            sequence=sequence,
            batch=batch or sequence,
            ref=ref,
            at_us=at_us,
            actor=actor,
            operation=operation,
            targets=list(targets),
            reason=reason,
            prior=dict(prior),
            result=dict(result),
            prev_hash=self.hash,
            hash="",
        )
        record = msgspec.structs.replace(record, hash=_digest(record))
        self._advance(record)
        return record

    def follow(self, record: AuditRecord) -> bool:
        """Take over a stored record if it is intact and the next link; False leaves the chain alone."""
        fits = record.sequence == self.sequence + 1 and record.prev_hash == self.hash
        if not fits or not is_intact(record):
            return False
        self._advance(record)
        return True

    def _advance(self, record: AuditRecord) -> None:
        self.sequence = record.sequence
        self.hash = record.hash
        if record.ref > self.last_ref:
            self.last_ref, self.last_ref_count = record.ref, 1
        elif record.ref and record.ref == self.last_ref:
            self.last_ref_count += 1

    def checkpoint(self, signer: Signer, *, at_us: int) -> Checkpoint:
        """Sign the present end of the chain."""
        unsigned = Checkpoint(
            self.sequence, self.hash, at_us, self.last_checkpoint, signer.public_key, ""
        )
        self.last_checkpoint = self.sequence
        return msgspec.structs.replace(unsigned, signature=signer.sign(signed_bytes(unsigned)))


def _digest(record: AuditRecord) -> str:
    try:
        data = canonical(record)
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise InvalidInput(
            f"audit entry {record.operation!r} cannot be encoded ({error}); nothing was recorded. "
            "Use valid text, 64-bit whole numbers and None",
            operation=record.operation,
        ) from None
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"audit entry {record.operation!r} has {len(data)} bytes, over {MAX_RECORD_BYTES}; "
            "nothing was recorded. Split its targets over several entries",
            operation=record.operation,
            size_bytes=len(data),
        )
    return hashlib.sha256(data).hexdigest()


def select(
    records: Iterable[AuditRecord],
    *,
    message: str | None = None,
    actor: str | None = None,
    since_us: int | None = None,
    until_us: int | None = None,
    operation: str | None = None,
) -> Iterator[AuditRecord]:
    """The records about one message, by one actor, of one operation, in `[since_us, until_us)`.

    >>> chain = AuditChain()
    >>> common = dict(operation="ack", reason="", prior={}, result={}, ref=0)
    >>> records = [chain.append(at_us=at, actor="ann", targets=[f"t/0/{at}"], **common) for at in range(5)]
    >>> [record.at_us for record in select(records, since_us=2, until_us=4)]
    [2, 3]
    >>> [record.sequence for record in select(records, message="t/0/4")]
    [5]
    """
    for record in records:
        if message is not None and message not in record.targets:
            continue
        if actor is not None and actor != record.actor:
            continue
        if operation is not None and operation != record.operation:
            continue
        if since_us is not None and record.at_us < since_us:
            continue
        if until_us is not None and record.at_us >= until_us:
            continue
        yield record

"""The audit chain: who did what to which message, each record bound to the one before it.

A record's hash covers its content and the previous record's hash, so nothing in the middle can
change without every later hash changing too; Ed25519-signed checkpoints pin the hashes
themselves. `AuditChain` makes records, `Verifier` walks a stored chain link by link and names the
first one that is broken; `penstock.log.audit_log` stores the chain. docs/reference/audit.md gives
the bytes so that any language can verify.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from penstock.model.errors import InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FORMAT = 1
FILE_SUFFIX = ".ndjson"
GENESIS = "0" * 64  # the predecessor that the first record names
CHECKPOINT_EVERY_RECORDS = 100  # a signature takes about as long as ten records; this is 10 %
MAX_RECORD_BYTES = 1 << 20  # about 30,000 message ids: more than one line should ask of a reader
KEY_BYTES = 32  # an Ed25519 seed, and also an Ed25519 public key

_RECORD_TAG = b"penstock.audit.record.1\n"
_CHECKPOINT_TAG = b"penstock.audit.checkpoint.1\n"
_SEQUENCES = struct.Struct(">QQqq")
_LENGTH = struct.Struct(">I")
_INTEGER = struct.Struct(">q")
_SIGNED = struct.Struct(">QQq")

State = dict[str, str | int | None]
Kind = Literal["changed", "removed", "reordered", "bad-signature", "truncated", "duplicated"]


# -- lines of the audit files ----------------------------------------------------------------------


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


class AuditFileHeader(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="header"
):
    """The first line of an audit file: ties it to the file before (`previous_file` 0: there is none)."""

    format: int
    first_sequence: int
    prev_hash: str
    previous_file: int
    last_ref: int
    last_ref_count: int


Entry = AuditRecord | Checkpoint | AuditFileHeader

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Entry)


def file_name(first_sequence: int) -> str:
    """The name of the audit file that begins with that record.

    >>> file_name(1)
    '00000000000000000001.ndjson'
    """
    return f"{first_sequence:020d}{FILE_SUFFIX}"


def encode_line(entry: Entry) -> bytes:
    r"""One line of an audit file, newline included.

    >>> encode_line(AuditFileHeader(1, 1, "00", 0, 0, 0))
    b'{"kind":"header","format":1,"first_sequence":1,"prev_hash":"00","previous_file":0,"last_ref":0,"last_ref_count":0}\n'
    """
    return _encoder.encode(entry) + b"\n"


def decode_line(line: bytes) -> Entry:
    """The entry a line holds; ValueError unless it is byte for byte what `encode_line` writes.

    With only one form of each line, all readers see the same values.
    """
    entry: Entry = _decoder.decode(line)
    if encode_line(entry) != line:
        raise ValueError("the line is not in canonical form")
    return entry


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


# -- making the chain ------------------------------------------------------------------------------


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
        """Continue with a stored record if it is intact and the next link; False changes nothing."""
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


def is_signed(data: bytes, public_key: str, signature: str) -> bool:
    """Whether the signature over the bytes was made with that key; hex in lower case only."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        raw = bytes.fromhex(signature)
        key.verify(raw, data)
    except (InvalidSignature, ValueError):
        return False
    return raw.hex() == signature


# -- verification ----------------------------------------------------------------------------------


class Head(msgspec.Struct, frozen=True):
    """A position worth keeping elsewhere: with it, even a cut-off tail is noticed.

    `checkpoint` is the sequence of the newest checkpoint at that time.
    """

    sequence: int
    hash: str
    file: str | None = None
    checkpoint: int = 0


class Break(msgspec.Struct, frozen=True):
    """The first broken link: at which sequence, in which file and line where known, and how."""

    sequence: int
    kind: Kind
    explanation: str
    file: str | None = None
    line: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    """What a verification found; `last` is the head worth keeping elsewhere."""

    ok: bool
    records: int
    checkpoints: int
    last: Head
    broken: Break | None = None


def verify(
    records_and_checkpoints: Iterable[Entry],
    *,
    public_key: str | None = None,
    expect_last: Head | None = None,
) -> Verdict:
    """Check a whole chain; the verdict names the first broken link.

    `expect_last` is a head kept elsewhere, without which a cut-off tail looks like a shorter chain.

    >>> chain = AuditChain()
    >>> records = [
    ...     chain.append(at_us=n, actor="ann", operation="ack", targets=[], reason="", prior={}, result={}, ref=n)
    ...     for n in range(1, 4)
    ... ]
    >>> verify(records).ok
    True
    >>> broken = verify([records[0], records[2]]).broken
    >>> broken.kind, broken.sequence
    ('removed', 2)
    >>> verify(records[:2], expect_last=Head(3, chain.hash)).broken.kind
    'truncated'
    """
    verifier = Verifier(public_key=public_key)
    if expect_last is not None:
        verifier.expect(expect_last)
    for entry in records_and_checkpoints:
        verifier.feed(entry)
    return verifier.finish()


class Verifier:
    """Takes the entries of a chain in stored order and remembers the first thing that does not fit.

    After the first break it only looks for the record that was missing there, to tell a moved
    record from a removed one; nothing is kept in memory.
    """

    def __init__(self, *, public_key: str | None = None) -> None:
        self._key = public_key
        self._expect: dict[int, list[Head]] = {}
        self._records = 0
        self._checkpoints = 0
        self._sequence = 0
        self._hash = GENESIS
        self._checkpoint = 0
        self._ref = (0, 0)
        self._file: str | None = None
        self._file_first = 0
        self._line: int | None = None
        self._missing = 0
        self._broken: Break | None = None

    def expect(self, head: Head) -> None:
        """Add a head that the chain must pass through; call it before `feed`."""
        self._expect.setdefault(head.sequence, []).append(head)

    def feed(self, entry: Entry, *, file: str | None = None, line: int | None = None) -> None:
        """Check the next entry; `file` and `line` say where it is."""
        if self._broken is not None:
            self._look_for_moved(entry)
            return
        self._line = line
        starts = file is not None and file != self._file
        if starts and not isinstance(entry, AuditFileHeader):
            self._file = file
            self._fail(
                "removed", self._sequence + 1, "the file does not begin with its header line"
            )
        elif isinstance(entry, AuditFileHeader):
            self._header(entry, file, starts)
        elif isinstance(entry, Checkpoint):
            self._signed(entry)
        else:
            self._record(entry)

    def fail(
        self, kind: Kind, explanation: str, *, file: str | None, line: int | None = None
    ) -> None:
        """Report a break that the caller found: an unreadable line, a missing file."""
        if self._broken is None:
            self._broken = Break(self._sequence + 1, kind, explanation, file, line)

    def finish(self) -> Verdict:
        """The verdict, after all entries."""
        for sequence in sorted(self._expect):
            for head in self._expect[sequence]:
                if self._broken is None:
                    self._check_reaches(head)
        last = Head(self._sequence, self._hash, self._file, self._checkpoint)
        return Verdict(self._broken is None, self._records, self._checkpoints, last, self._broken)

    def _fail(self, kind: Kind, sequence: int, explanation: str, file: str | None = None) -> None:
        line = self._line if file is None else None
        self._broken = Break(sequence, kind, explanation, file or self._file, line)

    def _gap(self, found: int, file: str | None = None) -> None:
        self._missing = self._sequence + 1
        self._fail(
            "removed",
            self._missing,
            f"record {self._missing} is missing: {found} is the next that is there",
            file,
        )

    def _look_for_moved(self, entry: Entry) -> None:
        if not isinstance(entry, AuditRecord) or entry.sequence != self._missing:
            return
        assert self._broken is not None
        if is_intact(entry):
            explanation = f"record {entry.sequence} stands later than its place"
            self._broken = msgspec.structs.replace(
                self._broken, kind="reordered", explanation=explanation
            )
            self._missing = 0

    def _record(self, record: AuditRecord) -> None:
        expected = self._sequence + 1
        if not is_intact(record):
            self._fail("changed", expected, f"record {record.sequence} does not match its own hash")
        elif record.sequence > expected:
            self._gap(record.sequence)
        elif record.sequence < expected:
            self._fail(
                "duplicated", record.sequence, f"record {record.sequence} is there a second time"
            )
        elif record.prev_hash != self._hash:
            self._broken_link(expected)
        else:
            self._advance(record)

    def _broken_link(self, expected: int) -> None:
        # A signed or absent predecessor cannot be the one that was rewritten.
        pinned = self._sequence == 0 or (self._checkpoints and self._checkpoint == self._sequence)
        self._fail(
            "changed",
            expected if pinned else self._sequence,
            f"record {expected} names another predecessor than record {self._sequence}: "
            "one of them was rewritten and hashed again",
        )

    def _advance(self, record: AuditRecord) -> None:
        self._sequence = record.sequence
        self._hash = record.hash
        self._records += 1
        if record.ref:
            same = record.ref == self._ref[0]
            self._ref = (record.ref, self._ref[1] + 1 if same else 1)
        heads = self._expect.get(record.sequence, ())
        if any(head.hash != record.hash for head in heads):
            self._fail(
                "changed",
                record.sequence,
                f"the recorded head has another hash for record {record.sequence}: "
                "it, or one before it, was rewritten and everything after hashed again",
            )

    def _signed(self, checkpoint: Checkpoint) -> None:
        sequence = checkpoint.sequence
        if not self._is_genuine(checkpoint):
            self._fail("bad-signature", sequence, f"checkpoint {sequence} is not signed by the key")
        elif sequence > self._sequence:
            self._gap(sequence)
        elif sequence < self._sequence and sequence > self._checkpoint:
            self._fail("reordered", sequence, f"checkpoint {sequence} stands later than its place")
        elif sequence < self._sequence or (self._checkpoints and sequence == self._checkpoint):
            self._fail("duplicated", sequence, f"checkpoint {sequence} is there a second time")
        elif checkpoint.hash != self._hash:
            self._fail(
                "changed",
                sequence,
                f"the signed hash of record {sequence} is another: a record from "
                f"{self._checkpoint + 1} to {sequence} was rewritten and everything after hashed again",
            )
        elif checkpoint.previous != self._checkpoint:
            previous = checkpoint.previous
            self._fail("removed", previous, f"checkpoint {previous} is missing")
        else:
            self._checkpoint = sequence
            self._checkpoints += 1

    def _is_genuine(self, checkpoint: Checkpoint) -> bool:
        # Without a key given, the first one seen must at least stay the same.
        self._key = self._key or checkpoint.public_key
        if checkpoint.public_key != self._key or len(checkpoint.hash) != len(GENESIS):
            return False
        try:
            data = signed_bytes(checkpoint)
        except Exception:  # any field that cannot be packed was never signed
            return False
        return is_signed(data, checkpoint.public_key, checkpoint.signature)

    def _header(self, header: AuditFileHeader, file: str | None, starts: bool) -> None:
        first, expected, before = header.first_sequence, self._sequence + 1, self._file_first
        if file is not None and not starts:
            self._fail("duplicated", expected, "a second header line stands inside the file")
            return
        cut_off = self._file if header.previous_file == before and before else file_name(expected)
        self._file, self._file_first = file, first
        if file is not None and file.rpartition("/")[2] != file_name(first):
            self._fail(
                "reordered", expected, f"the file holds records from {first}: it was renamed"
            )
        elif first > expected:
            folder = file.rpartition("/")[0] + "/" if file and "/" in file else ""
            self._gap(first, cut_off if cut_off and "/" in cut_off else f"{folder}{cut_off}")
        elif first < expected:
            self._fail("duplicated", first, f"the file begins again at record {first}")
        elif header.prev_hash != self._hash:
            self._broken_link(expected)
        elif (header.format, header.previous_file) != (FORMAT, before) or (
            header.last_ref,
            header.last_ref_count,
        ) != self._ref:
            self._fail("changed", expected, "the header line does not fit the file before")

    def _check_reaches(self, head: Head) -> None:
        self._line = None
        gone = head.file is not None and (self._file is None or head.file > self._file)
        if head.sequence > self._sequence:
            missing = self._sequence + 1
            folder = head.file.rpartition("/")[0] if head.file else ""
            self._fail(
                "removed" if gone else "truncated",
                missing,
                f"the recorded head is {head.sequence}, the chain ends at {self._sequence}",
                f"{folder}/{file_name(missing)}".lstrip("/") if gone else None,
            )
        elif head.checkpoint > self._checkpoint:
            missing = head.checkpoint
            self._fail("truncated", missing, f"checkpoint {missing} is missing at the end")
        elif gone:
            self._fail("removed", self._sequence + 1, "the last file is missing", head.file)

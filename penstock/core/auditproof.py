"""Proof over an audit chain: walks it link by link and names the first one that is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.core.audit import (
    FORMAT,
    GENESIS,
    AuditRecord,
    Checkpoint,
    Entry,
    FileHeader,
    Head,
    is_intact,
    is_signed,
    signed_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["changed", "removed", "reordered", "bad-signature", "truncated", "duplicated"]

FILE_SUFFIX = ".ndjson"


def file_name(first_sequence: int) -> str:
    """The name of the audit file that begins with that record.

    >>> file_name(1)
    '00000000000000000001.ndjson'
    """
    return f"{first_sequence:020d}{FILE_SUFFIX}"


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
        """Name a place the chain must pass through; call before feeding."""
        self._expect.setdefault(head.sequence, []).append(head)

    def feed(self, entry: Entry, *, file: str | None = None, line: int | None = None) -> None:
        """Check the next entry; `file` and `line` say where it stands."""
        if self._broken is not None:
            self._look_for_moved(entry)
            return
        self._line = line
        starts = file is not None and file != self._file
        if starts and not isinstance(entry, FileHeader):
            self._file = file
            self._fail(
                "removed", self._sequence + 1, "the file does not begin with its header line"
            )
        elif isinstance(entry, FileHeader):
            self._header(entry, file, starts)
        elif isinstance(entry, Checkpoint):
            self._signed(entry)
        else:
            self._record(entry)

    def fail(
        self, kind: Kind, explanation: str, *, file: str | None, line: int | None = None
    ) -> None:
        """Report something the caller found: an unreadable line, a missing file."""
        if self._broken is None:
            self._broken = Break(self._sequence + 1, kind, explanation, file, line)

    def finish(self) -> Verdict:
        """The verdict once everything was fed."""
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

    def _header(self, header: FileHeader, file: str | None, starts: bool) -> None:
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


def verify(
    records_and_checkpoints: Iterable[Entry],
    *,
    public_key: str | None = None,
    expect_last: Head | None = None,
) -> Verdict:
    """Check a whole chain; the verdict names the first broken link.

    `expect_last` is a head kept elsewhere, without which a cut-off tail looks like a shorter chain.

    >>> from penstock.core.audit import AuditChain
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

"""One file of the audit chain, walked by itself: where it begins, where it ends, what is wrong.

This is the one place that knows the inside of a Verifier: it puts one down in the middle of a chain
and takes over what another found.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec

from penstock.core.audit import GENESIS, AuditRecord, FileHeader, Head, decode_line, is_intact
from penstock.core.auditproof import Break, Verifier
from penstock.log.auditseal import refuse_newer
from penstock.log.disk import RealDisk, read_file
from penstock.model.errors import FormatTooNew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.log.disk import Disk


class Place(msgspec.Struct, frozen=True):
    """Where a walk stands: all that the next file's header must agree with."""

    sequence: int = 0
    hash: str = GENESIS
    checkpoint: int = 0
    signed: bool = False
    """Whether there was a checkpoint before."""
    ref: tuple[int, int] = (0, 0)
    file_first: int = 0


class Piece(msgspec.Struct, frozen=True):
    """What the walk of one file found, begun at a place that its header claims."""

    begin: Place | None
    """None: the file says of no place that it follows it."""
    end: Place = Place()
    key: str | None = None
    """The key of its checkpoints, where none was given."""
    lines: int = 0
    records: int = 0
    checkpoints: int = 0
    broken: Break | None = None
    missing: int = 0
    """A record that a later file may hold: then it was moved, not removed."""
    newer: bool = False
    """The file is of a format to come."""


class Chain(msgspec.Struct, frozen=True):
    """What every task must know."""

    root: str
    files: list[str]
    key: str | None
    heads: list[Head]


def place_of(verifier: Verifier) -> Place:
    """Where a verifier stands."""
    return Place(
        verifier._sequence,
        verifier._hash,
        verifier._checkpoint,
        bool(verifier._checkpoints),
        verifier._ref,
        verifier._file_first,
    )


def put_down(verifier: Verifier, place: Place, file: str | None) -> None:
    """Let a verifier go on from a place, behind a file."""
    verifier._sequence, verifier._hash = place.sequence, place.hash
    verifier._checkpoint, verifier._ref = place.checkpoint, place.ref
    verifier._file, verifier._file_first = file, place.file_first


def follows(verifier: Verifier, piece: Piece) -> bool:
    """Whether a piece begins exactly where the verifier stands."""
    known = verifier._key
    same_key = known is None or piece.key is None or piece.key == known
    return piece.begin is not None and same_key and piece.begin == place_of(verifier)


def accept(verifier: Verifier, piece: Piece, file: str) -> None:
    """Take over what the walk of a file found."""
    put_down(verifier, piece.end, file)
    verifier._records += piece.records
    verifier._checkpoints += piece.checkpoints
    verifier._key = verifier._key or piece.key
    verifier._broken, verifier._missing = piece.broken, piece.missing


def broken_in(verifier: Verifier) -> bool:
    """Whether something did not fit so far."""
    return verifier._broken is not None


def missing_in(verifier: Verifier) -> int:
    """The record that would turn a removal into a move; 0 when there is none."""
    return verifier._missing


def heads_of(verifier: Verifier) -> list[Head]:
    """The places that a verifier expects the chain to pass through."""
    return [head for heads in verifier._expect.values() for head in heads]


def key_of(verifier: Verifier) -> str | None:
    """The key that a verifier was given."""
    return verifier._key


def lines_of(disk: Disk, path: str, *, newest: bool) -> Iterator[tuple[int, bytes]]:
    """The lines of a file; a live writer may not have ended the last one of the newest file."""
    for number, raw in enumerate(io.BytesIO(read_file(disk, path)), 1):
        if raw.endswith(b"\n") or not newest:
            yield number, raw


def feed_file(verifier: Verifier, disk: Disk, path: str, *, newest: bool) -> int:
    """Walk one file; how many lines it has."""
    count = 0
    for number, raw in lines_of(disk, path, newest=newest):
        count = number
        if number == 1:
            refuse_newer(path, raw)
        try:
            entry = decode_line(raw)
        except ValueError as error:
            verifier.fail("changed", f"the line cannot be read: {error}", file=path, line=number)
        else:
            verifier.feed(entry, file=path, line=number)
    return count


def walk_file(chain: Chain, index: int) -> Piece:
    """Walk one file of a chain from where its header claims to begin."""
    disk, path = RealDisk(chain.root), chain.files[index]
    newest = index == len(chain.files) - 1
    begin = Place() if index == 0 else _claimed(disk, path, newest=newest)
    if begin is None:
        return Piece(None)
    verifier = Verifier(public_key=chain.key)
    for head in chain.heads:
        verifier.expect(head)
    put_down(verifier, begin, chain.files[index - 1] if index else None)
    verifier._checkpoints = int(begin.signed)
    try:
        lines = feed_file(verifier, disk, path, newest=newest)
    except FormatTooNew:
        return Piece(None, newer=True)
    return Piece(
        begin=begin,
        end=place_of(verifier),
        key=verifier._key,
        lines=lines,
        records=verifier._records,
        checkpoints=verifier._checkpoints - int(begin.signed),
        broken=verifier._broken,
        missing=verifier._missing,
    )


def _claimed(disk: Disk, path: str, *, newest: bool) -> Place | None:
    """Where a file's header says that it begins: the writer signs before it begins a file."""
    for _, raw in lines_of(disk, path, newest=newest):
        try:
            header = decode_line(raw)
        except ValueError:
            return None
        if not isinstance(header, FileHeader):
            return None
        before = header.first_sequence - 1
        ref = (header.last_ref, header.last_ref_count)
        return Place(before, header.prev_hash, before, True, ref, header.previous_file)
    return None


def find_record(chain: Chain, index: int, sequence: int) -> bytes | None:
    """The line of an intact record in a file, if it is there."""
    newest = index == len(chain.files) - 1
    for _, raw in lines_of(RealDisk(chain.root), chain.files[index], newest=newest):
        try:
            entry = decode_line(raw)
        except ValueError:
            continue
        if isinstance(entry, AuditRecord) and entry.sequence == sequence and is_intact(entry):
            return raw
    return None

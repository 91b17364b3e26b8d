"""Audit verification at scale: each file of the chain is checked by a task, and the results are joined.

A file's header states the head of the chain before it. A task trusts it, walks the file from there, and
reports where it began and ended; the driver accepts the piece when it begins exactly where the one
before ended. Otherwise the driver walks that file itself from the true place, so the verdict is the same
as that of `penstock audit verify`, word for word. For this, `resume_at`, `place_of` and `accept` set and
read the state of a `Verifier`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from penstock.core.audit import (
    GENESIS,
    AuditFileHeader,
    AuditRecord,
    Break,
    Head,
    Verifier,
    decode_line,
    is_intact,
)
from penstock.log.audit_reader import FOLDER, AuditReader, refuse_newer
from penstock.log.disk import RealDisk, read_file
from penstock.log.segment import FOLDER as SEGMENTS
from penstock.model.errors import Corrupted, FormatTooNew, InvalidSettings, NotADataFolder
from penstock.pipelines.pipeline import pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from penstock.core.audit import Verdict, Verifier
    from penstock.log.disk import Disk


# -- the pipeline ---------------------------------------------------------------------------------

TASKS_PER_CORE = (
    4  # files differ in length; with several tasks each, no core waits long for another
)
RESULT = (
    "ok BOOLEAN, records BIGINT, checkpoints BIGINT, files INT, last_sequence BIGINT, "
    "last_hash STRING, broken_sequence BIGINT, broken_kind STRING, broken_file STRING, "
    "broken_line INT, explanation STRING"
)


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of `audit`."""

    public_key: str | None = None
    """The key as it was kept elsewhere; none: the folder's own."""
    last_sequence: int | None = None
    last_hash: str | None = None
    """A head that was kept elsewhere: the chain must pass through it."""
    report: bool = False
    """Give a broken chain as a row too, instead of failing."""


@pipeline("audit", mode="batch", params=Params)
def audit(spark: SparkSession, url: str, params: Params) -> DataFrame:
    """Check hash chain and signatures of the audit trail in parallel; fails at a broken link.

    `url` is the data folder, or an export of its audit; every worker must see it.
    """
    if (params.last_sequence is None) != (params.last_hash is None):
        raise InvalidSettings("a head is `last_sequence` and `last_hash`; give both or none")
    expected = None
    if params.last_sequence is not None and params.last_hash is not None:
        expected = Head(params.last_sequence, params.last_hash)
    reader = ParallelReader(spark, url)
    verdict = reader.verify(public_key=params.public_key, expect_last=expected)
    if not verdict.ok and not params.report:
        raise _failure(verdict)
    return _as_row(spark, verdict, len(reader.files()))


class ParallelReader(AuditReader):
    """An audit reader whose `verify` lets Spark walk the files."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._root = str(Path(folder.removeprefix("file:")).absolute())
        if not any((Path(self._root) / each).is_dir() for each in (FOLDER, SEGMENTS)):
            raise NotADataFolder(
                f"the folder {self._root} holds no audit trail: it has no folder {FOLDER}/. "
                "Name a data folder, or a folder that `penstock audit export` wrote",
                path=self._root,
            )
        super().__init__(RealDisk(self._root))
        self._spark = spark

    def _feed(self, verifier: Verifier) -> None:
        chain = Chain(self._root, self.files(), key_of(verifier), heads_of(verifier))
        pieces = self._walk(chain)
        for path, piece in zip(chain.files, pieces, strict=True):
            if piece.newer:
                refuse_newer(path, read_file(self._disk, path).partition(b"\n")[0])
        empty = []
        for index, (path, piece) in enumerate(zip(chain.files, pieces, strict=True)):
            if broken_in(verifier):
                self._look_for_moved(verifier, chain, index)
                break
            if follows(verifier, piece) and piece.lines:
                accept(verifier, piece, path)
            else:
                newest = path == chain.files[-1]
                if not feed_file(verifier, self._disk, path, newest=newest):
                    empty.append(path)
        for path in empty:
            verifier.fail("removed", "the file is empty", file=path)

    def _walk(self, chain: Chain) -> list[Piece]:
        def work(index: int) -> bytes:
            return msgspec.msgpack.encode(walk_file(chain, index))

        found = self._in_parallel(range(len(chain.files)), work)
        return [msgspec.msgpack.decode(found[index], type=Piece) for index in sorted(found)]

    def _look_for_moved(self, verifier: Verifier, chain: Chain, first: int) -> None:
        """A missing record that stands in a later file was moved."""
        sequence = missing_in(verifier)
        if not sequence:
            return

        def work(index: int) -> bytes:
            return find_record(chain, index, sequence) or b""

        lines = self._in_parallel(range(first, len(chain.files)), work)
        for index in sorted(lines):
            if lines[index]:
                verifier.feed(decode_line(lines[index]), file=chain.files[index])
                return

    def _in_parallel(self, files: range, work: Callable[[int], bytes]) -> dict[int, bytes]:
        if not files:
            return {}
        tasks = min(len(files), self._spark.sparkContext.defaultParallelism * TASKS_PER_CORE)

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    yield pa.RecordBatch.from_pydict(
                        {"file": pa.array([index], pa.int64()), "found": pa.array([work(index)], pa.binary())}
                    )  # fmt: skip

        indexes = self._spark.range(files.start, files.stop, 1, tasks)
        rows = indexes.mapInArrow(run, "file BIGINT, found BINARY").collect()
        return {row["file"]: bytes(row["found"]) for row in rows}


def _failure(verdict: Verdict) -> Corrupted:
    broken = verdict.broken
    assert broken is not None
    place = f" in {broken.file}" if broken.file else ""
    place += f" line {broken.line}" if broken.line else ""
    return Corrupted(
        f"the audit chain is broken at record {broken.sequence}{place}: {broken.kind}: "
        f"{broken.explanation}. Nothing was changed; restore the file from an export, and ask who "
        "could write to the folder",
        sequence=broken.sequence,
        kind=broken.kind,
        file=broken.file,
        line=broken.line,
    )


def _as_row(spark: SparkSession, verdict: Verdict, files: int) -> DataFrame:
    broken, last = verdict.broken, verdict.last
    link = (broken.sequence, broken.kind, broken.file, broken.line, broken.explanation) if broken else (None,) * 5  # fmt: skip
    row = (verdict.ok, verdict.records, verdict.checkpoints, files, last.sequence, last.hash, *link)
    return spark.createDataFrame([row], RESULT)


# -- walking one file -----------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True):
    """A place in the chain: all that the next file's header must agree with."""

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
    """None: the file has no readable header."""
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
    """The chain to walk, as every task needs it."""

    root: str
    files: list[str]
    key: str | None
    heads: list[Head]


def place_of(verifier: Verifier) -> Place:
    """The place that a verifier has reached."""
    return Place(
        verifier._sequence,
        verifier._hash,
        verifier._checkpoint,
        bool(verifier._checkpoints),
        verifier._ref,
        verifier._file_first,
    )


def resume_at(verifier: Verifier, place: Place, file: str | None) -> None:
    """Let a verifier continue from a place, behind a file."""
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
    resume_at(verifier, piece.end, file)
    verifier._records += piece.records
    verifier._checkpoints += piece.checkpoints
    verifier._key = verifier._key or piece.key
    verifier._broken, verifier._missing = piece.broken, piece.missing


def broken_in(verifier: Verifier) -> bool:
    """Whether a break was found so far."""
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
    resume_at(verifier, begin, chain.files[index - 1] if index else None)
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
        if not isinstance(header, AuditFileHeader):
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

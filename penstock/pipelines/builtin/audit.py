"""Audit verification at scale: every file of the chain checked by a task, the pieces joined.

A file's header says what went before it. A task takes that on trust, walks the file from there and
reports where it began and where it ended; the driver accepts the piece when it begins exactly where
the one before ended. Where it does not, the driver walks that file itself from the true place, so
that the verdict is the one that `penstock audit verify` gives, word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from penstock.core.audit import Head, decode_line
from penstock.log.auditreader import AuditReader
from penstock.log.auditseal import FOLDER, refuse_newer
from penstock.log.disk import RealDisk, read_file
from penstock.log.segment import FOLDER as SEGMENTS
from penstock.model.errors import Corrupted, InvalidSettings, NotADataFolder
from penstock.pipelines.builtin import audit_walk
from penstock.pipelines.builtin.audit_walk import Chain, Piece
from penstock.pipelines.pipeline import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.core.auditproof import Verdict, Verifier

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
        chain = Chain(
            self._root, self.files(), audit_walk.key_of(verifier), audit_walk.heads_of(verifier)
        )
        pieces = self._walk(chain)
        for path, piece in zip(chain.files, pieces, strict=True):
            if piece.newer:
                refuse_newer(path, read_file(self._disk, path).partition(b"\n")[0])
        empty = []
        for index, (path, piece) in enumerate(zip(chain.files, pieces, strict=True)):
            if audit_walk.broken_in(verifier):
                self._look_for_moved(verifier, chain, index)
                break
            if audit_walk.follows(verifier, piece) and piece.lines:
                audit_walk.accept(verifier, piece, path)
            else:
                newest = path == chain.files[-1]
                if not audit_walk.feed_file(verifier, self._disk, path, newest=newest):
                    empty.append(path)
        for path in empty:
            verifier.fail("removed", "the file is empty", file=path)

    def _walk(self, chain: Chain) -> list[Piece]:
        def work(index: int) -> bytes:
            return msgspec.msgpack.encode(audit_walk.walk_file(chain, index))

        found = self._in_parallel(range(len(chain.files)), work)
        return [msgspec.msgpack.decode(found[index], type=Piece) for index in sorted(found)]

    def _look_for_moved(self, verifier: Verifier, chain: Chain, first: int) -> None:
        """A missing record that stands in a later file was moved."""
        sequence = audit_walk.missing_in(verifier)
        if not sequence:
            return

        def work(index: int) -> bytes:
            return audit_walk.find_record(chain, index, sequence) or b""

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

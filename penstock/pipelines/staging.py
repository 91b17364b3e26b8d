"""Staging: rows of a task until the driver publishes the batch; nothing of them is on the bus before.

A few rows travel inside the task's message to the driver. More of them go into a file: in `staging/` of
a data folder, or in the driver's temporary folder when the worker sees the same one. A worker of another
machine sends all of its rows in the message, compressed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from penstock.log.recovery import STAGING
from penstock.model.errors import InvalidInput
from penstock.pipelines.connection import is_broker

INLINE_BYTES = 64 << 10
"""Rows that travel in a message: less than the 1 MiB up to which Spark sends a task's result directly."""
KEPT_S = 7 * 86_400.0
"""Age at which a file that a killed task left is deleted; a batch does not take this long."""
_MARK = "mark"


@dataclass
class Staged(WriterCommitMessage):
    """What a task hands to the driver: its rows, or the file that holds them."""

    name: str
    """Of the batch; the same in every attempt."""
    rows: int = 0
    data: bytes | None = None
    path: str | None = None


@dataclass
class Staging:
    """Where tasks of one write leave their rows."""

    folder: str
    mark: str
    """What tells this folder from one of the same name on another machine; empty for a data folder,
    which workers must see."""

    @classmethod
    def of(cls, url: str) -> Staging:
        """The staging of a data folder, or of a broker; made on the driver."""
        if not is_broker(url):
            return cls(str(Path(url) / STAGING), "")
        folder = Path(tempfile.gettempdir()) / f"penstock-staging-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise InvalidInput(
                f"{folder} can be read by other users, so rows cannot wait there; nothing was "
                "published. Remove it, or set TMPDIR to a folder of your own"
            )
        if not _mark(folder):
            unfinished = folder / f"{_MARK}-{uuid.uuid4().hex}"
            unfinished.write_text(uuid.uuid4().hex)
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, folder / _MARK)  # whole, and never another one
            unfinished.unlink()
        return cls(str(folder), _mark(folder) or uuid.uuid4().hex)

    def put(self, name: str, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Leave a task's rows; what a task that fails began to write is removed."""
        some: list[pa.RecordBatch] = []
        size = 0
        for each in rows:
            if each.num_rows:
                some.append(each)
                size += each.nbytes
            if size > INLINE_BYTES and self._shared():
                return self._into_a_file(name, some, rows)
        if not some:
            return Staged(name)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd" if size > INLINE_BYTES else None)
        with pa.ipc.new_file(sink, some[0].schema, options=options) as writer:
            for each in some:
                writer.write_batch(each)
        return Staged(name, sum(each.num_rows for each in some), sink.getvalue().to_pybytes())

    def _shared(self) -> bool:
        """Whether the driver will find a file that is written here."""
        return not self.mark or _mark(Path(self.folder)) == self.mark

    def _into_a_file(
        self, name: str, first: Sequence[pa.RecordBatch], rest: Iterator[pa.RecordBatch]
    ) -> Staged:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_stem(name)}-{uuid.uuid4().hex}.arrow"
        count = 0
        try:
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_file(file, first[0].schema) as writer,
            ):
                for rows in (first, rest):
                    for each in rows:
                        writer.write_batch(each)
                        count += each.num_rows
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Staged(name, count, None, str(path))

    def forget(self, name: str) -> None:
        """Remove what tasks of a batch left, in every attempt, and what is too old to be wanted."""
        oldest = time.time() - KEPT_S
        for path in Path(self.folder).glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith(f"{_stem(name)}-") or path.stat().st_mtime < oldest:
                    path.unlink()


def rows_of(staged: Sequence[Staged]) -> Iterator[pa.RecordBatch]:
    """The rows of a batch, task by task; those of files stay on the disk until they are looked at."""
    for each in staged:
        if each.path is not None:
            with pa.memory_map(each.path) as file:
                yield from _batches(file)
        elif each.data is not None:
            yield from _batches(pa.BufferReader(each.data))


def _batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _mark(folder: Path) -> str:
    try:
        return (folder / _MARK).read_text()
    except OSError:  # not there: this is another machine, or another user's folder
        return ""


def _stem(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()

"""Parquet files of tables: a task on an executor writes one per tenant and day, durably.

What a task wrote is a list of `WrittenFile`; the files are in no table until the driver commits them.
Files of failed attempts are in no list, and `remove_old` and `remove_others` delete them. Neither Arrow
nor pyiceberg nor deltalake syncs what it writes, so `sync` does: a catalogue on the disk before the files
it names would be a broken table after a power cut, and Spark would not send the batch again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from penstock.log.disk import sync_path
from penstock.pipelines.lakehouse.table import Layout, WrittenFile, days_of, fit
from penstock.pipelines.lakehouse.warehouse import filesystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# -- writing rows ---------------------------------------------------------------------------------

# Rows wait until a row group is worth its overhead, but never so many that a worker, which Spark
# gives about half a gigabyte, would notice.
ROW_GROUP_BYTES = 32 * 1024 * 1024
WAITING_BYTES = 128 * 1024 * 1024
# A task with rows of more tenants and days than this closes the longest unused file and may begin
# another one for the same tenant later.
MAX_OPEN_FILES = 64
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

Key = tuple[str | None, int | None]


def write_rows(
    batches: Iterable[pa.RecordBatch],
    layout: Layout,
    rejects: Layout,
    task: str,
    properties: Mapping[str, str],
) -> Iterator[WrittenFile]:
    """Write rows that fit to one table's files and the others to its dead letters' files."""
    good = PartitionWriter(layout, task, properties)
    bad = PartitionWriter(rejects, task, properties)
    for batch in batches:
        fitting, rejected = fit(batch, layout.schema)
        good.add(fitting)
        bad.add(rejected)
    yield from good.finish()
    for each in bad.finish():
        yield msgspec.structs.replace(each, rejected=True)


class PartitionWriter:
    """Open files of one task, each of one tenant and day."""

    def __init__(self, layout: Layout, task: str, properties: Mapping[str, str]) -> None:
        self._layout = layout
        self._task = task
        self._fs, self._root = filesystem(layout.folder, properties)
        self._local = self._fs.type_name == "local"
        self._waiting: dict[Key, list[pa.RecordBatch]] = {}
        self._sizes: dict[Key, int] = {}
        self._open: dict[Key, _OpenFile] = {}
        self._done: list[WrittenFile] = []
        self._begun = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows of any tenants and days."""
        for key, part in split(rows, self._layout):
            self._waiting.setdefault(key, []).append(part)
            self._sizes[key] = self._sizes.get(key, 0) + part.nbytes
            if self._sizes[key] >= ROW_GROUP_BYTES:
                self._flush(key)
        while sum(self._sizes.values()) > WAITING_BYTES:
            self._flush(max(self._sizes, key=self._sizes.__getitem__))

    def finish(self) -> list[WrittenFile]:
        """Write what waits and close all files."""
        for key in list(self._waiting):
            self._flush(key)
        for key in list(self._open):
            self._close(key)
        return self._done

    def _flush(self, key: Key) -> None:
        parts = self._waiting.pop(key)
        del self._sizes[key]
        table = pa.Table.from_batches(parts, self._layout.schema).combine_chunks()
        file = self._open.pop(key, None) or self._begin(key)
        self._open[key] = file  # last in the dict is last used
        file.writer.write_table(table)
        file.rows += table.num_rows

    def _begin(self, key: Key) -> _OpenFile:
        if len(self._open) >= MAX_OPEN_FILES:
            self._close(next(iter(self._open)))
        folder = hive_folder(key) if self._layout.hive else ""
        name = f"{folder}{self._layout.prefix}part-{self._task}-{self._begun}.parquet"
        self._begun += 1
        path = f"{self._root}/{name}"
        if self._local:  # a bucket has no folders, and some refuse to pretend
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        sink = self._fs.open_output_stream(path)
        # Dictionaries pay for names; of payloads there are hardly two alike.
        names = [field.name for field in self._layout.schema if pa.types.is_string(field.type)]
        writer = pq.ParquetWriter(
            sink, self._layout.schema, compression="zstd", use_dictionary=names
        )
        return _OpenFile(path, f"{self._layout.folder}/{name}", sink, writer)

    def _close(self, key: Key) -> None:
        file = self._open.pop(key)
        file.writer.close()
        size = file.sink.tell()
        file.sink.close()
        if self._local:
            sync(file.path)
        self._done.append(WrittenFile(file.uri, file.rows, size, *key))


class _OpenFile:
    def __init__(self, path: str, uri: str, sink: Any, writer: pq.ParquetWriter) -> None:
        self.path, self.uri, self.sink, self.writer = path, uri, sink, writer
        self.rows = 0


def hive_folder(key: Key) -> str:
    """Folders that name a partition, as Hive, Spark and DuckDB read them.

    >>> hive_folder(("acme", 20408))
    'tenant=acme/day=2025-11-16/'
    """
    tenant, day = key
    date = HIVE_NULL if day is None else str(np.datetime64(day, "D"))
    return f"tenant={HIVE_NULL if tenant is None else quote(tenant, safe='')}/day={date}/"


def split(rows: pa.RecordBatch, layout: Layout) -> Iterator[tuple[Key, pa.RecordBatch]]:
    """Rows by tenant and day; nearly always a batch of a task has one or few of each."""
    if not rows.num_rows:
        return
    cut = layout.cut
    nothing = pa.nulls(rows.num_rows)
    tenants = (rows.column(cut.tenant) if cut.tenant else nothing).cast(pa.string())
    days = (days_of(rows.column(cut.day)) if cut.day else nothing).cast(pa.int32())
    keys = pa.record_batch({"tenant": tenants, "day": days})
    codes = tenants.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    codes = (
        codes * rows.num_rows + days.dictionary_encode(null_encoding="encode").indices.to_numpy()
    )
    if (codes == codes[0]).all():
        yield _key(keys, 0), rows
        return
    order = np.argsort(codes, kind="stable")
    ordered = rows.take(pa.array(order))
    sorted_codes = codes[order]
    starts = np.flatnonzero(np.append(True, sorted_codes[1:] != sorted_codes[:-1])).tolist()
    for start, stop in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        yield _key(keys, int(order[start])), ordered.slice(start, stop - start)


def _key(keys: pa.RecordBatch, row: int) -> Key:
    return keys.column(0)[row].as_py(), keys.column(1)[row].as_py()


# -- maps from Spark ------------------------------------------------------------------------------

TEXTS = pa.map_(pa.string(), pa.string())
_decoder = msgspec.json.Decoder(list[dict[str, str | None] | None])


def maps_as_text(frame: DataFrame) -> tuple[DataFrame, tuple[str, ...]]:
    """The same rows with every map of texts as JSON, and the names of those columns.

    Of all columns, Spark measures the whole batch after each row, and asking Arrow for the size of a map
    costs more than the rest of the row.
    """
    from pyspark.sql import functions as sql

    names = tuple(
        each.name for each in frame.schema if each.dataType.simpleString() == "map<string,string>"
    )
    for name in names:
        column = sql.col(f"`{name}`")
        text = sql.to_json(column, {"ignoreNullFields": "false"})
        # Most maps are empty, and to say so costs less than to write it down.
        frame = frame.withColumn(name, sql.when(sql.size(column) == 0, "{}").otherwise(text))
    return frame, names


def text_as_maps(rows: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Rows with these columns as maps again.

    >>> rows = pa.record_batch({"h": ['{"a":"1"}', "{}", None]})
    >>> text_as_maps(rows, ["h"]).column("h").to_pylist()
    [[('a', '1')], [], None]
    """
    for name in names:
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, _maps(rows.column(at)))
    return rows


def _maps(texts: pa.Array) -> pa.Array:
    if not texts.null_count and pc.all(pc.equal(texts, "{}")).as_py():
        return pa.MapArray.from_arrays(
            np.zeros(len(texts) + 1, np.int32), pa.nulls(0, pa.string()), pa.nulls(0, pa.string())
        )
    parts = [text or "null" for text in texts.to_pylist()]
    found = _decoder.decode("[" + ",".join(parts) + "]")
    return pa.array([None if each is None else list(each.items()) for each in found], TEXTS)


# -- removing files that no table lists -----------------------------------------------------------


def remove_old(
    folder: str,
    listed: Iterable[str],
    properties: Mapping[str, str],
    *,
    keep_s: float,
    suffix: str = "",
) -> int:
    """Delete files that are not listed, unless a writer or a reader may have them; returns how many.

    The last folder and the name tell files apart: libraries write whole paths differently.
    """
    fs, found = _files(folder, properties)
    kept = {_last_words(each) for each in listed}
    removed = 0
    for each in found:
        old = time.time() - each.mtime.timestamp() > keep_s
        if old and each.path.endswith(suffix) and _last_words(each.path) not in kept:
            fs.delete_file(each.path)
            removed += 1
    return removed


def remove_others(folder: str, listed: Iterable[str], properties: Mapping[str, str]) -> int:
    """Delete the files of a batch's attempts that a table lists nothing of; returns how many went.

    Where it lists none of the batch, its files were compacted, and older snapshots still need those
    of one attempt: all stay until they are old. Attempts are told apart by their names, for
    libraries write whole paths differently, and a file that is wrongly taken for unlisted is gone.
    """
    fs, found = _files(folder, properties)
    files = [each.path for each in found]
    kept = {_attempt(each) for each in listed}
    others = [each for each in files if _attempt(each) not in kept]
    if len(others) == len(files):
        return 0
    for each in others:
        fs.delete_file(each)
    return len(others)


def _attempt(path: str) -> str:
    return path.rsplit("/", 2)[1]


def _last_words(path: str) -> tuple[str, ...]:
    return tuple(path.rsplit("/", 2)[1:])


def _files(folder: str, properties: Mapping[str, str]) -> tuple[Any, list[Any]]:
    fs, path = filesystem(folder, properties)
    chosen = FileSelector(path, recursive=True, allow_not_found=True)
    return fs, [each for each in fs.get_file_info(chosen) if each.type == FileType.File]


# -- durable files --------------------------------------------------------------------------------

MOST_REMEMBERED = 10_000  # folders; with more of them the cache starts again
_named: set[tuple[str, int]] = set()
"""Folders, with their inodes, whose own names are durable."""


def sync(path: str) -> None:
    """Make a file durable, with the names of the folders that lead to it."""
    sync_path(path)
    folder = os.path.dirname(path)
    sync_path(folder)
    if len(_named) > MOST_REMEMBERED:
        _named.clear()
    while (known := (folder, os.stat(folder).st_ino)) not in _named:
        _named.add(known)
        above = os.path.dirname(folder)
        # A folder that cannot be read here was not made here either.
        if above == folder or not os.access(above, os.R_OK):
            break
        sync_path(above)
        folder = above

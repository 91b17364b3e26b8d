"""Reading segments: a few events out of a large file, every byte of them checked."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.log.segment import (
    FORMAT,
    FORMAT_KEY,
    CanonicalRows,
    ContentHash,
    Range,
    SegmentInfo,
    binary_of,
    chunk_of,
)
from penstock.model.arrow import split_runs
from penstock.model.checksum import crc32
from penstock.model.errors import Corrupted, FormatTooNew

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.log.disk import Disk, File
    from penstock.model.batch import EventBatch

# Decoded row groups kept when the engine brings no cache of its own: two of the largest.
CACHE_BYTES = 64 * 1024 * 1024
SCAN_BYTES = 8 * 1024 * 1024  # of a row group that is scanned, at a time
MAX_END = 2**31 - 1  # what an Arrow offset can say


class GroupCache:
    """Decoded row groups of all open segments, the least recently used leaving first.

    >>> cache = GroupCache(max_bytes=1)
    >>> cache.put((1, 0), pa.RecordBatch.from_pydict({"n": [1, 2]}))
    >>> cache.get((1, 0)) is None
    True
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._groups: OrderedDict[tuple[int, int], pa.RecordBatch] = OrderedDict()
        self._lock = threading.Lock()  # reads run in worker threads

    def get(self, key: tuple[int, int]) -> pa.RecordBatch | None:
        """The row group of (segment id, index), if it is here."""
        with self._lock:
            group = self._groups.get(key)
            if group is not None:
                self._groups.move_to_end(key)
            return group

    def put(self, key: tuple[int, int], group: pa.RecordBatch) -> None:
        """Keep a row group, letting others go until it fits."""
        with self._lock:
            if key not in self._groups:
                self._groups[key] = group
                self.size_bytes += group.nbytes
            while self.size_bytes > self.max_bytes:
                _, gone = self._groups.popitem(last=False)
                self.size_bytes -= gone.nbytes


class SegmentReader:
    """Reads one segment file through a memory map; a damaged byte raises Corrupted, never events."""

    def __init__(self, disk: Disk, info: SegmentInfo, cache: GroupCache | None = None) -> None:
        self.info = info
        self._disk = disk
        self._cache = GroupCache() if cache is None else cache
        self._file: File | None = None
        self._parquet: pq.ParquetFile | None = None
        self._hashed: tuple[int, CanonicalRows] | None = None
        self._data = memoryview(b"")
        self._row_ends = list(accumulate(span.rows for span in info.spans))
        self._byte_ends = list(accumulate(span.size_bytes for span in info.spans))
        self._lanes: dict[tuple[str, int], list[Range]] = {}
        for each in info.ranges:
            self._lanes.setdefault((each.topic, each.partition), []).append(each)

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        limit_events: int,
        limit_bytes: int,
        verify: bool = True,
        use_threads: bool = True,
    ) -> list[EventBatch]:
        """Events from `offset` on, in order, until a limit is reached or the segment ends.

        At least one event is returned when there is one, however large. Reading starts at the next
        offset there is when `offset` itself is not in this segment.
        """
        found: list[EventBatch] = []
        for each in self._lanes.get((topic, partition), ()):
            if each.last_offset < offset:
                continue
            first = max(offset, each.first_offset)
            for index, start, stop in self._rows(each, first, each.last_offset):
                record = self._group(index, verify=verify, use_threads=use_threads)
                stop = min(stop, start + limit_events)
                ends, _ = binary_of(record.column("payload"))
                room = min(int(ends[start]) + limit_bytes, MAX_END)
                fits = int(np.searchsorted(ends[start : stop + 1], room, "right")) - 1
                whole = fits >= stop - start
                stop = min(stop, start + max(fits, 0 if found else 1))
                found += split_runs(record.slice(start, stop - start))
                limit_events -= stop - start
                limit_bytes -= int(ends[stop] - ends[start])
                if not whole or limit_events <= 0 or limit_bytes <= 0:
                    return found
        return found

    def scan(
        self, topic: str, partition: int, first: int, last: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Only some columns of offsets `first` to `last`: the first offset of each piece, and its rows.

        Only the bytes of these columns are looked at, and all of those are checked.
        """
        for each in self._lanes.get((topic, partition), ()):
            start, stop = max(first, each.first_offset), min(last, each.last_offset)
            if start > stop:
                continue
            for index, begin, end in self._rows(each, start, stop):
                at = 0
                for rows in self._some_columns(index, columns):
                    first_row, behind = max(begin, at), min(end, at + rows.num_rows)
                    if first_row < behind:
                        yield start, rows.slice(first_row - at, behind - first_row)
                        start += behind - first_row
                    at += rows.num_rows
                self._rest(index)  # a scan goes through gigabytes, and has decoded all of this

    def _some_columns(self, index: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Columns of a row group, in pieces where it is large."""
        parquet = self._open(verify=True)
        count = self.info.spans[index].rows
        if not columns:
            rows = pa.Array.from_buffers(pa.struct([]), count, [None])
            yield pa.RecordBatch.from_struct_array(rows)
            return
        self._check_columns(index, parquet.metadata, columns)
        pieces = -(-parquet.metadata.row_group(index).total_byte_size // SCAN_BYTES)
        batches = parquet.iter_batches(
            -(-count // max(1, pieces)), [index], columns=list(columns), use_threads=False
        )
        try:
            yield from batches
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._damaged(f"row group {index} cannot be decoded: {error}", index) from error

    def batches(self) -> Iterator[EventBatch]:
        """Every event, in the order of the file, as batches of at most a row group."""
        for index, span in enumerate(self.info.spans):
            if span.rows:
                yield from split_runs(self._group(index))

    def find_time(self, topic: str, partition: int, time_us: int) -> int | None:
        """The first offset appended at or after a time, or None when all are older."""
        for each in self._lanes.get((topic, partition), ()):
            if each.last_time_us < time_us:
                continue
            for index, start, stop in self._rows(each, each.first_offset, each.last_offset):
                record = self._group(index)
                times = record.column("append_time").view(pa.int64()).to_numpy()[start:stop]
                late = np.flatnonzero(times >= time_us)
                if len(late):
                    return int(record.column("offset")[start + int(late[0])].as_py())
        return None

    def hash_into(
        self, content: ContentHash, topic: str, partition: int, first_offset: int, last_offset: int
    ) -> int:
        """Add these events, as they are in the file, to a content hash; returns how many were there."""
        wanted = first_offset
        for each in self._lanes.get((topic, partition), ()):
            if each.first_offset <= wanted <= min(each.last_offset, last_offset):
                last = min(each.last_offset, last_offset)
                for index, start, stop in self._rows(each, wanted, last):
                    content.update(self._canonical(index), start, stop)
                wanted = last + 1
        return wanted - first_offset

    def _canonical(self, index: int) -> CanonicalRows:
        # Ranges are proven in the order of their rows, so the last row group is the next one's too.
        if self._hashed is None or self._hashed[0] != index:
            self._hashed = (index, CanonicalRows(self._group(index)))
        return self._hashed[1]

    def close(self) -> None:
        """Let go of the file; batches already read stay valid."""
        if self._file is not None:
            self._file.close()
        self._file = self._parquet = self._hashed = None

    def _rows(self, each: Range, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Row groups that hold offsets `first` to `last` of a range, each with its rows."""
        row = each.rows_at + first - each.first_offset
        end = each.rows_at + last - each.first_offset + 1
        index = bisect_right(self._row_ends, row)
        while row < end:
            base = self._row_ends[index] - self.info.spans[index].rows
            stop = min(end, self._row_ends[index])
            yield index, row - base, stop - base
            row = stop
            index += 1

    def _group(
        self, index: int, *, verify: bool = True, use_threads: bool = True
    ) -> pa.RecordBatch:
        key = (self.info.id, index)
        group = self._cache.get(key)
        if group is None:
            parquet = self._open(verify=verify)
            if verify:
                self._check_span(index)
            try:
                table = parquet.read_row_group(index, use_threads=use_threads).combine_chunks()
                (group,) = table.to_batches()
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._damaged(
                    f"row group {index} cannot be decoded: {error}", index
                ) from error
            if group.num_rows != self.info.spans[index].rows:
                raise self._damaged(f"row group {index} has {group.num_rows} rows", index)
            self._cache.put(key, group)
        return group

    def _open(self, *, verify: bool) -> pq.ParquetFile:
        if self._parquet is None:
            try:
                self._file = self._disk.open(self.info.path)
            except FileNotFoundError as error:
                raise self._damaged("the file is missing") from error
            size = self._file.size()
            if size != self.info.size_bytes:
                raise self._damaged(f"the file has {size} bytes instead of {self.info.size_bytes}")
            self._data = self._file.read(0, size)
            if verify:
                self._check_span(len(self.info.spans) - 1)
            try:
                parquet = pq.ParquetFile(
                    pa.BufferReader(pa.py_buffer(self._data)), pre_buffer=False
                )
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._damaged(f"the footer cannot be read: {error}") from error
            version = (parquet.schema_arrow.metadata or {}).get(FORMAT_KEY, b"").decode()
            if version != FORMAT:
                raise FormatTooNew(
                    f"{self.info.path} has format {version!r}; this Penstock reads {FORMAT!r}. "
                    "Upgrade Penstock",
                    path=self.info.path,
                    version=version,
                )
            self._parquet = parquet
        return self._parquet

    def _check_span(self, index: int) -> None:
        # Arrow could verify its page checksums, but they leave out page headers and the footer and
        # take three times as long as one CRC over all the bytes of a row group.
        span = self.info.spans[index]
        end = self._byte_ends[index]
        if crc32(self._data[end - span.size_bytes : end]) != span.crc32:
            part = f"row group {index}" if span.rows else "the footer"
            raise self._damaged(f"{part} fails its checksum", index if span.rows else None)

    def _check_columns(self, index: int, metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
        sums = self.info.spans[index].columns
        if not sums:
            self._check_span(index)
        for column, expected in enumerate(sums):
            name, _, _ = metadata.schema.column(column).path.partition(".")  # a map is two
            if name in columns:
                start, size = chunk_of(metadata, index, column)
                if crc32(self._data[start : start + size]) != expected:
                    raise self._damaged(
                        f"column {name!r} of row group {index} fails its checksum", index
                    )

    def _rest(self, index: int) -> None:
        assert self._file is not None
        size = self.info.spans[index].size_bytes
        self._file.rest(self._byte_ends[index] - size, size)

    def _damaged(self, what: str, group: int | None = None) -> Corrupted:
        info = self.info
        hit = info.ranges
        if group is not None:
            last = self._row_ends[group]
            first = last - info.spans[group].rows
            hit = [each for each in hit if each.rows_at < last and each.rows_at + each.rows > first]
        return corrupted(info, what, hit)


def corrupted(info: SegmentInfo, what: str, ranges: list[Range] | None = None) -> Corrupted:
    """The error for a damaged segment: names the file, the events and the way out."""
    hit = info.ranges if ranges is None else ranges
    one = hit[0]
    more = f" and {len(hit) - 1} more ranges" if len(hit) > 1 else ""
    return Corrupted(
        f"segment {info.path}: {what}. Affected: {one.topic!r} partition {one.partition} offsets "
        f"{one.first_offset} to {one.last_offset}{more}. Nothing was deleted and no other file is "
        "affected: restore this file from a backup (its SHA-256 is in the manifest)",
        path=info.path,
        sha256=info.sha256,
        affected=[
            (each.topic, each.partition, each.first_offset, each.last_offset) for each in hit
        ],
    )


def verify_segment(disk: Disk, info: SegmentInfo) -> None:
    """Read a whole segment and compare size and SHA-256; raises Corrupted when they differ."""
    try:
        file = disk.open(info.path)
    except FileNotFoundError as error:
        raise corrupted(info, "the file is missing") from error
    try:
        size = file.size()
        if size != info.size_bytes:
            raise corrupted(info, f"the file has {size} bytes instead of {info.size_bytes}")
        if hashlib.sha256(file.read(0, size)).hexdigest() != info.sha256:
            raise corrupted(info, "its SHA-256 is not the one in the manifest")
    finally:
        file.close()


def verify_content(disk: Disk, info: SegmentInfo) -> None:
    """Decode a whole segment and compare every range with its content hash, or raise Corrupted."""
    reader = SegmentReader(disk, info)
    try:
        for each in info.ranges:
            content = ContentHash()
            reader.hash_into(
                content, each.topic, each.partition, each.first_offset, each.last_offset
            )
            if content.digest() != each.content:
                raise corrupted(info, "its events are not the ones that were sealed", [each])
    finally:
        reader.close()

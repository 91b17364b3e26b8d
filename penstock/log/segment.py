"""Segments: sealed events as Parquet files that any tool can read.

A segment of its *own* holds one topic, one partition and one UTC day of append time, with offsets
that follow each other. A *shared* segment holds what is left of many quiet topics, sorted by topic,
partition and offset. What is in a file, and the checksums of all of its bytes, stand in its
`SegmentInfo`, which the manifest keeps: a reader finds its rows without asking the file.
docs/reference/files.md describes both.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.log.content import Canonical, ContentHash, binary_of
from penstock.log.disk import Disk, write_file
from penstock.model.arrow import SCHEMA
from penstock.model.checksum import crc32
from penstock.model.compressor import compressors, worth_compressing
from penstock.model.errors import Corrupted

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT = "1"
FORMAT_KEY = b"penstock.format"
FOLDER = "segments"
DAY_US = 86_400_000_000

# One look-up in a hundred opens a row group in vain; a filter then takes about 1.2 bytes an event.
BLOOM_FALSE_POSITIVES = 0.01
NAMES = ["topic", "tenant", "codec"]
# Parquet's names of the columns: a map is two of them.
COLUMNS = [name for name in SCHEMA.names if name != "headers"]
COLUMNS += ["headers.key_value.key", "headers.key_value.value"]
# Numbers that grow evenly shrink to almost nothing. Payloads stay plain: as fast to read as
# length-prefixed ones, and every Parquet reader knows them.
ENCODINGS = {
    "partition": "DELTA_BINARY_PACKED", "offset": "DELTA_BINARY_PACKED",
    "append_time": "DELTA_BINARY_PACKED", "event_time": "DELTA_BINARY_PACKED",
    "schema_id": "DELTA_BINARY_PACKED", "key": "PLAIN", "payload": "PLAIN",
}  # fmt: skip
# Smallest and largest payload or token tell nobody anything and would sit in every page index.
STATISTICS = ["topic", "partition", "offset", "append_time", "event_time", "key", "tenant", "codec", "schema_id", "expires", "priority"]  # fmt: skip


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Events of one topic and partition that lie together in a segment, with no offset missing."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    first_time_us: int
    last_time_us: int
    rows_at: int
    tenants: list[str]
    payload_bytes: int
    event_bytes: int
    content: bytes
    urgent: bool | None = None
    """Whether some of its events have a priority; segments of older releases do not say."""

    @property
    def rows(self) -> int:
        """How many events."""
        return self.last_offset - self.first_offset + 1

    @property
    def day(self) -> int:
        """The UTC day of append, counted from 1970; a range never crosses midnight."""
        return self.first_time_us // DAY_US


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One row group's bytes in the file, or with no rows the tail: filters, page index, footer."""

    rows: int
    size_bytes: int
    crc32: int
    columns: list[int] = []
    """The checksum of each column's bytes, in Parquet's order; empty in the tail, and in old files."""


class SegmentInfo(msgspec.Struct, frozen=True):
    """What the manifest knows of one segment file."""

    id: int
    path: str
    shared: bool
    sha256: str
    size_bytes: int
    rows: int
    ranges: list[Range]
    spans: list[Span]

    @property
    def event_bytes(self) -> int:
        """What its events take uncompressed."""
        return sum(each.event_bytes for each in self.ranges)

    @property
    def last_time_us(self) -> int:
        """When its newest event was appended."""
        return max(each.last_time_us for each in self.ranges)


def segment_path(number: int, *, shared: bool) -> str:
    """Where the segment with this id lives.

    >>> segment_path(7, shared=True)
    'segments/000000000007.shared.parquet'
    """
    return f"{FOLDER}/{number:012d}{'.shared' if shared else ''}.parquet"


def write_segment(
    disk: Disk,
    number: int,
    groups: Iterable[pa.RecordBatch],
    *,
    shared: bool,
    zstd_level: int,
) -> SegmentInfo:
    """Write RecordBatches, in order, as the row groups of one Parquet file; durable on return.

    The file is built in memory and appears under its name complete or not at all.
    """
    sink = pa.BufferOutputStream()
    builder = RangeBuilder()
    writer: pq.ParquetWriter | None = None
    written: list[pa.RecordBatch] = []
    ends = [0]
    for group in groups:
        if writer is None:
            writer = _writer(sink, zstd_level, group)
        builder.take(group)
        writer.write_batch(group, row_group_size=group.num_rows)
        written.append(group)
        ends.append(sink.tell())
    if writer is None:
        raise ValueError("a segment needs at least one event")
    writer.close()
    buffer = sink.getvalue()
    metadata = _compare(buffer, written)
    data = memoryview(buffer).cast("B")
    rows = [group.num_rows for group in written]
    spans = [
        Span(count, end - start, crc32(data[start:end]), _column_sums(metadata, index, data))
        for index, (count, start, end) in enumerate(zip(rows, ends, ends[1:], strict=False))
    ]
    spans.append(Span(0, len(data) - ends[-1], crc32(data[ends[-1] :])))
    path = segment_path(number, shared=shared)
    write_file(disk, path, [data])
    return SegmentInfo(
        id=number,
        path=path,
        shared=shared,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        rows=sum(rows),
        ranges=builder.finish(),
        spans=spans,
    )


def chunk_of(metadata: pq.FileMetaData, group: int, column: int) -> tuple[int, int]:
    """Where in the file a row group's column lies, and how many bytes it has."""
    chunk = metadata.row_group(group).column(column)
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    return start, chunk.total_compressed_size


def _column_sums(metadata: pq.FileMetaData, group: int, data: memoryview) -> list[int]:
    chunks = (chunk_of(metadata, group, column) for column in range(metadata.num_columns))
    return [crc32(data[start : start + size]) for start, size in chunks]


def _writer(
    sink: pa.BufferOutputStream, zstd_level: int, group: pa.RecordBatch
) -> pq.ParquetWriter:
    bloom = {"ndv": max(group.num_rows, 1), "fpp": BLOOM_FALSE_POSITIVES}
    # Payloads that do not shrink (images, encrypted or compressed bytes) cost half the time to try.
    ends, data = binary_of(group.column("payload"))
    squeeze = worth_compressing(data[int(ends[0]) : int(ends[-1])], compressors.get("zstd"))
    squeezed = [name for name in COLUMNS if squeeze or name != "payload"]
    return pq.ParquetWriter(
        sink,
        SCHEMA.with_metadata({FORMAT_KEY: FORMAT}),
        compression=dict.fromkeys(COLUMNS, "none") | dict.fromkeys(squeezed, "zstd"),
        compression_level=dict.fromkeys(squeezed, zstd_level),
        use_dictionary=NAMES,
        column_encoding=ENCODINGS,
        write_statistics=STATISTICS,
        write_page_index=True,
        write_page_checksum=True,
        bloom_filter_options={"key": bloom, "token": bloom},
        sorting_columns=[pq.SortingColumn(index) for index in range(3)],
    )


def _compare(buffer: pa.Buffer, written: list[pa.RecordBatch]) -> pq.FileMetaData:
    """Decode a file before it is used: the journal that could make it again will be deleted."""
    parquet = pq.ParquetFile(pa.BufferReader(buffer), pre_buffer=False)
    for index, group in enumerate(written):
        read = parquet.read_row_group(index)
        for name in SCHEMA.names:
            one, other = read.column(name).combine_chunks(), group.column(name)
            same = one.equals(other)
            if not same and name in NAMES:  # the same names may be numbered differently
                same = one.dictionary_decode().equals(other.dictionary_decode())
            if not same:
                raise Corrupted(
                    f"column {name!r} of row group {index} does not decode to what was encoded; "
                    "the file was not written and its inputs were kept. Check the memory of this "
                    "machine",
                    column=name,
                )
    return parquet.metadata


class RangeBuilder:
    """Finds the ranges in rows that come by group after group, and hashes each."""

    def __init__(self) -> None:
        self._done: list[Range] = []
        self._open: Range | None = None
        self._content = ContentHash()
        self._rows = 0

    def take(self, record: pa.RecordBatch) -> None:
        """Note the rows of one row group."""
        rows = Canonical(record)
        times = record.column("append_time").view(pa.int64()).to_numpy()
        offsets = record.column("offset").to_numpy()
        bounds = _cuts(record, offsets, times)
        starts = bounds[:-1]
        lowest = np.minimum.reduceat(times, starts).tolist()
        highest = np.maximum.reduceat(times, starts).tolist()
        payloads = np.diff(rows.payload_ends[bounds]).tolist()
        sizes = np.diff(rows.event_ends[bounds]).tolist()
        topics = record.column("topic").take(pa.array(starts)).to_pylist()
        partitions = record.column("partition").to_numpy()[starts].tolist()
        firsts = offsets[starts].tolist()
        cuts = bounds.tolist()
        tenant = record.column("tenant")
        urgent = _urgent(record, starts)
        for index, start in enumerate(cuts[:-1]):
            stop = cuts[index + 1]
            self._add(
                Range(
                    topics[index], partitions[index], firsts[index],
                    firsts[index] + stop - start - 1, lowest[index], highest[index],
                    self._rows + start, _distinct(tenant, start, stop), payloads[index],
                    sizes[index], b"", urgent[index],
                ),
                rows, start, stop,
            )  # fmt: skip
        self._rows += record.num_rows

    def _add(self, part: Range, rows: Canonical, start: int, stop: int) -> None:
        last = self._open
        if last is not None and _continues(last, part):
            self._open = msgspec.structs.replace(
                last,
                last_offset=part.last_offset,
                first_time_us=min(last.first_time_us, part.first_time_us),
                last_time_us=max(last.last_time_us, part.last_time_us),
                tenants=sorted({*last.tenants, *part.tenants}),
                payload_bytes=last.payload_bytes + part.payload_bytes,
                event_bytes=last.event_bytes + part.event_bytes,
                urgent=bool(last.urgent or part.urgent),
            )
        else:
            self._close()
            self._open = part
        self._content.update(rows, start, stop)

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(msgspec.structs.replace(self._open, content=self._content.digest()))
            self._content = ContentHash()

    def finish(self) -> list[Range]:
        """All ranges, in the order of their rows."""
        self._close()
        self._open = None
        return self._done


def _continues(last: Range, part: Range) -> bool:
    return (
        last.last_offset + 1 == part.first_offset
        and last.partition == part.partition
        and last.topic == part.topic
        and last.day == part.day
    )


def _cuts(record: pa.RecordBatch, offsets: Any, times: Any) -> Any:
    """Row numbers where a range begins, and the end."""
    cut = np.zeros(record.num_rows, dtype=bool)
    cut[0] = True
    codes = record.column("topic").indices.to_numpy()
    partitions = record.column("partition").to_numpy()
    days = times // DAY_US
    for values in (codes, partitions, days):
        cut[1:] |= values[1:] != values[:-1]
    cut[1:] |= offsets[1:] != offsets[:-1] + 1
    return np.append(np.flatnonzero(cut), record.num_rows)


def _urgent(record: pa.RecordBatch, starts: Any) -> list[bool]:
    """Of the rows from each of these to the next, whether some have a priority."""
    column = record.column("priority")
    if column.null_count == record.num_rows:
        return [False] * len(starts)
    priorities = column.fill_null(0).to_numpy()
    found: list[bool] = np.logical_or.reduceat(priorities > 0, starts).tolist()
    return found


def _distinct(names: pa.DictionaryArray, start: int, stop: int) -> list[str]:
    known = names.dictionary
    if len(known) == 1:
        return [known[0].as_py()]
    codes = np.unique(names.indices.to_numpy()[start:stop]).tolist()
    return sorted(known[code].as_py() for code in codes)

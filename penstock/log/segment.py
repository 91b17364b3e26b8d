"""Segments: sealed events as Parquet files that any tool can read.

A segment of its *own* holds one topic, one partition and one UTC day of append time, with offsets
that follow each other. A *shared* segment holds small ranges of many topics, sorted by topic,
partition and offset. `SegmentInfo` says what is in a file, with the checksums of all of its bytes;
the manifest keeps it, so a reader finds its rows without asking the file.

The content hash tells whether a rewrite kept every event as it was. Events are brought into a
canonical form that does not depend on batches, dictionaries, row groups or files, and that form is
hashed with SHA-256. So a range of offsets has the same hash in the journal, in a shared segment and
in a segment of its own. docs/reference/files.md describes the files and the canonical form.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.log.disk import Disk, write_file
from penstock.model.arrow import SCHEMA, TIME
from penstock.model.batch import EVENT_OVERHEAD_BYTES, event_bytes
from penstock.model.checksum import crc32
from penstock.model.column import Bytes, Strings
from penstock.model.compressor import compressors, worth_compressing
from penstock.model.errors import Corrupted
from penstock.model.token import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.model.batch import EventBatch

FORMAT = "1"
FORMAT_KEY = b"penstock.format"
FOLDER = "segments"
DAY_US = 86_400_000_000
# A row group is also cut at this many bytes: a reader decodes a whole one to get at one event,
# and Arrow's 32-bit offsets must never come near their end.
GROUP_MAX_BYTES = 32 * 1024 * 1024

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
# Smallest and largest payload or token help no query and would sit in every page index.
STATISTICS = ["topic", "partition", "offset", "append_time", "event_time", "key", "tenant", "codec", "schema_id", "expires", "priority"]  # fmt: skip

# The canonical form of an event: everything of fixed size, and the lengths of the rest, so that no
# two different events join to the same bytes.
ROW = np.dtype(
    [
        ("offset", "<i8"), ("append_time", "<i8"), ("event_time", "<i8"), ("expires", "<i8"),
        ("token", f"V{TOKEN_BYTES}"), ("schema_id", "<i4"), ("key", "<i4"), ("payload", "<i4"),
        ("headers", "<i4"), ("tenant", "<i2"), ("codec", "<i2"), ("priority", "u1"),
    ]
)  # fmt: skip
NULL_KEY = -1  # the length of "no key", which is another thing than an empty key

Ends = npt.NDArray[np.int32]
Sized = tuple["EventBatch", int]
"""A batch and its `event_bytes`, which are asked for many times."""


# -- what is in a segment --------------------------------------------------------------------------


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
    """One segment file, as the manifest records it."""

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
        """The size of its events, uncompressed."""
        return sum(each.event_bytes for each in self.ranges)

    @property
    def last_time_us(self) -> int:
        """The append time of its newest event."""
        return max(each.last_time_us for each in self.ranges)


def segment_path(number: int, *, shared: bool) -> str:
    """The path of the segment with this id.

    >>> segment_path(7, shared=True)
    'segments/000000000007.shared.parquet'
    """
    return f"{FOLDER}/{number:012d}{'.shared' if shared else ''}.parquet"


# -- writing ---------------------------------------------------------------------------------------


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
    """Decode a file and compare it with its rows: the journal that could make it again will be deleted."""
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


def chunk_of(metadata: pq.FileMetaData, group: int, column: int) -> tuple[int, int]:
    """Where in the file a row group's column lies, and how many bytes it has."""
    chunk = metadata.row_group(group).column(column)
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    return start, chunk.total_compressed_size


def _column_sums(metadata: pq.FileMetaData, group: int, data: memoryview) -> list[int]:
    chunks = (chunk_of(metadata, group, column) for column in range(metadata.num_columns))
    return [crc32(data[start : start + size]) for start, size in chunks]


# -- ranges ----------------------------------------------------------------------------------------


class RangeBuilder:
    """Finds the ranges in the rows of one row group after another, and hashes each."""

    def __init__(self) -> None:
        self._done: list[Range] = []
        self._open: Range | None = None
        self._content = ContentHash()
        self._rows = 0

    def take(self, record: pa.RecordBatch) -> None:
        """Add the rows of one row group."""
        rows = CanonicalRows(record)
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

    def _add(self, part: Range, rows: CanonicalRows, start: int, stop: int) -> None:
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
    """For the rows from each start to the next: whether some have a priority."""
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


# -- the content hash ------------------------------------------------------------------------------


class ContentHash:
    """Hashes the events of one range; feed them in the order of their offsets.

    >>> from penstock.model.arrow import to_arrow
    >>> from penstock.model.batch import EventBatch
    >>> rows = CanonicalRows(to_arrow(EventBatch.build("orders", [b"a", b"b"])))
    >>> whole, halves = ContentHash(), ContentHash()
    >>> whole.update(rows, 0, 2)
    >>> halves.update(rows, 0, 1)
    >>> halves.update(rows, 1, 2)
    >>> whole.digest() == halves.digest()
    True
    """

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        # One hasher a column: a column continues where the last update ended, whatever its cut.
        self._columns: list[Any] = []

    def update(self, rows: CanonicalRows, start: int, stop: int) -> None:
        """Add the events from `start` to `stop`."""
        slices = rows.slices(start, stop)
        if not self._columns:
            self._columns = [hashlib.sha256() for _ in slices]
        for column, part in zip(self._columns, slices, strict=True):
            if part:
                column.update(part)

    def digest(self) -> bytes:
        """The hash of all events added so far: 32 bytes."""
        return hashlib.sha256(b"".join(column.digest() for column in self._columns)).digest()


class CanonicalRows:
    """The canonical form of a RecordBatch of the log's schema, ready to be hashed in slices."""

    __slots__ = ("_entries", "_header_ends", "_rows", "_texts", "event_ends", "payload_ends")

    def __init__(self, record: pa.RecordBatch) -> None:
        count = record.num_rows
        rows = np.empty(count, dtype=ROW)
        for name in ("offset", "append_time", "event_time", "schema_id"):
            rows[name] = _numbers(record.column(name), rows.dtype[name])
        for name in ("expires", "priority"):
            rows[name] = _numbers(
                record.column(name).fill_null(_zero(record, name)), rows.dtype[name]
            )
        rows["token"] = _token_rows(record.column("token"))
        self._texts: list[tuple[Ends, memoryview]] = []
        sizes = np.full(count, EVENT_OVERHEAD_BYTES, dtype=np.int64)
        for name in ("tenant", "codec", "key", "payload"):
            column = record.column(name)
            ends, data = _name_texts(column) if name in ("tenant", "codec") else binary_of(column)
            self._texts.append((ends, data))
            rows[name] = np.diff(ends)
            if name in ("key", "payload"):
                sizes += rows[name]
        keys = record.column("key")
        if keys.null_count:
            rows["key"][keys.is_null().to_numpy(zero_copy_only=False)] = NULL_KEY
        sizes += self._take_headers(record.column("headers"), rows)
        self._rows = memoryview(rows.view(np.uint8).data)
        self.event_ends = np.concatenate(([0], np.cumsum(sizes)))
        self.payload_ends = self._texts[-1][0]

    def _take_headers(self, headers: pa.MapArray, rows: Any) -> Any:
        ends = _ends(headers)
        self._header_ends: Ends | None = ends
        if ends[-1] == ends[0]:  # null and empty headers are the same: none
            rows["headers"] = 0
            self._header_ends = None
            return 0
        rows["headers"] = np.diff(ends)
        (names, name_data), (values, value_data) = binary_of(headers.keys), binary_of(headers.items)
        # `keys` and `items` are the whole children, so the map's own ends index them.
        lengths = np.empty((len(names) - 1, 2), dtype="<i4")
        lengths[:, 0], lengths[:, 1] = np.diff(names), np.diff(values)
        self._entries: list[tuple[Any, memoryview]] = [
            (names, name_data),
            (values, value_data),
            (np.arange(len(names), dtype=np.int64) * 8, lengths.data.cast("B")),
        ]
        return np.diff(names[ends]) + np.diff(values[ends])

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of each canonical column for the events from `start` to `stop`."""
        size = ROW.itemsize
        parts = [self._rows[start * size : stop * size]]
        parts += [data[ends[start] : ends[stop]] for ends, data in self._texts]
        if self._header_ends is None:
            return [*parts, *(memoryview(b""),) * 3]
        first, last = self._header_ends[start], self._header_ends[stop]
        return parts + [data[ends[first] : ends[last]] for ends, data in self._entries]


def content_of(record: pa.RecordBatch) -> bytes:
    """The content hash of all rows of one RecordBatch, taken as one range."""
    content = ContentHash()
    content.update(CanonicalRows(record), 0, record.num_rows)
    return content.digest()


def binary_of(array: pa.Array) -> tuple[Ends, memoryview]:
    """Ends and data of a binary or string array; the ends count from the start of the data."""
    data = array.buffers()[2]
    return _ends(array), memoryview(data) if data is not None else memoryview(b"")


def _ends(array: pa.Array) -> Ends:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, dtype=np.int32)
    return np.frombuffer(buffer, dtype=np.int32, count=len(array) + 1, offset=array.offset * 4)


def _name_texts(column: pa.DictionaryArray) -> tuple[Ends, memoryview]:
    if len(column.dictionary) != 1:
        return binary_of(column.dictionary_decode())
    name = column.dictionary[0].as_py().encode()  # nearly always there is one
    ends = np.arange(len(column) + 1, dtype=np.int32) * np.int32(len(name))
    return ends, memoryview(name * len(column))


def _numbers(array: pa.Array, kind: np.dtype[Any]) -> Any:
    if pa.types.is_timestamp(array.type):
        array = array.view(pa.int64())
    return array.to_numpy().astype(kind, copy=False)


def _zero(record: pa.RecordBatch, name: str) -> pa.Scalar:
    return pa.scalar(0, record.schema.field(name).type)


def _token_rows(array: pa.Array) -> Any:
    return np.frombuffer(
        array.buffers()[1],
        dtype=f"V{TOKEN_BYTES}",
        count=len(array),
        offset=array.offset * TOKEN_BYTES,
    )


# -- many batches as few rows ----------------------------------------------------------------------


def rows_of(batches: Sequence[EventBatch]) -> pa.RecordBatch:
    """The events of all batches, in their order, as one RecordBatch of the log's schema.

    One RecordBatch for each EventBatch would cost 60 us, whatever its size; joining the columns of
    all batches costs a few microseconds a batch. So a journal full of single events seals about as
    fast as one full of large batches.

    >>> from penstock.model.batch import EventBatch
    >>> rows = rows_of([EventBatch.build("a", [b"1"]), EventBatch.build("b", [b"2", b"3"])])
    >>> rows.column("topic").to_pylist(), rows.column("payload").to_pylist()
    (['a', 'b', 'b'], [b'1', b'2', b'3'])
    """
    counts = np.fromiter((batch.count for batch in batches), dtype=np.int64, count=len(batches))
    total = int(counts.sum())
    columns = [
        _names([batch.topic for batch in batches], counts),
        _repeat([batch.partition for batch in batches], counts, np.int32),
        pa.array(_offsets(batches, counts, total)),
        _times(batches, counts, "append_time_us", "append_times").view(TIME),
        _times(batches, counts, "time_us", "times").view(TIME),
        _tokens(batches, total),
        _keys(batches, counts, total),
        _strings([batch.payload_column for batch in batches], pa.binary()),
        _headers(batches, total),
        _names([batch.tenant for batch in batches], counts),
        _names([batch.codec for batch in batches], counts),
        _repeat([batch.schema_id for batch in batches], counts, np.int32),
        _expires(batches, total),
        _priority(batches, total),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def row_groups(batches: Iterable[Sized], group_events: int) -> Iterator[pa.RecordBatch]:
    """All batches as RecordBatches of one row group each, cutting batches where needed."""
    group: list[EventBatch] = []
    events = size = 0
    for batch, weight in batches:
        while True:
            take = min(group_events - events, _fitting(batch, weight, GROUP_MAX_BYTES - size))
            if not take and not group:
                take = 1  # an event larger than a row group is a row group
            if take == batch.count:
                group.append(batch)
                events += take
                size += weight
                break
            if take:
                group.append(batch.slice(0, take))
                batch = batch.slice(take, batch.count)
                weight = event_bytes(batch)
            yield rows_of(group)
            group, events, size = [], 0, 0
    if group:
        yield rows_of(group)


def _fitting(batch: EventBatch, size: int, room: int) -> int:
    """How many events of a batch fit: payloads counted each, keys and headers by their mean."""
    if size <= room:
        return batch.count
    if batch.count == 1:
        return 0
    ends = np.frombuffer(batch.payload_column.offsets, dtype=np.int32, count=batch.count + 1)
    payload = ends[1:].astype(np.int64) - int(ends[0])
    rest = (size - int(payload[-1])) / batch.count
    sizes = payload + (np.arange(1, batch.count + 1) * rest).astype(np.int64)
    return int(np.searchsorted(sizes, room, side="right"))


def _offsets(batches: Sequence[EventBatch], counts: Any, total: int) -> Any:
    bases = np.fromiter((batch.base_offset for batch in batches), dtype=np.int64, count=len(counts))
    return np.arange(total) + np.repeat(bases - (np.cumsum(counts) - counts), counts)


def _names(names: list[str], counts: Any) -> pa.Array:
    codes: dict[str, int] = {}
    indices = [codes.setdefault(name, len(codes)) for name in names]
    return pa.DictionaryArray.from_arrays(
        _repeat(indices, counts, np.int32), pa.array(codes, pa.string())
    )


def _repeat(values: list[int], counts: Any, kind: Any) -> pa.Array:
    return pa.array(np.repeat(np.array(values, dtype=kind), counts))


def _times(batches: Sequence[EventBatch], counts: Any, one: str, many: str) -> pa.Array:
    times = np.repeat(np.array([getattr(batch, one) for batch in batches], dtype=np.int64), counts)
    start = 0
    for batch in batches:
        column = getattr(batch, many)
        if column is not None:
            times[start : start + batch.count] = column
        start += batch.count
    return pa.array(times)


def _tokens(batches: Sequence[EventBatch], total: int) -> pa.Array:
    parts = [batch.token_base if batch.count == 1 else batch.token_bytes() for batch in batches]
    return pa.Array.from_buffers(
        pa.binary(TOKEN_BYTES), total, [None, pa.py_buffer(b"".join(parts))]
    )


def _strings(columns: Sequence[Strings], kind: pa.DataType, validity: Any = None) -> pa.Array:
    """Join columns: the bytes of all, and the ends computed from the lengths of all."""
    parts: list[Bytes] = []
    for column in columns:
        ends = column.ends()
        first, last = ends[0], ends[column.count]
        whole = first == 0 and last == len(column.data)
        parts.append(column.data if whole else memoryview(column.data)[first:last])
    joined = np.frombuffer(b"".join([column.offsets for column in columns]), dtype=np.int32)
    counts = np.fromiter((column.count for column in columns), dtype=np.int64, count=len(columns))
    lengths = np.diff(joined)
    if len(columns) > 1:
        lengths = np.delete(lengths, np.cumsum(counts + 1)[:-1] - 1)
    ends_all = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends_all[1:])
    buffers = [validity, pa.py_buffer(ends_all), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def _empty(count: int) -> Strings:
    return Strings(count, bytes(4 * (count + 1)), b"")


def _keys(batches: Sequence[EventBatch], counts: Any, total: int) -> pa.Array:
    if all(batch.key_column is None for batch in batches):
        return pa.nulls(total, pa.binary())
    present = np.ones(total, dtype=bool)
    start = 0
    for batch in batches:
        stop = start + batch.count
        if batch.key_column is None:
            present[start:stop] = False
        elif batch.key_validity is not None:
            bits = np.frombuffer(batch.key_validity, dtype=np.uint8)
            present[start:stop] = np.unpackbits(bits, bitorder="little", count=batch.count)
        start = stop
    columns = [batch.key_column or _empty(batch.count) for batch in batches]
    validity = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    return _strings(columns, pa.binary(), validity)


def _headers(batches: Sequence[EventBatch], total: int) -> pa.Array:
    kind = SCHEMA.field("headers").type
    found = [batch.header_column for batch in batches if batch.header_column is not None]
    if not found:
        return pa.nulls(total, kind)
    lengths = np.zeros(total, dtype=np.int32)
    names, values = [], []
    start = 0
    for batch in batches:
        column = batch.header_column
        if column is not None:
            ends = np.frombuffer(column.offsets, dtype=np.int32, count=batch.count + 1)
            lengths[start : start + batch.count] = np.diff(ends)
            if ends[-1] > ends[0]:
                names.append(column.keys.slice(int(ends[0]), int(ends[-1])))
                values.append(column.values.slice(int(ends[0]), int(ends[-1])))
        start += batch.count
    text = pa.string()
    joined = [_strings(part or [_empty(0)], text) for part in (names, values)]
    entries = pa.StructArray.from_arrays(joined, fields=[kind.key_field, kind.item_field])
    ends_all = np.zeros(total + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends_all[1:])
    return pa.Array.from_buffers(kind, total, [None, pa.py_buffer(ends_all)], children=[entries])


def _expires(batches: Sequence[EventBatch], total: int) -> pa.Array:
    if all(batch.expires is None for batch in batches):
        return pa.nulls(total, TIME)
    values = np.concatenate(
        [
            np.zeros(batch.count, np.int64) if batch.expires is None else batch.expires
            for batch in batches
        ]
    )
    return pa.array(values, mask=values == 0).view(TIME)


def _priority(batches: Sequence[EventBatch], total: int) -> pa.Array:
    if all(batch.priority is None for batch in batches):
        return pa.nulls(total, pa.uint8())
    return pa.array(
        np.concatenate(
            [
                np.zeros(batch.count, np.uint8) if batch.priority is None else batch.priority
                for batch in batches
            ]
        )
    )

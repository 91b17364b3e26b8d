"""The content hash: one number that says whether a rewrite kept every event as it was.

Events are brought into a canonical form that does not depend on batches, dictionaries, row groups
or files, and that form is hashed with SHA-256. A range of offsets therefore has the same hash in
the journal, in a shared segment and in a segment of its own. docs/reference/files.md has the form.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.model.batch import EVENT_OVERHEAD_BYTES
from penstock.model.token import TOKEN_BYTES

NULL_KEY = -1  # "no key" is another thing than an empty key

# All that has a fixed size, and the lengths of all that has not, so that no two different events
# join to the same bytes.
ROW = np.dtype(
    [
        ("offset", "<i8"), ("append_time", "<i8"), ("event_time", "<i8"), ("expires", "<i8"),
        ("token", f"V{TOKEN_BYTES}"), ("schema_id", "<i4"), ("key", "<i4"), ("payload", "<i4"),
        ("headers", "<i4"), ("tenant", "<i2"), ("codec", "<i2"), ("priority", "u1"),
    ]
)  # fmt: skip

Ends = npt.NDArray[np.int32]


class ContentHash:
    """Hashes events of one range as they come by; feed them in the order of their offsets.

    >>> from penstock.model.arrow import to_arrow
    >>> from penstock.model.batch import EventBatch
    >>> rows = Canonical(to_arrow(EventBatch.build("orders", [b"a", b"b"])))
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

    def update(self, rows: Canonical, start: int, stop: int) -> None:
        """Take in the events from `start` to `stop`."""
        slices = rows.slices(start, stop)
        if not self._columns:
            self._columns = [hashlib.sha256() for _ in slices]
        for column, part in zip(self._columns, slices, strict=True):
            if part:
                column.update(part)

    def digest(self) -> bytes:
        """The 32 bytes that stand for all events taken in so far."""
        return hashlib.sha256(b"".join(column.digest() for column in self._columns)).digest()


class Canonical:
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
    content.update(Canonical(record), 0, record.num_rows)
    return content.digest()


def binary_of(array: pa.Array) -> tuple[Ends, memoryview]:
    """Ends and data of a binary or string array; the ends keep their offset into the data."""
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

"""Columns of variable length, laid out in memory the way Arrow lays them out."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.model.errors import InvalidBatch, InvalidHeaders

Bytes = bytes | bytearray | memoryview
Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})

# Offsets are 32-bit: one column holds at most this much, and no batch expands to more.
MAX_COLUMN_BYTES = 1 << 30

_PAIR = struct.Struct("<ii")
# Below this the call into Arrow costs more than it saves.
BULK_VALUES = 32


def padding(length: int) -> bytes:
    """Zeros up to the next multiple of eight, so that every column stays aligned."""
    return b"\0" * (-length & 7)


def _offsets(lengths: Sequence[int], count: int) -> Bytes:
    if count == 1:
        return _PAIR.pack(0, lengths[0])
    ends = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > MAX_COLUMN_BYTES:
        raise InvalidBatch(
            f"a batch of {ends[-1]} bytes is over {MAX_COLUMN_BYTES}; publish it in smaller batches"
        )
    return ends.astype(np.int32).data.cast("B")


class Strings:
    """A column of byte strings: 32-bit offsets into joined data, as Arrow lays it out."""

    __slots__ = ("count", "data", "offsets")

    def __init__(self, count: int, offsets: Bytes, data: Bytes) -> None:
        self.count = count
        self.offsets = offsets
        self.data = data

    @classmethod
    def of(cls, values: Sequence[bytes]) -> Strings:
        """Lay out a list of byte strings."""
        count = len(values)
        if count == 1:
            return cls(1, _PAIR.pack(0, len(values[0])), values[0])
        lengths = np.fromiter(map(len, values), dtype=np.int64, count=count)
        return cls(count, _offsets(lengths, count), b"".join(values))  # type: ignore[arg-type]

    def ends(self) -> memoryview:
        """The offsets as integers."""
        return memoryview(self.offsets).cast("B").cast("i")

    def largest(self) -> int:
        """Length of the longest value."""
        ends = np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1)
        return int(np.diff(ends).max())

    def at(self, index: int) -> bytes:
        """One value."""
        ends = self.ends()
        return bytes(self.data[ends[index] : ends[index + 1]])

    def values(self) -> list[bytes]:
        """All values."""
        if self.count >= BULK_VALUES:
            return self._bulk(pa.binary())
        ends = self.ends()
        return [bytes(self.data[start:end]) for start, end in pairwise(ends.tolist())]

    def texts(self) -> list[str]:
        """All values as text."""
        if self.count >= BULK_VALUES:
            same = self._same()
            return self._bulk(pa.string()) if same is None else [same.decode()] * self.count
        return [value.decode() for value in self.values()]

    def _bulk(self, kind: pa.DataType) -> list[Any]:
        """Arrow builds Python objects four times faster than slicing does."""
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        array = pa.Array.from_buffers(kind, self.count, buffers)
        values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
        return values

    def _same(self) -> bytes | None:
        """The one value of a column whose values are all the same, as header names often are."""
        ends = np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1)
        first, last = int(ends[0]), int(ends[-1])
        value = bytes(self.data[first : int(ends[1])])
        if len(value) * self.count != last - first or (np.diff(ends) != len(value)).any():
            return None
        return value if bytes(self.data[first:last]) == value * self.count else None

    def parts(self) -> tuple[Bytes, Bytes]:
        """Offsets starting at zero, and just the bytes they cover."""
        ends = self.ends()
        first, last = ends[0], ends[self.count]
        if first == 0 and len(self.data) == last:
            return self.offsets, self.data
        shifted = np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1) - first
        return shifted.astype(np.int32).data.cast("B"), memoryview(self.data)[first:last]

    def slice(self, start: int, stop: int) -> Strings:
        """The values from `start` to `stop`, sharing the data."""
        view = memoryview(self.offsets).cast("B")
        return Strings(stop - start, view[start * 4 : stop * 4 + 4], self.data)


class HeaderColumn:
    """Headers of each event: an Arrow map from text to text."""

    __slots__ = ("count", "keys", "offsets", "values")

    def __init__(self, count: int, offsets: Bytes, keys: Strings, values: Strings) -> None:
        self.count = count
        self.offsets = offsets
        self.keys = keys
        self.values = values

    @classmethod
    def of(cls, headers: Sequence[Headers | None]) -> HeaderColumn:
        """Lay out one mapping (or None) for each event."""
        names: list[str] = []
        texts: list[str] = []
        ends = [0]
        for each in headers:
            if each:
                names.extend(each)
                texts.extend(each.values())
            ends.append(len(names))
        try:
            keys = Strings.of([name.encode() for name in names])
            values = Strings.of([text.encode() for text in texts])
        except (AttributeError, UnicodeEncodeError):
            _blame_headers(headers)
            raise
        offsets = np.array(ends, dtype=np.int32).data.cast("B")
        return cls(len(headers), offsets, keys, values)

    def mappings(self) -> list[Headers]:
        """One mapping for each event."""
        ends = memoryview(self.offsets).cast("B").cast("i").tolist()
        first, last = ends[0], ends[self.count]
        if first == last:
            return [NO_HEADERS] * self.count
        names = self.keys.slice(first, last).texts()
        texts = self.values.slice(first, last).texts()
        if last - first == self.count and ends == list(range(first, last + 1)):
            name = names[0]
            if names.count(name) == len(names):
                return [{name: text} for text in texts]
            return [{name: text} for name, text in zip(names, texts, strict=True)]
        return [
            dict(
                zip(
                    names[start - first : end - first],
                    texts[start - first : end - first],
                    strict=False,
                )
            )
            if end > start
            else NO_HEADERS
            for start, end in pairwise(ends)
        ]

    def at(self, index: int) -> Headers:
        """The headers of one event."""
        return self.slice(index, index + 1).mappings()[0]

    def slice(self, start: int, stop: int) -> HeaderColumn:
        """The headers from `start` to `stop`, sharing the data."""
        view = memoryview(self.offsets).cast("B")
        return HeaderColumn(stop - start, view[start * 4 : stop * 4 + 4], self.keys, self.values)

    def parts(self) -> list[Bytes]:
        """The five buffers to store, offsets starting at zero."""
        ends = np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1)
        first, last = int(ends[0]), int(ends[-1])
        keys, values = self.keys.slice(first, last), self.values.slice(first, last)
        return [(ends - first).astype(np.int32).tobytes(), *keys.parts(), *values.parts()]


def _blame_headers(headers: Sequence[Headers | None]) -> None:
    for index, each in enumerate(headers):
        for name, text in (each or {}).items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InvalidHeaders(
                    f"header {name!r} of event {index} is {type(text).__name__}, not text; "
                    "headers map str to str",
                    index=index,
                    header=repr(name),
                )

"""Columns of variable length, laid out in memory the way Arrow lays them out.

`Strings` is a column of byte strings, `HeaderColumn` one of maps. Reading many values builds them with
Arrow, once enough were read to be worth its start.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.model.errors import InvalidBatch, InvalidHeaders

# How many values a process reads before Arrow's start is worth its price.
AFTER_VALUES = 500_000

Bytes = bytes | bytearray | memoryview
Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})

# Offsets are 32-bit: one column holds at most this much, and no batch expands to more.
MAX_COLUMN_BYTES = 1 << 30

_PAIR = struct.Struct("<ii")
# Below this the calls into numpy and Arrow cost more than they save.
BULK_VALUES = 32
# Values repeat often enough to be worth sharing when there are this many of each.
FEW_DISTINCT = 4


# -- columns --------------------------------------------------------------------------------------


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
            width = self._width()
            if width:
                start = self.ends()[0]
                fixed = np.frombuffer(self.data, f"V{width}", count=self.count, offset=start)
                return fixed.tolist()  # type: ignore[no-any-return]
            if arrow_values.worth(self.count):
                return self._by_arrow(pa.binary())
        ends = self.ends().tolist()
        first = ends[0]
        data = bytes(self.data[first : ends[-1]])
        return [data[start - first : end - first] for start, end in pairwise(ends)]

    def texts(self) -> list[str]:
        """All values as text."""
        if self.count >= BULK_VALUES:
            same = self.same()
            if same is not None:
                return [same.decode()] * self.count
            if arrow_values.worth(self.count):
                return self._by_arrow(pa.string())
        return [value.decode() for value in self.values()]

    def distinct_texts(self) -> DistinctTexts | None:
        """Each text once; None where too few repeat for that to save anything."""
        if not arrow_values.worth(self.count):
            return None
        encoded = self._array(pa.string()).dictionary_encode()
        if len(encoded.dictionary) * FEW_DISTINCT > self.count:
            return None
        return DistinctTexts(encoded.dictionary.to_pylist(), encoded.indices.to_numpy())

    def _by_arrow(self, kind: pa.DataType) -> list[Any]:
        values: list[Any] = self._array(kind).to_numpy(zero_copy_only=False).tolist()
        return values

    def _array(self, kind: pa.DataType) -> pa.Array:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(kind, self.count, buffers)

    def _width(self) -> int:
        """The length of every value, or 0 where they differ."""
        ends = np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1)
        width = int(ends[1] - ends[0])
        return width if (np.diff(ends) == width).all() else 0

    def same(self) -> bytes | None:
        """The one value of a column whose values are all the same, as header names often are."""
        width, ends = self._width(), self.ends()
        first, last = ends[0], ends[self.count]
        if not width:
            return None
        value = bytes(self.data[first : first + width])
        return value if bytes(self.data[first:last]) == value * self.count else None

    def is_text(self) -> bool:
        """Whether every value is UTF-8; its offsets must be sound."""
        try:
            self._array(pa.string()).validate(full=True)
        except pa.ArrowInvalid:
            return False
        return True

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
        shared = self.shared_mappings()
        if shared is not None:
            return shared
        ends = memoryview(self.offsets).cast("B").cast("i").tolist()
        first, last = ends[0], ends[self.count]
        names = self.keys.slice(first, last).texts()
        texts = self.values.slice(first, last).texts()
        if self._one_each():
            pairs = zip(names, texts, strict=True)
            return [MappingProxyType({name: text}) for name, text in pairs]
        return [
            MappingProxyType(
                dict(
                    zip(
                        names[start - first : end - first],
                        texts[start - first : end - first],
                        strict=False,
                    )
                )
            )
            if end > start
            else NO_HEADERS
            for start, end in pairwise(ends)
        ]

    def shared_mappings(self) -> list[Headers] | None:
        """The mappings where events that say the same share one; None where few would."""
        ends = self._ends()
        first, last = int(ends[0]), int(ends[-1])
        if first == last:
            return [NO_HEADERS] * self.count
        if self.count < BULK_VALUES or not self._one_each():
            return None
        name = self.keys.slice(first, last).same()
        found = None if name is None else self.values.slice(first, last).distinct_texts()
        if name is None or found is None:
            return None
        shared = np.empty(len(found.texts), dtype=object)
        shared[:] = [MappingProxyType({name.decode(): text}) for text in found.texts]
        mappings: list[Headers] = shared[found.places].tolist()
        return mappings

    def _one_each(self) -> bool:
        ends = self._ends()
        return bool((ends[1:] - ends[:-1] == 1).all())

    def _ends(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.offsets, dtype=np.int32, count=self.count + 1)

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


class DistinctTexts(NamedTuple):
    """The texts of a column, each once, and which of them stands where."""

    texts: list[str]
    places: npt.NDArray[np.int32]


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


# -- building Python values with Arrow ------------------------------------------------------------


class ArrowValues:
    """Arrow builds Python objects four times as fast as slicing does, after a slow start.

    Its first call imports pandas where that is installed: half a second, which a process that
    reads little never gets back, and which no event should wait for.
    """

    def __init__(self) -> None:
        self._ready = False
        self._left = AFTER_VALUES

    def worth(self, count: int) -> bool:
        """Whether to build this many values with it."""
        if not self._ready and self._left > 0:
            self._left -= count
            if self._left <= 0:
                threading.Thread(target=self._start, name="penstock-arrow", daemon=True).start()
        return self._ready

    def _start(self) -> None:
        pa.array([""]).dictionary_encode().indices.to_numpy(zero_copy_only=False)
        self._ready = True


arrow_values = ArrowValues()

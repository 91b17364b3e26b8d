"""Payloads as typed columns: JSON and Arrow payloads to one struct column, a batch at a time.

Arrow's parser takes a whole batch of JSON payloads as lines, and a whole batch of Arrow payloads as
one stream. Where one of them does not fit, the suspects are found and looked at one by one, and the
others go through the parser again: a bad row gets a null and the reason, and costs its neighbours
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.model.codec import codecs
from penstock.model.errors import DecodeFailed
from penstock.pipelines.arrow_payload import alike, read_alike

MAX_REASON_CHARS = 200
ARROW, JSON, RAW = "arrow", "json", "raw"
UNDECODED = "codec {} is not decoded; publish as JSON or Arrow, or read without a schema and decode `payload`"
FEW = 8  # are looked at one by one
_OBJECT = r"(?s)^\s*\{.*\}\s*$"


class Decoder:
    """Turns payloads into structs of one type.

    >>> fields = pa.struct([("n", pa.int64())])
    >>> value, fault = Decoder(fields).decode(pa.array([b'{"n": 1}', b'{"n": "x"}']), ["json"] * 2)
    >>> value.to_pylist(), fault.is_valid().to_pylist()
    ([{'n': 1}, None], [False, True])
    """

    def __init__(self, fields: pa.StructType) -> None:
        self.fields = fields
        self._schema = pa.schema(list(fields))
        self._parse = pj.ParseOptions(
            explicit_schema=self._schema, unexpected_field_behavior="ignore"
        )
        self._suspicious = msgspec.json.Decoder(dict[str, Any])
        self._alone = {ARROW: self._arrow_alone, JSON: self._json_alone, RAW: self._json_alone}

    def decode(self, payloads: pa.Array, codec: Sequence[str]) -> tuple[pa.Array, pa.Array]:
        """Values, null where a payload does not fit, and the reasons."""
        names = np.asarray(codec, dtype=np.str_)
        # Bytes that nobody named are JSON more often than not, as a sink writes them by default.
        texts = (names == JSON) | (names == RAW)
        clean = [*self._arrow_parts(payloads, names == ARROW), *self._json_parts(payloads, texts)]
        if len(clean) == 1 and len(clean[0][0]) == len(payloads):
            return clean[0][1], pa.nulls(len(payloads), pa.string())
        return self._one_by_one(payloads, clean, codec)

    def _arrow_parts(self, payloads: pa.Array, chosen: Any) -> Iterator[tuple[Any, pa.Array]]:
        places = np.flatnonzero(chosen)
        if not len(places):
            return
        for group, head in alike(payloads.take(pa.array(places))):
            ends = payloads.take(pa.array(places[group][[0, -1]]))
            if any(self._streams(head, ends.slice(at, 1)) is not None for at in (0, 1)):
                yield from _halved(payloads, places[group], partial(self._streams, head))

    def _json_parts(self, payloads: pa.Array, chosen: Any) -> Iterator[tuple[Any, pa.Array]]:
        places = np.flatnonzero(chosen)
        if not len(places) and len(payloads):
            return
        texts = payloads if len(places) == len(payloads) else payloads.take(pa.array(places))
        whole = self._lines(texts)
        if whole is not None:
            yield places, whole
            return
        good = np.array([self._looks_good(each.as_py()) for each in texts])
        yield from _halved(payloads, places[good], self._lines)

    def _one_by_one(
        self, payloads: pa.Array, clean: list[tuple[Any, pa.Array]], codec: Sequence[str]
    ) -> tuple[pa.Array, pa.Array]:
        """Put the parsed rows back where they were, with the rest between them."""
        pieces = [values for _, values in clean]
        faults: list[str | None] = [None] * len(payloads)
        place = np.full(len(payloads), -1, dtype=np.int64)
        following = 0
        for kept, values in clean:
            place[kept] = np.arange(following, following + len(values))
            following += len(values)
        for index in np.flatnonzero(place < 0).tolist():
            alone = self._alone.get(codec[index])
            if alone is None:
                faults[index] = UNDECODED.format(codec[index])
                continue
            value, faults[index] = alone(payloads[index].as_py())
            if value is not None:
                pieces.append(value)
                place[index] = following
                following += 1
        order = pa.array(place, mask=place < 0)
        joined = pa.concat_arrays(pieces) if pieces else pa.array([], self.fields)
        return joined.take(order), pa.array(faults, pa.string())

    def _json_alone(self, payload: bytes) -> tuple[pa.Array | None, str | None]:
        if not payload:
            return None, "the payload is empty"
        try:
            found = self._suspicious.decode(payload)
        except msgspec.MsgspecError as error:
            return None, f"not a JSON object: {error}"[:MAX_REASON_CHARS]
        # One line, whatever the white space in it was.
        try:
            table = self._table(msgspec.json.encode(found))
        except pa.ArrowException as error:
            return None, f"does not fit the schema: {error}"[:MAX_REASON_CHARS]
        return _struct(table, self.fields), None

    def _looks_good(self, payload: bytes) -> bool:
        if not payload or b"\n" in payload:
            return False
        try:
            found = self._suspicious.decode(payload)
        except msgspec.MsgspecError:
            return False
        return all(_plausible(found.get(each.name), each.type) for each in self.fields)

    def _lines(self, payloads: pa.Array) -> pa.Array | None:
        """All payloads at once; None when one of them does not fit or is not one object.

        Each begins and ends like an object, so none has less than one; all together have as many
        as there are payloads, so none has more.
        """
        if not len(payloads):
            return pa.array([], self.fields)
        if not _are_objects(payloads):
            return None
        try:
            joined = pc.binary_join(
                pa.ListArray.from_arrays([0, len(payloads)], payloads.cast(pa.binary())), b"\n"
            )[0].as_buffer()
            table = self._table(joined)
        except pa.ArrowException:
            return None
        return _struct(table, self.fields) if table.num_rows == len(payloads) else None

    def _table(self, lines: Any) -> pa.Table:
        size = max(len(lines) + 1, 1 << 16)
        reading = pj.ReadOptions(use_threads=False, block_size=min(size, (1 << 31) - 1))
        return pj.read_json(pa.BufferReader(lines), read_options=reading, parse_options=self._parse)

    # -- Arrow -----------------------------------------------------------------------------------

    def _streams(self, head: bytes, payloads: pa.Array) -> pa.Array | None:
        """All payloads of a group at once; None when one of them does not fit."""
        try:
            return self._fitted(read_alike(payloads, head))
        except pa.ArrowException:
            return None

    def _arrow_alone(self, payload: bytes) -> tuple[pa.Array | None, str | None]:
        try:
            table: pa.Table = codecs.get(ARROW).decode(payload)
            if table.num_rows != 1:
                return None, f"an Arrow payload of {table.num_rows} rows; one is one value"
            return self._fitted(table), None
        except (DecodeFailed, pa.ArrowException) as error:
            return None, f"does not fit the schema: {error}"[:MAX_REASON_CHARS]

    def _fitted(self, table: pa.Table) -> pa.Array:
        columns = [
            _one(table.column(each.name)).cast(each.type)
            if each.name in table.column_names
            else pa.nulls(table.num_rows, each.type)
            for each in self.fields
        ]
        return pa.StructArray.from_arrays(columns, fields=list(self.fields))


def _are_objects(payloads: pa.Array) -> bool:
    """Whether each begins and ends like a JSON object, white space aside."""
    bare = pc.and_(pc.starts_with(payloads, b"{"), pc.ends_with(payloads, b"}"))
    if pc.all(bare).as_py():
        return True
    return bool(pc.all(pc.match_substring_regex(payloads, _OBJECT)).as_py())


def _halved(
    payloads: pa.Array, places: Any, parse: Callable[[pa.Array], pa.Array | None]
) -> Iterator[tuple[Any, pa.Array]]:
    """Parse these; where the parser refuses, each half alone, and few not at all."""
    if not len(places):
        return
    values = parse(payloads.take(pa.array(places)))
    if values is not None:
        assert len(values) == len(places)
        yield places, values
    elif len(places) > FEW:
        middle = len(places) // 2
        yield from _halved(payloads, places[:middle], parse)
        yield from _halved(payloads, places[middle:], parse)


def _struct(table: pa.Table, fields: pa.StructType) -> pa.Array:
    # The parser adds nothing that was not asked for, and gives the columns in its own order.
    columns = [_one(table.column(each.name)).cast(each.type) for each in fields]
    return pa.StructArray.from_arrays(columns, fields=list(fields))


def _one(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)


def _plausible(value: Any, kind: pa.DataType) -> bool:
    """A quick look that lets no wrong JSON type pass; the parser has the last word."""
    if value is None:
        return True
    if pa.types.is_integer(kind):
        return type(value) is int
    if pa.types.is_floating(kind):
        return type(value) in (int, float)
    if pa.types.is_boolean(kind):
        return type(value) is bool
    if pa.types.is_struct(kind):
        return isinstance(value, dict) and all(
            _plausible(value.get(each.name), each.type) for each in kind
        )
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_plausible(each, kind.value_type) for each in value)
    return isinstance(value, str)

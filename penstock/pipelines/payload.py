"""Payloads as typed columns: JSON and Arrow payloads to one struct column, a batch at a time.

Arrow's parser takes a whole batch of JSON payloads as lines. Arrow payloads of one schema are joined
into one stream: they differ in their data only, and in the sizes their metadata states. Where a payload
does not fit, the suspects are found and decoded one by one, and the others go through the parser again:
a bad row gets a null and the reason, and does not slow down the others.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.model.codec import Buffer, codecs, refuse_compressed_buffers
from penstock.model.errors import DecodeFailed

# -- decoding -------------------------------------------------------------------------------------

MAX_REASON_CHARS = 200
ARROW, JSON, RAW = "arrow", "json", "raw"
UNDECODED = "codec {} is not decoded; publish as JSON or Arrow, or read without a schema and decode `payload`"
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
FEW = 8  # payloads that are decoded one by one
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
        self._parse = pj.ParseOptions(
            explicit_schema=pa.schema(list(_as_parsed(fields))), unexpected_field_behavior="ignore"
        )
        self._suspicious = msgspec.json.Decoder(dict[str, Any])
        self._alone = {ARROW: self._arrow_alone, JSON: self._json_alone, RAW: self._json_alone}

    def decode(self, payloads: pa.Array, codec: Sequence[str]) -> tuple[pa.Array, pa.Array]:
        """Values, null where a payload does not fit, and the reasons."""
        names = np.asarray(codec, dtype=np.str_)
        # Bytes without a codec are JSON more often than not, as a sink writes them by default.
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
        lines = [self._line(each.as_py()) for each in texts]
        good = np.flatnonzero([each is not None for each in lines])
        mended = pa.array(lines, pa.binary())
        for some, values in _halved(mended, good, self._lines):
            yield places[some], values

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
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return None, f"not a JSON object: {error}"[:MAX_REASON_CHARS]
        if _has_number_as_text(found, self.fields):
            found = self._suspicious.decode(_with_texts(payload, self.fields))
        # One line, whatever the white space in it was.
        try:
            return _struct(self._table(msgspec.json.encode(found)), self.fields), None
        except pa.ArrowException as error:
            return None, f"does not fit the schema: {error}"[:MAX_REASON_CHARS]

    def _line(self, payload: bytes) -> bytes | None:
        """The payload as the parser takes it, numbers as texts where texts are wanted; None if it never will."""
        if not payload or b"\n" in payload:
            return None
        try:
            found = self._suspicious.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if not _plausible(found, self.fields):
            return None
        if not _has_number_as_text(found, self.fields):
            return payload
        return _with_texts(payload, self.fields)

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
            return _struct(table, self.fields) if table.num_rows == len(payloads) else None
        except pa.ArrowException:
            return None

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
    """Parse these; where the parser refuses, each half alone, and a few rows not at all."""
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
    columns = [_converted(_one(table.column(each.name)), each.type) for each in fields]
    return pa.StructArray.from_arrays(columns, fields=list(fields))


def _from_text(kind: pa.DataType) -> bool:
    """Whether JSON has a text for it that Arrow's parser does not take."""
    return bool(pa.types.is_binary(kind) or pa.types.is_date(kind))


def _as_parsed(kind: pa.DataType) -> pa.DataType:
    """A type as the parser reads it.

    >>> _as_parsed(pa.list_(pa.binary()))
    ListType(list<item: string>)
    """
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_as_parsed(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_parsed(kind.value_type)))
    return pa.string() if _from_text(kind) else kind


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """What was parsed as the type that was wanted; ArrowInvalid when a text does not say it."""
    if _as_parsed(kind) == kind:
        return column.cast(kind)
    if pa.types.is_struct(kind):
        columns = [
            _converted(each, of.type) for each, of in zip(column.flatten(), kind, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(kind), mask=column.is_null())
    if pa.types.is_list(kind):
        offsets = pa.array(column.offsets.to_numpy() - column.offsets[0].as_py(), pa.int32())
        values = _converted(column.flatten(), kind.value_type)
        return pa.ListArray.from_arrays(offsets, values, kind, mask=column.is_null())
    if not pa.types.is_binary(kind):
        return column.cast(kind)
    return pa.array(
        [None if each is None else _of_base64(each) for each in column.to_pylist()], kind
    )


def _of_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise pa.ArrowInvalid(f"{text[:40]!r} is no base64: {error}") from None


def _has_number_as_text(value: Any, kind: pa.DataType) -> bool:
    """Whether a value is a number or a boolean where the schema has a text."""
    if pa.types.is_string(kind):
        return isinstance(value, int | float)
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return any(_has_number_as_text(value.get(each.name), each.type) for each in kind)
    if pa.types.is_list(kind) and isinstance(value, list):
        return any(_has_number_as_text(each, kind.value_type) for each in value)
    return False


def _with_texts(raw: Buffer, kind: pa.DataType | None) -> bytes:
    """The same JSON with such numbers in quotes, digit by digit as they were written.

    >>> _with_texts(b'{"n": 1.10, "m": 2}', pa.struct([("n", pa.string())]))
    b'{"n":"1.10","m":2}'
    """
    raw = bytes(raw).strip()
    if kind is None or raw == b"null":
        return raw
    if pa.types.is_string(kind):
        return raw if raw[:1] in (b'"', b"{", b"[") else b'"' + raw + b'"'
    if pa.types.is_struct(kind) and raw[:1] == b"{":
        kinds = {each.name: each.type for each in kind}
        items = _MEMBERS.decode(raw).items()
        written = (
            msgspec.json.encode(name) + b":" + _with_texts(each, kinds.get(name))
            for name, each in items
        )
        return b"{" + b",".join(written) + b"}"
    if pa.types.is_list(kind) and raw[:1] == b"[":
        values = _ELEMENTS.decode(raw)
        return b"[" + b",".join(_with_texts(each, kind.value_type) for each in values) + b"]"
    return raw


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
    if pa.types.is_string(kind):
        return isinstance(value, str | int | float)
    return isinstance(value, str)


# -- Arrow payloads of one schema -----------------------------------------------------------------

MESSAGE = b"\xff\xff\xff\xff"
END = MESSAGE + bytes(4)
PREFIX_BYTES = 8  # the mark of a message, and the size of the metadata that follows
# With more schemas in one batch, searching all payloads for each does not pay.
MAX_SCHEMAS = 32

Indices = Any
"""A numpy array of places in a batch."""


def alike(payloads: pa.Array) -> Iterator[tuple[Indices, bytes]]:
    """Groups of payloads of one row and one schema, with the schema's message.

    A payload in no group is not of this form, or its schema is too rare: it is decoded alone.

    >>> from penstock.model.codec import codecs
    >>> made = [codecs.get("arrow").encode(pa.table({"n": [number]})) for number in (7, 8)]
    >>> ((places, head),) = alike(pa.array([made[0], b"{}", made[1]], pa.binary()))
    >>> places.tolist(), read_alike(pa.array(made), head).column("n").to_pylist()
    ([0, 2], [7, 8])
    """
    left = _where(pc.and_(pc.starts_with(payloads, MESSAGE), pc.ends_with(payloads, END)))
    for _ in range(MAX_SCHEMAS):
        if not len(left):
            return
        rest = payloads.take(pa.array(left))
        head = _first_message(rest[0].as_py())
        same = pc.starts_with(rest, head).to_numpy(zero_copy_only=False)
        group = _of_one_row(rest.filter(pa.array(same)), head)
        if group.any():
            yield left[same][group], head
        left = left[~same]


def read_alike(payloads: pa.Array, head: bytes) -> pa.Table:
    """A table with a row for each payload of such a group; ArrowException when data is damaged."""
    bodies = _bodies(payloads, head)
    pieces = pa.concat_arrays([pa.array([head], pa.binary()), bodies, pa.array([END], pa.binary())])
    whole = pc.binary_join(pa.ListArray.from_arrays([0, len(pieces)], pieces), b"")[0]
    batches = list(pa.ipc.open_stream(whole.as_buffer()))
    if len(batches) != len(payloads) or any(each.num_rows != 1 for each in batches):
        raise pa.ArrowInvalid("some of the payloads do not have one row")
    table = pa.Table.from_batches(batches)
    table.validate(full=True)
    return table


def _first_message(stream: bytes) -> bytes:
    size = int.from_bytes(stream[4:PREFIX_BYTES], "little")
    return stream[: PREFIX_BYTES + size]


def _bodies(payloads: pa.Array, head: bytes) -> pa.Array:
    """What is between the schema and the end of each stream."""
    return pc.binary_slice(payloads, len(head), -len(END))


def _of_one_row(payloads: pa.Array, head: bytes) -> Any:
    """Which of these streams have one batch, of one row, that nothing follows."""
    bodies = _bodies(payloads, head)
    found = np.zeros(len(bodies), dtype=bool)
    long_enough = np.flatnonzero(pc.binary_length(bodies).to_numpy() >= PREFIX_BYTES)
    starts = pc.binary_slice(bodies.take(pa.array(long_enough)), 4, PREFIX_BYTES)
    sizes = np.frombuffer(b"".join(starts.to_pylist()), "<u4").astype(np.int64)
    # Batches of one schema and one row have metadata of one size, except for forged ones.
    for size in np.unique(sizes)[:MAX_SCHEMAS]:
        places = long_enough[sizes == size]
        found[places] = _same_metadata(
            bodies.take(pa.array(places)), PREFIX_BYTES + int(size), head
        )
    return found


def _same_metadata(bodies: pa.Array, size: int, head: bytes) -> Any:
    """Which of these have the length that their metadata states, looking at each metadata once."""
    metadata = pc.binary_slice(bodies, 0, size).dictionary_encode()
    kinds = metadata.indices.to_numpy()
    _, samples = np.unique(kinds, return_index=True)
    lengths = np.array([_length(bodies[int(at)].as_py(), head) for at in samples])
    return pc.binary_length(bodies).to_numpy() == lengths[kinds]


def _length(body: bytes, head: bytes) -> int:
    """How long a batch of one row with this metadata is; -1 when it is something else."""
    try:
        refuse_compressed_buffers(pa.py_buffer(head + body + END))
        message = pa.ipc.read_message(body)
        if message.type != "record batch":
            return -1
        schema = pa.ipc.read_schema(pa.py_buffer(head))
        if pa.ipc.read_record_batch(message, schema).num_rows != 1:
            return -1
        return len(_first_message(body)) + int(message.body.size)
    except Exception:  # of hostile bytes pyarrow raises whatever it likes
        return -1


def _where(mask: pa.Array) -> Indices:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))

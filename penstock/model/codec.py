"""Turn values into payload bytes and back: JSON by default, and whatever else is registered.

A codec's name is stored beside each payload, so an event is always read the way it was written.
Failures carry the path of the field at fault (`$.items[3].price`), in `path` and in the message.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec
import pyarrow as pa

from penstock.model.errors import DecodeFailed, EncodeFailed, MissingExtra, UnknownCodec
from penstock.model.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Buffer = bytes | bytearray | memoryview

MAX_DECODERS = (
    1_024  # ready decoders, one a type: programs have dozens; a type made per call must not pile up
)
MAX_BLAME_DEPTH = 64  # how deep the search for a field at fault goes; a cycle ends here


class Codec(Protocol):
    """What a codec has to offer to be registered under `penstock.codecs`.

    It may add `encode_many(values) -> list[bytes]` where it knows a faster way than one by one.
    """

    name: str

    def encode(self, value: Any) -> bytes:
        """Bytes for one value; raises EncodeFailed."""
        ...

    def decode(self, data: Buffer, type: Any = None) -> Any:
        """The value, as `type` where one is given; raises DecodeFailed."""
        ...


class StructuredCodec:
    """What JSON and msgpack share: msgspec does the work, failures get a path.

    Structs, dataclasses, TypedDicts and pydantic models all work, nested too. Pydantic is never
    imported here: a model is known by its methods.
    """

    name: str

    def __init__(
        self, encode: Callable[[Any], bytes], decoder: Callable[[Any], Callable[[Buffer], Any]]
    ) -> None:
        self._encode = encode
        self._decoder = decoder
        self._decoders: dict[Any, Callable[[Buffer], Any]] = {None: decoder(Any)}

    def encode(self, value: Any) -> bytes:
        """Bytes for one value; what could not be read back is refused."""
        try:
            data = self._encode(value)
            self._check(value, data)
        except EncodeFailed:
            raise
        except Exception as error:
            raise encode_failed(self.name, error, "$" + blame(value, self._encode)) from error
        return data

    def encode_many(self, values: Sequence[Any]) -> list[bytes]:
        """Bytes for each value; the path of a failure starts with its index."""
        try:
            found = list(map(self._encode, values))
            self._check(values if isinstance(values, list) else list(values), b" ".join(found))
        except EncodeFailed:
            raise
        except Exception as error:
            raise encode_failed(
                self.name, error, "$" + blame(list(values), self._encode)
            ) from error
        return found

    def _check(self, value: Any, data: bytes) -> None:
        """Raise EncodeFailed when the bytes of a value stand for something else."""
        raise NotImplementedError

    def decode(self, data: Buffer, type: Any = None) -> Any:
        """The value: plain dicts and lists, or an instance of `type`."""
        try:
            decode = self._decoders.get(type)
            if decode is None:
                decode = self._remember(type)
            return decode(data)
        except Exception as error:
            raise decode_failed(self.name, error, type) from error

    def _remember(self, type: Any) -> Callable[[Buffer], Any]:
        if len(self._decoders) >= MAX_DECODERS:
            self._decoders = {None: self._decoders[None]}
        decode = self._decoders[type] = self._decoder(type)
        return decode


class JsonCodec(StructuredCodec):
    """JSON, the default: readable everywhere.

    >>> codec = JsonCodec()
    >>> codec.encode({"id": 7})
    b'{"id":7}'
    >>> codec.decode(b'{"id":7}', dict[str, int])
    {'id': 7}
    """

    name: Final[str] = "json"

    def __init__(self) -> None:
        super().__init__(msgspec.json.Encoder(enc_hook=_model_to_json).encode, _json_decoder)

    def _check(self, value: Any, data: bytes) -> None:
        if b"[" in data:
            check_sets(self.name, value)
        if b"null" in data:
            check_numbers(self.name, value)


class MsgpackCodec(StructuredCodec):
    """MessagePack: the same values as JSON, smaller, with bytes kept as bytes.

    >>> codec = MsgpackCodec()
    >>> codec.decode(codec.encode({"id": 7, "blob": b"\\xff"}))
    {'id': 7, 'blob': b'\\xff'}
    """

    name: Final[str] = "msgpack"

    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Encoder(enc_hook=_model_to_dict).encode, _msgpack_decoder)

    def _check(self, value: Any, data: bytes) -> None:
        check_sets(self.name, value)


class RawCodec:
    """Bytes in, the same bytes out.

    >>> RawCodec().encode(b"as is")
    b'as is'
    """

    name: Final[str] = "raw"

    def encode(self, value: Any) -> bytes:
        """The bytes themselves; text is refused, because only you know its encoding."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        hint = "call .encode() on text" if isinstance(value, str) else "choose the json codec"
        error = TypeError(f"raw takes bytes, not {type(value).__name__}; {hint}")
        raise encode_failed(self.name, error, "$")

    def encode_many(self, values: Sequence[Any]) -> list[bytes]:
        """The values as they are where all are bytes, which is checked without a Python loop."""
        if set(map(type, values)) <= {bytes}:
            return list(values)
        return [self.encode(value) for value in values]

    def decode(self, data: Buffer, type: Any = None) -> Any:
        """The bytes; `bytearray` and `memoryview` on demand, the latter without a copy."""
        if type is None or type is bytes or type is Any:
            return bytes(data)
        if type is memoryview or type is bytearray:
            return type(data)
        raise decode_failed(self.name, TypeError("raw gives bytes; use json for values"), type)


class ArrowCodec:
    """A pyarrow Table or RecordBatch as one Arrow IPC stream: columns in, columns out.

    >>> codec = ArrowCodec()
    >>> codec.decode(codec.encode(pa.table({"id": [1, 2]}))).num_rows
    2
    """

    name: Final[str] = "arrow"

    def encode(self, value: Any) -> bytes:
        """The IPC stream, uncompressed: compression is the bus's, and bounded."""
        if not isinstance(value, pa.Table | pa.RecordBatch):
            error = TypeError(f"arrow takes a Table or RecordBatch, not {type(value).__name__}")
            raise encode_failed(self.name, error, "$")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write(value)
        return cast("bytes", sink.getvalue().to_pybytes())

    def decode(self, data: Buffer, type: Any = None) -> Any:
        """A Table (or RecordBatch on demand) over the memory of `data`, checked in full.

        The check matters: unchecked offsets from outside can make a later read leave its buffer.
        """
        try:
            buffer = pa.py_buffer(data)
            refuse_compressed_buffers(buffer)
            table = pa.ipc.open_stream(buffer).read_all()
            table.validate(full=True)
            if type is pa.RecordBatch:
                batches = table.combine_chunks().to_batches()
                return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
        except Exception as error:
            raise decode_failed(self.name, error, type) from error
        if type not in (None, Any, pa.Table):
            raise decode_failed(self.name, TypeError("arrow gives Table or RecordBatch"), type)
        return table


class ProtobufCodec:
    """Protocol Buffers messages; needs the `protobuf` extra."""

    name: Final[str] = "protobuf"

    def __init__(self) -> None:
        try:
            self._message: Any = importlib.import_module("google.protobuf.message").Message
        except ImportError as error:
            raise MissingExtra(
                "the protobuf codec needs the protobuf package. "
                "Install it with: pip install 'penstock[protobuf]'",
                extra="protobuf",
            ) from error

    def encode(self, value: Any) -> bytes:
        """The message's own serialisation."""
        try:
            if not isinstance(value, self._message):
                raise TypeError(f"protobuf takes a message, not {type(value).__name__}")
            return cast("bytes", value.SerializeToString())
        except Exception as error:
            raise encode_failed(self.name, error, "$") from error

    def decode(self, data: Buffer, type: Any = None) -> Any:
        """A message of class `type`, which must be given: the bytes do not name it."""
        try:
            if not (inspect.isclass(type) and issubclass(type, self._message)):
                raise TypeError("say which message class to read, for example type=Order")
            return cast("Any", type).FromString(bytes(data))
        except Exception as error:
            raise decode_failed(self.name, error, type) from error


codecs: Registry[Codec] = Registry(
    "penstock.codecs",
    {
        "json": JsonCodec,
        "msgpack": MsgpackCodec,
        "raw": RawCodec,
        "arrow": ArrowCodec,
        "protobuf": ProtobufCodec,
    },
    UnknownCodec,
)


def encode_many(codec: Codec, values: Sequence[Any]) -> list[bytes]:
    """Bytes for each value, by the codec's own fast path where it has one.

    >>> encode_many(codecs.get("json"), [1, "a"])
    [b'1', b'"a"']
    """
    many: Callable[[Sequence[Any]], list[bytes]] | None = getattr(codec, "encode_many", None)
    return many(values) if many else [codec.encode(value) for value in values]


PLAIN = frozenset({str, int, float, bool, type(None), bytes})
"""What has no parts."""
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""A double that is infinite or no number, as msgpack writes it; other bytes can look the same."""


def check_sets(codec: str, value: Any) -> None:
    """Raise EncodeFailed where plain data holds a set: it would be read back as a list.

    A set is fine in a field of a struct or a model, whose type makes a set of the list again.
    """
    if _has_set(value):
        path = _path_to(value, lambda part: isinstance(part, set | frozenset), 0)
        error = ValueError("a set would be read back as a list; send a list")
        raise encode_failed(codec, error, f"${path}")


def _has_set(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return isinstance(value, set | frozenset)
    for part in value:  # noqa: SIM110 - a generator would double the cost
        if type(part) not in PLAIN and _has_set(part):
            return True
    return False


def check_numbers(codec: str, value: Any) -> None:
    """Raise EncodeFailed where a value holds a number that JSON does not have: it would be null.

    All of it is written as msgpack, which takes a fraction of looking at each part.
    """
    try:
        if _NOT_FINITE.search(_to_msgpack(value)) is None:
            return
    except (TypeError, ValueError, OverflowError):
        pass  # msgpack does not have it: each part is looked at
    path = _path_to(value, _is_not_finite, 0)
    if path is not None:
        error = ValueError("JSON has no nan and no infinity; send None or text")
        raise encode_failed(codec, error, f"${path}")


def _is_not_finite(part: Any) -> bool:
    return isinstance(part, float) and not math.isfinite(part)


def _path_to(value: Any, wanted: Callable[[Any], bool], depth: int) -> str | None:
    """The path to the first part that is wanted; None when there is none."""
    if wanted(value):
        return ""
    if depth < MAX_BLAME_DEPTH and type(value) not in PLAIN:
        for step, part in _children(value):
            found = _path_to(part, wanted, depth + 1)
            if found is not None:
                return step + found
    return None


def _model_to_json(value: Any) -> Any:
    if hasattr(value, "model_dump_json"):
        return msgspec.Raw(value.model_dump_json().encode())
    raise TypeError(f"no way to write {type(value).__name__}")


def _model_to_dict(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"no way to write {type(value).__name__}")


_to_msgpack = msgspec.msgpack.Encoder(enc_hook=_model_to_dict).encode


def _dict_to_model(type: Any, value: Any) -> Any:
    if hasattr(type, "model_validate"):
        return type.model_validate(value)
    raise TypeError(f"no way to read {type}")


def _json_decoder(type: Any) -> Callable[[Buffer], Any]:
    if hasattr(type, "model_validate_json"):
        return lambda data: type.model_validate_json(bytes(data))
    return msgspec.json.Decoder(type, dec_hook=_dict_to_model).decode


def _msgpack_decoder(type: Any) -> Callable[[Buffer], Any]:
    return msgspec.msgpack.Decoder(type, dec_hook=_dict_to_model).decode


def encode_failed(codec: str, error: Exception, path: str) -> EncodeFailed:
    """The error for a value that has no bytes in this codec."""
    return EncodeFailed(
        f"{codec} cannot encode the value at {path}: {error}. Nothing was stored; "
        "change the value or choose another codec",
        codec=codec,
        path=path,
    )


def decode_failed(codec: str, error: Exception, type: Any) -> DecodeFailed:
    """The error for bytes that are not what they should be, with the path the library names."""
    path = _path_in(error)
    wanted = "" if type is None else f" as {getattr(type, '__name__', type)}"
    return DecodeFailed(
        f"{codec} cannot decode the payload{wanted}: {error}. The stored event is untouched; "
        "read it with the type and codec it was written with",
        codec=codec,
        path=path,
    )


def _path_in(error: Exception) -> str:
    if match := re.search(r" - at `(.*)`$", str(error)):
        return match[1]
    try:
        steps = cast("Any", error).errors()[0]["loc"]  # how pydantic tells
    except Exception:
        return "$"
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def blame(value: Any, encode: Callable[[Any], bytes]) -> str:
    """The path below `value` to the innermost part that `encode` refuses.

    >>> blame({"a": [1, object()]}, msgspec.json.encode)
    '.a[1]'
    """
    path = ""
    for _ in range(MAX_BLAME_DEPTH):
        for step, child in _children(value):
            try:
                encode(child)
            except Exception:
                path, value = path + step, child
                break
        else:
            break
    return path


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value):
        yield from (
            (f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    elif hasattr(value, "model_dump"):
        yield from ((f".{name}", child) for name, child in vars(value).items())


def refuse_compressed_buffers(stream: pa.Buffer) -> None:
    """Raise ValueError where an Arrow stream holds compressed buffers.

    They expand to whatever size they state while being read, which pyarrow gives no way to bound.
    """
    reader = pa.ipc.MessageReader.open_stream(stream)
    for message in reader:
        if message.type not in ("record batch", "dictionary"):
            continue
        metadata = memoryview(message.metadata)
        (root,) = struct.unpack_from("<I", metadata, 0)
        batch = _table(metadata, root, 2)
        if message.type == "dictionary":
            batch = _table(metadata, batch, 1)
        if _slot(metadata, batch, 3):
            raise ValueError("its buffers are compressed; let the bus compress the payload instead")


def _slot(metadata: memoryview, table: int, index: int) -> int:
    """Where a flatbuffer table keeps its field `index`; 0 where it has none."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (size,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * index
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < size else 0
    return table + offset if offset else 0


def _table(metadata: memoryview, table: int, index: int) -> int:
    """Where the table that field `index` refers to starts."""
    slot = _slot(metadata, table, index)
    return slot + cast("int", struct.unpack_from("<I", metadata, slot)[0])

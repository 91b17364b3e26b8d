"""Make payloads smaller, and give them back without trusting what they claim to be.

A stored payload carries its compressor's name and its stated uncompressed size. Both come from
outside: `bounded_decompress` refuses a size over the limit before anything is allocated, and a
stream that does not expand to exactly the stated size is `DecodeFailed`, never padded or cut.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, cast

import pyarrow as pa

from penstock.model.errors import DecodeFailed, UnknownCompressor
from penstock.model.registry import Registry

Buffer = bytes | bytearray | memoryview

SAMPLE_BYTES = 4_096  # enough to see repetition, and about 5 us to try with lz4
WORTH_RATIO = (
    0.9  # a payload that shrinks by less than a tenth is not worth expanding at every read
)
SNAPPY_LENGTH_BYTES = 5  # the format's own bound: a varint of 32 bits


class Compressor(Protocol):
    """What a compressor has to offer to be registered under `penstock.compressors`."""

    name: str

    def compress(self, data: Buffer) -> bytes:
        """Make `data` smaller."""
        ...

    def decompress(self, data: Buffer, size: int) -> Buffer:
        """Give back the original of `size` bytes; produce at most one byte more, or raise.

        Call `bounded_decompress` instead: it checks `size` before and the outcome after.
        """
        ...


class NoCompressor:
    """Leaves payloads as they are."""

    name: Final[str] = "none"

    def compress(self, data: Buffer) -> bytes:
        """The same bytes."""
        return bytes(data)

    def decompress(self, data: Buffer, size: int) -> Buffer:
        """The same bytes, without a copy."""
        return data


class Lz4Compressor:
    """LZ4 frames: the default, because it costs less than the disk write it saves."""

    name: Final[str] = "lz4"

    def compress(self, data: Buffer) -> bytes:
        """One LZ4 frame."""
        return cast("bytes", pa.compress(data, codec="lz4", asbytes=True))

    def decompress(self, data: Buffer, size: int) -> Buffer:
        """At most `size + 1` bytes, so that a longer stream shows.

        Read as a stream because pyarrow's one-shot LZ4 does not say how much it produced: where
        the frame is shorter than `size`, the rest would be whatever memory held before.
        """
        stream = pa.CompressedInputStream(pa.BufferReader(data), "lz4")
        return cast("bytes", stream.read(size + 1))


class ZstdCompressor:
    """Zstandard: smaller than LZ4 and several times slower, for links and disks that are slow."""

    name: Final[str] = "zstd"

    def compress(self, data: Buffer) -> bytes:
        """One Zstandard frame at level 1."""
        return cast("bytes", pa.compress(data, codec="zstd", asbytes=True))

    def decompress(self, data: Buffer, size: int) -> Buffer:
        """Exactly `size` bytes; the library refuses any other outcome."""
        return cast(
            "bytes", pa.decompress(data, decompressed_size=size, codec="zstd", asbytes=True)
        )


class SnappyCompressor:
    """Snappy, for exchange with systems that speak it."""

    name: Final[str] = "snappy"

    def compress(self, data: Buffer) -> bytes:
        """One raw Snappy block."""
        return cast("bytes", pa.compress(data, codec="snappy", asbytes=True))

    def decompress(self, data: Buffer, size: int) -> Buffer:
        """Exactly `size` bytes.

        The block opens with its own length and the library holds it to that; pyarrow does not
        compare it with `size`, and would leave the difference filled with old memory.
        """
        if (own := snappy_length(data)) != size:
            raise ValueError(f"the block holds {own} bytes")
        return cast(
            "bytes", pa.decompress(data, decompressed_size=size, codec="snappy", asbytes=True)
        )


def snappy_length(data: Buffer) -> int:
    """The uncompressed length a Snappy block states in its first bytes.

    >>> snappy_length(SnappyCompressor().compress(b"x" * 300))
    300
    """
    length = 0
    for position, byte in enumerate(bytes(data[:SNAPPY_LENGTH_BYTES])):
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return length
    raise ValueError("the block does not start with a length")


compressors: Registry[Compressor] = Registry(
    "penstock.compressors",
    {
        "none": NoCompressor,
        "lz4": Lz4Compressor,
        "zstd": ZstdCompressor,
        "snappy": SnappyCompressor,
    },
    UnknownCompressor,
)


def bounded_decompress(name: str, data: Buffer, stated_bytes: int, limit_bytes: int) -> Buffer:
    """Expand a payload that may be hostile, within `limit_bytes` whatever it contains.

    Besides the result only the decoder's own working memory is used, at most a few MiB.

    >>> small = compressors.get("lz4").compress(b"spam " * 100)
    >>> bytes(bounded_decompress("lz4", small, stated_bytes=500, limit_bytes=1000))[:9]
    b'spam spam'
    >>> bounded_decompress("lz4", small, stated_bytes=500, limit_bytes=100)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.DecodeFailed: lz4 payload states 500 bytes, the limit is 100 bytes; ...
    """
    if not 0 <= stated_bytes <= limit_bytes:
        raise DecodeFailed(
            f"{name} payload states {stated_bytes} bytes, the limit is {limit_bytes} bytes; "
            "nothing was expanded. Raise limits.max_payload_bytes if you trust the producer",
            compressor=name,
            stated_bytes=stated_bytes,
            limit_bytes=limit_bytes,
        )
    compressor = compressors.get(name)
    try:
        result = compressor.decompress(data, stated_bytes)
    except Exception as error:
        raise _broken(name, stated_bytes, str(error)) from error
    if len(result) != stated_bytes:
        more = "more" if len(result) > stated_bytes else f"only {len(result)} bytes"
        raise _broken(name, stated_bytes, f"it holds {more}")
    return result


def _broken(name: str, stated_bytes: int, why: str) -> DecodeFailed:
    return DecodeFailed(
        f"{name} payload does not expand to the {stated_bytes} bytes it states: {why}. "
        "The stored bytes are untouched; look at the producer",
        compressor=name,
        stated_bytes=stated_bytes,
    )


def worth_compressing(data: Buffer, compressor: Compressor) -> bool:
    """Whether a payload shrinks enough to pay for it, judged from a slice of its middle.

    The middle, because formats that are compressed already often begin with a plain header.

    >>> worth_compressing(b"spam " * 2000, compressors.get("lz4"))
    True
    >>> worth_compressing(b"spam " * 2000, compressors.get("none"))
    False
    """
    start = max(0, (len(data) - SAMPLE_BYTES) // 2)
    sample: Any = memoryview(data)[start : start + SAMPLE_BYTES]
    return len(sample) > 0 and len(compressor.compress(sample)) < WORTH_RATIO * len(sample)

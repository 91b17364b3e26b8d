"""Which partition a key belongs to: the same answer on every machine and in every language.

A key is hashed to 64 bits, and the jump consistent hash (Lamping and Veach, 2014) turns those bits
into a partition. When a topic grows from n to n + 1 partitions, about one key in n + 1 moves, and
only to the new partition.

The 64-bit hash is `mix(length << 32 | crc32(key))`: the CRC-32 of zlib, PNG and Ethernet, the
length of the key above it, and the finaliser of MurmurHash3 to spread the bits. Every language has
CRC-32 in its standard library, and it runs at memory speed for keys of any length. It is no
defence against someone who picks keys to collide; neither is any hash without a secret, and a
producer who wants one hot partition can simply send one key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.model.checksum import crc32
from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PARTITIONS = 65_536
"""Partitions of one topic. Each has files and cursors of its own; more would drown a folder."""

Partitions: TypeAlias = npt.NDArray[np.int64]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MIX_1 = 0xFF51_AFD7_ED55_8CCD
_MIX_2 = 0xC4CE_B9FE_1A85_EC53
_JUMP = 2_862_933_555_777_941_757
_TWO_31 = float(1 << 31)


def key_hash(key: bytes) -> int:
    """The stable 64-bit hash of a key that partitioning is built on.

    >>> hex(key_hash(b"customer-7"))
    '0xd511ba406f5372d1'
    """
    bits = (len(key) << 32 | crc32(key)) & _MASK
    bits = (bits ^ (bits >> 33)) * _MIX_1 & _MASK
    bits = (bits ^ (bits >> 33)) * _MIX_2 & _MASK
    return bits ^ (bits >> 33)


def jump(bits: int, count: int) -> int:
    """The jump consistent hash: 64 bits and a number of buckets in, the bucket out.

    >>> jump(42, 57)
    43
    """
    bucket, following = -1, 0
    while following < count:
        bucket = following
        bits = (bits * _JUMP + 1) & _MASK
        following = int((bucket + 1) * (_TWO_31 / ((bits >> 33) + 1)))
    return bucket


def partition_of(key: bytes, count: int) -> int:
    """The partition, from 0 to count - 1, that holds every event with this key.

    >>> partition_of(b"customer-7", 1), partition_of(b"customer-7", 16)
    (0, 2)
    """
    if not 1 <= count <= MAX_PARTITIONS:
        raise _bad_count(count)
    return jump(key_hash(key), count)


def partitions_of(
    keys: Sequence[bytes | None], count: int, fallback: int | npt.ArrayLike = 0
) -> Partitions:
    """The partition of each key of a batch; an event without a key goes to `fallback`.

    `fallback` is one partition for all such events, or an array with a partition per event.

    >>> partitions_of([b"customer-7", None, b"customer-8"], 16, fallback=3).tolist()
    [2, 3, 14]
    """
    if not 1 <= count <= MAX_PARTITIONS:
        raise _bad_count(count)
    spare = np.asarray(fallback, dtype=np.int64)
    if spare.size and not (int(spare.min()) >= 0 and int(spare.max()) < count):
        raise InvalidSettings(
            f"fallback partition outside 0..{count - 1}; nothing was placed; pass one that exists",
            fallback=fallback,
            count=count,
        )
    if None not in keys:
        return _jump_all(_hash_all(keys), count)  # type: ignore[arg-type]
    result = np.empty(len(keys), dtype=np.int64)
    result[:] = spare
    keyed = [index for index, key in enumerate(keys) if key is not None]
    hashes = _hash_all([key for key in keys if key is not None])
    result[keyed] = _jump_all(hashes, count)
    return result


def _hash_all(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    size = len(keys)
    bits = np.fromiter(map(crc32, keys), dtype=np.uint64, count=size)
    bits |= np.fromiter(map(len, keys), dtype=np.uint64, count=size) << np.uint64(32)
    shift = np.uint64(33)
    for factor in (_MIX_1, _MIX_2):
        bits ^= bits >> shift
        bits *= np.uint64(factor)
    bits ^= bits >> shift
    return bits


def _jump_all(bits: npt.NDArray[np.uint64], count: int) -> Partitions:
    """Jump every row at once. A row that has landed is parked at infinity, past every count."""
    bucket = np.zeros(len(bits), dtype=np.float64)
    landed = bucket.copy()
    if count == 1:
        return landed.astype(np.int64)
    while True:
        bits = bits * np.uint64(_JUMP) + np.uint64(1)
        following = (bits >> np.uint64(33)).astype(np.float64)
        following += 1.0
        np.divide(_TWO_31, following, out=following)
        bucket += 1.0
        following *= bucket
        np.floor(following, out=following)
        alive = following < count
        if not alive.any():
            return landed.astype(np.int64)
        np.copyto(landed, following, where=alive)
        bucket = np.where(alive, following, np.inf)


def _bad_count(count: int) -> InvalidSettings:
    return InvalidSettings(
        f"a topic has 1 to {MAX_PARTITIONS} partitions, not {count}; nothing was placed; "
        "choose a number in that range",
        count=count,
        max_partitions=MAX_PARTITIONS,
    )

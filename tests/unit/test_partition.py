"""Keys to partitions: stable vectors, even spread, and few moves when a topic grows (Q6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.partition import MAX_PARTITIONS, jump, key_hash, partition_of, partitions_of
from penstock.model.errors import InvalidSettings

# Other languages implement against these: key, 64-bit hash, partition of 1, 3, 16 and 1,000.
VECTORS = [
    (b"", 0x0000000000000000, (0, 0, 0, 0)),
    (b"a", 0x848BB78258C9C835, (0, 0, 13, 738)),
    (b"customer-7", 0xD511BA406F5372D1, (0, 2, 2, 312)),
    (b"\x00\xff", 0x169471329768E032, (0, 0, 7, 634)),
    (b"z\xc3\xbcrich", 0xCEEBB4AC9E397D10, (0, 0, 15, 230)),
    (b"0123456789abcdef0123456789abcdef", 0x227C5900BFDF06D0, (0, 0, 5, 616)),
]

# From the reference implementations of the jump hash: bits, count, bucket.
JUMPS = [(1, 1, 0), (42, 57, 43), (0xDEAD10CC, 1, 0), (0xDEAD10CC, 666, 361), (256, 1024, 520)]


@pytest.mark.parametrize(("key", "bits", "placed"), VECTORS)
def test_the_vectors_hold(key: bytes, bits: int, placed: tuple[int, ...]) -> None:
    assert key_hash(key) == bits
    assert tuple(partition_of(key, count) for count in (1, 3, 16, 1_000)) == placed


@pytest.mark.parametrize(("bits", "count", "bucket"), JUMPS)
def test_the_jump_hash_is_the_published_one(bits: int, count: int, bucket: int) -> None:
    assert jump(bits, count) == bucket


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, MAX_PARTITIONS))
def test_a_batch_gets_what_each_key_gets(keys: list[bytes], count: int) -> None:
    assert partitions_of(keys, count).tolist() == [partition_of(key, count) for key in keys]


def test_a_key_that_is_long_or_of_zeros_is_placed_alike() -> None:
    keys = [b"\0", b"\0\0", b"x" * 1_000_000, b""]
    assert partitions_of(keys, 97).tolist() == [partition_of(key, 97) for key in keys]


@pytest.mark.parametrize("count", [1, 7, 64])
def test_growing_by_one_moves_few_keys_and_only_to_the_new_partition(count: int) -> None:
    keys = [b"order-%d" % number for number in range(20_000)]
    before, after = partitions_of(keys, count), partitions_of(keys, count + 1)
    moved = before != after
    assert set(after[moved].tolist()) == {count}
    assert abs(moved.mean() - 1 / (count + 1)) < 0.02


def test_similar_keys_spread_evenly() -> None:
    keys = [b"customer-%d" % number for number in range(32_000)]
    sizes = np.bincount(partitions_of(keys, 32), minlength=32)
    # 1,000 expected each with a deviation of 31: five deviations either way.
    assert 845 <= sizes.min() <= sizes.max() <= 1_155


def test_events_without_a_key_go_to_the_fallback() -> None:
    keys = [None, b"a", None]
    assert partitions_of(keys, 8, fallback=5).tolist() == [5, partition_of(b"a", 8), 5]
    assert partitions_of(keys, 8, fallback=[1, 2, 3]).tolist() == [1, partition_of(b"a", 8), 3]
    assert partitions_of([None, None], 8).tolist() == [0, 0]
    assert partitions_of([], 8).tolist() == []


@pytest.mark.parametrize("count", [0, -1, MAX_PARTITIONS + 1])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidSettings) as caught:
        partition_of(b"a", count)
    assert caught.value.count == count
    with pytest.raises(InvalidSettings):
        partitions_of([b"a"], count)


@pytest.mark.parametrize("fallback", [-1, 8, [0, 8]])
def test_a_fallback_that_does_not_exist_is_refused(fallback: object) -> None:
    with pytest.raises(InvalidSettings):
        partitions_of([None, None], 8, fallback=fallback)  # type: ignore[arg-type]

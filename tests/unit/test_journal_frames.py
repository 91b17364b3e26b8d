"""Frames of the journal are read whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.disk import File
from penstock.log.journal import (
    BATCH,
    CONTROL,
    FILE_HEADER,
    GROUP,
    HEAD,
    KINDS,
    encode_frame,
    encode_group,
    frame_bytes,
    frames,
    later_frames,
    read_frame,
    read_group,
)
from penstock.log.memory_disk import MemoryDisk

BODIES = st.lists(st.binary(max_size=40), max_size=5)


def frame(
    body: bytes, position: int, *, kind: int = BATCH, durable: int = 0, epoch: int = 1
) -> bytes:
    return b"".join(encode_frame(kind, [body], position=position, durable=durable, epoch=epoch))


@given(BODIES, st.sampled_from(KINDS), st.integers(0, 2**60), st.integers(0, 2**60))
def test_a_frame_comes_back_with_everything_it_says(parts, kind, position, durable) -> None:
    data = b"".join(encode_frame(kind, parts, position=position, durable=durable, epoch=9))
    found = read_frame(memoryview(data), position, position)
    assert found is not None
    assert bytes(found.body) == b"".join(parts)
    assert (found.kind, found.durable, found.epoch) == (kind, durable, 9)
    assert found.end == position + len(data) == position + frame_bytes(len(b"".join(parts)))
    assert len(data) % 8 == 0


@pytest.mark.parametrize("body", [b"", b"x", b"some payload of 29 bytes long"])
def test_every_single_bit_flip_is_detected(body: bytes) -> None:
    data = frame(body, 64, durable=32)
    padding = range((HEAD.size + len(body)) * 8, len(data) * 8)
    for place in range(len(data) * 8):
        broken = bytearray(data)
        broken[place >> 3] ^= 1 << (place & 7)
        found = read_frame(memoryview(bytes(broken)), 64, 64)
        if place in padding:
            assert found is not None, "zeros behind the body carry nothing"
        else:
            assert found is None, f"bit {place} went unnoticed"


@given(st.binary(max_size=60), st.data())
def test_a_frame_cut_short_is_not_read(body: bytes, data) -> None:
    whole = frame(body, 0)
    cut = data.draw(st.integers(0, HEAD.size + len(body) - 1))
    assert read_frame(memoryview(whole[:cut]), 0, 0) is None


def test_a_frame_at_another_address_is_not_read() -> None:
    data = frame(b"moved", 64)
    assert read_frame(memoryview(data), 72, 72) is None
    assert read_frame(memoryview(bytes(8) + data), 64, 72) is None
    assert read_frame(memoryview(data), 64, 56) is None


def test_an_unknown_kind_is_not_read() -> None:
    assert read_frame(memoryview(frame(b"x", 0, kind=77)), 0, 0) is None


def test_frames_end_at_the_first_that_is_not_whole() -> None:
    first, second, third = frame(b"a", 0), frame(b"b", 40), frame(b"c", 80)
    view = memoryview(first + second + third)
    assert [bytes(each.body) for each in frames(view, 0, 0, 120)] == [b"a", b"b", b"c"]
    assert [bytes(each.body) for each in frames(view, 0, 0, 80)] == [b"a", b"b"]
    broken = memoryview(first + second[:-5] + b"!" + second[-4:] + third)
    broken = memoryview(bytes(broken).replace(b"b", b"B"))
    assert [bytes(each.body) for each in frames(broken, 0, 0, 120)] == [b"a"]


def stored(data: bytes) -> File:
    file = MemoryDisk().open("a", create=True)
    file.append([data])
    return file


@given(
    st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=8),
    st.integers(0, 2**40),
    st.data(),
)
def test_later_frames_finds_all_that_are_whole_behind_a_broken_one(bodies, base, data) -> None:
    base -= base % 8
    joined, starts = b"", []
    for body in bodies:
        starts.append(base + len(joined))
        joined += frame(body, base + len(joined), durable=base)
    broken = data.draw(st.integers(0, len(bodies) - 2))
    at = starts[broken] - base
    damaged = joined[:at] + b"\xee" * 40 + joined[at + 40 :]
    found = [each.position for each in later_frames(stored(damaged), base, starts[broken])]
    whole = [start for start in starts[broken + 1 :] if start - base >= at + 40]
    assert found == whole


@pytest.mark.parametrize("size", [0, 8, 31, 39, 40, 48])
def test_later_frames_in_a_short_or_empty_rest(size: int) -> None:
    assert list(later_frames(stored(bytes(size)), 0, 0)) == []


ENTRIES = st.lists(st.tuples(st.sampled_from([BATCH, CONTROL]), BODIES), max_size=6)


@given(ENTRIES)
def test_a_group_gives_its_entries_back_with_their_places(entries) -> None:
    body = b"".join(encode_group(entries))
    found = list(read_group(memoryview(body)))
    assert [(kind, bytes(each)) for _, kind, each in found] == [
        (kind, b"".join(parts)) for kind, parts in entries
    ]
    for inner, _, each in found:
        assert body[inner : inner + len(each)] == bytes(each)
        assert inner % 8 == 0


def test_a_group_is_one_frame_all_or_nothing() -> None:
    body = encode_group([(BATCH, [b"one"]), (BATCH, [b"two"])])
    data = b"".join(encode_frame(GROUP, body, position=0, durable=0, epoch=1))
    for length in range(len(data) - 7):
        assert read_frame(memoryview(data[:length]), 0, 0) is None
    assert FILE_HEADER != GROUP

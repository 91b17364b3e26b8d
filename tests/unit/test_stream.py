"""The TCP stream (row Q1): any split gives the same frames, hostile bytes give a typed error."""

from __future__ import annotations

import errno
import itertools
import os
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.compressor import compressors
from penstock.model.errors import ProtocolViolation
from penstock.wire import stream as stream_module
from penstock.wire.frame import BODY_HEAD, Frame, Kind, Mark
from penstock.wire.stream import (
    COMPRESS_MIN_BYTES,
    COMPRESSORS,
    SCRATCH_BYTES,
    SMALL_BYTES,
    StreamReader,
    decode_frame,
    encode_frame,
    encode_message,
)

LIMIT_BYTES = 8 << 20

# Mostly small, and some on both sides of what the reader copies and what it gives its own memory.
blobs = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda size, byte: bytes([byte]) * size,
        st.sampled_from([SMALL_BYTES - 40, SMALL_BYTES, SMALL_BYTES + 1, 70_000]),
        st.integers(0, 255),
    ),
)
frames = st.builds(
    Frame,
    st.sampled_from([int(kind) for kind in Kind]),
    st.integers(0, 2**64 - 1),
    blobs,
    st.lists(blobs, max_size=3).map(tuple),
    st.sampled_from([int(mark) for mark in Mark]),
)
compressor_numbers = st.integers(0, len(COMPRESSORS) - 1)


def resident_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def stream_of(frames: list[Frame], compressor: int = 0) -> bytes:
    return b"".join(b"".join(encode_frame(frame, compressor)) for frame in frames)


def read_all(reader: StreamReader, pieces: list[bytes]) -> list[Frame]:
    return [
        decode_frame(message, LIMIT_BYTES) for piece in pieces for message in reader.feed(piece)
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(frames, max_size=6), compressor_numbers, st.data())
def test_any_split_gives_the_same_frames(
    sent: list[Frame], compressor: int, data: st.DataObject
) -> None:
    stream = stream_of(sent, compressor)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:stop] for start, stop in itertools.pairwise(edges)]
    reader = StreamReader(LIMIT_BYTES)
    assert read_all(reader, pieces) == sent
    assert reader.broken is None
    assert not reader.unfinished


def test_byte_by_byte() -> None:
    sent = [Frame(Kind.PUBLISH, 5, b"meta", (b"a", b"", b"ccc")), Frame(Kind.BYE, 0, b"")]
    stream = stream_of(sent)
    pieces = [stream[at : at + 1] for at in range(len(stream))]
    assert read_all(StreamReader(LIMIT_BYTES), pieces) == sent


def test_readers_share_a_scratch() -> None:
    """Each read is taken apart before the next, so one buffer serves all connections."""
    scratch = bytearray(SCRATCH_BYTES)
    one, two = StreamReader(LIMIT_BYTES, scratch), StreamReader(LIMIT_BYTES, scratch)
    first, second = Frame(Kind.ASK, 1, b"one" * 9), Frame(Kind.ASK, 2, b"two" * 9000)
    got: dict[StreamReader, list[Frame]] = {one: [], two: []}
    streams = {one: stream_of([first] * 9), two: stream_of([second] * 9)}
    while any(streams.values()):
        for reader, stream in streams.items():
            piece, streams[reader] = stream[:1001], stream[1001:]
            got[reader] += read_all(reader, [piece])
    assert got == {one: [first] * 9, two: [second] * 9}


def test_a_frame_owns_its_bytes() -> None:
    """What was read stays as it was when the scratch is used again."""
    reader = StreamReader(LIMIT_BYTES)
    [frame] = read_all(reader, [stream_of([Frame(Kind.PUBLISH, 1, b"m", (b"part",))])])
    read_all(reader, [stream_of([Frame(Kind.PUBLISH, 2, b"M", (b"PART",))])])
    assert frame == Frame(Kind.PUBLISH, 1, b"m", (b"part",))


def test_a_large_frame_grows_as_it_arrives() -> None:
    part = os.urandom(3 * SCRATCH_BYTES + 17)
    stream = stream_of([Frame(Kind.PUBLISH, 1, b"", (part,)), Frame(Kind.BYE, 0, b"")])
    reader = StreamReader(LIMIT_BYTES)
    found = read_all(reader, [stream[at : at + 100_000] for at in range(0, len(stream), 100_000)])
    assert [frame.kind for frame in found] == [Kind.PUBLISH, Kind.BYE]
    assert found[0].parts[0] == part


def test_a_claim_of_4_gb_is_refused_from_its_head() -> None:
    reader = StreamReader(LIMIT_BYTES)
    good = stream_of([Frame(Kind.BYE, 0, b"")])
    messages = reader.feed(good + struct.pack("<BI", Kind.PUBLISH, 0xFFFFFFFF))
    assert [command for command, _ in messages] == [Kind.BYE]
    assert isinstance(reader.broken, ProtocolViolation)
    assert reader.broken.size_bytes == 0xFFFFFFFF
    assert reader.feed(good) == []


def test_a_claim_within_the_limit_costs_what_arrives() -> None:
    limit = 1 << 30
    readers = [StreamReader(limit, bytearray(SCRATCH_BYTES)) for _ in range(4)]
    for reader in readers:
        reader.feed(stream_of([Frame(Kind.BYE, 0, b"")]))
    before = resident_bytes()
    for reader in readers:
        reader.feed(struct.pack("<BI", Kind.PUBLISH, limit - 1) + b"some")
        assert reader.large
    assert resident_bytes() - before <= len(readers) * SCRATCH_BYTES


def test_a_claim_that_no_memory_is_left_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(stream_module.mmap, "mmap", full)
    reader = StreamReader(LIMIT_BYTES)
    assert reader.feed(struct.pack("<BI", Kind.PUBLISH, 100_000) + b"some") == []
    assert isinstance(reader.broken, ProtocolViolation)
    assert "no memory" in str(reader.broken)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8))
def test_random_bytes_raise_nothing_else(pieces: list[bytes]) -> None:
    reader = StreamReader(LIMIT_BYTES)
    for piece in pieces:
        for message in reader.feed(piece):
            try:
                decode_frame(message, LIMIT_BYTES)
            except ProtocolViolation:
                continue


@settings(max_examples=300, deadline=None)
@given(frames, compressor_numbers, st.data())
def test_changed_bytes_raise_nothing_else(
    frame: Frame, compressor: int, data: st.DataObject
) -> None:
    stream = bytearray(stream_of([frame], compressor))
    for _ in range(data.draw(st.integers(1, 4))):
        # Heads and tables stand in front; most changes aim there.
        at = data.draw(st.integers(5, min(len(stream) - 1, 60)))
        stream[at] = data.draw(st.integers(0, 255))
    for message in StreamReader(LIMIT_BYTES).feed(stream):
        try:
            decode_frame(message, LIMIT_BYTES)
        except ProtocolViolation:
            continue


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 255),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 40),
    st.binary(max_size=40),
)
def test_the_short_way_agrees_with_the_long_one(
    command: int, mark: int, count: int, meta_bytes: int, rest: bytes
) -> None:
    """Frames with one part or none take a short cut; it accepts and refuses the same bodies."""
    body = BODY_HEAD.pack(9, mark, 0, count, meta_bytes) + rest

    def outcome(parse: object) -> object:
        try:
            return parse()  # type: ignore[operator]
        except ProtocolViolation:
            return "refused"

    short = outcome(lambda: decode_frame((command, body), LIMIT_BYTES))
    assert short == outcome(lambda: Frame.parse(command, body))


@pytest.mark.parametrize("number", range(1, len(COMPRESSORS)))
class TestCompressed:
    def test_large_frames_shrink(self, number: int) -> None:
        frame = Frame(Kind.PUBLISH, 1, b"meta", (b"spam " * 1000, b"eggs " * 1000))
        buffers = encode_frame(frame, number)
        assert sum(map(len, buffers)) < frame.size_bytes / 4
        assert read_all(StreamReader(LIMIT_BYTES), [b"".join(buffers)]) == [frame]

    def test_small_frames_and_noise_stay(self, number: int) -> None:
        small = Frame(Kind.PUBLISH, 1, b"", (b"a" * (COMPRESS_MIN_BYTES - 21),))
        noise = Frame(Kind.PUBLISH, 1, b"", (os.urandom(5000),))
        for frame in (small, noise):
            assert encode_frame(frame, number) == encode_frame(frame)
        # One byte more, and it is worth a try.
        large = Frame(Kind.PUBLISH, 1, b"", (b"a" * (COMPRESS_MIN_BYTES - 20),))
        assert encode_frame(large, number) != encode_frame(large)

    @pytest.mark.parametrize("stated", [0, 99_999, 100_001, LIMIT_BYTES, 0xFFFFFFFF])
    def test_a_bomb_or_a_lie_is_refused(self, number: int, stated: int) -> None:
        """A stated size that is over the limit, or is not what comes out."""
        packed = compressors.get(COMPRESSORS[number]).compress(bytes(100_000))
        head = BODY_HEAD.pack(1, 0, number, 0, 100_000)
        body = head + struct.pack("<I", stated) + packed
        with pytest.raises(ProtocolViolation):
            decode_frame((Kind.PUBLISH, body), LIMIT_BYTES)

    def test_a_bomb_takes_no_memory(self, number: int) -> None:
        packed = compressors.get(COMPRESSORS[number]).compress(bytes(50 << 20))
        body = BODY_HEAD.pack(1, 0, number, 0, 0) + struct.pack("<I", 50 << 20) + packed
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolViolation):
                decode_frame((Kind.PUBLISH, body), LIMIT_BYTES)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_a_frame_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(ProtocolViolation, match="parts"):
        encode_frame(Frame(Kind.PUBLISH, 1, b"", (b"",) * 5_000))


def test_parts_are_not_copied() -> None:
    part = bytes(100_000)
    assert encode_frame(Frame(Kind.PUBLISH, 1, b"", (part,)))[1] is part


def test_messages_that_are_no_frames() -> None:
    assert StreamReader(10).feed(encode_message(0xFE, b"{}")) == [(0xFE, b"{}")]

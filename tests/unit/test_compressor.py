"""Compressors (row T3): round trips, bombs, and sizes that lie."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.compressor import (
    SAMPLE_BYTES,
    NoCompressor,
    bounded_decompress,
    compressors,
    worth_compressing,
)
from penstock.model.errors import AlreadyExists, DecodeFailed, UnknownCompressor
from penstock.model.registry import Registry

ALL = ["none", "lz4", "zstd", "snappy"]
REAL = ["lz4", "zstd", "snappy"]
MIB = 1024 * 1024


@pytest.mark.parametrize("name", ALL)
@given(data=st.binary(max_size=5000), copies=st.integers(0, 50))
def test_round_trip(name: str, data: bytes, copies: int) -> None:
    data = data * copies
    packed = compressors.get(name).compress(data)
    for view in (packed, memoryview(packed), bytearray(packed)):
        assert bytes(bounded_decompress(name, view, len(data), len(data))) == data


@pytest.mark.parametrize("name", ALL)
def test_round_trip_of_a_large_payload(name: str) -> None:
    data = random.Random(4).randbytes(3 * MIB) + bytes(5 * MIB)
    packed = compressors.get(name).compress(memoryview(data))
    assert bytes(bounded_decompress(name, packed, len(data), 8 * MIB)) == data


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [0, 1, 300, 70_000])
@pytest.mark.parametrize("lie", [-300, -1, 1, 2, 5_000, 1_000_000])
def test_a_lie_about_the_size_is_refused(name: str, size: int, lie: int) -> None:
    """T3: neither cut, nor padded with what memory held before."""
    packed = compressors.get(name).compress(b"a" * size)
    with pytest.raises(DecodeFailed) as caught:
        bounded_decompress(name, packed, size + lie, 10 * MIB)
    assert caught.value.compressor == name
    assert caught.value.stated_bytes == size + lie


@pytest.mark.parametrize("name", ALL)
def test_a_stated_size_over_the_limit_is_refused_before_decoding(name: str) -> None:
    """T3: an honest bomb."""
    with pytest.raises(DecodeFailed, match="limit is 100 bytes") as caught:
        bounded_decompress(name, b"never looked at", 101, 100)
    assert caught.value.limit_bytes == 100


@pytest.mark.parametrize("name", REAL)
@given(data=st.binary(max_size=400), stated=st.integers(0, 2000))
def test_garbage_is_decode_failed_and_nothing_else(name: str, data: bytes, stated: int) -> None:
    try:
        result = bounded_decompress(name, data, stated, 2000)
    except DecodeFailed:
        return
    assert len(result) == stated


@pytest.mark.parametrize("name", REAL)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_damage_never_changes_the_length(name: str, where: float, flip: int) -> None:
    packed = bytearray(compressors.get(name).compress(bytes(range(256)) * 20))
    packed[int(where * len(packed))] ^= flip
    try:
        result = bounded_decompress(name, packed, 5120, 5120)
    except DecodeFailed:
        return
    assert len(result) == 5120


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("damage", ["cut", "tail", "empty", "half"])
def test_cut_and_extended_streams_are_refused(name: str, damage: str) -> None:
    packed = compressors.get(name).compress(b"some words " * 1000)
    broken = {
        "cut": packed[:-1],
        "tail": packed + b"\xff",
        "empty": b"",
        "half": packed[: len(packed) // 2],
    }[damage]
    with pytest.raises(DecodeFailed):
        bounded_decompress(name, broken, 11_000, MIB)


@pytest.mark.parametrize("name", REAL)
def test_a_bomb_stays_within_memory(name: str) -> None:
    """T3: a 400 MB bomb that states 1 KB, then one that states the limit, in a small process."""
    program = f"""
        import resource
        from penstock.model.compressor import bounded_decompress, compressors
        from penstock.model.errors import DecodeFailed
        bomb = compressors.get({name!r}).compress(bytes(400_000_000))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, used + 64 * 2**20))
        for stated in (1000, 16 * 2**20):
            try:
                bounded_decompress({name!r}, bomb, stated, 16 * 2**20)
            except DecodeFailed as error:
                assert not isinstance(error.__cause__, MemoryError), repr(error.__cause__)
                print("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "refused\nrefused\n", done.stderr


def test_an_unknown_compressor_says_what_there_is() -> None:
    """Issue 2, bad input: a compressor that is not there."""
    with pytest.raises(UnknownCompressor, match="lz4, none, snappy, zstd") as caught:
        bounded_decompress("brotli", b"", 0, 0)
    assert caught.value.name == "brotli"
    assert caught.value.known == ["lz4", "none", "snappy", "zstd"]


def test_a_foreign_compressor_that_fails_is_decode_failed() -> None:
    class Odd(NoCompressor):
        name = "odd"  # type: ignore[misc]

        def decompress(self, data: object, size: int) -> bytes:
            raise RuntimeError("no")

    compressors.register("odd", Odd())
    try:
        with pytest.raises(DecodeFailed, match="no"):
            bounded_decompress("odd", b"", 0, 0)
        with pytest.raises(AlreadyExists):
            compressors.register("odd", Odd())
    finally:
        del compressors._made["odd"]


def test_worth_compressing_tells_text_from_noise() -> None:
    noise = random.Random(5).randbytes(100_000)
    for name in REAL:
        compressor = compressors.get(name)
        assert worth_compressing(b'{"id": 1234, "state": "paid"}' * 500, compressor)
        assert not worth_compressing(noise, compressor)
        assert not worth_compressing(b"", compressor)
    assert not worth_compressing(b"a" * 10_000, compressors.get("none"))


def test_worth_compressing_looks_past_a_plain_header() -> None:
    noise = random.Random(6).randbytes(100_000)
    assert not worth_compressing(bytes(SAMPLE_BYTES) + noise, compressors.get("lz4"))


def test_a_registry_finds_entry_points_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """T3: registered by entry point."""
    from importlib.metadata import EntryPoint

    calls = []

    def declared(group: str) -> list[EntryPoint]:
        calls.append(group)
        return [
            EntryPoint("none", "penstock.model.compressor:NoCompressor", group),
            EntryPoint("other", "penstock.model.compressor:NoCompressor", group),
            EntryPoint("gone", "penstock.model.nowhere:Gone", group),
        ]

    monkeypatch.setattr("penstock.model.registry.entry_points", declared)
    empty = Registry[NoCompressor]("example.group", {}, UnknownCompressor)
    assert calls == []
    assert isinstance(empty.get("none"), NoCompressor)
    assert empty.get("none") is empty.get("none")
    assert calls == ["example.group"]
    with pytest.raises(UnknownCompressor, match="calls itself 'none'"):
        empty.get("other")
    with pytest.raises(UnknownCompressor, match="does not load"):
        empty.get("gone")
    assert empty.names() == ["gone", "none", "other"]


def test_a_built_in_is_never_replaced_by_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.model.registry.entry_points", lambda group: pytest.fail("metadata was read")
    )
    parts = Registry[NoCompressor]("example.group", {"none": NoCompressor}, UnknownCompressor)
    assert isinstance(parts.get("none"), NoCompressor)

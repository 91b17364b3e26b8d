"""Tokens: unique, ordered in time, consecutive within a batch."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.errors import InvalidInput
from penstock.model.token import (
    COUNTER_BITS,
    TOKEN_BYTES,
    TokenSource,
    expand,
    make_token,
    parse_token,
    token_at,
    token_of_key,
)

BASES = st.binary(min_size=16, max_size=16).filter(lambda base: base < b"\xff" * 12)


@given(BASES, st.integers(1, 300))
def test_expand_is_token_at_for_every_index(base: bytes, count: int) -> None:
    joined = expand(base, count)
    assert len(joined) == count * TOKEN_BYTES
    for index in range(count):
        assert joined[index * 16 : index * 16 + 16] == token_at(base, index)


def test_expand_carries_over_the_64_bit_boundary() -> None:
    base = bytes(8) + b"\xff" * 8
    assert expand(base, 3) == base + (1 << 64).to_bytes(16, "big") + ((1 << 64) + 1).to_bytes(
        16, "big"
    )


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=5, max_size=8))
def test_a_token_is_a_version_7_uuid_that_holds_its_time(now_ms: int, entropy: bytes) -> None:
    token = make_token(now_ms, entropy)
    as_uuid = uuid.UUID(bytes=token)
    assert as_uuid.version == 7
    assert as_uuid.variant == uuid.RFC_4122
    assert int.from_bytes(token[:6], "big") == now_ms
    assert int.from_bytes(token[8:], "big") & ((1 << COUNTER_BITS) - 1) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 1_000)), max_size=60))
def test_a_source_never_gives_a_token_twice_even_when_the_clock_goes_back(takes) -> None:
    source = TokenSource(b"seedseed")
    given_out: list[tuple[int, int]] = []
    for now_ms, count in takes:
        first = int.from_bytes(source.take(now_ms, count), "big")
        for start, stop in given_out:
            assert first + count <= start or stop <= first
        given_out.append((first, first + count))


def test_sources_with_other_entropy_differ() -> None:
    assert TokenSource(b"a" * 8).take(1, 1) != TokenSource(b"b" * 8).take(1, 1)


def test_tokens_sort_by_their_time() -> None:
    source = TokenSource(b"seedseed")
    tokens = [source.take(now_ms, 1) for now_ms in range(1_000, 1_050)]
    assert tokens == sorted(tokens)


def test_a_token_is_accepted_as_bytes_uuid_and_text() -> None:
    token = make_token(1, b"12345")
    as_uuid = uuid.UUID(bytes=token)
    assert parse_token(token) == parse_token(as_uuid) == parse_token(str(as_uuid)) == token


@pytest.mark.parametrize("bad", [b"short", "no uuid", 7, None, b"x" * 17])
def test_what_is_no_token_is_refused(bad) -> None:
    with pytest.raises(InvalidInput, match="token is 16 bytes"):
        parse_token(bad)


@given(st.text(max_size=50), st.text(max_size=50))
def test_an_idempotency_key_always_makes_the_same_token(one: str, two: str) -> None:
    assert len(token_of_key(one)) == TOKEN_BYTES
    assert (token_of_key(one) == token_of_key(two)) == (one == two)

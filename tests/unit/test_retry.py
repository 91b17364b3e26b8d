"""Retry: the ladder of row X4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.retry import Retry
from penstock.model.errors import InvalidInput


def test_the_default_is_the_ladder_of_x4() -> None:
    retry = Retry.default()
    assert [retry.delay_s(attempt) for attempt in range(1, 5)] == [0.1, 1.0, 10.0, 60.0]
    assert [retry.exhausted(attempt) for attempt in range(1, 6)] == [False] * 4 + [True]


def test_the_last_step_repeats() -> None:
    retry = Retry((10, 20), max_attempts=9)
    assert [retry.delay_s(attempt) for attempt in (1, 2, 3, 8)] == [0.01, 0.02, 0.02, 0.02]


def test_none_gives_up_after_one_attempt() -> None:
    assert Retry.none().exhausted(1)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 50))
def test_every_attempt_before_the_last_has_a_wait_from_the_ladder(ladder, attempts) -> None:
    retry = Retry(tuple(ladder), attempts)
    for attempt in range(1, attempts):
        assert round(retry.delay_s(attempt) * 1_000) in ladder
        assert not retry.exhausted(attempt)
    assert retry.exhausted(attempts)


@pytest.mark.parametrize(
    "wrong", [{"max_attempts": 0}, {"max_attempts": 1_001}, {"ladder_ms": (-1,)}, {"ladder_ms": ()}]
)
def test_what_makes_no_ladder_is_refused(wrong) -> None:
    with pytest.raises(InvalidInput):
        Retry(**wrong)

"""Lease: what became of each event, and why a settle call is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.lease import (
    ACKED,
    EXPIRED,
    FENCED,
    NACKED,
    OUT,
    REJECTED,
    RETURNED,
    STATES,
    Lane,
    Lease,
    Member,
    Run,
)
from penstock.model.errors import AlreadySettled, Fenced, LeaseExpired


def lease(count: int = 5) -> Lease:
    return Lease(7, Run(Lane("orders", 0, 0, count), 100, count, 2), Member("m", 10))


@given(st.sets(st.integers(0, 29), min_size=1))
def test_acked_runs_cover_exactly_what_was_acked(indices) -> None:
    held = lease(30)
    held.dirty = sorted(indices, key=lambda index: hash((index, 3)))
    runs = held.acked_runs()
    covered = [o for at in range(0, len(runs), 2) for o in range(runs[at], runs[at] + runs[at + 1])]
    assert covered == sorted(100 + index for index in indices)
    assert held.dirty == []


def test_the_attempt_is_one_more_than_were_made() -> None:
    assert lease().attempt == 3


def test_only_what_was_handed_out_can_expire() -> None:
    held = lease()
    held.hand(0, 10.0)
    held.hand(2, 20.0)  # 1 was filtered out before it could be handed over
    assert held.expiring(15.0) == [0]
    assert held.expiring(25.0) == [0, 2]
    assert held.next_deadline() == 10.0
    held.states[0] = ACKED
    assert held.expiring(25.0) == [2]
    assert held.deadlines[1] == math.inf
    held.states[2] = ACKED
    assert held.next_deadline() in (None, math.inf)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (ACKED, AlreadySettled), (NACKED, AlreadySettled), (REJECTED, AlreadySettled),
        (EXPIRED, LeaseExpired), (RETURNED, LeaseExpired), (FENCED, Fenced),
    ],
)  # fmt: skip
def test_every_state_but_out_has_its_refusal(state: int, error) -> None:
    held = lease()
    held.states[1] = state
    refusal = held.refusal(1)
    assert type(refusal) is error
    assert refusal.id == "orders/0/101"
    assert STATES[OUT] == "dispatched"

"""The token bucket: exact waits, a stated burst, no tokens from a clock that runs back (T11)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.admission import AdmissionLimits, Bucket, TenantLimits, check_limits
from penstock.model.errors import InvalidSettings


@given(
    st.floats(0.01, 1e6),
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), max_size=20),
)
def test_waiting_as_long_as_told_is_enough_and_less_is_not(
    rate: float, capacity: float, calls: list[tuple[float, float]]
) -> None:
    bucket, now = Bucket(rate, capacity), 1_000.0
    for part, pause in calls:
        now += pause
        amount = part * capacity
        wait_s = bucket.wait_s(amount, now)
        assert wait_s is not None
        if wait_s > 0.001:
            assert bucket.wait_s(amount, now + wait_s * 0.99) != 0.0
        now += wait_s
        assert bucket.wait_s(amount, now) == pytest.approx(0.0, abs=1e-6)
        bucket.take(amount)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=60))
def test_no_clock_mints_more_than_rate_and_burst(times: list[float]) -> None:
    """Whatever the clock does, what passes is at most the burst plus the rate over its span."""
    bucket, passed = Bucket(rate_per_s=10, capacity=5), 0
    for now in times:
        while bucket.wait_s(1, now) == 0.0:
            bucket.take(1)
            passed += 1
    assert passed <= 5 + 10 * (max(times) - times[0]) + 0.001


def test_a_step_back_is_added_to_the_wait() -> None:
    bucket = Bucket(rate_per_s=10, capacity=5)
    assert bucket.wait_s(5, 100.0) == 0.0
    bucket.take(5)
    assert bucket.wait_s(1, 40.0) == pytest.approx(60.1)
    assert bucket.wait_s(1, 100.1) == 0.0


def test_a_step_back_takes_nothing_away() -> None:
    bucket = Bucket(rate_per_s=10, capacity=5)
    assert bucket.wait_s(1, 100.0) == 0.0
    assert bucket.wait_s(5, 40.0) == 0.0


def test_more_than_the_burst_never_fits() -> None:
    assert Bucket(10, 5).wait_s(5.5, 0.0) is None


def test_a_slow_rate_still_lets_single_events_through() -> None:
    bucket = Bucket.of(None, rate_per_s=0.1, burst=0.1)
    assert bucket is not None
    assert bucket.wait_s(1, 0.0) == 0.0
    bucket.take(1)
    assert bucket.wait_s(1, 0.0) == pytest.approx(10.0)


def test_a_rate_of_zero_lets_nothing_through() -> None:
    bucket = Bucket.of(None, rate_per_s=0.0, burst=0.0)
    assert bucket is not None
    assert bucket.wait_s(1, 5.0) is None


@pytest.mark.parametrize(
    "limits",
    [
        AdmissionLimits(max_global_ingress=-1),
        AdmissionLimits(tenants={"acme": TenantLimits(events_per_s=float("nan"))}),
        AdmissionLimits(default=TenantLimits(burst_s=float("inf"))),
    ],
)
def test_a_limit_that_is_no_number_is_refused(limits: AdmissionLimits) -> None:
    with pytest.raises(InvalidSettings) as caught:
        check_limits(limits)
    assert caught.value.name in ("max_global_ingress", "events_per_s", "burst_s")

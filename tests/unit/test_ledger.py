"""Ledger: against a dictionary that knows every offset."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.state import Ledger

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["leased", "acked", "retried"]),
        st.integers(0, 30), st.integers(1, 8), st.integers(0, 3), st.sampled_from([0, 100]),
    ),
    max_size=25,
)  # fmt: skip


class Naive:
    """Every offset that is open, with its attempts and wait."""

    def __init__(self, start: int) -> None:
        self.high = start
        self.open: dict[int, tuple[int, int]] = {}

    def _reach(self, start: int, count: int) -> None:
        for offset in range(self.high, start):
            self.open[offset] = (0, 0)
        self.high = max(self.high, start + count)

    def put(self, start: int, count: int, made: int, delay_ms: int) -> None:
        self._reach(start, count)
        for offset in range(start, start + count):
            self.open[offset] = (made, delay_ms)

    def acked(self, start: int, count: int) -> None:
        for offset in range(start, start + count):
            self.open.pop(offset, None)


def spread(ledger: Ledger) -> dict[int, tuple[int, int]]:
    found = {}
    last = -1
    for run in ledger:
        assert run.start < run.stop
        assert run.start >= last, "runs overlap or are out of order"
        last = run.stop
        for offset in range(run.start, run.stop):
            found[offset] = (run.made, run.delay_ms)
    return found


@settings(max_examples=200)
@given(st.integers(0, 5), ACTIONS)
def test_a_ledger_is_a_map_of_open_offsets(first: int, actions) -> None:
    ledger, naive = Ledger(first), Naive(first)
    for kind, start, count, made, delay_ms in actions:
        if kind == "leased":
            ledger.leased(start, count, made)
            naive.put(start, count, made, 0)
        elif kind == "retried":
            ledger.retried(start, count, made, delay_ms)
            naive.put(start, count, made, delay_ms)
        else:
            ledger.acked(start, count)
            naive.acked(start, count)
        assert spread(ledger) == naive.open
        assert ledger.high == naive.high
        assert ledger.outstanding() == len(naive.open)
        assert ledger.floor() == min(naive.open, default=naive.high)
    again = Ledger.load(ledger.dump())
    assert again.dump() == ledger.dump()
    assert spread(again) == naive.open


def test_a_million_consecutive_leases_are_one_run() -> None:
    ledger = Ledger(0)
    for start in range(0, 100_000, 100):
        ledger.leased(start, 100, 1)
    assert len(ledger.open()) == 1
    ledger.acked(0, 100_000)
    assert ledger.open() == []
    assert ledger.dump() == [100_000]

"""Timers: exact order, one timer a key, bounded leftovers (T7)."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core.schedule import COMPACT_MIN, Timers


def test_equal_times_come_in_the_order_they_were_set() -> None:
    timers: Timers[str] = Timers()
    for key in "cabd":
        timers.set(key, 1.0)
    timers.cancel("b")
    assert timers.pop_due(1.0, limit=2) == [(1.0, "c"), (1.0, "a")]
    assert timers.pop_due(1.0) == [(1.0, "d")]


def test_a_limit_leaves_the_rest() -> None:
    timers: Timers[int] = Timers()
    for key in range(10):
        timers.set(key, float(key // 3))
    assert [key for _, key in timers.pop_due(99.0, limit=4)] == [0, 1, 2, 3]
    assert timers.pop_due(99.0, limit=0) == []
    assert [key for _, key in timers.pop_due(99.0)] == [4, 5, 6, 7, 8, 9]
    assert timers.next_due() is None


def test_cancelled_timers_do_not_pile_up() -> None:
    timers: Timers[int] = Timers()
    for key in range(50_000):
        timers.set(key, float(key))
        timers.cancel(key)
        assert timers._entries <= COMPACT_MIN + 1
    for turn in range(50_000):
        timers.set(1, float(turn))
    assert timers._entries <= COMPACT_MIN + 1
    for _ in range(5_000):
        timers.set(2, 5.0)
        timers.cancel(2)
    assert len(timers._times) <= COMPACT_MIN + 1
    assert timers.pop_due(1e9) == [(49_999.0, 1)]


def test_a_moved_timer_does_not_fire_at_its_old_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 8.0)
    assert timers.pop_due(5.0) == []
    assert timers.due_of("a") == 8.0
    assert timers.pop_due(8.0) == [(8.0, "a")]


class TimersMatchAList(RuleBasedStateMachine):
    """Everything a Timers does, a list of (due, turn, key) does too, slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: Timers[int] = Timers()
        self.model: dict[int, int] = {}

    @rule(key=st.integers(0, 20), due=st.integers(0, 8))
    def set(self, key: int, due: int) -> None:
        self.timers.set(key, due)
        self.model[key] = due

    @rule(key=st.integers(0, 20))
    def cancel(self, key: int) -> None:
        assert self.timers.cancel(key) == (self.model.pop(key, None) is not None)

    @rule(now=st.integers(0, 8), limit=st.none() | st.integers(0, 5))
    def pop(self, now: int, limit: int | None) -> None:
        popped = self.timers.pop_due(now, limit)
        due = sorted(due for due in self.model.values() if due <= now)[:limit]
        assert [at for at, _ in popped] == due
        for at, key in popped:
            assert self.model.pop(key) == at

    @rule()
    def ask(self) -> None:
        assert self.timers.next_due() == min(self.model.values(), default=None)

    @rule()
    def list_all(self) -> None:
        assert sorted(self.timers.items()) == sorted((d, k) for k, d in self.model.items())

    @invariant()
    def same(self) -> None:
        assert len(self.timers) == len(self.model)
        assert all(self.timers.due_of(key) == due for key, due in self.model.items())


TestTimersMatchAList = TimersMatchAList.TestCase

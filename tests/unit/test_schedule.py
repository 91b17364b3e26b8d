"""Durations, moments, delayed and recurring events (T7)."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import schedule as module
from penstock.core.schedule import (
    Definition,
    Delayed,
    Recurring,
    Schedule,
    ScheduleState,
    parse_duration,
    parse_every,
)
from penstock.model.errors import Deferred, InvalidSchedule, UnknownSchedule

S = 1_000_000
MINUTE = 60 * S
HOUR = 60 * MINUTE


@pytest.mark.parametrize(
    ("value", "us"),
    [
        ("90s", 90 * S),
        ("5m", 5 * MINUTE),
        ("1h30m", 90 * MINUTE),
        ("1h 30m", 90 * MINUTE),
        ("250ms", 250_000),
        ("7us", 7),
        ("1.5s", 1_500_000),
        ("2d", 48 * HOUR),
        ("1w", 168 * HOUR),
        (3, 3 * S),
        (0.1, 100_000),
        (timedelta(minutes=2), 2 * MINUTE),
        ("0s", 0),
        ("5", 5 * S),
    ],
)
def test_durations(value: str | float | timedelta, us: int) -> None:
    assert parse_duration(value) == us


@pytest.mark.parametrize(
    "value",
    [
        "",
        "h",
        "5 parsecs",
        "-5s",
        "1h30",
        "1..5s",
        "9999999d",
        -1,
        float("nan"),
        float("inf"),
        True,
        None,
        "٣s",
    ],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        parse_duration(value)  # type: ignore[arg-type]
    assert caught.value.parameter == "duration"


def test_a_period_has_a_lower_bound() -> None:
    assert parse_every("1ms") == 1_000
    with pytest.raises(InvalidSchedule):
        parse_every("999us")
    with pytest.raises(InvalidSchedule):
        parse_every(0)


def test_delayed_events_come_in_order_of_time_and_once() -> None:
    delayed = Delayed()
    for offset, due_us in [(1, 30), (2, 10), (3, 20), (4, 10)]:
        delayed.add(offset, due_us)
    assert delayed.due(9) == []
    assert delayed.due(20, limit=2) == [2, 4]
    assert delayed.due(20) == [3]
    assert delayed.due(20) == []
    assert delayed.next_due_us() == 30


def test_an_event_handed_out_but_not_confirmed_survives_a_crash() -> None:
    delayed = Delayed()
    for offset in range(4):
        delayed.add(offset, 10 + offset)
    assert delayed.due(12) == [0, 1, 2]
    delayed.fired([0, 2])
    revived = Delayed()
    revived.restore(delayed.snapshot())
    assert revived.snapshot() == [(11, 1), (13, 3)]
    assert revived.due(99) == [1, 3]
    revived.fired([1, 3])
    assert len(revived) == 0
    assert revived.snapshot() == []


def test_the_lowest_waiting_offset_counts_those_being_fired() -> None:
    delayed = Delayed()
    assert delayed.lowest() is None
    delayed.add(9, due_us=1_000)
    delayed.add(4, due_us=2_000)
    delayed.add(2, due_us=500)
    assert delayed.lowest() == 2
    assert delayed.due(600) == [2]
    assert delayed.lowest() == 2
    delayed.fired([2])
    assert delayed.lowest() == 4


def test_a_clock_that_jumps_back_fires_no_delayed_event_twice() -> None:
    delayed = Delayed()
    delayed.add(1, HOUR)
    assert delayed.due(HOUR) == [1]
    delayed.fired([1])
    assert delayed.due(0) == delayed.due(2 * HOUR) == []


def test_delayed_events_can_be_moved_and_cancelled() -> None:
    delayed = Delayed()
    delayed.add(1, 10)
    delayed.add(2, 10)
    assert delayed.due(10) == [1, 2]
    delayed.add(1, 20)
    assert delayed.cancel(2)
    assert not delayed.cancel(2)
    assert delayed.due(20) == [1]
    delayed.add(3, 30)
    delayed.fired([3])
    assert delayed.due(30) == []


def test_the_number_of_delayed_events_is_bounded() -> None:
    delayed = Delayed(max_scheduled=2)
    delayed.check_room(2)
    delayed.add(1, 10)
    with pytest.raises(Deferred) as caught:
        delayed.check_room(2)
    assert (caught.value.limit, caught.value.retry_after_s) == ("max_scheduled", 1.0)


def every(us: int, **more: object) -> Definition:
    return Definition(id="beat", topic="clock.beat", every_us=us, **more)  # type: ignore[arg-type]


def test_a_period_keeps_its_grid() -> None:
    recurring = Recurring()
    assert recurring.put(every(MINUTE), now_us=5).next_us == MINUTE + 5
    assert recurring.due(MINUTE + 4) == []
    [(definition, due_us)] = recurring.due(MINUTE + 9)
    assert (due_us, definition.next_us, definition.missed) == (MINUTE + 5, 2 * MINUTE + 5, 0)


@pytest.mark.parametrize("timing", [{"every_us": HOUR}, {"cron": "@hourly"}], ids=["every", "cron"])
def test_a_long_pause_fires_once_and_counts_the_rest(timing: dict[str, object]) -> None:
    recurring = Recurring()
    recurring.put(Definition(id="a", topic="t", **timing), now_us=0)  # type: ignore[arg-type]
    [(definition, due_us)] = recurring.due(10 * HOUR + 7)
    assert due_us == HOUR
    assert definition.missed == 9
    assert definition.next_us == 11 * HOUR
    assert recurring.due(10 * HOUR + 8) == []
    recurring.due(15 * HOUR)
    assert recurring.get("a").missed == 9 + 4


@pytest.mark.parametrize(
    "timing", [{"every_us": MINUTE}, {"cron": "* * * * *"}], ids=["every", "cron"]
)
@given(jumps=st.lists(st.integers(-90, 90), max_size=40))
def test_no_tick_fires_twice_whatever_the_clock_does(
    timing: dict[str, object], jumps: list[int]
) -> None:
    recurring, now = Recurring(), 5 * HOUR
    recurring.put(Definition(id="a", topic="t", **timing), now)  # type: ignore[arg-type]
    ticks = []
    for jump in jumps:
        now = max(0, now + jump * MINUTE)
        for definition, due_us in recurring.due(now):
            assert due_us <= now < definition.next_us
            ticks.append(due_us)
        copy = Recurring()
        copy.restore(recurring.definitions())
        recurring = copy
    assert ticks == sorted(set(ticks))


def test_declaring_the_same_again_keeps_the_next_firing() -> None:
    recurring = Recurring()
    recurring.put(every(HOUR), now_us=0)
    recurring.due(3 * HOUR)
    again = recurring.put(every(HOUR, payload=b"new"), now_us=3 * HOUR + 5)
    assert (again.next_us, again.missed, again.payload) == (4 * HOUR, 2, b"new")
    assert recurring.put(every(MINUTE), now_us=3 * HOUR + 5).next_us == 3 * HOUR + MINUTE + 5


def test_a_disabled_definition_is_silent_and_makes_nothing_up() -> None:
    recurring = Recurring()
    recurring.put(every(HOUR), now_us=0)
    recurring.put(every(HOUR, enabled=False), now_us=1)
    assert recurring.due(5 * HOUR) == []
    assert recurring.next_due_us() is None
    back = recurring.put(every(HOUR), now_us=5 * HOUR)
    assert (back.next_us, back.missed) == (6 * HOUR, 0)


def test_switching_off_and_on_under_a_clock_that_went_back_repeats_no_tick() -> None:
    recurring = Recurring()
    recurring.put(every(HOUR), now_us=0)
    assert [due for _, due in recurring.due(HOUR)] == [HOUR]
    recurring.put(every(HOUR, enabled=False), now_us=HOUR)
    assert recurring.put(every(HOUR), now_us=0).next_us == 2 * HOUR


def test_removing_and_asking_for_what_is_not_there() -> None:
    recurring = Recurring()
    recurring.put(every(HOUR), now_us=0)
    assert recurring.remove("beat").id == "beat"
    assert recurring.due(9 * HOUR) == []
    for call in (recurring.remove, recurring.get):
        with pytest.raises(UnknownSchedule) as caught:
            call("beat")
        assert caught.value.id == "beat"


def test_a_definition_that_says_both_or_neither_or_nonsense_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recurring = Recurring()
    for wrong in (
        Definition(id="a", topic="t"),
        Definition(id="a", topic="t", cron="@daily", every_us=HOUR),
        Definition(id="a", topic="t", cron="0 0 31 2 *"),
        Definition(id="a", topic="t", every_us=5),
        Definition(id="a", topic="t", every_us=-HOUR),
    ):
        with pytest.raises(InvalidSchedule):
            recurring.put(wrong, now_us=0)
    assert len(recurring) == 0
    monkeypatch.setattr(module, "MAX_RECURRING", 1)
    recurring.put(Definition(id="a", topic="t", cron="@daily"), now_us=0)
    with pytest.raises(InvalidSchedule, match="remove one"):
        recurring.put(every(HOUR), now_us=0)
    recurring.put(Definition(id="a", topic="t", cron="@hourly"), now_us=0)


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_a_schedule_survives_a_restart(codec: object) -> None:
    schedule = Schedule()
    schedule.delayed.add(5, 2 * HOUR)
    schedule.recurring.put(every(HOUR, payload=b"\xff", headers={"a": "b"}), now_us=0)
    schedule.recurring.put(Definition(id="c", topic="t", cron="30 * * * *"), now_us=0)
    stored = codec.encode(schedule.snapshot())  # type: ignore[attr-defined]
    revived = Schedule()
    revived.restore(codec.decode(stored, type=ScheduleState))  # type: ignore[attr-defined]
    assert revived.snapshot() == schedule.snapshot()
    assert revived.next_due_us() == HOUR // 2
    fired = [(definition.id, due) for definition, due in revived.recurring.due(HOUR)]
    assert fired == [("c", HOUR // 2), ("beat", HOUR)]
    assert revived.delayed.due(2 * HOUR) == [5]


def test_an_empty_schedule_waits_for_nothing() -> None:
    assert Schedule().next_due_us() is None

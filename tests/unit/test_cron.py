"""Cron expressions against a brute-force clock, and the ones that must be refused (T7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cron import MAX_CRON_CHARS, MINUTE_US, parse_cron
from penstock.model.errors import InvalidSchedule


def us(text: str) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def text(value: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(microseconds=value)).isoformat(" ", "minutes")


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("* * * * *", "2026-11-15 10:00", "2026-11-15 10:01"),
        ("*/15 * * * *", "2026-11-15 10:46", "2026-11-15 11:00"),
        ("5/20 * * * *", "2026-11-15 10:26", "2026-11-15 10:45"),
        ("0 9-17/4 * * *", "2026-11-15 13:00", "2026-11-15 17:00"),
        ("30 9 * * mon-fri", "2026-11-13 09:30", "2026-11-16 09:30"),
        ("0 0 * * fri-sun", "2026-11-14 00:00", "2026-11-15 00:00"),
        ("0 0 * * 7", "2026-11-15 00:00", "2026-11-22 00:00"),
        ("0 0 * * 0", "2026-11-15 00:00", "2026-11-22 00:00"),
        ("0 0 1,15 jan,Jul *", "2026-01-15 00:00", "2026-07-01 00:00"),
        ("59 23 31 12 *", "2026-12-31 23:59", "2027-12-31 23:59"),
        ("0 0 29 2 *", "2096-03-01 00:00", "2104-02-29 00:00"),
        ("@hourly", "2026-11-15 10:00", "2026-11-15 11:00"),
        ("@daily", "2026-11-15 10:00", "2026-11-16 00:00"),
        ("@weekly", "2026-11-15 00:00", "2026-11-22 00:00"),
        ("@monthly", "2026-11-15 10:00", "2026-12-01 00:00"),
        ("@yearly", "2026-11-15 10:00", "2027-01-01 00:00"),
    ],
)
def test_the_next_firing(expression: str, after: str, expected: str) -> None:
    assert text(parse_cron(expression).next_after(us(after))) == expected


def test_two_restricted_day_fields_mean_either() -> None:
    cron = parse_cron("0 9 1 * mon")
    found, at = [], us("2026-11-28 00:00")
    for _ in range(3):
        at = cron.next_after(at)
        found.append(text(at))
    assert found == ["2026-11-30 09:00", "2026-12-01 09:00", "2026-12-07 09:00"]


def test_a_day_field_that_begins_with_a_star_means_both() -> None:
    cron = parse_cron("0 9 */2 * mon")
    assert text(cron.next_after(us("2026-11-09 09:00"))) == "2026-11-23 09:00"


def test_the_rarest_date_is_found() -> None:
    """29 February on a Sunday, across 2100, which is no leap year."""
    cron = parse_cron("0 0 29 2 */7")
    assert text(cron.next_after(us("2088-02-29 00:00"))) == "2128-02-29 00:00"


def test_a_moment_inside_a_minute_counts_as_that_minute() -> None:
    assert parse_cron("* * * * *").next_after(61_500_000) == 2 * MINUTE_US


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 31 2 *",
        "0 0 31 4,6,9,11 *",
        "0 0 30 2 */1",
        "",
        "* * * *",
        "* * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "* * * foo *",
        "mon * * * *",
        "*/0 * * * *",
        "*/90 * * * *",
        "*/x * * * *",
        "5-1 * * * *",
        "1,,2 * * * *",
        "-1 * * * *",
        "² * * * *",
        "@reboot",
        "1-2-3 * * * *",
        "1/2/3 * * * *",
        "," * (MAX_CRON_CHARS + 1),
    ],
)
def test_what_cannot_be_scheduled_is_refused(expression: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        parse_cron(expression)
    assert caught.value.why


def test_a_restricted_weekday_saves_an_impossible_date() -> None:
    assert text(parse_cron("0 0 31 2 mon").next_after(us("2026-01-01 00:00"))) == "2026-02-02 00:00"


def test_a_time_past_the_calendar_is_refused() -> None:
    with pytest.raises(InvalidSchedule):
        parse_cron("* * * * *").next_after(10**21)
    with pytest.raises(InvalidSchedule):
        parse_cron("@daily").next_after(us("9999-12-31 00:00"))


FIELDS = st.tuples(
    st.sampled_from(["*", "*/7", "0", "3,33", "10-20/5", "58"]),
    st.sampled_from(["*", "*/5", "0", "23", "8-10"]),
    st.sampled_from(["*", "*/9", "1", "13", "28-31"]),
    st.sampled_from(["*", "2", "1-6", "nov,dec"]),
    st.sampled_from(["*", "*/3", "0", "fri", "mon-wed", "6-7"]),
)


def brute(expression: str, moment: datetime) -> bool:
    """A second reading of the rules, field by field, that shares no code with the first."""

    def holds(field: str, value: int, low: int, high: int) -> bool:
        names = "sun mon tue wed thu fri sat" if high == 6 else ""
        for number, name in enumerate(names.split()):
            field = field.replace(name, str(number))
        field = field.replace("nov", "11").replace("dec", "12")
        for term in field.split(","):
            span, _, step = term.partition("/")
            first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
            values = range(int(first), int(last or first) + 1, int(step or 1))
            if value in values or (high == 6 and value == 0 and 7 in values):
                return True
        return False

    minute, hour, day, month, weekday = expression.split()
    by_day = holds(day, moment.day, 1, 31)
    by_weekday = holds(weekday, moment.isoweekday() % 7, 0, 6)
    days = all if "*" in day[0] + weekday[0] else any
    return (
        holds(minute, moment.minute, 0, 59)
        and holds(hour, moment.hour, 0, 23)
        and holds(month, moment.month, 1, 12)
        and days((by_day, by_weekday))
    )


@settings(max_examples=60, deadline=None)
@given(FIELDS, st.integers(0, 10 * 365 * 1440))
def test_it_agrees_with_a_clock_that_tries_every_minute(
    fields: tuple[str, ...], minute: int
) -> None:
    expression = " ".join(fields)
    cron = parse_cron(expression)
    start = datetime(2020, 1, 1) + timedelta(minutes=minute)
    base = us(start.isoformat())
    window = 3 * 1440
    hits = [n for n in range(1, window + 1) if brute(expression, start + timedelta(minutes=n))]
    following = cron.next_after(base)
    if hits:
        assert following == base + hits[0] * MINUTE_US
    else:
        assert following > base + window * MINUTE_US
    assert cron.count(base, base + window * MINUTE_US) == len(hits)


def test_counting_a_broken_clock_ends() -> None:
    assert parse_cron("@daily").count(0, us("9000-01-01 00:00")) == 36_524
    assert parse_cron("@daily").count(5, 5) == 0

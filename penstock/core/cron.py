"""Cron expressions: five fields of text in, the next moment out, always in UTC.

    minute  hour  day-of-month  month  day-of-week
    0-59    0-23  1-31          1-12   0-7 (0 and 7 are Sunday)

Each field is `*`, a value, a range `a-b`, any of these with a step `/n`, or a list of them joined
by commas. Months and weekdays have names (`jan`, `mon`). `@hourly`, `@daily`, `@weekly`, `@monthly`
and `@yearly` stand for the usual five fields.

The two day fields follow Debian's cron: when either begins with `*`, a day must satisfy both; when
both are restricted, a day that satisfies one of them is enough. So `0 9 1 * mon` fires on the first
of the month and on every Monday, while `0 9 */2 * mon` fires on Mondays with an odd date.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import date, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from penstock.model.errors import InvalidSchedule

MAX_CRON_CHARS = 256
"""Length of an expression. The longest useful one, every value listed, is under this."""

MAX_SEARCH_YEARS = 41
"""How far ahead a match is looked for. The rarest possible date, 29 February on a given weekday,
comes back after 40 years at the latest, so what is not found in 41 years never happens."""

MAX_COUNT_DAYS = 36_525
"""How many days `Cron.count` looks at: a century, so that a broken clock cannot stall the caller."""

KEPT_CRONS = 1_024
"""Expressions that stay parsed: every firing of a schedule needs its own again. A dense one takes
40 kB."""

MINUTE_US = 60_000_000
DAY_US = 1_440 * MINUTE_US

_EPOCH = date(1970, 1, 1)
_SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def number(self, word: str, text: str) -> int:
        if word in self.names:
            return self.names.index(word) + self.low
        if not (word.isascii() and word.isdigit() and len(word) <= 2):
            raise _invalid(text, f"{word!r} is no {self.name}")
        value = int(word)
        if not self.low <= value <= self.high:
            raise _invalid(text, f"{self.name} {value} is outside {self.low}-{self.high}")
        return value


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of month", 1, 31),
    _Field(
        "month",
        1,
        12,
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    ),
    _Field("day of week", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)


class Cron(msgspec.Struct, frozen=True):
    """A parsed cron expression that answers when it fires next; make one with `parse_cron`."""

    text: str
    minutes_of_day: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    both_days: bool

    def next_after(self, us: int) -> int:
        """The first firing strictly after `us`; both are microseconds since 1970 in UTC.

        >>> parse_cron("*/15 * * * *").next_after(0) == 15 * 60 * 1_000_000
        True
        """
        day, minute = _split(us, self.text)
        if self._on(day):
            index = bisect_right(self.minutes_of_day, minute)
            if index < len(self.minutes_of_day):
                return _join(day, self.minutes_of_day[index])
        following = self._next_day(day)
        if following is None:
            raise _invalid(self.text, f"no such date within {MAX_SEARCH_YEARS} years")
        return _join(following, self.minutes_of_day[0])

    def count(self, after_us: int, until_us: int) -> int:
        """How many firings lie after `after_us` and not after `until_us`, within a century.

        >>> parse_cron("@hourly").count(0, 3 * 3600 * 1_000_000)
        3
        """
        if until_us <= after_us:
            return 0
        day, minute = _split(after_us, self.text)
        last_day, last_minute = _split(until_us, self.text)
        times = self.minutes_of_day
        total = -bisect_right(times, minute) if self._on(day) else 0
        for _ in range(MAX_COUNT_DAYS):
            if day >= last_day:
                break
            total += len(times) if self._on(day) else 0
            day += timedelta(days=1)
        if day == last_day and self._on(day):
            total += bisect_right(times, last_minute)
        return max(total, 0)

    def _on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_date = day.day in self.days
        by_weekday = day.isoweekday() % 7 in self.weekdays
        return (by_date and by_weekday) if self.both_days else (by_date or by_weekday)

    def _next_day(self, day: date) -> date | None:
        # Stopping a year before the calendar ends keeps the sums below inside it.
        last_year = min(day.year + MAX_SEARCH_YEARS, date.max.year - 1)
        if day.year > last_year:
            return None
        day += timedelta(days=1)
        while day.year <= last_year:
            if day.month not in self.months:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            elif self._on(day):
                return day
            else:
                day += timedelta(days=1)
        return None


@lru_cache(maxsize=KEPT_CRONS)
def parse_cron(text: str) -> Cron:
    """Read a cron expression; one that is malformed or can never fire raises InvalidSchedule.

    >>> monday = parse_cron("30 9 * * mon")
    >>> monday.next_after(0) == (4 * 24 * 60 + 9 * 60 + 30) * MINUTE_US
    True
    """
    if len(text) > MAX_CRON_CHARS:
        raise _invalid(text[:40] + "...", f"it is longer than {MAX_CRON_CHARS} characters")
    words = _SHORTHANDS.get(text.strip().lower(), text).lower().split()
    if len(words) != len(_FIELDS):
        raise _invalid(text, f"it has {len(words)} fields, not {len(_FIELDS)}")
    minutes, hours, days, months, weekdays = (
        _parse_field(field, word, text) for field, word in zip(_FIELDS, words, strict=True)
    )
    cron = Cron(
        text=text.strip(),
        minutes_of_day=tuple(sorted(60 * hour + minute for hour in hours for minute in minutes)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(day % 7 for day in weekdays),
        both_days=words[2].startswith("*") or words[4].startswith("*"),
    )
    cron.next_after(0)
    return cron


def _parse_field(field: _Field, word: str, text: str) -> set[int]:
    values: set[int] = set()
    for term in word.split(","):
        span, slash, step_text = term.partition("/")
        low, high = _parse_span(field, span, bool(slash), text)
        step = 1
        if slash:
            if not (step_text.isascii() and step_text.isdigit() and len(step_text) <= 2):
                raise _invalid(text, f"{term!r} has no whole number after the slash")
            step = int(step_text)
            # A step as wide as the field fires once and looks as if it fired every `step`: the
            # usual mistake is */90 for "every 90 minutes".
            if not 1 <= step <= field.high - field.low:
                raise _invalid(text, f"step {step} does not fit a {field.name}; use every=")
        values.update(range(low, high + 1, step))
    return values


def _parse_span(field: _Field, span: str, stepped: bool, text: str) -> tuple[int, int]:
    if span == "*":
        return field.low, field.high
    first, dash, last = span.partition("-")
    low = field.number(first, text)
    if not dash:
        return low, field.high if stepped else low
    high = field.number(last, text)
    if field.high == 7 and high == 0 < low:
        high = 7
    if high < low:
        raise _invalid(text, f"{span!r} runs backwards; write it as two ranges")
    return low, high


def _split(us: int, text: str) -> tuple[date, int]:
    days, rest = divmod(us, DAY_US)
    try:
        return _EPOCH + timedelta(days=days), rest // MINUTE_US
    except OverflowError:
        raise _invalid(text, "the time asked for is outside the years 1 to 9999") from None


def _join(day: date, minute: int) -> int:
    return (day - _EPOCH).days * DAY_US + minute * MINUTE_US


def _invalid(text: str, why: str) -> InvalidSchedule:
    return InvalidSchedule(
        f"cron {text!r} cannot be scheduled: {why}; nothing was stored; "
        "`penstock docs scheduling` describes the five fields",
        expression=text,
        why=why,
    )

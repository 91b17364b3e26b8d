"""What each kind of parameter takes, and the sentence that refuses everything else (A1, A5 to A7)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from enum import IntEnum, StrEnum
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.engine import Subscribe
from penstock.engines.requests import REQUESTS
from penstock.model.errors import InvalidInput
from penstock.model.parameter import (
    checked,
    choice,
    converters,
    count,
    flag,
    many,
    milliseconds,
    moment_us,
    octets,
    place,
    seconds,
    size_bytes,
    text,
    texts,
)

NEW_YEAR = 1_767_225_600
US = 1_000_000
NOW_US = NEW_YEAR * US


class Region(StrEnum):
    """A text that is more than a text: msgspec would write it in another way."""

    NORTH = "north"


class Size(IntEnum):
    """A number that is more than a number."""

    TWO = 2


class Unshowable:
    """A value whose own description fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (5, 5.0), (0.25, 0.25), ("5s", 5.0), ("90", 90.0), ("1h30m", 5_400.0), ("250 ms", 0.25),
        ("2d", 172_800.0), ("1w", 604_800.0), (timedelta(minutes=2), 120.0), (np.float32(1.5), 1.5),
        (Fraction(1, 2), 0.5), (0, 0.0),
    ],
)  # fmt: skip
def test_a_duration_is_a_number_text_or_a_timedelta(value: Any, wanted: float) -> None:
    assert seconds("delay_s", value) == wanted


@pytest.mark.parametrize(
    "value",
    [
        -1, float("nan"), float("inf"), -float("inf"), 1e30, 10**400, True, None, "", "soon", "-5s",
        "5 parsecs", "1h30", b"5s", [5], {}, timedelta(seconds=-1), timedelta.max, "\ud800", object(),
        datetime(2026, 1, 1), Unshowable(), 1j,
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"delay_s is a duration from .*, not ") as caught:
        seconds("delay_s", value)
    assert caught.value.parameter == "delay_s"
    assert caught.value.expected.startswith("a duration")
    assert len(caught.value.value) <= 80


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 1, 1),
        date(2026, 1, 1),
        "2026-01-01T00:00:00Z",
        "2026-01-01T00:00:00",
        "2026-01-01",
        "2025-12-31T19:00:00-05:00",
        f"@{NEW_YEAR}",
    ],
)
def test_a_time_without_a_zone_is_in_utc_wherever_it_comes_from(value: Any) -> None:
    assert moment_us("since", value) == NOW_US
    assert place("start", value, NOW_US) == f"time:{NOW_US}"


def test_how_long_ago_is_a_time_only_where_it_means_something() -> None:
    assert moment_us("since", "2h", NOW_US) == NOW_US - 7_200 * US
    with pytest.raises(InvalidInput, match="deliver_at is a time"):
        moment_us("deliver_at", "2h")


@pytest.mark.parametrize(
    "value",
    [
        NEW_YEAR, float(NEW_YEAR), str(NEW_YEAR), "42", 42, True, None, "", "soon", "2026-13-01",
        "20260101", f"@{NEW_YEAR * 1_000}", float("nan"), b"2026-01-01", "\ud800", [], Unshowable(),
    ],
)  # fmt: skip
def test_a_number_is_never_taken_for_a_time(value: Any) -> None:
    with pytest.raises(InvalidInput, match="since is a time"):
        moment_us("since", value, NOW_US)
    with pytest.raises(
        InvalidInput, match="start is 'earliest', 'latest', an offset such as 'offset:42'"
    ):
        place("start", value, NOW_US)


def test_the_refusal_of_a_number_says_what_it_could_be() -> None:
    with pytest.raises(InvalidInput, match="a plain number could be an offset or a time, not 42"):
        place("start", 42, NOW_US)


@given(st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)))
def test_a_moment_keeps_its_microseconds(moment: datetime) -> None:
    us = moment_us("since", moment)
    assert datetime(1970, 1, 1) + timedelta(microseconds=us) == moment


@pytest.mark.parametrize("value", ["earliest", "latest", "offset:0", "offset:42"])
def test_a_place_has_one_form_for_an_offset(value: str) -> None:
    assert place("to", value, NOW_US) == value


@pytest.mark.parametrize(
    "value", ["offset:-1", "offset:1.5", "offset:", "Earliest", "time:5", "offset:" + "9" * 30]
)
def test_what_is_no_place(value: str) -> None:
    with pytest.raises(InvalidInput):
        place("to", value, NOW_US)


@pytest.mark.parametrize(
    "value", [0, 1_025, 2.0, 2.5, "2", True, None, 10**30, float("nan"), [2], b"2"]
)
def test_a_count_is_a_whole_number(value: Any) -> None:
    with pytest.raises(InvalidInput, match="partitions is a whole number from 1 to 1024, not "):
        count("partitions", value, least=1, most=1_024)


def test_counts_and_texts_become_plain_ones() -> None:
    """msgspec cannot write their subclasses, so none of them goes further."""
    assert [type(count("n", each)) for each in (Size.TWO, np.int64(2))] == [int, int]
    assert type(text("name", Region.NORTH)) is str
    assert text("name", Region.NORTH) == "north"


@pytest.mark.parametrize(
    ("value", "wanted"), [("1GB", 10**9), ("64MiB", 64 << 20), (5, 5), ("5", 5)]
)
def test_a_size_is_a_number_or_text(value: Any, wanted: int) -> None:
    assert size_bytes("retention_bytes", value) == wanted


@pytest.mark.parametrize(
    "value", [0, -1, 1.0, "1.5", "1 parsec", True, 10**30, float("inf"), None, "\ud800"]
)
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(InvalidInput, match="retention_bytes is an amount of bytes"):
        size_bytes("retention_bytes", value)


@pytest.mark.parametrize("value", ["", "x" * 11, 5, None, b"x", "\ud800", ["x"], True])
def test_text_is_bounded_and_fits_utf_8(value: Any) -> None:
    with pytest.raises(InvalidInput, match="reason is text"):
        text("reason", value, least=1, most=10)


@pytest.mark.parametrize("value", ["yes", 1, 0, None, "True", [], np.True_])
def test_only_true_and_false_are_flags(value: Any) -> None:
    with pytest.raises(InvalidInput, match="write_once is True or False, not "):
        flag("write_once", value)


@pytest.mark.parametrize("value", ["x", 1, None, True, ["log"], "\ud800"])
def test_a_choice_names_what_there_is(value: Any) -> None:
    with pytest.raises(InvalidInput, match="mode is one of 'queue', 'log', not "):
        choice("mode", value, allowed=("queue", "log"))


@pytest.mark.parametrize("value", [{"a": 1}, {1: "a"}, [("a", "b")], "ab", None, {"a": "\ud800"}])
def test_a_mapping_is_of_text_to_text(value: Any) -> None:
    with pytest.raises(InvalidInput, match="filter"):
        texts("filter", value)


@pytest.mark.parametrize(
    "value", ["abc", b"abc", {"a": 1}, {"a"}, 5, None, [1], range(20), iter(int, 1)]
)
def test_a_list_is_no_text_no_mapping_and_bounded(value: Any) -> None:
    with pytest.raises(InvalidInput, match="ids"):
        many("ids", value, item=text, most=10)


@pytest.mark.parametrize("value", [500.0, -1, True, "x", float("nan"), None])
def test_milliseconds_are_whole(value: Any) -> None:
    with pytest.raises(InvalidInput):
        milliseconds("ladder_ms", value)
    assert (
        milliseconds("ladder_ms", "0.5s")
        == milliseconds("ladder_ms", timedelta(seconds=0.5))
        == 500
    )


@pytest.mark.parametrize("value", ["text", 5, None, [1], b"x" * 9])
def test_bytes_are_bytes(value: Any) -> None:
    with pytest.raises(InvalidInput, match="payload is bytes"):
        octets("payload", value, most=8)


@pytest.mark.parametrize("kind", [*REQUESTS.values(), Subscribe], ids=lambda kind: kind.__name__)
def test_every_field_of_every_request_has_a_converter(kind: type[msgspec.Struct]) -> None:
    assert set(converters(kind)) == set(kind.__struct_fields__)


def test_a_field_without_one_is_found_when_the_request_is_first_used() -> None:
    class Loose(msgspec.Struct):
        ratio: float = 0.5

    with pytest.raises(TypeError, match="has no converter"):
        checked(Loose())

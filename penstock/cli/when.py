"""Points in time and amounts as people type them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    _Parameter = click.ParamType[Any]
else:
    _Parameter = click.ParamType  # older versions of click have no type argument

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _checked(context: click.Context, option: click.Parameter, convert: Callable[[], Any]) -> Any:
    from penstock.model.errors import InvalidInput

    try:
        return convert()
    except (InvalidInput, ValueError) as error:
        text = error.message if isinstance(error, InvalidInput) else str(error)
        raise click.BadParameter(text, ctx=context, param=option) from None


def parse_moment(text: str) -> datetime:
    """A time: ISO 8601 with a zone, epoch seconds, or how long ago, such as 2h.

    >>> parse_moment("2026-01-01T00:00:00Z")
    datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)
    """
    from penstock.core.schedule import no_moment, parse_duration, parse_when
    from penstock.model.errors import InvalidSchedule

    number = _number(text)
    try:
        if number is not None:
            return _EPOCH + timedelta(microseconds=parse_when(number))
        if text[:4].isdecimal() and text[4:5] == "-":
            return _EPOCH + timedelta(microseconds=parse_when(text))
        return datetime.now(UTC) - timedelta(microseconds=parse_duration(text))
    except InvalidSchedule as error:
        raise no_moment(text, error) from None


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdecimal() else None


class Moment(_Parameter):
    """A point in the past: a time, or how long ago."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to datetime."""
        return value if isinstance(value, datetime) else _checked(ctx, param, lambda: parse_moment(value))  # fmt: skip


class Future(_Parameter):
    """A time to come: ISO 8601 or epoch seconds."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to datetime."""

        def moment() -> datetime:
            from penstock.core.schedule import parse_when

            number = _number(value)
            us = parse_when(value if number is None else number)
            return _EPOCH + timedelta(microseconds=us)

        return value if isinstance(value, datetime) else _checked(ctx, param, moment)


class Position(_Parameter):
    """A place in a log: earliest, latest, an offset, a time, or how long ago."""

    name = "POSITION"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to what the API takes."""
        if not isinstance(value, str) or value in ("earliest", "latest"):
            return value
        if value.isdecimal():
            return int(value)
        return _checked(ctx, param, lambda: parse_moment(value))


class Duration(_Parameter):
    """A length of time in seconds: 250ms, 90s, 5m, 1h30m, 2d, or a plain number."""

    name = "DURATION"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to seconds."""

        def seconds() -> float:
            from penstock.core.schedule import parse_duration

            number = _number(value)
            return parse_duration(value if number is None else number) / 1_000_000

        return value if isinstance(value, int | float) else _checked(ctx, param, seconds)


class Size(_Parameter):
    """An amount of bytes: 64MiB, 1GB, or a plain number."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to bytes."""

        def size() -> int:
            from penstock.model.quantity import parse

            return int(value) if value.isdecimal() else int(parse(value, "bytes"))

        return value if isinstance(value, int) else _checked(ctx, param, size)


MOMENT, FUTURE, POSITION, DURATION, SIZE = Moment(), Future(), Position(), Duration(), Size()

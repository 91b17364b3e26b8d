"""Parameters: values that callers pass, converted and checked once, before any other code uses them.

Every converter takes the name of a parameter, its value and its bounds. It returns the value in the
form that the engines know, or raises InvalidInput with the sentence "<parameter> is <expected>, not
<value>". The fields of requests name their converter in their annotation, and `checked` applies them.

Sizes and durations are text as people write them: "64 MiB", "30d". The unit of a setting is the end
of its name, so `file_bytes` takes "256MiB" and `lease_s` takes "5m", and both are printed back that way.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cache, partial
from itertools import islice
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from penstock.model.errors import InvalidInput

MAX_PAGE = 10_000  # rows of one answer: about 3 MB of JSON, made in well under 100 ms
MAX_SKIP = 1_000_000  # rows before a page: to see more, filter
BYTES = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50},
}
SPANS_MS = {
    "us": Decimal("0.001"),
    "ms": Decimal(1),
    "s": Decimal(1_000),
    "m": Decimal(60_000),
    "min": Decimal(60_000),
    "h": Decimal(3_600_000),
    "d": Decimal(86_400_000),
    "w": Decimal(604_800_000),
}
_MICROSECOND = timedelta(microseconds=1)
SHOWN_SPANS = ("ms", "s", "min", "h", "d")

# 18 digits hold every size and time there is and keep the arithmetic small.
_PART = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Converter = Callable[[str, Any], Any]

Seconds = float | str | timedelta
"""A duration: seconds, text such as "5s" or "1h30m", or a timedelta."""
Moment = datetime | date | str
"""A time: a datetime or a date (without a zone in UTC), ISO 8601 text, "@1767225600", or "2h" ago."""
Size = int | str
"""An amount of bytes: a number, or text such as "64MiB"."""

INT64 = (1 << 63) - 1
MAX_SPAN_S = 36_525 * 86_400  # a hundred years: longer ones are slips of a unit
MAX_EPOCH_S = 100_000_000_000  # the year 5138: above it, milliseconds are passed as seconds
MAX_SIZE_BYTES = 1 << 50  # a pebibyte, as in the settings
MAX_TOPIC_CHARACTERS = 255
MAX_NAME_CHARACTERS = 128  # of a client, group or member: they stand in every lease of the journal
MAX_ID_CHARACTERS = 300  # of a message: a topic of full length, a partition and an offset fit
MAX_TEXT_CHARACTERS = 4_096  # of an actor or a reason: the audit chain keeps them
MAX_IDS = 1_000  # in one request: each is a commit of its own, so this takes a second or two
MAX_ITEMS = 1_000_000  # of a list in one request
SHOWN_CHARACTERS = 80  # of a wrong value in its error, so that a hostile one cannot flood a log

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SINCE_EPOCH = re.compile(r"@([0-9]{1,12}(?:\.[0-9]{1,6})?)")
_OFFSET = re.compile(r"offset:([0-9]{1,18})")
_TIME = re.compile(r"time:(-?[0-9]{1,18})")
_FIELD = re.compile(r"\.(\w+(?:\[[^\]]*\])*)`$")
_MOMENT = "a datetime, text such as '2026-01-31T09:00:00Z' or '@1767225600'"
_NO_NUMBER = "; a plain number could be an offset or a time"


def refused(
    parameter: str, expected: str, value: Any, kind: type[InvalidInput] = InvalidInput
) -> InvalidInput:
    """The error for a value that a parameter does not take.

    >>> refused("partition", "a whole number", 2.5).message
    'partition is a whole number, not 2.5'
    """
    text = shown(value)
    return kind(
        f"{parameter} is {expected}, not {text}",
        parameter=parameter,
        value=text,
        expected=expected,
    )


def shown(value: Any) -> str:
    """A value in an error: short, printable, and never a failure of its own.

    >>> shown("x" * 100)[-4:], shown(10**5000), shown("a\\ud800")
    ('xxx…', '<int>', "'a\\\\ud800'")
    """
    try:
        text = repr(value)
    except Exception:  # a number of 5,000 digits, or a class whose repr fails
        return f"<{type(value).__name__}>"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


# -- numbers --------------------------------------------------------------------------------------


def count(parameter: str, value: Any, *, least: int = 0, most: int = INT64) -> int:
    """A whole number.

    >>> count("partitions", 2, least=1)
    2
    """
    if type(value) is int or (type(value) is not bool and isinstance(value, Integral)):
        number = int(value)
        if least <= number <= most:
            return number
    upper = f" to {most}" if most < INT64 else " up"
    raise refused(parameter, f"a whole number from {least}{upper}", value)


def seconds(
    parameter: str,
    value: Any,
    *,
    least: float = 0.0,
    most: float = MAX_SPAN_S,
    kind: type[InvalidInput] = InvalidInput,
) -> float:
    """A duration: seconds, text such as "5s" or "1h30m", or a timedelta.

    >>> seconds("delay_s", "1h30m"), seconds("delay_s", timedelta(minutes=1)), seconds("delay_s", 5)
    (5400.0, 60.0, 5.0)
    """
    number = _in_seconds(value)
    if number is None or not least <= number <= most:  # NaN is within no bounds
        bounds = f"from {show(least, 's')} to {show(most, 's')}"
        ways = "seconds, text such as '5s', or a timedelta"
        raise refused(parameter, f"a duration {bounds} ({ways})", value, kind)
    return number


def _in_seconds(value: Any) -> float | None:
    if type(value) is float:
        return value
    try:
        if type(value) is not bool and isinstance(value, Real):
            return float(value)
        if isinstance(value, str | timedelta):
            return float(parse(value, "s"))
    except (OverflowError, ValueError):
        pass
    return None


def microseconds(parameter: str, value: Any, **bounds: Any) -> int:
    """A duration in microseconds.

    >>> microseconds("every", "90s")
    90000000
    """
    return round(seconds(parameter, value, **bounds) * 1e6)


def milliseconds(parameter: str, value: Any, *, most: float = MAX_SPAN_S) -> int:
    """A duration in whole milliseconds: a whole number of them, text or a timedelta.

    >>> milliseconds("ladder_ms", "1.5s"), milliseconds("ladder_ms", 100)
    (1500, 100)
    """
    if isinstance(value, str | timedelta):
        return round(seconds(parameter, value, most=most) * 1_000)
    return count(parameter, value, most=round(most * 1_000))


def size_bytes(parameter: str, value: Any, *, least: int = 1, most: int = MAX_SIZE_BYTES) -> int:
    """An amount of bytes: a whole number, or text such as "64MiB".

    >>> size_bytes("retention_bytes", "1GB")
    1000000000
    """
    number = value
    if isinstance(value, str):
        try:
            number = parse(value, "bytes")
        except ValueError:
            number = None
    if type(number) is int and least <= number <= most:
        return number
    bounds = f"from {show(least, 'bytes')} to {show(most, 'bytes')}"
    raise refused(parameter, f"an amount of bytes {bounds}, such as 1000000 or '64MiB'", value)


# -- texts ----------------------------------------------------------------------------------------


def text(parameter: str, value: Any, *, least: int = 0, most: int = MAX_TEXT_CHARACTERS) -> str:
    """Text of a bounded length that UTF-8 can hold.

    >>> text("group", "billing", least=1)
    'billing'
    """
    if not isinstance(value, str) or not least <= len(value) <= most:
        raise refused(parameter, f"text of {least} to {most} characters", value)
    if not encodable(value):
        raise refused(parameter, "text that UTF-8 can hold, without half a character", value)
    return value if type(value) is str else str.__str__(value)


def path(parameter: str, value: Any) -> str:
    """Where a file or folder is.

    >>> path("folder", "/data")
    '/data'
    """
    written = text(parameter, value, least=1)
    if "\0" in written:
        raise refused(parameter, "a path without a zero byte", value)
    return written


def encodable(value: str) -> bool:
    """Whether UTF-8 can hold a text: not when it has a lone surrogate."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def flag(parameter: str, value: Any) -> bool:
    """True or False, and nothing that is merely truthy.

    >>> flag("write_once", True)
    True
    """
    if value is True or value is False:
        return value
    raise refused(parameter, "True or False", value)


def choice(parameter: str, value: Any, *, allowed: tuple[str, ...]) -> str:
    """One of some words.

    >>> choice("mode", "log", allowed=("queue", "log"))
    'log'
    """
    if isinstance(value, str) and value in allowed:
        return allowed[allowed.index(value)]
    raise refused(parameter, f"one of {', '.join(map(repr, allowed))}", value)


def octets(parameter: str, value: Any, *, most: int = INT64) -> bytes:
    """Bytes.

    >>> octets("payload", bytearray(b"ab"))
    b'ab'
    """
    if isinstance(value, bytes | bytearray | memoryview) and len(value) <= most:
        return bytes(value)
    bound = f" of at most {most} bytes" if most < INT64 else ""
    raise refused(parameter, f"bytes{bound}", value)


# -- several values -------------------------------------------------------------------------------


def texts(parameter: str, value: Any, *, most: int = 1_024) -> dict[str, str]:
    """A mapping of text to text.

    >>> texts("filter", {"region": "eu"})
    {'region': 'eu'}
    """
    if not isinstance(value, Mapping) or len(value) > most:
        raise refused(parameter, f"a mapping of at most {most} texts to texts", value)
    found: dict[str, str] = {}
    for name, each in value.items():
        name = text(f"a name in {parameter}", name)
        found[name] = text(f"{parameter}[{shown(name)}]", each)
    return found


def many(
    parameter: str,
    value: Any,
    *,
    item: Converter,
    least: int = 0,
    most: int = MAX_ITEMS,
    make: Callable[[Iterable[Any]], Any] = list,
) -> Any:
    """Several values of one kind, each converted, as a list or what `make` makes of them.

    >>> many("ids", ("a", "b"), item=text)
    ['a', 'b']
    """
    if not isinstance(value, Iterable) or isinstance(
        value, str | bytes | bytearray | Mapping | Set
    ):
        raise refused(parameter, "a list", value)
    found = list(islice(value, most + 1))
    if not least <= len(found) <= most:
        raise refused(parameter, f"a list of {least} to {most} values", value)
    return make(item(f"{parameter}[{at}]", each) for at, each in enumerate(found))


# -- times and places -----------------------------------------------------------------------------


def moment_us(
    parameter: str,
    value: Any,
    now_us: int | None = None,
    *,
    kind: type[InvalidInput] = InvalidInput,
) -> int:
    """A time in microseconds since 1970 UTC; with `now_us`, text such as "2h" is how long ago.

    A datetime, date or text without a zone is in UTC. A plain number is refused.

    >>> moment_us("since", "2026-01-01") == moment_us("since", "@1767225600") == 1767225600000000
    True
    >>> moment_us("since", "2h", now_us=7_200_000_000)
    0
    """
    moment = value
    if isinstance(value, str):
        written = value.strip()
        if match := _SINCE_EPOCH.fullmatch(written):
            if float(match[1]) <= MAX_EPOCH_S:
                return round(float(match[1]) * 1e6)
        elif written[4:5] == "-":  # without it, digits are a number as well as a date
            try:
                moment = datetime.fromisoformat(written)
            except ValueError:
                moment = None
        elif now_us is not None and not written.replace(".", "").isdecimal():
            ago = _in_seconds(written)
            if ago is not None and ago <= MAX_SPAN_S:
                return now_us - round(ago * 1e6)
    elif isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // _MICROSECOND
    ago_too = ", or how long ago, such as '2h'" if now_us is not None else ""
    raise refused(parameter, f"a time ({_MOMENT}{ago_too}){_number_hint(value)}", value, kind)


def place(parameter: str, value: Any, now_us: int) -> str:
    """A place in a log in the engines' words: "earliest", "latest", "offset:42" or "time:MICROSECONDS".

    >>> place("start", "offset:42", 0), place("start", "2h", 7_200_000_000)
    ('offset:42', 'time:0')
    """
    if isinstance(value, str) and (value in ("earliest", "latest") or _OFFSET.fullmatch(value)):
        return str.__str__(value)
    try:
        return f"time:{moment_us(parameter, value, now_us)}"
    except InvalidInput:
        raise refused(
            parameter,
            f"'earliest', 'latest', an offset such as 'offset:42', or a time ({_MOMENT}, or how long "
            f"ago, such as '2h'){_number_hint(value)}",
            value,
        ) from None


def engine_place(parameter: str, value: Any) -> str:
    """A place as `place` writes it.

    >>> engine_place("to", "time:-5")
    'time:-5'
    """
    word = text(parameter, value, most=64)
    if word in ("earliest", "latest") or _OFFSET.fullmatch(word) or _TIME.fullmatch(word):
        return word
    raise refused(parameter, "'earliest', 'latest', 'offset:N' or 'time:MICROSECONDS'", value)


def _number_hint(value: Any) -> str:
    number = type(value) is not bool and isinstance(value, Real)
    digits = isinstance(value, str) and value.strip().lstrip("-").replace(".", "", 1).isdecimal()
    return _NO_NUMBER if number or digits else ""


def wrong_type(error: msgspec.ValidationError) -> InvalidInput:
    """The error for a message from outside in which a field has a wrong type.

    >>> try:
    ...     msgspec.convert({"ids": 7}, msgspec.defstruct("Wish", [("ids", list[str])]))
    ... except msgspec.ValidationError as error:
    ...     print(wrong_type(error).message)
    ids is of a wrong type: Expected `array`, got `int`
    """
    problem, _, path = str(error).partition(" - at `$")
    named = _FIELD.search(path)
    parameter = named[1] if named else "the message"
    return InvalidInput(
        f"{parameter} is of a wrong type: {problem}", parameter=parameter, expected=problem
    )


# -- requests -------------------------------------------------------------------------------------


def checked(struct: S) -> S:
    """A request with every field converted and checked as its annotation says.

    >>> class Wish(msgspec.Struct):
    ...     lease_s: Annotated[float, seconds] = 30.0
    >>> checked(Wish(lease_s="5m")).lease_s
    300.0
    """
    changes = {}
    for name, convert in converters(type(struct)).items():
        value = getattr(struct, name)
        converted = convert(name, value)
        if converted is not value:
            changes[name] = converted
    return msgspec.structs.replace(struct, **changes) if changes else struct


def made(kind: type[S], *values: Any, **fields: Any) -> S:
    """A request made of what callers pass, converted and checked.

    >>> class Wish(msgspec.Struct):
    ...     lease_s: Annotated[float, seconds] = 30.0
    >>> made(Wish, "5m").lease_s
    300.0
    """
    return checked(kind(*values, **fields))


@cache
def converters(kind: type[msgspec.Struct]) -> dict[str, Converter]:
    """The converter of each field of a request."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: converter(hints[name]) for name in kind.__struct_fields__}


def converter(hint: Any) -> Converter:
    """The converter that a type stands for; what stands for none is a TypeError when it is asked for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        own = next((each for each in arguments[1:] if _converts(each)), None)
        return converter(arguments[0]) if own is None else _unless_none(arguments[0], own)
    if origin in (typing.Union, types.UnionType) and type(None) in arguments:
        rest = [each for each in arguments if each is not type(None)]
        return _unless_none(hint, converter(rest[0]))
    if origin is Literal:
        return partial(choice, allowed=arguments)
    if origin in (list, tuple) and arguments:
        return partial(many, item=converter(arguments[0]), make=origin)
    if origin is dict and arguments == (str, str):
        return texts
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return partial(_struct, kind=hint)
    simple: dict[Any, Converter] = {str: text, int: count, bool: flag, bytes: octets}
    if hint in simple:
        return simple[hint]
    raise TypeError(f"{hint} has no converter; annotate it with one of penstock.model.parameter")


def untouched(parameter: str, value: Any) -> Any:
    """What callers cannot give: taken as it is."""
    return value


def _converts(annotation: Any) -> bool:
    return callable(annotation) and not isinstance(annotation, msgspec.Meta)


def _unless_none(hint: Any, convert: Converter) -> Converter:
    if type(None) not in typing.get_args(hint):
        return convert
    return partial(_optional, convert=convert)


def _optional(parameter: str, value: Any, *, convert: Converter) -> Any:
    return None if value is None else convert(parameter, value)


def _struct(parameter: str, value: Any, *, kind: type[msgspec.Struct]) -> msgspec.Struct:
    if not isinstance(value, kind):
        raise refused(parameter, f"a penstock {kind.__name__}", value)
    return checked(value)


# -- the types of fields --------------------------------------------------------------------------

Name = Annotated[str, partial(text, least=1, most=MAX_TOPIC_CHARACTERS)]
"""A topic, a pattern or a group that a request is about; grammars are checked where one is made."""

GroupName = Annotated[str, partial(text, least=1, most=MAX_NAME_CHARACTERS)]

Id = Annotated[str, partial(text, least=1, most=MAX_ID_CHARACTERS)]

Ids = Annotated[list[str], partial(many, item=text, most=MAX_IDS)]

Number = Annotated[int, partial(count, least=-INT64)]

Partition = Annotated[int, partial(count, most=(1 << 31) - 1)]

Span = Annotated[float, seconds]


# -- sizes and durations as text ------------------------------------------------------------------


def unit_of(name: str) -> str:
    """The unit a field name ends in: "bytes", "s", "ms", or "" for a plain number.

    >>> unit_of("file_bytes"), unit_of("lease_s"), unit_of("bytes_per_s"), unit_of("events_per_s")
    ('bytes', 's', 'bytes', '')
    """
    if name.endswith("_per_s"):
        return "bytes" if name.startswith("bytes") else ""
    last = name.rpartition("_")[2]
    return last if last in ("bytes", "s", "ms") else ""


def parse(text: str | timedelta, unit: str) -> int | float:
    """The number of `unit` that a text or a timedelta means; a text without a unit is in `unit` already.

    >>> parse("64MiB", "bytes"), parse("1.5 GB", "bytes"), parse("1h30m", "s"), parse("1.5s", "ms")
    (67108864, 1500000000, 5400, 1500)
    >>> parse(timedelta(milliseconds=1500), "s"), parse(timedelta(seconds=2), "ms")
    (1.5, 2000)
    """
    if isinstance(text, timedelta):
        if unit not in SPANS_MS:
            raise ValueError("is a duration")
        value = Decimal(text // _MICROSECOND) * SPANS_MS["us"] / SPANS_MS[unit]
        return int(value) if value == int(value) else float(value)
    written = text.strip()
    parts = [(Decimal(number), suffix) for number, suffix in _PART.findall(written)]
    if not parts or _PART.sub("", written):
        raise ValueError("is not a number with a unit")
    if len(parts) > 1 and (unit == "bytes" or not all(suffix for _, suffix in parts)):
        raise ValueError("is not a number with a unit")
    value = sum((number * _factor(suffix, unit) for number, suffix in parts), Decimal(0))
    return int(value) if value == int(value) else float(value)


def _factor(suffix: str, unit: str) -> Decimal:
    if unit == "bytes":
        factors = {name.lower(): Decimal(factor) for name, factor in BYTES.items()}
        found, known = factors.get(suffix.lower()), "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
    else:
        base = SPANS_MS[unit]
        found = SPANS_MS[suffix] / base if suffix in SPANS_MS else None
        found, known = (Decimal(1) if not suffix else found), ", ".join(SPANS_MS)
    if found is None:
        raise ValueError(f"has an unknown unit {suffix!r}; known: {known}")
    return found


def show(value: Any, unit: str) -> str:
    """A value the way a person would write it.

    >>> show(67108864, "bytes"), show(2592000, "s"), show(1500, "ms"), show(None, "s"), show(5, "")
    ('64 MiB', '30 d', '1500 ms', 'none', '5')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(show(item, unit) for item in value)
    if unit == "" or isinstance(value, str) or value == 0:
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    if unit == "bytes":
        steps = {name: Decimal(factor) for name, factor in BYTES.items() if name.endswith("iB")}
        steps["B"] = Decimal(1)
    else:
        steps = {name: SPANS_MS[name] / SPANS_MS[unit] for name in SHOWN_SPANS}
    exact = Decimal(str(value))
    fitting = {name: step for name, step in steps.items() if exact % step == 0}
    if not fitting:
        return f"{value:g} {unit}"
    name = max(fitting, key=lambda name: fitting[name])
    return f"{int(exact / fitting[name])} {name}"

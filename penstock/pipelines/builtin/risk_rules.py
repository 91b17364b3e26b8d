"""Risk rules as data: which evidence earns which tag, from a JSON file to Spark columns.

A rule has a tag, a severity, the kinds of evidence it looks at, and conditions: every one of `all`
and, where there are any, one of `any` must hold. A condition on a field that is absent does not
hold. `penstock docs risk-tags` describes the file.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.model.errors import FormatTooNew, InvalidSettings
from penstock.model.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column

FORMAT = 1
FIELDS = {
    "evidence_id": "STRING", "kind": "STRING", "asset": "STRING", "port": "INT",
    "service": "STRING", "product": "STRING", "version": "STRING", "exposed": "BOOLEAN",
    "cve": "STRING", "score": "DOUBLE", "exploited": "BOOLEAN", "state": "STRING",
    "open_ports": "INT",
}  # fmt: skip
"""Fields of an evidence event and their types."""
KINDS = ("job", "fingerprint", "vulnerability")
SEVERITIES = ("none", "low", "medium", "high", "critical")
"""Mildest first; `none` is the risk of evidence without a tag."""

Kind = Literal["job", "fingerprint", "vulnerability"]
Severity = Literal["low", "medium", "high", "critical"]
Is = Literal[
    "equal", "not-equal", "in", "not-in", "at-least", "below", "between", "matching",
    "version-below", "present",
]  # fmt: skip
Scalar = str | bool | int | float

_ORDERED = {"at-least", "below", "between"}
_TEXTUAL = {"matching", "version-below"}
_SAME_IN_ANY_CASE = {"equal", "not-equal", "in", "not-in"}
"""Scanners write OpenSSL and openssl; a text is the same in capitals and without."""
_LISTS = {"in", "not-in", "between"}
_TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "INT": (int,),
    "DOUBLE": (int, float),
    "BOOLEAN": (bool,),
}
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"test": "is"}):
    """One field of the evidence, compared with something."""

    field: str
    test: Is
    to: Scalar | list[Scalar]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"either": "any"}):
    """What earns a tag."""

    tag: str
    severity: Severity
    why: str
    kinds: list[Kind]
    all: list[Condition] = []
    either: list[Condition] = []


class RuleSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a rules file."""

    format: int
    rules: list[Rule]


def load(path: str = "") -> RuleSet:
    """The rules of a file, or those that come with Penstock; InvalidSettings says what is wrong.

    >>> load().rules[0].tag
    'exposed-database'
    """
    name = path or "risk_rules.json"
    try:
        data = Path(path).read_bytes() if path else _shipped()
    except OSError as error:
        raise InvalidSettings(f"the rules file {name} cannot be read: {error}", file=name) from None
    return parse(data, name)


def _shipped() -> bytes:
    return resources.files(__package__).joinpath("risk_rules.json").read_bytes()


def parse(data: bytes, name: str = "rules") -> RuleSet:
    """The rules in a JSON document.

    >>> parse(b'{"format": 1, "rules": [{"tag": "x"}]}')
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: rules: Object missing required field `severity` - at \
`$.rules[0]`. Nothing ran; `penstock docs risk-tags` describes the file [invalid.settings]
    """
    try:
        found = msgspec.json.decode(data, type=RuleSet)
    except msgspec.MsgspecError as error:
        raise _wrong(name, str(error)) from None
    if found.format > FORMAT:
        raise FormatTooNew(
            f"{name} has format {found.format}, this Penstock reads {FORMAT}. Install a newer one",
            file=name,
            format=found.format,
        )
    seen: set[str] = set()
    for rule in found.rules:
        if rule.tag in seen:
            raise _wrong(name, f"there are two rules for the tag {rule.tag!r}")
        seen.add(rule.tag)
        if not rule.kinds or not (rule.all or rule.either):
            raise _wrong(name, f"rule {rule.tag!r} needs a kind and a condition")
        for condition in (*rule.all, *rule.either):
            _check(condition, f"{name}: rule {rule.tag!r}")
    return found


def _wrong(name: str, problem: str) -> InvalidSettings:
    return InvalidSettings(
        f"{name}: {problem}. Nothing ran; `penstock docs risk-tags` describes the file",
        file=name,
    )


def _check(condition: Condition, where: str) -> None:
    field, test, to = condition.field, condition.test, condition.to
    if field not in FIELDS:
        raise _wrong(
            where,
            f"evidence has no field {field!r}. {did_you_mean(field, FIELDS)}It has "
            f"{', '.join(FIELDS)}",
        )
    kind = FIELDS[field]
    if (test in _TEXTUAL and kind != "STRING") or (test in _ORDERED and kind in ("BOOLEAN",)):
        raise _wrong(where, f"{field!r} is {kind} and cannot be {test}")
    if (test in _LISTS) != isinstance(to, list):
        raise _wrong(
            where, f"{field!r} is {test}: give {'a list' if test in _LISTS else 'a value'}"
        )
    if test == "between" and (not isinstance(to, list) or len(to) != 2):
        raise _wrong(where, f"{field!r} is between two values, the lowest and the highest")
    wanted = (bool,) if test == "present" else _TYPES[kind]
    for each in to if isinstance(to, list) else [to]:
        if type(each) not in wanted:
            raise _wrong(where, f"{field!r} is {kind}, and {each!r} is not")
    if test == "version-below" and not _VERSION.fullmatch(str(to)):
        raise _wrong(where, f"{to!r} is no version: write numbers and dots, 3.0.12")
    if test == "matching":
        try:
            re.compile(str(to))
        except re.error as error:
            raise _wrong(where, f"{to!r} is no regular expression: {error}") from None


# -- as columns ------------------------------------------------------------------------------------


def tags_column(rules: RuleSet, value: str = "value") -> Column:
    """The tags of an evidence struct: an array of (tag, severity) in the order of the rules."""
    from pyspark.sql import functions as sql

    earned = [
        sql.when(
            _holds(rule, value),
            sql.struct(sql.lit(rule.tag).alias("tag"), sql.lit(rule.severity).alias("severity")),
        )
        for rule in rules.rules
    ]
    if not earned:
        return sql.expr("CAST(array() AS ARRAY<STRUCT<tag: STRING, severity: STRING>>)")
    return sql.filter(sql.array(*earned), lambda each: each.isNotNull())


def risk_column(tags: Column) -> Column:
    """The highest severity among tags."""
    from pyspark.sql import functions as sql

    chosen = sql.lit("none")
    for severity in SEVERITIES[1:]:
        has = sql.array_contains(tags["severity"], severity)
        chosen = sql.when(has, sql.lit(severity)).otherwise(chosen)
    return chosen


def _holds(rule: Rule, value: str) -> Column:
    from pyspark.sql import functions as sql

    held = sql.col(f"{value}.kind").isin(list(rule.kinds))
    for condition in rule.all:
        held &= _condition(condition, value)
    if rule.either:
        one = _condition(rule.either[0], value)
        for condition in rule.either[1:]:
            one |= _condition(condition, value)
        held &= one
    return held


def _condition(condition: Condition, value: str) -> Column:
    from pyspark.sql import functions as sql

    column, to = sql.col(f"{value}.{condition.field}"), condition.to
    if condition.test in _SAME_IN_ANY_CASE and FIELDS[condition.field] == "STRING":
        column = sql.lower(column)
        to = [str(each).lower() for each in to] if isinstance(to, list) else str(to).lower()
    tests: dict[str, Callable[[Any], Column]] = {
        "equal": lambda to: column == sql.lit(to),
        "not-equal": lambda to: column != sql.lit(to),
        "in": column.isin,
        "not-in": lambda to: ~column.isin(to),
        "at-least": lambda to: column >= sql.lit(to),
        "below": lambda to: column < sql.lit(to),
        "between": lambda to: column.between(to[0], to[1]),
        "matching": column.rlike,
        "version-below": lambda to: _version(column) < _numbers(to),
        "present": lambda to: column.isNotNull() if to else column.isNull(),
    }
    # A comparison with an absent field is unknown, which `any` must not pass on.
    return sql.coalesce(tests[condition.test](to), sql.lit(False))


def _version(column: Column) -> Column:
    """A version as an array of numbers, which compares as versions do; null when it is none."""
    from pyspark.sql import functions as sql

    numbers = sql.split(sql.regexp_extract(column, r"^[0-9]+(\.[0-9]+)*", 0), r"\.")
    return sql.when(
        column.rlike(r"^[0-9]+(\.[0-9]+)*"),
        sql.transform(numbers, lambda each: each.cast("BIGINT")),
    )


def _numbers(version: str) -> Column:
    from pyspark.sql import functions as sql

    return sql.array(*[sql.lit(int(each)).cast("BIGINT") for each in version.split(".")])

"""Filters that make a batch read smaller: by topic, tenant, partition, offset and append time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from penstock.model.topic import tenant_of
from penstock.pipelines.plan import Offsets

PUSHDOWN = "SPARK_PENSTOCK_PUSHDOWN"
"""Set by `spark_session`, which also tells Spark to push filters to Python."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FindTime = Callable[[str, int, int], int]
Test = Callable[[str, int], bool]


class Narrowing:
    """What is known of the rows that are wanted."""

    def __init__(self) -> None:
        self._tests: list[Test] = []
        self.first_offset = 0
        self.stop_offset: int | None = None
        self.since_us: int | None = None
        self.until_us: int | None = None

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Narrowing:
        """Take from filters what can be used; the rest is Spark's."""
        made = cls()
        for each in filters:
            attribute: tuple[str, ...] = getattr(each, "attribute", ())
            if len(attribute) == 1:
                made._use(attribute[0], each)
        return made

    def _use(self, column: str, each: Filter) -> None:
        if column in ("topic", "tenant", "partition"):
            self._use_name(column, each)
        elif column == "offset":
            self._use_offset(each)
        elif column == "append_time":
            self._use_time(each)

    def _use_name(self, column: str, each: Filter) -> None:
        if isinstance(each, EqualTo):
            self._test(column, {each.value}.__contains__)
        elif isinstance(each, In):
            self._test(column, set(each.value).__contains__)
        elif isinstance(each, StringStartsWith) and column == "topic":
            self._test(column, lambda name: str(name).startswith(each.value))

    def _test(self, column: str, wanted: Callable[[Any], bool]) -> None:
        if column == "topic":
            self._tests.append(lambda topic, partition: wanted(topic))
        elif column == "partition":
            self._tests.append(lambda topic, partition: wanted(partition))
        else:  # a topic without a tenant's word may hold anybody's events
            self._tests.append(
                lambda topic, partition: (tenant := tenant_of(topic)) is None or wanted(tenant)
            )

    def _use_offset(self, each: Filter) -> None:
        if isinstance(each, EqualTo | GreaterThan | GreaterThanOrEqual):
            first = each.value + isinstance(each, GreaterThan)
            self.first_offset = max(self.first_offset, first)
        if isinstance(each, EqualTo | LessThan | LessThanOrEqual):
            stop = each.value + (not isinstance(each, LessThan))
            self.stop_offset = stop if self.stop_offset is None else min(self.stop_offset, stop)

    def _use_time(self, each: Filter) -> None:
        if isinstance(each, EqualTo | GreaterThan | GreaterThanOrEqual):
            since = _micros(each.value)
            self.since_us = since if self.since_us is None else max(self.since_us, since)
        if isinstance(each, EqualTo | LessThan | LessThanOrEqual):
            until = _micros(each.value) + 1
            self.until_us = until if self.until_us is None else min(self.until_us, until)

    def narrowed(
        self, start: Offsets, stop: Offsets, find_time: FindTime
    ) -> tuple[Offsets, Offsets]:
        """The smallest ranges that hold every row that is wanted."""
        begin: Offsets = {}
        until: Offsets = {}
        for lane, first in start.items():
            if not all(test(*lane) for test in self._tests):
                continue
            last = stop[lane]
            if self.since_us is not None:
                first = max(first, find_time(*lane, self.since_us))
            if self.until_us is not None:
                last = min(last, find_time(*lane, self.until_us))
            if self.stop_offset is not None:
                last = min(last, self.stop_offset)
            begin[lane], until[lane] = max(first, self.first_offset), last
        return begin, until


def _micros(value: datetime) -> int:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(microseconds=1)

"""Plans of reads: which offsets a batch covers and how tasks share them; numbers only, no files.

The same offsets are always cut into the same tasks, so a batch that Spark repeats after a crash puts
every event into the same task again. `Narrowing` makes a batch read smaller by filters on topic,
tenant, partition, offset and append time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
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

from penstock.model.errors import InvalidInput
from penstock.model.topic import check_pattern, matches, tenant_of

# -- offsets and tasks ----------------------------------------------------------------------------

Lane = tuple[str, int]
Offsets = dict[Lane, int]
Bounds = dict[Lane, tuple[int, int]]
FORMAT = 1


class Topics(msgspec.Struct, frozen=True):
    """What a query reads: topics and patterns, less what is left out."""

    patterns: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, exclude: str = "") -> Topics:
        """From names and patterns with commas between them.

        >>> str(Topics.of("orders.#,refunds"))
        'orders.#, refunds'
        """
        return cls(
            *(tuple(check_pattern(each) for each in _words(all_)) for all_ in (text, exclude))
        )

    def __str__(self) -> str:
        return ", ".join(self.patterns)

    def has(self, topic: str) -> bool:
        """Whether a topic is among them."""
        return any(matches(each, topic) for each in self.patterns) and not any(
            matches(each, topic) for each in self.exclude
        )

    def bounds(self, of: Callable[[str], Bounds]) -> Bounds:
        """Where their partitions begin and end; `of` tells it for one pattern."""
        found = {lane: ends for each in self.patterns for lane, ends in of(each).items()}
        return {lane: found[lane] for lane in sorted(found) if self.has(lane[0])}


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


class Split(msgspec.Struct, frozen=True):
    """A range of offsets of one partition; `stop` is the first offset after it."""

    topic: str
    partition: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.start}..{self.stop}"


class Place(msgspec.Struct, frozen=True):
    """Where a query is: the next offset of each partition, and the newest event time so far."""

    offsets: Offsets
    newest_us: int = 0
    began: Offsets = {}
    """Where the partitions that this batch is the first to read begin."""
    reads: str = ""
    """The topics that its query reads, patterns with commas between them; empty in old checkpoints."""
    skipped: int = 0
    """Events so far that retention took before the query came to them."""
    bus: str = ""
    """The bus whose offsets these are; empty in old checkpoints."""

    def as_json(self) -> dict[str, Any]:
        """The form Spark keeps in its checkpoint.

        >>> Place({("orders", 0): 7}).as_json()
        {'penstock': 1, 'topics': {'orders': {'0': 7}}, 'newest_us': 0, 'began': {}}
        """
        written = {
            "penstock": FORMAT,
            "topics": _nested(self.offsets),
            "newest_us": self.newest_us,
            "began": _nested(self.began),
        }
        more = {"reads": self.reads, "skipped": self.skipped, "bus": self.bus}
        return written | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Place:
        """Read it back; a checkpoint of another source is refused."""
        if found.get("penstock") != FORMAT or not isinstance(found.get("topics"), dict):
            raise InvalidInput(
                f"the checkpoint holds {str(dict(found))[:120]}, which no Penstock source of this "
                "version wrote: it belongs to another query. Give this query a checkpoint of its own"
            )
        newest_us = int(found.get("newest_us", 0))
        began = _flat(found.get("began", {}))
        reads, skipped = str(found.get("reads", "")), int(found.get("skipped", 0))
        bus = str(found.get("bus", ""))
        return cls(_flat(found["topics"]), newest_us, began, reads, skipped, bus)

    def check_reads(self, pattern: str) -> None:
        """Refuse a place of a query that reads other topics.

        >>> Place({("orders", 0): 7}).check_reads("orders")
        """
        read = _words(pattern)
        others = [
            topic
            for topic, _ in sorted(self.offsets)
            if not any(matches(each, topic) for each in read)
        ]
        before = self.reads or (others and others[0])
        if others or self.reads not in ("", pattern):
            raise InvalidInput(
                f"the checkpoint is of a query that reads {before!r}, and this one reads {pattern!r}: "
                "it belongs to another query. It was left as it is, and nothing was read. Give this "
                "query a checkpoint of its own"
            )

    def check_bus(self, bus: str, url: str) -> None:
        """Refuse a place on another bus, whose offsets mean other events; an unknown one is taken.

        >>> Place({("orders", 0): 7}).check_bus("3b6a27bcceb6a42d", "data")
        """
        if self.bus and bus and self.bus != bus:
            raise InvalidInput(
                f"the checkpoint is of the bus {self.bus}, and {url} is the bus {bus}: it belongs to "
                "another bus, and its offsets mean other events there. It was left as it is, and nothing "
                "was read. Correct `url`, or give this query a checkpoint of its own",
                checkpoint_bus=self.bus,
                bus=bus,
            )


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        topics.setdefault(topic, {})[str(partition)] = offset
    return topics


def _flat(topics: Mapping[str, Mapping[str, Any]]) -> Offsets:
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in topics.items()
        for partition, offset in partitions.items()
    }


def ahead(start: Offsets, bounds: Bounds, max_events: int | None) -> Place:
    """How far a batch goes: to the end, or a fair share of `max_events` in each partition.

    A partition that was not there before begins at its first event. Shares follow the backlog, and
    every partition with a backlog gets on.

    >>> ahead({("a", 0): 0}, {("a", 0): (0, 90), ("b", 0): (5, 15)}, 50).offsets
    {('a', 0): 45, ('b', 0): 10}
    """
    reached: Offsets = dict(start)
    began: Offsets = {}
    backlog: dict[Lane, int] = {}
    for lane, (first, end) in bounds.items():
        if lane not in reached:
            reached[lane] = began[lane] = first
        backlog[lane] = max(0, end - reached[lane])
    total = sum(backlog.values())
    for lane, waiting in backlog.items():
        share = waiting
        if max_events is not None and total > max_events:
            share = min(waiting, max(1, waiting * max_events // total)) if waiting else 0
        reached[lane] += share
    return Place(reached, began=began)


def behind(offsets: Offsets, bounds: Bounds) -> int:
    """Events in the log that lie after a place.

    >>> behind({("orders", 0): 7}, {("orders", 0): (0, 9), ("new", 0): (2, 5)})
    5
    """
    return sum(
        max(0, end - max(first, offsets.get(lane, first))) for lane, (first, end) in bounds.items()
    )


def expired(start: Offsets, stop: Offsets, bounds: Bounds) -> list[Split]:
    """The ranges of a batch that retention has deleted.

    >>> [str(each) for each in expired({("a", 0): 2}, {("a", 0): 9}, {("a", 0): (5, 20)})]
    ['a/0/2..5']
    """
    found = []
    for lane, at in sorted(start.items()):
        upto = min(bounds.get(lane, (at, at))[0], stop.get(lane, at))
        if at < upto:
            found.append(Split(*lane, at, upto))
    return found


def splits(start: Place, end: Place, events: int) -> list[list[Split]]:
    """The tasks of a batch: ranges of at most `events` events, small ones together.

    >>> begin, until = Place({("a", 0): 0}), Place({("a", 0): 5, ("b", 0): 9}, began={("b", 0): 8})
    >>> [[str(split) for split in task] for task in splits(begin, until, 3)]
    [['a/0/0..3'], ['a/0/3..5', 'b/0/8..9']]
    """
    tasks: list[list[Split]] = []
    room = 0
    for lane, stop in sorted(end.offsets.items()):
        topic, partition = lane
        at = start.offsets.get(lane, end.began.get(lane, stop))
        while at < stop:
            upto = min(stop, at + events)
            if room < upto - at:
                tasks.append([])
                room = events
            tasks[-1].append(Split(topic, partition, at, upto))
            room -= upto - at
            at = upto
    return tasks


# -- filters --------------------------------------------------------------------------------------

PUSHDOWN = "SPARK_PENSTOCK_PUSHDOWN"
"""Set by `spark_session`, which also tells Spark to push filters to Python."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FindTime = Callable[[str, int, int], int]
Test = Callable[[str, int], bool]


class Narrowing:
    """What filters say about the rows that are wanted."""

    def __init__(self) -> None:
        self._tests: list[Test] = []
        self.first_offset = 0
        self.stop_offset: int | None = None
        self.since_us: int | None = None
        self.until_us: int | None = None

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Narrowing:
        """Use the filters that make the read smaller; Spark applies the others."""
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
        else:  # a topic without a tenant in its name may hold events of any tenant
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

"""Options of the source and the sink: every one known, checked, and named when it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput
from penstock.model.nearest import did_you_mean
from penstock.model.parameter import count, microseconds, size_bytes
from penstock.model.topic import check_topic
from penstock.pipelines.plan import Topics

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

T = TypeVar("T")
# Spark's own, which reach every source and sink.
SPARKS = {
    "path", "checkpointlocation", "queryname", "outputmode", "__partition_columns",
    # Of a table that was made with CREATE TABLE ... USING penstock.
    "provider", "owner", "location", "comment", "external", "collation", "is_managed_location",
}  # fmt: skip
# Options of Spark's Kafka source that mean the same here.
KAFKAS = {
    "subscribe": "topics",
    "startingoffsets": "start",
    "endingoffsets": "end",
    "maxoffsetspertrigger": "maxeventspertrigger",
    "minoffsetspertrigger": "mineventspertrigger",
    "failondataloss": "onexpired",
}
# And those that have another answer.
ANSWERS = {
    "kafka.bootstrap.servers": "give `url`, penstock://host:port or the path of a folder",
    "subscribepattern": "give `topics`, a pattern of words: `orders.*` is one word more, `orders.#` any number; "
    "several with commas between them",
    "assign": "give `topics`, and filter on the column `partition`",
    "minpartitions": "give `eventsPerTask`; smaller tasks are more tasks",
    "maxrecordsperpartition": "give `eventsPerTask`",
    "groupidprefix": "leave it out: a query's place is in its checkpoint, and it has no group",
    "includeheaders": "leave it out: the column `headers` is always there",
    "startingtimestamp": "give `start` a time, 2026-11-16T08:00:00Z, or how long ago, 2h",
    "endingtimestamp": "give `end` a time, 2026-11-16T08:00:00Z, or how long ago, 2h",
    "startingoffsetsbytimestamp": 'give `start` a time for each partition, {"orders": {"0": "2026-11-16T08:00:00Z"}}',
    "endingoffsetsbytimestamp": 'give `end` a time for each partition, {"orders": {"0": "2026-11-16T08:00:00Z"}}',
    "startingoffsetsbytimestampstrategy": "leave it out: a time behind the last event means the end",
}
LATEST, EARLIEST = -1, -2
"""What negative offsets mean, as in Kafka."""


SOURCES = {
    "url", "topics", "exclude", "start", "end", "columns", "schema", "lateafter", "maxeventspertrigger",
    "maxbytespertrigger", "mineventspertrigger", "maxtriggerdelay", "eventspertask", "onexpired", "pushdown",
    "token",
}  # fmt: skip
SINKS = {"url", "topic", "queryid", "batchid", "codec", "maxtransactionbytes", "plans", "token"}
_TABLE = "penstock "
"""Begins the comment of a column that keeps the options of a table."""


class SourceOptions(msgspec.Struct, frozen=True):
    """What a read may be told."""

    url: str
    """Where the events are: the path of a folder, or penstock://host:port."""
    topics: Topics = Topics(("#",))
    """Topics and patterns, with commas between them, less those of the option `exclude`."""
    start: str = "earliest"
    """earliest, latest, a time (`2026-11-16T08:00:00Z`, `2h`), or JSON of these and of offsets."""
    end: str = "latest"
    """The same, for batch reads."""
    columns: tuple[str, ...] = ()
    """Columns to read, separated by commas; no others are read from disk."""
    schema: str | None = None
    """Types of the payload as DDL; gives `value` and `fault`."""
    late_after_us: int | None = None
    """Allowed lateness (`10m`); gives `late`."""
    max_events_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_events_per_trigger: int | None = None
    """With fewer, a batch waits, `max_trigger_delay_us` at the longest."""
    max_trigger_delay_us: int = 15 * 60 * 1_000_000
    events_per_task: int = 500_000
    on_expired: Literal["fail", "skip"] = "fail"
    """What to do when retention took offsets that were to be read."""
    pushdown: bool | None = None
    """Whether batch reads take filters; needs spark.sql.python.filterPushdown.enabled."""
    token: str | None = None


class SinkOptions(msgspec.Struct, frozen=True):
    """What a write may be told."""

    url: str
    topic: str | None = None
    """The topic of rows without a `topic` column, or with null in it."""
    query_id: str | None = None
    """With `batchId`: names a batch write, so that a repetition is known and does nothing."""
    batch_id: str | None = None
    codec: str = "raw"
    """What payloads are: `json` lets consumers have values instead of bytes."""
    max_transaction_bytes: int = 128 << 20
    """A batch within this is one transaction; a larger one is several, by a plan that is recorded."""
    plans: str = "spark.plans"
    """The topic of such plans."""
    token: str | None = None


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Read a source's options.

    >>> source_options({"url": "data", "topic": "orders"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidInput: the source has no option 'topic'. Did you mean 'topics'? ...
    """
    given = _Given(options, "source", SOURCES, KAFKAS)
    columns = tuple(name.strip() for name in given.take("columns", str, "").split(","))
    return SourceOptions(
        url=given.url(),
        topics=Topics.of(given.take("topics", str, "#"), given.take("exclude", str, "")),
        start=given.take("start", str, "earliest"),
        end=given.take("end", str, "latest"),
        columns=tuple(filter(None, columns)),
        schema=given.take("schema", str, None),
        late_after_us=given.take("lateafter", partial(microseconds, "lateAfter"), None),
        max_events_per_trigger=given.take(
            "maxeventspertrigger", _count("maxEventsPerTrigger"), None
        ),
        max_bytes_per_trigger=given.take(
            "maxbytespertrigger", partial(size_bytes, "maxBytesPerTrigger"), None
        ),
        min_events_per_trigger=given.take(
            "mineventspertrigger", _count("minEventsPerTrigger"), None
        ),
        max_trigger_delay_us=given.take(
            "maxtriggerdelay", partial(microseconds, "maxTriggerDelay"), 15 * 60 * 1_000_000
        ),
        events_per_task=given.take("eventspertask", _count("eventsPerTask"), 500_000),
        on_expired=given.take("onexpired", _on_expired, "fail"),
        pushdown=given.take("pushdown", _truth, None),
        token=given.take("token", str, None),
    )


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read a sink's options."""
    given = _Given(options, "sink", SINKS)
    return SinkOptions(
        url=given.url(),
        topic=given.take("topic", str, None),
        query_id=given.take("queryid", str, None),
        batch_id=given.take("batchid", str, None),
        codec=given.take("codec", _codec, "raw"),
        max_transaction_bytes=given.take(
            "maxtransactionbytes", partial(size_bytes, "maxTransactionBytes"), 128 << 20
        ),
        plans=given.take("plans", check_topic, "spark.plans"),
        token=given.take("token", str, None),
    )


def table_comment(options: Mapping[str, str]) -> str | None:
    """A comment that keeps the options of a table that is being made; None where none is.

    Spark tells a Python source the options of CREATE TABLE once, and never again. The columns it
    keeps, with their comments. A token is no part of what DESCRIBE shows.
    """
    low = {name.lower(): text for name, text in options.items()}
    if "provider" not in low:
        return None
    known = SOURCES | SINKS | KAFKAS.keys() | {"path"}
    kept = {name: text for name, text in low.items() if name in known - {"token"}}
    return _TABLE + json.dumps(kept, sort_keys=True)


def with_tables(options: Mapping[str, str], schema: StructType, known: set[str]) -> dict[str, str]:
    """Options, and beside them those that a table keeps in a comment of its columns."""
    for column in schema:
        comment = column.metadata.get("comment", "")
        if comment.startswith(_TABLE):
            kept = json.loads(comment.removeprefix(_TABLE))
            wanted = known | KAFKAS.keys() | {"path"}
            said = {name.lower() for name in options}
            more = {name: text for name, text in kept.items() if name in wanted - said}
            return {**more, **options}
    return dict(options)


class _Given:
    """Options by lower-case name: Spark does not tell `topics` from `TOPICS`."""

    def __init__(
        self,
        options: Mapping[str, str],
        what: str,
        known: set[str],
        same: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values: dict[str, str] = {}
        for given, text in options.items():
            # A table keeps what it was made with under names of its own, beside the plain ones.
            name = given.removeprefix("option.")
            low = same.get(name.lower(), name.lower())
            if self._values.setdefault(low, text) != text:
                raise InvalidInput(
                    f"the {what} is given two values for {low!r}, {self._values[low]!r} and {text!r}: one "
                    f"as {name!r}. Leave one of them out",
                    option=name,
                )
            if low in known | SPARKS:
                continue
            if low in ANSWERS or low.startswith("kafka."):
                answer = ANSWERS.get(low, "leave it out: there is no Kafka client below")
                raise InvalidInput(
                    f"{name!r} is an option of Kafka's {what}, and this is Penstock's: {answer}",
                    option=name,
                )
            raise InvalidInput(
                f"the {what} has no option {name!r}. {did_you_mean(name.lower(), known)}It has "
                f"{', '.join(sorted(known))}",
                option=name,
            )

    def url(self) -> str:
        url = self._values.get("url") or self._values.get("path")
        if not url:
            raise InvalidInput(
                "where is the bus? Give the option `url`: the path of a folder, or "
                "penstock://host:port. Of a table that was made with columns of its own, Spark does not tell "
                "the options: leave the columns out of CREATE TABLE, or read it WITH (url = '...')"
            )
        return url.removeprefix("file:") if url.startswith("file:") else url

    def take(self, name: str, read: Callable[[str], Any], otherwise: Any) -> Any:
        text = self._values.get(name)
        if text is None:
            return otherwise
        try:
            return read(text)
        except ValueError as error:
            raise InvalidInput(
                f"option {name!r} is {text!r}: {error}", option=name, value=text
            ) from None


def _count(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        return count(name, int(text) if text.isdecimal() else text, least=1)

    return read


def _on_expired(text: str) -> str:
    """Kafka's `failOnDataLoss` is true or false."""
    chosen = _one_of("fail", "skip", "true", "false")(text)
    return {"true": "fail", "false": "skip"}.get(chosen, chosen)


def _codec(name: str) -> str:
    codecs.get(name)
    return name


def _truth(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"give one of {', '.join(allowed)}")
        return text.lower()

    return read


def offsets_of(text: str) -> dict[tuple[str, int], int | str] | None:
    """Where partitions begin, as JSON: an offset, or a text as for all; None for another text.

    Of negative offsets -1 is the latest and -2 the earliest, as in Kafka.

    >>> offsets_of('{"orders": {"0": 15, "1": "2h", "2": -1}}')
    {('orders', 0): 15, ('orders', 1): '2h', ('orders', 2): 'latest'}
    >>> offsets_of("earliest")
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        return {
            (topic, int(partition)): _offset(value)
            for topic, partitions in json.loads(text).items()
            for partition, value in partitions.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInput(
            "offsets are JSON of topic, partition and offset or time, "
            f'{{"orders": {{"0": 15, "1": "2026-11-16T08:00:00Z"}}}}: {error}'
        ) from None


def _offset(value: Any) -> int | str:
    if isinstance(value, str):
        if re.fullmatch(r"\s*-?\d+\s*", value):
            raise ValueError(f"{value!r} is a text; write an offset as a number")
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is neither an offset nor a time")
    named = {LATEST: "latest", EARLIEST: "earliest"}.get(value)
    if named is None and value < 0:
        raise ValueError(
            f"{value} is no offset: of negative ones -1 is the latest and -2 the earliest"
        )
    return value if named is None else named

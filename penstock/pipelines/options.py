"""Options of the source and the sink: every one known, checked, and named when it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput
from penstock.model.parameter import microseconds, refused, size_bytes
from penstock.model.registry import did_you_mean
from penstock.model.topic import check_topic
from penstock.pipelines.plan import Topics

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
    "fetchoffset.numretries": "leave it out: a query asks the bus for its ends, and tries again by itself",
    "fetchoffset.retryintervalms": "leave it out: a query asks the bus for its ends, and tries again by itself",
    "kafkaconsumer.polltimeoutms": "leave it out: there is no Kafka client below",
}
LATEST, EARLIEST = -1, -2
"""What negative offsets mean, as in Kafka."""


# As they are written; Spark tells them in small letters.
_SOURCE = (
    "url", "topics", "exclude", "start", "end", "columns", "schema", "lateAfter", "maxEventsPerTrigger",
    "maxBytesPerTrigger", "minEventsPerTrigger", "maxTriggerDelay", "eventsPerTask", "onExpired", "pushdown",
    "token",
)  # fmt: skip
_SINK = ("url", "topic", "queryId", "batchId", "codec", "maxTransactionBytes", "plans", "token")
SOURCES, SINKS = ({name.lower() for name in names} for names in (_SOURCE, _SINK))
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
    given = _Given(options, "source", _SOURCE, KAFKAS)
    columns = tuple(name.strip() for name in given.take("columns", _text, "").split(","))
    return SourceOptions(
        url=given.url(),
        topics=Topics.of(given.take("topics", _text, "#"), given.take("exclude", _text, "")),
        start=given.take("start", _text, "earliest"),
        end=given.take("end", _text, "latest"),
        columns=tuple(filter(None, columns)),
        schema=given.take("schema", _text, None),
        late_after_us=given.take("lateAfter", microseconds, None),
        max_events_per_trigger=given.take("maxEventsPerTrigger", _positive, None),
        max_bytes_per_trigger=given.take("maxBytesPerTrigger", size_bytes, None),
        min_events_per_trigger=given.take("minEventsPerTrigger", _positive, None),
        max_trigger_delay_us=given.take("maxTriggerDelay", microseconds, 15 * 60 * 1_000_000),
        events_per_task=given.take("eventsPerTask", _positive, 500_000),
        on_expired=given.take("onExpired", _on_expired, "fail"),
        pushdown=given.take("pushdown", _truth, None),
        token=given.take("token", _text, None),
    )


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read a sink's options."""
    given = _Given(options, "sink", _SINK)
    return SinkOptions(
        url=given.url(),
        topic=given.take("topic", _text, None),
        query_id=given.take("queryId", _text, None),
        batch_id=given.take("batchId", _text, None),
        codec=given.take("codec", _codec, "raw"),
        max_transaction_bytes=given.take("maxTransactionBytes", size_bytes, 128 << 20),
        plans=given.take("plans", _topic, "spark.plans"),
        token=given.take("token", _text, None),
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
        written: Sequence[str],
        same: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values: dict[str, str] = {}
        known = {name.lower(): name for name in written}
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
            if low in known or low in SPARKS:
                continue
            if low in ANSWERS or low.startswith("kafka."):
                answer = ANSWERS.get(low, "leave it out: there is no Kafka client below")
                raise InvalidInput(
                    f"{name!r} is an option of Kafka's {what}, and this is Penstock's: {answer}",
                    option=name,
                )
            raise InvalidInput(
                f"the {what} has no option {name!r}. {did_you_mean(name, written)}It has "
                f"{', '.join(sorted(written))}",
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

    def take(self, name: str, read: Callable[[str, str], Any], otherwise: Any) -> Any:
        """The value of an option, or `otherwise`; `read` gets its name for what it refuses."""
        text = self._values.get(name.lower())
        return otherwise if text is None else read(name, text)


def _text(_: str, text: str) -> str:
    return text


def _positive(name: str, text: str) -> int:
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,17}\s*", text):
        raise refused(name, "a whole number of 1 or more", text)
    return int(text)


def _on_expired(name: str, text: str) -> str:
    """Kafka's `failOnDataLoss` is true or false."""
    chosen = _one_of(name, text, "fail", "skip", "true", "false")
    return {"true": "fail", "false": "skip"}.get(chosen, chosen)


def _codec(_: str, text: str) -> str:
    codecs.get(text)
    return text


def _topic(_: str, text: str) -> str:
    return check_topic(text)


def _truth(name: str, text: str) -> bool:
    return _one_of(name, text, "true", "false") == "true"


def _one_of(name: str, text: str, *allowed: str) -> str:
    if text.lower() not in allowed:
        raise refused(name, f"one of {', '.join(allowed)}", text)
    return text.lower()


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

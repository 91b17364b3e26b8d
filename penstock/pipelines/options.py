"""Options of the source and the sink: every one known, checked, and named when it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from penstock.core.schedule import parse_duration
from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput
from penstock.model.nearest import did_you_mean
from penstock.model.topic import check_pattern, check_topic

T = TypeVar("T")
# Spark's own, which reach every source and sink.
SPARKS = {"path", "checkpointlocation", "queryname", "outputmode", "__partition_columns"}


class SourceOptions(msgspec.Struct, frozen=True):
    """What a read may be told."""

    url: str
    """Where the events are: the path of a folder, or penstock://host:port."""
    topics: str = "#"
    """A topic or a pattern."""
    start: str = "earliest"
    """earliest, latest, a time (`2026-11-16T08:00:00Z`, `2h`) or offsets as JSON."""
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
    given = _Given(options, "source", {
        "url", "topics", "start", "end", "columns", "schema", "lateafter", "maxeventspertrigger",
        "maxbytespertrigger", "eventspertask", "onexpired", "pushdown", "token",
    })  # fmt: skip
    topics = given.take("topics", str, "#")
    check_pattern(topics)
    columns = tuple(name.strip() for name in given.take("columns", str, "").split(","))
    return SourceOptions(
        url=given.url(),
        topics=topics,
        start=given.take("start", str, "earliest"),
        end=given.take("end", str, "latest"),
        columns=tuple(filter(None, columns)),
        schema=given.take("schema", str, None),
        late_after_us=given.take("lateafter", parse_duration, None),
        max_events_per_trigger=given.take("maxeventspertrigger", _positive, None),
        max_bytes_per_trigger=given.take("maxbytespertrigger", _positive, None),
        events_per_task=given.take("eventspertask", _positive, 500_000),
        on_expired=given.take("onexpired", _one_of("fail", "skip"), "fail"),
        pushdown=given.take("pushdown", _truth, None),
        token=given.take("token", str, None),
    )


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read a sink's options."""
    given = _Given(options, "sink", {
        "url", "topic", "queryid", "batchid", "codec", "maxtransactionbytes", "plans", "token",
    })  # fmt: skip
    return SinkOptions(
        url=given.url(),
        topic=given.take("topic", str, None),
        query_id=given.take("queryid", str, None),
        batch_id=given.take("batchid", str, None),
        codec=given.take("codec", _codec, "raw"),
        max_transaction_bytes=given.take("maxtransactionbytes", _positive, 128 << 20),
        plans=given.take("plans", check_topic, "spark.plans"),
        token=given.take("token", str, None),
    )


class _Given:
    """Options by lower-case name: Spark does not tell `topics` from `TOPICS`."""

    def __init__(self, options: Mapping[str, str], what: str, known: set[str]) -> None:
        self._values = {name.lower(): text for name, text in options.items()}
        for name in options:
            if name.lower() in known | SPARKS:
                continue
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
                "penstock://host:port"
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("give a number of 1 or more")
    return number


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


def offsets_of(text: str) -> dict[tuple[str, int], int] | None:
    """Offsets given as JSON, `{"orders": {"0": 15}}`; None when the text is something else.

    >>> offsets_of('{"orders": {"0": 15}}'), offsets_of("earliest")
    ({('orders', 0): 15}, None)
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        return {
            (topic, int(partition)): int(offset)
            for topic, partitions in json.loads(text).items()
            for partition, offset in partitions.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f'offsets are JSON of topic, partition and offset, {{"orders": {{"0": 15}}}}: {error}'
        ) from None

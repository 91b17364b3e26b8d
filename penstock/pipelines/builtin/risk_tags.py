"""Evidence to risk tags: discovery jobs, fingerprints and vulnerabilities in, risk tags out.

Every evidence event ends in exactly one place, so that `take_stock` can balance the books from the topics
alone:

* one row on `risk.tags.v1.<tenant>`, with its evidence id and its tags, of which there may be none;
* on `evidence.bad.v1.<tenant>`, its payload unchanged and the reason in a header;
* on `evidence.late.v1.<tenant>`, unchanged, when it came after the watermark had passed it;
* nowhere, when a row with the same evidence id was taken before: a duplicate.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import Window
from pyspark.sql import functions as sql

from penstock.pipelines.builtin.evidence import TOPICS
from penstock.pipelines.builtin.risk_rules import FIELDS, KINDS, load, risk_column, tags_column
from penstock.pipelines.pipeline import pipeline
from penstock.pipelines.rows import AHEAD, delay, from_the_future

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column, DataFrame

    from penstock.bus.bus import Bus


# -- the pipeline ---------------------------------------------------------------------------------

TAGS, BAD, LATE = "risk.tags.v1", "evidence.bad.v1", "evidence.late.v1"
SOURCE_HEADER = "evidence-source"
"""Header of a bad or late row: topic/partition/offset of the event it was."""
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in FIELDS.items())
RESULT = (
    "tenant STRING, evidence_id STRING, kind STRING, asset STRING, risk STRING, "
    "tags ARRAY<STRUCT<tag: STRING, severity: STRING>>, source STRING"
)
"""What a result row's payload holds."""
LATE_AFTER = "10m"
"""How late evidence may come, and how far apart duplicates may be; state is kept for this long."""
FAULT_HEADER = "evidence-fault"
"""Header of a bad row: what is wrong with it."""
WHOLE = ["tenant", "refused", "whole"]
"""What makes two rows the same: of evidence its id, of refused rows their place."""


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of `risk-tags`."""

    rules: str = ""
    """Path of a rules file; empty: those that come with Penstock."""


@pipeline(
    "risk-tags",
    reads="evidence.#",
    # Its bad and late rows lie below `evidence.` too, and would be read again without end.
    exclude=f"{BAD}.#,{LATE}.#",
    schema=SCHEMA,
    late_after=LATE_AFTER,
    table="risk.tags",
    results=f"{TAGS}.*",
    table_schema=RESULT,
    params=Params,
)
def risk_tags(events: DataFrame, params: Params) -> DataFrame:
    """Evidence in, deduplicated risk tags out; bad and late rows on topics of their own."""
    rules = load(params.rules)
    judged = events.select(
        "*",
        _fault().alias("reason"),
        sql.concat_ws("/", "topic", "partition", "offset").alias("source"),
    )
    # A batch read knows no late rows: everything is there at once.
    late = sql.col("late") if "late" in events.columns else sql.lit(False)
    marked = judged.withColumn("refused", sql.col("reason").isNotNull() | late)
    return _as_results(_first_of_each(marked), tags_column(rules))


def _fault() -> Column:
    """Why an event is no evidence; null when it is."""
    id_, kind = sql.col("value.evidence_id"), sql.col("value.kind")
    kinds = ", ".join(KINDS)
    return (
        sql.when(sql.col("fault").isNotNull(), sql.col("fault"))
        .when(id_.isNull() | (id_ == ""), sql.lit("evidence_id is missing"))
        .when(kind.isNull(), sql.lit("kind is missing"))
        .when(
            ~kind.isin(list(KINDS)),
            sql.concat(sql.lit("kind is "), kind, sql.lit(f"; it is one of {kinds}")),
        )
        .when(
            from_the_future(),
            sql.lit(f"event_time is more than {AHEAD} after the event was appended"),
        )
    )


def _first_of_each(marked: DataFrame) -> DataFrame:
    """Each evidence once, and every refused row: one query, so that events are read once.

    Which of several equal ones it is can only be told by its source.
    """
    refused = sql.col("refused")
    slim = marked.select(
        "refused", "tenant", "reason", "source", "event_time",
        sql.when(refused, sql.col("source")).otherwise(sql.col("value.evidence_id")).alias("whole"),
        sql.when(~refused, sql.col("value")).alias("value"),
        *(sql.when(refused, sql.col(name)).alias(name) for name in ("key", "headers", "codec", "payload")),
        "topic", "partition", "offset",
    )  # fmt: skip
    if slim.isStreaming:
        # A row without a time moves no watermark, and none takes it for late.
        timed = slim.withColumn("counted_at", sql.when(~refused, sql.col("event_time")))
        known = timed.withWatermark("counted_at", delay(LATE_AFTER))
        return known.dropDuplicatesWithinWatermark(WHOLE)
    # A batch can always choose the same one, so that a replay gives the same result.
    order = Window.partitionBy(*WHOLE).orderBy("topic", "partition", "offset")
    return slim.withColumn("nth", sql.row_number().over(order)).where("nth = 1")


def _as_results(rows: DataFrame, tags: Column) -> DataFrame:
    found = rows.withColumn("tags", tags).withColumn("risk", risk_column(sql.col("tags")))
    result = sql.struct(
        "tenant", sql.col("whole").alias("evidence_id"), "value.kind", "value.asset",
        "risk", "tags", "source",
    )  # fmt: skip
    made = {
        "topic": sql.lit(TAGS),
        "key": sql.encode(sql.col("value.asset"), "UTF-8"),
        "headers": _no_headers(),
        "codec": sql.lit("json"),
        "payload": sql.encode(sql.to_json(result), "UTF-8"),
    }
    aside = {
        "topic": sql.when(sql.col("reason").isNotNull(), BAD).otherwise(LATE),
        "headers": _headers_with_the_reason(),
    }
    chosen = {
        name: sql.when(sql.col("refused"), aside.get(name, sql.col(name))).otherwise(column)
        for name, column in made.items()
    }
    chosen["topic"] = sql.concat_ws(".", chosen["topic"], sql.col("tenant"))
    return found.select("event_time", *(column.alias(name) for name, column in chosen.items()))


def _headers_with_the_reason() -> Column:
    named = (SOURCE_HEADER, FAULT_HEADER)
    kept = sql.map_filter(
        sql.coalesce(sql.col("headers"), _no_headers()), lambda name, _: ~name.isin(list(named))
    )
    source = sql.create_map(sql.lit(SOURCE_HEADER), sql.col("source"))
    fault = sql.create_map(sql.lit(FAULT_HEADER), sql.col("reason"))
    return sql.when(sql.col("reason").isNotNull(), sql.map_concat(kept, source, fault)).otherwise(
        sql.map_concat(kept, source)
    )


def _no_headers() -> Column:
    return sql.expr("CAST(map() AS MAP<STRING, STRING>)")


# -- balancing the books --------------------------------------------------------------------------

SHOWN = 5  # examples of events that do not add up, for a person to look at


class _Result(msgspec.Struct):
    evidence_id: str
    source: str


class _Evidence(msgspec.Struct):
    evidence_id: str


_read_result = msgspec.json.Decoder(_Result).decode
_read_evidence = msgspec.json.Decoder(_Evidence).decode


class Balance(msgspec.Struct, frozen=True):
    """One tenant's books: `events` = out + duplicates + late + bad when they balance."""

    events: int
    out: int
    duplicates: int
    late: int
    bad: int
    lost: int = 0
    """Events that ended nowhere and are no duplicates."""
    repeated: int = 0
    """Results, late or bad rows beyond the first for one event or evidence id."""
    examples: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether every event ended in exactly one place."""
        total = self.out + self.duplicates + self.late + self.bad
        return self.events == total and not self.lost and not self.repeated


def balance(
    events: Iterable[tuple[str, bytes]],
    results: Iterable[tuple[str, str]],
    late: Iterable[str],
    bad: Iterable[str],
) -> Balance:
    """The books of one tenant: events as (source, payload), results as (source, evidence id).

    >>> seen = [("e/0/0", b'{"evidence_id": "a"}'), ("e/0/1", b'{"evidence_id": "a"}'), ("e/0/2", b"?")]
    >>> books = balance(seen, [("e/0/0", "a")], [], ["e/0/2"])
    >>> books.events, books.out, books.duplicates, books.bad, books.balanced
    (3, 1, 1, 1, True)
    >>> balance(seen, [], [], ["e/0/2"]).lost
    2
    """
    rows = list(results)
    late, bad = list(late), list(bad)
    ids = Counter(evidence_id for _, evidence_id in rows)
    places = Counter([source for source, _ in rows] + late + bad)
    twice = [name for counter in (ids, places) for name, times in counter.items() if times > 1]
    repeated = sum(times - 1 for counter in (ids, places) for times in counter.values())
    count = duplicates = 0
    lost: list[str] = []
    for source, payload in events:
        count += 1
        if places.pop(source, 0):
            continue
        if _evidence_id(payload) in ids:
            duplicates += 1
        else:
            lost.append(source)
    # What is left names events that are not there: as wrong as a second row.
    examples = (*twice, *places, *lost)[:SHOWN]
    return Balance(
        count,
        len(rows),
        duplicates,
        len(late),
        len(bad),
        len(lost),
        repeated + len(places),
        examples,
    )


def _evidence_id(payload: bytes) -> str | None:
    try:
        return _read_evidence(payload).evidence_id
    except msgspec.MsgspecError:  # a bad row that is not among the bad ones is lost
        return None


async def take_stock(bus: Bus, tenants: Iterable[str]) -> dict[str, Balance]:
    """The books of each tenant over all that its topics hold."""
    return {tenant: await _stock_of(bus, tenant) for tenant in tenants}


async def _stock_of(bus: Bus, tenant: str) -> Balance:
    # Wildcards find nothing where a topic was never written; a plain name would be an error.
    events = [
        (str(event.id), event.payload)
        for topic in TOPICS.values()
        async for event in bus.replay(f"{topic}.{tenant}.#")
    ]
    results = [
        (result.source, result.evidence_id)
        async for event in bus.replay(f"{TAGS}.{tenant}.#")
        for result in [_read_result(event.payload)]
    ]
    aside = {
        topic: [event.headers[SOURCE_HEADER] async for event in bus.replay(f"{topic}.{tenant}.#")]
        for topic in (LATE, BAD)
    }
    return balance(events, results, aside[LATE], aside[BAD])

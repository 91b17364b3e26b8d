"""Replay and compare: SHA-256 over a range of the log, the same however it is read.

Every row is hashed by itself; the hashes fall into buckets by how they begin, are sorted in their
bucket and hashed together, and the buckets' hashes, in order, give the result. Neither the order of
rows nor how Spark cuts the work has a part in it, and Python sees no row.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from pyspark.sql import functions as sql
from pyspark.sql import types

from penstock.model.errors import Corrupted, InvalidInput, InvalidSettings
from penstock.model.parameter import moment_us
from penstock.model.topic import ANY_WORDS, ONE_WORD, check_pattern, pattern_regex
from penstock.pipelines.columns import EVENT_COLUMNS
from penstock.pipelines.pipeline import pipeline

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

FORMAT = 1
BUCKET_DIGITS = 3  # 4,096 buckets: of a thousand million rows, each holds 16 MB of hashes
SETTLED_S = 5  # events younger than this may not be visible to every reader yet


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of `replay-compare`."""

    file: str = ""
    """Where the first run's hash is kept; empty: nothing is kept or compared."""
    topics: str = "#"
    since: str = ""
    """A time, or how long ago (`2h`); empty: from the beginning."""
    until: str = ""
    """The first time that is left out; empty: a few seconds ago."""


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: what was hashed, and the result."""

    format: int
    topics: str
    since_us: int
    until_us: int
    rows: int
    sha256: str


class Digest(NamedTuple):
    """How many rows there were, and the SHA-256 of the set."""

    rows: int
    sha256: str


@pipeline("replay-compare", reads="#", mode="batch", params=Params)
def replay_compare(events: DataFrame, params: Params) -> DataFrame:
    """Hash the events of a time range; the first run keeps the hash, later ones must equal it."""
    wanted = _wanted(params)
    known = _known(params, wanted)
    wanted = known or wanted
    found = digest(_selected(events, wanted).select(*EVENT_COLUMNS))
    made = msgspec.structs.replace(wanted, rows=found.rows, sha256=found.sha256)
    if known is None and params.file:
        Path(params.file).write_bytes(msgspec.json.encode(made) + b"\n")
    elif known is not None and made != known:
        raise Corrupted(
            f"the replay is another: {made.rows} rows with SHA-256 {made.sha256}, and the first run "
            f"had {known.rows} with {known.sha256}. {params.file} was left as it is; look for "
            "retention that removed events, or run `penstock doctor` on the folder",
            file=params.file,
            rows=made.rows,
            sha256=made.sha256,
        )
    verdict = "equal" if known is not None else "kept" if params.file else "hashed"
    return events.sparkSession.createDataFrame(
        [(made.topics, _time(made.since_us), _time(made.until_us), *found, verdict)],
        "topics STRING, since TIMESTAMP, until TIMESTAMP, rows BIGINT, sha256 STRING, verdict STRING",
    )


def _wanted(params: Params) -> Saved:
    check_pattern(params.topics)
    now_us = int(datetime.now(UTC).timestamp() * 1e6)
    since = moment_us("since", params.since, now_us) if params.since else 0
    until = (
        moment_us("until", params.until, now_us) if params.until else now_us - SETTLED_S * 1_000_000
    )
    return Saved(FORMAT, params.topics, since, until, 0, "")


def _known(params: Params, wanted: Saved) -> Saved | None:
    """The file of the first run; its range is used where this run names none."""
    if not params.file or not Path(params.file).exists():
        return None
    try:
        known = msgspec.json.decode(Path(params.file).read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidSettings(
            f"{params.file} does not hold what a first run keeps: {error}. Nothing was compared or "
            "changed; name another file"
        ) from None
    same = known.topics == wanted.topics
    same &= not params.since or known.since_us == wanted.since_us
    same &= not params.until or known.until_us == wanted.until_us
    if not same or known.format != FORMAT:
        raise InvalidSettings(
            f"{params.file} is about {known.topics} from {_time(known.since_us)} until "
            f"{_time(known.until_us)}, and this run asks for something else. Leave `since` and "
            "`until` out to repeat the first run, or name another file"
        )
    return known


def _time(time_us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


def _selected(events: DataFrame, wanted: Saved) -> DataFrame:
    # Comparisons with plain columns, which the source takes to read no more than this range.
    appended = sql.col("append_time")
    found = events.where(appended >= sql.lit(_time(wanted.since_us))).where(
        appended < sql.lit(_time(wanted.until_us))
    )
    if wanted.topics == ANY_WORDS:
        return found
    if not {ONE_WORD, ANY_WORDS} & set(wanted.topics.split(".")):
        return found.where(sql.col("topic") == wanted.topics)
    dotted = sql.concat(sql.lit("."), sql.col("topic"))
    return found.where(dotted.rlike(pattern_regex(wanted.topics)))


def digest(result: DataFrame) -> Digest:
    """SHA-256 of a result set: the same rows give the same digest in whatever order and cut."""
    columns = [canonical(sql.col(f"`{each.name}`"), each.dataType) for each in result.schema]
    rows = result.select(sql.sha2(sql.concat(*columns), 256).alias("hash"))
    buckets = (
        rows.groupBy(sql.substring("hash", 1, BUCKET_DIGITS).alias("bucket"))
        .agg(sql.count("*").alias("rows"), sql.sort_array(sql.collect_list("hash")).alias("hashes"))
        .select("bucket", "rows", sql.sha2(sql.array_join("hashes", "").cast("BINARY"), 256).alias("sha256"))
    )  # fmt: skip
    whole, count = hashlib.sha256(), 0
    for bucket, number, sha256 in sorted(map(tuple, buckets.collect())):
        whole.update(f"{bucket} {number} {sha256}\n".encode())
        count += number
    return Digest(count, whole.hexdigest())


def canonical(column: Column, kind: types.DataType) -> Column:
    """A value as bytes that no other value of its type has, of which no part can run into the next.

    The length in decimal, a colon and the bytes; `-` for null.
    """
    data = _bytes(column, kind)
    length = sql.length(data).cast("STRING").cast("BINARY")
    framed = sql.concat(length, sql.lit(b":"), data)
    return sql.coalesce(framed, sql.lit(b"-"))


def _bytes(column: Column, kind: types.DataType) -> Column:
    if isinstance(kind, types.BinaryType):
        return column
    if isinstance(kind, types.TimestampType):
        return sql.unix_micros(column).cast("STRING").cast("BINARY")
    if isinstance(kind, types.StructType):
        parts = [canonical(column.getField(each.name), each.dataType) for each in kind]
        return sql.when(column.isNotNull(), sql.concat(sql.lit(b"{"), *parts))
    if isinstance(kind, types.ArrayType):
        items = sql.transform(column, lambda each: sql.hex(canonical(each, kind.elementType)))
        return sql.array_join(items, ",").cast("BINARY")
    if isinstance(kind, types.MapType):
        # Maps have no order, so theirs is that of their keys.
        entries = sql.transform(
            sql.map_entries(column),
            lambda each: sql.concat(
                sql.hex(canonical(each["key"], kind.keyType)),
                sql.lit("="),
                sql.hex(canonical(each["value"], kind.valueType)),
            ),
        )
        return sql.array_join(sql.array_sort(entries), ",").cast("BINARY")
    if isinstance(kind, types.VariantType):
        raise InvalidInput("a VARIANT column cannot be hashed; cast it to a type of its own")
    return column.cast("STRING").cast("BINARY")

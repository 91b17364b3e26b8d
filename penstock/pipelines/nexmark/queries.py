"""Ten Nexmark queries as functions of DataFrames: the same function for a batch and for a stream.

Windows are those of the public definitions, and so is the watermark of four seconds, which Spark
ignores in a batch. `QUERIES` says of each query what it reads and how it streams. `from_bus` and
`from_payloads` give the tables that the queries read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from penstock.pipelines.nexmark.payload import EVENT_TIME, SCHEMAS, TOPICS

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader
    from pyspark.sql.streaming.readwriter import DataStreamReader


# -- queries --------------------------------------------------------------------------------------

WATERMARK = "4 seconds"
WATERMARK_MS = 4_000
WINDOW_S, SLIDE_S, SESSION_GAP_S = 10, 2, 10
EUROS = "0.908"

Mode = Literal["append", "update", "batch"]


@dataclass(frozen=True)
class Query:
    """A query with what a runner must know about it."""

    name: str
    title: str
    function: Callable[..., DataFrame]
    reads: Mapping[str, tuple[str, ...]]
    """The tables it gets, by argument, with the columns it uses."""
    mode: Mode
    """The output mode it streams in; `batch` when Spark cannot stream it."""
    keys: tuple[str, ...] = ()
    """In update mode: a row replaces the one before it with the same values in these columns."""

    def __call__(self, tables: Mapping[str, DataFrame]) -> DataFrame:
        """The result over tables by name: persons, auctions, bids."""
        return self.function(**{name: tables[name] for name in self.reads})


def _timely(table: DataFrame) -> DataFrame:
    return table.withWatermark(EVENT_TIME, WATERMARK)


def _seconds(count: int) -> str:
    return f"{count} seconds"


def _tumbling() -> Column:
    return f.window(EVENT_TIME, _seconds(WINDOW_S))


def q0(bids: DataFrame) -> DataFrame:
    """Every bid as it is: what reading costs."""
    return bids.select("auction", "bidder", "price", EVENT_TIME, "extra")


def q1(bids: DataFrame) -> DataFrame:
    """Every bid in euros."""
    euros = (f.lit(EUROS).cast("DECIMAL(4, 3)") * f.col("price")).cast("DECIMAL(23, 3)")
    return bids.select("auction", "bidder", euros.alias("price"), EVENT_TIME, "extra")


def q2(bids: DataFrame) -> DataFrame:
    """Bids for every 123rd auction."""
    return bids.where("auction % 123 = 0").select("auction", "price")


def q3(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """Who sells in OR, ID or CA in category 10, and which auctions?

    Without a bound in time, as defined: a stream keeps every seller and every auction without end.
    """
    sellers = persons.where(f.col("state").isin("OR", "ID", "CA"))
    offers = auctions.where("category = 10").select(f.col("id").alias("auction"), "seller")
    joined = offers.join(sellers, f.col("seller") == f.col("id"))
    return joined.select("name", "city", "state", f.col("auction").alias("id"))


def q4(auctions: DataFrame, bids: DataFrame) -> DataFrame:
    """The average of the winning prices of all auctions in a category, without its fraction.

    An average of all categories up to now over the highest price of each auction up to now: two
    aggregates whose rows change again and again. Spark chains aggregates in append mode only, where
    rows are final, so it cannot stream this.
    """
    offers = auctions.select("id", "category", f.col(EVENT_TIME).alias("opens"), "expires")
    prices = bids.select("auction", "price", EVENT_TIME)
    fits = (f.col("id") == f.col("auction")) & f.col(EVENT_TIME).between(
        f.col("opens"), f.col("expires")
    )
    winning = offers.join(prices, fits).groupBy("id", "category").agg(f.max("price").alias("final"))
    average = winning.groupBy("category").agg(f.avg("final").alias("final"))
    return average.select("category", f.floor("final").cast("BIGINT").alias("final"))


def q5(bids: DataFrame) -> DataFrame:
    """The auctions with the most bids of the last 10 seconds, every 2 seconds.

    The definition joins the counts with their maximum. Here the counts of a window are gathered
    and those that reach the maximum kept: one pass, and one the same stream can take.
    """
    window = f.window(EVENT_TIME, _seconds(WINDOW_S), _seconds(SLIDE_S))
    counts = _timely(bids).groupBy(window, "auction").agg(f.count("*").alias("num"))
    gathered = counts.groupBy("window").agg(
        f.max("num").alias("most"), f.collect_list(f.struct("auction", "num")).alias("counts")
    )
    hottest = f.filter("counts", lambda each: each["num"] == f.col("most"))
    return gathered.select(f.inline(hottest))


def q7(bids: DataFrame) -> DataFrame:
    """The highest bids of each 10 seconds.

    As defined, a bid at the very end of a window counts in it too if it has the same price.
    """
    # The time of a window is one microsecond before its end, and the column that carries the
    # watermark on: what a stream needs to know which bids it may forget.
    highest = (
        _timely(bids)
        .groupBy(_tumbling())
        .agg(f.max("price").alias("highest"))
        .select("highest", f.window_time("window").alias("closing"))
    )
    end = f.col("closing") + f.expr("INTERVAL 1 MICROSECOND")
    start = end - f.expr(f"INTERVAL {WINDOW_S} SECONDS")
    fits = (f.col("price") == f.col("highest")) & f.col(EVENT_TIME).between(start, end)
    joined = _timely(bids).join(highest, fits)
    return joined.select("auction", "bidder", "price", EVENT_TIME, "extra")


def q8(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """People who came and opened an auction within the same 10 seconds.

    The definition groups without aggregates, which is to drop duplicates; so a stream need not wait
    for the end of a window.
    """
    came = _timely(persons).select("id", "name", _tumbling().alias("came")).dropDuplicates()
    sold = _timely(auctions).select("seller", _tumbling().alias("sold")).dropDuplicates()
    fits = (f.col("id") == f.col("seller")) & (f.col("came") == f.col("sold"))
    return came.join(sold, fits).select("id", "name", f.col("came.start").alias("starttime"))


def q11(bids: DataFrame) -> DataFrame:
    """The bids of each bidder in each session, which ends after 10 seconds without one.

    Two bids exactly 10 seconds apart are in one session.
    """
    session = f.session_window(EVENT_TIME, _seconds(SESSION_GAP_S))
    counted = _timely(bids).groupBy("bidder", session).agg(f.count("*").alias("bid_count"))
    return counted.select(
        "bidder",
        "bid_count",
        f.col("session_window.start").alias("starttime"),
        f.col("session_window.end").alias("endtime"),
    )


def q18(bids: DataFrame) -> DataFrame:
    """The last bid of each bidder for each auction.

    Of several in the same millisecond, which the definition leaves open, the one with the highest
    price, and then the last by channel, url and extra.
    """
    last = f.max(f.struct(EVENT_TIME, "price", "channel", "url", "extra")).alias("last")
    found = bids.groupBy("bidder", "auction").agg(last)
    return found.select(
        "auction", "bidder", "last.price", "last.channel", "last.url", f"last.{EVENT_TIME}",
        "last.extra",
    )  # fmt: skip


_BID = ("auction", "bidder", "price", EVENT_TIME, "extra")
QUERIES: dict[str, Query] = {
    query.name: query
    for query in (
        Query("q0", "pass through", q0, {"bids": _BID}, "append"),
        Query("q1", "currency conversion", q1, {"bids": _BID}, "append"),
        Query("q2", "selection", q2, {"bids": ("auction", "price")}, "append"),
        Query("q3", "local item suggestion", q3,
              {"persons": ("id", "name", "city", "state"), "auctions": ("id", "seller", "category")},
              "append"),
        Query("q4", "average price for a category", q4,
              {"auctions": ("id", "category", EVENT_TIME, "expires"),
               "bids": ("auction", "price", EVENT_TIME)}, "batch"),
        Query("q5", "hot items", q5, {"bids": ("auction", EVENT_TIME)}, "append"),
        Query("q7", "highest bid", q7, {"bids": _BID}, "append"),
        Query("q8", "monitor new users", q8,
              {"persons": ("id", "name", EVENT_TIME), "auctions": ("seller", EVENT_TIME)}, "append"),
        Query("q11", "user sessions", q11, {"bids": ("bidder", EVENT_TIME)}, "append"),
        Query("q18", "find last bid", q18,
              {"bids": ("auction", "bidder", "price", "channel", "url", EVENT_TIME, "extra")},
              "update", keys=("bidder", "auction")),
    )
}  # fmt: skip
"""The queries by name, in their order."""


# -- tables ---------------------------------------------------------------------------------------


def payload_ddl(table: str, columns: Iterable[str]) -> str:
    """The payload of a table's events as DDL, with these columns only.

    >>> payload_ddl("auctions", ["id", "date_time", "expires"])
    'id BIGINT, expires BIGINT'
    """
    return ", ".join(
        f"{name} {'STRING' if pa.types.is_string(SCHEMAS[table].field(name).type) else 'BIGINT'}"
        for name in columns
        if name != EVENT_TIME
    )


def from_bus(
    reader: DataFrameReader | DataStreamReader, url: str, table: str, columns: Iterable[str]
) -> DataFrame:
    """A table of a bus, of which only these columns are decoded: a batch or a stream.

    `reader` is `spark.read` or `spark.readStream`, with whatever options are wanted besides.
    """
    columns = list(columns)
    rows = (
        reader.format("penstock")
        .option("url", url)
        .option("topics", TOPICS[table])
        .option("schema", payload_ddl(table, columns))
        .option("columns", "event_time,value" if EVENT_TIME in columns else "value")
        .load()
    )
    return rows.select(*_typed(table, columns))


def from_payloads(rows: DataFrame, table: str, columns: Iterable[str]) -> DataFrame:
    """A table of rows with `event_time` and `payload`, decoded by Spark's own JSON functions."""
    columns = list(columns)
    value = f.from_json(f.col("payload").cast("STRING"), payload_ddl(table, columns))
    return rows.select("event_time", value.alias("value")).select(*_typed(table, columns))


def _typed(table: str, columns: Iterable[str]) -> list[Column]:
    found = []
    for name in columns:
        if name == EVENT_TIME:
            column = f.col("event_time")
        elif pa.types.is_timestamp(SCHEMAS[table].field(name).type):
            column = f.timestamp_millis(f.col(f"value.{name}"))
        else:
            column = f.col(f"value.{name}")
        found.append(column.alias(name))
    return found

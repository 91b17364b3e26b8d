"""The results of the Nexmark queries by DuckDB: SQL of its own over the same events.

Nothing here is shared with the queries that Spark runs but the names of the columns. Times are
counted in milliseconds since 1970, so that windows are whole-number arithmetic.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.errors import NotFound
from penstock.pipelines.nexmark.generator import Events

# `$closed_ms` is the watermark that a stream ended with: it has given the windows that end at or
# before it, and no others. Without a stream it lies behind everything.
FOREVER_MS = 1 << 62

SQL = {
    "q0": "SELECT auction, bidder, price, date_time, extra FROM bids",
    "q1": """
        SELECT auction, bidder,
               CAST(price AS DECIMAL(19, 0)) * CAST(0.908 AS DECIMAL(4, 3)) AS price,
               date_time, extra
        FROM bids""",
    "q2": "SELECT auction, price FROM bids WHERE auction - 123 * (auction // 123) = 0",
    "q3": """
        SELECT p.name, p.city, p.state, a.id
        FROM auctions a, persons p
        WHERE a.seller = p.id AND a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": """
        WITH winning AS (
            SELECT a.id, any_value(a.category) AS category, max(b.price) AS final
            FROM bids b JOIN auctions a ON b.auction = a.id
            WHERE b.ms >= a.ms AND b.ms <= a.expires_ms
            GROUP BY a.id)
        SELECT category, CAST(sum(final) // count(*) AS BIGINT) AS final
        FROM winning GROUP BY category""",
    "q5": """
        WITH slides AS (
            SELECT auction, ms // 2000 AS slide, count(*) AS num FROM bids GROUP BY ALL),
        counts AS (
            SELECT auction, slide - back AS first, sum(num) AS num
            FROM slides, range(5) steps(back)
            GROUP BY ALL)
        SELECT auction, CAST(num AS BIGINT) AS num FROM counts
        WHERE first * 2000 + 10000 <= $closed_ms
        QUALIFY rank() OVER (PARTITION BY first ORDER BY num DESC) = 1""",
    "q7": """
        WITH highest AS (
            SELECT ms // 10000 * 10000 + 10000 AS closes, max(price) AS price
            FROM bids GROUP BY closes HAVING closes <= $closed_ms)
        SELECT b.auction, b.bidder, b.price, b.date_time, b.extra
        FROM bids b JOIN highest h USING (price)
        WHERE b.ms BETWEEN h.closes - 10000 AND h.closes""",
    "q8": """
        SELECT DISTINCT p.id, p.name, make_timestamp(p.ms // 10000 * 10000000) AS starttime
        FROM persons p
        WHERE EXISTS (
            FROM auctions a WHERE a.seller = p.id AND a.ms // 10000 = p.ms // 10000)""",
    "q11": """
        WITH gaps AS (
            SELECT bidder, ms,
                   coalesce(ms - lag(ms) OVER one > 10000, true) AS begins
            FROM bids WINDOW one AS (PARTITION BY bidder ORDER BY ms)),
        numbered AS (
            SELECT bidder, ms,
                   count(*) FILTER (begins) OVER (
                       PARTITION BY bidder ORDER BY ms
                       RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS session
            FROM gaps)
        SELECT bidder, count(*) AS bid_count, make_timestamp(min(ms) * 1000) AS starttime,
               make_timestamp((max(ms) + 10000) * 1000) AS endtime
        FROM numbered GROUP BY bidder, session
        HAVING max(ms) + 10000 <= $closed_ms""",
    "q18": """
        SELECT auction, bidder, price, channel, url, date_time, extra FROM bids
        QUALIFY row_number() OVER (
            PARTITION BY auction, bidder
            ORDER BY ms DESC, price DESC, channel DESC, url DESC, extra DESC) = 1""",
}


class Reference:
    """DuckDB over a set of events.

    >>> from penstock.pipelines.nexmark.generator import Generator
    >>> reference = Reference(Generator(events=5_000, seed=1).generate())
    >>> reference.result("q2").num_rows > 0
    True
    """

    def __init__(self, events: Events) -> None:
        self._connection = duckdb.connect()
        for name, table in events._asdict().items():
            self._connection.register(name, _in_milliseconds(table))

    def result(self, query: str, *, closed_ms: int = FOREVER_MS) -> pa.Table:
        """All rows of a query; with `closed_ms`, only of windows that end at that time or before."""
        if query not in SQL:
            raise NotFound(f"there is no query {query!r}; there is {', '.join(SQL)}", query=query)
        given = {"closed_ms": closed_ms} if "$closed_ms" in SQL[query] else {}
        return self._connection.sql(SQL[query], params=given).to_arrow_table()


def _in_milliseconds(table: pa.Table) -> pa.Table:
    """Times without a zone, which DuckDB reads without its calendar, and as whole numbers."""
    for name, short in (("date_time", "ms"), ("expires", "expires_ms")):
        if name in table.schema.names:
            place = table.schema.get_field_index(name)
            plain = table.column(name).cast(pa.timestamp("us"))
            table = table.set_column(place, name, plain)
            table = table.append_column(short, pc.divide(plain.cast(pa.int64()), 1000))
    return table


def same_rows(ours: pa.Table, theirs: pa.Table) -> bool:
    """Whether two results hold the same rows, each as often, in whatever order.

    Columns are compared by place; numbers and times by value, whatever their width or zone.

    >>> one = pa.table({"n": pa.array([1, 2, 2], pa.int32())})
    >>> same_rows(one, pa.table({"m": [2, 1, 2]})), same_rows(one, pa.table({"n": [1, 1, 2]}))
    (True, False)
    """
    if (ours.num_rows, ours.num_columns) != (theirs.num_rows, theirs.num_columns):
        return False
    return all(
        mine.equals(other)
        for mine, other in zip(_ordered(ours).columns, _ordered(theirs).columns, strict=True)
    )


def difference(ours: pa.Table, theirs: pa.Table, *, most: int = 3) -> str:
    """A few rows that only one of the two results has, for a message."""
    mine, other = (Counter(zip(*_ordered(each).to_pydict().values(), strict=True))
                   for each in (ours, theirs))  # fmt: skip
    only_mine, only_other = list((mine - other).elements()), list((other - mine).elements())
    return (
        f"{ours.num_rows} rows against {theirs.num_rows}; only in the first {len(only_mine)}: "
        f"{only_mine[:most]}; only in the second {len(only_other)}: {only_other[:most]}"
    )


def _ordered(table: pa.Table) -> pa.Table:
    """The rows in one order, in the widest types."""
    columns: dict[str, Any] = {
        str(place): _widened(column).combine_chunks() for place, column in enumerate(table.columns)
    }
    plain = pa.table(columns)
    return plain.sort_by([(name, "ascending") for name in plain.schema.names])


def _widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
    if pa.types.is_decimal(kind):
        return column.cast(pa.decimal128(38, kind.scale))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    return column

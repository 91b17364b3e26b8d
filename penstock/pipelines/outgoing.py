"""Rows on their way onto the bus: Arrow columns to batches by topic, and one transaction for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.arrow import TIME
from penstock.model.errors import Deferred, InvalidInput, Throttled
from penstock.pipelines.connection import Connection

ENVELOPE = ("key", "headers", "event_time", "codec")
BATCH_EVENTS = 100_000
# How long rows wait for a bus that has too much to do, or for the rate of their tenant; after that the
# query fails, and goes on from its checkpoint when it is started again.
BUSY_S = 60.0


def check_columns(names: list[str], topic: str | None) -> None:
    """Refuse rows that cannot become events, before the first of them is made."""
    unknown = sorted(set(names) - {"topic", "payload", *ENVELOPE})
    if "payload" not in names:
        raise InvalidInput(
            "rows need a `payload` column of bytes or text; make one with "
            f"to_json(struct(...)). The columns are {', '.join(names)}"
        )
    if unknown:
        raise InvalidInput(
            f"the sink does not know the column {unknown[0]!r}: it takes payload, topic, "
            f"{', '.join(ENVELOPE)}. Put the rest into the payload with to_json(struct(...))"
        )
    if topic is None and "topic" not in names:
        raise InvalidInput("rows need a `topic` column, or the sink the option `topic`")


def batches(
    rows: pa.RecordBatch, topic: str | None, codec: str
) -> Iterator[tuple[str, str, pa.Table]]:
    """The rows of each topic and codec as columns that `publish_many` takes.

    >>> rows = pa.record_batch({"topic": ["a", "b", "a"], "payload": [b"1", b"2", b"3"]})
    >>> [(name, codec, part.num_rows) for name, codec, part in batches(rows, None, "raw")]
    [('a', 'raw', 2), ('b', 'raw', 1)]
    """
    table = pa.Table.from_batches([rows])
    for name, of_topic in _split(table, "topic", topic):
        for kind, part in _split(of_topic, "codec", codec):
            yield name, kind, _as_events(part)


def _split(table: pa.Table, column: str, default: str | None) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each value of a column, without it; null is the default."""
    if column not in table.column_names:
        assert default is not None
        yield default, table
        return
    values = table.column(column)
    if values.null_count:
        if default is None:
            raise InvalidInput(
                f"{values.null_count} rows have no {column}, and the sink has no option `{column}`"
            )
        values = pc.fill_null(values, default)
    rest = table.drop_columns([column])
    for value in pc.unique(values).to_pylist():
        yield value, rest.filter(pc.equal(values, value))


def _as_events(table: pa.Table) -> pa.Table:
    if "event_time" in table.column_names:
        at = table.column_names.index("event_time")
        times = table.column(at).cast(TIME)
        if times.null_count == len(times):
            return table.remove_column(at)
        table = table.set_column(at, "event_time", times)
    payload = table.column("payload")
    if payload.null_count:
        raise InvalidInput(
            f"{payload.null_count} rows have a null payload; nothing of this batch was published. "
            "Filter them out, or coalesce them to an empty text"
        )
    return table


class Outlet(Connection):
    """A bus to publish rows to."""

    def publish(
        self, rows: Iterable[pa.RecordBatch], topic: str | None, key: str, codec: str = "raw"
    ) -> bool:
        """All rows or none, once for the key; False when they had been published before."""
        return self.wait(self._publish(rows, topic, key, codec))

    async def _publish(
        self, rows: Iterable[pa.RecordBatch], topic: str | None, key: str, codec: str
    ) -> bool:
        wanted = [
            (name, kind, table.slice(start, BATCH_EVENTS))
            for batch in rows
            for name, kind, table in batches(batch, topic, codec)
            for start in range(0, table.num_rows, BATCH_EVENTS)
        ]
        give_up_at = time.monotonic() + BUSY_S
        while True:
            try:
                async with self.bus.transaction(idempotency_key=key) as transaction:
                    for name, kind, part in wanted:
                        transaction.publish_many(name, part, codec=kind)
                return not transaction.repeated
            except (Deferred, Throttled) as busy:
                if time.monotonic() + busy.retry_after_s > give_up_at:
                    raise
                await asyncio.sleep(busy.retry_after_s)


_open: dict[tuple[str, str | None], Outlet] = {}


def outlet_at(url: str, token: str | None) -> Outlet:
    """The outlet of a broker, the same one for the life of this process."""
    key = (url, token)
    if key not in _open:
        _open[key] = Outlet(url, token)
    return _open[key]

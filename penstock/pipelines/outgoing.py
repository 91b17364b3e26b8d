"""Rows on their way onto the bus: Arrow columns to batches by topic, and one transaction for all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.arrow import TIME
from penstock.model.errors import (
    AccessDenied,
    ConnectionLost,
    Deferred,
    EncodeFailed,
    InvalidInput,
    Throttled,
    UnknownTopic,
)
from penstock.pipelines.connection import Connection, is_broker
from penstock.pipelines.failpoint import failpoint
from penstock.pipelines.parts import ROW_BYTES, Plan, Rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ENVELOPE = ("key", "headers", "event_time", "codec")
JSON = "json"
MAX_SHOWN_BYTES = 80
TAKEN = (*ENVELOPE, "partition")
Wanted = tuple[str, str, int | None, pa.Table]
BATCH_EVENTS = 100_000
# How long rows wait for a bus that has too much to do, or for the rate of their tenant; after that the
# query fails, and goes on from its checkpoint when it is started again.
BUSY_S = 60.0


def checked(rows: Iterable[pa.RecordBatch], codec: str) -> Iterator[pa.RecordBatch]:
    """The rows of a task, none of which the bus or its consumers will stumble over."""
    failpoint("sink.task-begun")
    for each in rows:
        missing = each.column("payload").null_count
        if missing:
            raise InvalidInput(
                f"{missing} rows have a null payload; nothing of this batch was published. "
                "Filter them out, or coalesce them to an empty text"
            )
        _check_json(each, codec)
        yield each


def _check_json(rows: pa.RecordBatch, codec: str) -> None:
    """Refuse a payload that is said to be JSON and is not, with the row it is in."""
    if "codec" in rows.schema.names:
        kinds = pc.fill_null(rows.column("codec"), codec)
        said = np.flatnonzero(pc.equal(kinds, JSON).to_numpy(zero_copy_only=False))
    else:
        said = np.arange(rows.num_rows if codec == JSON else 0)
    if not len(said):
        return
    decode = msgspec.json.decode
    payloads = rows.column("payload").take(pa.array(said)).cast(pa.binary()).to_pylist()
    for at, payload in zip(said.tolist(), payloads, strict=True):
        try:
            decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            row = {
                name: rows.column(name)[at].as_py()
                for name in ("topic", "key")
                if name in rows.schema.names
            }
            raise EncodeFailed(
                f"the payload {payload[:MAX_SHOWN_BYTES]!r} of the row with {row} "
                f"is not JSON, and its codec is 'json': {error}. Nothing of this batch was "
                "published. Make payloads with to_json(), or set the codec to raw"
            ) from None


@dataclass(frozen=True)
class Batch:
    """What is published as one."""

    name: str
    """The same in every attempt, and in no other batch."""
    topic: str | None
    codec: str
    limit_bytes: int
    """More than this is published in parts."""
    plans: str
    """The topic where the plan of such a batch is recorded."""


# Types of the sink's columns, by the names that Spark's simpleString gives them.
COLUMN_TYPES = {
    "payload": ("binary", "string"),
    "topic": ("string",),
    "key": ("binary", "string"),
    "headers": ("map<string,string>", "void"),
    "event_time": ("timestamp", "timestamp_ntz", "date", "void"),
    "codec": ("string",),
    "partition": ("int", "smallint", "tinyint", "bigint", "void"),
}


def check_columns(schema: StructType, topic: str | None) -> None:
    """Refuse rows that cannot become events, before the first of them is made."""
    names = schema.names
    unknown = sorted(set(names) - {"topic", "payload", *TAKEN})
    if "payload" not in names:
        raise InvalidInput(
            "rows need a `payload` column of bytes or text; make one with "
            f"to_json(struct(...)). The columns are {', '.join(names)}"
        )
    if unknown:
        raise InvalidInput(
            f"the sink does not know the column {unknown[0]!r}: it takes payload, topic, "
            f"{', '.join(TAKEN)}. Put the rest into the payload with to_json(struct(...))"
        )
    if topic is None and "topic" not in names:
        raise InvalidInput("rows need a `topic` column, or the sink the option `topic`")
    for column in schema:
        wanted, found = COLUMN_TYPES[column.name], column.dataType.simpleString()
        plain = "string" if found.startswith(("char(", "varchar(", "string ")) else found
        if plain not in wanted:
            may_be = " or ".join(each.upper() for each in wanted if each != "void")
            raise InvalidInput(
                f"the column {column.name!r} is {found.upper()}, and the sink takes {may_be}; nothing was "
                f"published. Make it one, for example with CAST({column.name} AS {wanted[0].upper()})",
                column=column.name,
            )


def drafts(
    rows: Iterable[pa.RecordBatch], topic: str | None, codec: str
) -> Iterator[tuple[str, str, int | None, pa.Table]]:
    """The rows of each topic, codec and partition as columns that `publish_many` takes.

    >>> rows = pa.record_batch({"topic": ["a", "b", "a"], "payload": [b"1", b"2", b"3"]})
    >>> [(name, codec, part.num_rows) for name, codec, _, part in drafts([rows], None, "raw")]
    [('a', 'raw', 2), ('b', 'raw', 1)]
    """
    table = pa.Table.from_batches(list(rows))
    for name, of_topic in _split(table, "topic", topic):
        for kind, of_codec in _split(of_topic, "codec", codec):
            for partition, part in _of_partitions(of_codec):
                events = _as_events(part)
                for start in range(0, events.num_rows, BATCH_EVENTS):
                    yield name, kind, partition, events.slice(start, BATCH_EVENTS)


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


def _of_partitions(table: pa.Table) -> Iterator[tuple[int | None, pa.Table]]:
    """The rows that name a partition, by it, and those whose key shall choose it."""
    if "partition" not in table.column_names:
        yield None, table
        return
    values = table.column("partition")
    rest = table.drop_columns(["partition"])
    for value in pc.unique(values).to_pylist():
        chosen = pc.is_null(values) if value is None else pc.equal(values, value)
        yield value, rest.filter(chosen)


def _as_events(table: pa.Table) -> pa.Table:
    if "event_time" in table.column_names:
        at = table.column_names.index("event_time")
        times = table.column(at).cast(TIME)
        if times.null_count == len(times):
            return table.remove_column(at)
        table = table.set_column(at, "event_time", times)
    return table


class Outlet(Connection):
    """A bus to publish batches to, each once."""

    def __init__(self, url: str, token: str | None) -> None:
        # A large transaction takes its time on a busy disk; without a broker there is no deadline.
        more = {"client__deadline_s": BUSY_S} if is_broker(url) else {}
        super().__init__(url, token, **more)

    def publish(self, rows: Callable[[], Iterator[pa.RecordBatch]], batch: Batch) -> bool:
        """All rows, once for the name of the batch; False when they had been published before.

        `rows` gives them anew each time it is called: a large batch is walked several times.
        """
        return self.wait(self._publish(rows, batch))

    async def _publish(self, rows: Callable[[], Iterator[pa.RecordBatch]], batch: Batch) -> bool:
        size = sum(each.nbytes + each.num_rows * ROW_BYTES for each in rows())
        if size <= batch.limit_bytes:
            if size and await self._transact(batch.name, drafts(rows(), batch.topic, batch.codec)):
                return True
            try:
                plan = await self._recorded(batch)
            except AccessDenied:  # who may not read plans has not recorded one either
                plan = None
            if plan is None or plan.done:
                return False
            known = Rows(rows(), batch.topic, batch.codec)
        else:
            plan = await self._recorded(batch)
            if plan is not None and plan.done:
                return False
            known = Rows(rows(), batch.topic, batch.codec)
            if plan is None:
                plan = known.plan(batch.name, batch.limit_bytes)
                if not await self._transact(batch.name, [_record(plan, batch)]):
                    plan = await self._recorded(batch)
                    if plan is None:  # it was published whole, with a higher limit
                        return False
        plan.check(known)
        failpoint("sink.planned")
        for number, (first, stop) in enumerate(plan.parts, 1):
            part = list(known.part(rows(), first, stop))
            wanted = list(drafts(part, batch.topic, batch.codec)) if part else []
            if number == len(plan.parts):
                wanted.append(_record(msgspec.structs.replace(plan, done=True), batch))
            await self._transact(f"{batch.name}/part/{number}", wanted)
            failpoint("sink.part-published")
        return True

    async def _recorded(self, batch: Batch) -> Plan | None:
        """The plan of an earlier attempt; None when the batch was not cut."""
        found: Plan | None = None
        with contextlib.suppress(UnknownTopic):  # no batch was ever cut
            async for event in self.bus.replay(batch.plans):
                if event.key == batch.name.encode():
                    found = msgspec.json.decode(event.payload, type=Plan)
        return found

    async def _transact(self, key: str, wanted: Iterable[Wanted]) -> bool:
        """Publish these together, once for the key; False when that had happened before."""
        ready = list(wanted)
        give_up_at = time.monotonic() + BUSY_S
        while True:
            try:
                async with self.bus.transaction(idempotency_key=key) as transaction:
                    for name, kind, partition, part in ready:
                        transaction.publish_many(name, part, codec=kind, partition=partition)
                return not transaction.repeated
            except (Deferred, Throttled) as busy:
                if time.monotonic() + busy.retry_after_s > give_up_at:
                    raise
                await asyncio.sleep(busy.retry_after_s)
            except ConnectionLost:  # whether it happened is found out by its key
                if time.monotonic() > give_up_at:
                    raise


def _record(plan: Plan, batch: Batch) -> Wanted:
    columns = {"payload": [msgspec.json.encode(plan)], "key": [batch.name.encode()]}
    return batch.plans, "json", None, pa.table(columns)


_open: dict[tuple[str, str | None], Outlet] = {}


def outlet_at(url: str, token: str | None) -> Outlet:
    """The outlet of a broker, the same one for the life of this process."""
    key = (url, token)
    if key not in _open:
        _open[key] = Outlet(url, token)
    return _open[key]

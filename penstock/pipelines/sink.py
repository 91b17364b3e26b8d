"""`write.format("penstock")` and `writeStream`: rows onto the bus, exactly once.

Tasks stage their rows and publish nothing. When all tasks are done, the driver publishes the batch as
one transaction whose key is query and batch. So a failed attempt leaves nothing on the bus, and
repeating a published batch does nothing, whichever tasks it has then.

A batch that is too large for one transaction is published in parts, each once. An attempt may give the
same rows to other tasks, in another order, so the row itself decides its part: its topic and key, or all
of it where it has no key, fall into one of many buckets, and a part is a range of buckets. Rows of one
key stay together, in their order. The plan of the parts is recorded before the first part, with a digest
of all rows that does not depend on their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.log.recovery import ABOUT, STAGING
from penstock.model.arrow import TIME
from penstock.model.errors import (
    AccessDenied,
    BatchChanged,
    ConnectionLost,
    Deferred,
    EncodeFailed,
    InvalidInput,
    PayloadTooLarge,
    Throttled,
    UnknownTopic,
)
from penstock.pipelines.failure import failpoint, plain_errors
from penstock.pipelines.options import SinkOptions, sink_options
from penstock.pipelines.stores import Connection, is_broker

# -- writers, as Spark calls them -----------------------------------------------------------------

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


class Delivery:
    """How rows of one write get onto a bus."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_columns(schema, options.topic)
        self.options = options
        self.staging = Staging.of(options.url)

    def put(self, name: str, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows, of the batch of this name."""
        staged = self.staging.put(name, checked(rows, self.options.codec))
        failpoint("sink.task-done")
        return staged

    def finish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done: publish what they staged."""
        staged = [each for each in messages if isinstance(each, Staged)]
        if not staged:
            return
        failpoint("sink.before-commit")
        # Also without rows: an earlier attempt that had some may have published a part of them.
        if any(each.rows for each in staged) or self._may_hold_a_part():
            self._publish(staged)
        failpoint("sink.after-commit")
        self.forget(messages)

    def _may_hold_a_part(self) -> bool:
        """Whether there is a bus at all; a batch without rows makes none."""
        return is_broker(self.options.url) or (Path(self.options.url) / ABOUT).exists()

    def _publish(self, staged: Sequence[Staged]) -> None:
        chosen = self.options
        batch = Batch(
            staged[0].name, chosen.topic, chosen.codec, chosen.max_transaction_bytes, chosen.plans
        )
        to_broker = is_broker(chosen.url)
        publisher = (publisher_at if to_broker else BatchPublisher)(chosen.url, chosen.token)
        try:
            publisher.publish(lambda: rows_of(staged), batch)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(
                f"{error.message}. Give the sink a smaller `maxTransactionBytes` (now "
                f"{chosen.max_transaction_bytes}), or raise the limit",
                **error.data,
            ) from error
        finally:
            if not to_broker:
                publisher.close()

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what tasks staged."""
        for name in {each.name for each in messages if isinstance(each, Staged)}:
            self.staging.forget(name)


@plain_errors
class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame once; named by `queryId` and `batchId`, or by itself."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        chosen = sink_options(options)
        if overwrite:
            raise InvalidInput("a topic is a log: use mode('append'), nothing is overwritten")
        if (chosen.query_id is None) != (chosen.batch_id is None):
            raise InvalidInput("give `queryId` and `batchId` together, or neither")
        self._delivery = Delivery(chosen, schema)
        if chosen.query_id is not None:
            # Several writes of one batch, as foreachBatch allows them, are told apart by their topics.
            named = "" if chosen.topic is None else f"/{chosen.topic}"
            self._name = f"{chosen.query_id}/{chosen.batch_id}{named}"
        else:
            self._name = f"batch/{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows."""
        return self._delivery.put(self._name, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task failed for good."""
        self._delivery.forget(messages)


@plain_errors
class StreamWriter(DataSourceStreamArrowWriter):
    """Writes every batch of a query once; named by query and batch.

    In complete mode a batch is the whole result so far, and each is published: a topic is a log.
    """

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._delivery = Delivery(sink_options(options), schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage a task's rows of one batch."""
        task = TaskContext.get()
        assert task is not None
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise InvalidInput(
                "Spark told neither query nor batch, so a repetition could not be known; "
                "nothing was published. Use Spark 4.1 or newer"
            )
        return self._delivery.put(f"{query}/{batch}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a batch are done."""
        self._delivery.finish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A batch failed for good."""
        self._delivery.forget(messages)


# -- staging on the workers -----------------------------------------------------------------------

INLINE_BYTES = 64 << 10
"""Rows that travel in a message: less than the 1 MiB up to which Spark sends a task's result directly."""
KEPT_S = 7 * 86_400.0
"""Age at which a file that a killed task left is deleted; a batch does not take this long."""
_MARK = "mark"


@dataclass
class Staged(WriterCommitMessage):
    """What a task hands to the driver: its rows, or the file that holds them."""

    name: str
    """Of the batch; the same in every attempt."""
    rows: int = 0
    data: bytes | None = None
    path: str | None = None


@dataclass
class Staging:
    """Where tasks of one write leave their rows until the driver publishes the batch.

    A few rows travel inside the task's message to the driver. More of them go into a file: in
    `staging/` of a data folder, or in the driver's temporary folder when the worker sees the same one.
    A worker of another machine sends all of its rows in the message, compressed.
    """

    folder: str
    mark: str
    """Random text in the folder, which a folder of the same name on another machine does not have;
    empty for a data folder, which workers must see."""

    @classmethod
    def of(cls, url: str) -> Staging:
        """The staging of a data folder, or of a broker; made on the driver."""
        if not is_broker(url):
            return cls(str(Path(url) / STAGING), "")
        folder = Path(tempfile.gettempdir()) / f"penstock-staging-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise InvalidInput(
                f"{folder} can be read by other users, so rows cannot wait there; nothing was "
                "published. Remove it, or set TMPDIR to a folder of your own"
            )
        if not _mark(folder):
            unfinished = folder / f"{_MARK}-{uuid.uuid4().hex}"
            unfinished.write_text(uuid.uuid4().hex)
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, folder / _MARK)  # complete, and never replaced
            unfinished.unlink()
        return cls(str(folder), _mark(folder) or uuid.uuid4().hex)

    def put(self, name: str, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Store a task's rows; the unfinished file of a task that fails is removed."""
        some: list[pa.RecordBatch] = []
        size = 0
        for each in rows:
            if each.num_rows:
                some.append(each)
                size += each.nbytes
            if size > INLINE_BYTES and self._shared():
                return self._into_a_file(name, some, rows)
        if not some:
            return Staged(name)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd" if size > INLINE_BYTES else None)
        with pa.ipc.new_file(sink, some[0].schema, options=options) as writer:
            for each in some:
                writer.write_batch(each)
        return Staged(name, sum(each.num_rows for each in some), sink.getvalue().to_pybytes())

    def _shared(self) -> bool:
        """Whether the driver will find a file that is written here."""
        return not self.mark or _mark(Path(self.folder)) == self.mark

    def _into_a_file(
        self, name: str, first: Sequence[pa.RecordBatch], rest: Iterator[pa.RecordBatch]
    ) -> Staged:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_stem(name)}-{uuid.uuid4().hex}.arrow"
        count = 0
        try:
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_file(file, first[0].schema) as writer,
            ):
                for rows in (first, rest):
                    for each in rows:
                        writer.write_batch(each)
                        count += each.num_rows
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Staged(name, count, None, str(path))

    def forget(self, name: str) -> None:
        """Remove the files of a batch, of every attempt, and files older than `KEPT_S`."""
        oldest = time.time() - KEPT_S
        for path in Path(self.folder).glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith(f"{_stem(name)}-") or path.stat().st_mtime < oldest:
                    path.unlink()


def rows_of(staged: Sequence[Staged]) -> Iterator[pa.RecordBatch]:
    """The rows of a batch, task by task; those in files are read when they are used."""
    for each in staged:
        if each.path is not None:
            with pa.memory_map(each.path) as file:
                yield from _batches(file)
        elif each.data is not None:
            yield from _batches(pa.BufferReader(each.data))


def _batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _mark(folder: Path) -> str:
    try:
        return (folder / _MARK).read_text()
    except OSError:  # not there: this is another machine, or another user's folder
        return ""


def _stem(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


# -- publishing on the driver ---------------------------------------------------------------------

ENVELOPE = ("key", "headers", "event_time", "codec")
JSON = "json"
MAX_SHOWN_BYTES = 80
TAKEN = (*ENVELOPE, "partition")
Wanted = tuple[str, str, int | None, pa.Table]
BATCH_EVENTS = 100_000
# How long rows wait for a busy bus, or for the rate of their tenant; after that the query fails, and
# continues from its checkpoint when it is started again.
BUSY_S = 60.0


def checked(rows: Iterable[pa.RecordBatch], codec: str) -> Iterator[pa.RecordBatch]:
    """The rows of a task; a null payload, or JSON that is none, is refused here."""
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
    """What is published as one batch."""

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
    """The rows of each partition they name, and those whose key chooses it."""
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


class BatchPublisher(Connection):
    """A bus to publish batches to, each once."""

    def __init__(self, url: str, token: str | None) -> None:
        # A large transaction takes its time on a busy disk; without a broker there is no deadline.
        more = {"client__deadline_s": BUSY_S} if is_broker(url) else {}
        super().__init__(url, token, **more)

    def publish(self, rows: Callable[[], Iterator[pa.RecordBatch]], batch: Batch) -> bool:
        """All rows, once for the name of the batch; False when they had been published before.

        `rows` yields them again at each call: a large batch is walked several times.
        """
        return self.wait(self._publish(rows, batch))

    async def _publish(self, rows: Callable[[], Iterator[pa.RecordBatch]], batch: Batch) -> bool:
        size = sum(each.nbytes + each.num_rows * ROW_BYTES for each in rows())
        if size <= batch.limit_bytes:
            if size and await self._transact(batch.name, drafts(rows(), batch.topic, batch.codec)):
                return True
            try:
                plan = await self._recorded(batch)
            except AccessDenied:  # a client that may not read plans has not recorded one either
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
            except ConnectionLost:  # trying again with the same key tells whether it happened
                if time.monotonic() > give_up_at:
                    raise


def _record(plan: Plan, batch: Batch) -> Wanted:
    columns = {"payload": [msgspec.json.encode(plan)], "key": [batch.name.encode()]}
    return batch.plans, "json", None, pa.table(columns)


_open: dict[tuple[str, str | None], BatchPublisher] = {}


def publisher_at(url: str, token: str | None) -> BatchPublisher:
    """The publisher to a broker, the same one for the life of this process."""
    key = (url, token)
    if key not in _open:
        _open[key] = BatchPublisher(url, token)
    return _open[key]


# -- parts of a large batch -----------------------------------------------------------------------

BUCKETS = 4_096
"""With parts of 128 MiB each, a batch of 500 GiB still has buckets enough."""
ROW_BYTES = 64
"""The most that an event takes besides its payload, key and headers."""
_WORD = (1 << 64) - 1


class Plan(msgspec.Struct, frozen=True):
    """How a batch is cut; recorded on a topic, as JSON."""

    batch: str
    events: int
    digest: str
    """Of all rows and of the sink's options that decide where they go."""
    bounds: tuple[int, ...]
    """The buckets at which parts begin, and the end of the last."""
    done: bool = False
    """Recorded again like this with the last part."""

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The ranges of buckets."""
        return list(pairwise(self.bounds))

    def check(self, rows: Rows) -> None:
        """Refuse rows that are not those of the attempt that recorded the plan."""
        if (self.events, self.digest) != (rows.events, rows.digest):
            raise BatchChanged(
                f"the batch {self.batch} was begun with {self.events:,} rows, some of them are "
                f"published, and this attempt has {rows.events:,} rows that are not the same: its rows "
                "or the sink's options `topic` and `codec` changed between attempts. Nothing more was "
                "published. Restore the options, and make the query give the same rows again (leave "
                "out rand(), uuid() and reads of what changes); a batch within `maxTransactionBytes` "
                "has no such limit",
                batch=self.batch,
                events=self.events,
                found=rows.events,
            )


class Rows:
    """Buckets, sizes and the digest of the rows of a large batch.

    >>> one = pa.record_batch({"payload": [b"a", b"b"], "key": [b"k", None]})
    >>> other = pa.record_batch({"payload": [b"b", b"a"], "key": [None, b"k"]})
    >>> Rows([one], "t", "raw").digest == Rows([other], "t", "raw").digest
    True
    """

    def __init__(self, rows: Iterable[pa.RecordBatch], topic: str | None, codec: str) -> None:
        self.events = 0
        self._sum = 0
        self._options = msgspec.json.encode([topic, codec])
        self._sizes: Any = np.zeros(BUCKETS, dtype=np.int64)
        self._buckets: list[Any] = []
        for each in rows:
            self._take(each, topic)

    def _take(self, rows: pa.RecordBatch, topic: str | None) -> None:
        names = sorted(rows.schema.names)
        at = {name: number for number, name in enumerate(names)}
        columns = [rows.column(name).to_pylist() for name in names]
        buckets: Any = np.empty(rows.num_rows, dtype=np.int32)
        sizes: Any = np.empty(rows.num_rows, dtype=np.int64)
        encode = msgspec.msgpack.Encoder().encode
        for number, row in enumerate(zip(*columns, strict=True)):
            values = list(row)
            if "headers" in at and values[at["headers"]] is not None:
                values[at["headers"]] = sorted(values[at["headers"]])
            whole = encode(values)
            self._sum += int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little")
            key = values[at["key"]] if "key" in at else None
            if key is not None:
                named = values[at["topic"]] if "topic" in at else None
                buckets[number] = zlib.crc32(encode([named or topic, key])) % BUCKETS
            else:
                buckets[number] = zlib.crc32(whole) % BUCKETS
            sizes[number] = len(whole) + ROW_BYTES
        np.add.at(self._sizes, buckets, sizes)
        self._buckets.append(buckets)
        self.events += rows.num_rows

    @property
    def digest(self) -> str:
        """The same for the same rows in any order and cut."""
        words = (self._sum & _WORD).to_bytes(8, "little")
        return hashlib.blake2b(words + self._options, digest_size=16).hexdigest()

    def plan(self, batch: str, limit_bytes: int) -> Plan:
        """Parts within the limit, as few as there can be; rows of one bucket are never cut."""
        bounds, size = [0], 0
        for bucket, more in enumerate(self._sizes.tolist()):
            if size and size + more > limit_bytes:
                bounds.append(bucket)
                size = 0
            size += more
        return Plan(batch, self.events, self.digest, (*bounds, BUCKETS))

    def part(
        self, rows: Iterable[pa.RecordBatch], first: int, stop: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some buckets, of the same batches that this was made of."""
        for each, buckets in zip(rows, self._buckets, strict=True):
            chosen = (buckets >= first) & (buckets < stop)
            if chosen.any():
                yield each.filter(pa.array(chosen))

"""Parts: how a batch that is too large for one transaction is published in several, each once.

An attempt may give the same rows to other tasks, in other numbers and in another order. So what
belongs to a part is told by the row itself: its topic and key, or all of it where it has no key, fall
into one of many buckets, and a part is a range of buckets. Rows of one key stay together, in their order.
The plan is recorded before the first part, with a digest of all rows that does not depend on their order.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.model.errors import BatchChanged

BUCKETS = 4_096
"""So fine are parts: with a limit of 128 MiB a batch of 500 GiB is cut well."""
ROW_BYTES = 64
"""What an event takes beside its payload, key and headers, at the most."""
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
    """What is known of the rows of a large batch: buckets, bytes and the digest.

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

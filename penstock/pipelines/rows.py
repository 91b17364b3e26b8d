"""Rows of a read: the log's columns as Spark wants them, typed values and lateness beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.arrow import TIME
from penstock.model.errors import Corrupted, OffsetExpired
from penstock.pipelines.columns import EVENT_COLUMNS, FAULT, LATE, VALUE, log_columns, plain
from penstock.pipelines.failure import reading
from penstock.pipelines.notice import tell_skipped
from penstock.pipelines.payload import Decoder
from penstock.pipelines.plan import Offsets, Split
from penstock.pipelines.store import store_at


class Reading(msgspec.Struct, frozen=True):
    """What every task of a read has to know; travels to the workers."""

    url: str
    token: str | None
    columns: tuple[str, ...]
    never_null: tuple[str, ...]
    """Those of the columns that Spark was told hold no null, and does not look for any."""
    value_type: bytes | None
    """The struct of `value`, as an Arrow schema."""
    skip_expired: bool

    def rows(
        self, splits: Sequence[Split], late_before_us: int | None, began: Offsets
    ) -> Iterator[pa.RecordBatch]:
        """Everything in these splits; `began` is where their partitions did when they were planned."""
        wanted = log_columns(
            self.columns,
            decoded=bool({VALUE, FAULT} & set(self.columns)),
            late=LATE in self.columns,
        )
        shaper = _Shaper(self, late_before_us)
        for split in splits:
            with reading([split]):
                for stored in self.stored(split, wanted, began):
                    yield shaper.shape(stored)

    def stored(
        self, split: Split, wanted: Sequence[str], began: Offsets | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The log's columns of a split; what retention took fails or is skipped, as was asked for.

        The planner tells of what was gone before, and this of what went since it looked.
        """
        store = store_at(self.url, self.token)
        try:
            yield from store.rows(split, wanted)
        except OffsetExpired as error:
            first = error.data.get("first_offset")
            if not self.skip_expired or first is None or first <= split.start:
                raise
            upto = min(first, split.stop)
            if began is not None:
                lane = (split.topic, split.partition)
                gone = msgspec.structs.replace(
                    split, start=max(split.start, began.get(lane, 0)), stop=upto
                )
                if gone.start < upto:
                    tell_skipped(gone)
            if upto < split.stop:
                yield from store.rows(msgspec.structs.replace(split, start=upto), wanted)


class _Shaper:
    """Makes a read's columns out of the log's."""

    def __init__(self, reading: Reading, late_before_us: int | None) -> None:
        self._columns = reading.columns
        self._never_null = frozenset(reading.never_null)
        self._decoder = None
        if reading.value_type is not None:
            fields = pa.ipc.read_schema(pa.py_buffer(reading.value_type))
            self._decoder = Decoder(pa.struct(list(fields)))
        self._late_before = pa.scalar(late_before_us or 0, pa.int64()).cast(TIME)

    def shape(self, stored: pa.RecordBatch) -> pa.RecordBatch:
        arrays: list[Any] = []
        value = fault = None
        if self._decoder is not None and {VALUE, FAULT} & set(self._columns):
            value, fault = self._decoder.decode(
                stored.column("payload"), plain(stored.column("codec")).to_pylist()
            )
        for name in self._columns:
            if name == VALUE:
                arrays.append(value)
            elif name == FAULT:
                arrays.append(fault)
            elif name == LATE:
                arrays.append(pc.less(stored.column("event_time"), self._late_before))
            else:
                arrays.append(plain(stored.column(EVENT_COLUMNS[name][2])))
        return pa.RecordBatch.from_arrays(
            arrays, schema=pa.schema(list(map(self._field, self._columns, arrays)))
        )

    def _field(self, name: str, array: pa.Array) -> pa.Field:
        if name in self._never_null and array.null_count:
            raise Corrupted(f"column {name!r} of the log has {array.null_count} nulls in a batch")
        return pa.field(name, array.type, nullable=name not in self._never_null)

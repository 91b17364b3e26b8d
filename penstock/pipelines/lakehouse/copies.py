"""Copies of a topic's events out of segments that it shares, one Parquet file per tenant and day."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.log.segment_reader import SegmentReader
from penstock.model.arrow import SCHEMA, to_arrow
from penstock.pipelines.lakehouse.files import PartitionWriter
from penstock.pipelines.lakehouse.removal import remove_old
from penstock.pipelines.lakehouse.table import Cut, Layout

if TYPE_CHECKING:
    from penstock.log.disk import Disk
    from penstock.log.segment import Range, SegmentInfo

# Read at a time: as much as a row group of the log, so that a copy never needs more than two.
READ_EVENTS = 65_536
READ_BYTES = 32 * 1024 * 1024
COPIES = "copied"
KEEP_S = 3600.0  # longer than a run or a scan takes


def copy_rows(
    disk: Disk,
    info: SegmentInfo,
    ranges: Sequence[Range],
    folder: str,
    properties: Mapping[str, str],
) -> list[str]:
    """Write the events of these ranges of one topic, every byte checked; returns the files.

    No two runs write the same file: one may die, or still be at it.
    """
    name = f"{ranges[0].topic}/{info.id:012d}-{uuid.uuid4().hex[:12]}-"
    layout = Layout(f"{folder}/{COPIES}", SCHEMA, Cut("tenant", "append_time"), prefix=name)
    writer = PartitionWriter(layout, "copy", properties)
    reader = SegmentReader(disk, info)
    try:
        for each in ranges:
            for record in _records(reader, each):
                writer.add(record)
    finally:
        reader.close()
    return [each.path for each in writer.finish()]


def origin(path: str) -> tuple[str | None, int]:
    """Which segment a data file of a topic's table is or was copied from, then with its topic.

    >>> origin("file:///log/segments/000000000007.parquet")
    (None, 7)
    >>> origin("file:///lake/orders/v1/data/copied/orders.v1/000000000007-5f0c-part-copy-0.parquet")
    ('orders.v1', 7)
    """
    folder, topic, name = path.rsplit("/", 2)
    number = int(re.split(r"[-.]", name)[0])
    return (topic if folder.endswith(f"/{COPIES}") else None), number


def remove_old_copies(folder: str, listed: Iterable[str], properties: Mapping[str, str]) -> int:
    """Delete copies that no table lists, unless they are so young that a run or a reader has them."""
    return remove_old(f"{folder}/{COPIES}", listed, properties, keep_s=KEEP_S)


def _records(reader: SegmentReader, wanted: Range) -> Iterator[pa.RecordBatch]:
    at = wanted.first_offset
    while at <= wanted.last_offset:
        left = wanted.last_offset - at + 1
        batches = reader.read(
            wanted.topic, wanted.partition, at,
            limit_events=min(left, READ_EVENTS), limit_bytes=READ_BYTES,
        )  # fmt: skip
        for batch in batches:
            yield to_arrow(batch)
        at = batches[-1].end_offset

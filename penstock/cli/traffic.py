"""Recorded traffic: when which tenant published how much, read back from the log without payloads."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.log.disk import RealDisk
from penstock.log.measure import measured
from penstock.log.recovery import Recovered, Recovery, check_folder
from penstock.log.segment_reader import corrupted
from penstock.model.batch_head import BatchHead
from penstock.model.topic import is_system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.log.segment import SegmentInfo
    from penstock.model.settings import Settings

MAX_BATCHES = 500_000
"""Batches of a rehearsal, the newest ones: about 100 MB, and 5 s of a core for two sets of limits."""

COLUMNS = ["topic", "append_time", "tenant"]


class Batch(NamedTuple):
    """Events of one tenant and topic that were stored together."""

    time_us: int
    tenant: str
    topic: str
    events: int
    payload_bytes: int
    event_bytes: int
    """As `penstock.log.measure` has them, keys and headers included: what storage counts."""


class Traffic(msgspec.Struct, kw_only=True):
    """What was published in a stretch of time, and what was stored before it."""

    batches: list[Batch]
    stored_bytes: dict[str, int]
    """Bytes of each tenant that were there when the stretch began."""
    cut: bool
    """Whether there was more than a rehearsal takes, so that the oldest were left out."""


def read_traffic(folder: Path, settings: Settings, window_s: float) -> Traffic:
    """What the log holds of the last `window_s` before its newest event."""
    disk = RealDisk(folder)
    check_folder(disk, write=False)
    recovered = Recovery(disk, settings, write=False, measure=True).run()
    log = recovered.log
    try:
        for topic, partition in log.manifest.topics():
            log.partition(topic, partition)
        ends = [lane.last_time_us for (topic, _), lane in log.partitions.items() if not is_system(topic)]  # fmt: skip
        newest_us = max(ends, default=0)
        return _gather(folder, recovered, newest_us - round(window_s * 1_000_000))
    finally:
        log.close()
        log.manifest.close()


def _gather(folder: Path, recovered: Recovered, start_us: int) -> Traffic:
    found: list[Batch] = []
    stored: dict[str, int] = {}
    for tenants in recovered.unsealed.values():
        for tenant, size in tenants.items():
            stored[tenant] = stored.get(tenant, 0) + size
    cut = False
    for info in recovered.log.manifest.segments():
        for each in info.ranges:
            for tenant in each.tenants:
                stored[tenant] = stored.get(tenant, 0) + each.event_bytes
        if info.last_time_us >= start_us:
            found += _sealed(folder, info, start_us)
        if len(found) > 2 * MAX_BATCHES:
            found, cut = _newest(found), True
    found += _unsealed(recovered, start_us)
    cut = cut or len(found) > MAX_BATCHES
    found = _newest(found)
    for batch in found:
        stored[batch.tenant] = max(0, stored.get(batch.tenant, 0) - batch.event_bytes)
    return Traffic(batches=found, stored_bytes=stored, cut=cut)


def _newest(batches: list[Batch]) -> list[Batch]:
    return sorted(batches)[-MAX_BATCHES:]


def _unsealed(recovered: Recovered, start_us: int) -> Iterator[Batch]:
    """Batches of the journal, as they were committed."""
    log = recovered.log
    for (topic, _), lane in log.partitions.items():
        if is_system(topic):  # the bus's own: it does not ask itself for admission
            continue
        for at in range(bisect_left(lane.times, start_us), len(lane.times)):
            body = log.journal.body(lane.files[at], lane.positions[at])
            encoded = body[lane.inners[at] :]
            head = BatchHead.parse(encoded)
            sizes = measured(head, encoded)
            yield Batch(head.append_time_us, head.tenant, topic, head.count, *sizes)


def _sealed(folder: Path, info: SegmentInfo, start_us: int) -> Iterator[Batch]:
    """Batches of a segment: events of one topic and tenant with one append time shared a commit."""
    try:
        table = pq.read_table(folder / info.path, columns=COLUMNS, partitioning=None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupted(info, f"it cannot be decoded: {error}") from error
    times = table.column("append_time").combine_chunks().view(pa.int64()).to_numpy()
    topics, topic_names = _numbered(table.column("topic"))
    tenants, tenant_names = _numbered(table.column("tenant"))
    # A range knows its bytes, an event does not: each gets its share.
    rows = [each.rows for each in info.ranges]
    payloads = np.repeat([each.payload_bytes / each.rows for each in info.ranges], rows)
    sizes = np.repeat([each.event_bytes / each.rows for each in info.ranges], rows)
    changed = np.ones(len(times), bool)
    changed[1:] = (
        (times[1:] != times[:-1]) | (topics[1:] != topics[:-1]) | (tenants[1:] != tenants[:-1])
    )
    starts = np.flatnonzero(changed)
    counts = np.diff(starts, append=len(times))
    totals = [np.add.reduceat(each, starts).round().astype(int) for each in (payloads, sizes)]
    columns = [column.tolist() for column in (starts, counts, *totals)]
    for at, count, payload, size in zip(*columns, strict=True):
        topic = topic_names[topics[at]]
        if times[at] >= start_us and not is_system(topic):
            tenant = tenant_names[tenants[at]]
            yield Batch(int(times[at]), tenant, topic, count, payload, size)


def _numbered(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """A column of names as numbers, and the names."""
    whole = column.combine_chunks()
    if not pa.types.is_dictionary(whole.type):
        whole = whole.dictionary_encode()
    return whole.indices.to_numpy(), whole.dictionary.to_pylist()

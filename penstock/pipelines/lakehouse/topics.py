"""Every topic is also a table: the log's sealed segments join it by file, without being rewritten.

A segment of one topic, day and tenant is one data file of the topic's table. The events of other segments
are copied into files of the warehouse, because a data file has one partition. The table's properties
list which segments of which topics are in it, so a second run adds nothing. When the log merges
segments or retention removes some, one overwrite snapshot replaces their files. The log alone rewrites;
these tables are not compacted.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from penstock.log.disk import RealDisk
from penstock.log.manifest import Manifest
from penstock.log.recovery import Recovery, check_folder
from penstock.log.segment import Range, SegmentInfo
from penstock.log.segment_reader import SegmentReader
from penstock.model.arrow import SCHEMA, to_arrow
from penstock.model.errors import StorageError, TableChanged, Unsupported
from penstock.model.settings import Settings
from penstock.model.topic import check_pattern, matches
from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.files import PartitionWriter, remove_old
from penstock.pipelines.lakehouse.iceberg import IcebergTable, data_file, data_files
from penstock.pipelines.lakehouse.table import Cut, Layout
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_name

if TYPE_CHECKING:
    from pyiceberg.table import Table as PyTable
    from pyiceberg.table import Transaction

    from penstock.log.disk import Disk
    from penstock.log.segment import Range, SegmentInfo


# -- synchronising tables -------------------------------------------------------------------------

PRESENT_PROPERTY = "penstock.segments"
# The log may remove a segment between our look at its manifest and at the file. It rewrites for
# minutes at a time, so three such races in a row have another cause.
TRIES = 3
# Arrow's own columns as Iceberg knows them: text for dictionaries, int for the byte of a priority.
COLUMNS = pa.schema(
    [
        pa.field(
            each.name,
            pa.string() if pa.types.is_dictionary(each.type)
            else pa.int32() if pa.types.is_uint8(each.type) else each.type,
            each.nullable,
        )
        for each in SCHEMA
    ]
)  # fmt: skip

Progress = Callable[[str, int, int], None]


class Present(msgspec.Struct, frozen=True):
    """What of one topic is in its table: ids of segments that joined and of those copied from."""

    joined: list[int] = []
    copied: list[int] = []


class TopicReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, in segments (`rows` in events), over all tables."""

    tables: int = 0
    joined: int = 0
    copied: int = 0
    left: int = 0
    rows_joined: int = 0
    rows_copied: int = 0
    snapshots: int = 0
    waiting: int = 0
    """Events in the journal, which join once they are sealed."""


def sync_topics(
    folder: str | Path,
    warehouse: Warehouse,
    patterns: str | Sequence[str] = "#",
    *,
    progress: Progress | None = None,
) -> TopicReport:
    """Bring the tables of a log folder's topics up to its sealed segments.

    Reads only, so the log may be in use. Events still in the journal are not in the tables yet, and
    counted as `waiting`: `bus.topics.seal()` brings them into segments.
    `progress` is called with a table's name, the tables done and their number.
    """
    if warehouse.format != "iceberg":
        raise Unsupported(
            f"topics join tables by file in an Iceberg warehouse, not in one of {warehouse.format}; "
            "nothing was changed. Use format 'iceberg', or write the topic with a pipeline"
        )
    chosen = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in chosen:
        check_pattern(pattern)
    check_folder(RealDisk(Path(folder).absolute()), write=False)
    for turn in range(TRIES):
        disk = RealDisk(Path(folder).absolute())
        manifest = Manifest.load(disk, write=False)
        try:
            report = _Sync(disk, manifest, warehouse, chosen).run(progress)
            return msgspec.structs.replace(report, waiting=_waiting(disk, chosen))
        except (FileNotFoundError, StorageError) as error:
            gone = manifest.refresh()
            if turn + 1 == TRIES or not gone:
                raise _lost(error) from error
        finally:
            manifest.close()
    raise AssertionError("unreachable")


def _waiting(disk: RealDisk, patterns: Sequence[str]) -> int:
    """How many events of these topics are in the journal and in no segment."""
    recovery = Recovery(disk, Settings(), write=False)
    try:
        recovery.run()
        manifest = recovery.log.manifest
        ends: dict[tuple[str, int], int] = {}
        for info in manifest.segments():
            for each in info.ranges:
                lane = (each.topic, each.partition)
                ends[lane] = max(ends.get(lane, 0), each.last_offset + 1)
        waiting = 0
        for topic, spec in recovery.fold.state.topics.items():
            if any(matches(pattern, topic) for pattern in patterns):
                for partition in range(spec.partitions):
                    first, end = recovery.log.bounds(topic, partition)
                    waiting += end - min(end, max(first, ends.get((topic, partition), 0)))
        return waiting
    finally:
        recovery.log.close()
        recovery.log.manifest.close()


def _lost(error: Exception) -> Exception:
    if isinstance(error, StorageError):
        return error
    return TableChanged(
        f"a segment that the log lists is not there: {error}. Tables done so far are up to date; "
        "run `penstock doctor` on the folder"
    )


class _Sync:
    """One run over one state of the log."""

    def __init__(
        self, disk: RealDisk, manifest: Manifest, warehouse: Warehouse, patterns: Sequence[str]
    ) -> None:
        self.disk = disk
        self.warehouse = warehouse
        self.patterns = patterns
        self.segments = {info.id: info for info in manifest.segments()}
        self.report = TopicReport()
        self.copied: dict[tuple[str, int], list[str]] = {}

    def run(self, progress: Progress | None) -> TopicReport:
        wanted: dict[str, dict[str, Present]] = {}
        for info in self.segments.values():
            for topic in dict.fromkeys(each.topic for each in info.ranges):
                if self._chosen(topic):
                    present = wanted.setdefault(table_name(topic), {}).setdefault(topic, Present())
                    (present.joined if can_join(info) else present.copied).append(info.id)
        # A topic may have lost its last segment to retention: its table is found by its name.
        for name in self._known_tables() - set(wanted):
            wanted[name] = {}
        for number, name in enumerate(sorted(wanted)):
            self._sync_table(name, wanted[name])
            if progress is not None:
                progress(name, number + 1, len(wanted))
        return self.report

    def _chosen(self, topic: str) -> bool:
        return any(matches(pattern, topic) for pattern in self.patterns)

    def _known_tables(self) -> set[str]:
        found = set()
        catalogue = self.warehouse.catalogue
        waiting = list(catalogue.list_namespaces())
        while waiting:
            namespace = waiting.pop()
            for each in catalogue.list_tables(namespace):
                table = catalogue.load_table(each)
                present = _present(table)
                if any(self._chosen(topic) for topic in present):
                    found.add(table.properties["penstock.name"])
            waiting += [each for each in catalogue.list_namespaces(namespace) if each != namespace]
        return found

    def _sync_table(self, name: str, wanted: dict[str, Present]) -> None:
        table = IcebergTable(self.warehouse, name)
        if table.find() is None:
            table.create(COLUMNS, Cut("tenant", "append_time"))

        def apply(current: PyTable, transaction: Transaction) -> TopicReport | None:
            before = _present(current)
            after = {t: p for t, p in before.items() if not self._chosen(t)} | wanted
            added = _missing(after, before)
            gone = _missing(before, after)
            if not added and not gone:
                return None
            return self._replace(current, transaction, added, gone, after)

        change = table.transact(apply)
        both = [self.report, TopicReport(tables=1)]
        if change is not None:
            failpoint("lakehouse.topic-committed")
            both.append(change)
            now = table.load()
            listed = [each.file_path for each in data_files(now)]
            remove_old_copies(f"{now.location()}/data", listed, self.warehouse.properties)
        names = TopicReport.__struct_fields__
        self.report = TopicReport(**{n: sum(getattr(each, n) for each in both) for n in names})

    def _replace(
        self,
        table: PyTable,
        transaction: Transaction,
        added: list[tuple[str, int, bool]],
        gone: list[tuple[str, int, bool]],
        after: dict[str, Present],
    ) -> TopicReport:
        files, joined_rows, copied_rows = [], 0, 0
        for topic, number, joins in added:
            info = self.segments[number]
            ranges = [each for each in info.ranges if each.topic == topic]
            rows = sum(each.rows for each in ranges)
            if joins:
                files.append(data_file(table, self._uri(info)))
                joined_rows += rows
            else:
                files += self._copies(table, topic, info, ranges)
                copied_rows += rows
        failpoint("lakehouse.topic-copied")
        leaving = _leaving(table, gone)
        update = transaction.update_snapshot(snapshot_properties={"penstock.source": "log"})
        with update.overwrite() if leaving else update.merge_append() as change:
            for each in files:
                change.append_data_file(each)
            for each in leaving:
                change.delete_data_file(each)
        transaction.set_properties({PRESENT_PROPERTY: _encode(after)})
        return TopicReport(
            joined=sum(joins for _, _, joins in added),
            copied=sum(not joins for _, _, joins in added),
            left=len(gone),
            rows_joined=joined_rows,
            rows_copied=copied_rows,
            snapshots=1,
        )

    def _uri(self, info: SegmentInfo) -> str:
        return f"file://{self.disk.root}/{info.path}"

    def _copies(
        self, table: PyTable, topic: str, info: SegmentInfo, ranges: list[Range]
    ) -> list[Any]:
        key = (topic, info.id)
        if key not in self.copied:  # a commit that is tried again needs no second copy
            folder, properties = f"{table.location()}/data", self.warehouse.properties
            self.copied[key] = copy_rows(self.disk, info, ranges, folder, properties)
        return [data_file(table, path) for path in self.copied[key]]


def can_join(info: SegmentInfo) -> bool:
    """Whether a whole file can be a table's data file: one topic, one day, one tenant."""
    return not info.shared and len(info.ranges) == 1 and len(info.ranges[0].tenants) == 1


def _missing(these: dict[str, Present], those: dict[str, Present]) -> list[tuple[str, int, bool]]:
    """Topic, segment and whether it joins, of what is in the first and not in the second."""
    found = []
    for topic, present in these.items():
        other = those.get(topic, Present())
        found += [(topic, n, True) for n in present.joined if n not in set(other.joined)]
        found += [(topic, n, False) for n in present.copied if n not in set(other.copied)]
    return found


def _leaving(table: PyTable, gone: list[tuple[str, int, bool]]) -> list[Any]:
    """The data files of segments that are not in the log any more."""
    wanted = {(None if joins else topic, number) for topic, number, joins in gone}
    old = [each for each in data_files(table) if origin(each.file_path) in wanted] if gone else []
    lost = wanted - {origin(each.file_path) for each in old}
    if lost:
        raise TableChanged(
            f"{'.'.join(table.name())} lists segment {min(n for _, n in lost)} as its own and does "
            "not have its file; nothing was changed. Somebody else rewrote this table: drop it and "
            "run again, the log has every event",
            table=".".join(table.name()),
        )
    return old


def _present(table: PyTable) -> dict[str, Present]:
    text = table.properties.get(PRESENT_PROPERTY, "{}")
    return {
        topic: Present(_numbers(joined), _numbers(copied))
        for topic, (joined, copied) in msgspec.json.decode(text).items()
    }


def _encode(present: dict[str, Present]) -> str:
    short = {t: (_spans(p.joined), _spans(p.copied)) for t, p in present.items()}
    return msgspec.json.encode(short).decode()


def _spans(numbers: Iterable[int]) -> str:
    """Ids as text that stays short: neighbours are written as a span.

    >>> _spans([1, 2, 3, 7]), _numbers("1-3,7")
    ('1-3,7', [1, 2, 3, 7])
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _numbers(text: str) -> list[int]:
    spans = [part.partition("-") for part in text.split(",") if part]
    return [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]


# -- copies of events in shared segments ----------------------------------------------------------

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

    No two runs write the same file: the other run may have died, or may still be running.
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

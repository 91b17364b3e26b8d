"""Compaction: rewrites many small files of a table as few large ones, and deletes the old ones.

A query adds files with every batch. Tables of topics are left alone: the log itself rewrites those.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from penstock.model.errors import InvalidInput, TableChanged, Unsupported
from penstock.model.settings import MIB
from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.delta import DeltaLakeTable
from penstock.pipelines.lakehouse.files import PartitionWriter, remove_old, sync
from penstock.pipelines.lakehouse.iceberg import (
    IcebergTable,
    columns_of,
    cut_of,
    data_file,
    data_files,
)
from penstock.pipelines.lakehouse.table import Layout, WrittenFile, total_rows
from penstock.pipelines.lakehouse.topics import PRESENT_PROPERTY

if TYPE_CHECKING:
    from pyiceberg.table import Table as PyTable
    from pyiceberg.table import Transaction

    from penstock.pipelines.lakehouse.warehouse import Warehouse

TARGET_BYTES = 128 * MIB
# Longer than any batch, scan or time travel: files that young are never taken away.
KEEP_S = 7 * 24 * 3600.0
SHORTEST_KEEP_S = 3600.0
FOLDER = "compacted"


class CompactReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one table."""

    table: str
    files_before: int
    files_after: int
    rewritten: int = 0
    """Files whose rows are in new ones now."""
    expired: int = 0
    """Snapshots that are gone."""
    removed: int = 0
    """Files that were deleted because no snapshot lists them."""


def compact(
    warehouse: Warehouse,
    name: str,
    *,
    target_bytes: int = TARGET_BYTES,
    keep_s: float = KEEP_S,
) -> CompactReport:
    """Put small files of a table together, up to a size; forget snapshots older than `keep_s`.

    Writers may be at work: who commits second starts over, and no row is lost, doubled or changed.
    """
    if keep_s < SHORTEST_KEEP_S or target_bytes < 1:
        raise InvalidInput(
            f"what is younger than {SHORTEST_KEEP_S / 3600:g} hour may be in use: keep snapshots for "
            "as long at least, and aim at files of a byte or more"
        )
    table = warehouse.table(name)
    if isinstance(table, IcebergTable):
        return _Iceberg(table, target_bytes, keep_s).run()
    if isinstance(table, DeltaLakeTable):
        return _delta(table, target_bytes, keep_s)
    raise Unsupported(
        f"{name!r} is a folder of Parquet files, which nothing can replace at once; it stays as it "
        "is. Use an Iceberg or Delta warehouse for tables that grow for long",
        table=name,
    )


def _delta(table: DeltaLakeTable, target_bytes: int, keep_s: float) -> CompactReport:
    before = table.files()
    found = table.load()
    version = found.version()
    figures = found.optimize.compact(target_size=target_bytes)
    if table.warehouse.local:
        for path in set(table.files()) - set(before):
            sync(path.removeprefix("file://"))
        table.sync_log(version)
    hours = math.ceil(keep_s / 3600)
    removed = found.vacuum(hours, dry_run=False, enforce_retention_duration=False)
    return CompactReport(
        table=table.name,
        files_before=len(before),
        files_after=len(table.files()),
        rewritten=figures["numFilesRemoved"],
        removed=len(removed),
    )


@dataclass
class _Iceberg:
    table: IcebergTable
    target_bytes: int
    keep_s: float

    def run(self) -> CompactReport:
        found = self.table.load()
        if PRESENT_PROPERTY in found.properties:
            raise Unsupported(
                f"{self.table.name!r} consists of the log's own files, and the log merges those "
                "itself; nothing was changed. `penstock table sync` brings the table up to it",
                table=self.table.name,
            )
        _refuse_deletes(found, self.table.name)
        before = data_files(found)
        rewritten = 0
        for group in _groups(before, self.target_bytes):
            rewritten += self._rewrite(found, group)
        expired = self._expire()
        return CompactReport(
            table=self.table.name,
            files_before=len(before),
            files_after=len(data_files(self.table.load())),
            rewritten=rewritten,
            expired=expired,
            removed=self._remove_unlisted(),
        )

    def _rewrite(self, found: PyTable, group: Sequence[Any]) -> int:
        """Replace these files by one of the same rows, unless the table changed meanwhile."""
        folder = f"{found.location()}/data/{FOLDER}/{uuid.uuid4().hex[:12]}"
        layout = Layout(folder, columns_of(found), cut_of(found))
        writer = PartitionWriter(layout, "rows", self.table.warehouse.properties)
        for rows in _rows(found, group, layout):
            writer.add(rows)
        written = writer.finish()
        self._check_rows(group, written)
        failpoint("lakehouse.compacted")
        leaving = {each.file_path for each in group}

        def apply(current: PyTable, transaction: Transaction) -> int:
            _refuse_deletes(current, self.table.name)
            listed = {each.file_path: each for each in data_files(current)}
            same_columns = current.schema().schema_id == found.schema().schema_id
            if not same_columns or not leaving <= listed.keys():
                return 0  # what was written is in no table, and goes with the other old files
            update = transaction.update_snapshot(snapshot_properties={"penstock.source": FOLDER})
            with update.overwrite() as change:
                for path in leaving:
                    change.delete_data_file(listed[path])
                for each in written:
                    change.append_data_file(data_file(current, each.path))
            return len(leaving)

        return self.table.transact(apply)

    def _check_rows(self, group: Sequence[Any], written: Sequence[WrittenFile]) -> None:
        """Nothing is taken away that was not read in full."""
        wanted, found = sum(each.record_count for each in group), total_rows(written)
        if wanted != found:
            raise TableChanged(
                f"{len(group)} files of {self.table.name!r} have {found} rows, and the table counts "
                f"{wanted}; they stay as they are. Somebody else wrote them: begin with "
                f"{group[0].file_path}",
                table=self.table.name,
            )

    def _expire(self) -> int:
        oldest = datetime.fromtimestamp(time.time() - self.keep_s, UTC)

        def apply(current: PyTable, transaction: Transaction) -> int:
            named = {ref.snapshot_id for ref in current.metadata.refs.values()}  # branches and tags
            old = [
                each.snapshot_id
                for each in current.metadata.snapshots
                if each.timestamp_ms < oldest.timestamp() * 1000 and each.snapshot_id not in named
            ]
            if old:
                from pyiceberg.table.update.snapshot import ExpireSnapshots

                with ExpireSnapshots(transaction) as expiry:
                    expiry.by_ids(old)
            return len(old)

        return self.table.transact(apply)

    def _remove_unlisted(self) -> int:
        """Delete old files that no snapshot knows: rewritten, expired, or of a batch that died."""
        table, properties = self.table.load(), self.table.warehouse.properties
        listed = list(_listed(table))
        return sum(
            remove_old(
                f"{table.location()}/{folder}",
                listed,
                properties,
                keep_s=self.keep_s,
                suffix=suffix,
            )
            for folder, suffix in (("data", ".parquet"), ("metadata", ".avro"))
        )


def _refuse_deletes(table: PyTable, name: str) -> None:
    """Rows deleted by a delete file, without rewriting their data file, would come back."""
    from pyiceberg.manifest import ManifestContent

    snapshot = table.current_snapshot()
    manifests = [] if snapshot is None else snapshot.manifests(table.io)
    if any(each.content == ManifestContent.DELETES for each in manifests):
        raise Unsupported(
            f"{name!r} has delete files, which another engine wrote; nothing more was changed. "
            "Compact it with that engine",
            table=name,
        )


def _groups(files: Iterable[Any], target_bytes: int) -> Iterator[list[Any]]:
    """Small files of one partition, as many together as make a large one."""
    small: dict[str, list[Any]] = {}
    for each in files:
        if each.file_size_in_bytes < target_bytes // 2:
            small.setdefault(f"{each.spec_id} {each.partition}", []).append(each)
    for found in small.values():
        group: list[Any] = []
        for each in sorted(found, key=lambda file: str(file.file_path)):
            size = sum(file.file_size_in_bytes for file in group)
            if len(group) > 1 and size + each.file_size_in_bytes > target_bytes:
                yield group
                group = []
            group.append(each)
        if len(group) > 1:
            yield group


def _rows(table: PyTable, files: Iterable[Any], layout: Layout) -> Iterator[pa.RecordBatch]:
    """The rows of some data files in the columns that the table has now, found by their numbers."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan
    from pyiceberg.table import FileScanTask

    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    for rows in scan.to_record_batches([FileScanTask(each) for each in files]):
        columns = [rows.column(field.name).cast(field.type) for field in layout.schema]
        yield pa.RecordBatch.from_arrays(columns, schema=layout.schema)


def _listed(table: PyTable) -> Iterator[str]:
    """Every file that a snapshot of the table needs."""
    seen = set()
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            yield manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                yield entry.data_file.file_path

"""Every topic is also an Iceberg table: segments join by file, once, and leave with the log (S4, Q16)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from penstock.log import sealing
from penstock.log.disk import RealDisk
from penstock.log.manifest import Manifest
from penstock.log.recovery import check_folder
from penstock.log.sealing import Job, JournalInput
from penstock.log.segment import DAY_US
from penstock.model.batch import EventBatch
from penstock.model.errors import (
    AlreadyExists,
    Corrupted,
    InvalidPattern,
    NotADataFolder,
    TableChanged,
    Unsupported,
)
from penstock.model.settings import Sealing
from penstock.pipelines.lakehouse import topics
from penstock.pipelines.lakehouse.iceberg import IcebergTable, data_files
from penstock.pipelines.lakehouse.topics import PRESENT_PROPERTY, sync_topics
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_files

OWN = Sealing(min_segment_bytes=1, target_segment_bytes=100_000)
SHARED = Sealing(min_segment_bytes=10**9, target_segment_bytes=10**9)
NOW_US = 20_000 * DAY_US
ACME, GLOBEX = "orders.created.v1.acme", "orders.created.v1.globex"
TABLE = "orders.created.v1"


def batch(
    topic: str, base: int, count: int = 3, *, tenant: str = "acme", day: int = 0
) -> EventBatch:
    made = EventBatch.build(
        topic,
        [f"{topic} {base + index}".encode() for index in range(count)],
        keys=[b"k", *[None] * (count - 1)],
        headers=[{"h": "1"}, *[None] * (count - 1)],
        tenant=tenant,
        times_us=NOW_US,
    )
    made.base_offset, made.append_time_us = base, NOW_US + day * DAY_US
    return made


class Log:
    """A log folder with segments made to measure."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = RealDisk(folder)
        check_folder(self.disk, write=True)
        self.manifest = Manifest.load(self.disk, write=True)
        self.end = 0

    def seal(self, *batches: EventBatch, options: Sealing = OWN) -> list[int]:
        self.end += 1
        first = self.manifest.next_id
        job = Job(first_id=first, settings=options, journal=[JournalInput(0, self.end)])
        return self._apply(sealing.run(self.disk, job, lambda *_: sealing.packed(batches)))

    def merge(self, *numbers: int, options: Sealing = OWN) -> list[int]:
        chosen = [info for info in self.manifest.segments() if info.id in numbers]
        job = Job(first_id=self.manifest.next_id, settings=options, segments=chosen)
        made = self._apply(sealing.run(self.disk, job, lambda *_: iter(())))
        for info in chosen:
            self.disk.remove(info.path)
        return made

    def drop(self, *numbers: int) -> None:
        paths = [info.path for info in self.manifest.segments() if info.id in numbers]
        self.manifest.apply([], list(numbers), at_us=NOW_US)
        for path in paths:
            self.disk.remove(path)

    def _apply(self, result: sealing.SealingResult) -> list[int]:
        self.manifest.apply(
            result.added, result.removed, sealed_to=result.sealed_to or self.end, at_us=NOW_US
        )
        return [info.id for info in result.added]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log")
    yield made
    made.manifest.close()


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    with Warehouse(tmp_path / "a lake") as made:
        yield made


def rows(warehouse: Warehouse, name: str = TABLE) -> list[tuple[Any, ...]]:
    table = IcebergTable(warehouse, name).load().scan().to_arrow()
    columns = ("topic", "partition", "offset", "payload")
    return sorted(tuple(row[name] for name in columns) for row in table.to_pylist())


def expected(topic: str, count: int, first: int = 0) -> list[tuple[Any, ...]]:
    return [(topic, 0, n, f"{topic} {n}".encode()) for n in range(first, first + count)]


def snapshots(warehouse: Warehouse, name: str = TABLE) -> list[Any]:
    return list(IcebergTable(warehouse, name).load().metadata.snapshots)


def test_segments_join_by_file_and_are_not_rewritten(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0), batch(ACME, 3, day=1), batch(GLOBEX, 0, tenant="globex"))
    before = {path: path.read_bytes() for path in (log.folder / "segments").iterdir()}
    seen: list[tuple[str, int, int]] = []
    report = sync_topics(log.folder, warehouse, progress=lambda *step: seen.append(step))
    assert (report.joined, report.rows_joined, report.copied) == (3, 9, 0)
    assert seen == [(TABLE, 1, 1)]
    assert rows(warehouse) == expected(ACME, 6) + expected(GLOBEX, 3)
    paths = table_files(warehouse, TABLE)
    assert all(path.startswith(f"{log.folder}/segments/") for path in paths)
    assert {path: path.read_bytes() for path in (log.folder / "segments").iterdir()} == before


def test_tables_are_cut_by_tenant_and_day_of_append(log: Log, warehouse: Warehouse) -> None:
    """A scan with a filter opens the files of that tenant and day alone."""
    log.seal(batch(ACME, 0), batch(ACME, 3, day=1), batch(GLOBEX, 0, tenant="globex"))
    sync_topics(log.folder, warehouse)
    table = IcebergTable(warehouse, TABLE).load()
    parts = table.inspect.partitions().column("partition").to_pylist()
    assert sorted((each["tenant"], each["append_time_day"].isoformat()) for each in parts) == [
        ("acme", "2024-10-04"), ("acme", "2024-10-05"), ("globex", "2024-10-04"),
    ]  # fmt: skip
    one = table.scan(row_filter="tenant == 'acme' and append_time >= '2024-10-05T00:00:00+00:00'")
    assert len(list(one.plan_files())) == 1
    assert one.to_arrow().num_rows == 3


def test_all_columns_come_back_as_they_were(log: Log, warehouse: Warehouse) -> None:
    made = EventBatch.build(
        ACME, [b"x", b""], keys=[b"k", None], headers=[{"a": "b"}, None], tenant="acme",
        priority=[200, 0], expires_us=[NOW_US, 0], times_us=[0, NOW_US], schema_id=9,
    )  # fmt: skip
    made.append_time_us = NOW_US
    log.seal(made)
    sync_topics(log.folder, warehouse)
    first, second = IcebergTable(warehouse, TABLE).load().scan().to_arrow().to_pylist()
    assert (first["key"], first["headers"], first["priority"]) == (b"k", [("a", "b")], 200)
    assert (second["key"], second["payload"], second["schema_id"]) == (None, b"", 9)
    assert (second["expires"], first["expires"].year) == (None, 2024)
    assert (first["event_time"].year, first["token"]) == (1970, made.token(0))


def test_a_second_run_adds_nothing(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0))
    log.seal(batch(GLOBEX, 0, tenant="globex"), options=SHARED)
    sync_topics(log.folder, warehouse)
    before = snapshots(warehouse)
    again = sync_topics(log.folder, warehouse)
    assert (again.joined, again.copied, again.left, again.snapshots) == (0, 0, 0, 0)
    assert snapshots(warehouse) == before


def test_new_segments_join_one_snapshot_a_run(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0))
    sync_topics(log.folder, warehouse)
    log.seal(batch(ACME, 3))
    log.seal(batch(ACME, 6))
    report = sync_topics(log.folder, warehouse)
    assert (report.joined, report.snapshots) == (2, 1)
    assert rows(warehouse) == expected(ACME, 9)


def test_rows_of_shared_segments_are_copied_to_the_table_they_belong_to(
    log: Log, warehouse: Warehouse
) -> None:
    log.seal(
        batch(ACME, 0), batch(ACME, 3, day=1), batch(GLOBEX, 0, tenant="globex"),
        batch("bills", 0), options=SHARED,
    )  # fmt: skip
    report = sync_topics(log.folder, warehouse)
    assert (report.joined, report.copied, report.rows_copied, report.tables) == (0, 3, 12, 2)
    assert rows(warehouse) == expected(ACME, 6) + expected(GLOBEX, 3)
    assert rows(warehouse, "bills") == expected("bills", 3)
    assert all("/a lake/" in path for path in table_files(warehouse, TABLE))


def test_a_segment_of_two_tenants_is_copied_tenant_by_tenant(
    log: Log, warehouse: Warehouse
) -> None:
    """A data file has one partition, so a file with two tenants cannot join as it is."""
    log.seal(batch("bills", 0, tenant="acme"), batch("bills", 3, tenant="globex"))
    report = sync_topics(log.folder, warehouse)
    assert (report.joined, report.copied, report.rows_copied) == (0, 1, 6)
    assert rows(warehouse, "bills") == expected("bills", 6)
    parts = IcebergTable(warehouse, "bills").load().inspect.partitions().to_pylist()
    assert {each["partition"]["tenant"]: each["record_count"] for each in parts} == {
        "acme": 3, "globex": 3,
    }  # fmt: skip


def test_compaction_by_the_log_becomes_an_overwrite(log: Log, warehouse: Warehouse) -> None:
    old = [*log.seal(batch(ACME, 0)), *log.seal(batch(ACME, 3))]
    sync_topics(log.folder, warehouse)
    log.merge(*old)
    report = sync_topics(log.folder, warehouse)
    assert (report.joined, report.left, report.snapshots) == (1, 2, 1)
    assert str(snapshots(warehouse)[-1].summary.operation.value) == "overwrite"
    assert rows(warehouse) == expected(ACME, 6)
    assert len(table_files(warehouse, TABLE)) == 1


def test_a_shared_segment_that_becomes_one_of_its_own_replaces_its_copy(
    log: Log, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = log.seal(batch(ACME, 0), batch("bills", 0), options=SHARED)
    sync_topics(log.folder, warehouse)
    (copy,) = table_files(warehouse, TABLE)
    log.merge(*old)
    sync_topics(log.folder, warehouse)
    assert rows(warehouse) == expected(ACME, 3)
    assert table_files(warehouse, TABLE) != [copy]
    assert Path(copy).exists(), "a reader may still be at it"
    monkeypatch.setattr(topics, "KEEP_S", -1.0)
    log.seal(batch(ACME, 3))
    sync_topics(log.folder, warehouse)
    assert not Path(copy).exists()


def test_what_retention_removes_leaves_the_table(log: Log, warehouse: Warehouse) -> None:
    old = log.seal(batch(ACME, 0))
    shared = log.seal(batch("bills", 0), options=SHARED)
    log.seal(batch(ACME, 3))
    sync_topics(log.folder, warehouse)
    log.drop(*old, *shared)
    report = sync_topics(log.folder, warehouse)
    assert report.left == 2
    assert rows(warehouse) == expected(ACME, 3, first=3)
    assert rows(warehouse, "bills") == []


def test_patterns_choose_and_leave_other_topics_alone(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0), batch(GLOBEX, 0, tenant="globex"), batch("bills", 0))
    sync_topics(log.folder, warehouse, ["orders.*.v1.acme"])
    assert rows(warehouse) == expected(ACME, 3)
    assert table_files(warehouse, "bills") == []
    report = sync_topics(log.folder, warehouse, ["orders.*.v1.globex"])
    assert (report.joined, report.left) == (1, 0)
    assert rows(warehouse) == expected(ACME, 3) + expected(GLOBEX, 3)
    with pytest.raises(InvalidPattern):
        sync_topics(log.folder, warehouse, "orders.cre*")


def test_duckdb_and_pyiceberg_read_the_same(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0), batch(GLOBEX, 0, tenant="globex"))
    log.seal(batch(ACME, 3), options=SHARED)
    sync_topics(log.folder, warehouse)
    paths = table_files(warehouse, TABLE)
    query = 'SELECT topic, partition, "offset", payload FROM read_parquet(?) ORDER BY ALL'
    with duckdb.connect() as session:
        assert session.execute(query, [paths]).fetchall() == rows(warehouse)


def test_a_segment_that_vanishes_under_a_run_is_read_from_its_successor(
    log: Log, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log merges between the look at the manifest and the look at the file."""
    old = [*log.seal(batch(ACME, 0)), *log.seal(batch(ACME, 3))]
    load = Manifest.load
    turns: list[int] = []

    def late(disk: Any, *, write: bool = False) -> Manifest:
        manifest = load(disk, write=write)
        if not turns:
            log.merge(*old)
        turns.append(1)
        return manifest

    monkeypatch.setattr(Manifest, "load", late)
    assert sync_topics(log.folder, warehouse).joined == 1
    assert len(turns) == 3  # the first look, the second, and one for what waits in the journal
    assert rows(warehouse) == expected(ACME, 6)


def test_a_damaged_segment_is_named_and_nothing_is_added(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch(ACME, 0), options=SHARED)
    (info,) = log.manifest.segments()
    path = log.folder / info.path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupted, match=info.path):
        sync_topics(log.folder, warehouse)
    assert rows(warehouse) == []


def test_a_table_that_somebody_rewrote_is_not_touched(log: Log, warehouse: Warehouse) -> None:
    (old,) = log.seal(batch(ACME, 0))
    sync_topics(log.folder, warehouse)
    table = IcebergTable(warehouse, TABLE).load()
    with table.transaction() as change, change.update_snapshot().overwrite() as files:
        files.delete_data_file(data_files(table)[0])
    log.drop(old)
    with pytest.raises(TableChanged, match=f"segment {old} "):
        sync_topics(log.folder, warehouse)
    assert PRESENT_PROPERTY in IcebergTable(warehouse, TABLE).load().properties


def test_two_names_never_share_a_table(log: Log, warehouse: Warehouse) -> None:
    log.seal(batch("orders", 0), batch("main.orders", 0))
    with pytest.raises(AlreadyExists, match=r"main\.orders"):
        sync_topics(log.folder, warehouse)


def test_other_formats_say_that_they_cannot(log: Log, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="iceberg"):
        sync_topics(log.folder, Warehouse(tmp_path / "delta", format="delta"))


def test_a_folder_that_is_no_log_is_refused(tmp_path: Path, warehouse: Warehouse) -> None:
    (tmp_path / "pictures").mkdir()
    with pytest.raises(NotADataFolder, match="no Penstock folder"):
        sync_topics(tmp_path / "pictures", warehouse)

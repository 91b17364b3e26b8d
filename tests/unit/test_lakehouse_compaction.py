"""Small files become large ones, and no row is lost, doubled or changed (S4)."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.model.errors import InvalidInput, TableChanged, UnknownTable, Unsupported
from penstock.pipelines.lakehouse import compaction
from penstock.pipelines.lakehouse.compaction import CompactReport, compact
from penstock.pipelines.lakehouse.files import PartitionWriter
from penstock.pipelines.lakehouse.iceberg import IcebergTable
from penstock.pipelines.lakehouse.table import Cut, adapt, evolve
from penstock.pipelines.lakehouse.topics import PRESENT_PROPERTY
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_files

STAMP = pa.timestamp("us", tz="UTC")
NAME = "risk.tags"
EACH = 10
BATCHES = 12
WEEK_S = 7 * 24 * 3600.0


@pytest.fixture(params=["iceberg", "delta"])
def warehouse(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Warehouse]:
    with Warehouse(tmp_path / "a lake", format=request.param) as made:
        yield made


def write(warehouse: Warehouse, batch: int, kind: pa.DataType | None = None, **more: Any) -> bool:
    """Ten rows of two tenants, as one batch of a query."""
    rows = pa.record_batch(
        {
            "tenant": [f"t{index % 2}" for index in range(EACH)],
            "event_time": pa.array([1_700_000_000_000_000] * EACH, STAMP),
            "n": pa.array(range(batch * EACH, batch * EACH + EACH), kind or pa.int32()),
            **{name: pa.array([value] * EACH) for name, value in more.items()},
        }
    )
    table = warehouse.table(NAME)
    if table.schema() is None:
        table.create(rows.schema, Cut.of(rows.schema))
    adapt(table, rows.schema, ("add", "widen"))
    layout = table.layout("q", batch, "one")
    writer = PartitionWriter(layout, "0", {})
    columns = [
        rows.column(field.name).cast(field.type) if field.name in rows.schema.names
        else pa.nulls(EACH, field.type)
        for field in layout.schema
    ]  # fmt: skip
    writer.add(pa.RecordBatch.from_arrays(columns, schema=layout.schema))
    return table.commit(writer.finish(), "q", batch)


def found(warehouse: Warehouse) -> Counter[int]:
    """What readers of the files see."""
    tables = [pq.read_table(each, partitioning=None) for each in table_files(warehouse, NAME)]
    return Counter(number for each in tables for number in each.column("n").to_pylist())


def all_rows(lake: Warehouse) -> list[dict[str, Any]]:
    """What Iceberg's own reader sees."""
    rows = IcebergTable(lake, NAME).load().scan().to_arrow().to_pylist()
    return sorted(rows, key=lambda row: str(row))


def test_small_files_become_one_for_each_tenant(warehouse: Warehouse) -> None:
    for batch in range(BATCHES):
        write(warehouse, batch)
    assert len(table_files(warehouse, NAME)) == 2 * BATCHES
    report = compact(warehouse, NAME)
    assert (report.files_before, report.files_after) == (2 * BATCHES, 2)
    assert report.rewritten == 2 * BATCHES
    assert found(warehouse) == Counter(range(BATCHES * EACH))
    again = compact(warehouse, NAME)
    assert (again.rewritten, again.files_after) == (0, 2)


def test_a_batch_that_is_repeated_after_it_is_still_known(warehouse: Warehouse) -> None:
    for batch in range(3):
        write(warehouse, batch)
    compact(warehouse, NAME)
    assert warehouse.table(NAME).has_batch("q", 2)
    assert not write(warehouse, 2)
    assert write(warehouse, 3)
    assert found(warehouse) == Counter(range(4 * EACH))


def test_large_files_are_left_and_groups_end_at_the_size(lake: Warehouse) -> None:
    for batch in range(BATCHES):
        write(lake, batch)
    sizes = [os.path.getsize(each) for each in table_files(lake, NAME)]
    assert compact(lake, NAME, target_bytes=min(sizes)).rewritten == 0
    report = compact(lake, NAME, target_bytes=4 * max(sizes))
    assert 2 < report.files_after < 2 * BATCHES
    assert found(lake) == Counter(range(BATCHES * EACH))


def test_columns_that_changed_between_the_files_keep_their_values(lake: Warehouse) -> None:
    write(lake, 0)
    write(lake, 1, pa.int64(), host="b")
    evolve(lake, NAME, rename={"host": "server"})
    write(lake, 2, pa.int64(), server="c")
    before = all_rows(lake)
    assert {row["server"] for row in before} == {None, "b", "c"}
    assert compact(lake, NAME).files_after == 2
    assert all_rows(lake) == before
    assert found(lake) == Counter(range(3 * EACH))


def _meanwhile(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """Let something happen between the writing of a new file and its commit, once."""
    left = [what]

    def pause(name: str) -> None:
        if name == "lakehouse.compacted" and left:
            left.pop()()

    monkeypatch.setattr(compaction, "failpoint", pause)


def test_a_batch_that_comes_meanwhile_is_kept(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    write(lake, 0)
    write(lake, 1)
    _meanwhile(monkeypatch, lambda: write(lake, 2))
    assert compact(lake, NAME).files_after == 4
    assert found(lake) == Counter(range(3 * EACH))


def test_who_finds_the_files_gone_leaves_the_table_alone(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    write(lake, 0)
    write(lake, 1)
    _meanwhile(monkeypatch, lambda: compact(lake, NAME))
    report = compact(lake, NAME)
    assert (report.rewritten, report.files_after) == (0, 2)
    assert found(lake) == Counter(range(2 * EACH))


def test_columns_that_change_meanwhile_leave_the_table_alone(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    write(lake, 0)
    write(lake, 1)
    _meanwhile(monkeypatch, lambda: evolve(lake, NAME, add={"more": "string"}))
    assert compact(lake, NAME).rewritten == 0
    assert compact(lake, NAME).files_after == 2
    assert found(lake) == Counter(range(2 * EACH))


def test_who_dies_before_the_commit_leaves_the_table_as_it_was(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def die() -> None:
        raise KeyboardInterrupt

    write(lake, 0)
    write(lake, 1)
    before = table_files(lake, NAME)
    _meanwhile(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        compact(lake, NAME)
    assert table_files(lake, NAME) == before
    assert compact(lake, NAME).files_after == 2
    assert found(lake) == Counter(range(2 * EACH))


def test_rows_that_cannot_be_read_are_not_taken_away(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    write(lake, 0)
    write(lake, 1)
    monkeypatch.setattr(compaction, "_rows", lambda *_: iter(()))
    with pytest.raises(TableChanged, match="have 0 rows, and the table counts 10"):
        compact(lake, NAME)
    assert found(lake) == Counter(range(2 * EACH))


def _age(folder: Path, seconds: float) -> None:
    for each in folder.rglob("*"):
        if each.is_file():
            os.utime(each, (time.time() - seconds, time.time() - seconds))


def _on_disk(folder: Path) -> int:
    return len(list(folder.rglob("*.parquet")))


def test_what_no_snapshot_needs_goes_after_a_while(
    lake: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(3):
        write(lake, batch)
    assert compact(lake, NAME).removed == 0, "older snapshots still need the small files"
    assert _on_disk(tmp_path / "lake") == 8
    later = time.time() + WEEK_S + 60
    monkeypatch.setattr(time, "time", lambda: later)
    report = compact(lake, NAME)
    monkeypatch.undo()
    assert report.expired == 4
    assert report.removed > 6, "six small files, and the lists of the snapshots"
    assert _on_disk(tmp_path / "lake") == 2
    assert found(lake) == Counter(range(3 * EACH))
    assert len(all_rows(lake)) == 3 * EACH
    assert write(lake, 3)
    assert not write(lake, 2)


def test_files_of_a_batch_that_is_being_written_stay(lake: Warehouse, tmp_path: Path) -> None:
    write(lake, 0)
    layout = lake.table(NAME).layout("q", 1, "now")
    young = tmp_path / "lake" / NAME / "data" / "q" / "1" / "now" / "part-0.parquet"
    assert str(young) in f"{layout.folder}/part-0.parquet"
    young.parent.mkdir(parents=True)
    young.write_bytes(b"soon")
    assert compact(lake, NAME).removed == 0
    assert young.exists()
    _age(young.parent, WEEK_S + 60)
    assert compact(lake, NAME).removed == 1
    assert not young.exists()
    assert found(lake) == Counter(range(EACH))


def test_delta_removes_what_is_old(tmp_path: Path) -> None:
    with Warehouse(tmp_path / "lake", format="delta") as warehouse:
        for batch in range(3):
            write(warehouse, batch)
        assert compact(warehouse, NAME).removed == 0
        assert _on_disk(tmp_path / "lake") == 8
        for file in (tmp_path / "lake" / NAME / "_delta_log").glob(
            "*.json"
        ):  # as if a week had gone
            text = re.sub(
                r'"deletionTimestamp":(\d+)',
                lambda found: f'"deletionTimestamp":{int(found[1]) - int(WEEK_S + 60) * 1000}',
                file.read_text(),
            )
            file.write_text(text)
        assert compact(warehouse, NAME).removed == 6
        assert _on_disk(tmp_path / "lake") == 2
        assert found(warehouse) == Counter(range(3 * EACH))


def test_a_repeated_batch_takes_no_files_that_older_snapshots_need(warehouse: Warehouse, tmp_path: Path) -> None:  # fmt: skip
    for batch in range(2):
        write(warehouse, batch)
    compact(warehouse, NAME)
    before = _on_disk(tmp_path)
    assert warehouse.table(NAME).clean("q", 1) == 0
    assert _on_disk(tmp_path) == before
    if warehouse.format == "iceberg":
        table = IcebergTable(warehouse, NAME).load()
        oldest = table.metadata.snapshots[0].snapshot_id
        assert table.scan(snapshot_id=oldest).to_arrow().num_rows == EACH


def test_a_tag_keeps_its_snapshot(lake: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in range(3):
        write(lake, batch)
    table = IcebergTable(lake, NAME).load()
    first = table.metadata.snapshots[0].snapshot_id
    table.manage_snapshots().create_tag(first, "audit").commit()
    later = time.time() + WEEK_S + 60
    monkeypatch.setattr(time, "time", lambda: later)
    report = compact(lake, NAME)
    monkeypatch.undo()
    assert report.expired > 0
    table = IcebergTable(lake, NAME).load()
    assert table.scan(snapshot_id=first).to_arrow().num_rows == EACH


def test_a_table_with_delete_files_is_left_to_whoever_wrote_them(
    lake: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(2):
        write(lake, batch)
    from pyiceberg.manifest import ManifestContent, ManifestFile

    monkeypatch.setattr(ManifestFile, "content", property(lambda _: ManifestContent.DELETES))
    with pytest.raises(Unsupported, match="delete files"):
        compact(lake, NAME)


def test_what_cannot_be_compacted_is_said(lake: Warehouse, tmp_path: Path) -> None:
    with pytest.raises(UnknownTable, match="no table 'nope'"):
        compact(lake, "nope")
    with pytest.raises(InvalidInput, match="may be in use"):
        compact(lake, NAME, keep_s=60)
    write(lake, 0)
    IcebergTable(lake, NAME).transact(lambda _, t: t.set_properties({PRESENT_PROPERTY: "{}"}))
    with pytest.raises(Unsupported, match="the log merges"):
        compact(lake, NAME)
    with Warehouse(tmp_path / "plain", format="parquet") as plain:
        write(plain, 0)
        with pytest.raises(Unsupported, match="folder of Parquet files"):
            compact(plain, NAME)


def test_the_report_names_its_table(lake: Warehouse) -> None:
    write(lake, 0)
    assert compact(lake, NAME) == CompactReport(table=NAME, files_before=2, files_after=2)

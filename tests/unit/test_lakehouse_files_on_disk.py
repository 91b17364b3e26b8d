"""Files are on the disk before a table in a folder names them, in every format (S4)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy

from penstock.pipelines.lakehouse import files
from penstock.pipelines.lakehouse.compaction import compact
from penstock.pipelines.lakehouse.files import PartitionWriter
from penstock.pipelines.lakehouse.table import Cut
from penstock.pipelines.lakehouse.warehouse import CATALOGUE_FILE, Warehouse

SCHEMA = pa.schema([("tenant", pa.string()), ("n", pa.int64())])
NAME = "made.here"


class Watch:
    """Which bytes and which names were synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bytes: dict[str, tuple[int, int]] = {}
        self._names: dict[str, set[str]] = {}

    def synced(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self._names[path] = set(os.listdir(path))
        else:
            self._bytes[path] = self._mark(Path(path))

    @staticmethod
    def _mark(path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_size, status.st_mtime_ns

    def missing(self) -> list[str]:
        """Files and folders of tables whose bytes or names a power cut could take."""
        tables = [
            path for path in self._root.rglob("*") if not path.name.startswith(CATALOGUE_FILE)
        ]
        return [
            str(path.relative_to(self._root))
            for path in (self._root, *tables)
            if path.name not in self._names.get(str(path.parent), ())
            or (path.is_file() and self._bytes.get(str(path)) != self._mark(path))
        ]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch(tmp_path / "lake")
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def noted(descriptor: int, real: object = real) -> None:
            real(descriptor)  # type: ignore[operator]
            made.synced(descriptor)

        monkeypatch.setattr(os, name, noted)
    files._named.clear()
    return made


@pytest.fixture(params=["iceberg", "delta", "parquet"])
def warehouse(request: pytest.FixtureRequest, watch: Watch, tmp_path: Path) -> Iterator[Warehouse]:
    with Warehouse(tmp_path / "lake", format=request.param) as made:
        yield made


def write(warehouse: Warehouse, batch: int) -> None:
    table = warehouse.table(NAME)
    if table.schema() is None:
        table.create(SCHEMA, Cut.of(SCHEMA))
    layout = table.layout("q", batch, "a")
    writer = PartitionWriter(layout, "0", warehouse.properties)
    writer.add(pa.record_batch([pa.array(["t", "u"]), pa.array([batch, batch])], layout.schema))
    assert table.commit(writer.finish(), "q", batch)


def test_a_commit_that_returned_survives_a_power_cut(warehouse: Warehouse, watch: Watch) -> None:
    for batch in range(3):
        write(warehouse, batch)
        assert watch.missing() == []
    if warehouse.format != "parquet":
        compact(warehouse, NAME)
        assert watch.missing() == []


def test_the_catalogue_learns_of_files_that_are_on_the_disk(watch: Watch, tmp_path: Path) -> None:
    """It is durable itself, so nothing that it names may be less."""
    looked: list[str] = []

    def look(conn: object, cursor: object, statement: str, *rest: object) -> None:
        if "iceberg_tables" in statement and statement.startswith(("INSERT", "UPDATE")):
            looked.append(statement)
            assert watch.missing() == []

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", look)
    try:
        with Warehouse(tmp_path / "lake") as warehouse:
            write(warehouse, 0)
            write(warehouse, 1)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", look)
    assert len(looked) >= 3

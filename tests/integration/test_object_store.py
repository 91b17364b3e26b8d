"""A warehouse in a bucket: the same promises as in a folder, on a real S3 server (S4)."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cli.app import run
from penstock.model.errors import InvalidSettings, Unsupported
from penstock.pipelines.lakehouse.compaction import compact
from penstock.pipelines.lakehouse.files import PartitionWriter
from penstock.pipelines.lakehouse.table import Cut
from penstock.pipelines.lakehouse.warehouse import Warehouse, filesystem
from penstock.testing.object_store import ObjectStore

SCHEMA = pa.schema([("tenant", pa.string()), ("n", pa.int64())])
NAME = "made.here"
BATCHES = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with ObjectStore(tmp_path_factory.mktemp("s3")) as made:
        yield made


def properties(store: ObjectStore, format: str, folder: Path) -> dict[str, str]:
    catalogue = {"type": "sql", "uri": f"sqlite:///{folder}/catalogue.db"}
    return {**store.iceberg, **{"iceberg": catalogue, "delta": store.delta}.get(format, {})}


@pytest.fixture(params=["iceberg", "iceberg by REST", "delta", "parquet"])
def warehouse(
    request: pytest.FixtureRequest, store: ObjectStore, tmp_path: Path
) -> Iterator[Warehouse]:
    format, _, rest = request.param.partition(" by ")
    place = f"s3://{store.bucket}/{tmp_path.name}"
    given = properties(store, format, tmp_path)
    if rest:
        given = store.catalogue(f"tables-{uuid.uuid4().hex[:8]}")
        place = given["warehouse"]
    with Warehouse(place, format=format, properties=given) as made:
        yield made


def write(warehouse: Warehouse, batch: int, attempt: str, *, commit: bool = True) -> bool:
    table = warehouse.table(NAME)
    if table.schema() is None:
        table.create(SCHEMA, Cut.of(SCHEMA))
    layout = table.layout("q", batch, attempt)
    writer = PartitionWriter(layout, "0", warehouse.properties)
    writer.add(pa.record_batch([pa.array(["t", "u"]), pa.array([batch, batch])], layout.schema))
    files = writer.finish()
    return commit and table.commit(files, "q", batch)


def numbers(warehouse: Warehouse) -> Counter[int]:
    found: Counter[int] = Counter()
    for uri in warehouse.table(NAME).files():
        fs, path = filesystem(uri, warehouse.properties)
        found.update(pq.read_table(path, filesystem=fs, partitioning=None)["n"].to_pylist())
    return found


def test_batches_are_added_once_and_dead_attempts_leave_nothing(warehouse: Warehouse) -> None:
    for batch in range(BATCHES):
        write(warehouse, batch, "dead", commit=False)
        assert write(warehouse, batch, "alive")
        assert not write(warehouse, batch, "again")
        assert warehouse.table(NAME).clean("q", batch) == 4
    assert numbers(warehouse) == Counter(dict.fromkeys(range(BATCHES), 2))


def test_small_objects_become_large_ones(warehouse: Warehouse) -> None:
    for batch in range(BATCHES):
        write(warehouse, batch, "alive")
    if warehouse.format == "parquet":
        with pytest.raises(Unsupported):
            compact(warehouse, NAME)
        return
    assert compact(warehouse, NAME).files_after == 2
    assert numbers(warehouse) == Counter(dict.fromkeys(range(BATCHES), 2))


def test_the_command_line_takes_properties_from_a_file(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"s3://{store.bucket}/{tmp_path.name}"
    given = properties(store, "iceberg", tmp_path)
    with Warehouse(place, properties=given) as made:
        write(made, 0, "alive")
    file = tmp_path / "lake.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    words = ["table", "files", NAME, "--warehouse", place]
    assert run([*words, "--properties", str(file)]) == 0
    assert capsys.readouterr().out.count("s3://") == 2
    assert run(words) != 0
    assert "its catalogue must be named" in capsys.readouterr().err
    file.write_text("no toml")
    assert run([*words, "--properties", str(file)]) != 0
    assert "is no TOML" in capsys.readouterr().err


def test_a_bucket_without_a_catalogue_is_refused(store: ObjectStore) -> None:
    with (
        Warehouse(f"s3://{store.bucket}/x", properties=store.iceberg) as made,
        pytest.raises(InvalidSettings, match="catalogue must be named"),
    ):
        made.table(NAME).schema()

"""Tables take a batch once, in every format; columns change without losing rows (S4)."""

from __future__ import annotations

import builtins
import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.model.errors import (
    CommitConflict,
    InvalidInput,
    InvalidSettings,
    InvalidTopic,
    MissingExtra,
    SchemaMismatch,
    UnknownTable,
    Unsupported,
    WarehouseFailed,
)
from penstock.pipelines.lakehouse import files, iceberg
from penstock.pipelines.lakehouse.files import write_rows
from penstock.pipelines.lakehouse.table import (
    REJECTED,
    Cut,
    Layout,
    WrittenFile,
    adapt,
    evolve,
    fit,
)
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_files

STAMP = pa.timestamp("us", tz="UTC")
FORMATS = ["iceberg", "delta", "parquet"]


@pytest.fixture(params=FORMATS)
def warehouse(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Warehouse]:
    with Warehouse(tmp_path / "a lake", format=request.param) as made:
        yield made


def batch(numbers: list[Any], kind: pa.DataType | None = None, **more: Any) -> pa.RecordBatch:
    count = len(numbers)
    return pa.record_batch(
        {
            "tenant": pa.array([f"t{index % 2}" for index in range(count)]),
            "event_time": pa.array([1_700_000_000_000_000] * count, STAMP),
            "offset": pa.array(range(count), pa.int64()),
            "n": pa.array(numbers, kind or pa.int64()),
            **more,
        }
    )


def write(
    warehouse: Warehouse, rows: pa.RecordBatch, query: str = "q", number: int = 0,
    attempt: str = "one", commit: bool = True,
) -> tuple[list[WrittenFile], bool]:  # fmt: skip
    """What the writer does, without Spark."""
    table, rejects = warehouse.table("risk.tags"), warehouse.table("risk.tags__rejected")
    for each, schema in ((table, rows.schema), (rejects, REJECTED)):
        if each.schema() is None:
            each.create(schema, Cut.of(schema))
    layouts = table.layout(query, number, attempt), rejects.layout(query, number, attempt)
    written = list(write_rows([rows], *layouts, "0", {}))
    if not commit:
        return written, False
    bad = [each for each in written if each.rejected]
    if bad:
        rejects.commit(bad, query, number)
    return written, table.commit([each for each in written if not each.rejected], query, number)


def numbers(warehouse: Warehouse, column: str = "n", name: str = "risk.tags") -> list[Any]:
    paths = table_files(warehouse, name)
    found = [pq.read_table(path, partitioning=None).column(column).to_pylist() for path in paths]
    return sorted((value for each in found for value in each), key=str)


# -- once -------------------------------------------------------------------------------------------


def test_a_batch_is_added_once(warehouse: Warehouse) -> None:
    assert write(warehouse, batch([1, 2, 3]))[1]
    assert not write(warehouse, batch([1, 2, 3]), attempt="two")[1]
    assert write(warehouse, batch([4]), number=1)[1]
    assert write(warehouse, batch([5]), query="other")[1]
    assert numbers(warehouse) == [1, 2, 3, 4, 5]


def test_files_of_dead_attempts_are_removed_by_the_one_that_succeeds(warehouse: Warehouse) -> None:
    dead, _ = write(warehouse, batch([1, 2]), attempt="dead", commit=False)
    assert all(Path(each.path.removeprefix("file://")).exists() for each in dead)
    assert numbers(warehouse) == []
    write(warehouse, batch([1, 2]), attempt="alive")
    assert warehouse.table("risk.tags").clean("q", 0) == len(dead) == 2
    assert not any(Path(each.path.removeprefix("file://")).exists() for each in dead)
    assert numbers(warehouse) == [1, 2]


def test_cleaning_takes_nothing_that_a_table_lists(warehouse: Warehouse) -> None:
    """Also for a batch that was repeated, and in a folder with a blank in its name."""
    write(warehouse, batch([1, 2]))
    repeated, taken = write(warehouse, batch([1, 2]), attempt="two")
    table = warehouse.table("risk.tags")
    assert not taken
    assert table.clean("q", 0) == len(repeated)
    assert table.clean("q", 0) == 0
    assert table.has_batch("q", 0)
    assert not table.has_batch("q", 1)
    assert numbers(warehouse) == [1, 2]


def test_an_older_driver_that_commits_first_wins_and_nothing_is_doubled(
    warehouse: Warehouse,
) -> None:
    """Both wrote; whoever commits second finds the batch and its files are removed."""
    old, _ = write(warehouse, batch([1, 2]), attempt="old", commit=False)
    new, _ = write(warehouse, batch([1, 2]), attempt="new", commit=False)
    table = warehouse.table("risk.tags")
    assert table.commit(old, "q", 0)
    assert not table.commit(new, "q", 0)
    assert table.clean("q", 0) == len(new)
    assert numbers(warehouse) == [1, 2]


def test_files_are_cut_by_tenant_and_day(warehouse: Warehouse) -> None:
    days = pa.array([0, 86_400_000_000, None, 5], STAMP)
    rows = batch([1, 2, 3, 4]).set_column(1, "event_time", days)
    written, _ = write(warehouse, rows)
    assert sorted((each.tenant, each.day, each.rows) for each in written if each.day is not None) == [
        ("t0", 0, 1), ("t1", 0, 1), ("t1", 1, 1),
    ]  # fmt: skip
    assert [each.tenant for each in written if each.day is None] == ["t0"]
    assert numbers(warehouse) == [1, 2, 3, 4]


def test_formats_read_back_with_their_own_readers(warehouse: Warehouse) -> None:
    write(warehouse, batch([1, 2, 3]))
    table: Any = warehouse.table("risk.tags")
    if warehouse.format == "iceberg":
        found = table.load().scan().to_arrow()
    elif warehouse.format == "delta":
        found = table.load().to_pyarrow_table()
        assert set(found.column("day").to_pylist()) == {dt.date(2023, 11, 14)}
    else:
        glob = f"{warehouse.uri.removeprefix('file://')}/risk.tags/*/*/*.parquet"
        with duckdb.connect() as session:
            query = "SELECT n, tenant, day FROM read_parquet(?, hive_partitioning = true)"
            listed = session.execute(query, [glob]).fetchall()
        found = pa.table({"n": [row[0] for row in listed], "tenant": [row[1] for row in listed]})
        assert {row[2] for row in listed} == {dt.date(2023, 11, 14)}
    assert sorted(found.column("n").to_pylist()) == [1, 2, 3]
    assert sorted(found.column("tenant").to_pylist()) == ["t0", "t0", "t1"]


def test_a_task_with_many_tenants_keeps_few_files_open(
    lake: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 3)
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 1)
    rows = batch(list(range(40)))
    rows = rows.set_column(0, "tenant", pa.array([f"t{n % 10}" for n in range(40)]))
    written, _ = write(lake, rows)
    assert sum(each.rows for each in written) == 40
    assert numbers(lake) == sorted(range(40), key=str)


# -- conflicts --------------------------------------------------------------------------------------


def test_two_writers_at_once_lose_nothing(lake: Warehouse) -> None:
    """An Iceberg commit conflict with a second writer is tried again on the new state."""
    write(lake, batch([0]), query="first")
    made = {
        query: write(lake, batch([n]), query=query, commit=False)[0]
        for n, query in enumerate(("a", "b", "c", "d"), 1)
    }
    table = lake.table("risk.tags")
    failed: list[BaseException] = []

    def commit(query: str) -> None:
        try:
            assert table.commit(made[query], query, 0)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=commit, args=(query,)) for query in made]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert numbers(lake) == [0, 1, 2, 3, 4]


def test_a_lost_commit_looks_again_whether_the_batch_is_in(
    lake: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg's own retry would add it a second time."""
    made = {name: write(lake, batch([7]), attempt=name, commit=False)[0] for name in ("old", "new")}
    table = lake.table("risk.tags")
    real = iceberg.data_file
    seen: list[str] = []

    def between(current: Any, path: str) -> Any:
        if not seen:
            seen.append(path)
            assert lake.table("risk.tags").commit(made["old"], "q", 0)
        return real(current, path)

    monkeypatch.setattr(iceberg, "data_file", between)
    assert not table.commit(made["new"], "q", 0)
    assert numbers(lake) == [7]


def test_a_writer_that_always_loses_is_told_and_nothing_is_added(
    lake: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg, "COMMIT_TRIES", 3)
    monkeypatch.setattr(iceberg, "FIRST_WAIT_S", 0.0)
    made, _ = write(lake, batch([1]), commit=False)
    other = iter(range(100))
    real = iceberg.data_file

    def rival(current: Any, path: str) -> Any:
        found = real(current, path)
        with iceberg.IcebergTable(lake, "risk.tags").load().transaction() as change:
            with change.update_snapshot().fast_append() as append:
                append.append_data_file(real(current, made[0].path))
            change.set_properties({"rival": str(next(other))})
        return found

    monkeypatch.setattr(iceberg, "data_file", rival)
    with pytest.raises(CommitConflict, match="3 commits"):
        lake.table("risk.tags").commit(made, "q", 0)
    assert not lake.table("risk.tags").has_batch("q", 0)


def test_columns_that_change_under_a_batch_are_a_conflict(lake: Warehouse) -> None:
    write(lake, batch([1]))
    table, rejects = lake.table("risk.tags"), lake.table("risk.tags__rejected")
    layouts = table.layout("q", 1, "x"), rejects.layout("q", 1, "x")
    made = list(write_rows([batch([2])], *layouts, "0", {}))
    evolve(lake, "risk.tags", rename={"n": "m"})
    with pytest.raises(CommitConflict, match="again"):
        table.commit(made, "q", 1)


# -- columns ----------------------------------------------------------------------------------------


def scan(lake: Warehouse) -> list[dict[str, Any]]:
    found = iceberg.IcebergTable(lake, "risk.tags").load().scan().to_arrow().to_pylist()
    return sorted(found, key=str)


def test_columns_are_added_and_widened_as_rows_need_it(lake: Warehouse) -> None:
    money = pa.array([None], pa.decimal128(5, 2))
    ratio = pa.array([0.5], pa.float32())
    write(lake, batch([1], pa.int32(), money=money, ratio=ratio))
    wider = batch(
        [2**40], extra=pa.array(["new"]), ratio=pa.array([0.1], pa.float64()),
        money=pa.array([1234567], pa.decimal128(9, 2)),
    )  # fmt: skip
    adapt(lake.table("risk.tags"), wider.schema)
    write(lake, wider, number=1)
    found = scan(lake)
    assert sorted((row["n"], row["extra"], row["ratio"]) for row in found) == [
        (1, None, 0.5), (2**40, "new", 0.1),
    ]  # fmt: skip


def test_a_renamed_column_keeps_its_values_and_a_dropped_one_does_not_return(
    lake: Warehouse,
) -> None:
    """Files carry the numbers of columns, so an old name given again means the new column."""
    write(lake, batch([1], gone=pa.array(["secret"])))
    evolve(lake, "risk.tags", rename={"n": "m"}, drop=["gone"])
    evolve(lake, "risk.tags", add={"gone": "string", "n": "double"})
    rows = batch([0.5], pa.float64(), m=pa.array([2], pa.int64()), gone=pa.array(["fresh"]))
    write(lake, rows, number=1)
    found = sorted((row["m"], row["n"], row["gone"]) for row in scan(lake))
    assert found == [(1, None, None), (2, 0.5, "fresh")]


def test_commands_that_cannot_be_done_change_nothing(lake: Warehouse) -> None:
    with pytest.raises(UnknownTable):
        evolve(lake, "risk.tags", drop=["n"])
    write(lake, batch([1]))
    before = lake.table("risk.tags").schema()
    with pytest.raises(SchemaMismatch, match="'x'"):
        evolve(lake, "risk.tags", drop=["x"])
    with pytest.raises(SchemaMismatch, match="not wider"):
        evolve(lake, "risk.tags", widen={"n": "int"})
    with pytest.raises(InvalidInput, match="uuid"):
        evolve(lake, "risk.tags", add={"y": "uuid"})
    with pytest.raises(SchemaMismatch):
        evolve(lake, "risk.tags", drop=["tenant"])
    assert lake.table("risk.tags").schema() == before


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_formats_that_know_columns_by_name_add_and_refuse_the_rest(
    format: Any, tmp_path: Path
) -> None:
    warehouse = Warehouse(tmp_path, format=format)
    write(warehouse, batch([1], pa.int32()))
    rows = batch([2, 2**40], extra=pa.array(["new", "lost"]))
    adapt(warehouse.table("risk.tags"), rows.schema)
    write(warehouse, rows, number=1)
    assert numbers(warehouse) == [1, 2]
    assert numbers(warehouse, "reason", "risk.tags__rejected") == [
        "column 'n': 1099511627776 is no int32"
    ]
    for change in ({"rename": {"n": "m"}}, {"drop": ["n"]}, {"widen": {"n": "long"}}):
        with pytest.raises(Unsupported, match="Iceberg"):
            evolve(warehouse, "risk.tags", **change)  # type: ignore[arg-type]


# -- rows that do not fit ---------------------------------------------------------------------------


def test_rows_that_do_not_fit_are_dead_letters_and_none_is_lost(warehouse: Warehouse) -> None:
    """Row S4: count(in) == count(table) + count(rejected)."""
    write(warehouse, batch([1]))
    mixed = batch(
        ["2", "two", "3", None], pa.string(),
        fault=pa.array([None, None, "payload is no JSON", None]),
        topic=pa.array(["risk"] * 4), partition=pa.array([5] * 4, pa.int32()),
        payload=pa.array([b"a", b"b", b"c", b"d"]),
    )  # fmt: skip
    adapt(warehouse.table("risk.tags"), mixed.drop_columns(["fault"]).schema)
    written, _ = write(warehouse, mixed, number=1)
    assert sum(each.rows for each in written) == 4
    assert numbers(warehouse) == [1, 2, None]
    bad = [
        row
        for each in table_files(warehouse, "risk.tags__rejected")
        for row in pq.read_table(each, partitioning=None).to_pylist()
    ]
    assert sorted((row["reason"], row["offset"], row["partition"], row["payload"]) for row in bad) == [
        ("column 'n': 'two' is no int64", 1, 5, b"b"), ("payload is no JSON", 2, 5, b"c"),
    ]  # fmt: skip
    assert {row["topic"] for row in bad} == {"risk"}
    assert {row["tenant"] for row in bad} == {"t0", "t1"}


NESTED = pa.struct([("a", pa.int64())])


@pytest.mark.parametrize(
    ("given", "kind", "wanted", "fitting"),
    [
        ([1, 2**40], pa.int64(), pa.int32(), [1]),
        ([1.0, 1.5], pa.float64(), pa.int64(), [1]),
        ([0.5, 0.1], pa.float64(), pa.float32(), [0.5]),
        (["2024-01-01", "soon"], pa.string(), pa.date32(), [dt.date(2024, 1, 1)]),
        (
            [{"a": 1, "b": 2}, None],
            pa.struct([("a", pa.int64()), ("b", pa.int64())]),
            NESTED,
            [None],
        ),
        ([{"a": 1}], NESTED, pa.string(), []),
        ([b"\xff", b"ok"], pa.binary(), pa.string(), ["ok"]),
        ([1, None], pa.int32(), pa.int64(), [1, None]),
    ],
)
def test_values_are_cast_only_where_nothing_is_lost(
    given: list[Any], kind: pa.DataType, wanted: pa.DataType, fitting: list[Any]
) -> None:
    rows = pa.record_batch({"v": pa.array(given, kind)})
    good, bad = fit(rows, pa.schema([("v", wanted)]))
    assert good.column("v").to_pylist() == fitting
    assert good.num_rows + bad.num_rows == len(given)
    assert all(reason.startswith("column 'v': ") for reason in bad.column("reason").to_pylist())


def test_a_column_the_table_may_not_get_rejects_the_rows_that_use_it() -> None:
    rows = pa.record_batch({"v": [1, 2], "more": [None, "x"]})
    good, bad = fit(rows, pa.schema([("v", pa.int64()), ("w", pa.int64())]))
    assert good.to_pylist() == [{"v": 1, "w": None}]
    assert bad.column("reason").to_pylist() == ["column 'more' is not in the table"]
    assert bad.column("payload").to_pylist() == [b'{"v":2,"more":"x"}']


def test_required_columns_reject_nulls() -> None:
    target = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    good, bad = fit(pa.record_batch({"v": pa.array([1, None])}), target)
    assert (good.num_rows, bad.column("reason").to_pylist()) == (
        1,
        ["column 'v' is required and null"],
    )
    none, all_bad = fit(pa.record_batch({"u": pa.array([None], pa.int64())}), target)
    assert (none.num_rows, all_bad.num_rows) == (0, 1)


# -- the warehouse ----------------------------------------------------------------------------------


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("pyiceberg", "deltalake"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for format in ("iceberg", "delta"):
        with pytest.raises(MissingExtra, match=r"penstock\[lakehouse\]"):
            Warehouse(tmp_path, format=format).table("a.b").schema()  # type: ignore[arg-type]
    with pytest.raises(MissingExtra, match="pyiceberg"):
        Warehouse("s3://bucket/lake", format="parquet").table("a.b")


def test_wrong_places_and_names_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="catalogue must be named"):
        _ = Warehouse("s3://bucket/lake").catalogue
    with pytest.raises(InvalidTopic):
        Warehouse(tmp_path).table("a..b")
    (tmp_path / "file").touch()
    with pytest.raises(WarehouseFailed):
        Warehouse(tmp_path / "file")
    with pytest.raises(WarehouseFailed, match="does not open"):
        _ = Warehouse(tmp_path, properties={"type": "sql", "uri": "nonsense://x"}).catalogue


def test_any_catalogue_comes_by_properties(tmp_path: Path) -> None:
    """The same table under a catalogue that stands elsewhere."""
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/elsewhere.db"}
    with Warehouse(tmp_path / "lake", properties=properties) as warehouse:
        write(warehouse, batch([1]))
        assert numbers(warehouse) == [1]
    assert not (tmp_path / "lake" / "catalogue.db").exists()


def test_columns_that_iceberg_does_not_have_are_refused(lake: Warehouse) -> None:
    with pytest.raises(SchemaMismatch, match=r"risk\.tags"):
        lake.table("risk.tags").create(pa.schema([("i", pa.month_day_nano_interval())]), Cut())


def test_tables_without_tenant_and_day_are_whole(warehouse: Warehouse) -> None:
    table = warehouse.table("plain")
    rows = pa.record_batch({"n": [1, 2]})
    table.create(rows.schema, Cut.of(rows.schema))
    layout = table.layout("q", 0, "x")
    assert layout.cut == Cut()
    made = list(write_rows([rows], layout, Layout(layout.folder, REJECTED, Cut()), "0", {}))
    assert table.commit(made, "q", 0)
    assert numbers(warehouse, "n", "plain") == [1, 2]

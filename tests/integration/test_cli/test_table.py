"""`penstock table`: topics become tables by their files, from the command line (S4, Q16)."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.cli.app import run
from penstock.pipelines.lakehouse.files import PartitionWriter
from penstock.pipelines.lakehouse.table import Cut
from penstock.pipelines.lakehouse.warehouse import Warehouse
from penstock.testing.broker_process import BrokerProcess

EVENTS = 3_000
SMALL = {"journal__file_bytes": 1 << 20, "sealing__process": False, "sealing__grace_s": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with penstock.connect_sync(tmp_path / "data", **SMALL) as bus:
        for _ in range(EVENTS // 500):
            bus.publish_many("orders.made.v1.acme", [os.urandom(1_000) for _ in range(500)])
        bus._thread.wait(bus._target.engine.maintenance.settle())
    return tmp_path / "data"


def test_sealed_events_are_rows_of_the_table_and_a_second_run_adds_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = str(folder.parent / "lake")
    words = ["--url", str(folder), "--json", "table"]
    assert run([*words, "sync", "orders.#", "--warehouse", lake]) == 0
    first = json.loads(capsys.readouterr().out)
    rows = first["rows_joined"] + first["rows_copied"]
    assert 0 < rows <= EVENTS
    assert first["tables"] == 1
    assert run([*words, "sync", "--warehouse", lake]) == 0
    assert json.loads(capsys.readouterr().out)["snapshots"] == 0
    assert run([*words, "files", "orders.made.v1", "--warehouse", lake]) == 0
    files = [json.loads(line)["file"] for line in capsys.readouterr().out.splitlines()]
    assert sum(pq.read_metadata(each).num_rows for each in files) == rows
    assert any(str(folder) in each for each in files), "a segment joined as it is"


@pytest.mark.parametrize(
    ("url", "more", "why"),
    [
        ("data", ["files", "nope"], "there is no table 'nope'"),
        ("nowhere", ["sync"], "no Penstock folder"),
        ("penstock://127.0.0.1:1", ["sync"], "is no folder"),
        ("data", ["sync", "a..b"], "a..b"),
    ],
)
def test_what_cannot_be_done_is_said(url, more, why, folder, capsys, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["--url", url, "table", *more, "--warehouse", "lake"]) != 0
    assert why in capsys.readouterr().err


def test_looking_at_a_table_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F7: neither a warehouse nor a catalogue; a table of another format is named."""
    lake = tmp_path / "lake"
    for words in (["files", "made.here"], ["compact", "made.here"]):
        assert run(["table", *words, "--warehouse", str(lake)]) != 0
        assert "there is no table 'made.here'" in capsys.readouterr().err
        assert not lake.exists()
    (lake / "made.here" / "_delta_log").mkdir(parents=True)
    assert run(["table", "files", "made.here", "--warehouse", str(lake)]) != 0
    assert "add --format delta" in capsys.readouterr().err
    assert [each.name for each in lake.iterdir()] == ["made.here"]


@pytest.mark.parametrize("where", ["folder", "broker"])
def test_events_in_the_journal_are_told_and_sealed_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """F2: with the folder to itself, or while a broker has it."""
    data = tmp_path / "data"
    with penstock.connect_sync(data) as bus:
        bus.publish_many("orders.made", [b"x"] * 7)
        bus.publish("others.made", b"y")
    sync = [
        "--url",
        str(data),
        "--json",
        "table",
        "sync",
        "orders.#",
        "--warehouse",
        str(tmp_path / "lake"),
    ]
    assert run(sync) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["waiting"] == 7
    assert "7 events are still in the journal" in told.err
    assert "penstock topic seal" in told.err
    with contextlib.ExitStack() as stack:
        url = str(data)
        if where == "broker":
            url = stack.enter_context(BrokerProcess(data)).url()
        assert run(["--url", url, "topic", "seal"]) == 0
        assert "sealed" in capsys.readouterr().err
        assert run(sync) == 0
        told = capsys.readouterr()
        report = json.loads(told.out)
        assert (report["waiting"], report["rows_joined"] + report["rows_copied"]) == (0, 7)
        assert "journal" not in told.err
        assert run(["--url", url, "topic", "seal"]) == 0, "there is nothing to seal"


def test_small_files_of_results_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """S4: `penstock table compact`."""
    lake = tmp_path / "lake"
    schema = pa.schema([("n", pa.int64())])
    with Warehouse(lake) as warehouse:
        table = warehouse.table("made.here")
        table.create(schema, Cut.of(schema))
        for batch in range(3):
            writer = PartitionWriter(table.layout("q", batch, "a"), "0", {})
            columns = table.schema()
            assert columns is not None
            writer.add(pa.record_batch([pa.array([batch], pa.int64())], schema=columns))
            table.commit(writer.finish(), "q", batch)
    words = ["--json", "table"]
    assert run([*words, "compact", "made.here", "--warehouse", str(lake)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["files_before"], report["files_after"], report["rewritten"]) == (3, 1, 3)
    assert run([*words, "files", "made.here", "--warehouse", str(lake)]) == 0
    (file,) = capsys.readouterr().out.splitlines()
    assert sorted(pq.read_table(json.loads(file)["file"])["n"].to_pylist()) == [0, 1, 2]
    assert run([*words, "compact", "made.here", "--warehouse", str(lake), "--keep", "1m"]) != 0
    assert "may be in use" in capsys.readouterr().out

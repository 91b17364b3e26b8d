"""`penstock pipeline`: found by name, run, watched and tested from the command line (S5, S6, S8)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock
from penstock.cli import invocation
from penstock.cli.app import run
from penstock.pipelines import session
from penstock.pipelines.lakehouse.warehouse import Warehouse, identifier, table_files
from penstock.pipelines.stores import close_stores
from penstock.testing.object_store import ObjectStore

OWN = '''
import msgspec
import penstock

class Params(msgspec.Struct):
    factor: int = 2

@penstock.pipeline("scaled", reads="numbers.#", writes="scaled.numbers", schema="n BIGINT", params=Params)
def scaled(events, params):
    """Numbers times a factor."""
    return events.where("fault IS NULL").selectExpr(f"value.n * {params.factor} AS n")
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "scaled.py").write_text(OWN)
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("numbers.all", [{"n": n} for n in range(10)])
        bus.publish("numbers.all", b"no number")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def results(project: Path) -> list[int]:
    with penstock.connect_sync(f"{project / 'data'}?mode=ro") as bus:
        return sorted(event.value()["n"] for event in bus.replay("scaled.#"))


def words(project: Path, *more: str) -> list[str]:
    return [
        "--json",
        "--url",
        str(project / "data"),
        "pipeline",
        *more,
        "--path",
        str(project / "own"),
    ]


def test_own_and_built_in_pipelines_are_listed(project, capsys) -> None:
    assert run(words(project, "list")) == 0
    found = {row["name"]: row for row in said(capsys)}
    assert found["scaled"]["summary"] == "Numbers times a factor."
    assert {"risk-tags", "usage", "dead-letters", "audit", "replay-compare", "topic-to-table"} <= set(found)  # fmt: skip


def test_a_pipeline_runs_goes_on_and_says_where_it_is(spark, project, capsys) -> None:
    state = ["--state", str(project / "state")]
    assert run(words(project, "run", "scaled", "--once", "-p", "factor=3", *state)) == 0
    assert said(capsys)[-1]["rows_in"] == 11
    assert results(project) == [n * 3 for n in range(10)]
    with penstock.connect_sync(project / "data") as bus:
        bus.publish_many("numbers.all", [{"n": 100}, {"n": 200}])
    assert run(words(project, "status", "scaled", *state)) == 0
    [standing] = said(capsys)
    assert (standing["lag"], standing["offsets"]) == (2, {"numbers.all/0": 11})
    assert run(words(project, "run", "scaled", "--once", *state)) == 0
    assert results(project)[-2:] == [200, 400]
    capsys.readouterr()
    assert run(words(project, "status", "scaled", *state)) == 0
    assert said(capsys)[0]["lag"] == 0
    (project / "data").rename(project / "moved")
    with penstock.connect_sync(project / "data") as bus:
        bus.publish_many("numbers.all", [{"n": n} for n in range(50)])
    close_stores()
    assert run(words(project, "status", "scaled", *state)) != 0
    [refused] = said(capsys)
    assert "belongs to another bus" in refused["error"]["message"]


def test_a_pipeline_begins_where_it_is_told(spark, project, capsys) -> None:
    """S5: `--start` with offsets as JSON."""
    more = ["--start", '{"numbers.all": {"0": 8}}', "--state", str(project / "state")]
    assert run(words(project, "run", "scaled", "--once", *more)) == 0
    done = said(capsys)[-1]
    assert (done["rows_in"], done["skipped"]) == (3, 0)
    assert results(project) == [16, 18]


def test_a_pipeline_is_tested_on_rows_of_a_file(spark, project, capsys) -> None:
    rows, good, bad = (project / name for name in ("rows", "good", "bad"))
    timed = '{"payload": {"n": 4}, "event_time": "2026-01-02T03:04:05Z"}'
    rows.write_text(timed + '\n\n{"payload": "nothing"}\n')
    good.write_text('{"n": 8}\n')
    bad.write_text('{"n": 9}\n')
    assert run(words(project, "test", "scaled", str(rows))) == 0
    assert said(capsys) == [{"n": 8}]
    assert run(words(project, "test", "scaled", str(rows), "--expect", str(good))) == 0
    assert run(words(project, "test", "scaled", str(rows), "--expect", str(bad))) == 1
    assert capsys.readouterr().out.splitlines() == ['- {"n":9}', '+ {"n":8}']
    rows.write_text('{"payload": {"n": 4}, "event_time": "yesterday"}')
    assert run(words(project, "test", "scaled", str(rows))) == invocation.INVALID
    assert "event_time is a time (a datetime, text such as" in capsys.readouterr().out


def test_risk_tags_is_not_behind_by_what_it_sets_aside(spark, project, capsys) -> None:
    """F8: its bad and late topics lie below the topics that it reads."""
    with penstock.connect_sync(project / "data") as bus:
        bus.publish(
            "evidence.jobs.v1.acme", {"evidence_id": "e1", "kind": "job", "state": "failed"}
        )
        bus.publish_many("evidence.jobs.v1.acme", [b"no evidence"] * 3)
    state = ["--state", str(project / "state")]
    assert run(words(project, "run", "risk-tags", "--once", *state)) == 0
    assert said(capsys)[-1]["rows_in"] == 4
    with penstock.connect_sync(f"{project / 'data'}?mode=ro") as bus:
        assert len(list(bus.replay("evidence.bad.#"))) == 3
    assert run(words(project, "status", "risk-tags", *state)) == 0
    assert said(capsys)[-1]["lag"] == 0
    assert run(words(project, "run", "risk-tags", "--once", *state)) == 0
    assert said(capsys)[-1]["rows_in"] == 0


def test_usage_is_not_behind_by_its_own_rows(spark, project, capsys) -> None:
    """F8: it reads every topic, and writes to one of them."""
    with penstock.connect_sync(project / "data") as bus:
        known = sum(each.events for each in bus.topics.list())
        bus.publish_many("usage.hours.v1.acme", [b"{}"] * 5)
    state = ["--state", str(project / "state")]
    assert run(words(project, "run", "usage", "--once", *state)) == 0
    done = said(capsys)[-1]
    assert (done["rows_in"], done["lag"]) == (known, 0)
    with penstock.connect_sync(project / "data") as bus:
        bus.publish_many("usage.hours.v1.acme", [b"{}"] * 5)
    assert run(words(project, "status", "usage", *state)) == 0
    assert said(capsys)[-1]["lag"] == 0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["run", "scalled"], "Did you mean 'scaled'"),
        (["run", "scaled", "-p", "factor=lots"], "factor"),
        (["run", "scaled", "-p", "colour=red"], "colour"),
        (["run", "scaled", "-p", "factor"], "NAME=VALUE"),
        (["status", "scaled", "--state", "nowhere"], "no checkpoint"),
        (["run", "topic-to-table", "--once"], "writes a table only"),
    ],
)
def test_what_is_wrong_is_said_before_java_starts(project, capsys, monkeypatch, more, why) -> None:
    def started(**_: Any) -> None:
        raise AssertionError("a session was asked for")

    monkeypatch.setattr(session, "spark_session", started)
    assert run(words(project, *more)) in (invocation.INVALID, invocation.NOT_FOUND)
    assert why in capsys.readouterr().out


def test_a_file_that_does_not_load_is_named(project, capsys) -> None:
    (project / "own" / "broken.py").write_text("import nothing_of_that_name\n")
    assert run(words(project, "list")) != 0
    assert "broken.py cannot be loaded" in capsys.readouterr().out


def test_every_built_in_pipeline_is_one_command_on_a_folder(spark, project, capsys) -> None:
    """S5, Q16, X6: on the real source; risk-tags is the main job, tests/pipelines/test_showcase.py."""
    with penstock.connect_sync(project / "data") as bus:
        with bus.subscribe("numbers.all", group="billing") as events:
            next(iter(events)).reject("no stock for order 17")
        bus.flush()

    def command(*more: str) -> list[dict[str, Any]]:
        assert run(words(project, "run", *more, "--state", str(project / "state"))) == 0
        return said(capsys)

    [letter] = command("dead-letters")
    assert (letter["error"], letter["letters"]) == ("no stock for order <n>", 1)
    [verdict] = command("audit")
    assert (verdict["ok"], verdict["broken_sequence"]) == (True, None)
    kept = str(project / "hash.json")
    time.sleep(6)  # replay-compare leaves out what is younger than five seconds
    [first] = command("replay-compare", "-p", f"file={kept}", "-p", "topics=numbers.#")
    [again] = command("replay-compare", "-p", f"file={kept}", "-p", "topics=numbers.#")
    assert (first["rows"], first["verdict"], again["verdict"]) == (11, "kept", "equal")
    assert first["sha256"] == again["sha256"]
    assert command("usage", "--once")[-1]["rows_in"] >= 11
    lake = str(project / "lake")
    command("topic-to-table", "--once", "--topics", "numbers.#", "--warehouse", lake)
    with Warehouse(lake) as warehouse:
        files = table_files(warehouse, "events")
    offsets = [n for path in files for n in pq.read_table(path)["offset"].to_pylist()]
    assert sorted(offsets) == list(range(11))


def test_workers_write_into_a_bucket(spark, project, tmp_path, capsys) -> None:
    """S4: the same command with a bucket of a real S3 server; executors write, the driver commits."""
    with ObjectStore(tmp_path / "s3") as store:
        given = {**store.iceberg, "type": "sql", "uri": f"sqlite:///{tmp_path}/catalogue.db"}
        file = tmp_path / "lake.toml"
        file.write_text("".join(f"{name} = {json.dumps(each)}\n" for name, each in given.items()))
        place = f"s3://{store.bucket}/lake"
        more = ["--once", "--topics", "numbers.#", "--warehouse", place, "--properties", str(file)]
        assert run(words(project, "run", "topic-to-table", *more, "--state", str(tmp_path / "state"))) == 0  # fmt: skip
        with Warehouse(place, properties=given) as warehouse:
            rows = warehouse.catalogue.load_table(identifier("events")).scan().to_arrow()
        assert sorted(rows["offset"].to_pylist()) == list(range(11))

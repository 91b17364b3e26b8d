"""The benchmarks of the pipelines measure what they say, on few rows (row S9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench.report import compare
from penstock.bench.spark import runner
from penstock.bench.spark.runner import CASES, run_spark, spark_table
from penstock.model.errors import InvalidInput, NotFound

ROWS = {"one-event": 2}
FEW = 6_000


@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_a_figure_for_each_side(name: str, tmp_path: Path, spark: Any, monkeypatch: Any) -> None:  # fmt: skip
    monkeypatch.setattr("penstock.bench.spark.replaying.SETTLED_S", 0)
    monkeypatch.setattr("penstock.pipelines.builtin.replay_compare.SETTLED_S", 0)
    rows = ROWS.get(name, FEW)
    (found,) = run_spark([name], folder=tmp_path, rows=rows, rounds=1)
    assert (found["case"], found["rows"], found["rounds"]) == (f"spark-{name}", rows, 1)
    for side in [found["penstock"], *found["peers"].values()]:
        assert side["per_s"] > 0 or name == "join"  # of so few events none is sealed
        assert side["p50_ms"] > 0
    assert set(found["ratio"]) == set(found["peers"])
    assert compare(found, found)["case"] == f"spark-{name}"
    assert spark_table([found]).row_count == 1 + len(found["peers"])
    if name == "worker-memory":
        assert 10 < found["penstock"]["extra"]["worker_peak_mb"] < 2_000


def test_a_wrong_count_is_no_figure(tmp_path: Path, spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.bench.spark.writing._save", lambda frame, url: None)
    with pytest.raises(Exception, match="where 100 were expected"):
        list(run_spark(["sink"], folder=tmp_path, rows=100, rounds=1))


def test_what_cannot_be_run_is_said_before_anything_starts(tmp_path: Path, monkeypatch: Any) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "_run", lambda *each: pytest.fail("it ran"))
    with pytest.raises(NotFound, match="Did you mean 'source'"):
        run_spark(["sorce"], folder=tmp_path)
    with pytest.raises(InvalidInput, match="rounds 1 to 20"):
        run_spark(rounds=0, folder=tmp_path)

"""The example of Spark Declarative Pipelines runs as it is, with the spec's places changed (S6)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import penstock
from penstock.pipelines.session import find_java

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative"


def results(folder: Path) -> list[float]:
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        return sorted(event.value()["amount"] for event in bus.replay("orders.large"))


def run(folder: Path) -> None:
    beside = Path(sys.executable).parent
    done = subprocess.run(
        [str(beside / "spark-pipelines"), "run", "--spec", "spark-pipeline.yml"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=500,
        env={
            **os.environ, "PATH": f"{beside}:{os.environ['PATH']}", "PYSPARK_PYTHON": sys.executable,
            "JAVA_HOME": str(find_java().home), "SPARK_LOCAL_IP": "127.0.0.1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Run is COMPLETED" in done.stdout + done.stderr


def test_a_flow_copies_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    spec = folder / "spark-pipeline.yml"
    text = spec.read_text()
    for old, new in (
        ("/tmp/large-orders", str(tmp_path / "storage")),
        ("./data", str(tmp_path / "data")),
        ("./results", str(tmp_path / "results")),
    ):
        assert old in text
        text = text.replace(old, new)
    spec.write_text(text)
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("orders.made", [{"amount": float(n)} for n in (50, 150, 250)])
    run(folder)
    assert results(tmp_path / "results") == [150.0, 250.0]
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish("orders.made", {"amount": 350.0})
    run(folder)
    assert results(tmp_path / "results") == [150.0, 250.0, 350.0]

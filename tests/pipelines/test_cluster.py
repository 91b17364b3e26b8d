"""Row S7: the same session on a standalone cluster, started for real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

import penstock
from penstock.pipelines.builtin.evidence import TENANTS, Sample
from penstock.pipelines.builtin.risk_tags import Balance, take_stock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.spark_cluster import SparkCluster

DRIVER = """
import os, sys, time
from penstock.pipelines.session import spark_session
from penstock.testing.spark_cluster import SparkCluster

def looked(batches):
    import os, time
    import penstock
    import pyarrow as pa
    for batch in batches:
        time.sleep(2)  # so that one worker cannot do it all
        own = [os.getppid(), os.getpgid(0)]
        yield pa.RecordBatch.from_pydict(
            {"rows": [batch.num_rows], "group": [own[1]], "file": [penstock.__file__]}
        )

cluster = SparkCluster(worker_memory="600m").start()
try:
    settings = {"spark.executor.memory": "512m", "spark.scheduler.minRegisteredResourcesRatio": "1.0",
                "spark.scheduler.maxRegisteredResourcesWaitingTime": "100s"}
    spark = spark_session(master=cluster.url, settings=settings)
    rows = spark.range(1000, numPartitions=4)
    found = rows.mapInArrow(looked, "rows BIGINT, group BIGINT, file STRING").collect()
    print({
        "master": spark.sparkContext.master == cluster.url,
        "workers": cluster.alive_workers(),
        "rows": sum(row.rows for row in found),
        "groups": sorted({row.group for row in found}),
        "shipped": all("penstock-packages.zip" in row.file for row in found),
    }, flush=True)
    sys.stdin.read()
finally:
    cluster.stop()
"""


def gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_runs_on_two_workers_that_die_with_the_driver(tmp_path: Path) -> None:
    """Rows S7: both workers take part with our packages; kill -9 of the driver leaves nothing."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # what a killed process leaves goes with the test
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert driver.stderr is not None
    try:
        line = driver.stdout.readline()
        assert line, driver.stderr.read()
        said = eval(line)
        groups = said.pop("groups")
        assert len(groups) == 2, "executors of both workers"
        assert said == {"master": True, "workers": 2, "rows": 1000, "shipped": True}
        os.kill(driver.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while not all(map(gone, groups)) and time.monotonic() < end:
            time.sleep(0.1)
        assert all(map(gone, groups))
    finally:
        driver.kill()
        driver.wait()
        for stream in (driver.stdin, driver.stdout, driver.stderr):
            stream.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_risk_tags_is_the_same_command_on_a_cluster_for_a_folder_and_a_broker(tmp_path: Path) -> None:  # fmt: skip
    """S1, S5, S7: executors of two workers read the source and write the sink; books balance."""
    folder = tmp_path / "data"
    made = _publish_evidence(folder)
    with SparkCluster(worker_memory="600m") as cluster:
        assert cluster.alive_workers() == 2
        _run_risk_tags(str(folder), cluster.url, tmp_path)
        _check_books(str(folder), made)
        with BrokerProcess(tmp_path / "served") as broker:
            made = _publish_evidence(broker.url())
            _run_risk_tags(broker.url(), cluster.url, tmp_path / "of-the-broker")
            _check_books(broker.url(), made)


def _publish_evidence(url: str | Path) -> dict[str, int]:
    sample, sent = Sample(seed=3), Counter[str]()
    with penstock.connect_sync(url) as bus:
        for tenant in TENANTS:
            for each in sample.make(tenant, 400, time.time_ns() // 1_000):
                bus.publish_many(each.topic, each.payloads, keys=each.keys, event_times=[
                    datetime.fromtimestamp(at / 1e6, UTC) for at in each.event_times
                ])  # fmt: skip
                sent[tenant] += len(each.payloads)
    return sent


def _run_risk_tags(url: str, master: str, place: Path) -> None:
    words = [sys.executable, "-m", "penstock.cli", "--url", url, "pipeline", "run", "risk-tags"]
    more = ["--once", "--master", master, "--conf", "spark.executor.memory=512m"]
    more += ["--conf", "spark.sql.shuffle.partitions=2"]  # Spark's 200 are for larger clusters
    more += ["--state", str(place / "state"), "--warehouse", str(place / "lake")]
    done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def _check_books(url: str, sent: dict[str, int]) -> None:
    async def books() -> dict[str, Balance]:
        async with penstock.connect(url) as bus:
            return await take_stock(bus, TENANTS)

    for tenant, found in asyncio.run(books()).items():
        assert found.balanced, (tenant, found)
        assert found.events == sent[tenant] > found.out > 0
        assert found.bad > 0
        assert found.duplicates > 0

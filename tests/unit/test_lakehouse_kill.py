"""The writing process dies at each stage of a batch; what is in the table afterwards is exact (S4)."""

from __future__ import annotations

import multiprocessing
import runpy
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.log import sealing
from penstock.log.disk import RealDisk
from penstock.log.manifest import Manifest
from penstock.log.recovery import check_folder
from penstock.log.sealing import Job, JournalInput
from penstock.log.segment import DAY_US
from penstock.model.batch import EventBatch
from penstock.model.settings import Sealing
from penstock.pipelines.lakehouse.warehouse import Warehouse, table_files

GOOD, BAD = 7, 3
# The writer as it is, on a frame that runs its task here: a session of Spark would cost half a
# minute a time. penstock.testing.spark_kill does it with Spark.
PROGRAM = """
import os
from types import SimpleNamespace

os.environ |= {environment!r}

import pyarrow as pa
import pyspark
from pyspark.sql import types as T

from penstock.pipelines.lakehouse.warehouse import Warehouse
from penstock.pipelines.lakehouse.writer import write_batch

context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0)
pyspark.TaskContext.get = staticmethod(lambda: context)
ROWS = pa.record_batch({{
    "tenant": [f"t{{n % 2}}" for n in range(10)],
    "offset": list(range(10)),
    "fault": [None if n < 7 else "no JSON" for n in range(10)],
}})


class Frame:
    schema = T.StructType([
        T.StructField("tenant", T.StringType()), T.StructField("offset", T.LongType()),
        T.StructField("fault", T.StringType()),
    ])

    def mapInArrow(self, function, columns):
        rows = [row for out in function(iter([ROWS])) for row in out.to_pylist()]
        return SimpleNamespace(collect=lambda: [tuple(row.values()) for row in rows])


warehouse = Warehouse({lake!r}, format={format!r})
for number in (0, 1):
    write_batch(Frame(), warehouse, "risk.tags", query="q", batch=number)
"""
SYNC = """
import os

os.environ |= {environment!r}

from penstock.pipelines.lakehouse.topics import sync_topics
from penstock.pipelines.lakehouse.warehouse import Warehouse

with Warehouse({lake!r}) as warehouse:
    sync_topics({log!r}, warehouse)
"""
LIBRARIES = [
    "pyarrow.parquet", "pyspark.sql.pandas.types", "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow",
    "deltalake", "penstock.pipelines.lakehouse.topics", "penstock.pipelines.lakehouse.writer",
]  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that begin with all libraries loaded: loading them takes longer than the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


def run(processes: Any, folder: Path, format: str, failpoint: str = "") -> int:
    return execute(processes, folder, PROGRAM, failpoint, format=format)


def execute(processes: Any, folder: Path, program: str, failpoint: str, **more: str) -> int:
    environment = {
        "FAILPOINT_FIRED": str(folder / "fired"),
        "FAILPOINT": failpoint,
    }
    script = folder / "program.py"
    lake = str(folder / "lake")
    script.write_text(program.format(environment=environment, lake=lake, **more))
    process = processes.Process(target=runpy.run_path, args=(str(script),))
    process.start()
    process.join(100)
    code = process.exitcode
    assert code is not None
    process.close()
    return code


def offsets(warehouse: Warehouse, name: str) -> list[int]:
    files = table_files(warehouse, name)
    found = [pq.read_table(path, partitioning=None).column("offset").to_pylist() for path in files]
    return sorted(value for each in found for value in each)


STAGES = ["files-written", "rejected-committed", "committing", "committed"]


@pytest.mark.parametrize(
    ("format", "stage"),
    [
        *(("iceberg", stage) for stage in STAGES),
        ("iceberg", "files-written:2"),
        ("delta", "files-written"),
        ("delta", "committed"),
        ("parquet", "files-written"),
        ("parquet", "committed"),
    ],
)
def test_a_batch_survives_death_exactly_once(
    format: str, stage: str, processes: Any, tmp_path: Path
) -> None:
    assert run(processes, tmp_path, format, f"lakehouse.{stage}") == -signal.SIGKILL
    assert (tmp_path / "fired").exists()
    assert run(processes, tmp_path, format) == 0
    with Warehouse(tmp_path / "lake", format=format) as warehouse:  # type: ignore[arg-type]
        assert offsets(warehouse, "risk.tags") == sorted([*range(GOOD)] * 2)
        bad = sorted([*range(GOOD, GOOD + BAD)] * 2)
        assert offsets(warehouse, "risk.tags__rejected") == bad
        listed = {
            path
            for name in ("risk.tags", "risk.tags__rejected")
            for path in table_files(warehouse, name)
        }
    there = {str(path) for path in (tmp_path / "lake").rglob("*.parquet")}
    assert there == listed, "an attempt that died left files"


# -- topics as tables ------------------------------------------------------------------------------

OWN = Sealing(min_segment_bytes=1, target_segment_bytes=100_000)
SHARED = Sealing(min_segment_bytes=10**9, target_segment_bytes=10**9)


def seal(folder: Path, start: int) -> None:
    """Three events of each of two topics in segments of their own, and three in one they share."""
    disk = RealDisk(folder)
    check_folder(disk, write=True)
    manifest = Manifest.load(disk, write=True)
    for base, options in ((start, OWN), (start + 3, SHARED)):
        batches = [
            EventBatch.build(topic, [b"x"] * 3, tenant="acme") for topic in ("bills", "orders")
        ]
        for each in batches:
            each.base_offset, each.append_time_us = base, DAY_US
        inputs = [JournalInput(base, base + 3)]
        job = Job(first_id=manifest.next_id, settings=options, journal=inputs)
        result = sealing.run(disk, job, lambda *_, made=batches: sealing.packed(made))
        manifest.apply(result.added, result.removed, sealed_to=base + 3, at_us=DAY_US)
    manifest.close()


@pytest.mark.parametrize("stage", ["topic-copied", "topic-copied:2", "topic-committed", "topic-committed:2"])  # fmt: skip
def test_a_topic_joins_its_table_exactly_once_whatever_dies(
    stage: str, processes: Any, tmp_path: Path
) -> None:
    """S4: in the first run and in one that adds; two tables, so that one is done and one is not."""
    log = tmp_path / "log"
    for turn in (0, 1):
        seal(log, 6 * turn)
        (tmp_path / "fired").unlink(missing_ok=True)
        died = execute(processes, tmp_path, SYNC, f"lakehouse.{stage}", log=str(log))
        assert died == -signal.SIGKILL
        assert (tmp_path / "fired").exists()
        assert execute(processes, tmp_path, SYNC, "", log=str(log)) == 0
        with Warehouse(tmp_path / "lake") as warehouse:
            for topic in ("bills", "orders"):
                assert offsets(warehouse, topic) == list(range(6 * turn + 6))

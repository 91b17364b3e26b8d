"""kill -9 of a Spark driver at every named stage of a batch, and its results compared with the log.

A child copies events with a pipeline, onto a bus and into a table, and dies at a failpoint: the
driver, its Java and its workers at once. The next goes on from the checkpoint and dies as well,
so recovery is killed too; the last of a streak is left alone. Then every event must be there once.
Stages that begin with `stream/` have no table: the query writes with `writeStream` itself then, and
Spark commits its batches by another way.
`python -m penstock.testing.spark_kill --kills 20` kills 20 times at each stage; with `--broker`
results go through a broker, which is a transaction for each task and not one for each batch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.pipelines.connection import is_broker
from penstock.testing.broker_process import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STREAM = "stream/"
_ON_THE_BUS = (
    "source.planned", "source.reading", "sink.task-begun", "sink.task-done", "sink.before-commit",
    "sink.after-commit",
)  # fmt: skip
STAGES = (
    *_ON_THE_BUS, "lakehouse.files-written", "lakehouse.committed",
    *(STREAM + stage for stage in _ON_THE_BUS),
)  # fmt: skip
EVENTS = 50
PER_BATCH = 25  # two batches at least: drivers die at their first or second chance
STREAK = 4
CHILD_S = 300.0
MODULE = "penstock.testing.spark_kill"  # not __name__, which is __main__ for the command


def kill_drivers(
    stages: tuple[str, ...],
    kills: int,
    *,
    seed: int = 1,
    broker: bool = False,
    tell: Callable[[str], None] = print,
) -> int:
    """Kill so many drivers at each stage; 0 when nothing was lost or doubled."""
    rng, problems, began = random.Random(seed), 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-spark-kill-") as folder,
        _target(Path(folder), broker) as url,
    ):
        worlds = {table: _World(Path(folder), url, table) for table in (True, False)}
        for stage in stages:
            world = worlds[not stage.startswith(STREAM)]
            for done in range(0, kills, STREAK):
                streak = [rng.randint(1, 2) for _ in range(min(STREAK, kills - done))]
                found = world.streak(stage, streak)
                problems += len(found)
                for problem in found:
                    tell(f"FINDING {stage}, after {done + len(streak)} kills: {problem}")
            tell(f"{stage}: {kills} kills, {world.sent:,} events, {problems} findings")
    seconds = time.monotonic() - began
    tell(f"spark kills: {kills * len(stages)} in {seconds:,.0f} s, {problems} findings")
    return int(bool(problems))


@contextmanager
def _target(folder: Path, broker: bool) -> Iterator[str]:
    """Where results go: a folder, or a broker on it."""
    if not broker:
        yield str(folder / "target")
        return
    with BrokerProcess(folder / "target") as running:
        yield running.url()


class _World:
    """A source folder, a target bus, perhaps a table, and a checkpoint that outlive all drivers."""

    def __init__(self, folder: Path, target: str, table: bool) -> None:
        self.sent = 0
        self._name = "table" if table else "stream"
        self._folder = folder / self._name
        self._folder.mkdir()
        self._target = target
        self._table = table

    def streak(self, stage: str, nths: list[int]) -> list[str]:
        """Drivers that die at the stage, one after another, and one that ends; what is wrong then."""
        for nth in nths:
            self._publish()
            fired = self._folder / "fired"
            fired.unlink(missing_ok=True)
            name = f"{stage.removeprefix(STREAM)}:{nth}"
            died = self._child({"FAILPOINT": name, "FAILPOINT_FIRED": str(fired)})
            if not fired.exists() or died != -signal.SIGKILL:
                return [f"the driver ended with {died} and did not die at {name}"]
        ended = self._child({})
        if ended:
            return [f"the driver that went on ended with {ended}"]
        found = self._compare("bus", self._on_the_bus())
        return found + self._compare("table", self._in_the_table()) if self._table else found

    def _publish(self) -> None:
        with penstock.connect_sync(self._folder / "source") as bus:
            numbers = range(self.sent, self.sent + EVENTS)
            bus.publish_many("in.numbers", [{"n": n} for n in numbers])
            self.sent += EVENTS

    def _child(self, more: dict[str, str]) -> int:
        words = [sys.executable, "-m", MODULE, "--child", str(self._folder), "--to", self._target]
        words += ["--table"] if self._table else []
        # Of a group of its own: what outlives the driver is ended with it.
        child = subprocess.Popen(words, env={**os.environ, **more}, start_new_session=True)
        try:
            return child.wait(CHILD_S)
        finally:
            child.kill()
            child.wait()
            time.sleep(0.2)

    def _on_the_bus(self) -> Counter[int]:
        url = self._target if is_broker(self._target) else f"{self._target}?mode=ro"
        with penstock.connect_sync(url) as bus:
            return Counter(
                msgspec.json.decode(event.payload)["n"]
                for event in bus.replay(f"copy.{self._name}")
            )

    def _in_the_table(self) -> Counter[int]:
        import pyarrow.parquet as pq

        from penstock.pipelines.lakehouse.warehouse import Warehouse

        with Warehouse(self._folder / "warehouse") as warehouse:
            files = warehouse.table("copied.numbers").files()
        return Counter(
            number
            for path in files
            for number in pq.read_table(path.removeprefix("file://"), columns=["n"])
            .column("n")
            .to_pylist()
        )

    def _compare(self, where: str, found: Counter[int]) -> list[str]:
        wanted = Counter(range(self.sent))
        lost, extra = wanted - found, found - wanted
        texts = []
        if lost:
            texts.append(f"{where}: {lost.total()} lost, such as {min(lost)}")
        if extra:
            texts.append(f"{where}: {extra.total()} too many, such as {min(extra)}")
        return texts


# -- the child -----------------------------------------------------------------------------------


def _copy(events: DataFrame) -> DataFrame:
    """Every number once more."""
    return events.selectExpr("value.n AS n", "event_time")


def _drive(folder: Path, target: str, table: bool) -> None:
    os.environ["FAILPOINT_ROOT"] = str(os.getpid())
    from penstock.pipelines.lakehouse.warehouse import Warehouse
    from penstock.pipelines.pipeline import Input, Pipeline
    from penstock.pipelines.run import Route, start
    from penstock.pipelines.session import spark_session

    made = Pipeline(
        "copy", _copy, {"events": Input("in.#", "n BIGINT")},
        writes=f"copy.{folder.name}", table="copied.numbers" if table else None,
    )  # fmt: skip
    # It lives for one batch or two: compiling well takes longer than running.
    quick = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    spark = spark_session(master="local[2]", name="kills", settings=quick)
    with Warehouse(folder / "warehouse") as warehouse:
        route = Route(
            url=str(folder / "source"), to=target, warehouse=warehouse,
            options={"maxEventsPerTrigger": str(PER_BATCH), "eventsPerTask": "10"},
        )  # fmt: skip
        query = start(made, spark, route, checkpoint=folder / "checkpoint", once=True)
        query.awaitTermination()
    spark.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a Spark driver at every stage of a batch.")
    parser.add_argument("--kills", type=int, default=20, help="how many at each stage")
    parser.add_argument("--stage", choices=STAGES, action="append", help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", action="store_true", help="results go through a broker")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.child:
        _drive(Path(chosen.child), chosen.to, chosen.table)
        return
    stages = tuple(chosen.stage or STAGES)
    sys.exit(kill_drivers(stages, chosen.kills, seed=chosen.seed, broker=chosen.broker))


if __name__ == "__main__":
    main()

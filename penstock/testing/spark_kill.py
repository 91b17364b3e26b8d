"""kill -9 of a Spark driver at every named stage of a batch, and its results compared with the log.

A child copies events with a pipeline, onto a bus and into a table, and dies at a failpoint: the
driver, its Java and its workers at once. The next goes on from the checkpoint and dies as well,
so recovery is killed too; the last of a streak is left alone. Then every event must be there once.
Stages that begin with `stream/` have no table: the query writes with `writeStream` itself then, and
Spark commits its batches by another way; so is it with those of `parts/`, whose batches are too large
for one transaction.
`python -m penstock.testing.spark_kill --kills 20 --jobs 2` kills 20 times at each stage, two stages
at a time; with `--broker` results go through a broker.

A driver lives for seconds, nearly all of them spent on starting. So drivers share compiled Python
and, when many are to come, an archive of Java's classes that the first one writes as it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.pipelines.stores import is_broker
from penstock.testing.broker_process import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STREAM = "stream/"
PARTS = "parts/"
PART_BYTES = 600  # a batch has three times as much and more
_ON_THE_BUS = (
    "source.planned", "source.reading", "sink.task-begun", "sink.task-done", "sink.before-commit",
    "sink.after-commit",
)  # fmt: skip
STAGES = (
    *_ON_THE_BUS, "lakehouse.files-written", "lakehouse.committed",
    *(STREAM + stage for stage in _ON_THE_BUS),
    PARTS + "sink.planned", PARTS + "sink.part-published",
)  # fmt: skip
EVENTS = 50
PER_BATCH = 25  # two batches at least: drivers die at their first or second chance
STREAK = 5
COPIES = "copy.numbers"
CHILD_S = 300.0
MANY = 20  # kills from which on an archive of classes pays: it takes half a minute to make
MODULE = "penstock.testing.spark_kill"  # not __name__, which is __main__ for the command


def kill_drivers(
    stages: tuple[str, ...],
    kills: int,
    *,
    seed: int = 1,
    broker: bool = False,
    jobs: int = 1,
    keep: str | None = None,
    tell: Callable[[str], None] = print,
) -> int:
    """Kill so many drivers at each stage; 0 when nothing was lost or doubled."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-spark-kill-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        launcher = _Launcher(Path(folder), Path(keep or folder).resolve())
        if keep or kills * len(stages) >= MANY:
            launcher.archive_classes()

        def kill(stage: str) -> int:
            world = Path(folder) / stage.replace("/", "-")
            with _target(world / "target", broker) as url:
                table, parts = not stage.startswith((STREAM, PARTS)), stage.startswith(PARTS)
                target = _World(world, url, launcher, table=table, parts=parts)
                return _kill_at(stage, kills, target, seed, tell)

        problems = sum(pool.map(kill, stages))
    seconds = time.monotonic() - began
    tell(f"spark kills: {kills * len(stages)} in {seconds:,.0f} s, {problems} findings")
    return int(bool(problems))


def _kill_at(stage: str, kills: int, world: _World, seed: int, tell: Callable[[str], None]) -> int:
    """Kill at one stage, in streaks; how many problems there were."""
    rng, problems, began = random.Random(f"{seed} {stage}"), 0, time.monotonic()
    for done in range(0, kills, STREAK):
        streak = [rng.randint(1, 2) for _ in range(min(STREAK, kills - done))]
        found = world.streak(stage, streak)
        problems += len(found)
        for problem in found:
            tell(f"FINDING {stage}, after {done + len(streak)} kills: {problem}")
    seconds = time.monotonic() - began
    tell(f"{stage}: {kills} kills, {world.sent:,} events, {problems} findings, {seconds:,.0f} s")
    return problems


@contextlib.contextmanager
def _target(folder: Path, broker: bool) -> Iterator[str]:
    """Where results go: a folder, or a broker on it."""
    if not broker:
        yield str(folder)
        return
    with BrokerProcess(folder) as running:
        yield running.url()


class _Launcher:
    """Starts drivers, quickly: what one compiled the next finds.

    It makes no difference to what they do. Python would compile Penstock anew in every worker where
    the environment forbids it to keep bytecode, and PySpark in any case: Spark lets workers import
    it from a zip, unless the folder they start in has it.
    """

    def __init__(self, folder: Path, keep: Path) -> None:
        self._folder, self._keep = folder, keep
        # Compiling well takes longer than a driver lives. What the killed leave goes with the folder.
        self._java = f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={folder}"
        bytecode = str(keep / "bytecode")
        self._environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        pyspark = importlib.util.find_spec("pyspark")
        assert pyspark is not None
        assert pyspark.origin is not None
        self._start_in = Path(pyspark.origin).parent.parent

    def archive_classes(self) -> None:
        """Let a driver that nobody kills leave Java's classes, parsed and verified, for all others."""
        archive, java = self._keep / "classes.jsa", self._java
        if not archive.exists():
            self._java = f"{java} -XX:ArchiveClassesAtExit={archive}"
            target = str(self._folder / "first" / "target")
            world = _World(self._folder / "first", target, self, table=True)
            world.publish()
            found = world.streak("nowhere", [])
            if found or not archive.exists():
                raise RuntimeError(f"the first driver made no archive of classes: {found}")
        self._java = f"{java} -XX:SharedArchiveFile={archive}"

    def run(self, words: list[str], more: Mapping[str, str]) -> int:
        """A driver from its start to its end; nothing of it is left when this returns."""
        child = subprocess.Popen(
            [sys.executable, "-m", MODULE, f"--java={self._java}", *words],
            env={**os.environ, **self._environment, **more},
            cwd=self._start_in,
            start_new_session=True,
        )
        try:
            ended = child.wait(CHILD_S)
            if ended == 0:
                _wait_for(child.pid)  # Java ends after its driver
            return ended
        finally:
            # Java outlives a driver that dies in its own code, and workers of other tasks outlive Java.
            for pid in _living(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_for(child.pid)
            child.wait()


def _wait_for(session: int) -> None:
    end = time.monotonic() + CHILD_S
    while _living(session) and time.monotonic() < end:
        time.sleep(0.02)


def _living(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


class _World:
    """A source folder, a target bus, perhaps a table, and a checkpoint that outlive all drivers."""

    def __init__(
        self,
        folder: Path,
        target: str,
        launcher: _Launcher,
        *,
        table: bool,
        parts: bool = False,
    ) -> None:
        self.sent = 0
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._target = target
        self._table = table
        self._parts = parts
        self._launcher = launcher

    def streak(self, stage: str, nths: list[int]) -> list[str]:
        """Drivers that die at the stage, one after another, and one that ends; what is wrong then."""
        for nth in nths:
            self.publish()
            fired = self._folder / "fired"
            fired.unlink(missing_ok=True)
            name = f"{stage.rpartition('/')[2]}:{nth}"
            died = self._drive({"FAILPOINT": name, "FAILPOINT_FIRED": str(fired)})
            if not fired.exists() or died != -signal.SIGKILL:
                return [f"the driver ended with {died} and did not die at {name}"]
        ended = self._drive({})
        if ended:
            return [f"the driver that went on ended with {ended}"]
        found = self._compare("bus", self._on_the_bus())
        return found + self._compare("table", self._in_the_table()) if self._table else found

    def publish(self) -> None:
        """More to copy."""
        with penstock.connect_sync(self._folder / "source") as bus:
            numbers = range(self.sent, self.sent + EVENTS)
            bus.publish_many("in.numbers", [{"n": n} for n in numbers])
            self.sent += EVENTS

    def _drive(self, more: Mapping[str, str]) -> int:
        words = ["--child", str(self._folder), "--to", self._target]
        words += ["--table"] * self._table + ["--parts"] * self._parts
        return self._launcher.run(words, more)

    def _on_the_bus(self) -> Counter[int]:
        url = self._target if is_broker(self._target) else f"{self._target}?mode=ro"
        with penstock.connect_sync(url) as bus:
            return Counter(msgspec.json.decode(event.payload)["n"] for event in bus.replay(COPIES))

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


def _copy_all(folder: Path, target: str, table: bool, parts: bool, java: str) -> None:
    os.environ["FAILPOINT_ROOT"] = str(os.getpid())
    from penstock.pipelines.lakehouse.warehouse import Warehouse
    from penstock.pipelines.pipeline import Input, Pipeline
    from penstock.pipelines.run import Route, start
    from penstock.pipelines.session import spark_session

    made = Pipeline(
        "copy", _copy, {"events": Input("in.#", "n BIGINT")},
        writes=COPIES, table="copied.numbers" if table else None,
    )  # fmt: skip
    settings = {"spark.driver.extraJavaOptions": java}
    spark = spark_session(master="local[2]", name="kills", settings=settings)
    with Warehouse(folder / "warehouse") as warehouse:
        route = Route(
            url=str(folder / "source"), to=target, warehouse=warehouse,
            options={"maxEventsPerTrigger": str(PER_BATCH), "eventsPerTask": "10"},
            sink_options={"maxTransactionBytes": str(PART_BYTES)} if parts else {},
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
    parser.add_argument("--jobs", type=int, default=1, help="so many stages at a time")
    parser.add_argument("--keep", help="a folder for what drivers compile, for the next campaign")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    parser.add_argument("--java", help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.child:
        _copy_all(Path(chosen.child), chosen.to, chosen.table, chosen.parts, chosen.java)
        return
    stages = tuple(chosen.stage or STAGES)
    how = {name: getattr(chosen, name) for name in ("seed", "broker", "jobs", "keep")}
    sys.exit(kill_drivers(stages, chosen.kills, **how))


if __name__ == "__main__":
    main()

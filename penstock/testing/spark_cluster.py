"""A standalone Spark cluster for tests: one master and workers of one core, on this machine.

Everything comes from the PySpark package. Daemons, and the executors they start, die with whoever
started the cluster, kill -9 included.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.model.errors import PenstockError
from penstock.pipelines.session import check_requirements, find_java, write_launcher
from penstock.testing.server_process import Server, free_ports

START_S = 120.0
"""How long a cluster may take: 10 s on two idle cores, and a busy machine fails no test."""
STOP_S = 5.0
POLL_S = 0.1
HOST = "127.0.0.1"


class SparkCluster:
    """Starts and stops a cluster; a context manager. `url` is the master for `spark_session`.

    >>> SparkCluster().url
    Traceback (most recent call last):
    RuntimeError: the cluster is not running
    """

    def __init__(self, *, workers: int = 2, worker_memory: str = "1g") -> None:
        self.workers = workers
        self._memory = worker_memory
        self._folder: Path | None = None
        self._daemons: list[Server] = []
        self._ports = [0, 0]

    @property
    def url(self) -> str:
        """Where applications find the master."""
        self._running()
        return f"spark://{HOST}:{self._ports[0]}"

    def start(self) -> Self:
        """Start master and workers; returns when every worker is registered."""
        check_requirements()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
        try:
            self._start_master()
            for number in range(self.workers):
                self._start_worker(number)
            self._wait_for(self.workers)
        except BaseException:
            self.stop()
            raise
        return self

    def _start_master(self) -> None:
        self._ports = free_ports(2)
        port, web = map(str, self._ports)
        self._daemon("master", "--host", HOST, "--port", port, "--webui-port", web)
        # A worker that finds no master tries again much later, so they come one after the other.
        self._wait_for(0)

    def _start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        work = self._running() / name / "work"
        options = ("--cores", "1", "--memory", self._memory, "--work-dir", str(work))
        self._daemon(name, "--host", HOST, "--webui-port", "0", *options, self.url)

    def _daemon(self, name: str, *arguments: str) -> None:
        from pyspark.find_spark_home import _find_spark_home

        kind = name.partition("-")[0]
        home = Path(_find_spark_home())
        command = [str(home / "bin" / "spark-class")]
        command += [f"org.apache.spark.deploy.{kind}.{kind.capitalize()}", *arguments]
        folder = self._running()
        java = find_java()
        if not java.has_vector:
            write_launcher(java, folder / "java")
        environment = os.environ | {
            "JAVA_HOME": str(java.home if java.has_vector else folder / "java"),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(folder / "scratch"),
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        self._daemons.append(Server(name, command, folder / name, env=environment))

    def _wait_for(self, workers: int) -> None:
        end = time.monotonic() + START_S
        while self.alive_workers() < workers:
            gone = next((each for each in self._daemons if not each.alive), None)
            if gone is not None or time.monotonic() > end:
                late = gone or self._daemons[-1]
                state = "ended" if gone else f"was not ready within {START_S:g} s"
                raise PenstockError(
                    f"Spark's {late.name} {state}; the end of its log: {late.log_tail()}",
                    daemon=late.name,
                )
            time.sleep(POLL_S)

    def alive_workers(self) -> int:
        """Workers that the master has heard of lately; -1 while there is no master."""
        address = f"http://{HOST}:{self._ports[1]}/json/"
        try:
            with urllib.request.urlopen(address, timeout=STOP_S) as answer:
                known: dict[str, Any] = json.load(answer)
        except OSError:
            return -1
        return sum(each["state"] == "ALIVE" for each in known["workers"])

    def _running(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the cluster is not running")
        return self._folder

    def stop(self) -> None:
        """Kill all of it and delete its folder. Safe to call twice."""
        while self._daemons:
            self._daemons.pop().stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        return self if self._folder is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

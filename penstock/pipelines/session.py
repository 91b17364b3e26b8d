"""Spark sessions for pipelines: checked first, quiet, on this machine unless told otherwise.

One process has one session. The first call starts Java, which takes seconds; every later call
gives the same session again.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.model.errors import InvalidSettings
from penstock.pipelines.gateway import launch
from penstock.pipelines.java import find_java
from penstock.pipelines.pushdown import PUSHDOWN
from penstock.pipelines.requirement import check_requirements
from penstock.pipelines.shipment import pack

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
PUSHES = "spark.sql.python.filterPushdown.enabled"
LOOPBACK = "127.0.0.1"
# Rows that come from Python are short-lived byte arrays, millions of them, which a collector that is
# made for throughput handles better than the default one. Arrow wrote its buffers itself and need
# not check every access to them.
QUICK = (
    "-XX:+UseParallelGC -Darrow.enable_unsafe_memory_access=true "
    "-Darrow.enable_null_check_for_get=false"
)
_THREADS = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")
_NEAR = re.compile(r"spark://(?:127\.\d+\.\d+\.\d+|localhost|\[::1\])(?::|$)")
_MASTERS = re.compile(r"local|spark://|yarn$|k8s://")


def spark_session(
    *,
    master: str | None = None,
    name: str = "penstock",
    settings: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> SparkSession:
    """The session of this process; the first call starts it on `master`, `local[*]` by default.

    Versions of Java and of packages are checked before anything starts. `settings` are Spark's own
    and win over ours. A later call gives the running session: what can change while it runs is
    changed, and what cannot (another master, the driver's memory) is refused, not ignored.
    """
    check_requirements()
    given = dict(settings or {})
    master = master or given.pop("spark.master", None)
    if master is not None and not _MASTERS.match(master):
        raise InvalidSettings(
            f"{master!r} is no Spark master: give local[N], spark://host:port, yarn or k8s://url",
            setting="master",
        )
    running = _running()
    if running is not None:
        return _adjusted(running, master, given)
    return _started(master or LOCAL, name, given, verbose)


def default_settings(master: str, name: str = "penstock") -> dict[str, str]:
    """What a session has unless `settings` say otherwise.

    >>> default_settings("local[2]")["spark.sql.shuffle.partitions"]
    '2'
    >>> "spark.driver.host" in default_settings("yarn")
    False
    """
    found = {
        "spark.master": master,
        "spark.app.name": name,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        PUSHES: "true",
        # Warnings of the virtual machine go to stderr as well, and from there to the log.
        "spark.driver.defaultJavaOptions": f"-XX:+DisplayVMOutputToStderr {QUICK}",
        "spark.executor.defaultJavaOptions": QUICK,
        # Rows of Python workers come this way, and TCP would only add to it.
        "spark.python.unix.domain.socket.enabled": "true",
        # What is read of such a socket at once: as much as the kernel keeps ready in it.
        "spark.buffer.size": str(256 << 10),
    }
    threads = threads_of(master)
    if threads is not None:
        # The 200 of a cluster make a window count on a laptop ten times slower.
        found["spark.sql.shuffle.partitions"] = str(threads)
    if threads is not None or _NEAR.match(master):
        found["spark.driver.bindAddress"] = found["spark.driver.host"] = LOOPBACK
    return found


def threads_of(master: str) -> int | None:
    """Tasks that a master on this machine runs at a time; None for a cluster.

    >>> threads_of("local[3]"), threads_of("local"), threads_of("spark://host:7077")
    (3, 1, None)
    """
    found = _THREADS.fullmatch(master)
    if found is None:
        return None
    if found[1] == "*":
        return len(os.sched_getaffinity(0))
    return int(found[1] or 1)


def _started(master: str, name: str, given: Mapping[str, str], verbose: bool) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    settings = {**default_settings(master, name), **given}
    # Workers must be of the same Python, with the same packages; a cluster may have it elsewhere.
    elsewhere = None if threads_of(master) else os.environ.get("PYSPARK_PYTHON")
    python = given.get("spark.pyspark.python") or elsewhere or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Spark does not tell a source whether it pushes filters, and refuses one that guesses wrong.
    os.environ[PUSHDOWN] = str(int(settings[PUSHES] == "true"))
    conf = SparkConf().setAll(list(settings.items()))
    # Java outlives a stopped session, and is taken up by the next.
    gateway = None
    if SparkContext._gateway is None:
        gateway = launch(conf, find_java(), verbose=verbose)
    context = SparkContext(conf=conf, gateway=gateway)
    context.setLogLevel("INFO" if verbose else "WARN")
    _hush(verbose)
    if threads_of(master) is None:
        _ship(context)
    return SparkSession.builder.getOrCreate()


def _hush(verbose: bool) -> None:
    """Errors of queries are raised; PySpark prints some on stderr before, with Java's stack as JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = not verbose


def _ship(context: SparkContext) -> None:
    """Give the workers of a cluster our packages; on one machine they import them from here."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-ship-"))
    # Workers that come later fetch it too, so it stays as long as the process.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context.addPyFile(str(pack(folder)))


def _running() -> SparkSession | None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.builder.getOrCreate()


def _adjusted(session: SparkSession, master: str | None, given: Mapping[str, str]) -> SparkSession:
    """The running session with these settings, or an error that names the one it cannot take."""
    runs_on = session.sparkContext.master
    if master is not None and master != runs_on:
        raise InvalidSettings(
            f"a Spark session on {runs_on!r} runs in this process, so none can start on "
            f"{master!r}: stop it first, or leave the master out",
            setting="master",
        )
    fixed = dict(session.sparkContext.getConf().getAll())
    for key, value in given.items():
        if session.conf.isModifiable(key):
            session.conf.set(key, value)
        elif fixed.get(key) != value:
            raise InvalidSettings(
                f"{key} is {fixed.get(key, 'not set')} in the Spark session of this process and "
                f"cannot become {value}: stop the session first, or set it in the first call",
                setting=key,
            )
    return session

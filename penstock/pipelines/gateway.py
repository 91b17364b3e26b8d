"""The Java process below a Spark session, and what it prints.

Java and Spark say a dozen lines on stderr before anything happened. They go to the log
`penstock.spark` at debug level, line by line, and the last of them into the error when Java does
not come up. Warnings of our own among them are told as warnings.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.model.errors import UnfitEnvironment
from penstock.pipelines.java import Java, java_home
from penstock.pipelines.notice import passed_on

if TYPE_CHECKING:
    from pyspark import SparkConf

KEPT_LINES = 40
"""Lines of the Java process that an error shows: a Java exception with its cause."""
DRAIN_S = 2.0  # the process has ended: what is in the pipe is read in milliseconds

_log = logging.getLogger("penstock.spark")


def launch(conf: SparkConf, java: Java, *, verbose: bool) -> Any:
    """Start Java with these settings and return PySpark's gateway to it."""
    from pyspark import java_gateway
    from pyspark.errors import PySparkRuntimeError

    launch_gateway: Any = java_gateway.launch_gateway  # which has no types
    with java_home(java) as home, _environment("JAVA_HOME", str(home)):
        if verbose:
            return launch_gateway(conf)
        with _Printed() as printed:
            try:
                return launch_gateway(conf, {"stderr": printed.pipe})
            except PySparkRuntimeError as error:
                said = printed.all() or "it printed nothing"
                raise UnfitEnvironment(
                    f"Spark did not start on {java}: {said}. Correct the settings it names, or take "
                    "another Java by JAVA_HOME",
                    java=str(java),
                ) from error


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for the child alone: PySpark copies ours and takes no other."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Printed:
    """The writing end of a pipe whose lines become log records."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        reading, self.pipe = os.pipe()
        self._reader = threading.Thread(
            target=self._read, args=(reading,), name="spark-stderr", daemon=True
        )
        self._reader.start()

    def __enter__(self) -> _Printed:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        """Leave the pipe to the child: it ends when the child does."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as lines:
            for line in lines:
                self._last.append(line.rstrip())
                if not passed_on(line.rstrip()):
                    _log.debug("%s", line.rstrip())

    def all(self) -> str:
        """What a process that has ended left behind."""
        self._close()
        self._reader.join(DRAIN_S)
        return " / ".join(self._last)

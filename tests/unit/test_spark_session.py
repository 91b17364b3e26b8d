"""Row S7: what is checked and set before a Spark session starts; no Spark is started here."""

from __future__ import annotations

import logging
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import invocation
from penstock.cli.app import run
from penstock.model.errors import InvalidSettings, MissingExtra, UnfitEnvironment
from penstock.pipelines import session
from penstock.pipelines.plan import PUSHDOWN
from penstock.pipelines.session import (
    REQUIREMENTS,
    Java,
    check_requirements,
    default_settings,
    launch,
    spark_session,
    threads_of,
)

GOOD = {"pyspark": "4.3.0", "pandas": "2.3.3", "pyarrow": "26.0.1", "protobuf": "7.36.2"}


def having(**versions: str | None) -> None:
    known = GOOD | versions

    def installed(package: str) -> str:
        version = known[package]
        if version is None:
            raise PackageNotFoundError(package)
        return version

    check_requirements(installed)


def test_versions_that_fit_pass() -> None:
    having()
    having(pandas="2.2.0", pyarrow="18.0.0", pyspark="4.2.0rc1")


@pytest.mark.parametrize("package", [each.package for each in REQUIREMENTS])
def test_a_missing_package_is_named_with_the_command(package: str) -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[spark\]'") as caught:
        having(**{package: None})
    assert caught.value.package == package


@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("pandas", "3.0.0", "pandas>=2.2,<3"),
        ("pandas", "2.1.4", "pandas>=2.2,<3"),
        ("pyspark", "3.5.8", "pyspark>=4.2,<5"),
        ("pyspark", "5.0.0", "pyspark>=4.2,<5"),
        ("pyarrow", "17.0.0", "pyarrow>=18"),
        ("protobuf", "4.25.1", "protobuf>=5"),
    ],
)
def test_a_version_that_does_not_fit_is_named_with_the_remedy(
    package: str, version: str, remedy: str
) -> None:
    with pytest.raises(UnfitEnvironment) as caught:
        having(**{package: version})
    assert f"{package} {version} does not fit" in caught.value.message
    assert caught.value.command == f"pip install '{remedy}'"


def test_a_session_here_is_quiet_and_on_loopback() -> None:
    found = default_settings("local[*]")
    assert found["spark.ui.enabled"] == found["spark.ui.showConsoleProgress"] == "false"
    assert found["spark.driver.bindAddress"] == found["spark.driver.host"] == "127.0.0.1"
    assert found["spark.sql.shuffle.partitions"] == str(threads_of("local[*]"))
    assert found["spark.sql.session.timeZone"] == "UTC"


def test_rows_of_workers_are_read_in_large_pieces_everywhere() -> None:
    for master in ("local[2]", "yarn"):
        assert default_settings(master)["spark.buffer.size"] == "262144"


def test_a_cluster_keeps_its_own_addresses_and_partitions() -> None:
    for master in ("spark://example.org:7077", "yarn", "k8s://https://example.org:6443"):
        found = default_settings(master)
        assert "spark.driver.host" not in found
        assert "spark.sql.shuffle.partitions" not in found
    assert default_settings("spark://127.0.0.1:7077")["spark.driver.host"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("master", "threads"),
    [("local[4]", 4), ("local[2, 3]", 2), ("local", 1), ("local-cluster[2,1,512]", None)],
)
def test_threads_are_read_from_the_master(master: str, threads: int | None) -> None:
    assert threads_of(master) == threads


@pytest.mark.parametrize(
    "master", ["sc://localhost", "lokal[2]", "http://host:7077", "yarn-client"]
)
def test_a_master_that_is_none_is_refused(master: str) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises(InvalidSettings, match="is no Spark master"):
        spark_session(master=master)


# PySpark leaves the pipe to a Java that did not start for the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_java_that_does_not_come_up_is_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it printed is in the error and in the log, and not on the terminal."""
    pyspark = pytest.importorskip("pyspark")
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Could not reserve enough space' >&2\nexit 1\n")
    program.chmod(0o755)
    conf = pyspark.SparkConf(loadDefaults=False)
    with (
        caplog.at_level(logging.DEBUG, "penstock.spark"),
        pytest.raises(UnfitEnvironment, match="Could not reserve enough space"),
    ):
        launch(conf, Java(tmp_path, "17.0.15", "JAVA_HOME"), verbose=False)
    assert "Could not reserve enough space" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_the_shipment_imports_by_itself_and_brings_its_codecs(tmp_path: Path) -> None:
    archive = session.pack(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import penstock.model.codec\n"
        "from importlib.metadata import distributions\n"
        "print(penstock.__file__.startswith(sys.argv[1]))\n"
        "own = distributions(path=sys.argv[1:])\n"  # and not those of this environment
        "print('json' in {each.name for made in own for each in made.entry_points})\n"
    )
    words = [sys.executable, "-W", "error", "-c", code, str(archive)]
    said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.split() == ["True", "True"]


def test_the_shipment_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = session.pack(tmp_path / "one"), session.pack(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()
    names = zipfile.ZipFile(one).namelist()
    assert {"penstock/__init__.py", "pyspark_penstock/__init__.py"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc")]


def test_a_package_that_cannot_be_shipped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PACKAGES", ("penstock", "no_such_package"))
    with pytest.raises(UnfitEnvironment, match="no_such_package"):
        session.pack(tmp_path)


# -- verbose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [True, False])
def test_java_speaks_on_the_terminal_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    """Verbose, Java has our stderr; otherwise a pipe that ends in the log."""
    pyspark = pytest.importorskip("pyspark")
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pyspark.java_gateway, "launch_gateway", lambda *each: given.append(each))
    conf = pyspark.SparkConf(loadDefaults=False)
    launch(conf, Java(tmp_path, "17.0.15", "JAVA_HOME"), verbose=verbose)
    [(asked, *pipes)] = given
    assert asked is conf
    assert [list(each) for each in pipes] == ([] if verbose else [["stderr"]])


@pytest.mark.parametrize(("words", "level"), [(["-v"], "INFO"), ([], "WARN")])
def test_a_verbose_command_starts_a_verbose_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], level: str
) -> None:
    """From the flag of the command to Spark's own level of logging; nothing is started."""
    pytest.importorskip("pyspark")
    told: dict[str, Any] = {}

    class Context:
        _gateway = _active_spark_context = None

        def __init__(self, conf: Any, gateway: Any) -> None:
            told["gateway"] = gateway

        def setLogLevel(self, level: str) -> None:  # Spark's name for it
            told["level"] = level
            raise InvalidSettings("far enough")

    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", PUSHDOWN):
        monkeypatch.setenv(name, "as it was")  # and is again afterwards
    monkeypatch.setattr("pyspark.SparkContext", Context)
    monkeypatch.setattr(session, "find_java", lambda: None)
    monkeypatch.setattr(session, "launch", lambda conf, java, *, verbose: f"verbose {verbose}")
    rows = tmp_path / "rows"
    rows.write_text("")
    assert run([*words, "pipeline", "test", "usage", str(rows)]) == invocation.INVALID
    assert told == {"gateway": f"verbose {level == 'INFO'}", "level": level}

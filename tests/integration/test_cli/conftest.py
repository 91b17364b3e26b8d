"""Runs the real command in processes of its own, the way a shell does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(penstock.__file__).resolve().parent.parent
DEADLINE_S = 30.0


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def row(self) -> dict[str, Any]:
        assert len(self.rows) == 1, self
        return self.rows[0]


class Cli:
    """The `penstock` command against one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "_PENSTOCK"))
        }
        self.env = clean | {"PYTHONPATH": str(ROOT), "PENSTOCK_URL": str(self.data)}
        self.running: list[subprocess.Popen[bytes]] = []

    @property
    def words(self) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "penstock.cli"]

    def __call__(
        self, *words: str, input: bytes = b"", env: dict[str, str] | None = None
    ) -> Result:
        done = subprocess.run(
            [*self.words, *words],
            input=input,
            capture_output=True,
            cwd=self.folder,
            env=self.env | (env or {}),
            timeout=DEADLINE_S * 2,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def ok(self, *words: str, input: bytes = b"") -> Result:
        result = self(*words, input=input)
        assert result.code == 0, result
        return result

    def start(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self.words, *words],
            stdin=more.pop("stdin", subprocess.PIPE),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=self.env,
            **more,
        )
        self.running.append(process)
        return process

    def values(self, pattern: str) -> list[bytes]:
        return self.ok("replay", pattern, "--format", "value").stdout.splitlines()

    def count(self, topic: str) -> int:
        rows = [row for row in self("topic", "list", "--json").rows if row.get("name") == topic]
        return int(rows[0]["events"]) if rows else 0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    command = Cli(tmp_path)
    yield command
    for process in command.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def make_cli() -> type[Cli]:
    return Cli


@pytest.fixture
def wait() -> Callable[[Callable[[], bool], str], None]:
    return until

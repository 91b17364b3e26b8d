"""The programs in examples/ run as a reader would run them, and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).resolve().parent.parent
DEADLINE_S = 60
PROMISES = {
    "hello.py": ["on disk as orders.created.v1.acme/0/0", "acme owes 99.5 for order 7"],
    "dead_letters.py": [
        "dead after 3 attempts: OSError: out of paper at attempt 3",
        "invoice 12 printed at attempt 1",
        "replayed 1 of 1",
        "audit: dlq.replay because 'paper refilled'",
        "audit chain whole: True",
    ],
    "totals.py": ["1000 readings in ", "the totals add up"],
    "reminders.py": ["put the kettle on", "the tea is ready", "stretch", "stretch"],
    "columns.py": [
        "10000 events on disk, the first at offset 0",
        "2250 of them are above 30 degrees",
        "sensors.read.v1.acme ends at offset 10000",
    ],
}


ELSEWHERE = {
    "billing.py"
}  # it works until it is told to stop: part of the README's tour, in test_docs


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(PROMISES) | ELSEWHERE


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), str(tmp_path / "data")],
        cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(PROMISES[name])
    assert all(line.startswith(start) for line, start in zip(lines, PROMISES[name], strict=True))

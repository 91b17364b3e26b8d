"""The programs in examples/ run as a reader would run them, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).resolve().parent.parent
DEADLINE_S = 110
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
    "orders.py": [
        "no rate yet: no rate for SEK",
        "no order: True",
        "100 orders are paid, 990.0 euros in all",
        "100 charges in 120 calls",
        "1 dead letter is left, of order 100",
    ],
    "read_model.py": [
        "live: 6000 bookings",
        "rebuild: the machine was restarted after ",
        "rebuild: the other ",
        "50 balances are equal to the cent",
    ],
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


def printed(name: str, tmp_path: Path) -> list[str]:
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), str(tmp_path / "data")],
        cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_workers_ship_each_order_once_through_kills(tmp_path: Path) -> None:
    lines = printed("workers/drill.py", tmp_path)
    assert lines[:-1] == [
        "a worker was killed",
        "another one came",
        "the broker was killed, and started again",
        "600 orders stored, 600 shipped, 0 dead",
        "the workers ended with [-9, 0, 0, 0]",
    ]
    assert int(lines[-1].removeprefix("deliveries: ")) >= 600


def test_a_rebuild_reads_what_the_one_before_did_not(tmp_path: Path) -> None:
    lines = printed("read_model.py", tmp_path)
    before, after = (int(re.search(r"\d+", line)[0]) for line in lines[1:3])  # type: ignore[index]
    assert (before >= 2_500, before + after) == (True, 6_000)


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    lines = printed(name, tmp_path)
    assert len(lines) == len(PROMISES[name])
    assert all(line.startswith(start) for line, start in zip(lines, PROMISES[name], strict=True))

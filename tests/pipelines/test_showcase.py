"""The main job, and a driver that is killed in the middle of a batch (S2, S4, S5, X13.3)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock.testing.spark_kill import kill_drivers


def test_the_main_job_ends_by_itself_with_balanced_books(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "penstock.cli", "--json", "--url", str(tmp_path / "run")]
    done = subprocess.run(
        [*words, "showcase", "--for", "10s", "--rate", "100"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    books = {row["tenant"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(books) == {"acme", "globex", "initech"}
    for row in books.values():
        ended = row["results"] + row["duplicates"] + row["late"] + row["bad"]
        assert row["events"] == ended > 0
        assert (row["lost"], row["repeated"], row["balanced"]) == (0, 0, True)


def test_a_driver_killed_before_its_commit_loses_and_doubles_nothing() -> None:
    """One stage, and its repetition too; `make soak` has all stages, 20 kills each."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.testing.spark_kill", "--stage", "sink.before-commit", "--kills", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("sink.before-commit: 2 kills, 100 events, 0 findings")


def test_a_driver_killed_between_two_tasks_of_a_broker_loses_and_doubles_nothing() -> None:
    """S2: some tasks of the batch were published by then; the repetition adds the others only."""
    told: list[str] = []
    assert kill_drivers(("sink.task-done",), 1, broker=True, tell=told.append) == 0, told
    assert told[0].startswith("sink.task-done: 1 kills, 50 events, 0 findings")


def test_a_driver_killed_after_a_stream_committed_loses_and_doubles_nothing() -> None:
    """S2: without a table the query writes with `writeStream` itself, and repeats what was published."""
    told: list[str] = []
    assert kill_drivers(("stream/sink.after-commit",), 2, tell=told.append) == 0, told
    assert told[0].startswith("stream/sink.after-commit: 2 kills, 100 events, 0 findings")

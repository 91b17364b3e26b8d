"""The main job, and a driver that is killed in the middle of a batch (S2, S4, S5, X13.3)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import showcase
from penstock.cli.app import run
from penstock.pipelines.builtin.risk_tags import Balance
from penstock.testing.spark_kill import kill_drivers

FIRST_RESULTS = re.compile(r"^results   first after ([\d.]+) s$", re.MULTILINE)
FIRST_RESULTS_S = 120  # the promise of `make run`


class Showcase:
    """The main job in a process of its own, with what it says as it says it."""

    def __init__(self, folder: Path, *more: str) -> None:
        words = [sys.executable, "-m", "penstock.cli", "--json", "--url", str(folder), "showcase"]
        self.process = subprocess.Popen(
            [*words, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.told: list[str] = []
        self._admin: str | None = None
        self._changed = threading.Condition()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"admin (http://\S+)", line)
            with self._changed:
                self.told.append(line)
                self._admin = found[1] if found else self._admin
                self._changed.notify_all()

    def ask(self, path: str) -> Any:
        """What the HTTP admin answers while the job runs."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._admin is not None, 60), self.told
        assert self.process.poll() is None
        with urllib.request.urlopen(f"{self._admin}{path}", timeout=60) as answer:
            return json.load(answer)

    def end(self) -> list[dict[str, Any]]:
        """Wait for its end; the books it closed with."""
        assert self.process.stdout is not None
        with self.process, self.process.stdout as out:
            rows = [json.loads(line) for line in out]
            self._reading.join()
        assert self.process.returncode == 0, self.told
        return rows


def test_the_main_job_ends_by_itself_with_balanced_books(tmp_path: Path) -> None:
    """S5, X13.3: it answers over HTTP while it runs, and shows results long before it ends."""
    job = Showcase(tmp_path / "run", "--for", "10s", "--rate", "100")
    assert (job.ask("/health"), job.ask("/ready")) == ({"alive": True}, {"ready": True})
    books = {row["tenant"]: row for row in job.end()}
    assert set(books) == {"acme", "globex", "initech"}
    for row in books.values():
        ended = row["results"] + row["duplicates"] + row["late"] + row["bad"]
        assert row["events"] == ended > 0
        assert (row["lost"], row["repeated"], row["balanced"]) == (0, 0, True)
    told = "".join(job.told)
    [seconds] = FIRST_RESULTS.findall(told)
    assert 0 < float(seconds) < FIRST_RESULTS_S
    behind = told[told.index("results   first") :].splitlines()[1]
    assert re.match(r" +(acme|globex|initech)  \S+  (low|medium|high|critical): [\w-]+", behind)
    assert told.index("results   first") < told.index("the table in ")


def test_events_that_ended_nowhere_end_the_main_job_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S5: a real broker and producers, and a pipeline that publishes one result and loses the rest."""

    def careless(_: Any, folder: Path, broker: Any, master: Any, producing: Any) -> int:
        with penstock.connect_sync(broker.url()) as bus:
            tags = [{"tag": "exposed-database", "severity": "high"}]
            row = {"tenant": "acme", "evidence_id": "e-1", "asset": "db.example", "risk": "high"}
            bus.publish("risk.tags.v1.acme", row | {"tags": tags, "source": "nowhere/0/0"})
        producing.join()
        return 1

    monkeypatch.setattr(showcase, "_pipeline", careless)
    words = ["--json", "--url", str(tmp_path / "run"), "showcase", "--for", "2s", "--rate", "50"]
    assert run(words) == 1
    said = capsys.readouterr()
    books = {row["tenant"]: row for row in map(json.loads, said.out.splitlines())}
    assert not any(row["balanced"] for row in books.values())
    assert all(row["lost"] for row in books.values())
    assert FIRST_RESULTS.search(said.err)
    assert "acme  db.example  high: exposed-database" in said.err
    assert "acme: look at nowhere/0/0" in said.err


@pytest.mark.parametrize(
    ("books", "table_rows", "code"),
    [
        (Balance(events=4, out=1, duplicates=1, late=1, bad=1), 1, 0),
        (Balance(events=5, out=1, duplicates=1, late=1, bad=1), 1, 1),
        (Balance(events=4, out=1, duplicates=1, late=1, bad=1, repeated=1), 1, 1),
        (Balance(events=4, out=1, duplicates=1, late=1, bad=1), 2, 1),
    ],
    ids=["balanced", "one is missing", "one came twice", "the table has another"],
)
def test_the_exit_code_is_that_of_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, books: Balance, table_rows: int, code: int
) -> None:
    good = Balance(events=1, out=0, duplicates=0, late=0, bad=1)
    closed = {"acme": good, "globex": books}
    monkeypatch.setattr(showcase, "_run", lambda *_: (closed, table_rows))
    assert run(["--json", "--url", str(tmp_path / "run"), "showcase"]) == code


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

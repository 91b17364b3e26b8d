"""The simulator, in short: seeds that find nothing, mutants that are found, and identical replay.

The long campaigns are `make sim SEEDS=500` and `make sim-mutants`; these are the same code on
shorter plans (row Y2).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.testing.simulation import Plan, run, shrunk
from penstock.testing.simulation.mutant import Mutant
from penstock.testing.simulation.mutants import MUTANTS
from penstock.testing.simulation.report import hunt

# Seeds that found something once, with what it was. They run whole.
REGRESSIONS = {
    11: "a group that looks ahead stopped when a journal file was sealed and removed meanwhile",
    101: "a machine waiting for keys of a topic that was deleted meanwhile stopped dispatching",
    124: "an event that a group filters out became its dead letter after crashes",
    278: "a transaction happened without the cursor of a partition that was taken away",
    202: "a burial from before a reset let the next event of its key go",
    34: "retention took delayed events that had to wait longer than events are kept",
    411: "a process that died while it made the folder left a file that was taken for somebody's",
    241: "an error of a wait that was given up was reported as forgotten",
    173: "a commit that was given up was written behind the next one and moved a cursor back",
    5486: "events got the time at which their commit began to wait for another journal file",
    70: "a start wrote audit lines again that were durable, and a crash in the middle tore them",
}

# Mutants that one seed is enough for; `make sim-mutants` has all of them.
QUICK_MUTANTS = (
    "skip-fsync",
    "early-ack",
    "early-watermark",
    "drop-dedup",
    "forget-attempt",
    "accept-expired",
)


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_short_life_finds_nothing(seed: int) -> None:
    plan = shrunk(Plan.draw(seed), operations=1_500, crashes=4)
    report = run(seed, plan=plan)
    assert report.invariant is None, str(report)
    assert report.operations >= 1_500
    assert report.crashes >= 4


@pytest.mark.parametrize("seed", sorted(REGRESSIONS))
def test_what_was_found_once_stays_mended(seed: int) -> None:
    report = run(seed)
    assert report.invariant is None, f"{REGRESSIONS[seed]} is back:\n{report}"
    assert report.operations >= 10_000
    assert report.crashes >= 20


def test_a_seed_replays_identically() -> None:
    plans = [shrunk(Plan.draw(7), operations=600, crashes=2) for _ in range(2)]
    first, second = (run(7, plan=plan) for plan in plans)
    assert first.trace == second.trace
    assert first.operations == second.operations
    assert first.trace != run(8, plan=shrunk(Plan.draw(8), operations=600, crashes=2)).trace


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_breaks_is_there(mutant: Mutant) -> None:
    """All of them are hunted by `make sim-mutants`, which is long; a function that moved shows here."""
    before = mutant.owner.__dict__[mutant.attribute]
    with mutant.alive():
        assert mutant.owner.__dict__[mutant.attribute] is not before
    assert mutant.owner.__dict__[mutant.attribute] is before


@pytest.mark.parametrize("name", QUICK_MUTANTS)
def test_a_broken_guarantee_is_found(name: str) -> None:
    _, report, _ = hunt(name)
    assert report is not None, f"mutant {name} survived"
    assert report.invariant is not None


def test_the_command_ends_with_one_summary_line() -> None:
    command = [sys.executable, "-m", "penstock.testing.simulation", "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "sim: 0 seeds, 0 operations, 0 crashes, 0 findings"

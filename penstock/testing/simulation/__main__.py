"""The simulator's command line: seeds, mutants and real kills.

python -m penstock.testing.simulation --seed 7          one seed, every operation printed
python -m penstock.testing.simulation --seeds 500       many; exits 1 on a finding
python -m penstock.testing.simulation --mutants         break each guarantee, expect it to be found
python -m penstock.testing.simulation --kills 200       kill -9 a real process on a real folder
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from penstock.testing.simulation.kill import kill_rounds
from penstock.testing.simulation.report import hunt_all, run, run_many


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 0 when nothing was found."""
    parser = argparse.ArgumentParser("simulation", description="Proof by seeded accident.")
    parser.add_argument("--seed", type=int, help="replay one seed and print every operation")
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes to run them in")
    parser.add_argument("--mutants", action="store_true", help="break each guarantee on purpose")
    parser.add_argument("--only", help="only the mutant of this name")
    parser.add_argument("--kills", type=int, help="rounds of kill -9 on a real process")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        report = run(options.seed, verbose=print)
        print(report)
        return int(report.invariant is not None)
    if options.mutants:
        return _mutants(options.jobs, options.only)
    if options.kills is not None:
        return kill_rounds(options.kills, tell=print)
    return _seeds(options.first, options.seeds, options.jobs)


def _seeds(first: int, count: int, jobs: int) -> int:
    operations = crashes = findings = 0
    counts: Counter[str] = Counter()
    for report in run_many(first, count, jobs):
        operations += report.operations
        crashes += report.crashes
        findings += report.invariant is not None
        counts.update(report.counts)
        print(report, flush=True)
    for kind, number in sorted(counts.items()):
        print(f"  {kind}: {number:,}")
    print(
        f"sim: {count} seeds, {operations:,} operations, {crashes:,} crashes, {findings} findings"
    )
    return int(findings > 0)


def _mutants(jobs: int, only: str | None) -> int:
    survivors: list[str] = []
    total = 0
    print(f"{'mutant':22} {'promise broken':46} found by")
    for mutant, report, seeds in hunt_all(jobs, only):
        total += 1
        if report is None:
            survivors.append(mutant.name)
            found = f"NOT FOUND in {seeds} seeds"
        else:
            found = f"{report.invariant} after {seeds} seed{'s' * (seeds > 1)}"
        print(f"{mutant.name:22} {mutant.promise:46} {found}", flush=True)
    print(
        f"sim-mutants: {total} mutants, {total - len(survivors)} found, {len(survivors)} survived"
    )
    return int(bool(survivors))


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:
        # The order of sets of text depends on it; with it fixed, every process replays alike.
        command = [sys.executable, "-m", "penstock.testing.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
    raise SystemExit(main())

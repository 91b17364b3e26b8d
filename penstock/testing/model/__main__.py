"""The command line of the model test.

python -m penstock.testing.model --seeds 100 --engine folder      sequences; exits 1 on a contradiction
python -m penstock.testing.model --seed 7 --engine mem            one of them, every call printed
python -m penstock.testing.model --faults                         break a promise each, expect it found
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from penstock.testing.model.faults import hunt_all
from penstock.testing.model.found import Found
from penstock.testing.model.harness import ENGINES, runs_on
from penstock.testing.model.run import Attempt, run, shortest
from penstock.testing.model.sequence import Draw, Sequence

LENGTH = 60


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 0 when no contradiction was found."""
    parser = argparse.ArgumentParser("model", description="Compare engines with their documents.")
    parser.add_argument("--engine", choices=ENGINES, default="mem")
    parser.add_argument("--seeds", type=int, default=20, help="how many sequences")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="one seed, with every call printed")
    parser.add_argument("--length", type=int, default=LENGTH, help="steps of a sequence")
    parser.add_argument(
        "--no-shrink", action="store_true", help="print a failing sequence as it is"
    )
    parser.add_argument("--faults", action="store_true", help="break each promise on purpose")
    options = parser.parse_args(arguments)
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    try:
        if options.faults:
            return _faults()
        return _seeds(options.engine, range(first, first + count), options)
    except KeyboardInterrupt:
        print("model: stopped")
        return 130


def _seeds(engine: str, seeds: range, options: argparse.Namespace) -> int:
    began, counts = time.monotonic(), Counter[str]()
    with runs_on(engine) as runs:

        def attempt(sequence: Sequence) -> Found | None:
            return run(runs(sequence.seed), sequence)

        for number, seed in enumerate(seeds, 1):
            draw = Draw(seed, runs(seed).cannot, quick=engine == "broker")
            sequence = draw.sequence(options.length)
            found = attempt(sequence)
            if found is None:
                counts["kept"] += 1
            else:
                counts["contradicted"] += 1
                _tell(found, attempt, shorten=not options.no_shrink)
            if sys.stdout.isatty() or number % 20 == 0:
                print(
                    f"model: {engine} {number} of {len(seeds)} sequences, {_told(counts)}",
                    flush=True,
                )
    print(f"model: {engine}: {len(seeds)} sequences of {options.length} steps in "
          f"{time.monotonic() - began:.0f} s: {_told(counts)}")  # fmt: skip
    return int(counts["contradicted"] > 0)


def _faults() -> int:
    missed = 0
    for fault, found, count in hunt_all():
        missed += found is None
        said = f"after {count} sequences" if found is None else f"in sequence {count}"
        print(
            f"{fault.name:16} {fault.promise:40} {'NOT FOUND' if found is None else 'found'} {said}",
            flush=True,
        )
    print(f"model: {missed} of the planted faults were not found")
    return int(missed > 0)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def _tell(found: Found, attempt: Attempt, *, shorten: bool) -> None:
    print(f"model: CONTRADICTION with seed {found.sequence.seed} at {found.step}", flush=True)
    if shorten:
        found = shortest(found, attempt)
    print(found.script(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

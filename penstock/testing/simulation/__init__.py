"""The simulator: proof by seeded accident that the engine keeps its promises.

`run(seed)` lives through a seed; `python -m penstock.testing.simulation` does so for many, hunts
mutants and kills real processes. docs/guide/simulation.md explains what it does and checks.
"""

from penstock.testing.simulation.oracle import Finding
from penstock.testing.simulation.plan import Plan, shrunk
from penstock.testing.simulation.report import Report, run

__all__ = ["Finding", "Plan", "Report", "run", "shrunk"]

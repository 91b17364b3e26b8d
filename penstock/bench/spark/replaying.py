"""How long it takes to prove that a replay gives what the first run gave."""

from __future__ import annotations

import time
from collections.abc import Mapping

from penstock.bench.cases.workload import expect
from penstock.bench.measure import Sample
from penstock.bench.result import OURS
from penstock.bench.spark.case import Side
from penstock.bench.spark.stage import Stage, timed
from penstock.model.errors import PenstockError
from penstock.pipelines.builtin.replay_compare import SETTLED_S
from penstock.pipelines.pipeline import find
from penstock.pipelines.run import Route, run_batch


def replay_compare(stage: Stage, rows: int) -> Mapping[str, Side]:
    """The pipeline `replay-compare` on a log: the first turn keeps the hash, the others must equal it."""
    log, file = stage.log(rows), stage.folder / f"replay-{rows}.json"
    made = find("replay-compare")
    time.sleep(SETTLED_S)  # what is younger is left out

    def ours(turn: int) -> Sample:
        verdict = ""

        def run() -> None:
            nonlocal verdict
            frame = run_batch(made, stage.spark, Route(url=log), {"file": str(file)})
            (row,) = frame.collect()
            expect(row["rows"], rows, "hashed")
            verdict = row["verdict"]

        first = not file.exists()
        sample = timed(run, rows)
        if verdict != ("kept" if first else "equal"):
            raise PenstockError(f"the replay was {verdict!r}")
        return sample

    return {OURS: ours}

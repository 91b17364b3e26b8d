"""Random sequences of public calls, compared with a model made from the documents (issue 21).

`python -m penstock.testing.model --engine folder --seed 7` prints one of them; `tools/soak model` runs many.
"""

from collections.abc import Iterator

import pytest

from penstock.testing.model.faults import FAULTS, hunt
from penstock.testing.model.harness import BrokerRuns, runs_on
from penstock.testing.model.known import KNOWN
from penstock.testing.model.reference import Model
from penstock.testing.model.run import run, shortest
from penstock.testing.model.sequence import Draw, Step
from penstock.testing.simulation.mutant import Mutant

LENGTH = 60
EMBEDDED_SEEDS = {"mem": range(1, 31), "folder": range(101, 116)}
BROKER_SEEDS = (1, 3)
BROKER_LENGTH = 25


@pytest.mark.parametrize("engine", ["mem", "folder"])
def test_sequences_are_as_the_documents_say(engine: str) -> None:
    with runs_on(engine) as runs:
        for seed in EMBEDDED_SEEDS[engine]:
            found = run(runs(seed), Draw(seed, runs(seed).cannot).sequence(LENGTH))
            assert found is None, found.script()


@pytest.fixture(scope="module")
def brokers() -> Iterator[BrokerRuns]:
    with BrokerRuns() as brokers:
        yield brokers


@pytest.mark.parametrize("seed", BROKER_SEEDS)
def test_sequences_over_a_broker_are_as_the_documents_say(brokers: BrokerRuns, seed: int) -> None:
    found = run(brokers(seed), Draw(seed, quick=True).sequence(BROKER_LENGTH))
    assert found is None, found.script()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Mutant) -> None:
    found, _ = hunt(fault)
    assert found is not None, f"nothing noticed that this is broken: {fault.promise}"


def test_a_seed_gives_the_same_sequence_and_the_same_run() -> None:
    first, second = Draw(5).sequence(LENGTH), Draw(5).sequence(LENGTH)
    assert first == second
    assert Draw(6).sequence(LENGTH).steps != first.steps


def test_a_contradiction_is_told_as_a_short_program() -> None:
    fault = next(each for each in FAULTS if each.name == "headers")
    found, _ = hunt(fault)
    assert found is not None
    with runs_on("mem") as runs, fault.alive():
        short = shortest(found, lambda sequence: run(runs(sequence.seed), sequence))
    assert len(short.sequence.steps) < len(found.sequence.steps) / 4
    script = short.script()
    compile(script, "script", "exec")
    assert "await bus.publish" in script
    assert "expected: headers" in script


def test_steps_that_have_nothing_to_work_on_do_nothing() -> None:
    with runs_on("mem") as runs:
        sequence = Draw(1).sequence(1)
        lonely = tuple(
            Step(kind, getattr(Draw(1), kind)()) for kind in ("settle", "leave", "drop", "get")
        )
        assert run(runs(1), type(sequence)(1, "s1", sequence.groups, lonely)) is None


def test_what_is_excused_names_its_finding_and_reason() -> None:
    assert all(known.finding and known.reason and known.engines for known in KNOWN)
    assert Model(0.1).excused == frozenset()

"""`CommitQueue` fills a commit by turns of tenants: a flood of one costs the others one quantum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.embedded.batching import COMPANY_BYTES, CommitQueue


class Job:
    """As much of a submission as `CommitQueue` looks at."""

    def __init__(self, tenant: str, size: int, patience_s: float = 0.0) -> None:
        self.tenant = tenant
        self.size = size
        self.patience_s = patience_s


def fits(job: Job, size: int) -> bool:
    return True


def fill(queue: CommitQueue, *jobs: tuple[str, int]) -> None:
    for tenant, size in jobs:
        queue.add(Job(tenant, size))  # type: ignore[arg-type]


def take(
    queue: CommitQueue, budget: int = 100, quantum: int = 10, fits=fits
) -> list[tuple[str, int]]:
    return [(job.tenant, job.size) for job in queue.take(budget, quantum, fits)]


def test_a_flood_of_one_tenant_takes_one_quantum_of_a_shared_commit() -> None:
    queue = CommitQueue()
    fill(queue, *[("noisy", 5)] * 1_000, ("quiet", 5), ("calm", 5))
    taken = take(queue)
    assert taken.count(("noisy", 5)) == 2
    assert ("quiet", 5) in taken
    assert ("calm", 5) in taken


def test_alone_a_tenant_gets_the_whole_budget() -> None:
    queue = CommitQueue()
    fill(queue, *[("noisy", 5)] * 1_000)
    assert len(take(queue)) == 20


def test_a_submission_over_the_quantum_or_the_budget_still_goes_in_its_turn() -> None:
    queue = CommitQueue()
    fill(queue, ("a", 50), ("b", 5))
    assert take(queue) == [("a", 50), ("b", 5)]
    fill(queue, ("a", 500))
    assert take(queue) == [("a", 500)]


def test_who_had_a_turn_goes_to_the_back() -> None:
    queue = CommitQueue()
    fill(queue, ("a", 60), ("a", 60), ("b", 60), ("c", 60))
    order = []
    while queue:
        order += [tenant for tenant, _ in take(queue)]
    assert order == ["a", "b", "c", "a"]


def test_what_does_not_fit_stays() -> None:
    queue = CommitQueue()
    fill(queue, ("a", 5), ("a", 6))
    assert take(queue, fits=lambda job, size: size <= 5) == [("a", 5)]
    assert take(queue, fits=lambda job, size: False) == []
    assert queue.bytes == 6
    assert queue.first_size() == 6
    assert [job.size for job in queue.drop()] == [6]
    assert (queue.bytes, bool(queue), queue.first_size()) == (0, False, 0)


def test_the_patient_wait_for_company_and_do_not_make_it_large() -> None:
    """T11: a tenant ahead of its rate costs others no sync of its own."""
    queue = CommitQueue()
    patient = [Job("ahead", 1_000, patience_s=1.0) for _ in range(200)]
    for job in patient:
        queue.add(job)  # type: ignore[arg-type]
    assert not queue.presses()
    fill(queue, ("calm", 5))
    assert queue.presses()
    assert not queue.presses({"calm"})
    assert queue.first_size() == 5
    taken = take(queue, budget=1 << 30, quantum=1 << 30)
    assert taken[0] == ("calm", 5), "who does not wait comes first"
    assert COMPANY_BYTES - 1_000 <= sum(size for _, size in taken) <= COMPANY_BYTES
    assert not queue.presses()
    patient[-1].patience_s = 0.0
    assert queue.presses(), "what is before it goes with it"
    assert len(take(queue, budget=1 << 30)) == 201 - len(taken)


def test_what_is_patient_and_large_goes_alone_when_nobody_comes() -> None:
    queue = CommitQueue()
    fill(queue, ("calm", 5))
    large = Job("ahead", 2 * COMPANY_BYTES, patience_s=1.0)
    queue.add(large)  # type: ignore[arg-type]
    assert take(queue) == [("calm", 5)]
    large.patience_s = 0.0
    assert take(queue) == [("ahead", 2 * COMPANY_BYTES)]


JOBS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=40)


@given(JOBS, st.integers(1, 60), st.integers(1, 20))
def test_everything_is_taken_once_in_order_per_tenant(jobs, budget, quantum) -> None:
    queue = CommitQueue()
    fill(queue, *jobs)
    taken, commits = [], 0
    while queue:
        commit = take(queue, budget, quantum)
        assert commit, "a commit without anything in it"
        assert sum(size for _, size in commit) <= max(budget, commit[0][1])
        taken += commit
        commits += 1
        assert commits <= len(jobs)
    assert queue.bytes == 0
    for tenant in "abcd":
        mine = [job for job in jobs if job[0] == tenant]
        assert [job for job in taken if job[0] == tenant] == mine

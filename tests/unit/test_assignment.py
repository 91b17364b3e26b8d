"""Assignment and rebalance: fair plans, few moves, never two holders, stale commits fenced (Q6)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.core import assignment as module
from penstock.core.assignment import Changes, Rebalance, assign
from penstock.model.errors import Deferred, Fenced, InvalidSettings

MEMBERS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@pytest.mark.parametrize("strategy", ["range", "modulo", "sticky"])
@given(count=st.integers(0, 40), members=MEMBERS)
def test_every_partition_goes_to_one_member_in_even_shares(
    strategy: str, count: int, members: list[str]
) -> None:
    plan = assign(range(count), members, strategy)  # type: ignore[arg-type]
    assert sorted(plan) == sorted(members)
    if not members:
        return
    assert sorted(p for mine in plan.values() for p in mine) == list(range(count))
    sizes = [len(mine) for mine in plan.values()]
    assert max(sizes) - min(sizes) <= 1
    assert plan == assign(range(count), members[::-1], strategy)  # type: ignore[arg-type]


def test_range_keeps_neighbours_together_and_modulo_deals_out() -> None:
    assert assign(list("pqrst"), ["b", "a"], "range") == {"a": list("pqr"), "b": list("st")}
    assert assign(list("pqrst"), ["b", "a"], "modulo") == {"a": list("prt"), "b": list("qs")}


@given(
    count=st.integers(0, 30),
    members=MEMBERS.filter(bool),
    owners=st.lists(st.sampled_from("abcdefgh-"), min_size=30, max_size=30),
)
def test_sticky_moves_as_few_as_any_even_plan_could(
    count: int, members: list[str], owners: list[str]
) -> None:
    """With the sizes given, keeping min(held, share) each is the most anyone can keep."""
    previous = {name: [p for p in range(30) if owners[p] == name] for name in "abcdefgh"}
    plan = assign(range(count), members, "sticky", previous)
    held = {name: {p for p in previous[name] if p < count} for name in members}
    share, extra = divmod(count, len(members))
    most = sum(min(len(mine), share) for mine in held.values())
    most += min(extra, sum(1 for mine in held.values() if len(mine) > share))
    assert sum(len(held[name] & set(plan[name])) for name in members) == most


def test_sticky_survives_nonsense_in_the_past() -> None:
    previous = {"a": [1, 1, 99], "b": [1, 2], "gone": [3]}
    assert assign([1, 2, 3, 4], ["a", "b"], "sticky", previous) == {"a": [1, 3], "b": [2, 4]}


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InvalidSettings):
        assign([1, 1], ["a"])
    with pytest.raises(InvalidSettings):
        assign([1], ["a", "a"])
    with pytest.raises(InvalidSettings) as caught:
        assign([1], ["a"], "random")  # type: ignore[arg-type]
    assert caught.value.strategy == "random"
    with pytest.raises(InvalidSettings):
        Rebalance([1, 1])


def test_a_partition_moves_only_after_its_holder_let_go() -> None:
    group: Rebalance[int] = Rebalance([0, 1, 2, 3])
    first = group.join("a", 0.0)
    assert (first.generation, first.grant) == (1, {"a": [0, 1, 2, 3]})
    second = group.join("b", 1.0)
    assert (second.generation, second.revoke, second.grant) == (2, {"a": [2, 3]}, {})
    assert group.held() == {"a": [0, 1, 2, 3], "b": []}
    # What is still held may be committed with the generation it was granted in.
    group.check("a", 2, 1)
    assert group.revoked("a", [2], 1.5).grant == {"b": [2]}
    group.check("b", 2, 2)
    group.check("a", 3, 2)
    for stale in (("a", 2, 1), ("a", 2, 2), ("b", 2, 1), ("b", 3, 2), ("b", 2, 3), ("a", 9, 1)):
        with pytest.raises(Fenced):
            group.check(*stale)
    assert group.revoked("a", [3], 1.6).grant == {"b": [3]}


def test_a_holder_that_never_lets_go_is_overruled_when_its_time_is_up() -> None:
    group: Rebalance[int] = Rebalance([0, 1], lease_s=10.0)
    group.join("a", 0.0)
    group.join("b", 1.0)
    group.heartbeat("a", 9.0)
    group.heartbeat("b", 9.0)
    assert group.next_due_s() == 11.0
    assert group.tick(10.9).grant == {}
    assert group.tick(11.0).grant == {"b": [1]}
    with pytest.raises(Fenced) as caught:
        group.check("a", 1, 1)
    assert (caught.value.generation, caught.value.current_generation) == (1, 2)
    # A confirmation that comes too late changes nothing.
    assert group.revoked("a", [1], 12.0).grant == {}
    assert group.held() == {"a": [0], "b": [1]}


def test_a_silent_member_is_out_and_must_join_again() -> None:
    group: Rebalance[int] = Rebalance([0, 1], lease_s=10.0)
    group.join("a", 0.0)
    group.join("b", 0.0)
    group.revoked("a", [1], 0.0)
    group.heartbeat("b", 5.0)
    changes = group.tick(10.0)
    assert (changes.expelled, changes.grant) == (["a"], {"b": [0]})
    for call in (
        lambda: group.heartbeat("a", 11.0),
        lambda: group.revoked("a", [0], 11.0),
        lambda: group.leave("a", 11.0),
        lambda: group.expired("a", 11.0),
        lambda: group.check("a", 0, 1),
    ):
        with pytest.raises(Fenced):
            call()
    assert group.members == ["b"]


def test_leaving_frees_at_once_and_expiry_does_too() -> None:
    group: Rebalance[int] = Rebalance([0, 1])
    group.join("a", 0.0)
    group.join("b", 0.0)
    left = group.leave("a", 1.0)
    assert (left.generation, left.grant, left.expelled) == (3, {"b": [0, 1]}, [])
    gone = group.expired("b", 2.0)
    assert (gone.expelled, gone.grant, group.held()) == (["b"], {}, {})
    assert group.next_due_s() is None
    assert group.join("c", 3.0).grant == {"c": [0, 1]}


def test_a_name_that_joins_again_fences_its_earlier_life() -> None:
    group: Rebalance[int] = Rebalance([0])
    group.join("a", 0.0)
    assert group.join("a", 1.0).grant == {"a": [0]}
    group.check("a", 0, 2)
    with pytest.raises(Fenced):
        group.check("a", 0, 1)


def test_a_plan_that_turns_back_grants_anew() -> None:
    group: Rebalance[int] = Rebalance([0, 1])
    group.join("a", 0.0)
    group.join("b", 1.0)
    assert group.leave("b", 2.0).revoke == {}
    assert group.revoked("a", [1], 3.0).grant == {"a": [1]}
    group.check("a", 1, 3)
    with pytest.raises(Fenced):
        group.check("a", 1, 2)


def test_a_topic_that_grows_or_goes() -> None:
    group: Rebalance[str] = Rebalance(["t0"])
    group.join("a", 0.0)
    group.join("b", 0.0)
    assert group.repartition(["t0", "t1"], 1.0).grant == {"b": ["t1"]}
    assert group.repartition(["t1"], 2.0).revoke == {"a": ["t0"]}
    with pytest.raises(Fenced):
        group.check("a", "t0", 4)


def test_generations_go_on_after_a_restart() -> None:
    group: Rebalance[int] = Rebalance([0], generation=41)
    assert group.join("a", 0.0).generation == 42
    with pytest.raises(Fenced):
        group.check("a", 0, 41)


def test_the_number_of_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MEMBERS", 1)
    group: Rebalance[int] = Rebalance([0])
    group.join("a", 0.0)
    group.join("a", 0.0)
    with pytest.raises(Deferred) as caught:
        group.join("b", 0.0)
    assert caught.value.limit == "max_members"


class NeverTwoHolders(RuleBasedStateMachine):
    """Members do as they please; each keeps its own view, as a distributed member would."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.group: Rebalance[int] = Rebalance(range(5), lease_s=10.0)
        self.views: dict[str, dict[int, int]] = {}
        self.asked: dict[str, set[int]] = {}
        self.generation = 0

    def tell(self, changes: Changes[int]) -> None:
        assert changes.generation >= self.generation
        self.generation = changes.generation
        for name in changes.expelled:
            self.views.pop(name, None)
        for name, partitions in changes.revoke.items():
            self.asked.setdefault(name, set()).update(partitions)
        for name, partitions in changes.grant.items():
            for partition in partitions:
                self.views.setdefault(name, {})[partition] = changes.generation
                self.asked.get(name, set()).discard(partition)

    @rule(name=st.sampled_from("abcd"))
    def join(self, name: str) -> None:
        self.views[name] = {}
        self.asked[name] = set()
        self.tell(self.group.join(name, self.now))

    @rule(name=st.sampled_from("abcd"), crash=st.booleans())
    def go(self, name: str, crash: bool) -> None:
        if name in self.group.members:
            self.views.pop(name, None)
            self.tell((self.group.expired if crash else self.group.leave)(name, self.now))

    @rule(name=st.sampled_from("abcd"))
    def let_go(self, name: str) -> None:
        if name in self.group.members and self.asked.get(name):
            partitions = self.asked.pop(name)
            for partition in partitions:
                self.views[name].pop(partition, None)
            self.tell(self.group.revoked(name, partitions, self.now))

    @rule(by=st.floats(0, 6), alive=st.sets(st.sampled_from("abcd")))
    def wait(self, by: float, alive: set[str]) -> None:
        self.now += by
        for name in alive & set(self.group.members):
            self.group.heartbeat(name, self.now)
        self.tell(self.group.tick(self.now))

    @invariant()
    def at_most_one_may_commit(self) -> None:
        for partition in range(5):
            accepted = []
            for name, view in self.views.items():
                if partition in view:
                    try:
                        self.group.check(name, partition, view[partition])
                        accepted.append(name)
                    except Fenced:
                        pass
            assert len(accepted) <= 1

    @invariant()
    def every_partition_has_a_holder_when_anyone_is_there(self) -> None:
        held = [p for mine in self.group.held().values() for p in mine]
        assert sorted(held) == (list(range(5)) if self.group.members else [])

    @invariant()
    def a_holder_that_was_not_asked_may_commit(self) -> None:
        for name, mine in self.group.held().items():
            for partition in set(mine) - self.asked.get(name, set()):
                self.group.check(name, partition, self.views[name][partition])


NeverTwoHolders.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNeverTwoHolders = NeverTwoHolders.TestCase
